"""On-policy distillation on a CPU in about a minute: a tiny student learns from the scores that a tiny teacher gives to its tokens.

    python examples/train/distill.py

    rollouts → gateway → feed → teacher (the same ids, log-probabilities of the sampled tokens) → trainer with `teacher_kl`

Both models write random letters, and prefer different ones. The student learns only from the teacher's scores, and ends up writing what
the teacher would write. With real models, set `TeacherConfig(engine="vllm", url=…, model=…)` and run agents instead of `run_rollout`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import aiohttp
import torch

from turngate.client.feed import Feed
from turngate.client.gateway import GatewayClient
from turngate.client.protocol import FeedConfig
from turngate.config import ServeConfig
from turngate.engines.local import LocalEngine, load, save
from turngate.engines.local.shape import read_shape
from turngate.engines.local.weights import create_random_model
from turngate.render import BUILTIN_TOKENIZER, Tokenizer
from turngate.server.run import run_embedded
from turngate.store.outcomes import RecordedOutcome
from turngate.trainers.local.grpo import GrpoSettings, Step, Trainer
from turngate.trainers.teacher import FeedTeacher, TeacherConfig

QUESTIONS = ("What is a gateway?", "Name a color.", "Count to three.", "Write a word.")
GROUP = 4  # rollouts of each question
STEPS = 12
LETTERS = "abcdefgh"


def create_model(folder: Path, seed: int) -> Path:
    """Create a random model with the built-in tokenizer. It answers with a few letters, and prefers some letters to others."""
    shutil.copytree(BUILTIN_TOKENIZER, folder)
    tokenizer = Tokenizer(folder)
    config = {
        "model_type": "qwen3",
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    model = create_random_model(read_shape(folder), seed=seed)
    letters = [tokenizer.encode(letter)[0] for letter in LETTERS]
    assert model.output is not None, "the embedding is not tied"
    model.embedding.weight.data[:, 0] = 1.0  # makes the first feature nearly constant, so that it acts as a bias
    model.output.weight.data[:, 0] = -2.0
    model.output.weight.data[letters, 0] = 2.0 + 0.3 * torch.randn(len(letters))
    save(model, folder)
    return folder


async def run_rollout(gateway: GatewayClient, group: str, question: str, number: int) -> None:
    """Ask one question, in place of an agent. The reward is not used, but a feed delivers only graded rollouts."""
    seed = zlib.crc32(f"{group}.{number}".encode())  # the same run again samples the same tokens
    session = await gateway.open({"metadata": {"group": group}, "sampling": {"seed": seed}})
    body = {"model": "student", "messages": [{"role": "user", "content": question}], "max_tokens": 24}
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {session.key}"}, raise_for_status=True) as http:
        await http.post(f"{gateway.url}/v1/chat/completions", json=body)
    await gateway.seal(session.id)
    await gateway.record(session.id, RecordedOutcome(kind="graded", reward=0.0, group=group, task=question))


async def distill(folder: Path, steps: int, watch: Callable[[Step], None]) -> tuple[Path, Path, Path]:
    """Train a student on a teacher's scores. Return the folders of the student before and after training, and of the teacher."""
    student, teacher_folder = create_model(folder / "student", seed=1), create_model(folder / "teacher", seed=2)
    engine = LocalEngine(load(student), slots=16)
    config = ServeConfig(data=str(folder / "data"), tokenizer=str(student), model="student", port=0)
    teacher_config = TeacherConfig(engine="local", model=str(teacher_folder))
    settings = GrpoSettings(groups=len(QUESTIONS), learning_rate=5e-3, teacher_kl=1.0, reward_weight=0.0)
    async with (
        run_embedded(config, engine=engine) as address,
        GatewayClient(address.url, address.admin_key) as gateway,
    ):
        trainer = Trainer(engine, gateway, settings, watch=watch)
        await trainer.restore()
        with FeedTeacher(teacher_config, policy_tokenizer=student) as teacher:
            async with await Feed.open(gateway, "distill", FeedConfig(n=GROUP), teacher=teacher) as feed:
                for step in range(1, steps + 1):
                    groups = [(f"{step}.{n}", question) for n, question in enumerate(QUESTIONS)]
                    rollouts = [(*group, number) for group in groups for number in range(GROUP)]
                    await asyncio.gather(*(run_rollout(gateway, *rollout) for rollout in rollouts))
                    await trainer.run(feed, step)
    save(engine.model, folder / "distilled", source=student)
    return student, folder / "distilled", teacher_folder


def main() -> None:
    def print_step(step: Step) -> None:
        print(f"step {step.step:2}: {step.measured.teacher_divergence:.2f} nats per token from the teacher", flush=True)

    with tempfile.TemporaryDirectory(prefix="turngate-distill-") as folder:
        asyncio.run(distill(Path(folder), STEPS, print_step))


if __name__ == "__main__":
    main()
