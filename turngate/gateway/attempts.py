"""Supersede and list the attempts at rollouts, and cancel the sessions of superseded attempts.

The store decides in one transaction whether an attempt counts. The session of a superseded attempt is cancelled only to save tokens, so
the worker that owns the session may cancel it later.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable

from turngate.client.protocol import SupersededAttempt
from turngate.errors import Conflict, NotFound, TurngateError
from turngate.gateway.events import Events
from turngate.gateway.sessions import Sessions
from turngate.store.attempts import AttemptRow, AttemptTable
from turngate.store.outcomes import RecordedOutcome
from turngate.trace.session import Session
from turngate.types import SUPERSEDED

log = logging.getLogger("turngate")


class Attempts:
    def __init__(
        self,
        table: AttemptTable,
        sessions: Sessions,
        events: Events,
        wait_for_announcement: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """`wait_for_announcement` takes a session's key, and waits briefly for the session to be announced to the shared store.

        Only cells pass it.
        """
        self._table = table
        self._sessions = sessions
        self._events = events
        self._wait_for_announcement = wait_for_announcement

    async def require_current(self, session: Session) -> None:
        """In a cell, if the attempt of a new session is superseded in the shared store, cancel the session and raise `Conflict`.

        First wait briefly for the session to be announced to the shared store.
        """
        if self._wait_for_announcement is None:
            return
        await self._wait_for_announcement(session.key)
        if self._table.filter_superseded([session.id]):
            await self.cancel_superseded([session.id])
            config = session.config
            raise Conflict(
                f"attempt {config.attempt} of rollout {config.rollout!r} is superseded in the shared store, so it must not "
                "run; to list the rollout's attempts, send GET /admin/attempts?rollout=NAME to the gateway on the shared store",
                param="attempt",
            )

    async def supersede(self, rollout: str, attempt: int, session: str = "") -> SupersededAttempt[RecordedOutcome]:
        """Mark an attempt as superseded unless it already has an outcome. If its session is open, cancel the session.

        The attempt need not have a session yet. `session` is the id that was chosen for its session, if known.
        """
        row, outcome = self._table.supersede(rollout, attempt, session or self._find_unnamed(rollout))
        if row.session:
            self._events.wake(row.session)
        await self.cancel_superseded([row.session])
        return SupersededAttempt(row, outcome)

    def list_attempts(self, rollout: str) -> list[AttemptRow]:
        """Return the attempts at a rollout, lowest number first."""
        found = self._table.list_attempts(rollout)
        if not found:
            raise NotFound(f"unknown rollout {rollout!r}: it has no attempts; check the name")
        return found

    async def cancel_lower(self, rollout: str) -> None:
        """Cancel the sessions of a rollout's superseded attempts. Call this when a newer attempt has been opened."""
        await self.cancel_superseded([row.session for row in self._table.list_attempts(rollout)])

    async def cancel_superseded(self, sessions: Iterable[str] | None = None) -> None:
        """Cancel this worker's open sessions whose attempts are superseded. If `sessions` is given, check only those."""
        opened = self._sessions.open_digests()
        wanted = [session for session in (opened if sessions is None else sessions) if session in opened]
        for session_id in self._table.filter_superseded(wanted):
            try:
                await self._sessions.end(session_id, "cancelled", SUPERSEDED)
            except TurngateError as error:
                log.warning("cannot cancel superseded session %s: %s", session_id, error.message)

    def _find_unnamed(self, rollout: str) -> str:
        """Return `rollout` if it is a session id, otherwise an empty string.

        If a session is opened without a rollout name, its id is used as the name of the rollout.
        """
        return rollout if self._sessions.knows(rollout) else ""
