"""Long looks into the store, apart from the turns: one thread with a reading connection of its own. Called by `feed.py` and `shown.py`.

One look at a time: they need memory, and all else needs the processor too. Not in the threads that turns use, which would wait behind
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from turngate.errors import StoreError
from turngate.store.sqlite import Store

T = TypeVar("T")


class StoreReader:
    """`close` when the gateway stops."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, f"turngate-{name}")
        self._reading: Store | None = None
        self._closed = False

    async def run(self, work: Callable[[Store], T]) -> T:
        """What is made of what the store has, in the thread."""
        self._require_open()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._begun, work)

    def close(self) -> None:
        self._closed = True
        self._thread.shutdown()
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    def _begun(self, work: Callable[[Store], T]) -> T:
        self._require_open()
        if self._reading is None:
            self._reading = Store.reading(self._store.path.parent)
        return work(self._reading)

    def _require_open(self) -> None:
        if self._closed:
            raise StoreError("the gateway is being stopped")
