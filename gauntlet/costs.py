"""What gateways cost: CPU per turn, added latency, memory per live session. All of them run, and take turns, so that what else the
machine does hits all alike."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import aiohttp

from gauntlet.agent import Played
from gauntlet.gateways.base import CannotStart
from gauntlet.processes import cpu_seconds, memory_mb
from gauntlet.scenarios import load
from gauntlet.trial import Trial

CELL_LIMIT_S = 600.0
WARM_UP = (2, 3)  # sessions and turns that are not counted, for each dialect, streamed and not
LIVE = {20: (48, 48), 100: (2, 6)}  # by turns: sessions that pay for buffers and caches, then those that are counted
NOISE_MB = 0.05  # growth below this is noise
LATER_S = 80.0  # how long those are left alone until memory is looked at once more


@dataclass(frozen=True)
class Shape:
    """So many sessions side by side, each of so many turns."""

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
    """Of one gateway in one cell."""

    cell: Cell
    cpu_ms: list[float] = field(default_factory=list)  # per turn, once for each repeat
    added_ms: list[float] = field(
        default_factory=list
    )  # of each turn of a session alone: round trip less the engine's own time
    trouble: str = ""

    @property
    def cpu(self) -> float:
        """The best repeat: noise only ever adds."""
        return min(self.cpu_ms)

    @property
    def p50(self) -> float:
        return statistics.median(self.added_ms)

    @property
    def p99(self) -> float:
        return sorted(self.added_ms)[min(len(self.added_ms) - 1, int(0.99 * len(self.added_ms)))]


@dataclass
class Costs:
    """Of one gateway."""

    base_mb: float = 0.0  # once it is ready
    session_mb: dict[int, float] = field(
        default_factory=dict
    )  # by turns: what each further session that stays open adds
    later_mb: dict[int, float] = field(default_factory=dict)  # what is left of that when nobody used it for a while
    cells: list[Cost] = field(default_factory=list)
    trouble: str = ""
    before_mb: float = 0.0  # before the sessions that are counted

    def session(self, turns: int) -> float | None:
        return self.session_mb.get(turns)

    def later(self, turns: int) -> float | None:
        return self.later_mb.get(turns)

    def cell(self, wanted: Cell) -> Cost | None:
        return next((cost for cost in self.cells if cost.cell == wanted and not cost.trouble), None)


def cells(shapes: Sequence[Shape], dialects: Sequence[str]) -> list[Cell]:
    return [Cell(dialect, streamed, shape) for shape in shapes for dialect in dialects for streamed in (False, True)]


async def measure(
    trials: Sequence[Trial], shapes: Sequence[Shape], dialects: Sequence[str], repeats: int, say: Callable[[str], None]
) -> dict[str, Costs]:
    """By gateway. One that fails in a cell has none there, and goes on."""
    found = {trial.gateway.name: Costs() for trial in trials}
    for trial in trials:
        costs = found[trial.gateway.name]
        try:
            costs.base_mb = memory_mb(trial.pid)
            await _warm_up(trial, dialects)
        except (CannotStart, TimeoutError, aiohttp.ClientError) as error:
            costs.trouble = f"{type(error).__name__}: {error}"
    for turns in dict.fromkeys(shape.turns for shape in shapes):
        for trial in _able(trials, found):
            say(f"memory of {trial.gateway.name} at {turns} turns")
            await _memory(trial, found[trial.gateway.name], turns)
        say(f"memory at {turns} turns, {LATER_S:.0f} seconds later")
        await asyncio.sleep(LATER_S)
        for trial in _able(trials, found):
            _later(trial, found[trial.gateway.name], turns)
    for cell in cells(shapes, dialects):
        for repeat in range(repeats):
            for trial in _able(trials, found):
                if cell.dialect not in trial.gateway.dialects:
                    continue
                say(f"cost of {trial.gateway.name}, {cell}, {repeat + 1} of {repeats}")
                await _cost(trial, found[trial.gateway.name], cell)
    return found


def _able(trials: Sequence[Trial], found: dict[str, Costs]) -> Iterator[Trial]:
    return (trial for trial in trials if not found[trial.gateway.name].trouble)


async def _warm_up(trial: Trial, dialects: Sequence[str]) -> None:
    """What only the first calls of a kind cost."""
    sessions, turns = WARM_UP
    async with asyncio.timeout(CELL_LIMIT_S):
        for dialect in dialects:
            if dialect in trial.gateway.dialects:
                for streamed in (False, True):
                    await _side_by_side(trial, dialect, streamed, sessions, turns)


async def _memory(trial: Trial, costs: Costs, turns: int) -> None:
    """Two at a time, none of which ends."""
    first, sessions = LIVE.get(turns, (2, 8))
    try:
        async with asyncio.timeout(CELL_LIMIT_S):
            for _ in range(first // 2):
                await _side_by_side(trial, trial.gateway.dialects[0], False, 2, turns)
            costs.before_mb = memory_mb(trial.pid)
            for _ in range(sessions // 2):
                await _side_by_side(trial, trial.gateway.dialects[0], False, 2, turns)
            costs.session_mb[turns] = max(0.0, memory_mb(trial.pid) - costs.before_mb) / sessions
    except (CannotStart, TimeoutError, aiohttp.ClientError) as error:
        costs.trouble = f"{type(error).__name__}: {error}"


def _later(trial: Trial, costs: Costs, turns: int) -> None:
    try:
        costs.later_mb[turns] = max(0.0, memory_mb(trial.pid) - costs.before_mb) / LIVE.get(turns, (2, 8))[1]
    except CannotStart as error:
        costs.trouble = f"{type(error).__name__}: {error}"


async def _cost(trial: Trial, costs: Costs, cell: Cell) -> None:
    """CPU of sessions that run side by side, then the latency of one alone."""
    cost = next((cost for cost in costs.cells if cost.cell == cell), None)
    if cost is None:
        cost = Cost(cell)
        costs.cells.append(cost)
    shape = cell.shape
    try:
        async with asyncio.timeout(CELL_LIMIT_S):
            before = cpu_seconds(trial.pid)
            played = await _side_by_side(trial, cell.dialect, cell.streamed, shape.sessions, shape.turns)
            spent = cpu_seconds(trial.pid) - before
            (alone,) = await _side_by_side(trial, cell.dialect, cell.streamed, 1, shape.turns)
    except (CannotStart, TimeoutError, aiohttp.ClientError) as error:
        cost.trouble = f"{type(error).__name__}: {error}"
        return
    cost.trouble = next((each.trouble for each in [*played, alone] if each.trouble), "")
    if not cost.trouble:
        cost.cpu_ms.append(1000 * spent / sum(len(each.taken) for each in played))
        cost.added_ms += [1000 * seconds for _, seconds in alone.latencies]


async def _side_by_side(trial: Trial, dialect: str, streamed: bool, sessions: int, turns: int) -> list[Played]:
    scenario = load(turns)
    return list(await asyncio.gather(*(trial.live(scenario, dialect, streamed) for _ in range(sessions))))
