"""Check that a session agrees with its events.

A gateway writes a turn, the end of a session or an outcome in the same transaction as its event, so the record and the event must agree.
The contents of events are defined here a second time, independently of the gateway. Events have no checksum, so this check cannot detect a
change that was made to both a record and its event.
"""

from __future__ import annotations

import json
from reprlib import repr as brief

from turngate.types import Json
from turngate.verify.findings import CheckResults, VerifyCheck
from turngate.verify.store_reader import DECODE_ERRORS, StoredEvent, StoredSession, StoredTurn

_ENDS = ("sealed", "cancelled")
_COMPARED = ("opened", "turn", "outcome", "refused", "repeated", "superseded", *_ENDS)
# The fields of an outcome that its event repeats, and their defaults.
_OUTCOME_DEFAULTS: dict[str, Json] = {
    "kind": None,
    "reward": None,
    "resolved": None,
    "task": "",
    "group": "",
    "attempt": 1,
}

EventData = tuple[StoredEvent, dict[str, Json]]  # an event and its decoded data


def check_events(session: StoredSession, results: CheckResults) -> None:
    with results.check("structure", "events", "turns, end and outcome agree with their events") as check:
        events, why = _events_since_opening(session)
        if why:
            check.skip(why)
            return
        decoded = [(event, data) for event in events if (data := _decode_event(event, check)) is not None]
        if len(decoded) < len(events):
            return  # an event that seems to be missing may be an unreadable one
        by_kind = {kind: [pair for pair in decoded if pair[0].kind == kind] for kind in _COMPARED}
        _check_opening(session, by_kind["opened"][0][1], check)
        _check_turns(session, by_kind["turn"], check)
        _check_end(session, [pair for pair in decoded if pair[0].kind in _ENDS], check)
        _check_outcome(session, by_kind["outcome"], check)
        _check_refusals(session, by_kind["refused"], by_kind["repeated"], check)
        _check_superseded(session, by_kind["superseded"], check)


def _events_since_opening(session: StoredSession) -> tuple[list[StoredEvent], str]:
    """Return the events since the session was opened, or the reason why they are incomplete.

    An id may have been reused, so only the events of the last session with this id are returned.
    """
    if session.related.events is None:
        return [], "this folder was written by a version of Turngate that did not store events"
    events = [event for event in session.related.events if event.kind in _COMPARED]
    opened = [n for n, event in enumerate(events) if event.kind == "opened"]
    if not opened:
        return (
            [],
            "the session's opening event is missing: it was pruned, or the session was recorded before Turngate stored events",
        )
    events = events[opened[-1] :]
    if events[0].seq <= session.related.pruned:
        return [], "some of the session's events may have been pruned"
    return events, ""


def _decode_event(event: StoredEvent, check: VerifyCheck) -> dict[str, Json] | None:
    data = _decode_object(event.data)
    check.expect(data is not None, f"event {event.seq} ({event.kind}) cannot be read")
    return data


def _decode_object(raw: object) -> dict[str, Json] | None:
    """Decode a JSON object. Return None if the value is anything else."""
    try:
        data = json.loads(raw.decode() if isinstance(raw, bytes) else raw) if isinstance(raw, (bytes, str)) else None
    except DECODE_ERRORS:
        return None
    return data if isinstance(data, dict) else None


def _check_opening(session: StoredSession, data: dict[str, Json], check: VerifyCheck) -> None:
    if session.config_error:
        return
    for name, stored in (("mode", session.config.mode), ("model", session.config.model)):
        check.expect(
            data.get(name) == stored,
            f"the session was opened with {name} {brief(data.get(name))}, but its settings have {brief(stored)}",
        )


def _check_turns(session: StoredSession, events: list[EventData], check: VerifyCheck) -> None:
    """Check that every stored turn has exactly one event, and that the event agrees with the turn."""
    turns = {turn.id: turn for turn in session.turns}
    stored = {row.id for row in session.rows if row.kind == "sampled"}
    seen: set[int] = set()
    for event, data in events:
        node = data.get("node")
        if not isinstance(node, int) or node not in stored:
            missing = f"finish {brief(data.get('finish'))}, sampled tokens: {brief(data.get('sampled_tokens'))}"
            check.expect(False, f"event {event.seq} reports turn {brief(node)}, which is not stored ({missing})")
            continue
        check.expect(node not in seen, f"event {event.seq} reports this turn a second time", node=node)
        seen.add(node)
        if node in turns:  # otherwise a different check reports the problem
            _check_turn(turns[node], event, data, check)
    for node in sorted(stored - seen):
        check.expect(False, "no event reports this turn, although every turn is written with an event", node=node)


