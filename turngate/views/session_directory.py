"""Sessions as the APIs list and describe them: the stored row, and the live session where there is one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from turngate.errors import NotFound, StoreError
from turngate.gateway.sessions import Sessions
from turngate.store.outcomes import DAMAGED_OUTCOME
from turngate.store.sqlite import SessionRow, Store
from turngate.telemetry.logs import redact_known
from turngate.trace.roles import assign_roles
from turngate.trace.session import Session
from turngate.trace.tree import Trace
from turngate.types import Json
from turngate.views.session import SessionViews


class SessionDirectory:
    """Lists and describes the sessions of a running gateway."""

    def __init__(self, store: Store, sessions: Sessions, session_views: SessionViews) -> None:
        self._store = store
        self._sessions = sessions
        self._session_views = session_views

    def list_sessions(
        self, *, status: str | None = None, before: int | None = None, limit: int = 100
    ) -> list[dict[str, Json]]:
        rows = self._store.sessions(status=status, before=before, limit=limit)
        outcomes = self._store.outcomes.of(rows[-1].key, rows[0].key) if rows else {}
        find_live = self._sessions.find_live
        return [_summarize(row, find_live(row.id), outcomes.get(row.key), row.damaged) for row in rows]

    async def show(self, session_id: str) -> dict[str, Json]:
        """Describe a session by its id, without loading its trace into memory for good."""
        find_live: Callable[[str], Session | None] = self._sessions.find_live
        live = find_live(session_id)
        if live is not None and not live.is_evicted:
            return self.describe(live)
        try:
            stored = await self._session_views.build(session_id, lambda shown: shown.session)
        except StoreError:
            if (live := find_live(session_id)) is None:
                raise
            return self.describe(live)
        live = find_live(session_id)
        if live is not None and (not live.is_evicted or live.key != stored.key):
            # By now its trace is in memory and may have grown, or another session has its id.
            return self.describe(live)
        return self.describe(live or stored, stored.trace)

    def describe(self, session: Session, trace: Trace | None = None) -> dict[str, Json]:
        """`trace`: the session's, where it is not in memory."""
        return describe_session(self._store, session, trace, self._sessions.find_live(session.id))


def describe_session(
    store: Store, session: Session, trace: Trace | None = None, live: Session | None = None
) -> dict[str, Json]:
    """One session with its counters, roles and forks. If its trace is unreadable, the description says so and has the rest."""
    outcome = store.outcomes.of(session.key, session.key).get(session.key)
    lost = outcome is None and bool(store.outcomes.damaged(session.key, session.key))
    row = store.find(session.id)
    if row is None:
        raise NotFound(f"there is no session {redact_known(session.id)!r}")
    description = {
        **_summarize(row, live, outcome, DAMAGED_OUTCOME if lost else ""),
        "stop": session.stop,
        "turns": session.turns,
        "sampled_tokens": session.sampled_tokens,
        "in_flight": session.in_flight,
        "last_error": session.last_error,
        "unheard_s": round(session.engine_silence.seconds, 3),
        "last_used": session.last_used,
    }
    try:
        trace = trace or session.trace
    except StoreError as error:
        return {**description, "tokens": None, "roles": None, "forks": None, "unreadable": error.message}
    forks = [{"node": n.id, "cause": n.info.cause} for n in trace.nodes if n.info.cause is not None]
    return {
        **description,
        "tokens": trace.tokens(),
        "roles": dict(Counter(assign_roles(trace).values())),
        "forks": forks,
    }


def _summarize(row: SessionRow, live: Session | None, outcome: bytes | None, damaged: str) -> dict[str, Json]:
    return {
        **({"damaged": damaged} if damaged else {}),
        "id": row.id,
        "key": row.key,
        "status": live.status if live else row.status,
        "stop": live.stop if live else row.stop,
        "opened": row.opened,
        "closed": row.closed,
        "config": row.config,
        "outcome": None if outcome is None else msgspec.Raw(outcome),
    }
