"""Routes to list, add, drain and remove engines, under `/admin/engines`. They require the admin key."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turngate.client.protocol import EnginesView
from turngate.config import check_engine_url
from turngate.errors import BadRequest, ConfigError
from turngate.gateway.engine_changes import REMOVE_S, EngineChanges
from turngate.server.auth import Auth
from turngate.server.http import decode_body, json_response, route
from turngate.server.weights import Limit, Version


class _EngineBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    url: str

    def check(self) -> None:
        try:
            check_engine_url(self.url, "url")
        except ConfigError as error:
            raise BadRequest(error.message, param="url") from None


class AddEngineBody(_EngineBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /admin/engines`.

    `version` states that the engine already has the weights of the current version. It is needed if another program moves the weights.
    """

    version: Version | None = None


class DrainEngineBody(_EngineBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /admin/engines/drain`."""


class RemoveEngineBody(_EngineBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /admin/engines/remove`. With `force`, the engine's calls in flight fail instead of ending within `limit_s`."""

    limit_s: Limit = REMOVE_S
    force: bool = False


class EngineRoutes:
    def __init__(self, changes: EngineChanges, auth: Auth) -> None:
        self._changes = changes
        self._auth = auth

    def routes(self) -> list[Route]:
        table: list[tuple[str, Literal["GET", "POST"], object]] = [
            ("/admin/engines", "GET", self.show),
            ("/admin/engines", "POST", self.add),
            ("/admin/engines/drain", "POST", self.drain),
            ("/admin/engines/remove", "POST", self.remove),
        ]
        return [route(path, method, endpoint, self._auth) for path, method, endpoint in table]  # type: ignore[arg-type]

    async def show(self, request: Request) -> Response:
        view = await self._changes.show()
        if request.state.caller.project is not None:  # it learns only whether to send fewer calls
            view = EnginesView(engines=[], saturated=view.saturated)
        return json_response(view)

    async def add(self, request: Request) -> Response:
        body = await decode_body(request, AddEngineBody)
        body.check()
        return json_response(await self._changes.add(body.url, body.version))

    async def drain(self, request: Request) -> Response:
        body = await decode_body(request, DrainEngineBody)
        body.check()
        return json_response(await self._changes.drain(body.url))

    async def remove(self, request: Request) -> Response:
        body = await decode_body(request, RemoveEngineBody)
        body.check()
        return json_response(await self._changes.remove(body.url, body.limit_s, force=body.force))
