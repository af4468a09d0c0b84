"""The API keys of a cell, which are read from the shared store every few seconds and checked in memory.

If the cell cannot reach the shared store, it uses the keys that it read last. When its lease has lapsed, it accepts no keys.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from math import inf

from turngate.errors import LeaseLapsed, TurngateError
from turngate.gateway.api_keys import KeyRing, KnownProjects, read_projects
from turngate.gateway.cell.serving import ServingPermit
from turngate.store.projects import ApiKey, ProjectTable

log = logging.getLogger("turngate")
FOLLOW_S = 2.0  # between reads of the keys


class CellKeyRing(KeyRing):
    """A cell's copy of the projects and keys. While the lease is not held, looking up a key raises `LeaseLapsed`."""

    def __init__(self, permit: ServingPermit) -> None:
        super().__init__(lambda: KnownProjects({}, {}), refresh_s=inf)
        self._permit = permit
        self._read_at = 0.0  # only `update` changes the keys

    def find_prefix(self, prefix: str) -> ApiKey | None:
        if not self._permit.is_held:
            raise LeaseLapsed(
                "this cell cannot check keys, because it holds no lease from the shared store or is still switching to a new one; "
                "retry in a moment"
            )
        return super().find_prefix(prefix)


class KeyFollower:
    """A thread that keeps `ring` up to date. `connect` opens the shared store's table of projects and keys."""

    def __init__(self, ring: KeyRing, connect: Callable[[], ProjectTable]) -> None:
        self._ring = ring
        self._connect = connect
        self._table: ProjectTable | None = None
        self._is_away = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="turngate-keys", daemon=True)

    def start(self) -> None:
        self._read()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(FOLLOW_S):
            self._read()

    def _read(self) -> None:
        try:
            if self._table is None:
                self._table = self._connect()
            self._ring.update(read_projects(self._table))
            self._is_away = False
        except Exception as error:
            if not self._is_away:
                log.warning(
                    "cannot read the API keys: %s; the cell keeps retrying and, in the meantime, uses the keys that it read last, if any",
                    error.message if isinstance(error, TurngateError) else repr(error),
                    exc_info=not isinstance(error, TurngateError),
                )
            self._is_away = True
