"""Check that a gateway could have recorded the session's status and outcome.

The fields of an outcome are defined here a second time, independently of the gateway. An outcome has no checksum, so `events.py` compares
it with its event.
"""

from __future__ import annotations

import json
import math
from reprlib import repr as brief

from turngate.types import Json
from turngate.verify.findings import CheckResults, VerifyCheck
from turngate.verify.store_reader import DECODE_ERRORS, StoredSession

_STATUSES = ("open", "sealed", "cancelled")
_JUDGED = ("graded", "agent failed")  # the agent's work was judged, so a reward is possible
_UNJUDGED = ("invalid task", "infrastructure fault")  # never have a reward
_MAX_BYTES = 262_144
_MAX_ATTEMPT = 2_147_483_648
_TEXTS = ("message", "group", "task")
_FIELDS = frozenset({"kind", "reward", "resolved", "attempt", "data", "turn_rewards", *_TEXTS})


def check_outcome(session: StoredSession, results: CheckResults) -> None:
    with results.check("structure", "status", "the session is open, or ended at a known time") as check:
        known = check.expect(
            session.status in _STATUSES,
            f"the session's status is {brief(session.status)}, which is not one of {', '.join(_STATUSES)}",
        )
        if known:
            is_open, closed = session.status == "open", session.closed is not None
            check.expect(not (is_open and closed), "the session is open, but has a closing time")
            check.expect(is_open or closed, f"the session is {session.status}, but has no closing time")
    with results.check("structure", "outcome", "the outcome, if any, is valid") as check:
        if (outcome := session.related.outcome) is not None:
            _check_stored_outcome(session, outcome.raw, outcome.recorded, check)


def _check_stored_outcome(session: StoredSession, raw: object, recorded: object, check: VerifyCheck) -> None:
    check.expect(session.status != "open", "the session is still open but has an outcome")
    timed = isinstance(recorded, float) and math.isfinite(recorded)
    check.expect(timed, f"the outcome was recorded at {brief(recorded)}, which is not a time")
    if not isinstance(raw, (bytes, str)):
        check.expect(False, f"the outcome is stored as {brief(raw)}, which is neither bytes nor text")
        return
    try:
        text = raw.decode() if isinstance(raw, bytes) else raw
        outcome = json.loads(text, object_pairs_hook=_reject_duplicate_names, parse_constant=_reject_constant)
    except DECODE_ERRORS as error:
        check.expect(False, f"the outcome is not valid JSON: {error}")
        return
    if not check.expect(isinstance(outcome, dict), "the outcome is not a JSON object"):
        return
    # A gateway writes bytes, so text means that the outcome was edited by hand.
    check.expect(isinstance(raw, bytes), "the outcome is stored as text, but a gateway stores bytes")
    check.expect(
        len(raw) <= _MAX_BYTES, f"the outcome has {len(raw)} bytes, but a gateway records at most {_MAX_BYTES}"
    )
    _check_fields(outcome, check)


def _reject_duplicate_names(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """Build a JSON object from its names and values. Raise `ValueError` if a name occurs twice."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("an object contains a duplicate key")
    return fields


def _reject_constant(name: str) -> Json:
    raise ValueError(f"{name} is not a JSON number")  # Python's parser accepts NaN and Infinity by default


def _check_fields(outcome: dict[str, Json], check: VerifyCheck) -> None:
    unknown = sorted(outcome.keys() - _FIELDS)
    check.expect(not unknown, f"the outcome has unknown fields: {', '.join(map(brief, unknown[:5]))}")
    kind, reward = outcome.get("kind"), outcome.get("reward")
    kinds = (*_JUDGED, *_UNJUDGED)
    check.expect(kind in kinds, f"the outcome's kind is {brief(kind)}, which is not one of {', '.join(kinds)}")
    check.expect(
        reward is None or is_finite(reward),
        f"the outcome's reward is {brief(reward)}, which is neither a finite number nor null",
    )
    check.expect(
        reward is None or kind not in _UNJUDGED,
        f"the outcome's reward is {brief(reward)}, but a rollout that ended as {kind!r} has no reward",
    )
    resolved, attempt = outcome.get("resolved"), outcome.get("attempt", 1)
    check.expect(
        resolved is None or isinstance(resolved, bool),
        f"the outcome's resolved field is {brief(resolved)}, which is not true, false or null",
    )
    counted = isinstance(attempt, int) and not isinstance(attempt, bool) and 0 <= attempt <= _MAX_ATTEMPT
    check.expect(
        counted, f"the outcome's attempt is {brief(attempt)}, which is not an integer from 0 to {_MAX_ATTEMPT}"
    )
    for name in _TEXTS:
        check.expect(
            isinstance(outcome.get(name, ""), str), f"the outcome's {name} is {brief(outcome.get(name))}, not text"
        )


def is_finite(value: Json) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False
