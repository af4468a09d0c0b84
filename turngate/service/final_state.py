"""Build the final state of a rollout from its outcome or error. After a crash, build it from the stored result or events. No I/O."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import msgspec

from turngate.common.safe_text import make_encodable
from turngate.errors import TurngateError
from turngate.rollout.outcome import Outcome
from turngate.service import report
from turngate.service.active_rollout import ActiveRollout
from turngate.service.request import RolloutRequest
from turngate.service.result import ErrorInfo, RolloutEvent, RolloutResult, RolloutState
from turngate.types import Json

log = logging.getLogger("turngate")
_LOST = "lost: the service stopped before it wrote this rollout's result"
_UNREPORTED = (
    "the service stopped before it wrote the result; the status and any reward were restored from the rollout's events"
)
_TURNS_KEPT = "; the rollout's gateway has the turns recorded before the stop"


def from_work(active: ActiveRollout, work: asyncio.Task[Outcome], failed_stage: str) -> RolloutState:
    """Build the final state of a rollout whose work has ended. If the work failed, `failed_stage` is the stage that failed."""
    state = _mark_done(active.state, status="cancelled")
    if not work.cancelled() and (error := work.exception()) is not None:
        return _apply_error(active, state, error, failed_stage)
    outcome = active.outcome
    if outcome is None:
        return state
    if work.cancelled() and outcome.status == "error" and outcome.fault is None:  # cancelled before a status was set
        outcome.status = "cancelled"
    is_recorded = active.choice.mode != "direct"
    if not is_recorded:
        calls = (
            "" if outcome.calls is None else f"; the agent made {outcome.calls} call{'' if outcome.calls == 1 else 's'}"
        )
        active.notes.append(report.DIRECT_NOTE + calls)
    return msgspec.structs.replace(
        state,
        status=outcome.status,
        kind=outcome.kind,
        reward=outcome.reward,
        turns=outcome.turns if is_recorded else 0,
        sampled_tokens=outcome.sampled_tokens if is_recorded else 0,
        session=outcome.session if is_recorded else "",
        error=_name_argument(active, report.error_from_outcome(outcome)),
    )


def from_broken_report(active: ActiveRollout, error: BaseException) -> RolloutState:
    """Build the final state of a rollout whose result could not be built.

    If the outcome was already decided, it is kept, and the error becomes a note.
    """
    outcome = active.outcome
    state = _mark_done(active.state)
    failed = _apply_error(active, state, error, "result")
    if outcome is None or (outcome.status == "error" and outcome.kind is None):
        return failed
    assert failed.error is not None
    active.notes.append(f"the result is incomplete, because building it failed: {failed.error.message}")
    return msgspec.structs.replace(state, status=outcome.status, kind=outcome.kind, reward=outcome.reward)


def from_events(state: RolloutState, events: list[RolloutEvent]) -> RolloutState:
    """Build the final state of a rollout whose result was not written before the service stopped.

    The rollout is considered to have ended at its last event. If a grade was recorded, it is kept.
    """
    turns = [event.data for event in events if event.kind == "turn"]
    stages = [event.data.get("stage", "") for event in events if event.kind == "stage"]
    is_opened = any(event.kind == "opened" for event in events)  # never in direct mode
    stage = stages[-1] if stages else state.stage
    lost = ErrorInfo(boundary="gateway", stage=stage, message=_LOST + _TURNS_KEPT * is_opened)
    state = _apply_grade(_mark_done(state, status="error", kind="infrastructure fault", reward=None), events)
    return msgspec.structs.replace(
        state,
        turns=len(turns),
        sampled_tokens=sum(int(turn.get("sampled_tokens", 0)) for turn in turns),
        wall_s=round(max(0.0, (events[-1].time if events else state.started) - state.started), 3),
        session=state.rollout_id if is_opened else "",
        error=lost if state.status == "error" else None,
    )


def list_notes(state: RolloutState) -> tuple[str, ...]:
    """Return the notes for the result of a rollout whose final state was built from its events."""
    return () if state.error is not None else (_UNREPORTED + _TURNS_KEPT * bool(state.session),)


def from_result(result: RolloutResult, state: RolloutState) -> RolloutState:
    """Build the final state of a rollout from its stored result and its last stored state."""
    return _mark_done(
        state,
        status=result.status,
        kind=result.kind,
        reward=result.reward,
        turns=result.turn_count,
        sampled_tokens=result.sampled_tokens,
        wall_s=result.wall_s,
        session=result.session,
        error=result.error,
        model=result.model,
    )


def build_end_event_data(state: RolloutState) -> dict[str, Json]:
    """Build the data of the `ended` event, which is the last event of a rollout."""
    return {"status": state.status, "class": state.kind, "reward": state.reward, "wall_s": state.wall_s}


def _mark_done(state: RolloutState, **changes: object) -> RolloutState:
    return msgspec.structs.replace(state, done=True, stage="done", gateway="", **changes)


def _apply_error(active: ActiveRollout, state: RolloutState, error: BaseException, stage: str) -> RolloutState:
    """Add an error to the state of a rollout. If the error is not a `TurngateError`, log it and name only its type in the state."""
    if isinstance(error, TurngateError):
        info = ErrorInfo(boundary=error.boundary, stage=stage, message=make_encodable(error.message))
    else:
        log.error("rollout %s: internal error in Turngate", active.id, exc_info=error)
        info = ErrorInfo(boundary="gateway", stage=stage, message=f"internal error in Turngate: {type(error).__name__}")
    kind = "invalid task" if info.boundary == "task" else "infrastructure fault"
    return msgspec.structs.replace(state, status="error", error=info, kind=kind)


def _name_argument(active: ActiveRollout, info: ErrorInfo | None) -> ErrorInfo | None:
    """In an error of the setup stage, replace "the setup script" with `setup_shell`, the argument that contains the caller's script."""
    if info is None:
        return None
    message = make_encodable(info.message)
    if info.stage == "setup" and isinstance(active.request, RolloutRequest):
        message = message.replace("the setup script", "setup_shell", 1)
    return msgspec.structs.replace(info, message=message)


def _apply_grade(state: RolloutState, events: list[RolloutEvent]) -> RolloutState:
    """Add the grade, if any, to the state. `outcome` events and the stage event `done` contain it; `done` also contains the status."""
    for event in events:
        if event.kind == "stage" and event.data.get("stage") == "done":
            status, kind = event.data.get("status"), event.data.get("class")
        elif event.kind == "outcome":
            status, kind = state.status, event.data.get("kind")
        else:
            continue
        values = {**msgspec.to_builtins(state), "status": status, "kind": kind, "reward": event.data.get("reward")}
        with suppress(msgspec.ValidationError):  # a remote gateway may have a different version
            state = msgspec.convert(values, RolloutState)
    return state
