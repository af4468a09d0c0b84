"""Find the session that a command line names: by its id, by a prefix of its id, or as the last one."""

from __future__ import annotations

from collections.abc import Sequence

from turngate.errors import NotFound

LAST = "last"


def resolve_session_id(wanted: str, known: Sequence[str]) -> str:
    """Return the id in `known`, which has the newest id first, that `wanted` names. Raise `NotFound` unless there is exactly one."""
    if not known:
        raise NotFound("no session is recorded here; record one with `turngate run`")
    if wanted == LAST:
        return known[0]
    matches = [wanted] if wanted in known else [session for session in known if session.startswith(wanted)]
    if len(matches) == 1:
        return matches[0]
    problem = f"is a prefix of {len(matches)} ids; pass more of the id" if matches else "is not recorded here"
    raise NotFound(f"session {wanted!r} {problem}; the newest session is {known[0]}")
