"""The fence at which the calls of all cells wait during a weight update.

The table `fence` has one row with the newest change. `fence_followers` has one row for each follower, which is a process of a cell. All
times are from PostgreSQL's clock. Each change gets the next number, its epoch. A follower first reports the newest change that it has
carried out, and then reads the fence. A gateway that makes a change therefore finds every follower that has not read the change yet.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from turngate.store.connection import Connect

FENCE_TABLES = """
CREATE TABLE IF NOT EXISTS fence (
    row INTEGER PRIMARY KEY,      -- always 1
    epoch INTEGER NOT NULL,       -- rises with every change
    stage TEXT NOT NULL,          -- open, hold or drain
    version INTEGER NOT NULL,     -- the policy version in force
    model TEXT NOT NULL,          -- the engines' name for it; empty: their own model
    weights TEXT NOT NULL         -- where its weights are, as JSON; empty: unknown
);
CREATE TABLE IF NOT EXISTS fence_followers (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    ttl REAL NOT NULL,            -- seconds after a report for which the follower may serve
    seen REAL NOT NULL,           -- time of its last report
    epoch INTEGER NOT NULL,       -- the newest change that it has carried out
    busy TEXT NOT NULL DEFAULT '', -- URLs of draining engines at which it has calls, separated by spaces
    calls TEXT NOT NULL DEFAULT ''  -- its calls by project, as JSON; empty: it shares no engines between projects
);
"""
FenceStage = Literal["open", "hold", "drain"]
_NOW = "(EXTRACT(EPOCH FROM clock_timestamp())::float8)"


class SharedFence(msgspec.Struct, frozen=True):
    """The newest change to the fence."""

    epoch: int = 0
    stage: FenceStage = "open"
    version: int = 0
    model: str = ""
    weights: str = ""


class FenceFollowerRow(msgspec.Struct, frozen=True):
    """One row of the followers table, and the time `now` at which it was read."""

    id: str
    name: str
    ttl: float
    seen: float
    epoch: int
    now: float
    busy: str = ""


class FenceTable:
    """The fence and its followers. Each method is one transaction, except `report`."""

    def __init__(self, writing: Connect, reading: Connect) -> None:
        self._writing = writing
        self._reading = reading

    def read(self) -> SharedFence:
        with self._reading() as db:
            row = db.execute("SELECT epoch, stage, version, model, weights FROM fence WHERE row=1").fetchone()
        return SharedFence() if row is None else SharedFence(*row)

    def write(self, stage: FenceStage, version: int, model: str, weights: str) -> int:
        """Write a change to the fence, and return its epoch."""
        query = (
            "INSERT INTO fence (row, epoch, stage, version, model, weights) VALUES (1,1,?,?,?,?)"
            " ON CONFLICT (row) DO UPDATE SET epoch=fence.epoch+1, stage=excluded.stage, version=excluded.version,"
            " model=excluded.model, weights=excluded.weights RETURNING epoch"
        )
        with self._writing() as db:
            (epoch,) = db.execute(query, (stage, version, model, weights)).fetchone()
        return int(epoch)

    def report(
        self, follower: str, name: str, ttl_s: float, epoch: int, busy: str = "", calls: str = ""
    ) -> SharedFence:
        """Report the epoch of the newest change that a follower has carried out, then read the fence in a second transaction."""
        query = (
            f"INSERT INTO fence_followers (id, name, ttl, seen, epoch, busy, calls) VALUES (?,?,?,{_NOW},?,?,?)"
            " ON CONFLICT (id) DO UPDATE SET ttl=excluded.ttl, seen=excluded.seen, epoch=excluded.epoch,"
            " busy=excluded.busy, calls=excluded.calls"
        )
        with self._writing() as db:
            db.execute(query, (follower, name, ttl_s, epoch, busy, calls))
        return self.read()

    def list_calls(self, follower: str, age: float) -> list[str]:
        """Return the calls that other followers reported. Skip each report that is older than `age` times its follower's ttl."""
        query = f"SELECT calls FROM fence_followers WHERE id<>? AND calls<>'' AND {_NOW} < seen + ttl * ? ORDER BY id"
        with self._reading() as db:
            return [calls for (calls,) in db.execute(query, (follower, age)).fetchall()]

    def forget(self, follower: str) -> None:
        """Remove a follower that has stopped serving."""
        with self._writing() as db:
            db.execute("DELETE FROM fence_followers WHERE id=?", (follower,))

    def list_followers(self) -> list[FenceFollowerRow]:
        with self._reading() as db:
            query = f"SELECT id, name, ttl, seen, epoch, {_NOW}, busy FROM fence_followers ORDER BY id"
            rows = db.execute(query).fetchall()
        return [FenceFollowerRow(*row) for row in rows]

    def prune(self, age_s: float) -> None:
        """Remove followers whose reports expired more than `age_s` seconds ago. A live follower reports again before it serves."""
        with self._writing() as db:
            db.execute(f"DELETE FROM fence_followers WHERE seen + ttl < {_NOW} - ?", (age_s,))
