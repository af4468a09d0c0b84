"""Measure the costs of gateways: CPU per turn, added latency, and memory per open session.

All gateways run, and are measured in turn, so that other load on the machine affects all of them equally.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import aiohttp

from gauntlet.agent import AgentRun
from gauntlet.gateways.base import CannotStart
from gauntlet.processes import cpu_seconds, memory_mb
from gauntlet.scenarios import build_load
from gauntlet.trial import Trial, raise_if_cancelled

CELL_LIMIT_S = 600.0
WARM_UP = (2, 3)  # sessions and turns that are not measured, for each dialect, streamed and not
OPEN_SESSIONS = {
    20: (48, 48),
    100: (2, 6),
}  # by turns: sessions that fill buffers and caches, then sessions that are measured
NOISE_MB = 0.05  # growth below this is noise
LATER_S = 80.0  # idle time before memory is measured again


@dataclass(frozen=True)
class Shape:
    """A number of concurrent sessions, and the turns of each."""

    sessions: int
    turns: int

    def __str__(self) -> str:
        return f"{self.sessions}x{self.turns}"


@dataclass(frozen=True)
class Cell:
    dialect: str
    streamed: bool
    shape: Shape

    def __str__(self) -> str:
        return f"{self.dialect} {'streamed' if self.streamed else 'whole'} {self.shape}"


@dataclass
class Cost:
    """The cost of one gateway in one cell."""

    cell: Cell
    cpu_ms: list[float] = field(default_factory=list)  # per turn, once for each repeat
    added_ms: list[float] = field(
        default_factory=list
    )  # per turn of a single session: round trip minus the engine's own time
    error: str = ""

    @property
    def cpu(self) -> float:
        """The best repeat, because noise only adds time."""
        return min(self.cpu_ms)

    @property
    def p50(self) -> float:
        return statistics.median(self.added_ms)

    @property
    def p99(self) -> float:
        return sorted(self.added_ms)[min(len(self.added_ms) - 1, int(0.99 * len(self.added_ms)))]


@dataclass
class Costs:
    """The costs of one gateway."""

    base_mb: float = 0.0  # after startup
    session_mb: dict[int, float] = field(default_factory=dict)  # by turns: memory added by each open session
    later_mb: dict[int, float] = field(default_factory=dict)  # the same after an idle time
    cells: list[Cost] = field(default_factory=list)
    error: str = ""
    before_mb: float = 0.0  # before the measured sessions

    def session(self, turns: int) -> float | None:
        return self.session_mb.get(turns)

    def later(self, turns: int) -> float | None:
        return self.later_mb.get(turns)

    def cell(self, cell: Cell) -> Cost | None:
        return next((cost for cost in self.cells if cost.cell == cell and not cost.error), None)


def list_cells(shapes: Sequence[Shape], dialects: Sequence[str]) -> list[Cell]:
    return [Cell(dialect, streamed, shape) for shape in shapes for dialect in dialects for streamed in (False, True)]


async def measure_costs(
    trials: Sequence[Trial], shapes: Sequence[Shape], dialects: Sequence[str], repeats: int, say: Callable[[str], None]
) -> dict[str, Costs]:
    """Measure all gateways, and return the costs by gateway. A gateway that fails in one cell continues with the next."""
    costs_by_gateway = {trial.gateway.name: Costs() for trial in trials}
    for trial in trials:
        costs = costs_by_gateway[trial.gateway.name]
        try:
            costs.base_mb = memory_mb(trial.pid)
            await _warm_up(trial, dialects)
        except (CannotStart, TimeoutError, aiohttp.ClientError) as error:
            raise_if_cancelled()
            costs.error = f"{type(error).__name__}: {error}"
    for turns in dict.fromkeys(shape.turns for shape in shapes):
        for trial in _working(trials, costs_by_gateway):
            say(f"memory of {trial.gateway.name} at {turns} turns")
            await _measure_memory(trial, costs_by_gateway[trial.gateway.name], turns)
        say(f"memory at {turns} turns, {LATER_S:.0f} seconds later")
        await asyncio.sleep(LATER_S)
        for trial in _working(trials, costs_by_gateway):
            _measure_later_memory(trial, costs_by_gateway[trial.gateway.name], turns)
    for cell in list_cells(shapes, dialects):
        for repeat in range(repeats):
            for trial in _working(trials, costs_by_gateway):
                if cell.dialect not in trial.gateway.dialects:
                    continue
                say(f"cost of {trial.gateway.name}, {cell}, {repeat + 1} of {repeats}")
                await _measure_cell(trial, costs_by_gateway[trial.gateway.name], cell)
    return costs_by_gateway


def _working(trials: Sequence[Trial], costs_by_gateway: dict[str, Costs]) -> Iterator[Trial]:
    return (trial for trial in trials if not costs_by_gateway[trial.gateway.name].error)


async def _warm_up(trial: Trial, dialects: Sequence[str]) -> None:
    """Make the first calls of each kind, which cost more than later ones."""
    sessions, turns = WARM_UP
    async with asyncio.timeout(CELL_LIMIT_S):
        for dialect in dialects:
            if dialect in trial.gateway.dialects:
                for streamed in (False, True):
                    await _run_sessions(trial, dialect, streamed, sessions, turns)


async def _measure_memory(trial: Trial, costs: Costs, turns: int) -> None:
    """Measure the memory per open session. Sessions run two at a time, and none is closed."""
    first, sessions = OPEN_SESSIONS.get(turns, (2, 8))
    try:
        async with asyncio.timeout(CELL_LIMIT_S):
            for _ in range(first // 2):
                await _run_sessions(trial, trial.gateway.dialects[0], False, 2, turns)
            costs.before_mb = memory_mb(trial.pid)
            for _ in range(sessions // 2):
                await _run_sessions(trial, trial.gateway.dialects[0], False, 2, turns)
            costs.session_mb[turns] = max(0.0, memory_mb(trial.pid) - costs.before_mb) / sessions
    except (CannotStart, TimeoutError, aiohttp.ClientError) as error:
        raise_if_cancelled()
        costs.error = f"{type(error).__name__}: {error}"


def _measure_later_memory(trial: Trial, costs: Costs, turns: int) -> None:
    try:
        costs.later_mb[turns] = max(0.0, memory_mb(trial.pid) - costs.before_mb) / OPEN_SESSIONS.get(turns, (2, 8))[1]
    except CannotStart as error:
        costs.error = f"{type(error).__name__}: {error}"


async def _measure_cell(trial: Trial, costs: Costs, cell: Cell) -> None:
    """Measure the CPU time of concurrent sessions, then the latency of a single one."""
    cost = next((cost for cost in costs.cells if cost.cell == cell), None)
    if cost is None:
        cost = Cost(cell)
        costs.cells.append(cost)
    shape = cell.shape
    try:
        async with asyncio.timeout(CELL_LIMIT_S):
            before = cpu_seconds(trial.pid)
            played = await _run_sessions(trial, cell.dialect, cell.streamed, shape.sessions, shape.turns)
            spent = cpu_seconds(trial.pid) - before
            (alone,) = await _run_sessions(trial, cell.dialect, cell.streamed, 1, shape.turns)
    except (CannotStart, TimeoutError, aiohttp.ClientError) as error:
        raise_if_cancelled()
        cost.error = f"{type(error).__name__}: {error}"
        return
    cost.error = next((each.error for each in [*played, alone] if each.error), "")
    if not cost.error:
        cost.cpu_ms.append(1000 * spent / sum(len(each.taken) for each in played))
        cost.added_ms += [1000 * seconds for _, seconds in alone.latencies]


async def _run_sessions(trial: Trial, dialect: str, streamed: bool, sessions: int, turns: int) -> list[AgentRun]:
    scenario = build_load(turns)
    return list(await asyncio.gather(*(trial.run_open_session(scenario, dialect, streamed) for _ in range(sessions))))
