"""What happens in the gateway, as a stream of small facts that anyone may follow from a cursor. In memory, bounded."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator

import msgspec

from turngate.types import Json


class Event(msgspec.Struct, frozen=True):
    seq: int
    time: float
    session: str
    kind: str  # opened, turn, limit, sealed, cancelled, deleted, fence
    data: dict[str, Json]


class Events:
    """The newest events, and whoever waits for more."""

    def __init__(self, keep: int = 10_000) -> None:
        self._kept: deque[Event] = deque(maxlen=keep)
        self._seq = int(time.time() * 1000)  # cursors of an earlier run stay behind
        self._more: asyncio.Future[None] | None = None
        self._over = False

    def add(self, session: str, kind: str, data: dict[str, Json]) -> None:
        self._seq += 1
        self._kept.append(Event(self._seq, time.time(), session, kind, data))
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    def close(self) -> None:
        """Nothing more will happen: followers come to their end."""
        self._over = True
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def follow(self, session: str = "", after: int = 0) -> AsyncIterator[Event | None]:
        """Events of one session (or all) past `after`, until the gateway stops. None: nothing for a while, but still here."""
        while not self._over:
            newest = self._seq
            # A copy: the ring may turn while the reader is slow.
            for event in [e for e in self._kept if e.seq > after and session in ("", e.session)]:
                yield event
            after = max(after, newest)
            if self._seq > after:
                continue
            if self._more is None or self._more.done():
                self._more = asyncio.get_running_loop().create_future()
            try:
                await asyncio.wait_for(asyncio.shield(self._more), timeout=15)
            except TimeoutError:
                yield None
