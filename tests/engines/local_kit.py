"""Shared helpers for the local engine's tests: a random model small enough to run in a millisecond.

Importing this skips the test module when torch is missing; in CI it fails instead.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

try:
    import torch
except ModuleNotFoundError:
    if os.environ.get("CI") == "true":
        raise
    pytest.skip("torch is not installed (run: make setup)", allow_module_level=True)

from turngate.engines.base import Generate
from turngate.engines.local import LocalEngine, Model
from turngate.engines.local.shape import Rope, Shape
from turngate.engines.local.weights import create_random_model
from turngate.types import ID_DTYPE, Sampling

torch.set_num_threads(1)  # the model is too small to benefit from threads
SHAPE = Shape(
    kind="qwen3",
    vocabulary=300,
    hidden=32,
    inner=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head=16,
    epsilon=1e-6,
    context=256,
    rope=Rope(),
    tied=True,
    qkv_bias=False,
    out_bias=False,
    inner_bias=False,
    head_norm=True,
)


def model(seed: int = 0, **shape: Any) -> Model:
    """Make a random model whose distributions are neither flat nor peaked."""
    made = create_random_model(msgspec.structs.replace(SHAPE, **shape), seed=seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(12)
    return made


@asynccontextmanager
async def start_engine(made: Model | None = None, **options: Any) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(made or model(), **({"slots": 4, "flush_s": 0.0} | options))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


class Reply(NamedTuple):
    ids: list[int]
    logprobs: list[float]
    finish: str | None
    chunks: int


def make_request(prompt: Sequence[int], tokens: int = 16, stop_ids: tuple[int, ...] = (), **sampling: Any) -> Generate:
    return Generate(
        prompt=np.array(prompt, ID_DTYPE), max_tokens=tokens, sampling=Sampling(**sampling), stop_ids=stop_ids
    )


async def generate(engine: LocalEngine, request: Generate) -> Reply:
    """Run one call to completion."""
    ids: list[int] = []
    logprobs: list[float] = []
    count, finish = 0, None
    async with engine.generate(request) as chunks:
        async for chunk in chunks:
            assert finish is None and chunk.logprobs is not None and len(chunk.logprobs) == len(chunk.ids)
            ids += chunk.ids
            logprobs += [value for value in chunk.logprobs if value is not None]
            count, finish = count + 1, chunk.finish
    return Reply(ids, logprobs, finish, count)


def rescore(made: Model, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Recompute the log-probabilities as a trainer does, in one forward pass."""
    with torch.no_grad():
        scores = made(torch.tensor([[*prompt, *ids]]))[0, len(prompt) - 1 : -1].float() / temperature
    found: list[float] = scores.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
    return found


def random_prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, SHAPE.vocabulary, int(draw.integers(1, longest))).tolist() for _ in range(count)]
