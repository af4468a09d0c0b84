"""The refusals table: model calls that were refused, and whether the agent later repeated them successfully."""

from __future__ import annotations

from turngate.store.connection import FOR_UPDATE, Connect, StoreConnection
from turngate.store.events import insert_event, new_event
from turngate.trace.tree import RefusedCalls

REFUSAL_TABLES = """
CREATE TABLE IF NOT EXISTS refusals (
    session INTEGER NOT NULL,     -- key of the session
    call INTEGER NOT NULL,        -- 1, 2, … in the order of arrival
    status INTEGER NOT NULL,      -- HTTP status of the answer
    message TEXT NOT NULL,
    request BLOB,                 -- digest of the call's conversation; NULL: unknown
    repeated INTEGER NOT NULL DEFAULT 0,  -- 1: the agent repeated the call successfully
    PRIMARY KEY (session, call)
) WITHOUT ROWID;
"""
DAMAGED = "this refusal is damaged on disk"
MAX_CALLS = 100  # per session, not counting those repeated successfully; an agent may repeat a refused call forever


class Refusals:
    def __init__(self, writing: Connect, reading: Connect, *, has_tables: bool = True) -> None:
        self._writing = writing
        self._reading = reading
        self._has_tables = has_tables  # False: a read-only file of an older version, without this table

    def add(self, session: int, name: str, status: int, message: str, request: bytes | None) -> RefusedCalls | None:
        """Add a refused call and its event. `name` is the session's id.

        Return a summary of the refused calls that were not repeated successfully, or None if there are none.

        A call of a deleted session is dropped. Once a session has `MAX_CALLS` of these calls, a new call is dropped if any of them has the
        same conversation or an unknown one; if not, it is added without its conversation, so it can never be marked as repeated.
        """
        with self._writing() as db:
            exists = db.execute(f"SELECT 1 FROM sessions WHERE key=? {FOR_UPDATE}", (session,)).fetchone() is not None
            (last,) = db.execute("SELECT coalesce(max(call), 0) FROM refusals WHERE session=?", (session,)).fetchone()
            rows = db.execute("SELECT request FROM refusals WHERE session=? AND repeated=0", (session,)).fetchall()
            is_full = len(rows) >= MAX_CALLS
            if exists and not (is_full and ((request,) in rows or (None,) in rows)):
                known = None if is_full else request
                db.execute("INSERT INTO refusals VALUES (?,?,?,?,?,0)", (session, last + 1, status, message, known))
                insert_event(db, new_event(name, "refused", {"call": last + 1, "status": status, "message": message}))
            return _read(db, session)

    def mark_repeated(self, session: int, name: str, request: bytes) -> RefusedCalls | None:
        """Mark the refused calls whose conversation has the digest `request` as repeated successfully.

        Call this when a call with this conversation has been answered. `name` is the session's id.

        Return a summary of the refused calls that were not repeated successfully, or None if there are none.
        """
        where = "session=? AND request=? AND repeated=0"
        with self._writing() as db:
            calls = db.execute(f"SELECT call FROM refusals WHERE {where} ORDER BY call", (session, request)).fetchall()
            db.execute(f"UPDATE refusals SET repeated=1 WHERE {where}", (session, request))
            for (call,) in calls:
                insert_event(db, new_event(name, "repeated", {"call": call}))
            return _read(db, session)

    def find(self, session: int) -> RefusedCalls | None:
        """Return a summary of the refused calls that were not repeated successfully, or None if there are none."""
        if not self._has_tables:
            return None
        with self._reading() as db:
            return _read(db, session)


def _read(db: StoreConnection, session: int) -> RefusedCalls | None:
    query = "SELECT status, message FROM refusals WHERE session=? AND repeated=0 ORDER BY call"
    rows = db.execute(query, (session,)).fetchall()
    if not rows:
        return None
    status, message = rows[0]
    if isinstance(status, int) and isinstance(message, str):
        return RefusedCalls(len(rows), status, message)
    return RefusedCalls(len(rows), 0, DAMAGED)
