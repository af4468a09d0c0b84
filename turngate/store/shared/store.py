"""The store that many machines share: a `Store` that uses PostgreSQL instead of SQLite."""

from __future__ import annotations

from turngate.common.database_url import DatabaseUrl
from turngate.errors import ConfigError, StoreError
from turngate.store.shared.cells import CellTable, LeasedAttempts
from turngate.store.shared.database import SharedDatabase
from turngate.store.shared.engines import EngineTable
from turngate.store.shared.fence import FenceTable
from turngate.store.shared.projects import SharedProjects
from turngate.store.shared.queries import SharedQueries
from turngate.store.shared.quotas import SharedQuotas
from turngate.store.shared.retention import SharedRetention
from turngate.store.shared.rollout_pages import RolloutPages
from turngate.store.store import Store

_READER_PATIENCE = 6  # a reader blocks only its own thread, so it may wait this many times as long as the event loop


class SharedStore(Store):
    """A store in PostgreSQL. Processes on several machines can read and write it at the same time."""

    database: SharedDatabase

    def __init__(self, url: DatabaseUrl, *, read_only: bool = False, answer_s: float | None = None) -> None:
        self.url = url
        self._answer_s = answer_s
        self._use(SharedDatabase(url, read_only=read_only, answer_s=answer_s))

    def open_reader(self) -> SharedStore:
        return self.open_again(read_only=True)

    def open_again(self, *, read_only: bool = False) -> SharedStore:
        """Open the same store with new connections. Interrupting this store also interrupts the new one.

        If this store limits answer times, a new read-only store does too, with a longer limit. A new writable store has no limit.
        """
        limit_s = self._answer_s * _READER_PATIENCE if read_only and self._answer_s is not None else None
        try:
            store = SharedStore(self.url, read_only=read_only, answer_s=limit_s)
        except ConfigError as error:  # the settings are those of this store, so the database is the cause
            raise StoreError(f"cannot open the shared store again: {error.message.removeprefix('data: ')}") from error
        self.database.others.add(store.database)
        return store

    def _add_tables(self, version: int) -> None:
        super()._add_tables(version)
        self.queries = SharedQueries(self._reading)
        self.attempts = LeasedAttempts(self._writing, self._reading)
        self.cells = CellTable(self._writing, self._reading)
        self.fence = FenceTable(self._writing, self._reading)
        self.engines = EngineTable(self._writing, self._reading)
        self.projects = SharedProjects(self._writing, self._reading)
        self.quotas = SharedQuotas(self._writing, self._reading)
        self.retention = SharedRetention(self._writing, self._reading)
        self.rollout_pages = RolloutPages(self._reading)
