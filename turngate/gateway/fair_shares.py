"""Share the engines fairly between projects: choose which waiting call runs next while all engines are saturated.

The next call comes from the project with the fewest running calls relative to its weight, and within this project from the group with the
fewest running calls. Projects or groups that tie take turns. Calls of one group run in the order in which they arrive. Each project with
enough calls therefore gets its share of the engines, however many calls of other projects are waiting. If a project does not use its whole
share, the rest goes to the other projects. Each project with calls has at least one of them running, even if its share is less than one
call.

Calls wait here only while all engines report long queues, or to leave room for other cells (see below). While calls are waiting, each call
that ends lets another one in, so the load of the engines does not drop. Until a gateway has a second project, it lets every call through.

If several cells use the same engines, each cell has a part of every project's share (`cell_parts.py`). The next call in a cell comes from
the project with the fewest running calls relative to the cell's part. While another cell has a waiting call that would fit within that
other cell's part, a project that runs more than its part in this cell starts no new call when one of its calls ends. This frees room at the
engines for the other cell.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from math import inf
from typing import Generic, TypeVar

from turngate.gateway.cell_parts import OtherCells, ProjectCalls, Weight

T = TypeVar("T")
POLL_S = 0.1  # between checks of the engines' load while calls wait
YIELD_S = 3.0  # how long a cell leaves room for the calls of other cells before it uses the room itself
_KEEP_S = 30.0  # how long it then leaves no room, since a cell that cannot use the room must not slow the others down
_SETTLE_S = 5.0  # how long readings are ignored after calls were held; the engines' load is read every two seconds
_GROWTH = 20  # in each poll, a cell beyond its part adds one call for every 20 that it runs, since other cells see the same room


class FairQueue(Generic[T]):
    """The waiting calls, and the number of running calls, by project and group. Does no I/O."""

    def __init__(self, weight: Weight) -> None:
        self._weight = weight
        self._waiting: dict[str, dict[str, deque[T]]] = {}
        self._projects: Counter[str] = Counter()  # running calls
        self._groups: Counter[tuple[str, str]] = Counter()
        self.running = 0
        self.waiting = 0
        self._others = OtherCells()
        self._others_until = inf  # when these numbers are too old to use
        self._limits: Mapping[str, int] = {}
        self._room_since: float | None = None  # since when the engines have had room while calls were waiting
        self._keeps_until = -inf  # until then, there are no limits

    def count(self) -> ProjectCalls:
        """Return the numbers of running and waiting calls of each project."""
        waiting = {name: sum(map(len, groups.values())) for name, groups in self._waiting.items()}
        return ProjectCalls({name: calls for name, calls in self._projects.items() if calls}, waiting)

    def count_others(self, others: OtherCells, now: float, fresh_s: float, *, is_saturated: bool) -> None:
        """Take the calls of other cells into account for `fresh_s` seconds."""
        self._others, self._others_until = others, now + fresh_s
        limits = others.limit(self.count(), self._weight) if now >= self._keeps_until else {}
        if not is_saturated:  # a project that exceeds its part keeps its calls
            limits = {project: max(calls, self._projects[project]) for project, calls in limits.items()}
        self._limits = limits

    def is_limited(self, project: str) -> bool:
        """Return whether the project has to leave room for calls that wait in other cells."""
        return project in self._limits and self._projects[project] >= self._limits[project]

    def is_idle(self, project: str) -> bool:
        """Return whether the project has no running or waiting call. If so, its next call does not wait."""
        return not self._projects[project] and project not in self._waiting

    def add(self, project: str, group: str, call: T) -> None:
        if not self.waiting:
            self._room_since = None
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
        """Choose the next call, and count it as running. Return None if no waiting call may run."""
        allowed = [name for name in self._waiting if not self.is_limited(name)]
        if not allowed:
            return None
        parts = self._others.divide(self.count(), self._weight) if self._others else None
        project = min(allowed, key=lambda name: self._order(name, parts))
        groups = self._waiting[project]
        group = min(groups, key=lambda name: self._groups[project, name])
        call = groups[group].popleft()
        groups[group] = groups.pop(group)  # to the end: among equals, `min` returns the first
        self._waiting[project] = self._waiting.pop(project)
        self._drop_empty(project, group)
        self.begin(project, group)
        return call

    def _order(self, project: str, parts: Mapping[str, float] | None) -> tuple[bool, float]:
        """Return a sort key. The project with the lowest key should run the next call."""
        running = self._projects[project]
        return running > 0, (running + 1) / (self._weight(project) if parts is None else parts[project])

    def choose_for_room(self, now: float, *, is_saturated: bool, room: float = inf) -> list[T]:
        """Choose the calls that may run now, because the engines have room for them or because their project has no running call."""
        if now >= self._others_until:
            self._others, self._others_until, self._limits = OtherCells(), inf, {}
        if is_saturated:
            self._room_since = None
        elif self._room_since is None:
            self._room_since = now
        elif self._limits and now - self._room_since >= YIELD_S:
            self._limits, self._keeps_until = {}, now + _KEEP_S  # other cells do not use the room
        most = 0 if is_saturated else int(min(room, self.waiting))
        if self._others:
            most = min(most, max(1, self.running // _GROWTH, self._count_lacking()))
        least = sum(not self._projects[project] for project in self._waiting)
        chosen: list[T] = []
        while len(chosen) < max(most, least) and (call := self.choose()) is not None:
            chosen.append(call)
        return chosen

    def _count_lacking(self) -> int:
        """Return how many more calls this cell could run without exceeding its part of any project's share."""
        parts = self._others.divide(self.count(), self._weight)
        return int(sum(max(0.0, part - self._projects[project]) for project, part in parts.items()))

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
    """Lets calls through to the engines, or makes them wait while the engines are saturated or other cells need room."""

    def __init__(
        self,
        is_saturated: Callable[[], bool],
        weight: Weight,
        is_held: Callable[[], bool] = lambda: False,
        read_room: Callable[[], float] = lambda: inf,
    ) -> None:
        self.is_active = False  # whether there are, or have been, several projects
        self.queue: FairQueue[asyncio.Future[None]] = FairQueue(weight)
        self._read_saturated = is_saturated
        self._is_held = is_held  # whether calls wait at the fence
        self._read_room = read_room  # how many more calls the engines can take before they are saturated
        self._was_saturated = False  # at the last reading that was not influenced by a hold
        self._settles_at = -inf  # until then, a hold still influences the readings
        self._polling: asyncio.Task[None] | None = None

    def is_saturated(self) -> bool:
        """Return whether the engines are saturated. During a hold at the fence and shortly after, return the last reading before the hold.

        The engines run empty during a hold. If that counted as room, all waiting calls would reach the engines at once after the hold.
        """
        now = asyncio.get_running_loop().time()
        if self._is_held():
            self._settles_at = now + _SETTLE_S
        elif now >= self._settles_at:
            self._was_saturated = self._read_saturated()
        return self._was_saturated

    @property
    def is_contended(self) -> bool:
        """Whether calls are waiting, or calls are running while the engines are saturated."""
        queue = self.queue
        return bool(queue.waiting) or (bool(queue.running) and self.is_saturated())

    def must_wait(self, project: str) -> bool:
        """Return whether a new call has to wait."""
        queue = self.queue
        return (self.is_contended or queue.is_limited(project)) and not queue.is_idle(project)

    def count_others(self, others: OtherCells, fresh_s: float) -> None:
        """Take the calls of other cells into account for `fresh_s` seconds."""
        now = asyncio.get_running_loop().time()
        self.queue.count_others(others, now, fresh_s, is_saturated=self.is_saturated())

    async def enter(self, project: str, group: str) -> None:
        """Wait until this call may run. The call then counts as running until `leave`."""
        queue = self.queue
        if not self.must_wait(project):
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
        if (turn := self.queue.choose()) is not None:
            _admit(turn)

    async def _poll(self) -> None:
        """Let waiting calls in when the engines have room again."""
        now = asyncio.get_running_loop().time
        try:
            while self.queue.waiting:
                await asyncio.sleep(POLL_S)
                saturated, room = self.is_saturated(), self._read_room()
                for turn in self.queue.choose_for_room(now(), is_saturated=saturated, room=room):
                    _admit(turn)
        finally:
            self._polling = None

    async def close(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)


def _admit(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
