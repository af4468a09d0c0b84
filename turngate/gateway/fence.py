"""The policy version, and the fence that a trainer puts up around an update: pause (hold new calls; also drain those in flight, or
keep them) → load weights → resume at version n. Every turn asks here before it generates, and again for each piece that it gets.

A version comes in one of two ways. Weights are *replaced*: calls in flight go on over the new ones, from then on. Or the engine has
them under another *name* (an adapter): calls in flight stay with what they began with.
"""

from __future__ import annotations

import asyncio

from turngate.client.protocol import PauseMode
from turngate.errors import Conflict


class Fence:
    def __init__(self, version: int = 0, model: str = "") -> None:
        self.version = version
        self.model = model  # the name under which the engine has this version; empty: its own
        self._replaced = 0  # the newest version that came by replacing weights
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

    def now(self, begun: int) -> int:
        """The version that samples now for a call that was begun at another."""
        return max(begun, self._replaced)

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

    async def pause(self, mode: PauseMode = "hold") -> None:
        """New calls wait from now on. `drain` returns only when those in flight have ended."""
        self._open.clear()
        if mode == "drain":
            await self.drained()

    async def drained(self) -> None:
        await self._idle.wait()

    def check(self, version: int | None, model: str | None = None) -> None:
        if version is None:
            if model is not None:
                raise Conflict("version: say which version of the policy that model is", param="version")
            return
        if version < self.version:
            raise Conflict(f"version: {version} is older than the present {self.version}", param="version")
        if version == self.version and model is not None and model != self.model:
            present = self.model or "the engine's own model"
            raise Conflict(f"version: {version} is in force as {present}; give {model!r} another one", param="version")
        if version > self.version and model is None and self.model:
            raise Conflict(
                f"model: the engine is asked for {self.model!r} at version {self.version}; say which it is at {version} "
                "(empty: the engine's own)",
                param="model",
            )

    def set(self, version: int | None, model: str | None = None) -> None:
        """Be at a version, without letting anybody pass."""
        self.check(version, model)
        if version is None:
            return
        if model is None and version > self.version:
            self._replaced = version
        self.version = version
        self.model = self.model if model is None else model

    def resume(self, version: int | None = None, model: str | None = None) -> None:
        self.set(version, model)
        self._open.set()
