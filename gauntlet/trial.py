"""Start a gateway and the mock engine behind it, and run rollouts through them."""

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

from gauntlet.agent import Agent, AgentRun, build_script
from gauntlet.clients import CLIENTS
from gauntlet.gateways.base import CannotStart, Gateway, Record, Session, free_port
from gauntlet.gateways.external import CommandFailed
from gauntlet.scenario import Scenario
from gauntlet.score import Score, score_rollout

_ROOT = Path(__file__).resolve().parent.parent
ROLLOUT_LIMIT_S = 60.0


@dataclass
class Rollout:
    scenario: str
    dialect: str
    streamed: bool
    score: Score
    error: str = ""
    silent: bool = False  # the gateway did not answer in time
    failed: bool = False  # `--open` or `--record` failed, so the record is unknown


class MockEngine:
    """A client for the process of the mock engine."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.url = url
        self._http = http

    async def add_steps(self, steps: dict[str, list[dict[str, Any]]]) -> None:
        async with self._http.post(f"{self.url}/gauntlet/steps", json=steps) as response:
            response.raise_for_status()

    async def set_extras(self, extras: dict[str, Any]) -> None:
        """Set what replies contain besides ids and log-probabilities (`sampler.Extras`), and reset the weights."""
        async with self._http.post(f"{self.url}/gauntlet/extras", json=extras) as response:
            response.raise_for_status()

    async def log(self, rollout: str) -> list[dict[str, Any]]:
        async with self._http.get(f"{self.url}/gauntlet/log", params={"rollout": rollout}) as response:
            log: list[dict[str, Any]] = await response.json()
            return log

    async def forget(self, rollout: str) -> None:
        async with self._http.delete(f"{self.url}/gauntlet/log", params={"rollout": rollout}) as response:
            response.raise_for_status()


@asynccontextmanager
async def run_engine(http: aiohttp.ClientSession, port: int = 0) -> AsyncIterator[MockEngine]:
    if port:
        _check_port_is_free(port)
    port = port or free_port()
    command = [sys.executable, "-m", "gauntlet.engine", "--port", str(port)]
    process = subprocess.Popen(command, cwd=_ROOT)  # noqa: ASYNC220, S603  # our own command; returns immediately
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 60
        while True:
            if process.poll() is not None or time.monotonic() > until:
                raise CannotStart(f"the mock engine did not start on port {port}")
            try:
                async with http.get(f"{url}/health") as response:
                    response.raise_for_status()
                    break
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)
        yield MockEngine(http, url)
    finally:
        process.kill()
        process.wait()


def _check_port_is_free(port: int) -> None:
    """Check the port before the engine is started. Otherwise another program on the port might answer in its place."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # like the engine
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise CannotStart(f"the mock engine cannot listen on port {port}: {error.strerror}") from None


def raise_if_cancelled() -> None:
    """Raise `CancelledError` if the current task was cancelled, for example by Ctrl-C.

    Ctrl-C also ends other processes, so the cleanup may fail. Its error then replaces the cancellation, and says nothing about a gateway.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


@dataclass
class Trial:
    gateway: Gateway
    http: aiohttp.ClientSession
    mock: MockEngine
    ready_s: float = 0.0

    @property
    def pid(self) -> int:
        if self.gateway.process is None:
            raise CannotStart("an external gateway's process cannot be measured")
        if self.gateway.process.poll() is not None:
            raise CannotStart(f"the gateway exited with code {self.gateway.process.returncode}")
        return self.gateway.process.pid

    async def run_rollout(self, scenario: Scenario, dialect: str, streamed: bool) -> Rollout:
        """Run a scenario and score it."""
        name = secrets.token_hex(6)
        await self.mock.add_steps(build_script(scenario, name))
        empty = Score(rollouts=1, turns=scenario.turns, best_rows=scenario.rows, faults=scenario.faults)
        rollout = Rollout(scenario.name, dialect, streamed, empty)
        try:
            async with asyncio.timeout(ROLLOUT_LIMIT_S):
                session = await self.gateway.open(self.http, name)
                agent = Agent(
                    self.http, CLIENTS[dialect], scenario, name, session.base_url, session.key, stream=streamed
                )
                played = await agent.play()
                record = await self._read_record(session, rollout)
        except CommandFailed as error:
            rollout.error, rollout.failed = str(error), True
            return rollout
        except (TimeoutError, aiohttp.ClientConnectionError) as error:
            rollout.error, rollout.silent = f"{type(error).__name__}: {error}", True
            return rollout
        except (aiohttp.ClientError, KeyError, TypeError, ValueError) as error:
            rollout.error = f"{type(error).__name__}: {error}"
            return rollout
        log = await self.mock.log(name)
        await self.mock.forget(name)
        rollout.error = rollout.error or played.error
        rollout.score = score_rollout(
            scenario,
            log,
            record,
            taken=played.taken,
            faults_reported=played.errors_right,
            refused=played.refused,
            names_causes=self.gateway.names_causes,
        )
        return rollout

    async def _read_record(self, session: Session, rollout: Rollout) -> Record:
        """Read the gateway's record. If the command fails, return an empty one, so that it counts against the rollout."""
        try:
            return await self.gateway.record(self.http, session)
        except CommandFailed as error:
            rollout.error, rollout.failed = str(error), True
            return Record(rows=[])

    async def run_open_session(self, scenario: Scenario, dialect: str, streamed: bool) -> AgentRun:
        """Run a rollout and leave its session open. Its latencies exclude the engine's own time."""
        name = secrets.token_hex(6)
        await self.mock.add_steps(build_script(scenario, name))
        session = await self.gateway.open(self.http, name)
        voice = CLIENTS[dialect]
        played = await Agent(self.http, voice, scenario, name, session.base_url, session.key, stream=streamed).play()
        spent = {entry["cue"]: entry["seconds"] for entry in await self.mock.log(name)}
        played.latencies = [(cue, seconds - spent.get(cue, 0.0)) for cue, seconds in played.latencies]
        await self.mock.forget(name)
        return played


@asynccontextmanager
async def start_gateway(gateway: Gateway, http: aiohttp.ClientSession, mock: MockEngine) -> AsyncIterator[Trial]:
    """Install the gateway if necessary, and run it for the duration of the block. Raise `CannotStart` if that fails."""
    with tempfile.TemporaryDirectory(prefix=f"gauntlet-{gateway.name}-", ignore_cleanup_errors=True) as folder:
        try:
            await gateway.install()
            began = time.perf_counter()
            await gateway.start(http, mock.url, Path(folder))
            yield Trial(gateway, http, mock, time.perf_counter() - began)
        finally:
            gateway.stop()  # not in a thread, so that a second signal cannot leave the process behind
