"""How many rollouts of a batch are in which phase at once. Each rollout has a `Ticket`, which is the `gates` of `one.py`.

    waiting → start → ready → run → done → grade

A sandbox exists from `start` until the agent is done. At most `running + warm` of them do, so `warm` are prepared ahead of a free
place to run in; rollouts whose sandboxes are gone wait for the graders without holding anybody up.
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
    """The most at a time. None: by the number of cores."""

    running: int = 8
    starting: int | None = None  # twice the cores
    grading: int | None = None  # the cores
    warm: int | None = None  # the cores

    def __post_init__(self) -> None:
        for name, least in (("running", 1), ("starting", 1), ("grading", 1), ("warm", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                shown = "concurrency" if name == "running" else name
                raise ConfigError(f"{shown}: {value} must be at least {least}", param=shown)

    @property
    def most_starting(self) -> int:
        return 2 * _count_cores() if self.starting is None else self.starting

    @property
    def most_grading(self) -> int:
        return _count_cores() if self.grading is None else self.grading

    @property
    def most_warm(self) -> int:
        return _count_cores() if self.warm is None else self.warm

    @property
    def sandboxes(self) -> int:
        return self.running + self.most_warm

    @property
    def rollouts(self) -> int:
        """That are looked after at all: those with sandboxes, and those that are being graded."""
        return self.sandboxes + self.most_grading


class Concurrency:
    """Of one batch. `places`: how many rollouts are where."""

    def __init__(self, bounds: Bounds) -> None:
        self.states: Counter[SlotState] = Counter()
        self.sandboxes = asyncio.Semaphore(bounds.sandboxes)
        self.phases: dict[Phase, asyncio.Semaphore] = {
            "start": asyncio.Semaphore(bounds.most_starting),
            "run": asyncio.Semaphore(bounds.running),
            "grade": asyncio.Semaphore(bounds.most_grading),
        }

    def new_slot(self) -> Slot:
        return Slot(self)


class Slot:
    """One rollout's way through the gates. Call `leave` when it is over, whichever way that came."""

    def __init__(self, gates: Concurrency) -> None:
        self._gates = gates
        self._at: SlotState | None = None
        self._has_sandbox = False
        self._move("waiting")

    def __call__(self, phase: Phase) -> AbstractAsyncContextManager[None]:
        return self._through(phase)

    @asynccontextmanager
    async def _through(self, phase: Phase) -> AsyncIterator[None]:
        if phase == "start":
            await self._gates.sandboxes.acquire()
            self._has_sandbox = True
        elif phase == "grade":
            self._give_sandbox_back()
        async with self._gates.phases[phase]:
            self._move(phase)
            try:
                yield
            finally:
                self._move("ready" if phase == "start" else "done")

    @property
    def agent_is_done(self) -> bool:
        """What it left is graded, or about to be."""
        return self._at in ("done", "grade")

    def leave(self) -> None:
        self._give_sandbox_back()
        self._move(None)

    def _give_sandbox_back(self) -> None:
        """What ran in it is gone by now."""
        if self._has_sandbox:
            self._has_sandbox = False
            self._gates.sandboxes.release()

    def _move(self, to: SlotState | None) -> None:
        if self._at is not None:
            self._gates.states[self._at] -= 1
        if to is not None:
            self._gates.states[to] += 1
        self._at = to
