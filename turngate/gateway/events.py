"""What happens in the gateway, as a stream of small facts that anyone may follow from a cursor.

The store has them, so the stream goes on after a restart where a follower left it; in memory is only who waits for more. A fact
that belongs to something else that is recorded (a turn, the end of a session) is written together with it, by whoever
records that, who then calls `wake`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from turngate.store.beside import Event, happened
from turngate.store.sqlite import Store
from turngate.types import BATCH_STREAM, Json

T = TypeVar("T")
PAGE = 256  # events that a follower holds at once
ALIVE_S = 15.0
LOOK_S = 0.05  # how often a follower of all looks whether another worker has written something


class Events:
    """`shared`: other processes write to the store too."""

    def __init__(self, store: Store, *, shared: bool = False) -> None:
        self._log = store.events
        self._shared = shared
        self._followers: dict[str, set[asyncio.Event]] = {}  # by the session they follow; empty: all
        self._over = False

    def add(self, session: str, kind: str, data: dict[str, Json]) -> int:
        """Its place in the stream."""
        seq = self._log.add(happened(session, kind, data))
        self.wake(session)
        return seq

    def wake(self, session: str) -> None:
        """Something of this session was written."""
        for of in {session, ""}:
            for follower in self._followers.get(of, ()):
                follower.set()

    def close(self) -> None:
        """Nothing more will happen: followers come to their end. What they have not read they find after the next start."""
        self._over = True
        for followers in self._followers.values():
            for follower in followers:
                follower.set()

    @property
    def over(self) -> bool:
        """Nothing more will happen."""
        return self._over

    def newest(self) -> int:
        """The number of the last one."""
        return self._log.newest()

    def knows(self, session: str) -> bool:
        """Whether there is anything to follow, whether or not the session is open yet."""
        return self._log.knows(session)

    def page(self, session: str = "", after: int = 0, limit: int = PAGE) -> list[Event]:
        """The oldest events past `after`, of one session or of all."""
        return self._log.page(session, after, limit)

    def prune(self, before: float) -> int:
        """Remove what happened before a moment; how many events that were."""
        return self._log.prune(before)

    async def follow(
        self, session: str = "", after: int = 0, *, wait: bool = True
    ) -> AsyncGenerator[Event | None, None]:
        """Events of one session (or all) past `after`, until the gateway stops. None: nothing for a while, but still here.

        `wait=False`: it ends with what there is. A cursor that is ahead of everything comes from another data folder; for
        such a follower it begins at the beginning.
        """
        if after > self._log.newest():
            after = 0
        with self._following(session) as more:
            while not self._over:
                more.clear()
                state = self._log.state() if self._shared else 0
                page = self.page(session, after)
                for event in page:
                    yield event
                    after = event.seq
                if page:
                    await asyncio.sleep(0)  # a long past must not keep turns waiting
                    continue
                if not wait:
                    return
                if not await self._woken(
                    more, state, looks=self._shared and (not session or session.startswith(BATCH_STREAM))
                ):
                    yield None

    @contextmanager
    def _following(self, session: str) -> Iterator[asyncio.Event]:
        more = asyncio.Event()
        self._followers.setdefault(session, set()).add(more)
        try:
            yield more
        finally:
            rest = self._followers[session]
            rest.discard(more)
            if not rest:
                del self._followers[session]

    async def until(self, found: Callable[[], T | None], seconds: float, *, of: str) -> T | None:
        """What `found` finds, looked for whenever `of` is woken or another worker has written.

        None: nothing within that time, or the gateway stops."""
        end = time.monotonic() + seconds
        with self._following(of) as more:
            while True:
                more.clear()
                state = self._log.state() if self._shared else 0
                if (value := found()) is not None:
                    return value
                left = end - time.monotonic()
                if left <= 0 or self._over:
                    return None
                await self._woken(more, state, left, looks=self._shared)

    async def _woken(self, more: asyncio.Event, state: int, seconds: float = ALIVE_S, *, looks: bool) -> bool:
        """Whether there may be something new; False after a while without.

        One session's events are all written by the worker that has it. Those of all are looked for, since nobody wakes other
        processes; asking the file whether it has changed costs microseconds.
        """
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(min(left, LOOK_S) if looks else left):
                    await more.wait()
                return True
            except TimeoutError:
                if looks and self._log.state() != state:
                    return True
        return False


__all__ = ["Event", "Events"]
