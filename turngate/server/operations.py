"""The operations of the HTTP API: what each route accepts and returns, read from the signature of its endpoint.

An endpoint declares its input as parameters: `body` is decoded from the request's body, and `query` from its query string. The return type,
such as `JsonReply[T]`, declares the reply. The OpenAPI document is built from these declarations.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from turngate.common.aio import give_way
from turngate.errors import BadRequest, TurngateError
from turngate.server.decoding import MSGPACK, decode_body, decode_msgpack, decode_query
from turngate.server.scopes import Scopes
from turngate.store.events import GatewayEvent

T = TypeVar("T")
JSON = "application/json"
CHUNK_BYTES = 256 * 1024
CHUNK_S = 0.001  # upper limit on the CPU time that it takes to send a chunk
Endpoint = Callable[..., Awaitable[Response]]
# Who may call an operation. key: the admin key, or an API key with one of the scopes. session: the session's secret or, if the path names
# the session, a key as for `key`. any key: the admin key, any API key, or a session's secret. page: a browser that is logged in to the
# page.
Access = Literal["public", "key", "any key", "session", "page"]


class JsonReply(Response, Generic[T]):
    """A JSON response that contains a `T`. A large response is sent in chunks, so that other requests are served in between."""

    media_type = JSON

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.body) <= CHUNK_BYTES:
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for start in range(0, len(self.body), CHUNK_BYTES):
            part = self.body[start : start + CHUNK_BYTES]
            more = start + CHUNK_BYTES < len(self.body)
            await send({"type": "http.response.body", "body": part, "more_body": more})
            await give_way(CHUNK_S)


class CreatedReply(JsonReply[T]):
    """A JSON response that contains a newly created `T`."""


class EventStreamReply(StreamingResponse):
    """A response that streams server-sent events."""

    media_type = "text/event-stream"


def encode_events(page: Sequence[GatewayEvent]) -> bytes:
    """Encode a page of events for a stream. An empty page becomes a keep-alive."""
    events = (encode_event(event.kind, event.seq, msgspec.json.encode(event)) for event in page)
    return b"".join(events) or b": alive\n\n"


def encode_event(kind: str, seq: int, data: bytes) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (seq, kind.encode(), data)


class MsgpackReply(Response, Generic[T]):
    """A msgpack response that contains a `T`."""

    media_type = MSGPACK


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One route and method of the API. Each of `body`, `query` and `reply` is a type, or None if the endpoint does not declare it."""

    path: str  # in Starlette's syntax, such as `/admin/sessions/{id}/tools/{call:int}/answer`
    method: str
    access: Access
    scopes: Scopes = frozenset()
    summary: str = ""
    body: type | None = None
    body_media: str = JSON
    query: type | None = None
    reply: Any = None
    reply_media: str = JSON
    status: int = 200
    dialect: str = ""  # the dialect of its errors and key headers; empty for the native API
    headers: tuple[str, ...] = ()  # headers that a request must have
    invalid: type[TurngateError] = BadRequest  # raised for an invalid body

    async def read_arguments(self, request: Request) -> dict[str, object]:
        """Decode the body and the query that the endpoint declares."""
        arguments: dict[str, object] = {}
        if self.query is not None:
            arguments["query"] = decode_query(request.query_params, self.query)
        if self.body is not None and self.body_media == MSGPACK:
            arguments["body"] = await decode_msgpack(request, self.body)
        elif self.body is not None:
            arguments["body"] = await decode_body(request, self.body, wrong=self.invalid)
        return arguments


class ApiRoute(Route):
    """A Starlette route with the operation that it serves."""

    def __init__(self, operation: Operation, serve: Callable[[Request], Awaitable[Response]]) -> None:
        super().__init__(operation.path, serve, methods=[operation.method])
        self.operation = operation


# A cache of operations: by endpoint function, then by the other arguments of `describe_operation`.
_described: WeakKeyDictionary[Callable[..., Any], dict[Hashable, Operation]] = WeakKeyDictionary()


def describe_operation(path: str, method: str, endpoint: Callable[..., Any], access: Access, **more: Any) -> Operation:
    """Build the operation of an endpoint from its signature and docstring. `more` contains further fields of the operation.

    Operations are cached, because reading type hints is slow and each project has its own routes.
    """
    function = getattr(endpoint, "__func__", endpoint)
    known = _described.setdefault(function, {})
    key = (path, method, access, *more.items())
    operation = known.get(key)
    if operation is None:
        operation = known[key] = _read_operation(path, method, function, access, **more)
    return operation


def _read_operation(path: str, method: str, function: Callable[..., Any], access: Access, **more: Any) -> Operation:
    hints = get_type_hints(function)
    reply = hints.get("return")
    kind = get_origin(reply) or reply
    more = {"reply_media": getattr(kind, "media_type", None) or JSON, **more}
    return Operation(
        path=path,
        method=method,
        access=access,
        summary=(function.__doc__ or "").partition("\n")[0],
        body=hints.get("body"),
        query=hints.get("query"),
        reply=(get_args(reply) or (None,))[0],
        status=201 if kind is CreatedReply else 200,
        **more,
    )
