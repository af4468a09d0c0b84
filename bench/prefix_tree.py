#!/usr/bin/env python3
"""Measure what training on prefix trees saves: `python bench/prefix_tree.py [--system 400] [--sub-agents 8] [--turns 3] [--repeats 3]`.

The rows are those of a trace with sub-agents that all begin with the same system prompt. The gradients of one update are computed with each
row by itself, with the prefix that all rows of a forward pass share computed once, and with the rows as a tree. The model has random
weights. Nothing is printed unless all gradients are equal.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # must be set before torch is imported, as in the engine

import msgspec
import numpy as np
import torch

from tests.engines import local_kit
from turngate.client.feed import Row
from turngate.engines.local.model import Model
from turngate.engines.local.weights import create_random_model
from turngate.trace.advantage import row_weight
from turngate.trace.roles import ROLES
from turngate.trace.sample import TrainingPolicy, build_samples
from turngate.trace.tree import Context, ContextInfo, Sampled, SampledInfo, Trace
from turngate.trainers.local.grpo import GrpoSettings, Learner
from turngate.trainers.local.packing import count_packed_tokens, split_batches

VOCABULARY = 1000
SHAPE = msgspec.structs.replace(
    local_kit.SHAPE, vocabulary=VOCABULARY, hidden=128, inner=384, layers=4, head=32, context=8192
)
QUESTION, RESULT, REPLY = 20, 60, 30  # tokens of a question, of a tool result, and of a reply


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--system", type=int, default=400, help="tokens of the system prompt")
    parser.add_argument("--sub-agents", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3, help="turns of each sub-agent, and of the main conversation")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = create_random_model(SHAPE, seed=0)
    rows = make_rows(options.system, options.sub_agents, options.turns)
    tokens = sum(row.ids.size for row in rows)
    ways = {
        "one row per forward pass": GrpoSettings(batch_tokens=1),
        "prefix of all rows once": GrpoSettings(batch_tokens=tokens),
        "tree": GrpoSettings(batch_tokens=tokens, prefix_tree=True),
    }
    expected = None
    results = []
    for name, settings in ways.items():
        batches = split_batches(rows, settings.batch_tokens, tree=settings.prefix_tree)
        computed = sum(count_packed_tokens(batch, tree=settings.prefix_tree) for batch in batches)
        seconds, gradient = measure(model, settings, rows, options.repeats)
        expected = gradient if expected is None else expected
        difference = float((gradient - expected).abs().max() / expected.abs().max())
        assert difference <= 1e-5, f"{name}: the gradients differ by {difference:.1e}"
        results.append((name, computed, seconds, difference))
    print(f"{len(rows)} rows, {tokens:,} tokens")
    for name, computed, seconds, difference in results:
        print(
            f"{name:26} {computed:6,} tokens computed   {seconds:6.2f} s of CPU time   gradients differ by {difference:.0e}"
        )


def make_rows(system: int, sub_agents: int, turns: int) -> list[Row]:
    """Return the rows of a trace with a main conversation and sub-agents."""
    rng = np.random.default_rng(0)
    trace = Trace()
    shared = rng.integers(0, VOCABULARY, system, np.int32)
    for _ in range(1 + sub_agents):
        turn = None
        for _ in range(turns):
            if turn is None:
                ids = np.concatenate([shared, rng.integers(0, VOCABULARY, QUESTION, np.int32)])
            else:
                ids = rng.integers(0, VOCABULARY, RESULT, np.int32)
            context = Context(trace.reserve_id(), turn, ids, ContextInfo(b"p", b"m" * 16, "u", True))
            trace.add_context(context)
            logprobs = np.full(REPLY, -np.log(VOCABULARY), np.float32)
            info = SampledInfo(b"m", b"", b"", "stop", 0, 0, 0.0, 1.0)
            turn = Sampled(trace.reserve_id(), context, rng.integers(0, VOCABULARY, REPLY, np.int32), logprobs, info)
            trace.add_sampled(turn)
    samples = build_samples(trace, TrainingPolicy(roles=ROLES))
    return [
        Row(
            ids=sample.ids,
            mask=sample.mask,
            logprobs=sample.logprobs,
            spans=sample.spans,
            branch=sample.branch,
            weight=row_weight(len(samples)),
            advantage=1.0,
        )
        for sample in samples
    ]


def measure(model: Model, settings: GrpoSettings, rows: list[Row], repeats: int) -> tuple[float, torch.Tensor]:
    """Return the least CPU time of an update's gradients, and the gradients."""
    learner = Learner(model, settings)
    times = []
    for _ in range(repeats):
        began = time.process_time()
        measured = learner.gradients(rows, version=1)
        times.append(time.process_time() - began)
        assert not measured.refused, measured.refused
    return min(times), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


if __name__ == "__main__":
    main()
