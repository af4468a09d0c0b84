"""One run of the Gauntlet: the engine, each gateway in turn, every scenario in every dialect, and what it costs."""

from __future__ import annotations

import asyncio
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from gauntlet.agent import Agent, Played, script
from gauntlet.gateways.base import CannotStart, Gateway, free_port
from gauntlet.processes import cpu_seconds, memory_mb
from gauntlet.scenario import Scenario
from gauntlet.scenarios import load
from gauntlet.score import Score, judge, total
from gauntlet.voices import VOICES

_ROOT = Path(__file__).resolve().parent.parent
ROLLOUT_LIMIT_S = 60.0
AT_ONCE = 4  # rollouts side by side
MEMORY_BATCHES = 6


@dataclass
class Rollout:
    scenario: str
    dialect: str
    streamed: bool
    score: Score
    trouble: str = ""


@dataclass
class Cost:
    """What one shape of load costs a gateway."""

    dialect: str
    streamed: bool
    sessions: int
    turns: int
    cpu_ms: float  # per turn
    added_ms: float  # p50 of one session alone: round trip less the engine's own time
    trouble: str = ""


@dataclass
class Result:
    gateway: str
    about: str
    dialects: tuple[str, ...]
    trains: bool
    names_causes: bool = False
    rollouts: list[Rollout] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    ready_s: float = 0.0
    base_mb: float = 0.0  # once it is ready
    session_mb: float = 0.0  # what each further session that stays open adds
    trouble: str = ""

    @property
    def score(self) -> Score:
        return total(rollout.score for rollout in self.rollouts)


