"""Routes to create projects, to create, rotate and revoke keys, and to read the audit log. Any worker can serve them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turngate.client.protocol import AuditPage, DeletedProject, KeyList, ProjectList
from turngate.errors import BadRequest
from turngate.gateway.projects import MAX_GRACE_S, Projects
from turngate.server.auth import Auth
from turngate.server.http import decode_body, int_param, json_response, route
from turngate.store.projects import Caller, Quotas, ScopeName

_Weight = Annotated[float, msgspec.Meta(gt=0)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]
DEFAULT_GRACE_S = 86400.0


class CreateProjectBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /admin/projects`."""

    name: str
    weight: _Weight = 1.0
    quotas: Quotas = Quotas()


class ChangeProjectBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `PUT /admin/projects/{name}`. `quotas` replaces all quotas."""

    weight: _Weight | None = None
    quotas: Quotas | None = None


class CreateKeyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /admin/keys`. The default project is the one that the request belongs to."""

    project: str = ""
    scopes: list[ScopeName]
    note: str = ""
    expires_s: _Seconds | None = None


class RotateKeyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /admin/keys/{prefix}/rotate`."""

    grace_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_GRACE_S)] = DEFAULT_GRACE_S


class ProjectRoutes:
    """Routes for one project. The operator reaches all projects through any of them."""

    def __init__(self, projects: Projects, auth: Auth, project: str) -> None:
        self._projects = projects
        self._auth = auth
        self._project = project

    def routes(self) -> list[Route]:
        key = "/admin/keys/{prefix}"
        table: list[tuple[str, Literal["GET", "POST", "PUT", "DELETE"], object]] = [
            ("/admin/projects", "GET", self.listing),
            ("/admin/projects", "POST", self.create),
            ("/admin/projects/{name}", "PUT", self.change),
            ("/admin/projects/{name}", "DELETE", self.delete),
            ("/admin/keys", "GET", self.list_keys),
            ("/admin/keys", "POST", self.create_key),
            (f"{key}/rotate", "POST", self.rotate_key),
            (f"{key}/revoke", "POST", self.revoke_key),
            ("/admin/audit", "GET", self.audit),
        ]
        return [route(path, method, endpoint, self._auth) for path, method, endpoint in table]  # type: ignore[arg-type]

    async def listing(self, request: Request) -> Response:
        return json_response(ProjectList(self._projects.list_projects(_caller(request))))

    async def create(self, request: Request) -> Response:
        body = await decode_body(request, CreateProjectBody)
        return json_response(self._projects.create(_caller(request), body.name, body.weight, body.quotas), 201)

    async def change(self, request: Request) -> Response:
        body = await decode_body(request, ChangeProjectBody)
        if body.weight is None and body.quotas is None:
            raise BadRequest("nothing to change; set weight or quotas", param="quotas")
        name = request.path_params["name"]
        return json_response(self._projects.change(_caller(request), name, body.weight, body.quotas))

    async def delete(self, request: Request) -> Response:
        force = request.query_params.get("force", "") in ("1", "true")
        name = request.path_params["name"]
        await asyncio.to_thread(self._projects.delete, _caller(request), name, force=force)
        return json_response(DeletedProject(name))

    async def list_keys(self, request: Request) -> Response:
        project = request.query_params.get("project", "")
        return json_response(KeyList(self._projects.list_keys(_caller(request), project)))

    async def create_key(self, request: Request) -> Response:
        body = await decode_body(request, CreateKeyBody)
        project = body.project or self._project
        new = self._projects.create_key(_caller(request), project, body.scopes, body.note, body.expires_s)
        return json_response(new, 201)

    async def rotate_key(self, request: Request) -> Response:
        body = await decode_body(request, RotateKeyBody)
        prefix = request.path_params["prefix"]
        return json_response(self._projects.rotate_key(_caller(request), prefix, body.grace_s), 201)

    async def revoke_key(self, request: Request) -> Response:
        return json_response(self._projects.revoke_key(_caller(request), request.path_params["prefix"]))

    async def audit(self, request: Request) -> Response:
        project = request.query_params.get("project", "")
        after, limit = int_param(request, "after", 0) or 0, int_param(request, "limit", 100) or 100
        return json_response(AuditPage(self._projects.list_entries(_caller(request), project, after, min(limit, 1000))))


def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller
