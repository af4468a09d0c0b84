"""Shared code for Starlette routes: typed bodies, JSON responses, errors, parameters and the admin check."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from turngate.common.validation import explain_error
from turngate.dialects import Chat
from turngate.errors import BadRequest, TooLarge, TurngateError
from turngate.server.auth import Auth
from turngate.server.scopes import Scopes, scopes_of
from turngate.views.session import encode_json

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]
MAX_BODY = 1_000_000
_CHUNK_BYTES = 256 * 1024
MAX_DEPTH = 200  # maximum nesting of lists and objects in a body
_JSON_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_NAME_END = re.compile(rb"\s*:")
_chat = Chat()


def json_response(value: object, status: int = 200) -> Response:
    return raw_json_response(encode_json(value), status)


def raw_json_response(answer: bytes, status: int = 200) -> Response:
    """Return a response with encoded JSON. A large one is sent in chunks, so that other requests are served in between."""
    if len(answer) <= _CHUNK_BYTES:
        return Response(answer, status_code=status, media_type="application/json")
    headers = {"content-length": str(len(answer))}
    return StreamingResponse(_chunks(answer), status_code=status, headers=headers, media_type="application/json")


async def _chunks(answer: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(answer), _CHUNK_BYTES):
        yield answer[start : start + _CHUNK_BYTES]
        await asyncio.sleep(0)


def error_response(error: TurngateError) -> Response:
    return Response(_chat.encode_error(error), status_code=error.status, media_type="application/json")


async def decode_body(request: Request, kind: type[T], *, wrong: type[TurngateError] = BadRequest) -> T:
    """Decode a request's JSON body as `kind`, and raise `wrong` if it is invalid. An empty body is treated as `{}`."""
    raw = b""
    async for part in request.stream():
        raw += part
        if len(raw) > MAX_BODY:
            raise TooLarge(f"the request body is larger than the limit of {MAX_BODY} bytes")
    if (field := find_too_deep(raw)) is not None:
        raise wrong(f"{field or 'the body'} is nested too deeply; the limit is {MAX_DEPTH} levels", param=field or None)
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except msgspec.ValidationError as error:
        message, field = explain_error(error, kind)
        raise wrong(message, param=field) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise wrong(f"the body is not valid JSON: {error}") from None


def find_too_deep(raw: bytes) -> str | None:
    """Return the name of the top-level field of a JSON body that is nested deeper than `MAX_DEPTH`.

    Return "" if the nesting is not inside a named field, and None if no value is nested too deeply. The check runs before decoding, because
    the depth that a decoder can handle depends on the call stack.
    """
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return None
    depth, name = 0, b""
    for part in _JSON_TOKENS.finditer(raw):
        match part[0]:
            case b"[" | b"{":
                depth += 1
                if depth > MAX_DEPTH:
                    return name[1:-1][:100].decode("utf-8", "replace")
            case b"]" | b"}":
                depth -= 1
            case text if depth == 1 and _NAME_END.match(raw, part.end()):
                name = text
    return None


def bearer_key(request: Request) -> str:
    """Return the API key from the request's headers."""
    return _chat.read_key(request.headers, {})


def int_param(request: Request, name: str, default: int | None = None) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise BadRequest(f"{name} must be a whole number, 0 or more, not {text!r}", param=name)
    return int(text)


def route(path: str, method: str, endpoint: Endpoint, auth: Auth | None) -> Route:
    """Return a route that renders errors and, unless `auth` is None, requires the admin key or an API key with its scope.

    `request.state.caller` says who sent the request.
    """
    scopes: Scopes = scopes_of(method, path) if auth is not None else frozenset()

    async def serve(request: Request) -> Response:
        try:
            if auth is not None:
                request.state.caller = auth.require(bearer_key(request), scopes)
            return await endpoint(request)
        except TurngateError as error:
            return error_response(error)

    return Route(path, serve, methods=[method])


def read_cursor(request: Request) -> int:
    """Return the sequence number of the last event that the reader has received.

    Older clients may send one number per worker, such as `12.7`.
    """
    text = request.headers.get("last-event-id", "") or request.query_params.get("after", "")
    if not text:
        return 0
    parts = text.split(".")
    if not all(part.isascii() and part.isdigit() and len(part) < 19 for part in parts):
        raise BadRequest(f"after must be the id of an event, not {text!r}", param="after")
    return min(map(int, parts))
