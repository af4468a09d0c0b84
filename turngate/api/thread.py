"""An event loop in a thread of its own, for those who have none, or whose own is busy running a notebook. `blocking.py` waits on it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from turngate.api.progress import OFTEN_S
from turngate.errors import BadRequest

T = TypeVar("T")
_STILL = "turngate: still cleaning up; interrupt once more to give up, and leave what is left to the next run"


class LoopThread:
    """Runs coroutines for a thread that waits. Ctrl-C, or a kernel's interrupt, cancels what is waited for, and waits for its end."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="turngate", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Nothing can be run in it: it was closed, or this is a process that was forked, and the thread is its parent's."""
        return self._loop.is_closed() or self._is_elsewhere

    @property
    def _is_elsewhere(self) -> bool:
        return os.getpid() != self._process

    def run(self, work: Coroutine[Any, Any, T], tick: Callable[[], None] = lambda: None) -> T:
        """Its result. `tick` is called every now and then in the thread that waits."""
        if self.closed or threading.current_thread() is self._thread:
            work.close()
            raise BadRequest(f"client: {self._why_not()}", param="client")
        running = _Running(work)
        self._loop.call_soon_threadsafe(running.begin, self._loop)
        interrupts = 0
        while True:
            try:
                while not running.wait(OFTEN_S):
                    tick()
                break
            except KeyboardInterrupt:
                interrupts += 1
                if interrupts == 1:
                    self._loop.call_soon_threadsafe(running.cancel)
                elif interrupts == 2:
                    print(_STILL, file=sys.stderr)
                else:
                    raise
        if interrupts:
            raise KeyboardInterrupt
        return running.result()

    def _why_not(self) -> str:
        if self._is_elsewhere:
            return f"was opened by process {self._process}, and works there only; open another one in this process"
        why = "it is closed" if self.closed else "it cannot be called from within itself"
        return f"{why}; open another one"

    def close(self) -> None:
        """Whatever still runs in it is cancelled. As often as one likes; in a process that was forked nothing happens."""
        if self._is_elsewhere:
            self._leave_alone()
        if self.closed:
            return
        self.run(_cancelled())
        self.run(self._loop.shutdown_asyncgens())
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _leave_alone(self) -> None:
        """For good: were the parent's tasks destroyed here when Python ends, they would clean up, and with them what the parent still
        uses. A forked process has the same sockets, and the same list of those that are waited for."""
        for kept in (self._loop, *asyncio.all_tasks(self._loop)):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


async def _cancelled() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


class _Running(Generic[T]):
    """A task of the loop, and somebody in another thread who waits for it.

    Waiting takes a bare lock that the loop gives up at the end: a signal that breaks in anywhere leaves nothing locked that the loop
    would need, as it could with a condition or a future."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._task: asyncio.Task[T] | None = None
        self._ended = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._task = loop.create_task(self._work)
        self._task.add_done_callback(self._over)

    def cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()

    def _over(self, task: asyncio.Task[T]) -> None:
        self._ended = True
        self._gate.release()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended. Asked twice: whoever is interrupted may have had the lock already."""
        return self._ended or self._gate.acquire(timeout=seconds)

    def result(self) -> T:
        assert self._task is not None
        return self._task.result()
