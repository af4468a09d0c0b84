"""Routes that do not require the admin key: the health check, the start page and the list of models."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from turngate.engines.base import Engine, Health, Relay
from turngate.errors import NotFound, TurngateError
from turngate.server.auth import Auth
from turngate.server.http import json_response, route
from turngate.server.operations import ApiRoute, JsonReply, describe_operation
from turngate.server.routing import dialect_of
from turngate.server.web.files import SECURITY_HEADERS

_HEALTH_CACHE_S = 2.0
_MODEL_BASES = (
    "/v1",
    "/s/{id}/v1",
    "/rollout/{id}/v1",
    "/v1/rollouts/{id}",
    "/v1/rollouts/{id}/v1",
    "/v1beta",
    "/s/{id}/v1beta",
)


class HealthReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to `GET /health`. The status code is 503 if no engine is up, and 200 otherwise.

    A gateway that serves a shared store and manages no engines always responds with 200.
    """

    status: str
    engines: int  # engines that are up
    engines_total: int


class PublicRoutes:
    """The routes of this module. `model` is the configured model name; if it is empty, the engines report their models."""

    def __init__(self, engine: Engine | None, relay: Relay | None, auth: Auth, model: str) -> None:
        self._engine = engine
        self._relay = relay
        self._auth = auth
        self._model = model
        self._started = int(time.time())
        self._health_cache: tuple[float, list[Health]] = (float("-inf"), [])

    def routes(self) -> list[Route]:
        return [
            route("/health", "GET", self.health, None),
            route("/", "GET", self.start_page, None),
            route("/s/{id}", "GET", self.start_page, None),
            *(self._model_route(base + path) for base in _MODEL_BASES for path in ("/models", "/models/{model:path}")),
        ]

    def _model_route(self, path: str) -> Route:
        dialect = "gemini" if "/v1beta/" in path else "chat"  # the default, unless headers identify another dialect
        return ApiRoute(describe_operation(path, "GET", self.models, "any key", dialect=dialect), self.models)

    async def health(self, request: Request) -> JsonReply[HealthReply]:
        """Tell load balancers whether an engine is up."""
        health = await self._engine_health()
        # Only a gateway that serves a shared store can have neither.
        has_engine = self._engine is not None or self._relay is not None
        ok = any(engine.ok for engine in health) or not has_engine
        return json_response(
            HealthReply(
                status="ok" if ok else "engine unavailable",
                engines=sum(engine.ok for engine in health),
                engines_total=len(health),
            ),
            200 if ok else 503,
        )

    async def _engine_health(self) -> list[Health]:
        """Return the engines' health. It is cached, because the health check is public and must not flood a provider with requests."""
        now = time.monotonic()
        if now - self._health_cache[0] > _HEALTH_CACHE_S:
            parts = [part for part in (self._engine, self._relay) if part is not None]
            self._health_cache = now, [health for part in parts for health in await part.health()]
        return self._health_cache[1]

    async def start_page(self, request: Request) -> Response:
        """Respond to agents that check the base URL before they start, and redirect browsers from `/` to the web page."""
        if request.url.path == "/" and request.method == "GET" and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("/page/", 307, headers=SECURITY_HEADERS)
        return json_response({"turngate": "model calls are served here"})

    async def models(self, request: Request) -> Response:
        """List the models, or return the one that the path names."""
        dialect = dialect_of(request)
        try:
            names = await self._model_names(dialect.read_key(request.headers, request.query_params), request)
            name = request.path_params.get("model")
            if name is not None:
                if name not in names:
                    raise NotFound(f"The model {name!r} does not exist", param="model")
                return Response(dialect.encode_model(name, self._started), media_type="application/json")
            listing = dialect.encode_models(list(dict.fromkeys(names)), self._started)
            return Response(listing, media_type="application/json")
        except TurngateError as error:
            return Response(
                dialect.encode_error(error), status_code=dialect.error_status(error), media_type="application/json"
            )

    async def _model_names(self, key: str, request: Request) -> list[str]:
        name = self._model
        if not self._auth.is_admin(key) and self._auth.find_key(key) is None:
            name = self._auth.session_config(key, request.path_params.get("id")).model or name
        return [name] if name else [health.model for health in await self._engine_health() if health.model]
