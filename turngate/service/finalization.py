"""How a rollout ended, as callers are told it: from what its work came to, or did not come to. `Rollouts` calls this."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

import msgspec

from turngate.common.safe_text import make_encodable
from turngate.errors import TurngateError
from turngate.rollout.outcome import Outcome, Status
from turngate.service import report
from turngate.service.active_rollout import Live
from turngate.service.request import Asked
from turngate.service.result import Event, RolloutResult, RolloutState, Trouble
from turngate.store.outcomes import OutcomeClass

log = logging.getLogger("turngate")
LOST = "lost: the service ended while this rollout ran; what was recorded until then is at its gateway"

UNSHOWN = "the service ended before its result was made: how it was graded is known, and its turns are at its gateway"


def settled(live: Live, work: asyncio.Task[Outcome], outcome: Outcome | None, failed_at: str) -> RolloutState:
    """How it ended."""
    state = msgspec.structs.replace(live.state(), done=True, stage="done", gateway="", status="cancelled")
    if not work.cancelled() and (error := work.exception()) is not None:
        return msgspec.structs.replace(state, status="error", **failed(live, error, failed_at))
    if outcome is None:
        return state
    if work.cancelled() and outcome.status == "error" and outcome.fault is None:  # it never came to say anything else
        outcome.status = "cancelled"
    recorded = live.choice.mode != "direct"
    if not recorded:
        made = "" if outcome.calls is None else f"; it made {outcome.calls} calls"
        live.notes.append(report.DIRECT + made)
    return msgspec.structs.replace(
        state,
        status=outcome.status,
        kind=outcome.kind,
        reward=outcome.reward,
        turns=outcome.turns if recorded else 0,
        sampled_tokens=outcome.sampled_tokens if recorded else 0,
        session=outcome.session if recorded else "",
        error=_in_the_callers_words(live, report.trouble(outcome)),
    )


def _in_the_callers_words(live: Live, trouble: Trouble | None) -> Trouble | None:
    """A rollout knows its setup by a file's name, and who asked by an argument's."""
    if trouble is not None:
        trouble = msgspec.structs.replace(trouble, message=make_encodable(trouble.message))
    if trouble is None or trouble.stage != "setup" or not isinstance(live.asked, Asked):
        return trouble
    return msgspec.structs.replace(trouble, message=trouble.message.replace("setup.sh", "setup_shell:", 1))


def failed(live: Live, error: BaseException, stage: str) -> dict[str, Any]:
    """What came before the rollout itself, or was Turngate's own fault."""
    if isinstance(error, TurngateError):
        trouble = Trouble(boundary=error.boundary, stage=stage, message=make_encodable(error.message))
    else:
        log.error("rollout %s failed in a way that nobody thought of", live.id, exc_info=error)
        trouble = Trouble(boundary="gateway", stage=stage, message=f"Turngate itself failed: {type(error).__name__}")
    return {"error": trouble, "kind": "invalid task" if trouble.boundary == "task" else "infrastructure fault"}


def broken(live: Live, error: BaseException) -> tuple[RolloutState, RolloutResult]:
    """Its result could not be made. How it was graded is known all the same, where it came so far."""
    outcome = live.rollout.outcome if live.rollout is not None else None
    state = msgspec.structs.replace(live.state(), done=True, stage="done", gateway="")
    wrong = failed(live, error, "result")
    if outcome is None or (outcome.status == "error" and outcome.kind is None):
        state = msgspec.structs.replace(state, status="error", **wrong)
    else:
        state = msgspec.structs.replace(state, status=outcome.status, kind=outcome.kind, reward=outcome.reward)
        live.notes.append(f"its result could not be made, and has no more than this: {wrong['error'].message}")
    return state, report.bare(state, outcome, live.notes)


def lost(state: RolloutState, events: list[Event]) -> RolloutState:
    """What ran when the process was killed: as far as its events tell. Its time is counted up to the last of them. A grade that was
    recorded stands; what else a result has is lost."""
    turns = [event.data for event in events if event.kind == "turn"]
    stages = [event.data.get("stage", "") for event in events if event.kind == "stage"]
    opened = any(event.kind == "opened" for event in events)
    stage = stages[-1] if stages else state.stage
    told = _decided(events)
    return msgspec.structs.replace(
        state,
        done=True,
        stage="done",
        status=told.status,
        kind=told.kind,
        reward=told.reward,
        turns=len(turns),
        sampled_tokens=sum(int(turn.get("sampled_tokens", 0)) for turn in turns),
        wall_s=round(max(0.0, (events[-1].time if events else state.started) - state.started), 3),
        session=state.rollout_id if opened else "",
        error=Trouble(boundary="gateway", stage=stage, message=LOST) if told.status == "error" else None,
        gateway="",
    )


class _Decided(msgspec.Struct, frozen=True):
    """How a rollout ended, where its events tell that."""

    status: Status = "error"
    kind: OutcomeClass | None = "infrastructure fault"
    reward: float | None = None


def _decided(events: list[Event]) -> _Decided:
    """The `outcome` that its gateway recorded says how it was graded; stage `done` how its agent ended, too."""
    found = _Decided()
    for event in events:
        if event.kind == "stage" and event.data.get("stage") == "done":
            known = {
                "status": event.data.get("status"),
                "kind": event.data.get("class"),
                "reward": event.data.get("reward"),
            }
        elif event.kind == "outcome":
            known = {"status": found.status, "kind": event.data.get("kind"), "reward": event.data.get("reward")}
        else:
            continue
        with suppress(msgspec.ValidationError):  # a gateway elsewhere may be of another version
            found = msgspec.convert(known, _Decided)
    return found


def state_of(result: RolloutResult, begun: RolloutState) -> RolloutState:
    """Of a rollout whose result was written."""
    return msgspec.structs.replace(
        begun,
        done=True,
        stage="done",
        status=result.status,
        kind=result.kind,
        reward=result.reward,
        turns=result.turn_count,
        sampled_tokens=result.sampled_tokens,
        wall_s=result.wall_s,
        session=result.session,
        error=result.error,
        model=result.model,
        gateway="",
    )


def unfinished(state: RolloutState) -> RolloutResult:
    """A result that says how far it is."""
    return msgspec.structs.replace(report.bare(state, None, ()), done=False)
