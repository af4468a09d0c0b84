"""Run the TRL examples on a CPU, without vLLM and flash attention, to try them out and to test them.

    patch_trl()                              replace the two parts of TRL's trainer that need a GPU
    make_model(folder)                       make a tiny Qwen3 with random weights, which samples quickly
    with run_gateway(model, name) as local:  run a gateway with a transformers model as its engine, in this process
        local.url, local.key, local.policy

Only the engine and the attention are replaced. Agent, sandbox, gateway, trace, feed, and TRL's trainer and optimizer are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from turngate.config import ServeConfig
from turngate.engines.gate import Gate, GateCall
from turngate.errors import Gone
from turngate.render import BUILTIN_TOKENIZER
from turngate.server.run import run_embedded, run_in_thread

CONTEXT = 8192
CONCURRENT_CALLS = 2


# ── TRL ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def patch_trl() -> None:
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)


def varlen_attention(query, key, value, cu_q, cu_k, max_q, max_k, *, softmax_scale=None, causal=True, **others):
    """Compute attention over segments of different lengths in plain torch, one segment after another."""
    repeat = query.shape[1] // key.shape[1]
    result = torch.empty_like(query)
    for n in range(len(cu_q) - 1):
        q = query[cu_q[n] : cu_q[n + 1]].transpose(0, 1)
        k, v = (part[cu_k[n] : cu_k[n + 1]].repeat_interleave(repeat, 1).transpose(0, 1) for part in (key, value))
        # The queries belong to the last positions of the keys.
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale)
        result[cu_q[n] : cu_q[n + 1]] = out.transpose(0, 1)
    return result


# ── the model ───────────────────────────────────────────────────────────────────────────────────────────────────────


def make_model(folder: Path) -> Path:
    """Make a tiny model with random weights and Turngate's built-in tokenizer, which has a small vocabulary.

    The text it samples rarely encodes to the same tokens again, so inexact token handling would be noticed.
    """
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
    config_json = json.loads((BUILTIN_TOKENIZER / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config_json | {"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return folder


# ── the engine ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Policy:
    """Answers the gate's calls with its own copy of the model, and receives the trainer's weights when they change."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.error: BaseException | None = None  # why it stopped answering
        self._in_use = threading.Lock()

    async def serve(self, gate: Gate) -> None:
        slots = asyncio.Semaphore(CONCURRENT_CALLS)

        async def answer(call: GateCall) -> None:
            async with slots, call:
                sampled = await asyncio.to_thread(self._sample, call)
                with suppress(Gone):  # the agent closed the connection
                    await call.answer(*sampled)

        async with asyncio.TaskGroup() as tasks:
            async for call in gate:
                tasks.create_task(answer(call))

    @torch.no_grad()
    def _sample(self, call: GateCall) -> tuple[list[int], list[float], str]:
        ids, logprobs, past = [], [], None
        new_ids = torch.tensor(call.prompt, dtype=torch.long)[None]
        while len(ids) < call.max_tokens:
            with self._in_use:
                out = self.model(new_ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            past = out.past_key_values
            log_distribution = torch.log_softmax(out.logits[0, -1] / call.sampling.temperature, -1)
            token = torch.multinomial(log_distribution.exp(), 1)
            ids.append(int(token))
            logprobs.append(float(log_distribution[token]))
            if ids[-1] in call.stop_ids:
                return ids, logprobs, "stop"
            new_ids = token[None]
        return ids, logprobs, "length"

    # The interface of TRL's weight transfer

    def init_weight_transfer(self) -> None:
        pass

    def pause(self) -> None:
        self._in_use.acquire()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        own = self.model.state_dict()
        for name, tensor in iterator:
            own[name].copy_(tensor)

    def resume(self) -> None:
        self._in_use.release()

    def destroy(self) -> None:
        if self._in_use.locked():
            self._in_use.release()


@dataclass(frozen=True)
class LocalGateway:
    """A gateway in this process, and the policy behind it."""

    url: str
    key: str
    data: Path
    policy: Policy


@contextmanager
def run_gateway(model: Path, name: str) -> Iterator[LocalGateway]:
    """Run a gateway for the duration of the block, in a thread of its own. If its policy fails, so does the block."""
    with (
        tempfile.TemporaryDirectory(prefix="turngate-trl-") as data,
        run_in_thread(_serve(model, name, Path(data))) as gateway,
    ):
        try:
            yield gateway
        except KeyboardInterrupt:
            if gateway.policy.error is None:
                raise
            raise RuntimeError(f"the policy stopped answering: {gateway.policy.error!r}") from gateway.policy.error


@asynccontextmanager
async def _serve(model: Path, name: str, data: Path) -> AsyncIterator[LocalGateway]:
    policy, gate = Policy(model), Gate(model=name, max_context=CONTEXT)
    config = ServeConfig(data=str(data), port=0, model=name, tokenizer=str(model), engine="gate").check()
    async with run_embedded(config, engine=gate) as address:
        serving = asyncio.create_task(policy.serve(gate))
        serving.add_done_callback(lambda task: _interrupt_program(policy, task))
        try:
            yield LocalGateway(address.url, address.admin_key, data, policy)
        finally:
            serving.cancel()


def _interrupt_program(policy: Policy, serving: asyncio.Task[None]) -> None:
    """Interrupt the main thread if the policy failed, because it would otherwise wait forever for calls that are never answered."""
    if serving.cancelled() or (error := serving.exception()) is None:
        return
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    policy.error = error
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
