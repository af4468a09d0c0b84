"""Model calls over a WebSocket: each event from the client is one call, served like a call over HTTP.

    upgrade → accept → per event: find the session → decode → run the turn → frames

Calls with the same `stream_id` form a lane. The calls of one lane are served one after another; different lanes are served at the same
time. When the client disconnects, its running calls are aborted and recorded, and its waiting calls are dropped. Unless it is too large,
the latest reply of each lane can be continued on the same connection even if the reply is not stored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import cast

import msgspec
from starlette.requests import HTTPConnection

from turngate.dialects import Dialect, WireRequest
from turngate.dialects.base import EarlierReply, ReplyRecord, StorableStream
from turngate.dialects.responses_socket import (
    MAX_LANES,
    EventUnsupported,
    SocketEvent,
    decode_event,
    encode_error_frame,
    split_frames,
)
from turngate.errors import BadRequest, Stopping, TooLarge, TurngateError, UpgradeRefused
from turngate.gateway.replies import ReplyArchive, SessionReplies
from turngate.server import asgi
from turngate.server.asgi import (
    GATEWAY_HEADER,
    JSON,
    ClientDisconnect,
    EventStream,
    HangUp,
    Message,
    Receive,
    Scope,
    Send,
    parse_headers,
    parse_query,
    send_or_give_up,
)
from turngate.server.model_calls import Exchange, ModelCalls, RenderInternalErrors, request_id_header
from turngate.server.routing import RouteMatch, dialect_of
from turngate.telemetry.logs import set_log_context
from turngate.telemetry.metrics import CallTiming
from turngate.trace.session import Session
from turngate.types import Call, Done

_MAX_WAITING = 32  # maximum number of waiting calls in one lane
# Headers that describe the upgrade rather than the calls that follow it.
_UPGRADE_HEADERS = ("idempotency-key", "x-turngate-attempt", "x-stainless-retry-count")


class TooManyLanes(BadRequest):
    """A connection has too many lanes, too many waiting calls in one lane, or too many bytes in waiting and running calls."""

    kind = "websocket_stream_limit_reached"


async def serve_socket(
    calls: ModelCalls,
    archive: ReplyArchive,
    scope: Scope,
    receive: Receive,
    send: Send,
    match: RouteMatch,
    session_id: str | None = None,
    *,
    prime: bool = False,
) -> None:
    """Serve a connection until the client closes it. The key is checked at the start, and again for every call."""
    headers, query = parse_headers(scope), parse_query(scope)

    async def find_session() -> Session:
        return await calls.find_session(scope, match.dialect, headers, query, session_id, prime=prime)

    try:
        await find_session()
    except TurngateError as error:
        calls.count_error(match.dialect, error, None)
        await refuse_upgrade(send, match.dialect, error)
        return
    await receive()  # the request to connect
    await send({"type": "websocket.accept", "headers": [GATEWAY_HEADER, *request_id_header(match.dialect)]})
    own = {name: value for name, value in headers.items() if name not in _UPGRADE_HEADERS}
    await CallSocket(calls, archive, match.dialect, find_session, own, query, receive, send).run()


async def refuse_upgrade(send: Send, dialect: Dialect, error: TurngateError) -> None:
    """Refuse a WebSocket, and send the error as an HTTP response."""
    body = dialect.encode_error(error)
    headers = [JSON, (b"content-length", str(len(body)).encode()), GATEWAY_HEADER, *request_id_header(dialect)]
    status = dialect.error_status(error)
    if isinstance(error, UpgradeRefused):  # in every dialect, this status tells the agent to use HTTP
        status = error.status
        headers.append((b"upgrade", b"HTTP/1.1"))
    await send({"type": "websocket.http.response.start", "status": status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})


async def refuse_path(scope: Scope, send: Send) -> None:
    """Refuse a WebSocket at a path that does not support WebSockets."""
    error = UpgradeRefused(
        "this path does not support WebSockets; send the request over HTTP, or connect to /v1/responses"
    )
    await refuse_upgrade(send, dialect_of(HTTPConnection(scope)), error)


class LatestReplies:
    """The latest replies on a connection, one per lane. Their total size is at most `max_bytes`; the oldest are dropped first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._by_lane: dict[str, tuple[str, EarlierReply, int]] = {}  # id, reply, size; oldest first

    def find(self, reply_id: str) -> EarlierReply | None:
        return next((reply for latest, reply, _ in self._by_lane.values() if latest == reply_id), None)

    def set(self, lane: str, reply_id: str, reply: EarlierReply) -> bool:
        """Replace the latest reply of a lane. Return whether the new reply is small enough to be kept."""
        self._drop(lane)
        size = sum(map(len, reply.history.items)) + sum(map(len, reply.output))
        if size > self._max_bytes:
            return False
        while self._bytes + size > self._max_bytes:
            self._drop(next(iter(self._by_lane)))
        self._by_lane[lane] = reply_id, reply, size
        self._bytes += size
        return True

    def _drop(self, lane: str) -> None:
        if lane in self._by_lane:
            self._bytes -= self._by_lane.pop(lane)[2]


