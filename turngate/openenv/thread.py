"""The service, on an event loop of its own in a thread of its own. The environment's server asks it from its loop; OpenEnv may also ask
from threads.

So nothing that a rollout does can hold up the server, and nothing that the server's sessions do, cancelled or gone, ends a rollout.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from turngate.errors import Stopping
from turngate.service.rollouts import Rollouts

T = TypeVar("T")


class ServiceThread:
    """`start` and `stop` block, and may be called twice. `ask` is for coroutines on any other loop."""

    def __init__(self, make: Callable[[], Rollouts]) -> None:
        self._make = make
        self._taking_turns = threading.Lock()
        self._thread: threading.Thread | None = None
        self._up: tuple[asyncio.AbstractEventLoop, asyncio.Event, Rollouts] | None = None

    def start(self) -> None:
        """Returns when the service is up; raises what kept it from that."""
        with self._taking_turns:
            if self._thread is None:
                ready: Future[None] = Future()
                self._thread = threading.Thread(target=self._run, args=(ready,), name="turngate-service", daemon=True)
                self._thread.start()
                try:
                    ready.result()
                except BaseException:
                    self._thread = None
                    raise

    def stop(self) -> None:
        """Returns when whatever ran is aborted, and its sandboxes are gone."""
        with self._taking_turns:
            thread, up = self._thread, self._up
            if thread is not None and up is not None:
                loop, over, _ = up
                loop.call_soon_threadsafe(over.set)
                thread.join()
                self._thread = None

    async def ask(self, call: Callable[[Rollouts], Coroutine[Any, Any, T]]) -> T:
        """What the service answers. Whoever is cancelled here only stops waiting, as far as the service is concerned."""
        if self._up is None:
            raise Stopping("the environment's service is not up; repeat this call when it is")
        loop, _, rollouts = self._up
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(rollouts), loop))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Stopping("the environment's service was stopped before it could answer") from None

    def _run(self, ready: Future[None]) -> None:
        try:
            asyncio.run(self._serve(ready))
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    async def _serve(self, ready: Future[None]) -> None:
        async with self._make() as rollouts:
            over = asyncio.Event()
            self._up = asyncio.get_running_loop(), over, rollouts
            ready.set_result(None)
            try:
                await over.wait()
            finally:
                self._up = None
