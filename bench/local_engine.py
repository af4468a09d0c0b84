#!/usr/bin/env python3
"""How fast the local engine samples: its decoder alone, and through `Engine.generate` as the gateway uses it.

    python bench/local_engine.py                                      a small model of random weights, on this machine's CPU
    python bench/local_engine.py --device cuda --calls 256            SmolLM2-135M's shape, 256 calls in flight
    python bench/local_engine.py --model FOLDER --calls 8             a real model

Prompts begin alike in groups of eight, as rollouts of one task do. Log-probabilities of some calls are computed again by a whole forward
pass, and the difference is printed along.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the engine does where it is imported before torch

import numpy as np
import torch

from turngate.engines.base import Generate
from turngate.engines.local.decode import SlotStart
from turngate.engines.local.engine import LocalEngine
from turngate.engines.local.model import Model
from turngate.engines.local.shape import Rope, Shape
from turngate.engines.local.weights import create_random_model, load
from turngate.types import Sampling

SMOLLM2 = Shape(
    kind="llama",
    vocabulary=49152,
    hidden=576,
    inner=1536,
    layers=30,
    heads=9,
    kv_heads=3,
    head=64,
    epsilon=1e-5,
    context=8192,
    rope=Rope(theta=100_000.0),
    tied=True,
    qkv_bias=False,
    out_bias=False,
    inner_bias=False,
    head_norm=False,
)
GROUP = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a Hugging Face folder; without one, random weights of SmolLM2-135M's shape")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--calls", type=int, default=16, help="in flight at once")
    parser.add_argument("--turns", type=int, default=3, help="calls that each of them makes, one after the other")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a prompt, and of what each turn adds")
    parser.add_argument("--tokens", type=int, default=256, help="tokens that each call samples")
    parser.add_argument("--max-context", type=int, default=4096)
    asked = parser.parse_args()
    chosen = {"auto": torch.bfloat16 if asked.device == "cuda" else torch.float32}.get(asked.dtype) or getattr(
        torch, asked.dtype
    )
    model = (
        load(asked.model, asked.device, chosen) if asked.model else create_random_model(SMOLLM2, asked.device, chosen)
    )
    print(f"{asked.device}, {chosen}, {asked.calls} calls in flight, prompts of {asked.prompt}, {asked.tokens} sampled")
    alone(model, asked)
    asyncio.run(served(model, asked))


def engine_of(model: Model, asked: argparse.Namespace) -> LocalEngine:
    dtype = "bfloat16" if model.dtype == torch.bfloat16 else "float32"
    return LocalEngine(model, dtype=dtype, slots=asked.calls, max_context=asked.max_context)


def alone(model: Model, asked: argparse.Namespace) -> None:
    """Steps of the decoder one after the other, all slots sampling: what the engine could give at best."""
    decoder = engine_of(model, asked)._decoder
    slots = np.arange(asked.calls)
    with torch.inference_mode(), decoder.thread_context():
        decoder.arm([SlotStart(slot, 1, asked.prompt, slot, 0, 1.0) for slot in slots.tolist()])
        times, pending = [], []
        for _ in range(asked.tokens):
            begun = time.perf_counter()
            pending.append(decoder.launch(slots, []))
            while len(pending) > decoder.ahead:
                decoder.collect(pending.pop(0))
            times.append(time.perf_counter() - begun)
        decoder.settle()
    usual = float(np.median(times))
    print(f"decoder alone: {asked.calls / usual:,.0f} tokens/s (a step takes {1000 * usual:.2f} ms)", flush=True)


async def served(model: Model, asked: argparse.Namespace) -> None:
    """Conversations of several turns, each of which adds to the one before."""
    engine = engine_of(model, asked)
    await engine.start()
    draw = np.random.default_rng(0)
    vocabulary = model.shape.vocabulary
    took: list[float] = []

    async def conversation(ids: np.ndarray) -> tuple[np.ndarray, list[float], int]:
        sampled = 0
        for turn in range(asked.turns):
            if turn:
                ids = np.concatenate([ids, draw.integers(0, vocabulary, asked.prompt)])
            got, logprobs = [], []
            begun = time.perf_counter()
            request = Generate(prompt=ids.astype(np.int32), max_tokens=asked.tokens, sampling=Sampling())
            async with engine.generate(request) as chunks:
                async for chunk in chunks:
                    got += chunk.ids
                    logprobs += chunk.logprobs or ()
            took.append(time.perf_counter() - begun)
            sampled += len(got)
            ids = np.concatenate([ids, got])
        return ids, logprobs, sampled

    async def all_at_once() -> list[tuple[np.ndarray, list[float], int]]:
        shared = [draw.integers(0, vocabulary, asked.prompt) for _ in range(-(-asked.calls // GROUP))]
        return await asyncio.gather(*(conversation(shared[number // GROUP]) for number in range(asked.calls)))

    await all_at_once()  # graphs are recorded in it
    took.clear()
    before, begun = engine.reused_tokens, time.perf_counter()
    ended = await all_at_once()
    seconds = time.perf_counter() - begun
    sampled = sum(count for _, _, count in ended)
    print(
        f"through generate: {sampled / seconds:,.0f} tokens/s; {asked.calls * asked.turns} calls in {seconds:.1f} s, "
        f"{np.median(took):.2f} s each, {engine.reused_tokens - before:,} ids of prompts were not computed again"
    )
    differences = []
    for ids, logprobs, _ in ended[:: max(1, asked.calls // 8)]:
        with torch.no_grad():
            scores = model(torch.tensor(ids[None], device=model.device)).float().log_softmax(-1)[0]
        again = scores[:-1].gather(-1, torch.tensor(ids[1:, None], device=model.device))[-len(logprobs) :, 0].cpu()
        differences.append((again - torch.tensor(logprobs)).abs())
    off = torch.cat(differences)
    print(f"log-probabilities against a whole forward pass: mean difference {off.mean():.1e}, largest {off.max():.1e}")
    await engine.close()


if __name__ == "__main__":
    main()
