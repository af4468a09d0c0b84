"""Wait until a new session is announced to the shared store, so that a superseded attempt is refused immediately.

The wait is short. If the shared store does not answer in time, the session is served while the lease lasts. If the shared store later
reports that the attempt is superseded, the session is cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from turngate.store.outbox import OutboxTable

_WAIT_S = 2.0
_SKIP_S = 5.0  # how long new sessions skip the wait after a wait has timed out
_POLL_S = (0.002, 0.005, 0.01, 0.02, 0.05)


class AnnouncementWait:
    """Waits briefly for the shipper to announce a session. `wake` makes a shipper in this worker announce new sessions now."""

    def __init__(self, outbox: OutboxTable, wake: Callable[[], None]) -> None:
        self._outbox = outbox
        self._wake = wake
        self._skip_until = 0.0

    async def wait(self, session: int) -> None:
        """Wait briefly for the session with this key to be announced. Do not wait at all if a recent wait has timed out."""
        if time.monotonic() < self._skip_until:
            return
        self._wake()
        end, pauses = time.monotonic() + _WAIT_S, iter(_POLL_S)
        while not self._outbox.is_announced(session):
            if time.monotonic() >= end:
                self._skip_until = time.monotonic() + _SKIP_S
                return
            await asyncio.sleep(next(pauses, _POLL_S[-1]))
