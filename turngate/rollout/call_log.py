"""A log of the requests that an agent sends to the gateway, each with the status and any error message of the response.

The log wraps the gateway's application without changing any request. It complements the trace, which contains only answered
calls, each with the sampling settings that were applied. The log also contains refused calls, including the tools they offered, and the
sampling settings as the agent sent them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import MutableMapping
from typing import Any

import msgspec

from turngate.dialects import DIALECTS, WireRequest
from turngate.dialects.base import EarlierReply
from turngate.dialects.responses_history import ResponsesHistory
from turngate.dialects.responses_socket import decode_event
from turngate.errors import TurngateError
from turngate.server.asgi import App, Receive, Scope, Send, parse_headers, parse_query
from turngate.server.routing import DialectRoutes, RouteMatch
from turngate.types import Call, Tool

_ROUTES = DialectRoutes(DIALECTS)
_ANSWERS = ("response.created", "error")  # types of the first frame of a reply


class LoggedCall(msgspec.Struct, kw_only=True):
    """One request to the gateway. If a dialect can decode it, its model, tools and sampling settings are logged, too."""

    method: str
    path: str
    dialect: str = ""  # empty if no dialect serves the path
    samples: bool = False  # whether it asks the model to sample: false for token counts and warm-up events
    model: str = ""
    tools: tuple[Tool, ...] = ()
    sampling: dict[str, Any] = {}  # the settings that the agent sent
    headers: tuple[str, ...] = ()  # the names of the headers
    status: int = 0  # 0 until a response is sent
    error: str = ""  # the message of an error response

    @property
    def is_refused(self) -> bool:
        return bool(self.dialect) and 400 <= self.status < 500


class _Frame(msgspec.Struct):
    """The fields of a frame from the gateway that show how a call was answered."""

    type: str
    stream_id: str = ""  # name of the lane
    status: int = 200
    message: str = ""


_decode_frame = msgspec.json.Decoder(_Frame).decode


class _SocketLanes:
    """The calls on one WebSocket that wait for a reply, by lane. The calls of a lane are answered one after another."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[LoggedCall]] = {}
        self._answered: dict[str, LoggedCall] = {}  # the latest call whose reply has begun

    def add(self, call: LoggedCall, event: bytes) -> None:
        self._waiting.setdefault(_read_lane(event), deque()).append(call)

    def log_frame(self, text: str) -> None:
        """Set the status of the call that a frame answers, if the frame begins a reply or is an error."""
        frame = _decode_frame(text)
        if frame.type not in _ANSWERS:
            return
        waiting = self._waiting.get(frame.stream_id)
        call = waiting.popleft() if waiting else self._answered.get(frame.stream_id)
        if call is not None:
            call.status, call.error = frame.status, frame.message
            self._answered[frame.stream_id] = call


