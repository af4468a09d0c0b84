"""Test training rows: each case has the calls of a rollout and the turns trained in each row."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from tests.trace.kit import Call, Recorder, assistant, system, user
from turngate.trace.prefix_tree import build_tree
from turngate.trace.roles import ROLES
from turngate.trace.sample import TrainingPolicy, build_samples, find_untrained
from turngate.trace.tree import SideRange, path_ids
from turngate.types import CallSignals, RaggedArray, SideArray

YOU, ASK = system("You code."), user("Fix it.")
FIRST = [YOU, ASK]
SECOND = [*FIRST, assistant("On it."), user("And?")]
OTHER = [*FIRST, assistant("On it."), user("Why?")]
THIRD = [*SECOND, assistant("Done."), user("Thanks.")]
WORK = [Call(FIRST, assistant("On it.")), Call(SECOND, assistant("Done."))]
TITLE = Call([system("Write a title."), ASK], preamble="")
HELPER = Call([system("You search."), user("Find it.")])
ALL = TrainingPolicy(roles=ROLES)

# Rows as lists of turns: n means turn n is trained, ~n means it is in the row but not trained.
Rows = list[list[int]]

CASES: list[tuple[str, list[Call], TrainingPolicy | None, Rows]] = [
    ("nothing", [], None, []),
    ("one turn", WORK[:1], None, [[0]]),
    ("one line of work is one row", [*WORK, Call(THIRD)], None, [[0, 1, 2]]),
    (
        "a fork: shared turns are trained once, in the longer row",
        [*WORK, Call(OTHER), Call(THIRD)],
        None,
        [[0, 1, 3], [~0, 2]],
    ),
    ("forks of the same length: the first", [*WORK, Call(OTHER)], None, [[0, 1], [~0, 2]]),
    ("two answers to one request", [WORK[0], Call(FIRST, assistant("Hm."))], None, [[0], [1]]),
    ("a compacted conversation", [*WORK, Call([YOU, user("So far: …")])], None, [[0, 1], [2]]),
    (
        "the main conversation claims shared turns before a longer helper",
        [*WORK, Call([*SECOND[:3], user("Search " * 9)], size=9, signals=CallSignals(thread="b", parent="a"))],
        None,
        [[0, 1], [~0, 2]],
    ),
    # roles
    ("helpers are trained", [*WORK, HELPER], None, [[0, 1], [2]]),
    ("helpers are not, by policy", [*WORK, HELPER], TrainingPolicy(roles=("main",)), [[0, 1]]),
    ("only helpers, by policy", [*WORK, HELPER], TrainingPolicy(roles=("subagent",)), [[2]]),
    ("titles are not trained", [TITLE, *WORK], None, [[1, 2]]),
    ("titles are, by policy", [TITLE, *WORK], TrainingPolicy(roles=("main", "side")), [[1, 2], [0]]),
    ("a retried answer is not trained", [WORK[0], Call(FIRST, assistant("Hm."), retried=True)], None, [[1]]),
    ("a retried answer is, by policy", [WORK[0], Call(FIRST, assistant("Hm."), retried=True)], ALL, [[1], [0]]),
    ("an aborted turn is not trained", [Call(FIRST, finish="abort"), *WORK], None, [[1, 2]]),
    ("no roles at all", WORK, TrainingPolicy(roles=()), []),
    # untrainable turns in a trainable row
    ("a turn without log-probabilities", [Call(FIRST, assistant("On it."), logprobs=None), WORK[1]], None, [[~0, 1]]),
    ("a biased turn", [Call(FIRST, assistant("On it."), biases=("top_p",)), WORK[1]], None, [[~0, 1]]),
    ("a biased turn, by policy", [Call(FIRST, biases=("top_p",))], TrainingPolicy(biased=True), [[0]]),
]


def record_masked(biases: tuple[str, ...], *masks: tuple[int, int]) -> Recorder:
    """A turn of two tokens. Each mask is the first token with a sampling mask, and the number of such tokens."""
    recorder = Recorder([Call(FIRST, biases=biases, sampling=b'{"temperature":0.5}')])
    [turn] = recorder.turns
    side = tuple(SideRange("sampling_mask", first, count, "int32", (-1,)) for first, count in masks)
    turn.info = msgspec.structs.replace(turn.info, side=side)
    return recorder


@pytest.mark.parametrize(
    ("biases", "masks", "reason"),
    [
        (("top_p",), [(0, 2)], ""),
        (("top_p", "top_k", "min_p"), [(0, 1), (1, 1)], ""),
        (("top_p",), [(0, 1)], "biased sampling: top_p"),
        (("top_p",), [(-2, 2)], "biased sampling: top_p"),
        (("top_k", "presence_penalty"), [(0, 2)], "biased sampling: top_k, presence_penalty"),
        (("top_k", "greedy"), [(0, 2)], "biased sampling: top_k, greedy"),
        (("top_k", "constrained: tool"), [(0, 2)], "biased sampling: top_k, constrained: tool"),
    ],
)
def test_truncated_turn_is_trained_only_with_its_masks(
    biases: tuple[str, ...], masks: list[tuple[int, int]], reason: str
) -> None:
    recorder = record_masked(biases, *masks)
    [turn] = recorder.turns
    kept = SideArray("sampling_mask", masks[0][0], RaggedArray.from_lists([[1, 2], [3]]))
    [carried] = build_samples(recorder.trace, keep_empty=True, side={turn.id: [kept]})
    assert carried.spans[0].reason == reason and carried.mask.any() == (not reason)
    without = reason or "trained only with its sampling mask: " + ", ".join(biases)
    for side in (None, {turn.id: [SideArray("other", 0, np.zeros(2, np.uint8))]}):
        [row] = build_samples(recorder.trace, keep_empty=True, side=side)
        assert row.spans[0].reason == without and not row.mask.any()
    assert find_untrained(recorder.trace, {turn.id: "main"}, TrainingPolicy())[turn.id] == reason
    assert carried.spans[0].temperature == 0.5


@pytest.mark.parametrize(("calls", "policy", "rows"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_training_rows(calls: list[Call], policy: TrainingPolicy | None, rows: Rows) -> None:
    recorder = Recorder(calls)
    number = {turn.id: n for n, turn in enumerate(recorder.turns)}
    samples = build_samples(recorder.trace, policy)
    spans = [[number[s.node] if s.trained else ~number[s.node] for s in sample.spans] for sample in samples]
    assert spans == rows
    for sample in samples:
        leaf = next(turn for turn in recorder.turns if turn.id == sample.branch)
        assert sample.ids.tolist() == path_ids(leaf).tolist()
        trained = np.zeros(len(sample.ids), bool)
        for span in sample.spans:
            assert sample.ids[span.start : span.end].tolist() == recorder.turns[number[span.node]].ids.tolist()
            trained[span.start : span.end] = span.trained
        assert sample.mask.tolist() == trained.tolist()
        assert np.isfinite(sample.logprobs[sample.mask]).all()
        assert sample.trained_tokens == trained.sum()


REASONS: list[tuple[str, Call, str]] = [
    ("nothing is wrong", Call(FIRST), ""),
    ("a fault of the engine", Call(FIRST, fault="the engine failed"), "the engine failed"),
    ("only text was captured", Call(FIRST, capture="text"), "captured as text only"),
    ("only log-probabilities were captured", Call(FIRST, capture="logprobs"), "captured as logprobs only"),
    ("no log-probabilities", Call(FIRST, logprobs=None), "no log-probabilities"),
    (
        "too few log-probabilities",
        Call(FIRST, logprobs=[-0.5]),
        "different numbers of log-probabilities (1) and tokens (2)",
    ),
    ("a missing log-probability", Call(FIRST, logprobs=[-0.5, math.nan]), "missing log-probabilities"),
    ("an infinite log-probability", Call(FIRST, logprobs=[-0.5, -math.inf]), "missing log-probabilities"),
    ("another role", Call(FIRST, signals=CallSignals(role="side")), "role side"),
    ("cut short", Call(FIRST, finish="abort"), "role aborted"),
    ("biased", Call(FIRST, biases=("top_p", "constrained: tool")), "biased sampling: top_p, constrained: tool"),
    (
        "the first reason counts",
        Call(FIRST, fault="the engine failed", logprobs=None, biases=("top_p",)),
        "the engine failed",
    ),
]


@pytest.mark.parametrize(("call", "reason"), [case[1:] for case in REASONS], ids=[case[0] for case in REASONS])
def test_untrained_reason(call: Call, reason: str) -> None:
    trace = Recorder([call]).trace
    (sample,) = build_samples(trace, keep_empty=True)
    (span,) = sample.spans
    assert (span.reason, span.trained) == (reason, not reason)
    assert sample.mask.any() == (not reason)
    assert bool(build_samples(trace)) == (not reason), "rows without trained tokens are left out"


def test_shared_turn_is_trained_in_one_row() -> None:
    _, second = build_samples(Recorder([*WORK, Call(OTHER)]).trace)
    assert [span.reason for span in second.spans] == ["trained in another row", ""]


def test_keep_empty_returns_every_branch_in_order() -> None:
    recorder = Recorder([TITLE, *WORK, Call(OTHER, logprobs=None)])
    kept = build_samples(recorder.trace, keep_empty=True)
    assert [sample.branch for sample in kept] == [recorder.turns[n].id for n in (2, 3, 0)]
    assert [sample.trained_tokens for sample in kept] == [4, 0, 0]
    assert [span.reason for span in kept[1].spans] == ["trained in another row", "no log-probabilities"]
    # Its last turn is in no other row.
    assert math.isnan(kept[1].logprobs[-1])


def test_logprobs_align_with_their_tokens() -> None:
    (sample,) = build_samples(Recorder([Call(FIRST, assistant("On it."), logprobs=[-1.0, -2.0]), WORK[1]]).trace)
    values = [None if math.isnan(value) else value for value in sample.logprobs.tolist()]
    assert values == [None, -1.0, -2.0, None, -0.5, -0.5]
    assert sample.mask.tolist() == [False, True, True, False, True, True]


@pytest.mark.parametrize(
    ("versions", "runs", "expected"),
    [
        ((3, 3), (), [3, 3]),
        ((3, 3), ((3, 2),), [3, 3]),
        ((3, 5), ((3, 1), (5, 1)), [3, 5]),
        ((3, 5), (), [-1, -1]),  # the weights changed, and the engine did not report where
    ],
)
def test_each_token_has_the_version_that_sampled_it(
    versions: tuple[int, int], runs: tuple[tuple[int, int], ...], expected: list[int]
) -> None:
    recorder = Recorder(WORK)
    turn = recorder.turns[0]
    turn.info = msgspec.structs.replace(
        turn.info, version_start=versions[0], version_end=versions[1], version_runs=runs
    )
    rows = build_samples(recorder.trace)
    for row in (*rows, *build_tree(rows).rebuild_rows()):
        assert row.token_versions().tolist() == [-1, *expected, -1, 0, 0]


def test_temperature_is_read_beside_unknown_parameters() -> None:
    """Which a newer version may have recorded."""
    recorder = Recorder([Call(FIRST, sampling=b'{"top_n_sigma":1,"temperature":0.5}'), Call(FIRST, sampling=b"{}")])
    assert [row.spans[0].temperature for row in build_samples(recorder.trace, keep_empty=True)] == [0.5, 1.0]
