"""Shared code for Starlette routes: JSON responses, errors, keys and scopes."""

from __future__ import annotations

from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from turngate.dialects import Chat
from turngate.errors import BadRequest, TurngateError
from turngate.server.auth import Auth
from turngate.server.operations import ApiRoute, CreatedReply, Endpoint, JsonReply, describe_operation
from turngate.server.scopes import scopes_of
from turngate.views.session import encode_json

T = TypeVar("T")
_chat = Chat()


def json_response(value: T, status: int = 200) -> JsonReply[T]:
    return JsonReply(encode_json(value), status)


def respond_created(value: T) -> CreatedReply[T]:
    return CreatedReply(encode_json(value), 201)


def raw_json_response(answer: bytes, status: int = 200) -> Response:
    """Return a response whose body is already encoded as JSON."""
    return JsonReply(answer, status)


def error_response(error: TurngateError) -> Response:
    return Response(_chat.encode_error(error), status_code=error.status, media_type="application/json")


def bearer_key(request: Request) -> str:
    """Return the key from the request's Authorization header, or "" if there is none."""
    return _chat.read_key(request.headers, {})


def route(path: str, method: str, endpoint: Endpoint, auth: Auth | None, **more: Any) -> ApiRoute:
    """Return a route that requires the admin key or an API key with one of the route's scopes.

    If `auth` is None, no key is required. Otherwise, `request.state.caller` says who sent the request. A `TurngateError` that the endpoint
    raises becomes an error response. The endpoint declares the body and the query as parameters. `more` contains further fields of the
    `Operation`.
    """
    scopes = scopes_of(method, path) if auth is not None else frozenset()
    access = "public" if auth is None else "key"
    operation = describe_operation(path, method, endpoint, access, scopes=scopes, **more)  # type: ignore[arg-type]

    async def serve(request: Request) -> Response:
        try:
            if auth is not None:
                request.state.caller = auth.require(bearer_key(request), scopes)
            return await endpoint(request, **await operation.read_arguments(request))
        except TurngateError as error:
            return error_response(error)

    return ApiRoute(operation, serve)


def read_cursor(request: Request, after: str) -> int:
    """Return the sequence number of the last event that the client has received, or 0 if it has received none.

    The number comes from the header `Last-Event-ID`, or else from `after`. Older clients may send one number per worker, such as `12.7`.
    In this case, the lowest number is used.
    """
    text = request.headers.get("last-event-id", "") or after
    if not text:
        return 0
    parts = text.split(".")
    if not all(part.isascii() and part.isdigit() and len(part) < 19 for part in parts):
        raise BadRequest(
            f"'after' (or the header Last-Event-ID) must be the id of an event, not {text[:100]!r}", param="after"
        )
    return min(map(int, parts))