class CallLog:
    """Records all requests to the applications that it wraps."""

    def __init__(self) -> None:
        self.calls: list[LoggedCall] = []

    def wrap(self, app: App) -> App:
        """Return an application that passes every request on to `app` and logs it."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "websocket":
                return await self._serve_socket(app, scope, receive, send)
            headers = tuple(name.decode("latin-1") for name, _ in scope["headers"])
            call = LoggedCall(method=scope["method"], path=scope["path"], headers=headers)
            self.calls.append(call)
            request, response = bytearray(), bytearray()

            async def receive_and_keep() -> MutableMapping[str, Any]:
                message = await receive()
                request.extend(message.get("body", b""))
                return message

            async def send_and_keep(message: MutableMapping[str, Any]) -> None:
                if message["type"] == "http.response.start":
                    call.status = message["status"]
                elif call.status >= 400:
                    response.extend(message.get("body", b""))
                await send(message)

            try:
                await app(scope, receive_and_keep, send_and_keep)
            finally:
                if scope["method"] == "POST":
                    _describe(call, scope, bytes(request))
                call.error = _read_error(bytes(response)) if response else ""

        return serve

    async def _serve_socket(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a WebSocket. Every event from the client is logged as a call."""
        headers = tuple(name.decode("latin-1") for name, _ in scope["headers"])
        lanes = _SocketLanes()

        async def receive_and_log() -> MutableMapping[str, Any]:
            message = await receive()
            if message["type"] == "websocket.receive":
                call = LoggedCall(method="GET", path=scope["path"], headers=headers)
                body = message.get("bytes") or (message.get("text") or "").encode()
                _describe(call, scope, body)
                lanes.add(call, body)
                self.calls.append(call)
            return message

        async def send_and_log(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "websocket.http.response.start":
                match = _ROUTES.match(scope["path"])
                dialect = match.dialect.name if match is not None else ""
                refused = LoggedCall(method="GET", path=scope["path"], headers=headers, dialect=dialect)
                refused.status = message["status"]
                self.calls.append(refused)
            elif text := message.get("text"):
                lanes.log_frame(text)
            await send(message)

        await app(scope, receive_and_log, send_and_log)

    @property
    def model_calls(self) -> list[LoggedCall]:
        """The calls that asked the model to sample."""
        return [call for call in self.calls if call.samples]

    @property
    def refused(self) -> list[LoggedCall]:
        return [call for call in self.calls if call.is_refused]

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools that the agent offered in any of `model_calls`, one per name."""
        return tuple({tool.name: tool for call in self.model_calls for tool in call.tools}.values())

    def describe_refusals(self) -> str:
        """Return the number of refused calls with the status and message of the first, or "" if no call was refused."""
        if not self.refused:
            return ""
        first = self.refused[0]
        return f"{len(self.refused)} refused; the first: {first.status} {first.error[:300]}"


def _describe(call: LoggedCall, scope: Scope, body: bytes) -> None:
    """Fill in the fields of a call to a dialect's route. If its body is invalid, only `dialect` and `samples` are set."""
    match = _ROUTES.match(scope["path"])
    if match is None:
        return
    call.dialect, call.samples = match.dialect.name, match.verb != "count" and not _is_warm_up(scope, body)
    if (decoded := _decode(match, scope, body)) is not None:
        call.model, call.sampling = decoded.model, dict(decoded.sampling)
        call.tools = _decode_tools(decoded)


def _decode(match: RouteMatch, scope: Scope, body: bytes) -> Call | None:
    headers, query = parse_headers(scope), parse_query(scope)
    is_socket = scope["type"] == "websocket"
    wire = WireRequest(body, headers, query, match.verb, match.model, earlier=_AnyReplies(), over_socket=is_socket)
    try:
        return match.dialect.decode(wire)
    except TurngateError:
        return None


class _AnyReplies:
    """Returns an empty reply or message for any id, so that calls that refer to earlier replies can be decoded."""

    def find(self, reply_id: str) -> EarlierReply:
        return EarlierReply(ResponsesHistory(()), ())

    def find_item(self, item_id: str) -> bytes:
        return b'{"role":"user","content":""}'


def _is_warm_up(scope: Scope, body: bytes) -> bool:
    """Return whether a request is a WebSocket event that asks for a reply without output (`generate` is false)."""
    if scope["type"] != "websocket":
        return False
    try:
        return decode_event(body).generate is False
    except TurngateError:
        return False


def _read_lane(event: bytes) -> str:
    try:
        return decode_event(event).lane
    except TurngateError:
        return ""  # the lane in which the gateway refuses the event


def _decode_tools(call: Call) -> tuple[Tool, ...]:
    try:
        return call.tools.decode() if call.tools is not None else ()
    except TurngateError:
        return ()


def _read_error(body: bytes) -> str:
    """Return the message in the body of an error response of any dialect, or the whole body if it contains no message."""
    try:
        found = msgspec.json.decode(body)
        return str(found["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body.decode("utf-8", "replace")