class ConnectionReplies(SessionReplies):
    """The replies that a request on a connection may refer to: the session's stored replies, and the latest reply of each lane."""

    __slots__ = ("_lane", "_latest")

    def __init__(
        self,
        archive: ReplyArchive,
        session: Session,
        max_bytes: int,
        latest: LatestReplies,
        lane: str,
    ) -> None:
        super().__init__(archive, session, max_bytes)
        self._latest = latest
        self._lane = lane

    def find(self, reply_id: str) -> EarlierReply | None:
        return self._latest.find(reply_id) or super().find(reply_id)

    def keeps(self, call: Call) -> bool:
        return True

    async def add(self, call: Call, done: Done, record: ReplyRecord) -> None:
        await super().add(call, done, record)
        self.set_latest(call, record)

    def set_latest(self, call: Call, record: ReplyRecord) -> bool:
        """Make a reply the latest one in its lane. Return whether it is small enough to be kept."""
        return self._latest.set(self._lane, record.id, EarlierReply(call.history, record.output))


class FrameStream(EventStream):
    """A reply that is sent as WebSocket frames."""

    def __init__(
        self,
        send: Send,
        begin: Callable[[], bytes],
        alive: Callable[[], bytes],
        alive_s: float,
        headers: Sequence[tuple[bytes, bytes]],
        *,
        lane: str,
    ) -> None:
        super().__init__(send, begin, alive, alive_s, headers)
        self._lane = lane

    async def _start(self) -> None:
        pass

    async def _deliver(self, data: bytes, last: bool) -> None:
        for frame in split_frames(data, self._lane):
            await send_or_give_up(self._send, {"type": "websocket.send", "text": frame})


def _explain_rejected_frame(code: int | None) -> TurngateError | None:
    """Return the error if a disconnect code means that the server rejected a frame, or None for any other code."""
    match code:
        case asgi.OVERSIZED_FRAME:
            return TooLarge("the event is larger than the limit (setting max_body_mb)")
        case asgi.UNDECODABLE_FRAME:
            return BadRequest("the event is not valid UTF-8; send it as JSON in UTF-8")
        case _:
            return None


