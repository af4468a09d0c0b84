"""The policy version, and the fence at which calls wait during an update: pause → load weights → resume at version n.

Every turn passes the fence before it generates, and reads the version again with each chunk that it receives. A new version arrives in one
of two ways. If the weights of the engine's own model are *replaced*, its calls in flight continue with the new weights. If the engine
serves the new weights under a new *model name* (an adapter), calls in flight stay with the model they began with.
"""

from __future__ import annotations

import asyncio
import math
import time

from turngate.client.protocol import FenceView, PauseMode
from turngate.errors import Conflict


def fence_clock() -> float:
    """Return the time in seconds on a clock that never jumps and keeps running while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Fence:
    def __init__(self, version: int = 0, model: str = "") -> None:
        self.version = version
        self.model = model  # the name under which the engine serves this version; empty: its own model
        self.valid_until = math.inf  # on `fence_clock`; after this, the fence admits no calls (`shared_fence.py`)
        self._own_version = 0 if model else version  # the newest version of the engine's own model
        self._adapters = {version} if model else set[int]()  # the versions that were served under a model name
        self._open = asyncio.Event()
        self._open.set()
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    @property
    def admits(self) -> bool:
        """Whether a call can enter without waiting."""
        return self._is_open()

    def _is_open(self) -> bool:
        if self.valid_until != math.inf and fence_clock() >= self.valid_until:
            self._open.clear()
        return self._open.is_set()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def describe(self) -> FenceView:
        return FenceView(version=self.version, paused=self.paused, in_flight=self._in_flight, model=self.model)

    def version_now(self, begun_at: int) -> int:
        """Return the version whose weights now generate the reply to a call that began at version `begun_at`."""
        return begun_at if begun_at in self._adapters else max(begun_at, self._own_version)

    async def enter(self) -> None:
        """Wait while the fence is paused, then count the call as in flight until `leave`."""
        while not self._is_open():
            await self._open.wait()
        self._in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()

    async def pause(self, mode: PauseMode = "hold") -> None:
        """Make new calls wait. With mode `drain`, also wait until calls in flight have ended."""
        self._open.clear()
        if mode == "drain":
            await self.drain()

    async def drain(self) -> None:
        """Wait until no call is in flight."""
        await self._idle.wait()

    def check(self, version: int | None, model: str | None = None) -> None:
        """Raise `Conflict` if the fence cannot resume at this version and model."""
        if version is None:
            if model is not None:
                raise Conflict(
                    "version is missing, but model is set; set version to the policy version of that model",
                    param="version",
                )
            return
        if version < self.version:
            raise Conflict(
                f"version {version} is older than the current version {self.version}; use a higher version, or "
                f"{self.version} if the weights have not changed",
                param="version",
            )
        if version == self.version and model is not None and model != self.model:
            present, wanted = self.model or "the engine's own model", model or "the engine's own model"
            raise Conflict(
                f"version {version} is already served as {present}; use a higher version for {wanted}", param="version"
            )
        if version > self.version and model is None and self.model:
            raise Conflict(
                f"model is missing: the engine serves version {self.version} as {self.model!r}; set model to the name "
                f"under which the engine serves version {version}, or to an empty string for the engine's own model",
                param="model",
            )

    def set(self, version: int | None, model: str | None = None) -> None:
        """Change the version and the model without resuming calls."""
        self.check(version, model)
        if version is None:
            return
        self.version = version
        self.model = self.model if model is None else model
        if self.model:
            self._adapters.add(version)
        else:
            self._own_version = version

    def resume(self, version: int | None = None, model: str | None = None) -> None:
        self.set(version, model)
        self._open.set()
