"""Create, change and delete projects, and create, rotate and revoke their keys.

Each change is written to the audit log in the same transaction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec

from turngate.client.protocol import KeyView, NewKey, ProjectView
from turngate.errors import BadRequest, Conflict, NotFound
from turngate.gateway.api_keys import KeyRing, new_key
from turngate.store.audit import AuditEntry, AuditTable, NewAuditEntry
from turngate.store.projects import (
    DEFAULT_PROJECT,
    SCOPE_NAMES,
    ApiKey,
    Caller,
    ProjectRow,
    ProjectTable,
    Quotas,
    ScopeName,
    check_project_name,
    unknown_project,
)
from turngate.types import Json


class AuditNote(Protocol):
    """A function that adds an entry to the audit log."""

    def __call__(self, caller: Caller, action: str, subject: str = "", **details: Json) -> None: ...


MAX_GRACE_S = 30 * 86400.0
_MAX_NOTE = 200
_MAX_WEIGHT = 1000.0


class Projects:
    """The projects of a gateway. A change takes effect in every process within seconds."""

    def __init__(
        self,
        table: ProjectTable,
        audit: AuditTable,
        ring: KeyRing,
        count_unfinished: Callable[[str], int],
        *,
        read_only: bool = False,
    ) -> None:
        """`count_unfinished` returns how many sessions of a project are open, or are in a cell that has not shipped them yet."""
        self._table = table
        self._audit = audit
        self._count_unfinished = count_unfinished
        self.ring = ring
        self._read_only = read_only

    def list_projects(self, caller: Caller) -> list[ProjectView]:
        rows = self._table.list_projects() if not self._read_only else []
        keys = self._table.list_keys()
        return [_view_project(row, keys) for row in rows if caller.project is None or row.name == caller.project]

    def create(self, caller: Caller, name: str, weight: float = 1.0, quotas: Quotas = Quotas()) -> ProjectView:
        self._require_writable()
        check_project_name(name)
        _check_weight(weight)
        row = ProjectRow(name, time.time(), weight, quotas)
        details = {"weight": weight, "quotas": msgspec.to_builtins(quotas)}
        self._table.create(row, NewAuditEntry(caller.actor, name, "project created", name, details))
        self.ring.update()
        return _view_project(row, [])

    def change(self, caller: Caller, name: str, weight: float | None, quotas: Quotas | None) -> ProjectView:
        self._require_writable()
        if weight is not None:
            _check_weight(weight)
        details = {"weight": weight, "quotas": None if quotas is None else msgspec.to_builtins(quotas)}
        changed = {field: value for field, value in details.items() if value is not None}
        self._table.change(name, weight, quotas, NewAuditEntry(caller.actor, name, "project changed", name, changed))
        self.ring.update()
        for view in self.list_projects(caller):
            if view.name == name:
                return view
        raise unknown_project(name)  # it was deleted in the meantime

    def delete(self, caller: Caller, name: str, *, force: bool = False) -> None:
        """Delete a project with its keys and all its data. Gateways and cells end its sessions and remove its data within seconds."""
        self._require_writable()
        if name == DEFAULT_PROJECT:
            raise Conflict("the project 'default' cannot be deleted; delete its sessions instead", param="name")
        if all(row.name != name for row in self._table.list_projects()):
            raise unknown_project(name)
        unfinished = self._count_unfinished(name)
        if unfinished and not force:
            raise Conflict(
                f"project {name!r} has sessions that are open, or that a cell has not shipped yet ({unfinished} in all); seal or cancel "
                "the open ones and wait until every cell has shipped its sessions, or set 'force' to delete the project anyway",
                param="force",
            )
        details = {"unfinished_sessions": unfinished, "force": force}
        self._table.delete(name, NewAuditEntry(caller.actor, name, "project deleted", name, details))
        self.ring.update()

    # ── keys ────────────────────────────────────────────────────────────────────────────────────────────────────

    def list_keys(self, caller: Caller, project: str = "") -> list[KeyView]:
        """Return the keys of `project`. If `project` is empty, return the keys of the caller's project, or all keys for the operator."""
        self._require_writable()
        wanted = project or caller.project
        if wanted:
            caller.require_project(wanted)
        return [view_key(key) for key in self._table.list_keys(wanted)]

    def create_key(
        self, caller: Caller, project: str, scopes: Collection[ScopeName], note: str, expires_s: float | None
    ) -> NewKey:
        self._require_writable()
        caller.require_project(project)
        if all(row.name != project for row in self._table.list_projects()):
            raise unknown_project(project)
        if not scopes:
            raise BadRequest(f"'scopes' is empty; choose from {', '.join(SCOPE_NAMES)}", param="scopes")
        if len(note) > _MAX_NOTE:
            raise BadRequest(f"note must have at most {_MAX_NOTE} characters, not {len(note)}", param="note")
        secret, prefix, digest = new_key()
        now = time.time()
        expires = None if expires_s is None else now + expires_s
        key = ApiKey(prefix, digest, project, frozenset(scopes), note, now, expires)
        details = {"scopes": sorted(key.scopes), "note": note, "expires": expires}
        self._table.add_key(key, NewAuditEntry(caller.actor, project, "key created", prefix, details))
        self.ring.update()
        return _view_new_key(key, secret)

    def rotate_key(self, caller: Caller, prefix: str, grace_s: float) -> NewKey:
        """Replace the key that has this prefix with a new key with the same scopes. The old key stays valid for up to `grace_s` seconds."""
        old = self._find_key(caller, prefix)
        if not old.is_valid(now := time.time()):
            raise Conflict(f"key {prefix} is no longer valid; create a new key")
        secret, new_prefix, digest = new_key()
        expires = (
            None if old.expires is None else now + (old.expires - old.created)
        )  # the new key is valid for as long as the old one was
        key = ApiKey(new_prefix, digest, old.project, old.scopes, old.note, now, expires)
        details = {"replaces": prefix, "grace_s": grace_s}
        entry = NewAuditEntry(caller.actor, old.project, "key rotated", new_prefix, details)
        self._table.replace_key(prefix, key, now + grace_s, entry)
        self.ring.update()
        return _view_new_key(key, secret)

    def revoke_key(self, caller: Caller, prefix: str) -> KeyView:
        old = self._find_key(caller, prefix)
        self._table.revoke_key(prefix, NewAuditEntry(caller.actor, old.project, "key revoked", prefix))
        self.ring.update()
        return view_key(self._find_key(caller, prefix))

    def _find_key(self, caller: Caller, prefix: str) -> ApiKey:
        self._require_writable()
        for key in self._table.list_keys(caller.project):
            if key.prefix == prefix:
                return key
        raise NotFound(f"unknown key {prefix[:40]!r}; `turngate keys list` shows the prefixes", param="key")

    # ── audit ───────────────────────────────────────────────────────────────────────────────────────────────────

    def note(self, caller: Caller, project: str, action: str, subject: str, details: dict[str, Json]) -> None:
        """Add an audit entry for an action that does not change a project or a key."""
        self._audit.add(NewAuditEntry(caller.actor, project, action, subject, details))

    def list_entries(
        self, caller: Caller, project: str = "", after: int = 0, limit: int = 100, *, newest: bool = False
    ) -> list[AuditEntry]:
        wanted = project or caller.project
        if wanted:
            caller.require_project(wanted)
        return self._audit.page(project=wanted or None, after=after, limit=limit, newest=newest)

    def _require_writable(self) -> None:
        if self._read_only:
            raise Conflict("this gateway is a cell; manage projects and keys at the gateway on the shared store")


def _check_weight(weight: float) -> None:
    if not 0 < weight <= _MAX_WEIGHT:
        raise BadRequest(f"weight must be a number above 0, up to {_MAX_WEIGHT:g}, not {weight:g}", param="weight")


def _view_project(row: ProjectRow, keys: Collection[ApiKey]) -> ProjectView:
    valid = sum(key.project == row.name and key.is_valid(time.time()) for key in keys)
    return ProjectView(name=row.name, created=row.created, weight=row.weight, quotas=row.quotas, keys=valid)


def view_key(key: ApiKey) -> KeyView:
    return KeyView(
        prefix=key.prefix,
        project=key.project,
        scopes=tuple(scope for scope in SCOPE_NAMES if scope in key.scopes),
        note=key.note,
        created=key.created,
        expires=key.expires,
        revoked=key.revoked,
        valid=key.is_valid(time.time()),
    )


def _view_new_key(key: ApiKey, secret: str) -> NewKey:
    return NewKey(**msgspec.structs.asdict(view_key(key)), key=secret)
