"""The audit log: who made which administrative change, and when. Entries are never changed or removed."""

from __future__ import annotations

import time

import msgspec

from turngate.store.connection import LOCK_AUDIT, Connect, StoreConnection
from turngate.types import Json

AUDIT_TABLES = """
CREATE TABLE IF NOT EXISTS audit (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    at REAL NOT NULL,
    actor TEXT NOT NULL,          -- prefix of the key; `operator` for the admin key
    project TEXT NOT NULL,        -- the project that was changed; empty: the change concerns all projects
    action TEXT NOT NULL,         -- such as `key revoked`
    subject TEXT NOT NULL,        -- such as the prefix of the revoked key
    details BLOB NOT NULL         -- JSON
);
CREATE INDEX IF NOT EXISTS audit_of_a_project ON audit (project, number);
"""
# The database itself refuses to change or remove an entry.
SQLITE_AUDIT_GUARD = """
CREATE TRIGGER IF NOT EXISTS audit_unchanged BEFORE UPDATE ON audit
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only: entries cannot be changed or removed'); END;
CREATE TRIGGER IF NOT EXISTS audit_undeleted BEFORE DELETE ON audit
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only: entries cannot be changed or removed'); END;
"""
POSTGRES_AUDIT_GUARD = """
CREATE OR REPLACE FUNCTION refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the audit log is append-only: entries cannot be changed or removed';
END $$;
CREATE OR REPLACE TRIGGER audit_unchanged BEFORE UPDATE OR DELETE OR TRUNCATE ON audit
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_audit_change();
"""
OPERATOR = "operator"


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    at: float
    actor: str
    project: str
    action: str
    subject: str
    details: Json = None


class NewAuditEntry(msgspec.Struct, frozen=True):
    """An entry to add to the audit log. It never contains an API key."""

    actor: str
    project: str
    action: str
    subject: str = ""
    details: dict[str, Json] = {}


class AuditTable:
    def __init__(self, writing: Connect, reading: Connect, *, has_tables: bool = True) -> None:
        self._writing = writing
        self._reading = reading
        self._has_tables = has_tables  # False: a read-only file of an older version, without this table

    def add(self, entry: NewAuditEntry) -> None:
        with self._writing() as db:
            insert_audit_entry(db, entry)

    def page(
        self, *, project: str | None = None, after: int = 0, limit: int = 100, newest: bool = False
    ) -> list[AuditEntry]:
        """Return up to `limit` entries of a project, or of all projects, with numbers above `after`, oldest first.

        If there are more than `limit`, return the oldest ones, or the newest ones if `newest` is set. With `project`, the entries are
        numbered 1, 2, … within the project. Numbers with gaps would show the project's members how active other projects are.
        """
        if not self._has_tables:
            return []
        columns = "at, actor, project, action, subject, CAST(details AS BLOB)"
        with self._reading() as db:
            if project is None:
                order = "DESC" if newest else "ASC"
                query = f"SELECT number, {columns} FROM audit WHERE number>? ORDER BY number {order} LIMIT ?"
                rows = sorted(db.execute(query, (after, limit)).fetchall(), key=lambda row: row[0])
            else:
                if newest:
                    (count,) = db.execute("SELECT count(*) FROM audit WHERE project=?", (project,)).fetchone()
                    after = max(after, count - limit)
                query = f"SELECT {columns} FROM audit WHERE project=? ORDER BY number LIMIT ? OFFSET ?"
                found = db.execute(query, (project, limit, after)).fetchall()
                rows = [(number, *row) for number, row in enumerate(found, after + 1)]
        return [
            AuditEntry(
                number=number,
                at=at,
                actor=actor,
                project=of,
                action=action,
                subject=subject,
                details=msgspec.json.decode(details),
            )
            for number, at, actor, of, action, subject, details in rows
        ]


def insert_audit_entry(db: StoreConnection, entry: NewAuditEntry) -> None:
    """Insert an entry in the transaction of the change that the entry describes.

    The transaction must already hold all other locks that it needs.
    """
    db.execute(LOCK_AUDIT)
    db.execute(
        "INSERT INTO audit (at, actor, project, action, subject, details) VALUES (?,?,?,?,?,?)",
        (time.time(), entry.actor, entry.project, entry.action, entry.subject, msgspec.json.encode(entry.details)),
    )
