"""Projects and their API keys, in the gateway's main store. Each project except `default` keeps its sessions in a separate store."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from turngate.common.database_url import is_database_url, parse_database_url
from turngate.errors import BadRequest, ConfigError, Conflict, NotFound
from turngate.store.audit import OPERATOR, NewAuditEntry, insert_audit_entry
from turngate.store.connection import FOR_UPDATE, Connect, StoreConnection

PROJECT_TABLES = """
CREATE TABLE IF NOT EXISTS projects (
    name TEXT PRIMARY KEY,
    created REAL NOT NULL,
    weight REAL NOT NULL,         -- its share of the engines, relative to other projects
    quotas BLOB NOT NULL          -- JSON of Quotas
);
CREATE TABLE IF NOT EXISTS api_keys (
    prefix TEXT PRIMARY KEY,      -- the start of the key, by which it is identified
    hash BLOB NOT NULL,           -- SHA-256; the key itself is not stored
    project TEXT NOT NULL,
    scopes TEXT NOT NULL,         -- separated by spaces
    note TEXT NOT NULL,
    created REAL NOT NULL,
    expires REAL,                 -- NULL: never
    revoked REAL                  -- NULL: it was not revoked
);
CREATE INDEX IF NOT EXISTS api_keys_of_a_project ON api_keys (project);
"""
DEFAULT_PROJECT = "default"  # everything recorded without a project belongs to it
PROJECT_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
ScopeName = Literal["sessions", "traces", "feed", "admin"]
DELETED = "deleted_project:"  # prefix of the setting that records the deletion of a project
SCOPE_NAMES: tuple[ScopeName, ...] = get_args(ScopeName)
_KEY = "prefix, CAST(hash AS BLOB), project, scopes, note, created, expires, revoked"
_Limit = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Quotas(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The limits of a project. None means no limit."""

    live_sessions: _Limit | None = None
    tokens_per_day: _Limit | None = None  # counts sampled tokens; a day begins at midnight UTC
    stored_bytes: _Limit | None = None


class ProjectRow(msgspec.Struct, frozen=True):
    name: str
    created: float = 0.0
    weight: float = 1.0
    quotas: Quotas = Quotas()


class ApiKey(msgspec.Struct, frozen=True):
    """One API key as stored: a hash of the key, and its metadata."""

    prefix: str
    hash: bytes
    project: str
    scopes: frozenset[ScopeName]
    note: str
    created: float
    expires: float | None = None
    revoked: float | None = None

    def is_valid(self, now: float) -> bool:
        return self.revoked is None and (self.expires is None or now < self.expires)


class Caller(msgspec.Struct, frozen=True):
    """The sender of a request: the operator, or the holder of a project's key."""

    actor: str  # the name that the audit log shows
    project: str | None  # None: the operator, who may act on every project

    def require_project(self, project: str) -> None:
        """Raise `NotFound` unless the caller may act on a project. The error does not reveal whether the project exists."""
        if self.project is not None and project != self.project:
            raise unknown_project(project)


OPERATOR_CALLER = Caller(OPERATOR, None)


