"""Load evicted traces in slices, so that other calls do not wait until a long trace is loaded.

    a call of an evicted session ─► slice ─► other calls ─► slice ─► … ─► the trace is in memory, and the call continues

Slices run on the event loop, one per iteration, even if many traces are loaded at the same time. In a thread, each row of the trace could
wait 5 ms for the interpreter lock while the loop is busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from turngate.errors import NotFound
from turngate.store.sqlite import SessionLoading, SessionRow, Store
from turngate.trace.session import Session

_SLICE_S = 0.002


class TraceLoader:
    """Loads the traces of evicted sessions. `on_load` is called with the estimated size of each loaded trace, in bytes."""

    def __init__(
        self, store: Store, *, slice_s: float = _SLICE_S, on_load: Callable[[int], None] = lambda size: None
    ) -> None:
        self._store = store
        self._slice_s = slice_s
        self._on_load = on_load
        self._tasks: dict[Session, asyncio.Task[None]] = {}
        self._slice_lock = asyncio.Lock()  # it is fair, so concurrent loads alternate

    async def load(self, session: Session) -> None:
        """Return when the trace is in memory, or when the session has ended. Calls that wait for the same trace share one load.

        Raise `StoreError` if the trace cannot be read. The next call tries again.
        """
        session.waiting_for_trace += 1  # otherwise, it might be evicted again before this call continues
        try:
            while session.is_evicted and session.status == "open":
                if session not in self._tasks:
                    self._start_load(session)
                await asyncio.shield(
                    self._tasks[session]
                )  # if this call is cancelled, other calls still need the trace
        finally:
            session.waiting_for_trace -= 1

    def _start_load(self, session: Session) -> None:
        task = self._tasks[session] = asyncio.create_task(self._load(session))
        task.add_done_callback(partial(self._forget, session))

    def _forget(self, session: Session, task: asyncio.Task[None]) -> None:
        del self._tasks[session]
        if not task.cancelled():
            task.exception()  # if all calls that waited were cancelled, asyncio would log the error as unhandled

    async def _load(self, session: Session) -> None:
        revision = session.revision
        loading = SessionLoading(self._find_row(session), self._store.refusals.find(session.key))
        is_complete = False
        while not is_complete:
            async with self._slice_lock:
                is_complete = self._store.continue_loading(loading, self._slice_s)
                await asyncio.sleep(0)
        if session.status != "open" or not session.is_evicted or session.revision != revision:
            return  # the session has ended, was loaded elsewhere, or has changed, in which case `load` starts again
        self._find_row(session)  # without a transaction around the slices, a deleted session might be loaded in part
        session.restore(loading.session.trace)
        self._on_load(session.trace.estimate_bytes())

    def _find_row(self, session: Session) -> SessionRow:
        row = self._store.find_key(session.key)  # not by id, which may belong to a different session by now
        if row is None:
            raise NotFound("this session was deleted")
        return row
