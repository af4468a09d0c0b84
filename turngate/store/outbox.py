"""The outbox of a cell: the sessions that must still be shipped to the shared store, and when each of them is due.

A session enters the outbox in the transaction that opens the session, and leaves once the shared store has committed it. Any later
change, such as a replaced outcome, adds the session again. A session in the outbox cannot be deleted, and its events are kept.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Protocol

import msgspec

from turngate.errors import Conflict
from turngate.store.attempts import supersede_attempts
from turngate.store.connection import Connect, StoreConnection

OUTBOX_TABLES = """
CREATE TABLE IF NOT EXISTS outbox (
    session INTEGER PRIMARY KEY,  -- key of the session
    cell TEXT NOT NULL,           -- id of the cell that serves or served it
    due REAL,                     -- when to ship it; NULL: it is open
    announced INTEGER NOT NULL DEFAULT 0,  -- 1: the shared store knows which cell serves it
    revision INTEGER NOT NULL DEFAULT 1,  -- increases with each change, so that a change during shipping is shipped too
    error TEXT NOT NULL DEFAULT ''        -- why it cannot be shipped; empty: it can
);
CREATE INDEX IF NOT EXISTS outbox_due ON outbox (due) WHERE due IS NOT NULL;
"""
ABANDONED_S = 3600.0  # an ended session without an outcome is shipped after this time
_LAST, _HISTORY = "shipped_last", "shipped_history"  # names of settings
_SET = "INSERT INTO settings VALUES (?,?) ON CONFLICT (name) DO UPDATE SET value=excluded.value"
_LATE_EVENT_S = 2.0  # events after the outcome are shipped together after this time
_CHANGE = "ON CONFLICT (session) DO UPDATE SET revision=outbox.revision+1, error=''"
_EARLIER = "due=CASE WHEN outbox.due<excluded.due THEN outbox.due ELSE excluded.due END"


class UnshippedSession(msgspec.Struct, frozen=True):
    """One row of the outbox table."""

    session: int
    cell: str
    revision: int


class ShippedSession(msgspec.Struct, frozen=True):
    """A session that this cell has shipped to the shared store."""

    key: int
    id: str
    newest: int  # number of its newest event in the cell's store


class ShippingPosition(msgspec.Struct, frozen=True):
    """The history of the shared store (`restores.py`) that a cell saw last, and the session that the cell shipped last."""

    history: str | None  # its name; None: the cell has not connected to the shared store yet
    last: str | None  # id of the session that the cell shipped last, if the cell still has it


class OpenAttempt(msgspec.Struct, frozen=True):
    """An open session that has not been announced to the shared store yet."""

    key: int
    session: str
    cell: str
    config: bytes
    opened: float


class OutboxState(msgspec.Struct, frozen=True):
    """How many ended sessions are waiting to be shipped, and since when."""

    unshipped: int = 0
    oldest_due: float | None = None  # when the session that has waited longest was due
    failed: int = 0  # sessions that cannot be shipped, for example because they are damaged


class ShippingQueue(Protocol):
    """The outbox methods that a cell's lease keeper uses. `Outboxes` implements them for all projects together."""

    def cells(self) -> list[str]: ...

    def start(self, cell: str, adopted: Iterable[str]) -> None: ...


class Outboxes:
    """The outboxes of all projects of a cell."""

    def __init__(self, outbox: OutboxTable) -> None:
        self._outboxes = [outbox]

    def add(self, outbox: OutboxTable) -> None:
        self._outboxes.append(outbox)

    def remove(self, outbox: OutboxTable) -> None:
        self._outboxes.remove(outbox)

    def cells(self) -> list[str]:
        return sorted({cell for outbox in self._outboxes for cell in outbox.cells()})

    def start(self, cell: str, adopted: Iterable[str]) -> None:
        known = list(adopted)
        for outbox in self._outboxes:
            outbox.start(cell, known)

    def state(self) -> OutboxState:
        states = [outbox.state() for outbox in self._outboxes]
        due = [state.oldest_due for state in states if state.oldest_due is not None]
        return OutboxState(
            sum(state.unshipped for state in states), min(due, default=None), sum(state.failed for state in states)
        )


