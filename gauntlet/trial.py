"""A gateway and the engine behind it, up and running; one rollout through them."""

from __future__ import annotations

import asyncio
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from gauntlet.agent import Agent, Played, script
from gauntlet.gateways.base import CannotStart, Gateway, Record, Session, free_port
from gauntlet.gateways.external import CommandFailed
from gauntlet.scenario import Scenario
from gauntlet.score import Score, judge
from gauntlet.voices import VOICES

_ROOT = Path(__file__).resolve().parent.parent
ROLLOUT_LIMIT_S = 60.0


@dataclass
class Rollout:
    scenario: str
    dialect: str
    streamed: bool
    score: Score
    trouble: str = ""
    silent: bool = False  # the gateway did not answer in time
    failed: bool = False  # `--open` or `--record` did: nothing is known of what was recorded


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
    if port:
        _must_be_free(port)
    port = port or free_port()
    command = [sys.executable, "-m", "gauntlet.engine", "--port", str(port)]
    process = subprocess.Popen(command, cwd=_ROOT)  # noqa: ASYNC220, S603  # our own command, and it returns at once
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 60
        while True:
            if process.poll() is not None or time.monotonic() > until:
                raise CannotStart(f"the mock engine does not start on port {port}")
            try:
                async with http.get(f"{url}/health") as response:
                    response.raise_for_status()
                    break
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)
        yield Mock(http, url)
    finally:
        process.kill()
        process.wait()


def _must_be_free(port: int) -> None:
    """Before the engine is started: its own words would be a traceback, and whoever has the port might answer in its place."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the engine itself does
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise CannotStart(f"the mock engine does not start on port {port}: {error.strerror}") from None


@dataclass
class Trial:
    gateway: Gateway
    http: aiohttp.ClientSession
    mock: Mock
    ready_s: float = 0.0

    @property
    def pid(self) -> int:
        if self.gateway.process is None:
            raise CannotStart("it is not ours to look at")
        if self.gateway.process.poll() is not None:
            raise CannotStart(f"it ended with {self.gateway.process.returncode}")
        return self.gateway.process.pid

    async def rollout(self, scenario: Scenario, dialect: str, streamed: bool) -> Rollout:
        """A scenario, judged."""
        name = secrets.token_hex(6)
        await self.mock.learn(script(scenario, name))
        nothing = Score(rollouts=1, turns=scenario.turns, best_rows=scenario.rows, faults=scenario.faults)
        rollout = Rollout(scenario.name, dialect, streamed, nothing)
        try:
            async with asyncio.timeout(ROLLOUT_LIMIT_S):
                session = await self.gateway.open(self.http, name)
                agent = Agent(
                    self.http, VOICES[dialect], scenario, name, session.base_url, session.key, stream=streamed
                )
                played = await agent.play()
                record = await self._record(session, rollout)
        except CommandFailed as error:
            rollout.trouble, rollout.failed = str(error), True
            return rollout
        except (TimeoutError, aiohttp.ClientConnectionError) as error:
            rollout.trouble, rollout.silent = f"{type(error).__name__}: {error}", True
            return rollout
        except (aiohttp.ClientError, KeyError, TypeError, ValueError) as error:
            rollout.trouble = f"{type(error).__name__}: {error}"
            return rollout
        log = await self.mock.log(name)
        await self.mock.forget(name)
        rollout.trouble = rollout.trouble or played.trouble
        rollout.score = judge(
            scenario,
            log,
            record,
            taken=played.taken,
            told=played.errors_right,
            names_causes=self.gateway.names_causes,
        )
        return rollout

    async def _record(self, session: Session, rollout: Rollout) -> Record:
        """What the gateway has; nothing where the command that should tell fails, so that it counts against the rollout."""
        try:
            return await self.gateway.record(self.http, session)
        except CommandFailed as error:
            rollout.trouble, rollout.failed = str(error), True
            return Record(rows=[])

    async def live(self, scenario: Scenario, dialect: str, streamed: bool) -> Played:
        """A rollout whose session stays open. Its latencies are without the engine's own time."""
        name = secrets.token_hex(6)
        await self.mock.learn(script(scenario, name))
        session = await self.gateway.open(self.http, name)
        voice = VOICES[dialect]
        played = await Agent(self.http, voice, scenario, name, session.base_url, session.key, stream=streamed).play()
        spent = {entry["cue"]: entry["seconds"] for entry in await self.mock.log(name)}
        played.latencies = [(cue, seconds - spent.get(cue, 0.0)) for cue, seconds in played.latencies]
        await self.mock.forget(name)
        return played


@asynccontextmanager
async def started(gateway: Gateway, http: aiohttp.ClientSession, mock: Mock) -> AsyncIterator[Trial]:
    """A gateway, installed if it has to be, that runs for as long as this is open. Raises `CannotStart`."""
    with tempfile.TemporaryDirectory(prefix=f"gauntlet-{gateway.name}-", ignore_cleanup_errors=True) as folder:
        try:
            await gateway.install()
            began = time.perf_counter()
            await gateway.start(http, mock.url, Path(folder))
            yield Trial(gateway, http, mock, time.perf_counter() - began)
        finally:
            gateway.stop()  # not in a thread: a second signal must not leave it behind
