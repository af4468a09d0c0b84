"""A discrete-event simulation of cells that share one engine. Only the queues of `fair_shares.py` are real."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from turngate.engines.load import EngineLoad
from turngate.engines.placement import is_crowded
from turngate.gateway.cell_parts import OtherCells, ProjectCalls
from turngate.gateway.fair_shares import POLL_S, FairQueue

LOAD_S = 2.0  # between a cell's reads of the engine's load
BUSY_REPORT_S, REPORT_S = 1.0, 6.0  # between a cell's reports, if calls wait and if not
FRESH_S = 12.0  # how long a report counts


class Call(msgspec.Struct, frozen=True):
    """A call of one of a cell's agents."""

    cell: int
    project: str


class Network(msgspec.Struct, frozen=True):
    """How a report travels to the store and back."""

    delay_s: float = 0.05  # at most, in each direction
    loss: float = 0.0  # the part of the reports that fail


class SimulatedCell:
    """The queue of one cell, and what it last knew of the engine. Its clock is `clock_s` ahead of the true time."""

    def __init__(self, weight: Callable[[str], float], clock_s: float) -> None:
        self.queue: FairQueue[Call] = FairQueue(weight)
        self.clock_s = clock_s
        self.is_saturated = False
        self.is_up = True
        self.is_blind = False  # whether it never sees that the engine has room
        self.closed: set[str] = set()  # projects whose agents end
        self.changed = 0.0  # when its calls were last accounted for

    def must_wait(self, project: str) -> bool:
        """Return what `FairShares.must_wait` returns."""
        queue = self.queue
        is_contended = bool(queue.waiting) or (bool(queue.running) and self.is_saturated)
        return (is_contended or queue.is_limited(project)) and not queue.is_idle(project)


