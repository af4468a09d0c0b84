"""Load evicted traces in slices, so that other calls do not wait until a long trace is loaded.

    a call of an evicted session ─► slice ─► other calls ─► slice ─► … ─► the trace is in memory, and the call continues

Slices run on the event loop. In each of its iterations, they take about 5 ms of CPU time together, however many traces are being loaded.
In a thread, each row of a trace could wait 5 ms for the interpreter lock while the loop is busy.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from turngate.errors import NotFound
from turngate.store.sqlite import SessionLoading, SessionRow, Store
from turngate.trace.session import Session

_SLICE_S = 0.005


class _Load:
    """The load of one trace. It does not refer to its result: an error would then refer to itself through its traceback."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.revision = session.revision
        self.loading: SessionLoading | None = None


class TraceLoader:
    """Loads the traces of evicted sessions. `on_load` is called with the estimated size of each loaded trace, in bytes."""

    def __init__(
        self, store: Store, *, slice_s: float = _SLICE_S, on_load: Callable[[int], None] = lambda size: None
    ) -> None:
        self._store = store
        self._slice_s = slice_s
        self._on_load = on_load
        self._queue: deque[_Load] = deque()
        self._results: dict[Session, asyncio.Future[None]] = {}  # of the loads in the queue
        self._worker: asyncio.Task[None] | None = None

    async def load(self, session: Session) -> None:
        """Return when the trace is in memory, or when the session has ended. Calls that wait for the same trace share one load.

        Raise `StoreError` if the trace cannot be read. The next call tries again.
        """
        session.waiting_for_trace += 1  # otherwise, it might be evicted again before this call continues
        try:
            while session.is_evicted and session.status == "open":
                if session not in self._results:
                    self._start(session)
                # Other calls need the result even if this one is cancelled.
                await asyncio.shield(self._results[session])
        finally:
            session.waiting_for_trace -= 1

    def _start(self, session: Session) -> None:
        self._queue.append(_Load(session))
        self._results[session] = asyncio.get_running_loop().create_future()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._run_slices())

    async def _run_slices(self) -> None:
        while self._queue:
            end = time.thread_time() + self._slice_s
            left_s = self._slice_s
            while self._queue and left_s >= 0:
                load = self._queue.popleft()
                if not self._continue(load, left_s):
                    self._queue.append(load)  # shorter traces need not wait for this one
                left_s = end - time.thread_time()
            await asyncio.sleep(0)

    def _continue(self, load: _Load, seconds: float) -> bool:
        """Continue a load for about this much CPU time. Return whether it has ended."""
        try:
            if not self._read_nodes(load, seconds):
                return False
        except Exception as error:  # whatever it is, the calls that wait for the trace must not wait forever
            self._results[load.session].set_exception(error)
            self._results[
                load.session
            ].exception()  # if these calls were cancelled, asyncio would log the error as unhandled
        else:
            self._results[load.session].set_result(None)
        del self._results[load.session]
        return True

    def _read_nodes(self, load: _Load, seconds: float) -> bool:
        """Read more nodes of a trace. If it is complete, pass it to the session and return True."""
        session = load.session
        if load.loading is None:
            load.loading = SessionLoading(self._find_row(session), self._store.refusals.find(session.key))
        if not self._store.continue_loading(load.loading, seconds):
            return False
        # Drop the trace if the session has ended or was loaded elsewhere. If it has changed, `load` starts again.
        if session.status == "open" and session.is_evicted and session.revision == load.revision:
            self._find_row(
                session
            )  # without a transaction around the slices, a deleted session might be loaded in part
            session.restore(load.loading.session.trace)
            self._on_load(session.trace.estimate_bytes())
        return True

    def _find_row(self, session: Session) -> SessionRow:
        row = self._store.find_key(session.key)  # not by id, which may belong to a different session by now
        if row is None:
            raise NotFound("this session was deleted")
        return row
