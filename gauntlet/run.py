"""One run of the Gauntlet: each gateway through every scenario in every dialect, and then what all of them cost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import aiohttp

from gauntlet.costs import Costs, Shape, measure
from gauntlet.gateways.base import CannotStart, Gateway
from gauntlet.gateways.external import CommandFailed
from gauntlet.scenario import Scenario
from gauntlet.score import Score, total
from gauntlet.trial import Mock, Rollout, Trial, started

AT_ONCE = 4  # rollouts side by side
SILENT = 8  # rollouts in a row without an answer, after which a gateway is given up
KEPT = 0.99  # of the tokens that should be trained: who keeps so many exactly records exact tokens


@dataclass
class Result:
    gateway: str
    about: str
    dialects: tuple[str, ...]
    trains: bool
    names_causes: bool = False
    rollouts: list[Rollout] = field(default_factory=list)
    costs: Costs | None = None
    ready_s: float = 0.0
    trouble: str = ""
    misused: bool = False  # the trouble is with `--open` or `--record`: every rollout failed for them

    @property
    def score(self) -> Score:
        return total(rollout.score for rollout in self.rollouts)

    def part(self, dialect: str, streamed: bool) -> Score:
        return total(r.score for r in self.rollouts if r.dialect == dialect and r.streamed == streamed)

    def exact(self, dialect: str, streamed: bool) -> bool | None:
        """Whether it records exact tokens there, as measured; None if that was not tried."""
        score = self.part(dialect, streamed)
        if not score.rollouts:
            return None
        return bool(score.wanted) and score.learned >= KEPT * score.wanted and score.exact == score.trained


async def put_through(
    gateway: Gateway, http: aiohttp.ClientSession, mock: Mock, scenarios: Sequence[Scenario], dialects: Sequence[str]
) -> Result:
    """One gateway, every scenario. What it does not claim to do is not tried."""
    result = Result(gateway.name, gateway.about, gateway.dialects, gateway.trains, gateway.names_causes)
    try:
        async with started(gateway, http, mock) as trial:
            result.ready_s = trial.ready_s
            await _rollouts(result, trial, scenarios, [dialect for dialect in dialects if dialect in gateway.dialects])
    except (CannotStart, CommandFailed, aiohttp.ClientError) as error:
        result.misused = isinstance(error, CommandFailed)
        result.trouble = " ".join(str(error).split()) or type(error).__name__
    return result


async def _rollouts(result: Result, trial: Trial, scenarios: Sequence[Scenario], dialects: Sequence[str]) -> None:
    ways = [
        (scenario, dialect, streamed)
        for scenario in scenarios
        for dialect in dialects
        if not scenario.dialects or dialect in scenario.dialects
        for streamed in ((False, True) if scenario.streamed is None else (scenario.streamed,))
    ]
    done: dict[int, Rollout] = {}
    waiting = iter(enumerate(ways))
    silent = 0

    async def one_after_another() -> None:
        nonlocal silent
        for place, way in waiting:
            if trial.gateway.process is not None and trial.gateway.process.poll() is not None:
                raise CannotStart(f"it ended with {trial.gateway.process.returncode}")
            done[place] = await trial.rollout(*way)
            silent = silent + 1 if done[place].silent else 0
            if silent >= SILENT:
                raise CannotStart(f"it stopped answering: {done[place].trouble}")

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(one_after_another())
    except* CannotStart as errors:
        raise errors.exceptions[0] from None
    if done and all(rollout.failed for rollout in done.values()):
        raise CommandFailed(done[0].trouble)
    result.rollouts = [done[place] for place in sorted(done)]
    result.names_causes = trial.gateway.names_causes


async def count_costs(
    results: Sequence[Result],
    make: Callable[[str], Gateway],
    http: aiohttp.ClientSession,
    mock: Mock,
    shapes: Sequence[Shape],
    dialects: Sequence[str],
    repeats: int,
    say: Callable[[str], None],
) -> None:
    """All gateways that ran, at the same time."""
    async with AsyncExitStack() as stack:
        trials = []
        for result in results:
            if result.trouble:
                continue
            try:
                trials.append(await stack.enter_async_context(started(make(result.gateway), http, mock)))
            except CannotStart as error:
                result.costs = Costs(trouble=str(error))
        found = await measure(trials, shapes, dialects, repeats, say)
        for result in results:
            result.costs = found.get(result.gateway, result.costs)
