"""Decide how a rollout ended: who is to blame, its class and reward, and whether to try it again. Pure, without I/O.

    a stage failed             task: invalid task; agent: agent failed; anything else: infrastructure fault
    cancelled                  by the caller, or somebody ended its session at the gateway: cancelled; because it was too old: stale
    the engine failed          infrastructure fault, also if the engine went silent until the agent gave up or ran out of time
    the agent ended            by itself, out of time or at a limit: its work is graded, excluded or 0, as the policy says
    there is nothing to grade  no turn: agent failed; the agent destroyed its work: as the policy says; otherwise infrastructure fault

Only what the agent did is graded. A rollout that others broke never has a reward.
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

SILENT_SHARE = 0.5  # of the agent's time: if the engine was silent for longer, the engine is to blame
PATIENCE_S = 60.0  # an agent that failed after less silence than this gave up too early
SESSION_LIMITS = tuple(field.name for field in msgspec.structs.fields(Limits))
# The class of a fault by who is to blame. Engine, sandbox, store and gateway are infrastructure.
_FAULT_CLASSES: Mapping[Boundary, OutcomeClass] = {"task": "invalid task", "agent": "agent failed"}
# Who is to blame if a stage takes too long; in all other stages it is the sandbox.
_TIMEOUT_ERRORS: Mapping[Stage, type[TurngateError]] = {
    "setup": TaskError,
    "session": TurngateError,
    "seal": TurngateError,
}

Retry = Literal["", "fault", "stale"]


class Ending(msgspec.Struct, kw_only=True):
    """The facts about how a rollout ended. They are filled in as they become known; `classify` judges them."""

    cancelled: bool = False  # the caller cancelled the rollout
    complete: bool = False  # the agent ran to its end, and its work was collected
    fault: Fault | None = None  # a stage failed
    ran_s: float | None = None  # how long the agent ran; None: it did not
    exit_code: int | None = None  # of the agent; None: it did not end by itself
    limit: str = ""  # the limit that the session reached while the agent ran
    session_ended: bool = False  # the session was over while the agent ran
    stop: str = ""  # why the session ended: a limit, `STALE`, or a sentence that says who ended it
    sealed_stop: str = ""  # why the session ended, as the gateway says after it was sealed
    last_error: CallError | None = None
    silent_s: float = 0.0  # how long the agent waited for the engine at the end without receiving a token
    turns: int = 0
    graded: bool = True  # the task has a grader, and the caller wants a grade
    work_lost: str = ""  # why the agent is to blame that there is no work
    work_missing: str = ""  # why there is no work, and the agent is not to blame
    grade: Grade | None = None  # the grader's


class Classification(msgspec.Struct, frozen=True, kw_only=True):
    """What the facts amount to."""

    status: Status
    kind: RolloutClass | None = None  # None: the work has to be graded first
    grade: Grade | None = None  # None where the class is not one that is recorded
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
    """Judge the facts known so far."""
    cause = _find_cause(ending)
    status: Status = cause.status
    if ending.cancelled and (ending.graded or not ending.complete):  # without its grade a rollout is not complete
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
    """Build the error of a stage that took too long. Its type says who is to blame."""
    return _TIMEOUT_ERRORS.get(stage, SandboxError)(f"stage {stage} took longer than {limit_s:.0f} s")


def _find_cause(ending: Ending) -> _Cause:
    """How it ended and who is to blame, before anything is graded."""
    is_stale = ending.sealed_stop == STALE
    stop = STALE if is_stale else ending.stop
    if ending.fault is not None:
        return _Cause("error", stop, ending.fault)
    if is_stale:  # however the agent reacted to it
        return _Cause("cancelled", stop)
    status = _find_run_status(ending)
    if status not in ("finished", "failed", "timed out"):
        return _Cause(status, stop)
    if ending.sealed_stop in SESSION_LIMITS:  # the agent ended before the event of the limit arrived
        return _Cause("limit", ending.sealed_stop)
    if ending.last_error is not None:
        return _blame_call(ending, ending.last_error, status)
    if _was_engine_silent(ending, status):
        message = (
            f"the engine went silent: it sent nothing for {ending.silent_s:.0f} of the {ending.ran_s or 0:.0f} s "
            "that the agent ran"
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
    """The agent ended after a failed call. That is its own doing only if the call was at fault."""
    if error.kind == ContextOverflow.kind:
        return _Cause("limit", error.kind)
    if error.kind == EngineRejected.kind and ending.turns:  # the engine accepted other calls
        return _Cause(status, ending.stop, note=f"the engine rejected the agent's last call: {error.message}")
    return _Cause("error", ending.stop, Fault("agent", error.boundary, error.message))


def _was_engine_silent(ending: Ending, status: Status) -> bool:
    """Whether the engine took the agent's time without an error. A slow engine is not silent: its tokens arrive."""
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
        return Grade(kind="agent failed", message=f"it {how} before its first turn: there is nothing to grade")
    actions: Mapping[Status, EndAction] = {
        "timed out": policy.timed_out,
        "failed": policy.failed,
        "limit": policy.limit,
    }
    match actions.get(cause.status, "grade"):
        case "exclude":
            return Grade(kind="agent failed", message=f"it {how}, and the policy excludes such rollouts")
        case "zero":
            return Grade(kind="agent failed", reward=0.0, message=f"it {how}, and the policy counts that as 0")
    if ending.work_lost:  # at no price, destroying the work would be a way out of every bad grade
        return Grade(kind="agent failed", reward=0.0 if policy.lost == "zero" else None, message=ending.work_lost)
    if ending.work_missing:
        return Grade(kind="infrastructure fault", message=f"there is no work to grade: {ending.work_missing}")
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
            return f"reached the limit of its session ({cause.stop.replace('_', ' ')})"
        case _:
            return f"ended with exit code {exit_code}"