class Simulation:
    """Cells whose agents call one engine, which runs `slots` calls at a time, in order. Each agent calls again when its call has ended."""

    def __init__(
        self,
        cells: int,
        *,
        slots: int = 32,
        weights: Mapping[str, float] | None = None,
        network: Network = Network(),
        call_s: tuple[float, float] = (2.0, 6.0),
        seed: int = 1,
    ) -> None:
        self.now = 0.0
        self.slots, self.weights = slots, dict(weights or {})
        self._network, self._call_s = network, call_s
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._running: dict[int, Call] = {}  # in the engine, by number
        self._queue: deque[Call] = deque()  # in the engine
        self._reports: dict[int, tuple[float, ProjectCalls]] = {}  # in the store, with the time of arrival
        self.cells: list[SimulatedCell] = []
        self.measure()
        for _ in range(cells):
            self.add_cell()

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            when, _, act = heapq.heappop(self._events)
            self._advance(when)
            act()
        self._advance(until)
        for number in range(len(self.cells)):
            self._account(number)

    def add_cell(self, clock_s: float = 0.0) -> int:
        """Start a cell, and return its number."""
        number = len(self.cells)
        self.cells.append(SimulatedCell(lambda project: self.weights.get(project, 1.0), clock_s))
        self.cells[number].changed = self.now
        for act in (self._read_load, self._send_report, self._poll):
            self._at(self.now + self._random.random(), partial(act, number))
        return number

    def add_agents(self, cell: int, project: str, number: int, over_s: float = 20.0) -> None:
        """Let agents start one after the other, during the next `over_s` seconds."""
        self.cells[cell].closed.discard(project)
        for n in range(number):
            self._at(self.now + over_s * n / number, partial(self._begin, Call(cell, project)))

    def remove_agents(self, cell: int, project: str) -> None:
        """Let each agent of a project end after its current call."""
        self.cells[cell].closed.add(project)

    def kill(self, number: int) -> None:
        """Lose a cell. The engine drops its calls, and its last report stays in the store."""
        self._account(number)
        self.cells[number].is_up = False
        self._running = {key: call for key, call in self._running.items() if call.cell != number}
        self._queue = deque(call for call in self._queue if call.cell != number)
        self._fill_slots()

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act))

    def _begin(self, call: Call) -> None:
        cell = self.cells[call.cell]
        if not cell.is_up or call.project in cell.closed:
            return
        self._account(call.cell)
        if cell.must_wait(call.project):
            cell.queue.add(call.project, "", call)
        else:
            cell.queue.begin(call.project, "")
            self._send(call)

    def _send(self, call: Call) -> None:
        self._queue.append(call)
        self._fill_slots()

    def _fill_slots(self) -> None:
        while self._queue and len(self._running) < self.slots:
            key = next(self._numbers)
            self._running[key] = self._queue.popleft()
            self._at(self.now + self._random.uniform(*self._call_s), partial(self._end, key))

    def _end(self, key: int) -> None:
        call = self._running.pop(key, None)
        if call is None:
            return  # its cell was lost
        self._account(call.cell)
        self.ended[call] += 1
        queue = self.cells[call.cell].queue
        queue.end(call.project, "")
        if (chosen := queue.choose()) is not None:
            self._send(chosen)
        self._fill_slots()
        self._begin(call)

    def _read_load(self, number: int) -> None:
        cell = self.cells[number]
        cell.is_saturated = cell.is_blind or is_crowded(EngineLoad(len(self._running), len(self._queue)))
        if cell.is_up:
            self._at(self.now + LOAD_S, partial(self._read_load, number))

    def _poll(self, number: int) -> None:
        cell = self.cells[number]
        if not cell.is_up:
            return
        if cell.queue.waiting:
            self._account(number)
            for call in cell.queue.choose_for_room(self.now + cell.clock_s, is_saturated=cell.is_saturated):
                self._send(call)
        self._at(self.now + POLL_S, partial(self._poll, number))

    # ── reports ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _send_report(self, number: int) -> None:
        cell = self.cells[number]
        if not cell.is_up:
            return
        there, back = (self._random.uniform(0, self._network.delay_s) for _ in range(2))
        if self._random.random() >= self._network.loss:
            self._at(self.now + there, partial(self._store_report, number, cell.queue.count(), self.now, back))
        pause = BUSY_REPORT_S if cell.queue.waiting else REPORT_S
        self._at(self.now + there + back + pause, partial(self._send_report, number))

    def _store_report(self, number: int, calls: ProjectCalls, sent: float, back: float) -> None:
        self._reports[number] = (self.now, calls)
        fresh = {cell: calls for cell, (seen, calls) in self._reports.items() if self.now < seen + FRESH_S}
        others = [calls for cell, calls in fresh.items() if cell != number]
        self._at(self.now + back, partial(self._receive, number, others, sent))

    def _receive(self, number: int, others: Sequence[ProjectCalls], sent: float) -> None:
        cell = self.cells[number]
        fresh_s = sent + FRESH_S - self.now
        cell.queue.count_others(OtherCells(others), self.now + cell.clock_s, fresh_s, is_saturated=cell.is_saturated)

    # ── measurements ────────────────────────────────────────────────────────────────────────────────────────────

    def measure(self) -> None:
        """Begin to measure."""
        self._began = self.now
        self.ended: Counter[Call] = Counter()
        self._used: defaultdict[Call, float] = defaultdict(
            float
        )  # seconds that calls were running, also in the engine's queue
        self._idle_s = 0.0  # of all slots together, while calls wait in cells
        self._hungry_since: dict[Call, float] = {}
        self.longest_hunger_s = 0.0  # in which calls of a project waited in a cell that ran none of them

    @property
    def idle(self) -> float:
        """The part of the engine's time that was unused while calls waited in cells."""
        return self._idle_s / ((self.now - self._began) * self.slots)

    def count_running(self) -> dict[Call, float]:
        """Return the average number of running calls of each project in each cell."""
        return {call: seconds / (self.now - self._began) for call, seconds in self._used.items()}

    def divide(self) -> dict[str, float]:
        """Return which part of the running calls each project had."""
        running: defaultdict[str, float] = defaultdict(float)
        for call, number in self.count_running().items():
            running[call.project] += number
        return {project: number / sum(running.values()) for project, number in running.items()}

    def _advance(self, when: float) -> None:
        idle = self.slots - len(self._running)
        if idle and any(cell.queue.waiting for cell in self.cells if cell.is_up):
            self._idle_s += idle * (when - self.now)
        self.now = when

    def _account(self, number: int) -> None:
        """Account for the time since the calls of a cell last changed."""
        cell = self.cells[number]
        if not cell.is_up:
            return
        calls, passed, cell.changed = cell.queue.count(), self.now - cell.changed, self.now
        for project, running in calls.running.items():
            self._used[Call(number, project)] += running * passed
            self._hungry_since.pop(Call(number, project), None)
        for project in calls.waiting:
            if project not in calls.running:
                since = self._hungry_since.setdefault(Call(number, project), self.now - passed)
                self.longest_hunger_s = max(self.longest_hunger_s, self.now - since)
