"""The fence and the weights behind it, under `/admin/fence` and `/admin/weights`, behind the admin key."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turngate.client.protocol import PauseMode
from turngate.engines.weights import Load
from turngate.errors import BadRequest
from turngate.gateway.weights import WeightUpdates
from turngate.server.auth import Auth
from turngate.server.http import decode_body, json_response, route

Version = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Limit = Annotated[float, msgspec.Meta(gt=0, le=7 * 86400)]


class PauseBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`limit_s`: after so long without a resume, calls go on at the old version: whoever paused is gone."""

    mode: PauseMode = "hold"
    limit_s: Limit | None = None


class ResumeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`model`: the name under which the engine has this version; None: its weights were replaced."""

    version: Version | None = None
    model: str | None = None


class WeightsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of `path` and `lora_path`, as the engines see them. `name`: what an adapter is called there; `{version}` is filled in."""

    version: Version
    path: str = ""
    lora_path: str = ""
    name: str = "policy-v{version}"
    mode: PauseMode | None = None  # None: drain for a model, hold for an adapter
    limit_s: Limit = 600.0  # for which calls in flight are waited for

    def load(self) -> Load:
        if bool(self.path) == bool(self.lora_path):
            raise BadRequest("path: give either the path of a model or the lora_path of an adapter", param="path")
        if self.path and self.mode == "hold":
            raise BadRequest(
                "mode: calls in flight would go on while their weights change; drain lets them end, keep freezes them",
                param="mode",
            )
        name = self.name.replace("{version}", str(self.version)) if self.lora_path else ""
        if self.lora_path and not name:
            raise BadRequest("name: an adapter needs a name", param="name")
        return Load(version=self.version, path=self.path, lora_path=self.lora_path, name=name)


class FenceRoutes:
    def __init__(self, updates: WeightUpdates, auth: Auth) -> None:
        self._updates = updates
        self._auth = auth

    def routes(self) -> list[Route]:
        table: list[tuple[str, Literal["GET", "POST"], object]] = [
            ("/admin/fence", "GET", self.fence),
            ("/admin/fence/pause", "POST", self.pause),
            ("/admin/fence/resume", "POST", self.resume),
            ("/admin/weights", "GET", self.show),
            ("/admin/weights", "POST", self.load),
        ]
        return [route(path, method, endpoint, self._auth) for path, method, endpoint in table]  # type: ignore[arg-type]

    async def fence(self, request: Request) -> Response:
        return json_response(await self._updates.describe_fence())

    async def pause(self, request: Request) -> Response:
        wanted = await decode_body(request, PauseBody)
        return json_response(await self._updates.pause(wanted.mode, wanted.limit_s))

    async def resume(self, request: Request) -> Response:
        wanted = await decode_body(request, ResumeBody)
        return json_response(await self._updates.resume(wanted.version, wanted.model))

    async def show(self, request: Request) -> Response:
        return json_response(await self._updates.describe())

    async def load(self, request: Request) -> Response:
        wanted = await decode_body(request, WeightsBody)
        return json_response(await self._updates.load(wanted.load(), wanted.mode, wanted.limit_s))
