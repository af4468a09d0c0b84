"""The parts of projects' quotas that gateways and cells have taken. A process that has taken a part can use it without further queries."""

from __future__ import annotations

import time
from typing import Literal

from turngate.store.connection import FOR_UPDATE, Connect, StoreConnection

QUOTA_TABLES = """
CREATE TABLE IF NOT EXISTS quota_parts (
    project TEXT NOT NULL,
    quota TEXT NOT NULL,          -- live_sessions or tokens_per_day
    period INTEGER NOT NULL,      -- number of the day; 0 for a quota that is not renewed
    holder TEXT NOT NULL,         -- the process that has taken this part
    amount INTEGER NOT NULL,
    until REAL NOT NULL,          -- when the part expires unless its holder renews it
    PRIMARY KEY (project, quota, period, holder)
);
"""
QuotaName = Literal["live_sessions", "tokens_per_day"]
NEVER = 1e18


class QuotaTable:
    def __init__(self, writing: Connect, reading: Connect) -> None:
        self._writing = writing
        self._reading = reading

    def take(
        self,
        project: str,
        quota: QuotaName,
        holder: str,
        *,
        wanted: int,
        limit: int,
        period: int = 0,
        until: float = NEVER,
    ) -> int:
        """Set a holder's part of a quota to `wanted`, or to less if other holders have already taken too much of `limit`.

        Return the part's new size. This method never shrinks a part of a daily quota, because the part may already have been used. `period`
        is the number of the day for a daily quota, and 0 for live sessions.
        """
        where = (project, quota, period)
        with self._writing() as db:
            _lock(db, project)
            query = (
                "SELECT coalesce(sum(amount), 0) FROM quota_parts"
                " WHERE project=? AND quota=? AND period=? AND holder!=? AND until>?"
            )
            (others,) = db.execute(query, (*where, holder, time.time())).fetchone()
            query = "SELECT amount FROM quota_parts WHERE project=? AND quota=? AND period=? AND holder=?"
            row = db.execute(query, (*where, holder)).fetchone()
            spent = row[0] if row is not None and period else 0
            amount = max(spent, min(wanted, limit - int(others)), 0)
            db.execute(
                "INSERT INTO quota_parts (project, quota, period, holder, amount, until) VALUES (?,?,?,?,?,?)"
                " ON CONFLICT (project, quota, period, holder) DO UPDATE SET amount=excluded.amount, until=excluded.until",
                (*where, holder, amount, until),
            )
            return amount

    def give_back(self, project: str, quota: QuotaName, holder: str, unused: int, period: int = 0) -> None:
        """Give back the unused amount of a holder's part."""
        with self._writing() as db:
            query = "UPDATE quota_parts SET amount=amount-? WHERE project=? AND quota=? AND period=? AND holder=? AND amount>=?"
            db.execute(query, (unused, project, quota, period, holder, unused))

    def used(self, project: str, quota: QuotaName, period: int = 0) -> int:
        """Return how much of a quota its holders have taken."""
        query = "SELECT coalesce(sum(amount), 0) FROM quota_parts WHERE project=? AND quota=? AND period=? AND until>?"
        with self._reading() as db:
            return int(db.execute(query, (project, quota, period, time.time())).fetchone()[0])

    def measure(self, project: str) -> int | None:
        """Return how many bytes are stored for a project, or None if this must be measured in the project's own store."""
        return None

    def prune(self, before_period: int) -> None:
        """Remove the parts of daily quotas before the day `before_period`, and all parts that have expired."""
        with self._writing() as db:
            query = "DELETE FROM quota_parts WHERE (period>0 AND period<?) OR until<?"
            db.execute(query, (before_period, time.time()))


def _lock(db: StoreConnection, project: str) -> None:
    """Lock a project's row, so that only one transaction at a time takes a part of its quotas."""
    db.execute(f"SELECT name FROM projects WHERE name=? {FOR_UPDATE}", (project,)).fetchall()
