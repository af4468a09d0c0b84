"""An event loop in a thread of its own, for those who have none, or whose own is busy running a notebook. `blocking.py` waits on it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from turngate.api.watching import OFTEN_S
from turngate.errors import BadRequest

T = TypeVar("T")
_STILL = "turngate: still cleaning up; interrupt once more to give up, and leave what is left to the next run"


class LoopThread:
    """Runs coroutines for a thread that waits. Ctrl-C, or a kernel's interrupt, cancels what is waited for, and waits for its end."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="turngate", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def run(self, work: Coroutine[Any, Any, T], tick: Callable[[], None] = lambda: None) -> T:
        """Its result. `tick` is called every now and then in the thread that waits."""
        if self.closed or threading.current_thread() is self._thread:
            work.close()
            why = "it is closed" if self.closed else "it cannot be called from within itself"
            raise BadRequest(f"client: {why}; open another one", param="client")
        ended: concurrent.futures.Future[T] = concurrent.futures.Future()
        begun: list[asyncio.Task[T]] = []
        self._loop.call_soon_threadsafe(_begin, self._loop, work, begun, ended)
        interrupts = 0
        while True:
            try:
                while not concurrent.futures.wait([ended], timeout=OFTEN_S).done:
                    tick()
                break
            except KeyboardInterrupt:
                interrupts += 1
                if interrupts == 1:
                    self._loop.call_soon_threadsafe(lambda: begun[0].cancel())
                elif interrupts == 2:
                    print(_STILL, file=sys.stderr)
                else:
                    raise
        if interrupts:
            raise KeyboardInterrupt
        return ended.result()

    def close(self) -> None:
        """Whatever still runs in it is cancelled. As often as one likes."""
        if self.closed:
            return
        self.run(_cancelled())
        self.run(self._loop.shutdown_asyncgens())
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancelled() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


def _begin(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[Any, Any, T],
    begun: list[asyncio.Task[T]],
    ended: concurrent.futures.Future[T],
) -> None:
    task = loop.create_task(work)
    begun.append(task)
    task.add_done_callback(lambda done: _told(done, ended))


def _told(done: asyncio.Task[T], ended: concurrent.futures.Future[T]) -> None:
    if done.cancelled():
        ended.set_exception(concurrent.futures.CancelledError())
    elif (error := done.exception()) is not None:
        ended.set_exception(error)
    else:
        ended.set_result(done.result())
