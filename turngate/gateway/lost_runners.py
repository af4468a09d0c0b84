"""Cancel sessions whose runner was killed or crashed before it ended them.

A runner that reaches the gateway at a loopback address announces its process in the event for the first stage of a rollout. Only processes
on this machine can be checked. The sessions of other runners stay open until they have been idle for too long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from turngate.common.owner import Owner, parse_owner
from turngate.errors import TurngateError
from turngate.gateway.events import Events
from turngate.gateway.sessions import Sessions
from turngate.store.events import GatewayEvent
from turngate.types import RUNNER_LOST

log = logging.getLogger("turngate")


class LostRunners:
    """Cancels the open sessions of lost runners."""

    def __init__(self, sessions: Sessions, events: Events) -> None:
        self._sessions = sessions
        self._events = events
        self._runners: dict[bytes, Owner | None] = {}  # by the digest of the session's secret

    async def cancel_sessions(self) -> None:
        opened = self._sessions.open_digests()
        self._runners = {digest: self._runners[digest] for digest in opened.values() if digest in self._runners}
        gone: dict[Owner, bool] = {}
        for session_id, digest in opened.items():
            await asyncio.sleep(0)  # let model calls run in between, because there may be thousands of sessions
            try:
                if digest not in self._runners:
                    self._runners[digest] = find_runner(self._events.page(session_id))
                runner = self._runners[digest]
                if runner is None:
                    continue
                if runner not in gone:
                    gone[runner] = runner.gone
                if gone[runner] and self._sessions.is_open(session_id, digest):  # the id may have been reused
                    await self._sessions.end(session_id, "cancelled", RUNNER_LOST)
            except TurngateError as error:
                log.warning(
                    "cannot check whether session %s has lost its runner, or cannot cancel it: %s",
                    session_id,
                    error.message,
                )


def find_runner(events: Iterable[GatewayEvent]) -> Owner | None:
    """Return the runner's process as announced in the first events of a session, or None if it was not announced."""
    for event in events:
        if event.kind == "stage" and isinstance(runner := event.data.get("runner"), str):
            return parse_owner(runner)
    return None
