"""Run each gateway through every scenario in every dialect, and measure the costs of all gateways."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import aiohttp

from gauntlet.costs import Costs, Shape, measure_costs
from gauntlet.gateways.base import CannotStart, Gateway
from gauntlet.gateways.delivery import Feature, Verdict
from gauntlet.gateways.external import CommandFailed
from gauntlet.scenario import Scenario
from gauntlet.score import Score, sum_scores
from gauntlet.trial import MockEngine, Rollout, Trial, raise_if_cancelled, start_gateway

CONCURRENT_ROLLOUTS = 4
MAX_SILENT_ROLLOUTS = 8  # rollouts in a row without an answer before a gateway is abandoned
EXACT_SHARE = 0.9  # of the wanted tokens; a gateway that keeps fewer does not count as one that records exact tokens


@dataclass
class Result:
    gateway: str
    about: str
    dialects: tuple[str, ...]
    trains: bool
    names_causes: bool = False
    reports_refusals: bool = False
    rollouts: list[Rollout] = field(default_factory=list)
    costs: Costs | None = None
    ready_s: float = 0.0
    features: dict[Feature, Verdict] = field(default_factory=dict)  # empty if they were not tested
    error: str = ""
    misused: bool = False  # every rollout failed because of `--open` or `--record`

    @property
    def score(self) -> Score:
        return sum_scores(rollout.score for rollout in self.rollouts)

    def part(self, dialect: str, streamed: bool) -> Score:
        return sum_scores(r.score for r in self.rollouts if r.dialect == dialect and r.streamed == streamed)

    def exact(self, dialect: str, streamed: bool) -> bool | None:
        """Return whether the gateway recorded exact tokens there, or None if that was not tested."""
        score = self.part(dialect, streamed)
        if not score.rollouts:
            return None
        return bool(score.wanted) and score.learned >= EXACT_SHARE * score.wanted and score.exact == score.trained


async def run_scenarios(
    gateway: Gateway,
    http: aiohttp.ClientSession,
    mock: MockEngine,
    scenarios: Sequence[Scenario],
    dialects: Sequence[str],
) -> Result:
    """Run one gateway through every scenario, in the dialects that it supports."""
    result = Result(gateway.name, gateway.about, gateway.dialects, gateway.trains)
    try:
        async with start_gateway(gateway, http, mock) as trial:
            result.ready_s = trial.ready_s
            await _run_rollouts(
                result, trial, scenarios, [dialect for dialect in dialects if dialect in gateway.dialects]
            )
    except (CannotStart, CommandFailed, aiohttp.ClientError) as error:
        raise_if_cancelled()
        result.misused = isinstance(error, CommandFailed)
        result.error = " ".join(str(error).split()) or type(error).__name__
    return result


async def _run_rollouts(result: Result, trial: Trial, scenarios: Sequence[Scenario], dialects: Sequence[str]) -> None:
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

    async def run_waiting() -> None:
        nonlocal silent
        for index, way in waiting:
            if trial.gateway.process is not None and trial.gateway.process.poll() is not None:
                raise CannotStart(f"the gateway exited with code {trial.gateway.process.returncode}")
            done[index] = await trial.run_rollout(*way)
            silent = silent + 1 if done[index].silent else 0
            if silent >= MAX_SILENT_ROLLOUTS:
                raise CannotStart(f"the gateway stopped answering: {done[index].error}")

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENT_ROLLOUTS):
                group.create_task(run_waiting())
    except* CannotStart as errors:
        raise errors.exceptions[0] from None
    if done and all(rollout.failed for rollout in done.values()):
        raise CommandFailed(done[0].error)
    result.rollouts = [done[index] for index in sorted(done)]
    result.names_causes, result.reports_refusals = trial.gateway.names_causes, trial.gateway.reports_refusals


async def measure_all_costs(
    results: Sequence[Result],
    make: Callable[[str], Gateway],
    http: aiohttp.ClientSession,
    mock: MockEngine,
    shapes: Sequence[Shape],
    dialects: Sequence[str],
    repeats: int,
    say: Callable[[str], None],
) -> None:
    """Measure the costs of all gateways that ran. All of them are up at the same time."""
    async with AsyncExitStack() as stack:
        trials = []
        for result in results:
            if result.error:
                continue
            try:
                trials.append(await stack.enter_async_context(start_gateway(make(result.gateway), http, mock)))
            except CannotStart as error:
                result.costs = Costs(error=str(error))
        costs = await measure_costs(trials, shapes, dialects, repeats, say)
        for result in results:
            result.costs = costs.get(result.gateway, result.costs)
