#!/usr/bin/env python3
"""Measure how fast the local engine samples: its decoder alone, and through `Engine.generate` as the gateway uses it.

    python bench/local_engine.py                                      a small model with random weights, on the CPU
    python bench/local_engine.py --device cuda --calls 256            SmolLM2-135M's shape, 256 calls in flight
    python bench/local_engine.py --model FOLDER --calls 8             a real model

Prompts share a prefix in groups of eight, like rollouts of one task. The log-probabilities of some calls are recomputed with a full
forward pass, and the difference is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # must be set before torch is imported, as in the engine

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
    parser.add_argument(
        "--model", help="Hugging Face model folder (default: random weights in the shape of SmolLM2-135M)"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--calls", type=int, default=16, help="concurrent calls")
    parser.add_argument("--turns", type=int, default=3, help="turns per conversation")
    parser.add_argument("--prompt", type=int, default=200, help="tokens per prompt, and tokens added per turn")
    parser.add_argument("--tokens", type=int, default=256, help="tokens sampled per call")
    parser.add_argument("--max-context", type=int, default=4096)
    options = parser.parse_args()
    dtype = {"auto": torch.bfloat16 if options.device == "cuda" else torch.float32}.get(options.dtype) or getattr(
        torch, options.dtype
    )
    model = (
        load(options.model, options.device, dtype)
        if options.model
        else create_random_model(SMOLLM2, options.device, dtype)
    )
    print(
        f"{options.device}, {dtype}, {options.calls} calls in flight, prompts of {options.prompt}, {options.tokens} sampled"
    )
    measure_decoder(model, options)
    asyncio.run(measure_engine(model, options))


def build_engine(model: Model, options: argparse.Namespace) -> LocalEngine:
    dtype = "bfloat16" if model.dtype == torch.bfloat16 else "float32"
    return LocalEngine(model, dtype=dtype, slots=options.calls, max_context=options.max_context)


def measure_decoder(model: Model, options: argparse.Namespace) -> None:
    """Run steps of the decoder with all slots sampling, which is the engine's upper limit."""
    decoder = build_engine(model, options)._decoder
    slots = np.arange(options.calls)
    with torch.inference_mode(), decoder.thread_context():
        decoder.arm([SlotStart(slot, 1, options.prompt, slot, 0, 1.0) for slot in slots.tolist()])
        times, pending = [], []
        for _ in range(options.tokens):
            began = time.perf_counter()
            pending.append(decoder.launch(slots, []))
            while len(pending) > decoder.ahead:
                decoder.collect(pending.pop(0))
            times.append(time.perf_counter() - began)
        decoder.settle()
    median = float(np.median(times))
    print(f"decoder alone: {options.calls / median:,.0f} tokens/s (a step takes {1000 * median:.2f} ms)", flush=True)


async def measure_engine(model: Model, options: argparse.Namespace) -> None:
    """Run conversations of several turns, each of which extends the previous one."""
    engine = build_engine(model, options)
    await engine.start()
    rng = np.random.default_rng(0)
    vocabulary = model.shape.vocabulary
    durations: list[float] = []

    async def conversation(ids: np.ndarray) -> tuple[np.ndarray, list[float], int]:
        sampled = 0
        for turn in range(options.turns):
            if turn:
                ids = np.concatenate([ids, rng.integers(0, vocabulary, options.prompt)])
            got, logprobs = [], []
            began = time.perf_counter()
            request = Generate(prompt=ids.astype(np.int32), max_tokens=options.tokens, sampling=Sampling())
            async with engine.generate(request) as chunks:
                async for chunk in chunks:
                    got += chunk.ids
                    logprobs += chunk.logprobs or ()
            durations.append(time.perf_counter() - began)
            sampled += len(got)
            ids = np.concatenate([ids, got])
        return ids, logprobs, sampled

    async def all_at_once() -> list[tuple[np.ndarray, list[float], int]]:
        shared = [rng.integers(0, vocabulary, options.prompt) for _ in range(-(-options.calls // GROUP))]
        return await asyncio.gather(*(conversation(shared[number // GROUP]) for number in range(options.calls)))

    await all_at_once()  # graphs are recorded in it
    durations.clear()
    before, began = engine.reused_tokens, time.perf_counter()
    ended = await all_at_once()
    seconds = time.perf_counter() - began
    sampled = sum(count for _, _, count in ended)
    print(
        f"through generate: {sampled / seconds:,.0f} tokens/s; {options.calls * options.turns} calls in {seconds:.1f} s, "
        f"{np.median(durations):.2f} s each, {engine.reused_tokens - before:,} prompt tokens reused from the cache"
    )
    differences = []
    for ids, logprobs, _ in ended[:: max(1, options.calls // 8)]:
        with torch.no_grad():
            scores = model(torch.tensor(ids[None], device=model.device)).float().log_softmax(-1)[0]
        again = scores[:-1].gather(-1, torch.tensor(ids[1:, None], device=model.device))[-len(logprobs) :, 0].cpu()
        differences.append((again - torch.tensor(logprobs)).abs())
    off = torch.cat(differences)
    print(
        f"log-probabilities compared with a full forward pass: mean difference {off.mean():.1e}, largest {off.max():.1e}"
    )
    await engine.close()


if __name__ == "__main__":
    main()
