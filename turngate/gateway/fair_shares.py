"""Share the engines fairly between projects: choose which waiting call runs next while all engines are crowded.

The next call comes from the project with the fewest running calls relative to its weight, and within this project from the group with the
fewest running calls. Calls of one group keep their order. So each project with enough calls gets its share of the engines, however many
calls of other projects are waiting. The share that a project does not use goes to the others.

Calls wait here only while all engines report long queues. While calls are waiting, each call that ends lets another one in, so the engines
stay as full as they are. A gateway with only one project lets every call through.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
_POLL_S = 0.1  # between checks of the engines' load while calls wait


class FairQueue(Generic[T]):
    """The waiting calls by project and group, and the number of running calls of each. Does no I/O."""

    def __init__(self, weight: Callable[[str], float]) -> None:
        self._weight = weight
        self._waiting: dict[str, dict[str, deque[T]]] = {}
        self._projects: Counter[str] = Counter()  # running calls
        self._groups: Counter[tuple[str, str]] = Counter()
        self.running = 0
        self.waiting = 0

    def add(self, project: str, group: str, call: T) -> None:
        """Add a waiting call."""
        self._waiting.setdefault(project, {}).setdefault(group, deque()).append(call)
        self.waiting += 1

    def remove(self, project: str, group: str, call: T) -> bool:
        """Remove a call that has given up waiting. Return False if it was chosen in the meantime."""
        calls = self._waiting.get(project, {}).get(group, ())
        if call not in calls:
            return False
        assert isinstance(calls, deque)
        calls.remove(call)
        self._drop_empty(project, group)
        return True

    def choose(self) -> T | None:
        """Choose the next call, and count it as running. Return None if no call is waiting."""
        if not self._waiting:
            return None
        project = min(self._waiting, key=lambda name: (self._projects[name] + 1) / self._weight(name))
        groups = self._waiting[project]
        group = min(groups, key=lambda name: self._groups[project, name])
        call = groups[group].popleft()
        self._drop_empty(project, group)
        self.begin(project, group)
        return call

    def begin(self, project: str, group: str) -> None:
        """Count a call as running."""
        self._projects[project] += 1
        self._groups[project, group] += 1
        self.running += 1

    def end(self, project: str, group: str) -> None:
        """Record that a running call has ended."""
        self.running -= 1
        self._projects[project] -= 1
        self._groups[project, group] -= 1
        if not self._groups[project, group]:
            del self._groups[project, group]  # there may be many groups over time

    def _drop_empty(self, project: str, group: str) -> None:
        self.waiting -= 1
        if not self._waiting[project][group]:
            del self._waiting[project][group]
            if not self._waiting[project]:
                del self._waiting[project]


class FairShares:
    """Lets calls through to the engines, or makes them wait their turn while the engines are saturated."""

    def __init__(self, is_saturated: Callable[[], bool], weight: Callable[[str], float]) -> None:
        self.is_saturated = is_saturated
        self.is_active = False  # whether there are several projects
        self.queue: FairQueue[asyncio.Future[None]] = FairQueue(weight)
        self._polling: asyncio.Task[None] | None = None

    @property
    def must_wait(self) -> bool:
        """Whether a new call has to wait."""
        queue = self.queue
        return bool(queue.waiting) or (bool(queue.running) and self.is_saturated())

    async def enter(self, project: str, group: str) -> None:
        """Wait until it is this call's turn. The call then counts as running until `leave`."""
        queue = self.queue
        if not self.must_wait:
            queue.begin(project, group)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.add(project, group, turn)
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll())
        try:
            await turn
        except BaseException:
            if not queue.remove(project, group, turn):
                self.leave(project, group)
            raise

    def leave(self, project: str, group: str) -> None:
        """Record that a call has ended, and let the next one in."""
        self.queue.end(project, group)
        self._admit_one()

    def _admit_one(self) -> bool:
        while (turn := self.queue.choose()) is not None:
            if not turn.done():
                turn.set_result(None)
            return True
        return False

    async def _poll(self) -> None:
        """Let waiting calls in when the engines have room again."""
        try:
            while self.queue.waiting:
                await asyncio.sleep(_POLL_S)
                if not self.queue.running:
                    self._admit_one()
                while not self.is_saturated() and self._admit_one():
                    pass
        finally:
            self._polling = None

    async def close(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
