"""The cells of the shared store and their leases. PostgreSQL's clock decides when a lease ends.

active ──► ended      stopped by its operator
   │ ────► replaced   restarted: its sessions continue under the new id
   └─────► lost       taken over after its lease ended: its running attempts are superseded, and outcomes that it ships later do not count
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from turngate.errors import Conflict
from turngate.store.attempts import AttemptRow, AttemptTable, supersede_attempts
from turngate.store.connection import FOR_UPDATE, Connect, Cursor, StoreConnection
from turngate.store.outcomes import RecordedOutcome

CELL_TABLES = """
CREATE TABLE IF NOT EXISTS cells (
    id TEXT PRIMARY KEY,          -- new each time the cell starts
    name TEXT NOT NULL,           -- chosen by the operator; usually the name of the machine
    url TEXT NOT NULL,            -- URL of its gateway
    started REAL NOT NULL,
    ttl REAL NOT NULL,            -- seconds that a renewal adds
    lease_until REAL NOT NULL,
    state TEXT NOT NULL           -- active, ended, replaced or lost
);
"""
SHIPMENT_TABLES = """
CREATE TABLE IF NOT EXISTS shipments (
    session INTEGER PRIMARY KEY,  -- key of the session
    cell TEXT NOT NULL,           -- id of the cell that served it
    newest INTEGER NOT NULL,      -- the session's newest event that was shipped, by its number in the cell's store
    shipped REAL NOT NULL,
    bytes INTEGER NOT NULL DEFAULT 0  -- size of its rows when it was first shipped
);
"""
CellState = Literal["active", "ended", "replaced", "lost"]
NOW = "(EXTRACT(EPOCH FROM clock_timestamp())::float8)"
_COLUMNS = "id, name, url, started, ttl, lease_until, state"
LOCK_ROWS = "/* FOR SHARE */"


class CellRow(msgspec.Struct, frozen=True):
    """One row of the cells table."""

    id: str
    name: str
    url: str
    started: float
    ttl: float
    lease_until: float
    state: CellState
    left_s: float  # seconds until the lease ends; negative if it has ended


class CellTable:
    """The cells table. Each method is one transaction."""

    def __init__(self, writing: Connect, reading: Connect) -> None:
        self._writing = writing
        self._reading = reading

    def register(self, cell: str, name: str, url: str, ttl_s: float, previous: Iterable[str] = ()) -> list[str]:
        """Register a cell that is starting, and move the running attempts of its earlier ids (`previous`) to it.

        Ids that were declared lost are skipped. Return the other ids.
        """
        with self._writing() as db:
            adopted = [old for old in previous if old != cell and self._adopt(db, old, cell)]
            db.execute(
                "INSERT INTO cells (id, name, url, started, ttl, lease_until, state)"
                f" VALUES (?,?,?,{NOW},?,{NOW}+?,'active')",
                (cell, name, url, ttl_s, ttl_s),
            )
        return adopted

    def _adopt(self, db: StoreConnection, old: str, cell: str) -> bool:
        if db.execute(f"SELECT state FROM cells WHERE id=? {FOR_UPDATE}", (old,)).fetchall() == [("lost",)]:
            return False
        # An unknown id was registered after the backup from which the store was restored. It is adopted too.
        db.execute("UPDATE cells SET state='replaced' WHERE id=?", (old,))
        db.execute("UPDATE attempts SET cell=? WHERE cell=? AND state='running'", (cell, old))
        return True

    def renew(self, cell: str) -> bool:
        """Renew the lease of a cell. Return False if the cell is no longer active."""
        query = f"UPDATE cells SET lease_until={NOW}+ttl WHERE id=? AND state='active'"
        with self._writing() as db:
            return db.execute(query, (cell,)).rowcount == 1

    def end(self, cell: str) -> None:
        """End the lease of a cell that is stopping."""
        with self._writing() as db:
            query = f"UPDATE cells SET state='ended', lease_until={NOW} WHERE id=? AND state='active'"
            db.execute(query, (cell,))

    def take_over(self, cell: str) -> bool:
        """Declare a cell lost, and supersede its running attempts. Return False if its lease has not ended or the cell is unknown."""
        with self._writing() as db:
            query = f"UPDATE cells SET state='lost' WHERE id=? AND state<>'lost' AND lease_until<{NOW}"
            db.execute(query, (cell,))
            if db.execute("SELECT 1 FROM cells WHERE id=? AND state='lost'", (cell,)).fetchone() is None:
                return False
            # This is needed even if the cell was already lost, since another project's store may have declared it lost.
            supersede_attempts(db, "cell=? AND state='running'", (cell,))
            return True

    def find(self, cell: str) -> CellRow | None:
        return next(iter(self._select("id=?", (cell,))), None)

    def list_cells(self, state: CellState = "active") -> list[CellRow]:
        """Return the cells in the given state, oldest first."""
        return self._select("state=? ORDER BY started, id", (state,))

    def _select(self, where: str, values: Sequence[object]) -> list[CellRow]:
        query = f"SELECT {_COLUMNS}, lease_until-{NOW} FROM cells WHERE {where}"
        with self._reading() as db:
            return [CellRow(*row) for row in db.execute(query, values).fetchall()]


class LeasedAttempts(AttemptTable):
    """The attempts table of the shared store. Its `supersede` does not give up an attempt that may still be running on a cell."""

    def supersede(self, rollout: str, attempt: int, session: str) -> tuple[AttemptRow, RecordedOutcome | None]:
        """Like `AttemptTable.supersede`, but raise `Conflict` if the attempt may still be running.

        An attempt may still be running if its session has not been shipped and the lease of its cell has not ended. If the session has not
        been shipped but the lease has ended, the cell is taken over, so that all its attempts can run elsewhere.
        """
        query = (
            f"SELECT cells.id, cells.name, lease_until-{NOW} FROM attempts JOIN cells ON cells.id=attempts.cell"
            " WHERE rollout=? AND attempt=? AND attempts.state='running' AND cells.state='active'"
            " AND NOT EXISTS (SELECT 1 FROM sessions WHERE sessions.id=attempts.session)"  # a session that was shipped has ended
        )
        with self._reading() as db:
            row = db.execute(query, (rollout, attempt)).fetchone()
        if row is not None and (row[2] > 0 or not CellTable(self._writing, self._reading).take_over(row[0])):
            raise Conflict(
                f"attempt {attempt} of rollout {rollout!r} runs on cell {row[1]}, whose lease lasts for another "
                f"{max(row[2], 0.0):.0f} s, or longer if it is renewed; cancel the attempt's session there, or try again later"
            )
        return super().supersede(rollout, attempt, session)


def lock_cells(db: StoreConnection, cells: Iterable[str]) -> Cursor:
    """Lock cells, and return their ids and states. None of them can be taken over until the caller's transaction ends."""
    return db.execute(f"SELECT id, state FROM cells WHERE id=ANY(?) ORDER BY id {LOCK_ROWS}", (sorted(cells),))
