"""Periodic maintenance of a running gateway.

Seal idle sessions, cancel the sessions of lost runners and of superseded attempts, and remove old events.
"""

from __future__ import annotations

import asyncio
import logging
import time

from turngate.common import clock
from turngate.errors import TurngateError
from turngate.gateway.attempts import Attempts
from turngate.gateway.events import Events
from turngate.gateway.eviction import Evictor
from turngate.gateway.lost_runners import LostRunners
from turngate.gateway.sessions import Sessions

log = logging.getLogger("turngate")
_PRUNE_S = 3600.0  # interval between removals of old events
_LOST_S = 30.0  # least interval between checks for lost runners


class Housekeeper:
    """Performs the periodic maintenance until `run` is cancelled.

    Sessions are sealed after `idle_s` seconds without a call. Events older than `event_s` seconds are removed, except those of sessions
    in a cell's outbox. If `event_s` is 0, all events are kept.
    """

    def __init__(
        self,
        sessions: Sessions,
        attempts: Attempts,
        evictor: Evictor,
        events: Events,
        *,
        idle_s: float,
        event_s: float,
    ) -> None:
        self._sessions = sessions
        self._attempts = attempts
        self._evictor = evictor
        self._events = events
        self._lost_runners = LostRunners(sessions, events)
        self._idle_s = idle_s
        self._event_s = event_s
        self._pruned = self._checked = 0.0

    async def run(self) -> None:
        # Check for lost runners at once, because the gateway of `turngate run` may run for only a few seconds.
        await self._cancel_lost()
        while True:
            await asyncio.sleep(min(self._evictor.interval_s, self._idle_s / 4))
            if self._event_s and time.time() - self._pruned > _PRUNE_S:
                self._pruned = time.time()
                await self._prune_events(self._pruned - self._event_s)
            if time.monotonic() - self._checked > min(_LOST_S, self._idle_s / 4):
                await self._cancel_lost()
            await self._seal_idle()
            await self._cancel_superseded()

    async def _cancel_lost(self) -> None:
        self._checked = time.monotonic()
        await self._lost_runners.cancel_sessions()

    async def _prune_events(self, before: float) -> None:
        try:
            if removed := await self._events.prune(before):
                log.info("events removed because they were older than event_days: %d", removed)
        except TurngateError as error:
            log.warning("cannot remove old events: %s", error.message)

    async def _seal_idle(self) -> None:
        for session_id in self._sessions.find_idle(clock.now(), self._idle_s):
            if not self._sessions.is_idle(session_id, clock.now(), self._idle_s):
                continue  # used while others were sealed
            try:
                await self._sessions.seal(session_id, "idle")
            except TurngateError as error:
                log.warning("cannot seal idle session %s: %s", session_id, error.message)

    async def _cancel_superseded(self) -> None:
        """Cancel sessions whose attempts were superseded by another process, or by a gateway that was killed before cancelling them."""
        try:
            await self._attempts.cancel_superseded()
        except TurngateError as error:
            log.warning("cannot check for superseded sessions: %s", error.message)
