"""Limit how many rollouts of a batch are in each phase at the same time. `Bounds` has the limits, with their defaults.

Each rollout has a `Slot`, which passes through these states:

    waiting → start → ready → run → done → grade

An agent's sandbox exists from `start` until the agent is done. There are at most `running + warm` of these sandboxes, so up to `warm` of
them can be prepared in advance. Rollouts that are waiting for grading have no sandbox, so they do not count toward this limit.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Literal

import msgspec

from turngate.errors import ConfigError
from turngate.rollout.outcome import Phase

SlotState = Literal["waiting", "start", "ready", "run", "done", "grade"]


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """The maximum number of rollouts in each phase, and of sandboxes that are prepared in advance (`warm`).

    None means a default that depends on the number of CPU cores.
    """

    running: int = 8
    starting: int | None = None  # None: twice the number of cores
    grading: int | None = None  # None: the number of cores
    warm: int | None = None  # None: the number of cores

    def __post_init__(self) -> None:
        for name, least in (("running", 1), ("starting", 1), ("grading", 1), ("warm", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                shown = "concurrency" if name == "running" else name
                raise ConfigError(f"{shown!r} must be at least {least}, not {value}", param=shown)

    @property
    def max_starting(self) -> int:
        return 2 * _count_cores() if self.starting is None else self.starting

    @property
    def max_grading(self) -> int:
        return _count_cores() if self.grading is None else self.grading

    @property
    def max_warm(self) -> int:
        return _count_cores() if self.warm is None else self.warm

    @property
    def sandboxes(self) -> int:
        return self.running + self.max_warm

    @property
    def rollouts(self) -> int:
        """The maximum number of rollouts in progress: the number of sandboxes plus the number of rollouts that can be graded at once."""
        return self.sandboxes + self.max_grading


class Concurrency:
    """The semaphores that limit the phases of one batch. `states` counts the rollouts in each state."""

    def __init__(self, bounds: Bounds) -> None:
        self.states: Counter[SlotState] = Counter()
        self.sandboxes = asyncio.Semaphore(bounds.sandboxes)
        self.phases: dict[Phase, asyncio.Semaphore] = {
            "start": asyncio.Semaphore(bounds.max_starting),
            "run": asyncio.Semaphore(bounds.running),
            "grade": asyncio.Semaphore(bounds.max_grading),
        }

    def new_slot(self) -> Slot:
        return Slot(self)


class Slot:
    """The slot of one rollout. Run each phase inside `async with slot(phase):`, and call `leave` when the rollout has ended or failed."""

    def __init__(self, concurrency: Concurrency) -> None:
        self._concurrency = concurrency
        self._state: SlotState | None = None
        self._has_sandbox = False
        self._set_state("waiting")

    def __call__(self, phase: Phase) -> AbstractAsyncContextManager[None]:
        return self._enter(phase)

    @asynccontextmanager
    async def _enter(self, phase: Phase) -> AsyncIterator[None]:
        if phase == "start":
            await self._concurrency.sandboxes.acquire()
            self._has_sandbox = True
        elif phase == "grade":
            self._release_sandbox()
        async with self._concurrency.phases[phase]:
            self._set_state(phase)
            try:
                yield
            finally:
                self._set_state("ready" if phase == "start" else "done")

    @property
    def agent_is_done(self) -> bool:
        """Whether the agent is done. Its work may still have to be graded."""
        return self._state in ("done", "grade")

    def leave(self) -> None:
        """Release the slot when its rollout has ended."""
        self._release_sandbox()
        self._set_state(None)

    def _release_sandbox(self) -> None:
        """Let another rollout create a sandbox."""
        if self._has_sandbox:
            self._has_sandbox = False
            self._concurrency.sandboxes.release()

    def _set_state(self, state: SlotState | None) -> None:
        if self._state is not None:
            self._concurrency.states[self._state] -= 1
        if state is not None:
            self._concurrency.states[state] += 1
        self._state = state
