"""Remove old sessions from the shared store. Only one process at a time can do so.

A cell may ship a removed session again, for example after a late event. The ids of removed sessions are stored, so that such a shipment is
ignored.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from turngate.errors import Conflict
from turngate.store.connection import StoreConnection
from turngate.store.retention import Retention
from turngate.store.shared.cells import NOW

REMOVED_TABLES = """
CREATE TABLE IF NOT EXISTS removed_sessions (
    id TEXT NOT NULL,
    secret BLOB NOT NULL,         -- SHA-256; tells a removed session from a later one with the same id
    removed REAL NOT NULL,
    PRIMARY KEY (id, secret)
);
"""
FIND_REMOVED = "SELECT id, secret FROM removed_sessions WHERE id=ANY(?)"
_CLAIM = "pruning"  # name of the setting that holds the id of the pruning process and the end of its claim
_CLAIM_S = 60.0
_RENEW_S = 10.0


class SharedRetention(Retention):
    _holder = ""
    _renewed = -_RENEW_S

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Prevent other processes from removing old sessions at the same time. Raise `Conflict` if another process is doing so."""
        self._holder, self._renewed = secrets.token_hex(8), -_RENEW_S
        self.renew_claim()
        try:
            yield
        finally:
            with self._writing() as db:
                db.execute("DELETE FROM settings WHERE name=? AND value LIKE ?", (_CLAIM, f"{self._holder} %"))

    def renew_claim(self) -> None:
        if time.monotonic() - self._renewed < _RENEW_S:
            return
        with self._writing() as db:
            taken = db.execute(
                f"INSERT INTO settings SELECT ?, ?::text || ({NOW}+?)::text ON CONFLICT (name) DO UPDATE SET value=excluded.value"
                f" WHERE settings.value LIKE ? OR split_part(settings.value, ' ', 2)::float8<{NOW}",
                (_CLAIM, f"{self._holder} ", _CLAIM_S, f"{self._holder} %"),
            ).rowcount
        if not taken:
            raise Conflict(
                f"another process is pruning this store; try again later, or after {_CLAIM_S:.0f} s if that process died"
            )
        self._renewed = time.monotonic()

    def delete_rows(self, db: StoreConnection, keys: Sequence[int]) -> None:
        marks = ",".join("?" * len(keys))
        db.execute(
            f"INSERT INTO removed_sessions SELECT id, secret, ? FROM sessions WHERE key IN ({marks}) ON CONFLICT DO NOTHING",
            (time.time(), *keys),
        )
        db.execute(f"DELETE FROM shipments WHERE session IN ({marks})", keys)
        super().delete_rows(db, keys)
