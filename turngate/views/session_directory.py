"""Lists and descriptions of sessions for the APIs, from stored rows and from live sessions in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from turngate.client.protocol import Fork, SessionDescription, SessionSummary
from turngate.errors import NotFound, StoreError
from turngate.gateway.loading import TraceLoader
from turngate.gateway.sessions import Sessions
from turngate.store.outcomes import DamagedOutcome, RecordedOutcome
from turngate.store.shared.store import SharedStore
from turngate.store.store import SessionRow, Store
from turngate.telemetry.logs import redact_known
from turngate.trace.roles import assign_roles
from turngate.trace.session import Session, SessionConfig
from turngate.trace.training_report import report_training
from turngate.trace.tree import Trace
from turngate.types import Json
from turngate.views.session import SessionViews

Summary = SessionSummary[SessionConfig, RecordedOutcome]
Description = SessionDescription[SessionConfig, RecordedOutcome]


class SessionDirectory:
    """Lists and describes the sessions of a running gateway."""

    def __init__(self, store: Store, sessions: Sessions, session_views: SessionViews, loader: TraceLoader) -> None:
        self._store = store
        self._sessions = sessions
        self._session_views = session_views
        self._loader = loader

    async def list_sessions(
        self, *, status: str | None = None, before: int | None = None, limit: int = 100
    ) -> list[Summary]:
        """List sessions, newest first. A local store is read in a thread, because finding sessions by status can take a long time.

        A shared store is read on the event loop, where queries have a shorter time limit, so that the request fails quickly if the database
        server does not answer.
        """

        def read(store: Store) -> tuple[list[SessionRow], dict[int, RecordedOutcome | DamagedOutcome], dict[int, str]]:
            rows = store.sessions(status=status, before=before, limit=limit)
            keys = [row.key for row in rows]
            return rows, store.outcomes.read(keys), store.attempts.explain_exclusions(keys)

        rows, outcomes, excluded = (
            read(self._store) if isinstance(self._store, SharedStore) else await self._session_views.read(read)
        )
        return [
            Summary(**_summarize(row, self._find_live(row), outcomes.get(row.key), excluded.get(row.key, "")))
            for row in rows
        ]

    def _find_live(self, row: SessionRow) -> Session | None:
        """Return the session of `row` if it is in memory. A newer session that has reused the id is not returned."""
        live = self._sessions.find_live(row.id)
        return live if live is not None and live.key == row.key else None

    async def show(self, session_id: str) -> Description:
        """Describe the session with this id. If its trace has to be read from the store, the trace is not kept in memory."""
        find_live: Callable[[str], Session | None] = self._sessions.find_live
        live = find_live(session_id)
        if live is not None and not live.is_evicted:
            return self.describe(live)
        try:
            stored = await self._session_views.build(session_id, lambda view: view.session)
        except StoreError as error:
            if (live := find_live(session_id)) is None:
                raise
            return self.describe(live, unreadable=error.message if live.is_evicted else "")
        live = find_live(session_id)
        if live is not None and (not live.is_evicted or live.key != stored.key):
            # In the meantime, a call has loaded the trace and may have extended it, or a new session has reused the id.
            return self.describe(live)
        return self.describe(live or stored, stored.trace)

    async def describe_ended(self, session: Session) -> Description:
        """Describe a session that has just ended. If its trace was evicted, load it in slices, so that other calls do not wait."""
        try:
            await self._loader.load(session, even_if_ended=True)
        except StoreError as error:
            return self.describe(session, unreadable=error.message)
        return self.describe(session)

    def describe(self, session: Session, trace: Trace | None = None, *, unreadable: str = "") -> Description:
        """Describe a session. If its trace is not in memory, pass `trace`. If the trace cannot be read, pass the reason as `unreadable`."""
        live = self._sessions.find_live(session.id)
        return describe_session(self._store, session, trace, live, unreadable=unreadable)


def describe_session(
    store: Store,
    session: Session,
    trace: Trace | None = None,
    live: Session | None = None,
    *,
    unreadable: str = "",
) -> Description:
    """Describe a session with its counters, roles and forks.

    If the trace is not in memory, pass `trace`. If the trace cannot be read, pass the reason as `unreadable`, which the description then
    reports. `live` is the session in memory, or None if the session is not live.
    """
    row = store.find(session.id)
    if row is None:
        raise NotFound(f"unknown session {redact_known(session.id)!r}")
    if trace is None and not unreadable:
        try:
            trace = session.trace
        except StoreError as error:
            unreadable = error.message
    role_of = {} if trace is None else assign_roles(trace)
    excluded = store.attempts.find_exclusion(session.key)
    outcome = store.outcomes.find(session.key)
    failure = outcome.failure if isinstance(outcome, RecordedOutcome) else ""
    has_begun = trace is not None and (trace.nodes or trace.refused or session.status != "open")
    forks = [] if trace is None else [Fork(n.id, n.info.cause) for n in trace.nodes if n.info.cause is not None]
    return Description(
        **{**_summarize(row, live, outcome, excluded), "stop": session.stop},
        turns=session.turns,
        sampled_tokens=session.sampled_tokens,
        cache=session.cache if session.cache.rate is not None else None,
        in_flight=session.in_flight,
        last_error=session.last_error,
        refused=None if trace is None else trace.refused,
        unheard_s=round(session.engine_silence.seconds, 3),
        last_used=session.last_used,
        tokens=None if trace is None else trace.tokens(),
        roles=None if trace is None else dict(Counter(role_of.values())),
        training=report_training(trace, role_of, session.config.policy, excluded, failure)
        if trace is not None and has_begun
        else None,
        forks=None if trace is None else forks,
        unreadable=unreadable,
    )


def _summarize(
    row: SessionRow, live: Session | None, outcome: RecordedOutcome | DamagedOutcome | None, excluded: str
) -> dict[str, Json]:
    damaged = outcome.message if isinstance(outcome, DamagedOutcome) else ""
    return {
        "id": row.id,
        "key": row.key,
        "status": live.status if live else row.status,
        "stop": live.stop if live else row.stop,
        "opened": row.opened,
        "closed": row.closed,
        "config": row.config,
        "outcome": None if damaged else outcome,
        "damaged": row.damaged or damaged,
        "excluded": excluded,
    }
