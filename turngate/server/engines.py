"""Routes to list, add, drain and remove engines, under `/admin/engines`.

Changes require the admin key. With an API key, only two flags can be read: whether the engines are saturated and whether they are scripted.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from turngate.client.protocol import EnginesView
from turngate.config import check_engine_url
from turngate.errors import BadRequest, ConfigError
from turngate.gateway.engine_changes import REMOVE_S, EngineChanges
from turngate.server.auth import Auth
from turngate.server.http import json_response, route
from turngate.server.operations import Endpoint, JsonReply
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

    `version` is the version of the weights that the new engine already has, if known. If another program loaded the current weights into
    the existing engines, the gateway cannot load them into the new engine, so `version` is required and must be the current version.
    """

    version: Version | None = None


class DrainEngineBody(_EngineBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /admin/engines/drain`."""


class RemoveEngineBody(_EngineBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /admin/engines/remove`.

    The engine's calls in flight get up to `limit_s` seconds to end. If they take longer, the request fails, and the engine keeps draining.
    With `force`, the engine is removed at once. Its calls in flight fail if they have produced tokens. Otherwise, they are retried on
    another engine.
    """

    limit_s: Limit = REMOVE_S
    force: bool = False


class EngineRoutes:
    def __init__(self, changes: EngineChanges, auth: Auth) -> None:
        self._changes = changes
        self._auth = auth

    def routes(self) -> list[Route]:
        table: list[tuple[str, str, Endpoint]] = [
            ("/admin/engines", "GET", self.show),
            ("/admin/engines", "POST", self.add),
            ("/admin/engines/drain", "POST", self.drain),
            ("/admin/engines/remove", "POST", self.remove),
        ]
        return [route(path, method, endpoint, self._auth) for path, method, endpoint in table]

    async def show(self, request: Request) -> JsonReply[EnginesView]:
        """List the engines and their load. With an API key, return only whether they are saturated, and whether they are scripted."""
        view = await self._changes.show()
        if request.state.caller.project is not None:  # a project may see only whether to send fewer calls
            view = EnginesView(engines=[], saturated=view.saturated, scripted=view.scripted)
        return json_response(view)

    async def add(self, request: Request, body: AddEngineBody) -> JsonReply[EnginesView]:
        """Add an engine, or stop draining one."""
        body.check()
        return json_response(await self._changes.add(body.url, body.version))

    async def drain(self, request: Request, body: DrainEngineBody) -> JsonReply[EnginesView]:
        """Send no new calls to an engine. Its calls in flight continue."""
        body.check()
        return json_response(await self._changes.drain(body.url))

    async def remove(self, request: Request, body: RemoveEngineBody) -> JsonReply[EnginesView]:
        """Remove an engine once its calls in flight have ended or, with `force`, at once."""
        body.check()
        return json_response(await self._changes.remove(body.url, body.limit_s, force=body.force))
