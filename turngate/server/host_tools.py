"""Host tools for agents: `GET /v1/tools` lists the session's tools, and `POST /v1/tools/{name}` calls one.

Like model calls, these routes require the session's secret or, if the path names the session, the admin key or an API key with a
scope for model calls. Errors use OpenAI's format.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turngate.dialects import Chat
from turngate.errors import TooLarge, TurngateError
from turngate.gateway.host_tools import HostTools
from turngate.server.asgi import (
    ClientDisconnect,
    DisconnectWatch,
    Receive,
    Scope,
    Send,
    parse_headers,
    respond,
)
from turngate.server.auth import Auth
from turngate.server.http import error_response, json_response
from turngate.server.model_calls import respond_error
from turngate.server.operations import ApiRoute, Operation
from turngate.server.request_body import read_content
from turngate.server.scopes import MODEL_CALLS
from turngate.types import Json

MAX_ARGUMENTS = 64 * 1024
_chat = Chat()


class HostToolRoutes:
    def __init__(self, host_tools: HostTools, auth: Auth) -> None:
        self._host_tools = host_tools
        self._auth = auth

    def routes(self) -> list[Route]:
        return [
            ApiRoute(_describe(f"{area}/v1/tools", "GET", self.listing), self.listing)
            for area in ("", "/s/{id}", "/rollout/{id}")
        ]

    @property
    def call_operations(self) -> list[Operation]:
        """The operations that `serve` handles."""
        return [_describe(f"{area}/v1/tools/{{name}}", "POST", self.serve) for area in ("", "/s/{id}", "/rollout/{id}")]

    async def listing(self, request: Request) -> Response:
        """List the host tools of the session."""
        try:
            key = _chat.read_key(request.headers, {})
            tools = self._auth.session_config(key, request.path_params.get("id")).tools
        except TurngateError as error:
            return error_response(error)
        return json_response(
            {"tools": [{"name": t.name, "description": t.description, "schema": t.schema} for t in tools]}
        )

    async def serve(self, scope: Scope, receive: Receive, send: Send, name: str, session_id: str | None) -> None:
        """Call a host tool. Return the host's reply or, if the host sends none in time, the tool's default reply."""
        try:
            headers = parse_headers(scope)
            session = await self._auth.session(_chat.read_key(headers, {}), session_id)
            body = await _read_arguments(receive, headers)
            with DisconnectWatch(receive) as watch:
                try:
                    repeat_key = headers.get("idempotency-key", "")
                    answer = await self._host_tools.call(session, name, body, repeat_key)
                except asyncio.CancelledError:
                    if not watch.disconnected:
                        raise
                    watch.uncancel()
                    return
            await respond(send, 200, answer)
        except TurngateError as error:
            await respond_error(send, _chat, error)
        except ClientDisconnect:
            return


def _describe(path: str, method: str, endpoint: Callable[..., Any]) -> Operation:
    scopes = MODEL_CALLS if "{id}" in path else frozenset()
    body = None if method == "GET" else dict[str, Json]
    return Operation(
        path=path, method=method, access="session", scopes=scopes, summary=endpoint.__doc__ or "", body=body
    )


async def _read_arguments(receive: Receive, headers: dict[str, str]) -> bytes:
    try:
        return await read_content(receive, headers, MAX_ARGUMENTS)
    except TooLarge:
        raise TooLarge(f"the arguments are larger than the limit of {MAX_ARGUMENTS} bytes for a tool call") from None
