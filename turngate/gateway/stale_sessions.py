"""Cancel sessions with tokens from policy versions that are too old for every feed that accepts their groups.

The runner of a cancelled rollout is notified by an event, and can start a new attempt immediately.
"""

from __future__ import annotations

import asyncio
import logging

from turngate.errors import StoreError, TurngateError
from turngate.gateway.feeds import Feeds
from turngate.gateway.fence import Fence
from turngate.gateway.sessions import Sessions
from turngate.store.reader import StoreReader
from turngate.store.store import Store
from turngate.trace.roles import assign_roles
from turngate.trace.sample import find_untrained
from turngate.trace.session import Session, SessionConfig
from turngate.trace.tree import Sampled
from turngate.types import STALE, Json

log = logging.getLogger("turngate")


class StaleSessions:
    """Cancels stale sessions when the policy version rises. Call `close` when the gateway stops."""

    def __init__(self, store: Store, sessions: Sessions, feeds: Feeds, fence: Fence) -> None:
        self._store = store
        self._sessions = sessions
        self._feeds = feeds
        self._fence = fence
        self._reader = StoreReader(store, "staleness")
        self._tasks: set[asyncio.Task[None]] = set()
        self.others: list[StaleSessions] = []  # those of other projects; checked together with these

    @property
    def is_busy(self) -> bool:
        """Whether sessions are being checked at the moment."""
        return bool(self._tasks)

    def cancel_in_background(self) -> None:
        """Start cancelling the sessions that are stale at the current policy version."""
        for other in self.others:
            other.cancel_in_background()
        try:
            bounds = self._feeds.staleness_bounds()
        except StoreError as error:
            log.warning("cannot check for stale sessions: %s", error.message)
            return
        if not any(bound is not None for _, bound in bounds):
            return
        task = asyncio.create_task(self.cancel(bounds, self._fence.version))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cancel(self, bounds: list[tuple[str, int | None]], version: int) -> None:
        for session_id, digest in self._sessions.open_digests().items():
            await asyncio.sleep(0)  # there may be thousands: let turns run in between
            try:
                stale = await self._is_stale(session_id, bounds, version)
                if stale and self._sessions.is_open(session_id, digest):  # the id may have been reused
                    await self._sessions.end(session_id, "cancelled", STALE)
            except TurngateError as error:
                log.warning(
                    "cannot check whether session %s is stale, or cannot cancel it: %s", session_id, error.message
                )

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._reader.close)

    async def _is_stale(self, session_id: str, bounds: list[tuple[str, int | None]], version: int) -> bool:
        live = self._sessions.find_live(session_id)
        row = None if live is not None else self._store.find(session_id)
        config = live.config if live is not None else row.config if row is not None else None
        group = None if config is None else group_of(config)
        oldest = None if group is None else oldest_allowed(group, bounds, version)
        if oldest is None:
            return False
        live = self._sessions.find_live(session_id)
        if live is not None and not live.is_evicted:
            return is_stale(live, oldest)
        return await self._reader.run(lambda store: _is_stored_session_stale(store, session_id, oldest))


def _is_stored_session_stale(store: Store, session_id: str, oldest: int) -> bool:
    with store.snapshot():
        row = store.find(session_id)
        session = None if row is None else store.load(row)
    return session is not None and is_stale(session, oldest)


def group_of(config: SessionConfig) -> str | None:
    """Return the group of a session from its `metadata.group`, or None if it has none."""
    group: Json = config.metadata.get("group")
    return group if isinstance(group, str) else None


def oldest_allowed(group: str, bounds: list[tuple[str, int | None]], version: int) -> int | None:
    """Return the oldest policy version that any feed still accepts in rollouts of this group.

    Return None if a feed that accepts the group has no limit, or if no feed accepts the group.
    """
    wanted = [bound for prefix, bound in bounds if group.startswith(prefix)]
    known = [bound for bound in wanted if bound is not None]
    return version - max(known) if known and len(known) == len(wanted) else None


def is_stale(session: Session, oldest: int) -> bool:
    """Return whether a turn that would be trained was sampled before version `oldest`.

    A conversation with only one turn and no tools is ignored: it may be a request for a title before the actual work begins, and titles are
    not trained by default.
    """
    turns = list(session.trace.turns())
    if not any(turn.info.version_start < oldest for turn in turns):
        return False
    role_of = assign_roles(session.trace)
    reasons = find_untrained(session.trace, role_of, session.config.policy)
    return any(turn.info.version_start < oldest and _is_work(turn) and not reasons[turn.id] for turn in turns)


def _is_work(turn: Sampled) -> bool:
    return turn.root.info.has_tools or bool(turn.children) or turn.parent.parent is not None