class OutboxTable:
    """The outbox table. While `cell` is empty, sessions are not added: this gateway is not a cell, or it has no id yet."""

    def __init__(self, writing: Connect, reading: Connect, *, has_tables: bool = True) -> None:
        self._writing = writing
        self._reading = reading
        self._has_tables = has_tables  # False: a read-only file of an older version, without this table
        self.cell = ""  # id of this cell

    # ── in the transaction of a change ──────────────────────────────────────────────────────────────────────────

    def add_open(self, db: StoreConnection, session: int) -> None:
        if self.cell:
            db.execute("INSERT INTO outbox (session, cell) VALUES (?,?)", (session, self.cell))

    def add_ended(self, db: StoreConnection, session: int, ended: float, *, cancelled: bool) -> None:
        """Add a session that has ended. It is due `ABANDONED_S` seconds later, because its runner may still record an outcome.

        A cancelled session is due immediately, because its outcome would not count.
        """
        if self.cell:
            query = f"INSERT INTO outbox (session, cell, due) VALUES (?,?,?) {_CHANGE}, {_EARLIER}"
            db.execute(query, (session, self.cell, ended if cancelled else ended + ABANDONED_S))

    def add_outcome(self, db: StoreConnection, session_id: str) -> None:
        """Make an ended session due now, because its outcome was recorded or replaced. Do nothing if the session is open."""
        self._add(db, session_id, time.time(), f"{_CHANGE}, {_EARLIER}")

    def add_event(self, db: StoreConnection, session_id: str) -> None:
        """Add an ended session to the outbox again, because it has a new event. Do nothing if the session is open.

        If the session is still in the outbox, its due time does not change.
        """
        self._add(db, session_id, time.time() + _LATE_EVENT_S, _CHANGE)

    def _add(self, db: StoreConnection, session_id: str, due: float, on_conflict: str) -> None:
        if self.cell and session_id:
            db.execute(
                "INSERT INTO outbox (session, cell, due) SELECT key, ?, ? FROM sessions WHERE id=? AND status<>'open'"
                f" {on_conflict}",
                (self.cell, due, session_id),
            )

    # ── for the shipper ─────────────────────────────────────────────────────────────────────────────────────────

    def find_due(self, now: float, limit: int) -> list[UnshippedSession]:
        """Return up to `limit` sessions to ship, in the order in which they became due.

        A session that is due more than `ABANDONED_S` seconds from now is returned too, because the clock must have been set back.
        """
        query = "SELECT session, cell, revision FROM outbox WHERE (due<=? OR due>?) AND error='' ORDER BY due, session LIMIT ?"
        with self._reading() as db:
            rows = db.execute(query, (now, now + ABANDONED_S, limit)).fetchall()
        return [UnshippedSession(*row) for row in rows]

    def find_unannounced(self, limit: int) -> list[OpenAttempt]:
        """Return up to `limit` open sessions that have not been announced to the shared store."""
        query = (
            "SELECT key, id, cell, CAST(config AS BLOB), opened FROM outbox JOIN sessions ON key=session"
            " WHERE due IS NULL AND announced=0 ORDER BY key LIMIT ?"
        )
        with self._reading() as db:
            return [OpenAttempt(*row) for row in db.execute(query, (limit,)).fetchall()]

    def mark_announced(self, attempts: Iterable[OpenAttempt], superseded: Collection[str] = ()) -> None:
        """Record that sessions were announced to the shared store.

        `superseded` contains the ids of the sessions whose attempts are superseded or replaced in the shared store. Supersede these
        attempts in this store, too.
        """
        keys = [attempt.key for attempt in attempts]
        with self._writing() as db:
            db.execute(f"UPDATE outbox SET announced=1 WHERE session IN ({','.join('?' * len(keys))})", keys)
            for session in sorted(superseded):
                supersede_attempts(db, "session=?", (session,))

    def is_announced(self, session: int) -> bool:
        """Return whether an open session has been announced to the shared store."""
        query = "SELECT 1 FROM outbox WHERE session=? AND announced=0"
        with self._reading() as db:
            return db.execute(query, (session,)).fetchone() is None

    def remove(self, shipped: Iterable[UnshippedSession]) -> None:
        """Remove shipped and deleted sessions from the outbox. A session that has changed since it was read stays in the outbox."""
        last = None
        with self._writing() as db:
            for last in shipped:
                db.execute("DELETE FROM outbox WHERE session=? AND revision=?", (last.session, last.revision))
            if last is not None:
                db.execute(_SET, (_LAST, str(last.session)))

    # ── after the shared store was restored from a backup ───────────────────────────────────────────────────────

    def read_position(self) -> ShippingPosition:
        """Return the history of the shared store that this cell saw last, and the session that it shipped last."""
        with self._reading() as db:
            found = dict(
                db.execute("SELECT name, value FROM settings WHERE name IN (?,?)", (_LAST, _HISTORY)).fetchall()
            )
            query = "SELECT id FROM sessions WHERE key=?"
            row = db.execute(query, (int(found[_LAST]),)).fetchone() if _LAST in found else None
        return ShippingPosition(found.get(_HISTORY), None if row is None else row[0])

    def set_history(self, history: str) -> None:
        """Record the name of the shared store's current history (`restores.py`)."""
        with self._writing() as db:
            db.execute(_SET, (_HISTORY, history))

    def list_shipped(self, after: int, limit: int) -> list[ShippedSession]:
        """Return up to `limit` shipped sessions with keys above `after`, oldest first, each with the number of its newest event."""
        query = (
            "SELECT key, id, coalesce((SELECT max(seq) FROM events WHERE events.session=sessions.id), 0) FROM sessions"
            " WHERE key>? AND status<>'open' AND key NOT IN (SELECT session FROM outbox) ORDER BY key LIMIT ?"
        )
        with self._reading() as db:
            return [ShippedSession(*row) for row in db.execute(query, (after, limit)).fetchall()]

    def add_again(self, sessions: Iterable[int]) -> None:
        """Put sessions back into the outbox, because the shared store has lost them or their newest events.

        Mark them as reshipped, since they may already have been delivered.
        """
        now = time.time()
        with self._writing() as db:
            for session in sessions:
                db.execute(
                    f"INSERT INTO outbox (session, cell, due) VALUES (?,?,?) {_CHANGE}", (session, self.cell, now)
                )
                db.execute("INSERT INTO reshipped VALUES (?) ON CONFLICT DO NOTHING", (session,))

    def announce_again(self) -> None:
        """Mark all open sessions as not announced, so that they are announced again."""
        with self._writing() as db:
            db.execute("UPDATE outbox SET announced=0 WHERE due IS NULL")

    def mark_failed(self, row: UnshippedSession, error: str) -> None:
        """Record why a session cannot be shipped. The session stays in the outbox, and is retried once it changes or the cell restarts."""
        with self._writing() as db:
            query = "UPDATE outbox SET error=? WHERE session=? AND revision=?"
            db.execute(query, (error, row.session, row.revision))

    def state(self) -> OutboxState:
        if not self._has_tables:
            return OutboxState()
        query = "SELECT count(*), min(due), coalesce(sum(error<>''), 0) FROM outbox WHERE due IS NOT NULL"
        with self._reading() as db:
            return OutboxState(*db.execute(query).fetchone())

    def failures(self, limit: int = 10) -> list[tuple[str, str]]:
        """Return the ids of up to `limit` sessions that cannot be shipped, each with the reason."""
        if not self._has_tables:
            return []
        query = "SELECT id, error FROM outbox JOIN sessions ON key=session WHERE error<>'' ORDER BY session LIMIT ?"
        with self._reading() as db:
            return [(session_id, error) for session_id, error in db.execute(query, (limit,)).fetchall()]

    # ── for the cell ────────────────────────────────────────────────────────────────────────────────────────────

    def cells(self) -> list[str]:
        """Return the ids of the cells that the sessions in the outbox belong to."""
        with self._reading() as db:
            return [cell for (cell,) in db.execute("SELECT DISTINCT cell FROM outbox ORDER BY cell").fetchall()]

    def start(self, cell: str, adopted: Iterable[str]) -> None:
        """Make this gateway the cell `cell`, and move the sessions of the `adopted` cells to it.

        All ended sessions in the outbox become due.
        """
        with self._writing() as db:
            for old in adopted:
                db.execute("UPDATE outbox SET cell=? WHERE cell=?", (cell, old))
            db.execute("UPDATE outbox SET error='' WHERE error<>''")
            db.execute(
                "UPDATE outbox SET revision=revision+1, due=(SELECT CASE WHEN EXISTS"
                " (SELECT 1 FROM outcomes WHERE outcomes.session=outbox.session) THEN 0 ELSE closed+? END"
                " FROM sessions WHERE key=outbox.session)"
                " WHERE due IS NULL AND session IN (SELECT key FROM sessions WHERE status<>'open')",
                (ABANDONED_S,),
            )
            # No session waits for an outcome any longer: its runner may have died with the previous cell, and its attempt cannot be
            # superseded before the session is shipped.
            now = time.time()
            db.execute("UPDATE outbox SET due=? WHERE due>?", (now, now))
        self.cell = cell

    def find_foreign(self, cell: str) -> list[str]:
        """Return the ids of open sessions in the outbox that belong to a different cell."""
        query = "SELECT id FROM outbox JOIN sessions ON key=session WHERE status='open' AND cell<>?"
        with self._reading() as db:
            return [session_id for (session_id,) in db.execute(query, (cell,)).fetchall()]

    def require_shipped(self, session: int, session_id: str) -> None:
        """Raise `Conflict` if the latest state of a session has not been shipped. If the session has ended, make it due now."""
        if not self._has_tables:
            return
        with self._reading() as db:
            row = db.execute("SELECT error FROM outbox WHERE session=?", (session,)).fetchone()
        if row is None:
            return
        with self._writing() as db:
            db.execute("UPDATE outbox SET due=? WHERE session=? AND due IS NOT NULL", (time.time(), session))
        raise Conflict(
            f"the latest state of session {session_id} is not in the shared store yet, so the session cannot be deleted; "
            + (f"shipping it failed: {row[0]}" if row[0] else "try again once this cell has shipped it")
        )
