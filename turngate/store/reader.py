"""Run long reads of the store in a thread with its own connection, so that turns do not wait for them.

Reads run one at a time, because each may need a lot of memory and CPU time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from turngate.errors import StoreError
from turngate.store.store import Store

T = TypeVar("T")


class StoreReader:
    """A thread that runs long reads one at a time. Call `close` to end it."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, f"turngate-{name}")
        self._reading: Store | None = None
        self.closed = False

    async def run(self, work: Callable[[Store], T]) -> T:
        """Call `work(store)` in the thread, and return its result."""
        self._require_open()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run_in_thread, work)

    def close(self) -> None:
        self.closed = True
        self._thread.shutdown()
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    def _run_in_thread(self, work: Callable[[Store], T]) -> T:
        self._require_open()
        if self._reading is None:
            self._reading = self._store.open_reader()
        return work(self._reading)

    def _require_open(self) -> None:
        if self.closed:
            raise StoreError("cannot read the store: the gateway is stopping, or the project was deleted")
