"""The shared list of engines, which all cells use. Operators add, drain and remove engines through the gateway on the shared store."""

from __future__ import annotations

from typing import Literal

import msgspec

from turngate.store.connection import Connect

ENGINE_TABLES = """
CREATE TABLE IF NOT EXISTS engines (
    url TEXT PRIMARY KEY,
    state TEXT NOT NULL,          -- active, draining, failed or removed
    reason TEXT NOT NULL          -- why it failed
);
"""
SharedEngineState = Literal["active", "draining", "failed", "removed"]
# Cells read the engines whenever the fence has a new epoch. This raises the epoch without changing the fence's stage and version.
_RAISE_EPOCH = (
    "INSERT INTO fence (row, epoch, stage, version, model, weights) VALUES (1,1,'open',0,'','')"
    " ON CONFLICT (row) DO UPDATE SET epoch=fence.epoch+1 RETURNING epoch"
)


class SharedEngine(msgspec.Struct, frozen=True):
    """One row of the engines table."""

    url: str
    state: SharedEngineState
    reason: str = ""


class EngineTable:
    """The engines table. Each method is one transaction."""

    def __init__(self, writing: Connect, reading: Connect) -> None:
        self._writing = writing
        self._reading = reading

    def list_engines(self) -> list[SharedEngine]:
        with self._reading() as db:
            rows = db.execute("SELECT url, state, reason FROM engines ORDER BY url").fetchall()
        return [SharedEngine(*row) for row in rows]

    def write(self, engine: SharedEngine) -> int:
        """Write the state of an engine, and raise the epoch of the fence. Return the new epoch.

        A cell that reports this epoch, or a later one, knows the new state.
        """
        query = (
            "INSERT INTO engines (url, state, reason) VALUES (?,?,?)"
            " ON CONFLICT (url) DO UPDATE SET state=excluded.state, reason=excluded.reason"
        )
        with self._writing() as db:
            db.execute(query, (engine.url, engine.state, engine.reason))
            (epoch,) = db.execute(_RAISE_EPOCH).fetchone()
        return int(epoch)
