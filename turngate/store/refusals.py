"""The refusals table: how many model calls of a session were refused, and the answer to the first of them."""

from __future__ import annotations

from turngate.store.connection import Connect
from turngate.store.events import insert_event, new_event
from turngate.trace.tree import RefusedCalls

REFUSAL_TABLES = """
CREATE TABLE IF NOT EXISTS refusals (
    session INTEGER PRIMARY KEY,  -- key of the session
    count INTEGER NOT NULL,
    status INTEGER NOT NULL,      -- HTTP status of the first
    message TEXT NOT NULL         -- of the first
);
"""
MAX_EVENTS = 100  # an agent may repeat a refused call forever, so later ones are only counted
_ADD = (
    "INSERT INTO refusals SELECT ?1, 1, ?2, ?3 WHERE EXISTS (SELECT 1 FROM sessions WHERE key=?1)"
    " ON CONFLICT (session) DO UPDATE SET count=count+1"
)


class Refusals:
    def __init__(self, writing: Connect, reading: Connect, *, there: bool = True) -> None:
        self._writing = writing
        self._reading = reading
        self._there = there  # False: a read-only file of an older version, without this table

    def add(self, session: int, name: str, status: int, message: str) -> RefusedCalls | None:
        """Count a refused call and add its event. Return the new total, or None if the session was deleted. `name` is its id."""
        with self._writing() as db:
            db.execute(_ADD, (session, status, message))
            row = db.execute("SELECT count, status, message FROM refusals WHERE session=?", (session,)).fetchone()
            if row is None:
                return None
            if row[0] <= MAX_EVENTS:
                insert_event(db, new_event(name, "refused", {"call": row[0], "status": status, "message": message}))
        return RefusedCalls(*row)

    def find(self, session: int) -> RefusedCalls | None:
        """Return the refused calls of a session, or None if there are none. `session` is its key."""
        if not self._there:
            return None
        with self._reading() as db:
            row = db.execute("SELECT count, status, message FROM refusals WHERE session=?", (session,)).fetchone()
        return None if row is None else RefusedCalls(*row)
