"""Check that a session's attempt agrees with the session's settings and outcome, and with the feeds.

At most one attempt at a rollout counts. A superseded attempt, or one with a cancelled session, must not be waiting in a feed.
"""

from __future__ import annotations

import json
from reprlib import repr as brief

from turngate.types import Json
from turngate.verify.findings import CheckResults, VerifyCheck
from turngate.verify.store_reader import DECODE_ERRORS, StoredAttempt, StoredSession

_STATES = ("running", "settled", "failed", "superseded")
_FAULT = "infrastructure fault"


def check_attempts(session: StoredSession, results: CheckResults) -> None:
    attempts = session.related.attempts
    if attempts is None:
        return  # the folder was written by a version that did not store attempts
    with results.check(
        "structure", "attempt", "the session's attempt agrees with its outcome, and at most one attempt counts"
    ) as check:
        _check_name(session, attempts, check)
        for attempt in attempts:
            _check_attempt(session, attempt, check)
        superseded = any(attempt.state == "superseded" for attempt in attempts)
        if superseded or (session.status == "cancelled" and session.related.outcome is not None):
            why = "superseded" if superseded else "cancelled"
            waiting = sum(number is None for number in session.related.deliveries)
            check.expect(
                not waiting, f"the session is {why}, but is waiting for its group in a feed (feeds: {waiting})"
            )
    if superseded and any(number is not None for number in session.related.deliveries):
        results.note("attempt", "the session was superseded after a feed had delivered its group")


def _check_name(session: StoredSession, attempts: tuple[StoredAttempt, ...], check: VerifyCheck) -> None:
    """Check that the attempt in the session's settings, if any, is registered and matches the outcome. Old sessions name no attempt."""
    named = (session.config.rollout, session.config.attempt)
    if named[0] and not session.config_error:
        registered = [(attempt.rollout, attempt.attempt) for attempt in attempts]
        check.expect(
            named in registered,
            f"the session's settings name attempt {named[1]} of {brief(named[0])}, which is not registered",
        )
        outcome = _decode_outcome(session)
        if outcome is not None:
            recorded = outcome.get("attempt", 1)
            check.expect(recorded == named[1], f"the outcome belongs to attempt {brief(recorded)}, not {named[1]}")


def _check_attempt(session: StoredSession, attempt: StoredAttempt, check: VerifyCheck) -> None:
    state = attempt.state
    number = attempt.attempt
    valid = isinstance(number, int) and number >= 1
    check.expect(valid, f"the attempt number is {brief(number)}, but must be at least 1")
    if not check.expect(
        state in _STATES, f"the attempt's state is {brief(state)}, which is not one of {', '.join(_STATES)}"
    ):
        return
    check.expect(
        state != "settled" or not attempt.others_settled,
        f"other attempts at {brief(attempt.rollout)} also count: {attempt.others_settled}",
    )
    if state == "superseded":
        return
    expected = _expect_state(session)
    if expected:
        check.expect(
            state == expected,
            f"the attempt is {state}, but must be {expected}, given the session's outcome or the lack of one",
        )


def _expect_state(session: StoredSession) -> str:
    """Return the state that the attempt must have, given the session's outcome, or "" if the outcome cannot be read."""
    if session.related.outcome is None:
        return "running"
    outcome = _decode_outcome(session)
    kind = None if outcome is None else outcome.get("kind")
    if not isinstance(kind, str):
        return ""
    return "failed" if kind == _FAULT or session.status == "cancelled" else "settled"


def _decode_outcome(session: StoredSession) -> dict[str, Json] | None:
    """Return the outcome as a JSON object, or None if there is none or it cannot be read. Another check reports unreadable outcomes."""
    raw = None if session.related.outcome is None else session.related.outcome.raw
    try:
        stored: Json = json.loads(raw) if isinstance(raw, (bytes, str)) else None
    except DECODE_ERRORS:
        return None
    return stored if isinstance(stored, dict) else None
