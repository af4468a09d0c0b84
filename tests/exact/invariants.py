"""Invariants of every trace: compare the stored data with what the engine received."""

from __future__ import annotations

from collections import Counter

import numpy as np

from turngate.engines.scripted import derive_logprobs
from turngate.trace.roles import OWN_ROLES, assign_roles
from turngate.trace.sample import TrainingPolicy, build_samples
from turngate.trace.session import Session
from turngate.trace.tree import Sampled, path_ids


def check_invariants(session: Session, received: list[np.ndarray]) -> None:
    trace = session.trace
    prompts = Counter(path_ids(turn.parent).tobytes() for turn in trace.turns())
    # 1. The recorded prompts are exactly those that the engine received.
    assert prompts == Counter(prompt.tobytes() for prompt in received)
    # 2. Every sampled token has the log-probability for exactly the recorded context before it.
    for turn in trace.turns():
        assert turn.logprobs is not None
        assert len(turn.logprobs) == len(turn.ids)
        assert turn.logprobs.tolist() == derive_logprobs(path_ids(turn.parent), turn.ids.tolist())
    rows = build_samples(
        trace, TrainingPolicy(refused=True), keep_empty=True
    )  # a refused call excludes the others by default
    trained: Counter[int] = Counter()
    for row in rows:
        # 3. Every row is a prefix chain: each of its turns was sampled after exactly the ids before it.
        assert len(row.ids) == len(row.mask) == len(row.logprobs)
        covered = np.zeros(len(row.ids), bool)
        for span in row.spans:
            node = next(n for n in trace.nodes if n.id == span.node)
            assert isinstance(node, Sampled)
            assert np.array_equal(row.ids[: span.start], path_ids(node.parent))
            assert np.array_equal(row.ids[span.start : span.end], node.ids)
            assert np.array_equal(row.logprobs[span.start : span.end], node.logprobs)
            assert row.mask[span.start : span.end].all() == span.trained or span.start == span.end
            covered[span.start : span.end] = True
            trained[node.id] += span.trained
        assert not row.mask[~covered].any()
        assert np.isnan(row.logprobs[~covered]).all()
    # 4. Every sampled token is trained at most once, and those of trainable turns exactly once.
    role_of = assign_roles(trace)
    for turn in trace.turns():
        wanted = role_of[turn.id] in OWN_ROLES and not turn.info.biases and not turn.info.fault
        assert trained[turn.id] == int(wanted), (turn.id, role_of[turn.id], trained[turn.id])