def _check_turn(turn: StoredTurn, event: StoredEvent, data: dict[str, Json], check: VerifyCheck) -> None:
    stored: dict[str, Json] = {
        "finish": turn.info.finish,
        "prompt_tokens": turn.parent.length,
        "sampled_tokens": len(turn.ids),
        "cause": turn.info.cause,
    }
    for name, value in stored.items():
        check.expect(
            data.get(name) == value,
            f"its {name} is stored as {brief(value)}, but event {event.seq} reports {brief(data.get(name))}",
            node=turn.id,
        )


def _check_end(session: StoredSession, events: list[EventData], check: VerifyCheck) -> None:
    status = events[-1][0].kind if events else "open"
    what = f"event {events[-1][0].seq} reports it as {status}" if events else "no event reports its end"
    check.expect(session.status == status, f"the session's status is {brief(session.status)}, but {what}")
    if events and not session.orphans:
        event, data = events[-1]
        whole = sum(turn.info.finish != "abort" for turn in session.turns)
        check.expect(
            data.get("turns") == whole,
            f"the number of turns that were not aborted is {whole}, but event {event.seq} reports {brief(data.get('turns'))}",
        )


def _check_superseded(session: StoredSession, events: list[EventData], check: VerifyCheck) -> None:
    """Check that the superseded attempts are the ones that events report.

    A cell may ship a session to the shared store after its attempt was superseded, for example because the cell was considered lost. The
    `superseded` event then precedes the opening event. Other `superseded` events before the opening event are ignored: they belong to a
    deleted session with the same id.
    """
    attempts = session.related.attempts or ()
    stored = sorted(((a.rollout, a.attempt) for a in attempts if a.state == "superseded"), key=str)
    decoded = [_decode_object(event.data) for event in session.related.events or () if event.kind == "superseded"]
    every = [(data.get("rollout"), data.get("attempt")) for data in decoded if data is not None]
    since_opening = [(data.get("rollout"), data.get("attempt")) for _, data in events]
    before = {pair for pair in every if pair in stored and pair not in since_opening}
    reported = sorted([*since_opening, *before], key=str)
    check.expect(
        stored == reported, f"events report the superseded attempts {brief(reported)}, but {brief(stored)} are stored"
    )


def _check_refusals(
    session: StoredSession, refused: list[EventData], repeated: list[EventData], check: VerifyCheck
) -> None:
    """Check that the refused calls, and the refused calls that were later repeated successfully, are the ones that events report."""
    stored = [(refusal.call, refusal.status, refusal.message) for refusal in session.related.refused]
    told = [(data.get("call"), data.get("status"), data.get("message")) for _, data in refused]
    check.expect(
        stored == told,
        f"the stored refused calls ({len(stored)}) differ from those that events report ({len(told)})",
    )
    marked = [refusal.call for refusal in session.related.refused if refusal.repeated]
    reported = sorted((data.get("call") for _, data in repeated), key=str)
    check.expect(
        sorted(marked, key=str) == reported,
        f"the refused calls {brief(marked)} are stored as repeated, but events report {brief(reported)}",
    )


def _check_outcome(session: StoredSession, events: list[EventData], check: VerifyCheck) -> None:
    """Check the stored outcome against its newest event. An outcome that was replaced has several events."""
    outcome = session.related.outcome
    if outcome is None:
        check.expect(not events, "an event reports an outcome, but none is stored")
        return
    if not check.expect(bool(events), "an outcome is stored, but no event reports it"):
        return
    event, data = events[-1]
    stored = _decode_object(outcome.raw)
    if stored is None:
        return  # reported by the outcome check
    for name, otherwise in _OUTCOME_DEFAULTS.items():
        value = stored.get(name, otherwise)
        check.expect(
            data.get(name) == value,
            f"the outcome's {name} is stored as {brief(value)}, but event {event.seq} reports {brief(data.get(name))}",
        )
