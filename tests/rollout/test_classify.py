"""`classify` as a table: class, reward and retry for every stage, ending and error boundary."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from turngate.errors import Boundary, ContextOverflow, EngineRejected
from turngate.rollout.classify import (
    DISK_LIMIT,
    PATIENCE_S,
    SESSION_LIMITS,
    SILENT_SHARE,
    Classification,
    Ending,
    classify,
    timeout_error,
)
from turngate.rollout.outcome import Fault, Stage, Status
from turngate.rollout.spec import EndAction, EndPolicy
from turngate.tasks.grading.types import Grade
from turngate.trace.session import CallError
from turngate.types import STALE

BOUNDARIES = {
    "client": "infrastructure fault",
    "task": "invalid task",
    "agent": "agent failed",
    "sandbox": "infrastructure fault",
    "engine": "infrastructure fault",
    "store": "infrastructure fault",
    "gateway": "infrastructure fault",
    "config": "infrastructure fault",
}
ZEROS = EndPolicy(timed_out="zero", failed="zero", limit="zero", lost="zero")
GRADED = Grade(kind="graded", reward=0.5, resolved=True)

# Facts about the agent's run for each status.
RUNS: dict[Status, dict[str, Any]] = {
    "finished": {"exit_code": 0},
    "failed": {"exit_code": 3},
    "timed out": {},
    "limit": {"limit": "turns", "stop": "turns", "session_ended": True},
    "cancelled": {"stop": "the session was cancelled at the gateway", "session_ended": True},
}


def ending(status: Status = "finished", **facts: Any) -> Ending:
    return Ending(**{"ran_s": 100.0, "turns": 2, "complete": True, **RUNS[status], **facts})


def summary(verdict: Classification) -> tuple[str, str | None, float | None, str]:
    return verdict.status, verdict.kind, verdict.reward, verdict.retry


def test_every_boundary_is_in_the_table() -> None:
    assert set(BOUNDARIES) == set(get_args(Boundary))


@pytest.mark.parametrize("graded", [True, False])
@pytest.mark.parametrize("stage", get_args(Stage))
@pytest.mark.parametrize(("boundary", "kind"), BOUNDARIES.items())
def test_fault_is_classified_by_boundary_without_reward(
    boundary: Boundary, kind: str, stage: Stage, graded: bool
) -> None:
    fault = Fault(stage, boundary, "it broke")
    retry = "fault" if kind == "infrastructure fault" else ""
    for facts in (Ending(graded=graded, fault=fault), *(ending(run, graded=graded, fault=fault) for run in RUNS)):
        verdict = classify(facts, ZEROS)
        assert summary(verdict) == ("error", kind, None, retry)
        assert verdict.grade == Grade(kind=kind, message="it broke") and verdict.fault == fault  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", get_args(Stage))
def test_stage_timeout_has_boundary_of_stage(stage: Stage) -> None:
    boundaries = {"setup": "task", "session": "gateway", "seal": "gateway"}
    error = timeout_error(stage, 12.3)
    assert (error.boundary, error.message) == (boundaries.get(stage, "sandbox"), f"stage {stage} took longer than 12 s")


@pytest.mark.parametrize("status", ["finished", "failed", "timed out", "limit"])
def test_work_is_graded_by_default(status: Status) -> None:
    before = classify(ending(status), EndPolicy())
    assert summary(before) == (status, None, None, ""), "the grader decides"
    after = classify(ending(status, grade=GRADED), EndPolicy())
    assert summary(after) == (status, "graded", 0.5, "") and after.grade == GRADED


@pytest.mark.parametrize("kind", ["invalid task", "infrastructure fault"])
def test_undecided_grade_sets_class(kind: Any) -> None:
    verdict = classify(ending(grade=Grade(kind=kind, message="no")), EndPolicy())
    assert summary(verdict) == ("finished", kind, None, "fault" if kind == "infrastructure fault" else "")


@pytest.mark.parametrize(("status", "field"), [("timed out", "timed_out"), ("failed", "failed"), ("limit", "limit")])
@pytest.mark.parametrize(("action", "reward"), [("exclude", None), ("zero", 0.0)])
def test_each_bad_end_has_its_own_policy(status: Status, field: str, action: EndAction, reward: float | None) -> None:
    chosen = classify(ending(status), EndPolicy(**{field: action}))  # type: ignore[arg-type]
    assert summary(chosen) == (status, "agent failed", reward, "")
    others = {name: action for name in ("timed_out", "failed", "limit") if name != field}
    assert classify(ending(status), EndPolicy(**others)).kind is None  # type: ignore[arg-type]
    assert classify(ending("finished"), EndPolicy(**{field: action})).kind is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "how"),
    [
        ("failed", "the agent exited with code 3 before its first turn"),
        ("timed out", "the agent ran out of time before its first turn"),
        ("limit", "the agent reached a session limit (turns) before its first turn"),
    ],
)
def test_agent_without_turns_has_no_reward(status: Status, how: str) -> None:
    verdict = classify(ending(status, turns=0), ZEROS)
    assert summary(verdict) == (status, "agent failed", None, "")
    assert verdict.grade is not None and verdict.grade.message.startswith(how)


def test_agent_that_fills_its_disk_reaches_a_limit() -> None:
    full = ending("limit", limit=DISK_LIMIT, stop=DISK_LIMIT, session_ended=False)
    assert classify(full, EndPolicy()).kind is None  # its work is graded
    verdict = classify(full, EndPolicy(limit="zero"))
    assert (*summary(verdict), verdict.stop) == ("limit", "agent failed", 0.0, "", "disk_space")
    assert verdict.grade is not None and "reached a sandbox limit (disk space)" in verdict.grade.message


def test_finished_agent_without_turns_is_graded() -> None:
    assert classify(ending(turns=0), ZEROS).kind is None


@pytest.mark.parametrize(("policy", "reward"), [("zero", 0.0), ("exclude", None)])
def test_work_destroyed_by_agent_follows_policy(policy: Any, reward: float | None) -> None:
    verdict = classify(ending(work_lost="it broke its sandbox"), EndPolicy(lost=policy))
    assert summary(verdict) == ("finished", "agent failed", reward, "")
    assert verdict.grade is not None and verdict.grade.message == "it broke its sandbox"


def test_work_lost_by_infrastructure_is_fault() -> None:
    verdict = classify(ending(work_missing="the disk is full"), ZEROS)
    assert summary(verdict) == ("finished", "infrastructure fault", None, "fault")
    assert verdict.grade is not None and "the disk is full" in verdict.grade.message


@pytest.mark.parametrize("status", ["finished", "failed", "timed out", "limit"])
def test_task_without_grader_has_no_grade(status: Status) -> None:
    verdict = classify(ending(status, graded=False, work_missing="x"), ZEROS)
    assert summary(verdict) == (status, "not graded", None, "") and verdict.grade is None


# ── cancelled ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_session_cancelled_at_gateway() -> None:
    verdict = classify(ending("cancelled"), ZEROS)
    assert summary(verdict) == ("cancelled", "cancelled", None, "")
    assert verdict.stop == "the session was cancelled at the gateway"


@pytest.mark.parametrize("status", [*RUNS])
def test_stale_session_is_stale_for_every_status(status: Status) -> None:
    verdict = classify(ending(status, sealed_stop=STALE), ZEROS)
    assert summary(verdict) == ("cancelled", "stale", None, "stale") and verdict.stop == STALE


def test_fault_in_stale_session_is_retried_as_stale() -> None:
    fault = Fault("collect", "sandbox", "gone")
    for facts in (ending(fault=fault, stop=STALE), ending(fault=fault, sealed_stop=STALE)):
        assert summary(classify(facts, ZEROS)) == ("error", "infrastructure fault", None, "stale")


@pytest.mark.parametrize(
    ("graded", "complete", "status"),
    [
        (True, False, "cancelled"),
        (True, True, "cancelled"),
        (False, False, "cancelled"),
        (False, True, "finished"),
    ],
)
def test_cancelled_by_caller(graded: bool, complete: bool, status: Status) -> None:
    verdict = classify(ending(graded=graded, complete=complete, cancelled=True), ZEROS)
    assert verdict.status == status and verdict.reward is None and verdict.retry == ""
    assert verdict.kind == ("cancelled" if status == "cancelled" else "not graded")


def test_cancelled_before_agent_ran() -> None:
    assert summary(classify(Ending(cancelled=True), ZEROS)) == ("cancelled", "cancelled", None, "")


# ── calls that failed, and engines that were silent ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("status", ["finished", "failed", "timed out"])
@pytest.mark.parametrize(("boundary", "kind"), BOUNDARIES.items())
def test_failed_last_call_is_classified_by_boundary(boundary: Boundary, kind: str, status: Status) -> None:
    verdict = classify(ending(status, last_error=CallError(boundary, "some_error", "no answer")), ZEROS)
    assert summary(verdict) == ("error", kind, None, "fault" if kind == "infrastructure fault" else "")
    assert verdict.fault == Fault("agent", boundary, "no answer")


@pytest.mark.parametrize("status", ["limit", "cancelled"])
def test_failed_call_after_session_end_is_ignored(status: Status) -> None:
    verdict = classify(ending(status, last_error=CallError("engine", "some_error", "no answer")), EndPolicy())
    assert verdict.status == status and verdict.fault is None


def test_context_overflow_is_limit() -> None:
    error = CallError("engine", ContextOverflow.kind, "too long")
    verdict = classify(ending("failed", last_error=error), EndPolicy())
    assert (verdict.status, verdict.stop, verdict.fault) == ("limit", ContextOverflow.kind, None)


@pytest.mark.parametrize(("turns", "status"), [(1, "failed"), (0, "error")])
def test_rejected_call_is_agent_failure_after_accepted_calls(turns: int, status: Status) -> None:
    error = CallError("engine", EngineRejected.kind, "bad tool")
    verdict = classify(ending("failed", last_error=error, turns=turns, silent_s=99.0), EndPolicy())
    assert verdict.status == status and bool(verdict.note) == (status == "failed")


@pytest.mark.parametrize("name", SESSION_LIMITS)
@pytest.mark.parametrize("status", ["finished", "failed", "timed out"])
def test_limit_is_read_from_sealed_session(status: Status, name: str) -> None:
    error = CallError("engine", "some_error", "no answer")
    verdict = classify(ending(status, sealed_stop=name, last_error=error), EndPolicy())
    assert (verdict.status, verdict.stop, verdict.fault) == ("limit", name, None)


@pytest.mark.parametrize(
    ("status", "ran_s", "silent_s", "expected"),
    [
        ("timed out", 600.0, 301.0, "error"),
        ("timed out", 600.0, 299.0, "timed out"),
        ("failed", 100.0, 90.0, "error"),
        ("failed", 10.0, 9.0, "failed"),  # it ran only a short time
        ("finished", 100.0, 90.0, "finished"),
    ],
)
def test_silent_engine_is_fault_only_after_long_silence(
    status: Status, ran_s: float, silent_s: float, expected: str
) -> None:
    assert (SILENT_SHARE, PATIENCE_S) == (0.5, 60.0)
    verdict = classify(ending(status, ran_s=ran_s, silent_s=silent_s), EndPolicy())
    assert verdict.status == expected
    assert (verdict.fault is not None) == (expected == "error")
    if verdict.fault is not None:
        assert (verdict.fault.stage, verdict.fault.boundary) == ("agent", "engine")
        assert (verdict.kind, verdict.retry) == ("infrastructure fault", "fault")
