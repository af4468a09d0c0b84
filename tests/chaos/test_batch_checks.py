"""What the suite finds wrong with a batch, from the runner's ledger, the agents' output and the gateway's record. No I/O."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.chaos.engine import write_answer
from tests.chaos.invariants import AgentLog, BatchEvidence, RecordedRollout, check_batch, parse_agent_log
from turngate.rollout.ledger import FinishedRollout

NAME, SESSION = "b.well-0.0", "s1"


def make_evidence(
    log: AgentLog,
    *,
    reward: float | None = 1.0,
    kind: Any = "graded",
    recorded: float | None = 1.0,
    may_fail: bool = False,
) -> BatchEvidence:
    done = FinishedRollout(rollout=NAME, task="well-0", index=0, kind=kind, reward=reward, session=SESSION, at=0.0)
    shown = RecordedRollout({"nodes": []}, [], {"reward": recorded})
    return BatchEvidence({NAME}, {NAME: done}, {SESSION: log}, {SESSION: shown}, {}, may_fail)


def test_output_of_an_agent_is_its_log() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"arguments": json.dumps({"path": write_answer(8)})}}]}
    lines = [{"role": "assistant", "content": write_answer(7)}, call, {"guess": "right"}]
    printed = "\n".join(map(json.dumps, lines))
    assert parse_agent_log(printed) == AgentLog([7, 8], "right")
    assert parse_agent_log(printed[:-20]) == AgentLog([7, 8])


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        (make_evidence(AgentLog([], "right")), {}),
        (make_evidence(AgentLog([], "wrong"), reward=0.0, recorded=0.0), {}),
        (make_evidence(AgentLog([], "wrong")), {"wrong_rewards": 1}),
        (make_evidence(AgentLog([], "right"), recorded=0.0), {"wrong_rewards": 1}),
        (make_evidence(AgentLog([], "right"), recorded=None), {"wrong_rewards": 1}),
        (make_evidence(AgentLog([]), reward=0.0, recorded=0.0), {"wrong_rewards": 1}),
        (make_evidence(AgentLog([]), reward=0.0, recorded=0.0, may_fail=True), {}),
        (make_evidence(AgentLog([]), reward=None, recorded=None, kind="agent failed"), {"wrong_rewards": 1}),
        (make_evidence(AgentLog([]), reward=None, recorded=None, kind="agent failed", may_fail=True), {}),
        (make_evidence(AgentLog([]), kind="infrastructure fault", may_fail=True), {"wrong_rewards": 1}),
        (make_evidence(AgentLog([7], "right")), {"lost": 1}),
    ],
)
def test_evidence_of_a_rollout(evidence: BatchEvidence, expected: dict[str, int]) -> None:
    found = check_batch(evidence)
    counts = {name: getattr(found, name) for name in ("lost", "duplicated", "inexact", "wrong_rewards")}
    assert {name: count for name, count in counts.items() if count} == expected, found.notes


def test_missing_and_unexpected_rollouts_are_counted() -> None:
    evidence = make_evidence(AgentLog([], "right"))
    other = BatchEvidence({"b.well-1.0"}, evidence.finished, evidence.logs, evidence.recorded, {})
    found = check_batch(other)
    assert (found.lost, found.duplicated, found.wrong_rewards) == (1, 1, 0)
