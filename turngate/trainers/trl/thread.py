"""An event loop in a thread of its own: TRL calls from plain threads, and everything of ours is asyncio."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from turngate.client.gateway import Unreachable

T = TypeVar("T")
_BACK_S = 40.0  # for a gateway that is being started again


class LoopThread:
    """Started by the first work that it is given. After `close` nothing of it is left, and it may be started again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        return self._loop is not None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What comes of it. Ctrl-C, while it is waited for, ends it."""
        future = self.spawn(work)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def spawn(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._started())

    def close(self) -> None:
        """Cancels what is left, and waits until it has cleaned up."""
        if self._loop is None or self._thread is None:
            return
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        asyncio.run_coroutine_threadsafe(_all_ended(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
            self._thread.start()
        return self._loop


async def patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """What a gateway answers, which may be about to be started again."""
    deadline = time.monotonic() + _BACK_S
    while True:
        try:
            return await ask()
        except Unreachable:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.5)


async def _all_ended() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
    await asyncio.get_running_loop().shutdown_default_executor()
