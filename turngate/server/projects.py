"""Routes to create, change and delete projects, to create, rotate and revoke keys, and to read the audit log. Any worker can serve them."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from turngate.client.protocol import AuditPage, DeletedProject, KeyList, KeyView, NewKey, ProjectList, ProjectView
from turngate.errors import BadRequest
from turngate.gateway.projects import MAX_GRACE_S, Projects
from turngate.server.auth import Auth
from turngate.server.decoding import Whole
from turngate.server.http import json_response, respond_created, route
from turngate.server.operations import CreatedReply, Endpoint, JsonReply
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
    """The body of `POST /admin/keys`. By default, `project` is the project that the request belongs to."""

    project: str = ""
    scopes: list[ScopeName]
    note: str = ""
    expires_s: _Seconds | None = None


class RotateKeyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /admin/keys/{prefix}/rotate`."""

    grace_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_GRACE_S)] = DEFAULT_GRACE_S


class DeleteProjectQuery(msgspec.Struct, frozen=True):
    """Query parameters. With `force`, the project is deleted even if it has open or unshipped sessions."""

    force: bool = False


class KeysQuery(msgspec.Struct, frozen=True):
    """Query parameters. `project` is the name of a project. Without it, the keys of all projects that the caller may see are listed."""

    project: str = ""


class AuditQuery(msgspec.Struct, frozen=True):
    """Query parameters. Entries with a number above `after` are returned, oldest first.

    If there are more than `limit`, the oldest ones are returned or, with `newest`, the newest ones.
    """

    project: str = ""
    after: Whole = 0
    limit: Whole = 100
    newest: bool = False


class ProjectRoutes:
    """The routes for projects, keys and the audit log. A key is created for `project` unless the request names a different one."""

    def __init__(self, projects: Projects, auth: Auth, project: str) -> None:
        self._projects = projects
        self._auth = auth
        self._project = project

    def routes(self) -> list[Route]:
        key = "/admin/keys/{prefix}"
        table: list[tuple[str, str, Endpoint]] = [
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
        return [route(path, method, endpoint, self._auth) for path, method, endpoint in table]

    async def listing(self, request: Request) -> JsonReply[ProjectList]:
        """List the projects."""
        return json_response(ProjectList(self._projects.list_projects(_caller(request))))

    async def create(self, request: Request, body: CreateProjectBody) -> CreatedReply[ProjectView]:
        """Create a project."""
        return respond_created(self._projects.create(_caller(request), body.name, body.weight, body.quotas))

    async def change(self, request: Request, body: ChangeProjectBody) -> JsonReply[ProjectView]:
        """Change the weight or the quotas of a project, or both."""
        if body.weight is None and body.quotas is None:
            raise BadRequest("nothing to change; set weight or quotas", param="quotas")
        name = request.path_params["name"]
        return json_response(self._projects.change(_caller(request), name, body.weight, body.quotas))

    async def delete(self, request: Request, query: DeleteProjectQuery) -> JsonReply[DeletedProject]:
        """Delete a project with its keys and data. The audit log keeps its entries about the project."""
        name = request.path_params["name"]
        await asyncio.to_thread(self._projects.delete, _caller(request), name, force=query.force)
        return json_response(DeletedProject(name))

    async def list_keys(self, request: Request, query: KeysQuery) -> JsonReply[KeyList]:
        """List keys by their prefixes. The secret keys themselves are not returned."""
        return json_response(KeyList(self._projects.list_keys(_caller(request), query.project)))

    async def create_key(self, request: Request, body: CreateKeyBody) -> CreatedReply[NewKey]:
        """Create a key."""
        project = body.project or self._project
        new = self._projects.create_key(_caller(request), project, body.scopes, body.note, body.expires_s)
        return respond_created(new)

    async def rotate_key(self, request: Request, body: RotateKeyBody) -> CreatedReply[NewKey]:
        """Replace a key. The old key stays valid for up to `grace_s` seconds."""
        prefix = request.path_params["prefix"]
        return respond_created(self._projects.rotate_key(_caller(request), prefix, body.grace_s))

    async def revoke_key(self, request: Request) -> JsonReply[KeyView]:
        """Revoke a key."""
        return json_response(self._projects.revoke_key(_caller(request), request.path_params["prefix"]))

    async def audit(self, request: Request, query: AuditQuery) -> JsonReply[AuditPage]:
        """Read the audit log, oldest first."""
        limit = min(query.limit or 100, 1000)
        entries = self._projects.list_entries(_caller(request), query.project, query.after, limit, newest=query.newest)
        return json_response(AuditPage(entries))


def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller
