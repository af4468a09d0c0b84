"""The gateway's events: a log that can be followed from any event number.

Events are kept in the store, so after a restart, a follower can continue where it stopped. Only the followers themselves are in memory.
An event that belongs to a record (a turn, the end of a session) is written in the same transaction as the record. The code that writes
both then calls `wake`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import msgspec

from turngate.errors import BadRequest
from turngate.gateway.loading import TimeSlicer
from turngate.store.events import GatewayEvent, new_event
from turngate.store.store import Store
from turngate.trace.session import check_session_id
from turngate.types import BATCH_STREAM, Json

T = TypeVar("T")
PAGE = 64  # events that a follower reads at a time
ALIVE_S = 15.0  # time without an event after which a follower receives a keep-alive
LARGEST = 16 * 1024  # size limit of an announced event, in bytes
POLL_S = 0.05  # interval at which a waiting follower checks for events from other processes, if it polls


class Events:
    """The event log and its followers. `shared` means that other processes also write to the store."""

    def __init__(self, store: Store, slicer: TimeSlicer | None = None, *, shared: bool = False) -> None:
        self._log = store.events
        self._slicer = slicer or TimeSlicer()  # a long backlog must not delay turns
        self._shared = shared
        self._followers: dict[str, set[asyncio.Event]] = {}  # by session id; empty: followers of all sessions
        self._closed = False

    def add(self, session: str, kind: str, data: dict[str, Json]) -> int:
        """Write an event and return its number."""
        seq = self._log.add(new_event(session, kind, data))
        self.wake(session)
        return seq

    def announce(self, session: str, kind: str, data: dict[str, Json]) -> int:
        """Write an event from a runner and return its number. The session need not be open yet."""
        if session:
            check_session_id(session, "session")
        size = len(msgspec.json.encode(data))
        if size > LARGEST:
            raise BadRequest(f"data is {size} bytes long; send at most {LARGEST} bytes", param="data")
        return self.add(session, kind, data)

    def wake(self, session: str) -> None:
        """Wake the followers of this session and the followers of all sessions. Call this after writing an event."""
        for of in {session, ""}:
            for follower in self._followers.get(of, ()):
                follower.set()

    def close(self) -> None:
        """End all followers. Call this before the gateway stops, or after the project has been deleted."""
        self._closed = True
        for followers in self._followers.values():
            for follower in followers:
                follower.set()

    @property
    def closed(self) -> bool:
        return self._closed

    def newest(self) -> int:
        """Return the number of the last event."""
        return self._log.newest()

    def knows(self, session: str) -> bool:
        """Return whether a session has events other than `deleted`. A runner may announce events before the session is opened."""
        return self._log.knows(session)

    def page(self, session: str = "", after: int = 0, limit: int = PAGE) -> list[GatewayEvent]:
        """Return up to `limit` events after number `after`, oldest first.

        If `session` is empty, return events of all sessions and of the gateway.
        """
        return self._log.page(session, after, limit)

    def _read_page(self, session: str, after: int) -> list[GatewayEvent]:
        return [] if self._closed else self.page(session, after)  # the store may be closed too

    async def prune(self, before: float) -> int:
        """Remove the events written before the time `before`, and return how many were removed. Turns can run while this is in progress.

        Events of sessions in a cell's outbox are kept.
        """
        removed = 0
        steps = self._log.prune(before)
        while (count := await self._slicer.call(lambda: next(steps, None))) is not None:
            removed += count
        return removed

    async def follow(
        self, session: str = "", after: int = 0, *, wait: bool = True
    ) -> AsyncGenerator[list[GatewayEvent], None]:
        """Yield pages of the events after number `after`, until `close`. An empty page is a keep-alive.

        If `session` is empty, yield the events of all sessions and of the gateway. With `wait=False`, stop after the last event. If `after`
        is higher than any event number of this store, it comes from another store, so start with the oldest event.
        """
        if after > self._log.newest():
            after = 0
        polls = self._shared and (not session or session.startswith(BATCH_STREAM))
        with self._follower(session) as more:
            while not self._closed:
                more.clear()
                state = self._log.state() if self._shared else 0
                if page := await self._slicer.call(partial(self._read_page, session, after)):
                    yield page
                    after = page[-1].seq
                elif not wait:
                    return
                elif not await self._wait(more, state, polls=polls):
                    yield []

    @contextmanager
    def _follower(self, session: str) -> Iterator[asyncio.Event]:
        more = asyncio.Event()
        self._followers.setdefault(session, set()).add(more)
        try:
            yield more
        finally:
            others = self._followers[session]
            others.discard(more)
            if not others:
                del self._followers[session]

    async def wait_for(self, find: Callable[[], T | None], seconds: float, *, woken_by: str) -> T | None:
        """Call `find` until it returns a value other than None, and return this value.

        `find` is called again whenever the session or topic `woken_by` is woken, or another process has written an event. Return None after
        `seconds`, or after `close`.
        """
        end = time.monotonic() + seconds
        with self._follower(woken_by) as more:
            while True:
                more.clear()
                state = self._log.state() if self._shared else 0
                if (value := find()) is not None:
                    return value
                left = end - time.monotonic()
                if left <= 0 or self._closed:
                    return None
                await self._wait(more, state, left, polls=self._shared)

    async def _wait(self, more: asyncio.Event, state: int, seconds: float = ALIVE_S, *, polls: bool) -> bool:
        """Wait for a change in the log. Return True if there may be one, or False after `seconds` without one.

        With `polls`, also check the log regularly, since other processes cannot wake this follower. A follower of one session need not
        poll, because it runs in the worker that writes all events of the session. In a local store, a check takes only microseconds.
        """
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(min(left, POLL_S) if polls else left):
                    await more.wait()
                return True
            except TimeoutError:
                if polls and self._log.state() != state:
                    return True
        return False


__all__ = ["Events", "GatewayEvent"]
