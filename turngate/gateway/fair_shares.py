"""Share the engines fairly between projects: choose which waiting call runs next while all engines are crowded.

The next call comes from the project with the fewest running calls relative to its weight, and within this project from the group with the
fewest running calls. Calls of one group keep their order. So each project with enough calls gets its share of the engines, however many
calls of other projects are waiting. The share that a project does not use goes to the others.

Calls wait here only while all engines report long queues. While calls are waiting, each call that ends lets another one in, so the engines
stay as full as they are. A gateway with only one project lets every call through.

If several cells use the same engines, a project's calls in all of them count (`shared_calls.py`). If a project exceeds its share while
another cell has calls that wait for theirs, each cell lets the project's calls end without letting others in, until the shares are fair.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from math import inf
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")
POLL_S = 0.1  # between checks of the engines' load while calls wait
YIELD_S = 3.0  # how long a project leaves room for the calls of other cells before it uses the room itself
_GROWTH = 20  # with other cells, a poll lets in one call for each 20 that run, since the others see the same room


class ProjectCalls(msgspec.Struct, frozen=True):
    """How many calls of each project are running, and how many are waiting for their share."""

    running: Mapping[str, int] = {}
    waiting: Mapping[str, int] = {}


def divide_fairly(total: float, demands: Mapping[str, int], weight: Callable[[str], float]) -> dict[str, float]:
    """Divide `total` by weight. A project gets at most its demand, and the others divide the rest."""
    shares: dict[str, float] = {}
    while len(shares) < len(demands):
        unmet = {project: demand for project, demand in demands.items() if project not in shares}
        level = (total - sum(shares.values())) / sum(map(weight, unmet))
        met = {project: float(demand) for project, demand in unmet.items() if demand <= level * weight(project)}
        shares |= met or {project: level * weight(project) for project in unmet}
    return shares


def limit_calls(own: ProjectCalls, others: ProjectCalls, weight: Callable[[str], float]) -> dict[str, int]:
    """Return how many calls this cell may run of each project that exceeds its share, if calls wait in other cells for theirs.

    Every cell gives up the same part of its calls, and keeps at least one.
    """
    running = Counter(own.running) + Counter(others.running)
    demands = running + Counter(own.waiting) + Counter(others.waiting)
    shares = divide_fairly(running.total(), demands, weight)
    if all(running[project] >= shares[project] for project in others.waiting):
        return {}
    exceeded = {project: calls for project, calls in own.running.items() if running[project] > shares[project]}
    return {project: max(1, round(calls * shares[project] / running[project])) for project, calls in exceeded.items()}


class FairQueue(Generic[T]):
    """The waiting calls by project and group, and the number of running calls of each. Does no I/O."""

    def __init__(self, weight: Callable[[str], float]) -> None:
        self._weight = weight
        self._waiting: dict[str, dict[str, deque[T]]] = {}
        self._projects: Counter[str] = Counter()  # running calls
        self._groups: Counter[tuple[str, str]] = Counter()
        self.running = 0
        self.waiting = 0
        self._others = ProjectCalls()  # calls of other cells
        self._others_until = inf  # when these numbers are too old to use
        self._limits: Mapping[str, int] = {}
        self._room_since: float | None = None  # since when the engines have had room while calls were waiting

    def count(self) -> ProjectCalls:
        """Count the calls of each project."""
        waiting = {name: sum(map(len, groups.values())) for name, groups in self._waiting.items()}
        return ProjectCalls({name: calls for name, calls in self._projects.items() if calls}, waiting)

    def count_others(self, others: ProjectCalls, until: float, *, is_saturated: bool) -> None:
        """Use these numbers until a time. While the engines have room, a project that exceeds its share keeps its calls."""
        self._others, self._others_until = others, until
        limits = limit_calls(self.count(), others, self._weight)
        self._limits = limits if is_saturated else {project: self._projects[project] for project in limits}

    def is_limited(self, project: str) -> bool:
        """Return whether the project exceeds its share, and has to leave room for calls that wait in other cells."""
        return project in self._limits and self._projects[project] >= self._limits[project]

    def add(self, project: str, group: str, call: T) -> None:
        """Add a waiting call."""
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
        """Choose the next call, and count it as running. Return None if no call is waiting that may run."""
        allowed = [name for name in self._waiting if not self.is_limited(name)]
        if not allowed:
            return None
        project = min(allowed, key=self._order)
        groups = self._waiting[project]
        group = min(groups, key=lambda name: self._groups[project, name])
        call = groups[group].popleft()
        self._drop_empty(project, group)
        self.begin(project, group)
        return call

    def _order(self, project: str) -> float:
        return (self._projects[project] + self._others.running.get(project, 0) + 1) / self._weight(project)

    def choose_for_room(self, now: float, *, is_saturated: bool) -> list[T]:
        """Choose the calls that may run now because the engines have room, or because no call is running."""
        if now >= self._others_until:
            self._others, self._others_until, self._limits = ProjectCalls(), inf, {}
        if is_saturated:
            self._room_since = None
        elif self._room_since is None:
            self._room_since = now
        elif now - self._room_since >= YIELD_S:
            self._limits = {}  # other cells do not use the room
        most = 0 if is_saturated else self.waiting
        if self._others.running or self._others.waiting:
            most = min(most, max(1, self.running // _GROWTH))
        if not self.running:
            most = max(most, 1)
        chosen: list[T] = []
        while len(chosen) < most and (call := self.choose()) is not None:
            chosen.append(call)
        return chosen

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
    def is_contended(self) -> bool:
        """Whether calls are waiting, or would wait if they came now."""
        queue = self.queue
        return bool(queue.waiting) or (bool(queue.running) and self.is_saturated())

    def must_wait(self, project: str) -> bool:
        """Return whether a new call has to wait."""
        return self.is_contended or self.queue.is_limited(project)

    def count_others(self, others: ProjectCalls, fresh_s: float) -> None:
        """Take the calls of other cells into account for this long."""
        until = asyncio.get_running_loop().time() + fresh_s
        self.queue.count_others(others, until, is_saturated=self.is_saturated())

    async def enter(self, project: str, group: str) -> None:
        """Wait until it is this call's turn. The call then counts as running until `leave`."""
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
                for turn in self.queue.choose_for_room(now(), is_saturated=self.is_saturated()):
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
