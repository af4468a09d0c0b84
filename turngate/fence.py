"""The policy version, and the fence that a trainer puts up around an update: pause (hold new calls, or also drain those in
flight) → load weights → resume at version n. Every turn asks here before it generates."""

from __future__ import annotations

import asyncio
from typing import Literal

from turngate.errors import Conflict

Pause = Literal["hold", "drain"]


class Fence:
    def __init__(self, version: int = 0) -> None:
        self.version = version
        self._open = asyncio.Event()
        self._open.set()
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    async def enter(self) -> None:
        """Wait while paused, then count as in flight until `leave`."""
        while not self._open.is_set():
            await self._open.wait()
        self._in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()

    async def pause(self, mode: Pause = "hold") -> None:
        """New calls wait from now on. `drain` returns only when those in flight have ended."""
        self._open.clear()
        if mode == "drain":
            await self.drained()

    async def drained(self) -> None:
        await self._idle.wait()

    def check(self, version: int | None) -> None:
        if version is not None and version < self.version:
            raise Conflict(f"version: {version} is older than the present {self.version}", param="version")

    def resume(self, version: int | None = None) -> None:
        self.check(version)
        self.version = self.version if version is None else version
        self._open.set()