class Mock:
    """The engine's process, and what the Gauntlet tells it and asks of it."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.url = url
        self._http = http

    async def learn(self, steps: dict[str, list[dict[str, Any]]]) -> None:
        async with self._http.post(f"{self.url}/gauntlet/steps", json=steps) as response:
            response.raise_for_status()

    async def log(self, rollout: str) -> list[dict[str, Any]]:
        async with self._http.get(f"{self.url}/gauntlet/log", params={"rollout": rollout}) as response:
            log: list[dict[str, Any]] = await response.json()
            return log

    async def forget(self, rollout: str) -> None:
        async with self._http.delete(f"{self.url}/gauntlet/log", params={"rollout": rollout}) as response:
            response.raise_for_status()


@asynccontextmanager
async def engine(http: aiohttp.ClientSession, port: int = 0) -> AsyncIterator[Mock]:
    port = port or free_port()
    command = [sys.executable, "-m", "gauntlet.engine", "--port", str(port)]
    process = subprocess.Popen(command, cwd=_ROOT)  # noqa: ASYNC220, S603  # our own command, and it returns at once
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 60
        while True:
            try:
                async with http.get(f"{url}/health") as response:
                    response.raise_for_status()
                    break
            except aiohttp.ClientError:
                if process.poll() is not None or time.monotonic() > until:
                    raise CannotStart("the mock engine does not start") from None
                await asyncio.sleep(0.1)
        yield Mock(http, url)
    finally:
        process.terminate()
        process.wait()


@dataclass
class Trial:
    """One gateway, up and running."""

    gateway: Gateway
    http: aiohttp.ClientSession
    mock: Mock

    async def rollout(self, scenario: Scenario, dialect: str, streamed: bool) -> Rollout:
        name = secrets.token_hex(6)
        await self.mock.learn(script(scenario, name))
        try:
            async with asyncio.timeout(ROLLOUT_LIMIT_S):
                session = await self.gateway.open(self.http, name)
                agent = Agent(
                    self.http, VOICES[dialect], scenario, name, session.base_url, session.key, stream=streamed
                )
                played = await agent.play()
                record = await self.gateway.record(self.http, session)
        except (TimeoutError, aiohttp.ClientError) as error:
            score = Score(rollouts=1, turns=scenario.turns, best_rows=scenario.rows, faults=scenario.faults)
            return Rollout(scenario.name, dialect, streamed, score, f"{type(error).__name__}: {error}")
        log = await self.mock.log(name)
        await self.mock.forget(name)
        score = judge(
            scenario, log, record, taken=played.taken, told=played.errors_right, names_causes=self.gateway.names_causes
        )
        return Rollout(scenario.name, dialect, streamed, score, played.trouble)

    async def memory(self, dialect: str, turns: int) -> float:
        """Megabytes for each session that stays open, after a first batch that also pays for buffers and caches."""
        scenario = load(turns)
        await self._side_by_side(scenario, dialect, False, AT_ONCE)
        before = memory_mb(self.pid)
        for _ in range(MEMORY_BATCHES):
            await self._side_by_side(scenario, dialect, False, AT_ONCE)
        return (memory_mb(self.pid) - before) / (MEMORY_BATCHES * AT_ONCE)

    async def cost(self, dialect: str, streamed: bool, sessions: int, turns: int) -> Cost:
        """CPU of sessions that run side by side, then the latency of one alone."""
        scenario = load(turns)
        await self._side_by_side(load(2), dialect, streamed, 1)  # what only the first call of a kind costs
        before = cpu_seconds(self.pid)
        played = await self._side_by_side(scenario, dialect, streamed, sessions)
        cpu = cpu_seconds(self.pid) - before
        taken = sum(len(each.taken) for each in played)
        trouble = next((each.trouble for each in played if each.trouble), "")
        alone = await self._live(scenario, dialect, streamed)
        added = statistics.median([seconds for _, seconds in alone.latencies] or [0.0])
        return Cost(dialect, streamed, sessions, turns, 1000 * cpu / max(taken, 1), 1000 * added, trouble)

    @property
    def pid(self) -> int:
        if self.gateway.process is None:
            raise CannotStart("it is not running")
        return self.gateway.process.pid

    async def _side_by_side(self, scenario: Scenario, dialect: str, streamed: bool, sessions: int) -> list[Played]:
        return list(await asyncio.gather(*(self._live(scenario, dialect, streamed) for _ in range(sessions))))

    async def _live(self, scenario: Scenario, dialect: str, streamed: bool) -> Played:
        """A rollout whose session stays open."""
        name = secrets.token_hex(6)
        await self.mock.learn(script(scenario, name))
        session = await self.gateway.open(self.http, name)
        voice = VOICES[dialect]
        played = await Agent(self.http, voice, scenario, name, session.base_url, session.key, stream=streamed).play()
        spent = {entry["cue"]: entry["seconds"] for entry in await self.mock.log(name)}
        played.latencies = [(cue, seconds - spent.get(cue, 0.0)) for cue, seconds in played.latencies]
        await self.mock.forget(name)
        return played


async def put_through(
    gateway: Gateway,
    http: aiohttp.ClientSession,
    mock: Mock,
    scenarios: Sequence[Scenario],
    dialects: Sequence[str],
    load_shapes: Sequence[tuple[int, int]],
) -> Result:
    """One gateway, everything. What it does not claim to do is not tried."""
    result = Result(gateway.name, gateway.about, gateway.dialects, gateway.trains, gateway.names_causes)
    spoken = [dialect for dialect in dialects if dialect in gateway.dialects]
    with tempfile.TemporaryDirectory(prefix=f"gauntlet-{gateway.name}-", ignore_cleanup_errors=True) as folder:
        try:
            await asyncio.to_thread(gateway.install)
            began = time.perf_counter()
            await gateway.start(http, mock.url, Path(folder))
            result.ready_s = time.perf_counter() - began
            trial = Trial(gateway, http, mock)
            if load_shapes and spoken:
                result.base_mb = memory_mb(trial.pid)
                result.session_mb = await trial.memory(spoken[0], load_shapes[0][1])
            result.costs = await _costs(trial, spoken, load_shapes)
            result.rollouts = await _rollouts(trial, scenarios, spoken)
        except (CannotStart, aiohttp.ClientError) as error:
            result.trouble = f"{type(error).__name__}: {error}"
        finally:
            gateway.stop()  # not in a thread: a second signal must not leave it behind
    return result


async def _costs(trial: Trial, dialects: Sequence[str], shapes: Sequence[tuple[int, int]]) -> list[Cost]:
    return [
        await trial.cost(dialect, streamed, sessions, turns)
        for sessions, turns in shapes
        for dialect in dialects
        for streamed in (False, True)
    ]


async def _rollouts(trial: Trial, scenarios: Sequence[Scenario], dialects: Sequence[str]) -> list[Rollout]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(scenario: Scenario, dialect: str, streamed: bool) -> Rollout:
        async with gate:
            return await trial.rollout(scenario, dialect, streamed)

    ways = [
        (scenario, dialect, streamed)
        for scenario in scenarios
        for dialect in dialects
        if not scenario.dialects or dialect in scenario.dialects
        for streamed in ((False, True) if scenario.streamed is None else (scenario.streamed,))
    ]
    return list(await asyncio.gather(*(one(*way) for way in ways)))
