"""What is stored against what was told of it: a gateway writes the event of a turn, of a session's end and of its outcome in the
transaction of the thing itself, so each says what the other does.

What events tell is said here a second time. They have no checksum: who changes both is not found out.
"""

from __future__ import annotations

import json
from reprlib import repr as brief

from turngate.types import Json
from turngate.verify.findings import CheckResults, VerifyCheck
from turngate.verify.store_reader import DECODE_ERRORS, StoredEvent, StoredSession, StoredTurn

_ENDS = ("sealed", "cancelled")
_COMPARED = ("opened", "turn", "outcome", *_ENDS)
# What is told of an outcome, and what it is where the outcome itself does not say.
_OUTCOME_DEFAULTS: dict[str, Json] = {
    "kind": None,
    "reward": None,
    "resolved": None,
    "task": "",
    "group": "",
    "attempt": 1,
}

EventData = tuple[StoredEvent, dict[str, Json]]  # an event, and its data


def check_events(session: StoredSession, results: CheckResults) -> None:
    with results.check("structure", "events", "turns, end and outcome are those that events tell of") as check:
        known, why = _events_since_opening(session)
        if why:
            check.skip(why)
            return
        told = [(event, data) for event in known if (data := _decode_event(event, check)) is not None]
        if len(told) < len(known):
            return  # what seems to be missing may be what cannot be read
        of = {kind: [one for one in told if one[0].kind == kind] for kind in _COMPARED}
        _check_opening(session, of["opened"][0][1], check)
        _check_turns(session, of["turn"], check)
        _check_end(session, [one for one in told if one[0].kind in _ENDS], check)
        _check_outcome(session, of["outcome"], check)


def _events_since_opening(session: StoredSession) -> tuple[list[StoredEvent], str]:
    """The events from the opening on, or why that is not all of them. An id may have been used before: only its last session counts."""
    if session.related.events is None:
        return [], "this folder is of a version that stored no events"
    known = [event for event in session.related.events if event.kind in _COMPARED]
    opened = [n for n, event in enumerate(known) if event.kind == "opened"]
    if not opened:
        return [], "its events do not go back to its opening: they were removed, or it is older than events are"
    known = known[opened[-1] :]
    if known[0].seq <= session.related.pruned:
        return [], "some of its events may have been removed for their age"
    return known, ""


def _decode_event(event: StoredEvent, check: VerifyCheck) -> dict[str, Json] | None:
    data = _decode_object(event.data)
    check.expect(data is not None, f"event {event.seq} ({event.kind}) cannot be read")
    return data


def _decode_object(raw: object) -> dict[str, Json] | None:
    """A JSON object; None where it is none."""
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
            f"it was opened with {name} {brief(data.get(name))}, and its settings have {brief(stored)}",
        )


def _check_turns(session: StoredSession, told: list[EventData], check: VerifyCheck) -> None:
    """Every turn was told of once, as it is."""
    turns = {turn.id: turn for turn in session.turns}
    stored = {row.id for row in session.rows if row.kind == "sampled"}
    seen: set[int] = set()
    for event, data in told:
        node = data.get("node")
        if not isinstance(node, int) or node not in stored:
            gone = f"finish {brief(data.get('finish'))}, {brief(data.get('sampled_tokens'))} sampled tokens"
            check.expect(False, f"event {event.seq} tells of a turn {brief(node)} that is not stored: {gone}")
            continue
        check.expect(node not in seen, f"event {event.seq} tells of it a second time", node=node)
        seen.add(node)
        if node in turns:  # else it is told elsewhere what is wrong with it
            _check_turn(turns[node], event, data, check)
    for node in sorted(stored - seen):
        check.expect(False, "no event tells of this turn, and each is written with one", node=node)


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
            f"{name}: {brief(value)} is stored, and event {event.seq} told {brief(data.get(name))}",
            node=turn.id,
        )


def _check_end(session: StoredSession, told: list[EventData], check: VerifyCheck) -> None:
    was = told[-1][0].kind if told else "open"
    what = f"event {told[-1][0].seq} told that it is {was}" if told else "no event tells that it has ended"
    check.expect(session.status == was, f"its status is {brief(session.status)}, and {what}")
    if told and not session.orphans:
        event, data = told[-1]
        whole = sum(turn.info.finish != "abort" for turn in session.turns)
        check.expect(
            data.get("turns") == whole,
            f"{whole} turns that were not aborted are stored, and event {event.seq} told of {brief(data.get('turns'))}",
        )


def _check_outcome(session: StoredSession, told: list[EventData], check: VerifyCheck) -> None:
    """The newest event is of the outcome that is stored: one that replaces another has an event of its own."""
    outcome = session.related.outcome
    if outcome is None:
        check.expect(not told, "an outcome was recorded, as an event tells, and none is stored")
        return
    if not check.expect(bool(told), "an outcome is stored, and no event tells that one was recorded"):
        return
    event, data = told[-1]
    stored = _decode_object(outcome.raw)
    if stored is None:
        return  # told where outcomes are read
    for name, otherwise in _OUTCOME_DEFAULTS.items():
        value = stored.get(name, otherwise)
        check.expect(
            data.get(name) == value,
            f"outcome: its {name} is stored as {brief(value)}, and event {event.seq} told {brief(data.get(name))}",
        )
