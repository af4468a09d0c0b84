"""Write turns to the store, immediately or in batches, depending on the durability setting.

With `process` durability, a turn is written immediately in the calling task, because a commit without a sync is cheaper than switching to
a thread. Only a turn with side data is written in a thread, because its side data can be many megabytes. With `disk` durability, every
commit is synced. Turns that end at about the same time therefore share one transaction, which runs in a thread.
"""

from __future__ import annotations

import asyncio
import time

from turngate.errors import StoreError
from turngate.store.store import NewTurn, Store
from turngate.telemetry.metrics import Metrics
from turngate.trace.tree import RefusedCalls


class Journal:
    def __init__(self, store: Store, metrics: Metrics | None = None) -> None:
        self._store = store
        self._took = (metrics or Metrics()).commit
        self._waiting: list[tuple[NewTurn, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._failed = False

    async def commit(self, turn: NewTurn) -> None:
        """Write a turn, and return once it is durable. Raise `StoreError` if it cannot be written."""
        began = time.perf_counter()
        await self._write_durably(turn)
        self._took.observe(time.perf_counter() - began)

    async def _write_durably(self, turn: NewTurn) -> None:
        if self._store.durability == "process" and not turn.side:
            self._write([turn])
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, done))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_waiting())
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            # The write cannot be cancelled. Raise the cancellation once the turn is durable.
            await _wait_until_done(done)
            if (error := done.exception()) is not None:
                raise error from None
            raise

    def mark_undelivered(self, session: int, node: int) -> None:
        """Mark a stored turn as undelivered, because the agent did not receive the whole reply."""
        self._store.mark_undelivered(session, node)

    def add_refusal(
        self, session: int, name: str, status: int, message: str, request: bytes | None
    ) -> RefusedCalls | None:
        """Record a refused call durably (see `Refusals.add`)."""
        return self._store.refusals.add(session, name, status, message, request)

    def mark_repeated(self, session: int, name: str, request: bytes) -> RefusedCalls | None:
        """Record that refused calls were repeated successfully (see `Refusals.mark_repeated`)."""
        return self._store.refusals.mark_repeated(session, name, request)

    def note_stop(self, session: int, stop: str) -> None:
        self._store.note_stop(session, stop)

    def require_writable(self) -> None:
        """Raise `StoreError` if a turn could not be written and the store still cannot be written to."""
        if self._failed:
            self._store.probe()
            self._failed = False

    def _write(self, turns: list[NewTurn]) -> None:
        try:
            self._store.commit(turns)
        except StoreError:
            self._failed = True
            raise
        except Exception as error:
            # Whatever the error is, every waiting call must fail: a turn that cannot be written is not delivered.
            self._failed = True
            raise StoreError(
                f"cannot record the turn: internal error in Turngate ({type(error).__name__}: {error})"
            ) from error

    async def _write_waiting(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                await asyncio.to_thread(self._write, [turn for turn, _ in batch])
            except StoreError as error:
                for _, done in batch:
                    if not done.cancelled():
                        done.set_exception(error)
            else:
                for _, done in batch:
                    if not done.cancelled():
                        done.set_result(None)


async def _wait_until_done(future: asyncio.Future[None]) -> None:
    """Wait for the future, even if this task is cancelled in the meantime."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