class ProjectTable:
    def __init__(self, writing: Connect, reading: Connect, *, has_tables: bool = True) -> None:
        self._writing = writing
        self._reading = reading
        self._has_tables = has_tables  # False: a read-only file of an older version, without these tables

    def list_projects(self) -> list[ProjectRow]:
        """Return all projects, sorted by name. The project `default` always exists."""
        rows: list[ProjectRow] = []
        if self._has_tables:
            with self._reading() as db:
                found = db.execute("SELECT name, created, weight, CAST(quotas AS BLOB) FROM projects").fetchall()
            rows = [
                ProjectRow(name, created, weight, msgspec.json.decode(quotas, type=Quotas))
                for name, created, weight, quotas in found
            ]
        if all(row.name != DEFAULT_PROJECT for row in rows):
            rows.append(ProjectRow(DEFAULT_PROJECT))
        return sorted(rows, key=lambda row: row.name)

    def create(self, project: ProjectRow, entry: NewAuditEntry) -> None:
        """Add a project. Raise `Conflict` if the name is taken or belonged to a deleted project."""
        row = (project.name, project.created, project.weight, msgspec.json.encode(project.quotas))
        with self._writing() as db:
            if _is_deleted(db, project.name):
                raise Conflict(
                    f"project {project.name!r} was deleted, and its name cannot be reused; choose a different name",
                    param="name",
                )
            query = "INSERT INTO projects (name, created, weight, quotas) VALUES (?,?,?,?) ON CONFLICT DO NOTHING"
            if project.name == DEFAULT_PROJECT or not db.execute(query, row).rowcount:
                raise Conflict(f"project {project.name!r} already exists; choose a different name", param="name")
            insert_audit_entry(db, entry)

    def change(self, name: str, weight: float | None, quotas: Quotas | None, entry: NewAuditEntry) -> None:
        """Change the weight or the quotas of a project, or both. None leaves the current value unchanged.

        Raise `NotFound` if the project is unknown.
        """
        with self._writing() as db:
            if name == DEFAULT_PROJECT:
                first = (name, time.time(), 1.0, msgspec.json.encode(Quotas()))
                db.execute(
                    "INSERT INTO projects (name, created, weight, quotas) VALUES (?,?,?,?) ON CONFLICT DO NOTHING",
                    first,
                )
            written = None if quotas is None else msgspec.json.encode(quotas)
            changed = [("weight", weight), ("quotas", written)]
            found = db.execute(f"SELECT name FROM projects WHERE name=? {FOR_UPDATE}", (name,)).fetchone()
            if found is None:
                raise unknown_project(name)
            for column, value in changed:
                if value is not None:
                    db.execute(f"UPDATE projects SET {column}=? WHERE name=?", (value, name))
            insert_audit_entry(db, entry)

    def delete(self, name: str, entry: NewAuditEntry) -> None:
        """Delete a project and its keys, and record that its store must be removed. Its audit log entries are kept.

        Raise `NotFound` if the project is unknown.
        """
        with self._writing() as db:
            if not db.execute("DELETE FROM projects WHERE name=?", (name,)).rowcount:
                raise unknown_project(name)
            db.execute("DELETE FROM api_keys WHERE project=?", (name,))
            db.execute("DELETE FROM quota_parts WHERE project=?", (name,))
            db.execute("INSERT INTO settings VALUES (?,?)", (f"{DELETED}{name}", str(time.time())))
            insert_audit_entry(db, entry)
            self._drop_store(db, name)

    def _drop_store(self, db: StoreConnection, name: str) -> None:
        """Remove a project's store if it is in this database. A store that is a folder is removed by the gateways that use it."""

    def list_deleted(self) -> frozenset[str]:
        """Return the names of deleted projects."""
        with self._reading() as db:
            rows = db.execute("SELECT name FROM settings WHERE name LIKE ?", (f"{DELETED}%",)).fetchall()
        return frozenset(name.removeprefix(DELETED) for (name,) in rows)

    # ── keys ────────────────────────────────────────────────────────────────────────────────────────────────────

    def list_keys(self, project: str | None = None) -> list[ApiKey]:
        """Return the API keys of one project or of all projects, oldest first."""
        if not self._has_tables:
            return []
        where, values = ("", ()) if project is None else ("WHERE project=?", (project,))
        with self._reading() as db:
            rows = db.execute(f"SELECT {_KEY} FROM api_keys {where} ORDER BY created, prefix", values).fetchall()
        return [_read_key(row) for row in rows]

    def add_key(self, key: ApiKey, entry: NewAuditEntry) -> None:
        with self._writing() as db:
            _insert_key(db, key)
            insert_audit_entry(db, entry)

    def replace_key(self, old: str, key: ApiKey, old_expires: float, entry: NewAuditEntry) -> None:
        """Add a new key. The old key expires at `old_expires`, or at its own expiry time if that is earlier."""
        with self._writing() as db:
            _insert_key(db, key)
            query = "UPDATE api_keys SET expires=? WHERE prefix=? AND (expires IS NULL OR expires>?)"
            db.execute(query, (old_expires, old, old_expires))
            insert_audit_entry(db, entry)

    def revoke_key(self, prefix: str, entry: NewAuditEntry) -> None:
        """Revoke a key. Do nothing if it is already revoked."""
        with self._writing() as db:
            query = "UPDATE api_keys SET revoked=? WHERE prefix=? AND revoked IS NULL"
            if db.execute(query, (time.time(), prefix)).rowcount:
                insert_audit_entry(db, entry)


def _is_deleted(db: StoreConnection, name: str) -> bool:
    return db.execute("SELECT 1 FROM settings WHERE name=?", (f"{DELETED}{name}",)).fetchone() is not None


def _insert_key(db: StoreConnection, key: ApiKey) -> None:
    scopes = " ".join(scope for scope in SCOPE_NAMES if scope in key.scopes)
    row = (key.prefix, key.hash, key.project, scopes, key.note, key.created, key.expires, key.revoked)
    db.execute(
        "INSERT INTO api_keys (prefix, hash, project, scopes, note, created, expires, revoked) VALUES (?,?,?,?,?,?,?,?)",
        row,
    )


def _read_key(row: tuple[str, bytes, str, str, str, float, float | None, float | None]) -> ApiKey:
    prefix, digest, project, scopes, note, created, expires, revoked = row
    known = frozenset(scope for scope in SCOPE_NAMES if scope in scopes.split())
    return ApiKey(prefix, bytes(digest), project, known, note, created, expires, revoked)


def check_project_name(name: str, param: str = "name") -> None:
    if not PROJECT_NAME.fullmatch(name):
        raise BadRequest(
            f"{param} must be 1 to 40 lowercase letters, digits and hyphens, and must not start or end with a hyphen, but is "
            f"{name[:100]!r}",
            param=param,
        )


def unknown_project(name: str) -> NotFound:
    return NotFound(f"unknown project {name[:100]!r}; `turngate projects list` shows the names", param="project")


def locate_project(data: str, project: str) -> str:
    """Return the location of a project's store, as a value for `--data`.

    The project `default` uses the main store, `data`. For other projects, `projects/NAME` is appended to the folder or the URL's path.
    """
    if project == DEFAULT_PROJECT:
        return data
    if is_database_url(data):
        return parse_database_url(data).locate_project(project)
    return str(Path(data) / "projects" / project)


def refuse_project_store(data: str) -> None:
    """Raise `ConfigError` if `data` is the URL of one project's store. A gateway must use the main store, which also holds the API keys."""
    if is_database_url(data) and (url := parse_database_url(data)).project:
        whole = url.name.removesuffix(f"/projects/{url.project}")
        raise ConfigError(
            f"data: {url.name} is the store of one project; serve {whole}, and use a key of project {url.project!r}",
            param="data",
        )
