"""Load traces in slices, so that other calls do not wait until a long trace is loaded.

    a call to an evicted session ─► slice ─► other calls ─► slice ─► … ─► the trace is in memory, and the call continues

The first request for a session after a restart loads it in the same way. So does a request that ends an evicted session, because the reply
describes the session.

Slices run on the event loop. The slices of all projects share about 2 ms of CPU time, however many traces are being loaded, and then give
way to everything else that is ready. They do not run in a thread, because a thread might have to wait for the interpreter lock at each row
of a trace while the loop is busy.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Generic, TypeVar

from turngate.common.aio import give_way
from turngate.errors import NotFound
from turngate.store.store import SessionLoading, SessionRow, Store
from turngate.trace.session import Session

_SLICE_S = 0.002
Job = Callable[[float], bool]
_WaitingJob = tuple[Job, "asyncio.Future[None]"]
K = TypeVar("K")
T = TypeVar("T")


class TimeSlicer:
    """Runs jobs in slices. The slices of all jobs share about `slice_s` seconds of CPU time, then give way to other work.

    A turn needs many iterations of the event loop. If slices gave way for only one iteration, the turn would wait for slices in each of its
    iterations. Jobs of `run`, which turns may wait for, alternate with jobs of `call`, however many jobs of `call` there are.
    """

    def __init__(self, slice_s: float = _SLICE_S) -> None:
        self._slice_s = slice_s
        self._jobs: deque[_WaitingJob] = deque()
        self._calls: deque[_WaitingJob] = deque()
        self._worker: asyncio.Task[None] | None = None

    def run(self, job: Job) -> asyncio.Future[None]:
        """Run a job: a function that is called with a number of seconds, works for about that long, and returns whether the job is done.

        The returned future completes when the job is done, and raises the job's error if it fails. Cancelling the future drops the job.
        """
        return self._add(self._jobs, job)

    async def call(self, work: Callable[[], T]) -> T:
        """Call a function that takes about as long as a slice, or less, and return its result."""
        results: list[T] = []

        def job(seconds: float) -> bool:
            results.append(work())
            return True

        await self._add(self._calls, job)
        return results[0]

    def _add(self, queue: deque[_WaitingJob], job: Job) -> asyncio.Future[None]:
        end = asyncio.get_running_loop().create_future()
        queue.append((job, end))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._run_slices())
        return end

    async def _run_slices(self) -> None:
        queue, other = self._jobs, self._calls
        while queue or other:
            began = time.thread_time()
            used_s = 0.0
            while (queue or other) and used_s <= self._slice_s:
                _run_slice(queue or other, self._slice_s - used_s)
                queue, other = other, queue
                used_s = time.thread_time() - began
            await give_way(used_s)


def _run_slice(queue: deque[_WaitingJob], seconds: float) -> None:
    job, end = queue.popleft()
    if end.done():  # cancelled
        return
    try:
        if job(seconds):
            end.set_result(None)
        else:
            queue.append((job, end))  # shorter jobs need not wait for this one
    except Exception as error:  # whatever it is, the code that waits for the job must not wait forever
        end.set_exception(error)
    finally:
        del job, end  # an error refers to this function's variables through its traceback


class SlicedReader:
    """Reads sessions from a store in slices."""

    def __init__(self, store: Store, slicer: TimeSlicer) -> None:
        self._store = store
        self._slicer = slicer

    async def read(self, row: SessionRow) -> Session:
        """Read a session with its whole trace. Raise `StoreError` if the trace cannot be read.

        The slices are separate transactions. The session may be deleted between them, so callers must check afterwards
        with `find_row` that it still exists.
        """
        loading = SessionLoading(row, self._store.refusals.find(row.key))
        await self._slicer.run(partial(self._store.continue_loading, loading))
        return loading.session

    def find_row(self, key: int) -> SessionRow:
        """Return the row of a session. Raise `NotFound` if the session was deleted."""
        row = self._store.find_key(key)  # not by id, which may belong to a different session by now
        if row is None:
            raise NotFound("this session was deleted")
        return row


class SharedLoads(Generic[K, T]):
    """Loads in progress, by key. Requests for the same key share one load, which continues even if the requests are cancelled."""

    def __init__(self) -> None:
        self._tasks: dict[K, asyncio.Task[T]] = {}

    async def join(self, key: K, load: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Wait for the load with this key, and return its result. If no such load is in progress, start one."""
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._run(key, load))
            self._tasks[key].add_done_callback(_mark_retrieved)
        return await asyncio.shield(self._tasks[key])

    def __contains__(self, key: K) -> bool:
        return key in self._tasks

    async def _run(self, key: K, load: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return await load()
        finally:
            del self._tasks[key]  # nothing may wait for a load that has ended


def _mark_retrieved(task: asyncio.Task[Any]) -> None:
    """Mark the error of a load as handled. Otherwise, asyncio would log it if all requests that waited for the load were cancelled."""
    if not task.cancelled():
        task.exception()


class TraceLoader:
    """Loads the traces of evicted sessions. `on_load` is called with the estimated size of each loaded trace, in bytes."""

    def __init__(self, store: Store, slicer: TimeSlicer, *, on_load: Callable[[int], None] = lambda size: None) -> None:
        self._reader = SlicedReader(store, slicer)
        self._on_load = on_load
        self._loads: SharedLoads[Session, None] = SharedLoads()

    async def load(self, session: Session, *, even_if_ended: bool = False) -> None:
        """Load the trace of an evicted session, unless the session has ended. Calls that wait for the same trace share one load.

        With `even_if_ended`, also load the trace of a session that has ended. Raise `NotFound` if the session was deleted, and
        `StoreError` if the trace cannot be read; the next call tries again.
        """
        session.waiting_for_trace += 1  # otherwise, it might be evicted again before this call continues
        try:
            while session.is_evicted and (even_if_ended or session.status == "open"):
                await self._loads.join(session, partial(self._load, session))
        finally:
            session.waiting_for_trace -= 1

    async def _load(self, session: Session) -> None:
        revision, status = session.revision, session.status
        loaded = await self._reader.read(self._reader.find_row(session.key))
        # Drop the trace if the session has ended meanwhile or was loaded elsewhere. If it has changed, `load` starts again.
        if session.status == status and session.is_evicted and session.revision == revision:
            self._reader.find_row(session.key)
            session.restore(loaded.trace)
            self._on_load(session.trace.estimate_bytes())
