"""An asyncio event loop in its own thread, for synchronous callers and for code whose own loop must not block."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from turngate.errors import BadRequest

T = TypeVar("T")
_TICK_S = 0.2
_STILL_CLEANING_UP = (
    "turngate: still cleaning up; interrupt again to stop waiting (the next run will finish the cleanup)"
)


class LoopThread:
    """Runs coroutines for other threads, between `start` and `stop`.

    Ctrl-C or a notebook interrupt cancels the coroutine that the interrupted thread is waiting for in `run`. `run` then waits for the
    coroutine to clean up, unless the thread is interrupted twice more. A forked child process cannot use its parent's loop: there, `run`
    and `spawn` raise `BadRequest`, and `stop` does nothing.

    `name` is the thread's name. `param` is the noun for the loop's owner in error messages, such as "client".
    """

    def __init__(self, name: str, param: str = "thread") -> None:
        self._name = name
        self._param = param
        self._process = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether coroutines can be run: False before `start`, after `stop`, and in a forked child process that has not called `start`."""
        return self._loop is not None and not self._is_forked

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    def start(self) -> None:
        """Start the thread unless it is already running. It can be restarted after `stop`."""
        if self.is_running:
            return
        self._keep_parent_loop()
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], tick: Callable[[], None] = lambda: None) -> T:
        """Run a coroutine in the loop and return its result. The calling thread waits, and calls `tick` several times a second.

        Raise `BadRequest` if the loop is not running in this process, or if it runs in the calling thread.
        """
        loop = self._loop_for(work)
        running = _RunningTask(work)
        loop.call_soon_threadsafe(running.start, loop)
        interrupts = 0
        while True:
            try:
                while not running.wait(_TICK_S):
                    tick()
                break
            except KeyboardInterrupt:
                interrupts += 1
                if interrupts == 1:
                    loop.call_soon_threadsafe(running.cancel)
                elif interrupts == 2:
                    print(_STILL_CLEANING_UP, file=sys.stderr)
                else:
                    raise
        if interrupts:
            raise KeyboardInterrupt
        return running.result()

    def spawn(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine without waiting for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop_for(work))

    def stop(self) -> None:
        """Cancel all tasks, wait for them to clean up, and end the thread. Calling `stop` again has no effect."""
        if self._is_forked:
            self._keep_parent_loop()
            return
        if self._loop is None or self._thread is None:
            return
        self.run(_cancel_all())
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def _loop_for(self, work: Coroutine[Any, Any, Any]) -> asyncio.AbstractEventLoop:
        if self._loop is not None and not self._is_forked and threading.current_thread() is not self._thread:
            return self._loop
        work.close()
        if self._is_forked:
            why = f"was opened by process {self._process} and works only there; open a new one in this process"
        elif self._loop is None:
            why = "is closed; open a new one"
        else:
            why = f"cannot be called from its own event loop; open a new {self._param}"
        raise BadRequest(f"the {self._param} {why}", param=self._param)

    def _keep_parent_loop(self) -> None:
        """Keep the parent's loop and tasks alive forever in a forked child.

        Destroying a task would run its cleanup, on sockets that the child shares with the parent.
        """
        if self._is_forked and self._loop is not None:
            for inherited in (self._loop, *asyncio.all_tasks(self._loop)):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))
            self._loop = self._thread = None


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()


class _RunningTask(Generic[T]):
    """A task that runs in the loop while another thread waits for it.

    The waiting thread blocks on a plain lock, which the loop releases when the task ends. With a condition or a future, a signal could
    interrupt the waiting thread while it holds an internal lock that the loop needs.
    """

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._task: asyncio.Task[T] | None = None
        self._ended = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._task = loop.create_task(self._work)
        self._task.add_done_callback(self._on_done)

    def cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()

    def _on_done(self, task: asyncio.Task[T]) -> None:
        self._ended = True
        self._gate.release()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`, and return whether the task has ended.

        `_ended` is checked too, because an earlier call may have been interrupted right after it acquired the lock.
        """
        return self._ended or self._gate.acquire(timeout=seconds)

    def result(self) -> T:
        assert self._task is not None
        return self._task.result()
