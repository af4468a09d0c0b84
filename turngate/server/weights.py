"""Routes to pause and resume calls and to update weights, under `/admin/fence` and `/admin/weights`.

They require the admin key. With an API key, a caller can read only the state of the fence, at which calls wait while they are paused.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from turngate.client.protocol import FenceView, PauseMode
from turngate.engines.weights import PolicyWeights
from turngate.errors import BadRequest
from turngate.gateway.projects import AuditNote
from turngate.gateway.sessions import Sessions
from turngate.gateway.weights import LIMIT_S, LoadReply, WeightsView, WeightUpdates
from turngate.server.auth import Auth
from turngate.server.http import json_response, route
from turngate.server.operations import Endpoint, JsonReply

Version = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Limit = Annotated[float, msgspec.Meta(gt=0, le=7 * 86400)]


class PauseBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /admin/fence/pause`.

    If calls are not resumed within `limit_s` seconds, the trainer is presumed gone, and calls continue at the old version. By default, a
    pause has no time limit.
    """

    mode: PauseMode = "hold"
    limit_s: Limit | None = None


class ResumeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /admin/fence/resume`.

    `version` is the policy version at which calls resume; `null` keeps the current version. For a new version, `model` is the name under
    which the engine serves it, or an empty string for the engine's own model. `null` also means the engine's own model, but is rejected if
    the current version has a model name.
    """

    version: Version | None = None
    model: str | None = None


class WeightsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /admin/weights`.

    Exactly one of `path` and `lora_path` is required. The path must exist on the engines' machines. `name` is the adapter's name, in which
    `{version}` is replaced by the version.
    """

    version: Version
    path: str = ""
    lora_path: str = ""
    name: str = "policy-v{version}"
    mode: PauseMode | None = None  # None means drain for a model, and hold for an adapter
    limit_s: Limit = LIMIT_S  # how long to wait for calls in flight

    def to_load(self) -> PolicyWeights:
        if bool(self.path) == bool(self.lora_path):
            raise BadRequest(
                "exactly one of 'path' and 'lora_path' is required: set 'path' for a model, or 'lora_path' for an adapter",
                param="path",
            )
        if self.path and self.mode == "hold":
            raise BadRequest(
                "mode 'hold' cannot be used with 'path', because calls in flight would continue while the weights change; "
                "use 'drain' to let the calls finish, or 'keep' to freeze them",
                param="mode",
            )
        name = self.name.replace("{version}", str(self.version)) if self.lora_path else ""
        if self.lora_path and not name:
            raise BadRequest("'name' is empty; set it to the name of the adapter", param="name")
        return PolicyWeights(version=self.version, path=self.path, lora_path=self.lora_path, name=name)


class FenceRoutes:
    def __init__(self, updates: WeightUpdates, auth: Auth, sessions: Sessions, note: AuditNote) -> None:
        self._note = note
        self._updates = updates
        self._auth = auth
        self._sessions = sessions

    def routes(self) -> list[Route]:
        table: list[tuple[str, str, Endpoint]] = [
            ("/admin/fence", "GET", self.fence),
            ("/admin/fence/pause", "POST", self.pause),
            ("/admin/fence/resume", "POST", self.resume),
            ("/admin/weights", "GET", self.show),
            ("/admin/weights", "POST", self.load),
        ]
        return [route(path, method, endpoint, self._auth) for path, method, endpoint in table]

    async def fence(self, request: Request) -> JsonReply[FenceView]:
        """Return the policy version, and whether calls are paused."""
        view = await self._updates.describe_fence()
        if request.state.caller.project is not None:  # a project sees only its own calls in this process
            view = msgspec.structs.replace(view, in_flight=sum(session.in_flight for session in self._sessions.live()))
        return json_response(view)

    async def pause(self, request: Request, body: PauseBody) -> JsonReply[FenceView]:
        """Pause calls for a weight update."""
        return json_response(await self._updates.pause(body.mode, body.limit_s))

    async def resume(self, request: Request, body: ResumeBody) -> JsonReply[FenceView]:
        """Resume calls at a policy version."""
        return json_response(await self._updates.resume(body.version, body.model))

    async def show(self, request: Request) -> JsonReply[WeightsView]:
        """Return the state of the fence, the current weights and the health of the replicas."""
        return json_response(await self._updates.describe())

    async def load(self, request: Request, body: WeightsBody) -> JsonReply[LoadReply]:
        """Load weights into every replica."""
        loaded = await self._updates.load(body.to_load(), body.mode, body.limit_s)
        source = body.lora_path or body.path
        self._note(request.state.caller, "weights loaded", f"version {body.version}", source=source)
        return json_response(loaded)
