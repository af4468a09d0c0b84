"""ASGI building blocks for model calls: responding, streaming, and detecting a disconnect.

Model calls are the hot path, so they use plain ASGI. A framework's request and response objects would cost more than recording the turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping, Sequence
from contextlib import suppress
from types import coroutine
from typing import Any
from urllib.parse import parse_qsl

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Coroutine[Any, Any, None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

STALL_S = 60.0  # a client that reads nothing for this long is treated as disconnected
JSON = (b"content-type", b"application/json")
# Sent with every response, so that the relay in a sandbox can tell the gateway's answers from those of a broken tunnel.
GATEWAY_HEADER = (b"x-turngate", b"1")
# Codes of the `websocket.disconnect` event after the server has rejected a frame. The client receives 1009 or 1007 instead. The event does
# not use these two, because they could also come from the client.
OVERSIZED_FRAME = 4413
UNDECODABLE_FRAME = 4400


class ClientDisconnect(Exception):
    """The client has disconnected or stopped reading, so no response can be sent."""


def parse_headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def parse_query(scope: Scope) -> dict[str, str]:
    raw = scope.get("query_string", b"")
    return dict(parse_qsl(raw.decode("latin-1"), keep_blank_values=True)) if raw else {}


def add_gateway_header(send: Send) -> Send:
    """Wrap `send` to add the gateway's header to responses that Starlette writes."""

    async def send_with_header(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), GATEWAY_HEADER]
        await send(message)

    return send_with_header


async def respond(send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    fields = [JSON, (b"content-length", str(len(body)).encode()), GATEWAY_HEADER, *headers]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send_or_give_up(send, {"type": "http.response.body", "body": body})


async def send_or_give_up(send: Send, message: MutableMapping[str, Any]) -> None:
    """Send a message. Raise `ClientDisconnect` if this takes longer than `STALL_S` seconds.

    Without this limit, a client that stops reading, such as one in a frozen sandbox, would block an engine, a fence or a session.
    """
    sending = send(message)
    try:
        waiting = sending.send(None)  # usually completes at once, which avoids the cost of a timeout
    except StopIteration:
        return
    try:
        async with asyncio.timeout(STALL_S):
            await _resume(sending, waiting)
    except TimeoutError:
        raise ClientDisconnect from None


@coroutine
def _resume(sending: Coroutine[Any, Any, None], waiting: Any) -> Generator[Any, Any, None]:
    """Continue a coroutine that was started with `send(None)` and is now awaiting `waiting`."""
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


class HangUp:
    """Records whether the client has disconnected, to distinguish a disconnect from other causes of a cancelled request."""

    disconnected = False


class DisconnectWatch(HangUp):
    """A context manager that cancels the current task, which serves the request, when the client disconnects."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._serving = asyncio.current_task()
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> DisconnectWatch:
        self._task = asyncio.create_task(self._wait())
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            # The task's error refers to the frame of `_wait`, which refers to `self`. This cycle would keep the call in memory.
            self._task = None

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.disconnected = True
        if self._serving is not None:
            self._serving.cancel()

    def uncancel(self) -> None:
        """Undo the cancellation of the serving task, so that the task can clean up and return."""
        if self._serving is not None:
            self._serving.uncancel()


class EventStream:
    """A response that streams server-sent events. It sends a keep-alive after `alive_s` seconds of silence, even before the first data."""

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
            await self._start()
            data = self._begin() + data
        await self._deliver(data, last)

    async def _start(self) -> None:
        fields = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"), GATEWAY_HEADER, *self._headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": fields})

    async def _deliver(self, data: bytes, last: bool) -> None:
        await send_or_give_up(self._send, {"type": "http.response.body", "body": data, "more_body": not last})

    def _on_beat(self) -> None:
        if self._over:
            return
        silent = self._loop.time() - self._last
        if silent >= self._alive_s * 0.95 and not self._beats:
            beat = self._loop.create_task(self._send_keep_alive())
            self._beats.add(beat)
            beat.add_done_callback(self._beats.discard)
            silent = 0.0
        self._beat = self._loop.call_later(self._alive_s - silent, self._on_beat)

    async def _send_keep_alive(self) -> None:
        # The reply may have ended after the timer fired, and no data may follow its last event.
        if not self._over:
            with suppress(ClientDisconnect):  # the turn's next write raises the same error
                await self.write(self._alive() if self.started else b"")