class CallSocket:
    """One accepted WebSocket connection, with its lanes and calls."""

    def __init__(
        self,
        calls: ModelCalls,
        archive: ReplyArchive,
        dialect: Dialect,
        find_session: Callable[[], Awaitable[Session]],
        headers: Mapping[str, str],
        query: Mapping[str, str],
        receive: Receive,
        send: Send,
    ) -> None:
        self._calls = calls
        self._archive = archive
        self._dialect = dialect
        self._find_session = find_session
        self._headers = headers
        self._query = query
        self._receive = receive
        self._connection_send = send
        self._hang_up = HangUp()
        self._lanes: dict[str, asyncio.Queue[tuple[bytes, SocketEvent]]] = {}
        self._latest = LatestReplies(calls.max_body)
        self._held_bytes = 0  # size of the events of waiting and running calls
        self._tasks: set[asyncio.Task[None]] = set()  # one task per lane, and one per call in flight

    async def run(self) -> None:
        try:
            while (message := await self._receive())["type"] != "websocket.disconnect":
                await self._accept(message)
            if (error := _explain_rejected_frame(message.get("code"))) is not None:
                self._calls.count_error(self._dialect, error, await self._find_refusing_session(error))
        except ClientDisconnect:
            pass
        finally:
            self._hang_up.disconnected = True
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send(self, message: Message) -> None:
        try:
            await self._connection_send(message)
        except OSError:  # raised by the server if the client has disconnected
            raise ClientDisconnect from None

    async def _accept(self, message: Message) -> None:
        """Add an event from the client to its lane, or answer it with an error."""
        raw = message.get("bytes") or (message.get("text") or "").encode()
        lane = ""
        try:
            event = decode_event(raw)
            lane = event.lane
            if lane not in self._lanes and len(self._lanes) >= MAX_LANES:
                raise TooManyLanes(
                    f"stream_id: this connection already uses {MAX_LANES} stream ids; use one of them, or open another connection",
                    param="stream_id",
                )
            if self._held_bytes and self._held_bytes + len(raw) > self._calls.max_body:
                raise TooManyLanes(
                    f"with this call, the waiting and running calls of this connection would exceed {self._calls.max_body} bytes "
                    "in total (setting max_body_mb); send this call again when other calls have ended"
                )
            queue = self._lanes.get(lane) or self._open_lane(lane)
            if queue.qsize() >= _MAX_WAITING:
                which = "with this stream_id" if lane else "without a stream_id"
                raise TooManyLanes(
                    f"{_MAX_WAITING} calls {which} are already waiting; send this one again when one of them has started"
                )
            queue.put_nowait((raw, event))
            self._held_bytes += len(raw)
        except TurngateError as error:
            await self._refuse(error, lane, raw)

    def _open_lane(self, lane: str) -> asyncio.Queue[tuple[bytes, SocketEvent]]:
        queue: asyncio.Queue[tuple[bytes, SocketEvent]] = asyncio.Queue()
        self._lanes[lane] = queue
        self._start(self._serve_lane(queue))
        return queue

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve_lane(self, queue: asyncio.Queue[tuple[bytes, SocketEvent]]) -> None:
        while True:
            # Each call has its own task, so that ending the session cancels the call but not the lane.
            raw, event = await queue.get()
            call, size = self._start(self._serve_call(raw, event)), len(raw)
            del raw  # a lane that is waiting for its next call must not keep this one in memory
            await asyncio.wait([call])
            self._held_bytes -= size
            if call.cancelled():
                await self._refuse(Stopping("the call was aborted; retry it in a moment"), event.lane)

    async def _serve_call(self, raw: bytes, event: SocketEvent) -> None:
        try:
            with RenderInternalErrors():
                await self._run(raw, event)
        except TurngateError as error:
            await self._refuse(error, event.lane, raw)
        except ClientDisconnect:
            return

    async def _run(self, raw: bytes, event: SocketEvent) -> None:
        session = await self._find_session()
        set_log_context(session.id, session.config.metadata)  # the task serves only this call
        timing = CallTiming(time.perf_counter())
        replies = ConnectionReplies(self._archive, session, self._calls.max_body, self._latest, event.lane)
        wire = WireRequest(raw, self._headers, self._query, earlier=replies, over_socket=True)
        if session.is_evicted:
            await self._calls.load_trace(session)
        call = msgspec.structs.replace(self._calls.decode(session, self._dialect, wire), stream=True)
        open_stream = partial(FrameStream, lane=event.lane)
        if event.generate is False:
            await self._prepare(session, call, replies, event.lane)
            return
        await self._calls.run_turn(
            Exchange(session, call, self._dialect, self._send, self._hang_up, timing, replies, open_stream)
        )

    async def _prepare(self, session: Session, call: Call, replies: ConnectionReplies, lane: str) -> None:
        """Answer with an empty reply, without sampling. The next request in the lane can refer to this reply."""
        self._calls.admit(session, call)
        encoder = cast(StorableStream, self._dialect.open_stream(call))
        frames = split_frames(encoder.empty(), lane)
        if not replies.set_latest(call, encoder.record()):
            raise TooLarge(
                f"input: with generate=false, the conversation must not be larger than {self._calls.max_body} bytes (setting max_body_mb)",
                param="input",
            )
        for frame in frames:
            await send_or_give_up(self._send, {"type": "websocket.send", "text": frame})

    async def _find_refusing_session(self, error: TurngateError) -> Session | None:
        """Return the session for which the error may be recorded as a refused call, or None if there is none."""
        if isinstance(error, TooManyLanes | EventUnsupported):
            return None
        try:
            return await self._find_session()
        except TurngateError:
            return None

    async def _refuse(self, error: TurngateError, lane: str, raw: bytes = b"") -> None:
        error = self._calls.count_error(self._dialect, error, await self._find_refusing_session(error), raw)
        frame = encode_error_frame(error, self._dialect.error_status(error), lane)
        try:
            await send_or_give_up(self._send, {"type": "websocket.send", "text": frame})
        except ClientDisconnect:
            return
