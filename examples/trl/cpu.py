"""What lets the examples run on a CPU, without vLLM and without flash attention: for trying things out, and for the tests.

    patch_trl()                         TRL's trainer asks for a GPU in two places
    make_model(folder)                  a tiny Qwen3 with random weights: it has learned nothing, and samples quickly
    with stage(model, name) as stage:   a gateway in this process, whose engine is a transformers model in this process
        stage.url, stage.key, stage.transfer

Only the engine and the attention are stand-ins. Agent, sandbox, gateway, trace, feed, TRL's trainer and its optimizer are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from turngate.common.loop_thread import LoopThread
from turngate.config import ServeConfig
from turngate.engines.gate import Gate, GateCall
from turngate.errors import Gone
from turngate.render import BUILTIN_TOKENIZER
from turngate.server.run import run_embedded

CONTEXT = 8192
AT_ONCE = 2  # calls that are answered beside each other


# ── TRL ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def patch_trl() -> None:
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)


def varlen_attention(query, key, value, cu_q, cu_k, max_q, max_k, *, softmax_scale=None, causal=True, **others):
    """Attention over segments of different lengths, each of which sees its own keys: in plain torch, one after the other."""
    repeat = query.shape[1] // key.shape[1]
    found = torch.empty_like(query)
    for n in range(len(cu_q) - 1):
        q = query[cu_q[n] : cu_q[n + 1]].transpose(0, 1)
        k, v = (part[cu_k[n] : cu_k[n + 1]].repeat_interleave(repeat, 1).transpose(0, 1) for part in (key, value))
        # The queries are the last of the keys.
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale)
        found[cu_q[n] : cu_q[n + 1]] = out.transpose(0, 1)
    return found


# ── the model ───────────────────────────────────────────────────────────────────────────────────────────────────────


def make_model(folder: Path) -> Path:
    """With Turngate's builtin tokenizer, whose vocabulary is small. What it samples would hardly ever tokenise the same again."""
    torch.manual_seed(0)
    tokenizer = json.loads((BUILTIN_TOKENIZER / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    end, pad = ids["<|im_end|>"], ids["<|endoftext|>"]
    config = Qwen3Config(
        vocab_size=1 + max([*tokenizer["model"]["vocab"].values(), *ids.values()]),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.1,
        eos_token_id=end,
        pad_token_id=pad,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    model.save_pretrained(folder)
    for file in BUILTIN_TOKENIZER.iterdir():
        shutil.copyfile(file, folder / file.name)
    told = json.loads((BUILTIN_TOKENIZER / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(told | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


# ── the engine ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Policy:
    """Answers the gate's calls with a model of its own, and is given the trainer's weights when they change."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._using = threading.Lock()

    async def serve(self, gate: Gate) -> None:
        places = asyncio.Semaphore(AT_ONCE)

        async def answered(call: GateCall) -> None:
            async with places, call:
                answer = await asyncio.to_thread(self._sample, call)
                with suppress(Gone):  # the agent hung up
                    await call.answer(*answer)

        async with asyncio.TaskGroup() as tasks:
            async for call in gate:
                tasks.create_task(answered(call))

    @torch.no_grad()
    def _sample(self, call: GateCall) -> tuple[list[int], list[float], str]:
        ids, scores, past = [], [], None
        given = torch.tensor(call.prompt, dtype=torch.long)[None]
        while len(ids) < call.max_tokens:
            with self._using:
                out = self.model(given, past_key_values=past, use_cache=True, logits_to_keep=1)
            past = out.past_key_values
            logs = torch.log_softmax(out.logits[0, -1] / call.sampling.temperature, -1)
            drawn = torch.multinomial(logs.exp(), 1)
            ids.append(int(drawn))
            scores.append(float(logs[drawn]))
            if ids[-1] in call.stop_ids:
                return ids, scores, "stop"
            given = drawn[None]
        return ids, scores, "length"

    # TRL's weight transfer

    def init_weight_transfer(self) -> None:
        pass

    def pause(self) -> None:
        self._using.acquire()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        own = self.model.state_dict()
        for name, tensor in iterator:
            own[name].copy_(tensor)

    def resume(self) -> None:
        self._using.release()

    def destroy(self) -> None:
        if self._using.locked():
            self._using.release()


@dataclass(frozen=True)
class Stage:
    url: str
    key: str
    data: Path
    transfer: Policy


@contextmanager
def stage(model: Path, name: str) -> Iterator[Stage]:
    """A gateway for as long as the block runs."""
    thread = LoopThread("gateway")
    with tempfile.TemporaryDirectory(prefix="turngate-trl-") as data:
        policy, gate = Policy(model), Gate(model=name, max_context=CONTEXT)
        config = ServeConfig(data=data, port=0, model=name, tokenizer=str(model), engine="gate").check()
        running = run_embedded(config, engine=gate)
        thread.start()
        try:
            address = thread.run(running.__aenter__())
            thread.spawn(policy.serve(gate))
            yield Stage(address.url, address.admin_key, Path(data), policy)
        finally:
            thread.run(running.__aexit__(None, None, None))
            thread.stop()
