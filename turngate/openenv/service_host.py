"""Run the rollout service on its own event loop, in a separate thread.

This way, a rollout never blocks the OpenEnv server, and cancelling or disconnecting a session never ends a rollout.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from turngate.common.loop_thread import LoopThread
from turngate.errors import Stopping
from turngate.service.rollouts import Rollouts

T = TypeVar("T")


class ServiceHost:
    """The rollout service, on an event loop in a separate thread.

    `start` and `stop` block the calling thread, and may be called more than once. `call` can be awaited on any event loop except that of
    the service.
    """

    def __init__(self, make: Callable[[], Rollouts]) -> None:
        self._make = make
        self._starting = threading.Lock()
        self._thread = LoopThread("turngate-service")
        self._rollouts: Rollouts | None = None

    def start(self) -> None:
        """Start the service, and return once it accepts calls."""
        with self._starting:
            if self._rollouts is not None:
                return
            self._thread.start()
            try:
                self._thread.run(self._open())
            except BaseException:
                self._close()  # an interrupt may arrive after the service has opened
                raise

    def stop(self) -> None:
        """Abort all running and queued rollouts, remove their sandboxes, and stop the service."""
        with self._starting:
            self._close()

    def _close(self) -> None:
        rollouts, self._rollouts = self._rollouts, None
        try:
            if rollouts is not None and self._thread.is_running:
                self._thread.run(rollouts.__aexit__(None, None, None))
        finally:
            self._thread.stop()

    async def call(self, verb: Callable[[Rollouts], Coroutine[Any, Any, T]]) -> T:
        """Call the service and return the result. Cancelling the caller also cancels the call, but never a rollout."""
        rollouts = self._rollouts
        if rollouts is None:
            raise Stopping("the environment's service is not running; retry later")
        try:
            return await asyncio.wrap_future(self._thread.spawn(verb(rollouts)))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Stopping("the environment's service stopped before it could answer; retry later") from None

    async def _open(self) -> None:
        self._rollouts = await self._make().__aenter__()
