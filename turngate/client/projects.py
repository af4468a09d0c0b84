"""Client for the projects, keys and audit log of a gateway."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote, urlencode

from turngate.client.protocol import AuditPage, DeletedProject, KeyList, KeyView, NewKey, ProjectList, ProjectView
from turngate.client.transport import GatewayTransport
from turngate.store.audit import AuditEntry
from turngate.types import Json


class ProjectClient(GatewayTransport):
    async def projects(self) -> list[ProjectView]:
        return (await self._request("GET", "/admin/projects", ProjectList)).projects

    async def create_project(self, name: str, **settings: Json) -> ProjectView:
        """Create a project. The settings are `weight` and `quotas`."""
        return await self._request("POST", "/admin/projects", ProjectView, {"name": name, **settings})

    async def change_project(self, name: str, **settings: Json) -> ProjectView:
        return await self._request("PUT", f"/admin/projects/{quote(name, safe='')}", ProjectView, settings)

    async def delete_project(self, name: str, *, force: bool = False) -> None:
        """Delete a project with its keys and data.

        With `force`, delete it even if it has sessions that are open, or that a cell has not shipped yet.
        """
        query = "?force=true" if force else ""
        await self._request("DELETE", f"/admin/projects/{quote(name, safe='')}{query}", DeletedProject)

    async def keys(self, project: str = "") -> list[KeyView]:
        """Return the keys of a project. Without `project`, return all keys that the caller may see."""
        query = f"?{urlencode({'project': project})}" if project else ""
        return (await self._request("GET", f"/admin/keys{query}", KeyList)).keys

    async def create_key(
        self, scopes: Sequence[str], project: str = "", *, note: str = "", expires_s: float | None = None
    ) -> NewKey:
        """Create a key. Only this reply contains the key itself."""
        body: dict[str, Json] = {"project": project, "scopes": list(scopes), "note": note, "expires_s": expires_s}
        return await self._request("POST", "/admin/keys", NewKey, body)

    async def rotate_key(self, prefix: str, grace_s: float | None = None) -> NewKey:
        """Create a new key to replace the one with this prefix.

        The old key stays valid for up to `grace_s` seconds (None: the gateway's default, a day).
        """
        body: dict[str, Json] = {} if grace_s is None else {"grace_s": grace_s}
        return await self._request("POST", f"/admin/keys/{quote(prefix, safe='')}/rotate", NewKey, body)

    async def revoke_key(self, prefix: str) -> KeyView:
        return await self._request("POST", f"/admin/keys/{quote(prefix, safe='')}/revoke", KeyView, {})

    async def audit(self, project: str = "", after: int | None = None, limit: int = 100) -> list[AuditEntry]:
        """Return up to `limit` entries of the audit log, oldest first: those after number `after`, or the newest if `after` is None."""
        start = {"newest": "true"} if after is None else {"after": str(after)}
        query = urlencode({"project": project, "limit": limit, **start})
        return (await self._request("GET", f"/admin/audit?{query}", AuditPage)).entries
