"""Load evicted traces in slices, so that other calls do not wait until a long trace is loaded.

    a call of an evicted session ─► slice ─► other calls ─► slice ─► … ─► the trace is in memory, and the call continues

Requests that end an evicted session load its trace in the same way, because they reply with a description of it.

Slices run on the event loop. In each of its iterations, the slices of all projects take about 5 ms of CPU time together, however many
traces are being loaded. In a thread, each row of a trace could wait 5 ms for the interpreter lock while the loop is busy.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from turngate.errors import NotFound
from turngate.store.sqlite import SessionLoading, SessionRow, Store
from turngate.trace.session import Session

_SLICE_S = 0.005


class TimeSlicer:
    """Runs jobs in slices. Per iteration of the event loop, the slices of all jobs take about `slice_s` seconds of CPU time together."""

    def __init__(self, slice_s: float = _SLICE_S) -> None:
        self._slice_s = slice_s
        self._jobs: deque[Callable[[float], bool]] = deque()
        self._worker: asyncio.Task[None] | None = None

    def add(self, job: Callable[[float], bool]) -> None:
        """Add a job: a function that works for about the given number of seconds and returns whether the job is done. It must not raise."""
        self._jobs.append(job)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._run_slices())

    async def _run_slices(self) -> None:
        while self._jobs:
            end = time.thread_time() + self._slice_s
            left_s = self._slice_s
            while self._jobs and left_s >= 0:
                job = self._jobs.popleft()
                if not job(left_s):
                    self._jobs.append(job)  # shorter jobs need not wait for this one
                left_s = end - time.thread_time()
            await asyncio.sleep(0)


class _Load:
    """The load of one trace. It holds no reference to its result: an error in the result would refer to itself through its traceback."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.revision = session.revision
        self.status = session.status
        self.loading: SessionLoading | None = None


class TraceLoader:
    """Loads the traces of evicted sessions. `on_load` is called with the estimated size of each loaded trace, in bytes."""

    def __init__(self, store: Store, slicer: TimeSlicer, *, on_load: Callable[[int], None] = lambda size: None) -> None:
        self._store = store
        self._slicer = slicer
        self._on_load = on_load
        self._results: dict[Session, asyncio.Future[None]] = {}  # of the loads in progress

    async def load(self, session: Session, *, even_if_ended: bool = False) -> None:
        """Return when the trace is in memory, or when the session has ended. Calls that wait for the same trace share one load.

        With `even_if_ended`, also load the trace of a session that has ended. Raise `StoreError` if the trace cannot be read. The next call
        tries again.
        """
        session.waiting_for_trace += 1  # otherwise, it might be evicted again before this call continues
        try:
            while session.is_evicted and (even_if_ended or session.status == "open"):
                if session not in self._results:
                    self._results[session] = asyncio.get_running_loop().create_future()
                    self._slicer.add(partial(self._continue, _Load(session)))
                # Other calls need the result even if this one is cancelled.
                await asyncio.shield(self._results[session])
        finally:
            session.waiting_for_trace -= 1

    def _continue(self, load: _Load, seconds: float) -> bool:
        """Continue a load for about this much CPU time. Return whether it has ended."""
        try:
            if not self._read_nodes(load, seconds):
                return False
        except Exception as error:  # whatever it is, the calls that wait for the trace must not wait forever
            result = self._results.pop(load.session)
            result.set_exception(error)
            result.exception()  # if these calls were cancelled, asyncio would log the error as unhandled
            del result  # the error refers to this function's variables through its traceback
        else:
            self._results.pop(load.session).set_result(None)
        return True

    def _read_nodes(self, load: _Load, seconds: float) -> bool:
        """Read more nodes of a trace. If it is complete, pass it to the session and return True."""
        session = load.session
        if load.loading is None:
            load.loading = SessionLoading(self._find_row(session), self._store.refusals.find(session.key))
        if not self._store.continue_loading(load.loading, seconds):
            return False
        # Drop the trace if the session has ended meanwhile or was loaded elsewhere. If it has changed, `load` starts again.
        if session.status == load.status and session.is_evicted and session.revision == load.revision:
            # The slices are separate transactions. If the session was deleted between them, only a part was read.
            self._find_row(session)
            session.restore(load.loading.session.trace)
            self._on_load(session.trace.estimate_bytes())
        return True

    def _find_row(self, session: Session) -> SessionRow:
        row = self._store.find_key(session.key)  # not by id, which may belong to a different session by now
        if row is None:
            raise NotFound("this session was deleted")
        return row
