"""How the session and its rollout ended, as it lies beside the trace: can a gateway have recorded this?

What an outcome may be is said here a second time. Nothing sums it up; that its reward is the one that was recorded, only events tell.
"""

from __future__ import annotations

import json
import math
from reprlib import repr as brief

from turngate.types import Json
from turngate.verify.findings import CheckResults, VerifyCheck
from turngate.verify.store_reader import DECODE_ERRORS, StoredSession

_STATUSES = ("open", "sealed", "cancelled")
_JUDGED = ("graded", "agent failed")  # somebody, or the agent's own failing, decided: there may be a reward
_UNJUDGED = ("invalid task", "infrastructure fault")  # there is never one
_MAX_BYTES = 262_144  # bytes
_MAX_ATTEMPT = 2_147_483_648
_TEXTS = ("message", "group", "task")
_FIELDS = frozenset({"kind", "reward", "resolved", "attempt", "data", *_TEXTS})


def check_outcome(session: StoredSession, results: CheckResults) -> None:
    with results.check("structure", "status", "the session is open, or was ended at a time that is known") as check:
        known = check.expect(
            session.status in _STATUSES,
            f"its status is {brief(session.status)}, which is none of {', '.join(_STATUSES)}",
        )
        if known:
            is_open, closed = session.status == "open", session.closed is not None
            check.expect(not (is_open and closed), "it is open, and there is a time at which it was closed")
            check.expect(is_open or closed, f"it is {session.status}, and nothing says when it was closed")
    with results.check("structure", "outcome", "the outcome, where there is one, can be how a rollout ended") as check:
        if (outcome := session.related.outcome) is not None:
            _check_stored_outcome(session, outcome.raw, outcome.recorded, check)


def _check_stored_outcome(session: StoredSession, raw: object, recorded: object, check: VerifyCheck) -> None:
    check.expect(session.status != "open", "the session is still open, and has an outcome")
    timed = isinstance(recorded, float) and math.isfinite(recorded)
    check.expect(timed, f"it was recorded at {brief(recorded)}, which is no time")
    if not isinstance(raw, (bytes, str)):
        check.expect(False, f"it is stored as the number {brief(raw)}, which is no outcome")
        return
    try:
        text = raw.decode() if isinstance(raw, bytes) else raw
        told = json.loads(text, object_pairs_hook=_reject_duplicate_names, parse_constant=_reject_constant)
    except DECODE_ERRORS as error:
        check.expect(False, f"it is no JSON: {error}")
        return
    if not check.expect(isinstance(told, dict), "it is no JSON object"):
        return
    # A gateway writes bytes; text is what comes of an edit by hand.
    check.expect(isinstance(raw, bytes), "it is stored as text, and a gateway stores bytes")
    check.expect(len(raw) <= _MAX_BYTES, f"it has {len(raw)} bytes; a gateway records {_MAX_BYTES} at most")
    _check_fields(told, check)


def _reject_duplicate_names(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """A JSON object. One that says a thing twice says nothing."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same name twice")
    return found


def _reject_constant(name: str) -> Json:
    raise ValueError(f"{name} is no number of JSON")  # Python reads NaN and Infinity, and nobody else does


def _check_fields(told: dict[str, Json], check: VerifyCheck) -> None:
    unknown = sorted(told.keys() - _FIELDS)
    check.expect(not unknown, f"it has {', '.join(map(brief, unknown[:5]))}, which no outcome has")
    kind, reward = told.get("kind"), told.get("reward")
    kinds = (*_JUDGED, *_UNJUDGED)
    check.expect(kind in kinds, f"kind: {brief(kind)} is none of {', '.join(kinds)}")
    check.expect(reward is None or _is_finite(reward), f"reward: {brief(reward)} is neither a finite number nor null")
    check.expect(
        reward is None or kind not in _UNJUDGED,
        f"reward: {brief(reward)}, and nobody judges a rollout that ended as {kind!r}",
    )
    resolved, attempt = told.get("resolved"), told.get("attempt", 1)
    check.expect(
        resolved is None or isinstance(resolved, bool), f"resolved: {brief(resolved)} is none of true, false, null"
    )
    counted = isinstance(attempt, int) and not isinstance(attempt, bool) and 0 <= attempt <= _MAX_ATTEMPT
    check.expect(counted, f"attempt: {brief(attempt)} is no number of one")
    for name in _TEXTS:
        check.expect(isinstance(told.get(name, ""), str), f"{name}: {brief(told.get(name))} is no text")


def _is_finite(value: Json) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can be
        return False
