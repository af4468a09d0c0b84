"""Find the session that a command-line argument (an id, a prefix of an id, or `last`) names."""

from __future__ import annotations

from collections.abc import Sequence

from turngate.errors import NotFound

LAST = "last"


def resolve_session_id(wanted: str, known: Sequence[str]) -> str:
    """Return the session id for `wanted`, which is an id, a prefix of an id, or `last`. `known` lists the most recent ids, newest first.

    Raise `NotFound` if no id matches, or if `wanted` is a prefix of several ids.
    """
    if not known:
        raise NotFound("the store has no sessions; record one with `turngate run`")
    if wanted == LAST:
        return known[0]
    matches = [wanted] if wanted in known else [session for session in known if session.startswith(wanted)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise NotFound(f"{wanted!r} is a prefix of {len(matches)} session ids; pass a longer prefix")
    raise NotFound(f"session {wanted!r} was not found; the newest session is {known[0]}")
