"""The web page's event streams: changes to the lists, and the events of one rollout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial

import msgspec
from starlette.requests import Request

from turngate.errors import NotFound, StoreError, TooManyRequests, TurngateError
from turngate.gateway.events import Events
from turngate.gateway.sessions import Sessions
from turngate.server.http import read_cursor
from turngate.server.operations import EventStreamReply, encode_event, encode_events
from turngate.server.web.login import PageLogin
from turngate.server.web.reader import PageReader
from turngate.store.store import Store
from turngate.types import Json
from turngate.views.session import encode_json, encode_piece

_INTERVAL_S = 0.4  # minimum interval between updates; changes within one interval are sent together
_KEEP_ALIVE_S = 15.0
_MAX_BEHIND = 10_000  # events; a client that is further behind must reload
_MAX_STREAMS = 128


class CursorQuery(msgspec.Struct, frozen=True):
    """Query parameters. `after` is the id of the last event received. The header `Last-Event-ID` takes precedence over it.

    With neither, the stream starts with the next event.
    """

    after: str = ""


class EventStreamRoutes:
    """The routes of the event streams. `describe_gateway` returns the gateway's current state for the page's header."""

    def __init__(
        self,
        reader: PageReader,
        sessions: Sessions,
        events: Events,
        store: Store,
        login: PageLogin,
        describe_gateway: Callable[[], dict[str, Json]],
    ) -> None:
        self._reader = reader
        self._sessions = sessions
        self._events = events
        self._store = store
        self._login = login
        self._describe_gateway = describe_gateway
        self._streams = 0

    async def changes(self, request: Request, query: CursorQuery) -> EventStreamReply:
        """Stream the changes to the page's lists."""
        return self._respond(self._stream_changes(request, self._start_cursor(request, query.after)))

    async def events(self, request: Request, query: CursorQuery) -> EventStreamReply:
        """Stream the events of a rollout."""
        session = request.path_params["id"]
        if not self._sessions.knows(session):
            raise NotFound(f"unknown rollout {session!r}")
        return self._respond(self._stream_events(request, session, self._start_cursor(request, query.after)))

    def _start_cursor(self, request: Request, after: str) -> int:
        """Return the number after which the stream starts. Without a cursor, this is the number of the newest event."""
        has_cursor = request.headers.get("last-event-id") or after
        newest = self._events.newest()
        if not has_cursor:
            return newest
        cursor = read_cursor(request, after)
        # A cursor beyond the newest event means that the store was restored from a backup. The client must then reload.
        return cursor if cursor <= newest else -_MAX_BEHIND

    def _respond(self, stream: AsyncGenerator[bytes, None]) -> EventStreamReply:
        if self._streams >= _MAX_STREAMS:
            raise TooManyRequests("too many pages are open; close some of them", wait_s=5)
        return EventStreamReply(self._count(stream), headers={"x-accel-buffering": "no"})

    async def _count(self, stream: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
        self._streams += 1
        try:
            async with aclosing(stream):
                async for part in stream:
                    yield part
        finally:
            self._streams -= 1

    def _may_continue(self, request: Request) -> bool:
        """Return whether the client is still logged in and the gateway is still running."""
        if self._events.closed:
            return False
        try:
            self._login.require(request)
        except TurngateError:
            return False
        return True

    async def _stream_changes(self, request: Request, after: int) -> AsyncGenerator[bytes, None]:
        yield b": live\n\n"

        def find_newer() -> int | None:
            newest = self._events.newest()
            return newest if newest > after else None

        while self._may_continue(request):
            newest = await self._events.wait_for(find_newer, _KEEP_ALIVE_S, woken_by="")
            if not self._may_continue(request):
                return
            if newest is None:
                yield b": alive\n\n"
                continue
            if newest - after > _MAX_BEHIND or after < self._store.events.last_pruned():
                after = newest
                yield encode_event("reload", after, encode_json({"cursor": after}))
                continue
            try:
                changes = await self._reader.run(partial(self._find_changes, after=after))
            except StoreError:  # the gateway is stopping
                return
            after = changes["cursor"]
            yield encode_event("changed", after, encode_json({**changes, "gateway": self._describe_gateway()}))
            await asyncio.sleep(_INTERVAL_S)

    def _find_changes(self, store: Store, *, after: int) -> dict[str, Json]:
        """Read the changes to the lists, and encode the changed rollouts.

        This runs in the reader's thread, because no other thread may use the views.
        """
        changes = self._reader.views.overview.list_changes(store, after)
        return {**changes, "rollouts": [encode_piece(row) for row in changes["rollouts"]]}

    async def _stream_events(self, request: Request, session: str, after: int) -> AsyncGenerator[bytes, None]:
        yield b": live\n\n"
        async with aclosing(self._events.follow(session, after)) as following:
            async for page in following:
                if not self._may_continue(request):
                    return
                yield encode_events(page)
