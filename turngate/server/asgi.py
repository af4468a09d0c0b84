"""The few ASGI pieces that model calls need: read a body within a limit, answer, stream, notice that the caller hung up.

Plain ASGI, since this is the hot path: a framework's request and response objects cost more than the turn's own bookkeeping.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping, Sequence
from contextlib import suppress
from types import coroutine
from typing import Any
from urllib.parse import parse_qsl

from turngate.errors import TooLarge

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Coroutine[Any, Any, None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

STALL_S = 60.0  # a caller that takes nothing for this long counts as gone
JSON = (b"content-type", b"application/json")
# On every reply: the relay in a sandbox knows by it that the gateway has answered, and not a dead tunnel in between.
GATEWAY_HEADER = (b"x-turngate", b"1")


class ClientDisconnected(Exception):
    """The caller is gone; nobody is left to answer."""


def parse_headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def parse_query(scope: Scope) -> dict[str, str]:
    raw = scope.get("query_string", b"")
    return dict(parse_qsl(raw.decode("latin-1"), keep_blank_values=True)) if raw else {}


def add_gateway_header(send: Send) -> Send:
    """The same, with our header on it: for replies that others write."""

    async def wrapped(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), GATEWAY_HEADER]
        await send(message)

    return wrapped


async def read_body(receive: Receive, headers: dict[str, str], limit: int) -> bytes:
    declared = headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise TooLarge(f"the request has {declared} bytes, the limit is {limit} (setting max_body_mb)")
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise TooLarge(f"the request has more than {limit} bytes, which is the limit (setting max_body_mb)")
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def respond(send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    fields = [JSON, (b"content-length", str(len(body)).encode()), GATEWAY_HEADER, *headers]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send_or_give_up(send, {"type": "http.response.body", "body": body})


async def send_or_give_up(send: Send, message: MutableMapping[str, Any]) -> None:
    """Send, but do not wait for ever: a frozen sandbox must not hold an engine, a fence or a session."""
    sending = send(message)
    try:
        waiting = sending.send(None)  # most often it is done at once, and needs no clock
    except StopIteration:
        return
    try:
        async with asyncio.timeout(STALL_S):
            await _resume(sending, waiting)
    except TimeoutError:
        raise ClientDisconnected from None


@coroutine
def _resume(sending: Coroutine[Any, Any, None], waiting: Any) -> Generator[Any, Any, None]:
    """On with a coroutine that was begun by hand and waits for `waiting`."""
    while True:
        try:
            try:
                answer = yield waiting
            except BaseException as error:
                waiting = sending.throw(error)
            else:
                waiting = sending.send(answer)
        except StopIteration:
            return


class DisconnectWatch:
    """Cancels the task that serves a call when its caller hangs up. `gone` says that it did."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.gone = False
        self._serving = asyncio.current_task()
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> DisconnectWatch:
        self._task = asyncio.create_task(self._wait())
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self._serving is not None:
            self._serving.cancel()


class EventStream:
    """A server-sent-event response that begins when there is something to send, and shows signs of life in between."""

    def __init__(
        self,
        send: Send,
        begin: Callable[[], bytes],
        alive: Callable[[], bytes],
        alive_s: float,
        headers: Sequence[tuple[bytes, bytes]],
    ) -> None:
        self._send = send
        self._headers = headers
        self._begin = begin
        self._alive = alive
        self._alive_s = alive_s
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._beat: asyncio.TimerHandle | None = None
        self._beats: set[asyncio.Task[None]] = set()
        self.started = False
        self._over = False

    def __enter__(self) -> EventStream:
        self._beat = self._loop.call_later(self._alive_s, self._on_beat)
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        if self._beat is not None:
            self._beat.cancel()

    async def write(self, data: bytes, *, last: bool = False) -> None:
        if last:
            self._over = True
        self._last = self._loop.time()
        if not self.started:
            self.started = True
            fields = [
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
                GATEWAY_HEADER,
                *self._headers,
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": fields})
            data = self._begin() + data
        await send_or_give_up(self._send, {"type": "http.response.body", "body": data, "more_body": not last})

    def _on_beat(self) -> None:
        if self._over:
            return
        silent = self._loop.time() - self._last
        if silent >= self._alive_s * 0.95 and not self._beats:
            beat = self._loop.create_task(self._sign())
            self._beats.add(beat)
            beat.add_done_callback(self._beats.discard)
            silent = 0.0
        self._beat = self._loop.call_later(self._alive_s - silent, self._on_beat)

    async def _sign(self) -> None:
        # The reply may have ended between the timer and this task; nothing may follow its last event.
        if not self._over:
            with suppress(ClientDisconnected):  # the turn's own writing will find out
                await self.write(self._alive() if self.started else b"")
