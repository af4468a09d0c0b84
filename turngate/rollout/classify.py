"""Classify a rollout by how it ended: determine what was at fault, the rollout's class and reward, and whether to retry. No I/O.

    a stage failed         `invalid task` if the task was at fault, `agent failed` if the agent was, otherwise `infrastructure fault`
    it was cancelled       `stale` if the gateway ended it because it was too old to train on, otherwise `cancelled`
    the engine failed      `infrastructure fault`, even if the engine only stopped responding until the agent gave up or timed out
    the agent ended        on its own, by timeout or at a limit: the work is graded, excluded or scored 0, depending on the policy;
                           `agent failed` if the agent made no turn, unless it finished with exit code 0
    the work is missing    `agent failed` if the agent destroyed its work (excluded or scored 0, depending on the policy); otherwise
                           `infrastructure fault`

Only the agent's own work is graded. A rollout that failed through no fault of the agent never has a reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from turngate.errors import (
    Boundary,
    ContextOverflow,
    EngineRejected,
    EngineTimeout,
    SandboxError,
    TaskError,
    TurngateError,
)
from turngate.rollout.outcome import Fault, RolloutClass, Stage, Status
from turngate.rollout.spec import EndAction, EndPolicy
from turngate.store.outcomes import OutcomeClass
from turngate.tasks.grading.types import Grade
from turngate.trace.session import CallError
from turngate.types import STALE, Limits

SILENT_SHARE = 0.5  # if the engine was silent for more than this share of the agent's time, the engine is at fault
PATIENCE_S = 60.0  # if the agent failed after a shorter silence, it gave up too early, and the engine is not at fault
DISK_LIMIT = "disk_space"  # the `limit` of an agent that used too much of its sandbox's disk space
SESSION_LIMITS = tuple(field.name for field in msgspec.structs.fields(Limits))
# The class of a fault, by boundary. All other boundaries (engine, sandbox, store, gateway) are infrastructure.
_FAULT_CLASSES: Mapping[Boundary, OutcomeClass] = {"task": "invalid task", "agent": "agent failed"}
# The type of error to raise if a stage takes too long. For all other stages, it is `SandboxError`.
_TIMEOUT_ERRORS: Mapping[Stage, type[TurngateError]] = {
    "setup": TaskError,
    "session": TurngateError,
    "seal": TurngateError,
}

Retry = Literal["", "fault", "stale"]


class Ending(msgspec.Struct, kw_only=True):
    """The facts about how a rollout ended. The rollout fills them in as it runs, and `classify` evaluates them."""

    cancelled: bool = False  # the caller cancelled the rollout
    complete: bool = False  # the agent's run is over, and its work was collected
    fault: Fault | None = None  # a stage failed
    ran_s: float | None = None  # how long the agent ran; None if it did not run
    exit_code: int | None = None  # None if the agent did not exit on its own
    limit: str = ""  # the limit that the session or the sandbox reached while the agent was running
    session_ended: bool = False  # the session ended while the agent was running
    stop: str = ""  # why the session ended: the name of a limit, `STALE`, or a sentence
    sealed_stop: str = ""  # why the session ended, as reported by the gateway after sealing it
    last_error: CallError | None = None
    silent_s: float = 0.0  # how long the agent's calls have waited since the engine last responded
    turns: int = 0
    graded: bool = True  # the task has a grader, and the caller wants a grade
    work_lost: str = ""  # how the agent destroyed its work
    work_missing: str = ""  # why the work is missing, if the agent is not at fault
    grade: Grade | None = None  # the grader's verdict


class Classification(msgspec.Struct, frozen=True, kw_only=True):
    """The classification of a rollout: its status, class and grade, the fault if there was one, and whether to retry it."""

    status: Status
    kind: RolloutClass | None = None  # None if the work must be graded first
    grade: Grade | None = None  # None if the rollout is cancelled, stale, not graded, or not graded yet
    fault: Fault | None = None
    stop: str = ""
    retry: Retry = ""  # whether a new attempt may help, and which budget it uses
    note: str = ""

    @property
    def reward(self) -> float | None:
        return None if self.grade is None else self.grade.reward


class _Cause(msgspec.Struct, frozen=True):
    status: Status
    stop: str = ""
    fault: Fault | None = None
    note: str = ""


def classify(ending: Ending, policy: EndPolicy) -> Classification:
    """Classify a rollout from the facts known so far."""
    cause = _find_cause(ending)
    status: Status = cause.status
    if ending.cancelled and (
        ending.graded or not ending.complete
    ):  # a graded rollout is not complete without its grade
        status = "cancelled"
    grade = None if status == "cancelled" else _find_grade(ending, cause, policy)
    kind = _find_class(ending, status, cause.stop, grade)
    return Classification(
        status=status,
        kind=kind,
        grade=grade,
        fault=cause.fault,
        stop=cause.stop,
        retry="stale" if cause.stop == STALE else "fault" if kind == "infrastructure fault" else "",
        note=cause.note,
    )


def timeout_error(stage: Stage, limit_s: float) -> TurngateError:
    """Build the error for a stage that took too long. The type of the error determines what is at fault."""
    return _TIMEOUT_ERRORS.get(stage, SandboxError)(f"stage {stage} took longer than {limit_s:.0f} s")


def _find_cause(ending: Ending) -> _Cause:
    """Determine how the rollout ended and what was at fault, before grading."""
    is_stale = ending.sealed_stop == STALE
    stop = STALE if is_stale else ending.stop
    if ending.fault is not None:
        return _Cause("error", stop, ending.fault)
    if is_stale:  # regardless of how the agent reacted
        return _Cause("cancelled", stop)
    status = _find_run_status(ending)
    if status not in ("finished", "failed", "timed out"):
        return _Cause(status, stop)
    if ending.sealed_stop in SESSION_LIMITS:  # the agent exited before the limit event arrived
        return _Cause("limit", ending.sealed_stop)
    if ending.last_error is not None:
        return _blame_call(ending, ending.last_error, status)
    if _was_engine_silent(ending, status):
        message = (
            f"the engine went silent: it sent no tokens for {ending.silent_s:.0f} of the {ending.ran_s or 0:.0f} s "
            "that the agent was running"
        )
        return _Cause("error", stop, Fault("agent", EngineTimeout.boundary, message))
    return _Cause(status, stop)


def _find_run_status(ending: Ending) -> Status:
    if ending.ran_s is None:
        return "error"
    if ending.limit:
        return "limit"
    if ending.exit_code is not None:
        return "finished" if ending.exit_code == 0 else "failed"
    return "cancelled" if ending.session_ended else "timed out"


def _blame_call(ending: Ending, error: CallError, status: Status) -> _Cause:
    """Determine the cause if the agent's last call failed.

    A call that does not fit in the model's context counts as reaching a limit. If the engine rejected the call but answered earlier ones,
    the rollout is classified by how the agent ended. Otherwise, the boundary that the error names is at fault.
    """
    if error.kind == ContextOverflow.kind:
        return _Cause("limit", error.kind)
    if error.kind == EngineRejected.kind and ending.turns:  # the engine accepted other calls
        return _Cause(status, ending.stop, note=f"the engine rejected the agent's last call: {error.message}")
    return _Cause("error", ending.stop, Fault("agent", error.boundary, error.message))


def _was_engine_silent(ending: Ending, status: Status) -> bool:
    """Return whether the agent failed or timed out after spending most of its time waiting for an engine that sent no tokens.

    An agent that failed must also have waited for more than `PATIENCE_S` seconds.
    """
    if ending.silent_s <= SILENT_SHARE * (ending.ran_s or 0.0):
        return False
    return status == "timed out" or (status == "failed" and ending.silent_s > PATIENCE_S)


def _find_grade(ending: Ending, cause: _Cause, policy: EndPolicy) -> Grade | None:
    if cause.fault is not None:
        kind = _FAULT_CLASSES.get(cause.fault.boundary, "infrastructure fault")
        return Grade(kind=kind, message=cause.fault.message)
    if not ending.graded:
        return None
    how = _describe(cause, ending.exit_code)
    if cause.status != "finished" and not ending.turns:
        return Grade(kind="agent failed", message=f"the agent {how} before its first turn")
    actions: Mapping[Status, EndAction] = {
        "timed out": policy.timed_out,
        "failed": policy.failed,
        "limit": policy.limit,
    }
    match actions.get(cause.status, "grade"):
        case "exclude":
            return Grade(kind="agent failed", message=f"the agent {how}, and the policy excludes such rollouts")
        case "zero":
            return Grade(kind="agent failed", reward=0.0, message=f"the agent {how}, and the policy scores that as 0")
    if ending.work_lost:  # without a penalty, an agent could avoid a bad grade by destroying its work
        return Grade(kind="agent failed", reward=0.0 if policy.lost == "zero" else None, message=ending.work_lost)
    if ending.work_missing:
        return Grade(kind="infrastructure fault", message=f"no work to grade: {ending.work_missing}")
    return ending.grade


def _find_class(ending: Ending, status: Status, stop: str, grade: Grade | None) -> RolloutClass | None:
    if status == "cancelled":
        return "stale" if stop == STALE else "cancelled"
    if grade is not None:
        return grade.kind
    return None if ending.graded else "not graded"


def _describe(cause: _Cause, exit_code: int | None) -> str:
    match cause.status:
        case "timed out":
            return "ran out of time"
        case "limit":
            kind = "sandbox" if cause.stop == DISK_LIMIT else "session"
            return f"reached a {kind} limit ({cause.stop.replace('_', ' ')})"
        case _:
            return f"exited with code {exit_code}"
