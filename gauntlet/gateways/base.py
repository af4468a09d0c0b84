"""The interface of a gateway under test: start it in front of an engine, open a session, and fetch the record.

A gateway declares what it supports. The rest is not tested, and is shown as a dash.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from gauntlet.commands import CommandError, run_command
from gauntlet.tokens import cache_folder

if TYPE_CHECKING:
    from gauntlet.gateways.delivery import Absence, Delivery, Feature

PACKAGE = Path(__file__).resolve().parent.parent
INSTALL_LIMIT_S = 1800.0


class CannotStart(Exception):
    """The gateway is not installed or does not start."""


@dataclass(frozen=True)
class Session:
    id: str
    base_url: str  # without the dialect's path
    key: str


@dataclass(frozen=True)
class Row:
    """One training row as a trainer receives it. `logprobs` is ignored where the mask is 0."""

    ids: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float | None]


@dataclass(frozen=True)
class Turn:
    """One recorded model call: its sampled ids, or its text if ids are not recorded."""

    ids: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class Record:
    turns: list[Turn] = field(default_factory=list)
    rows: list[Row] | None = None  # None: the gateway builds no rows
    # By the sampled ids of the turn at which the record forks: a `scenario.Cause`, or "" if unknown.
    forks: dict[tuple[int, ...], str] = field(default_factory=dict)
    refused: int = 0  # calls that the gateway refused, for a gateway that reports them


class Gateway(ABC):
    name: str
    about: str  # version, and how it is run
    dialects: tuple[str, ...]
    trains: bool = True  # returns tokens that can be trained
    names_causes: bool = False  # reports why its record forks
    reports_refusals: bool = False  # its record says that the agent was refused a call
    by_default: bool = True  # run if no gateway is named
    requirements: tuple[str, ...] = ()  # PyPI packages, installed into a separate environment
    lacks: Mapping[Feature, Absence] = {}  # what its rows do not carry, and where that can be seen
    untested: Mapping[Feature, str] = {}  # what was not tested here, and why
    expert_format: str = "npy"  # of the engine that it is made for; see `sampler.Extras`

    def __init__(self) -> None:
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.feature: Feature | None = None  # what is tested, if it needs other settings; set before `start`

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def home(self) -> Path:
        """The folder of a peer's environment."""
        return cache_folder() / "gauntlet" / self.name.partition("-")[0]

    @property
    def python(self) -> Path:
        return self.home / "bin" / "python"

    @property
    def packages(self) -> Path:
        """The folder of the packages in a peer's environment."""
        return next(self.home.glob("lib/python3*/site-packages"), self.home)

    async def install(self) -> None:
        """Create the environment, unless it exists."""
        ready = self.home / ".gauntlet"
        requirements = "\n".join(self.requirements)
        if not self.requirements or (ready.exists() and ready.read_text(encoding="utf-8") == requirements):
            return
        print(f"gauntlet: creating an environment for {self.name} in {self.home} …", file=sys.stderr)
        if not self.python.exists():
            await _install([sys.executable, "-m", "venv", str(self.home)])
        await _install(
            [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *self.requirements]
        )
        ready.write_text(requirements, encoding="utf-8")

    @abstractmethod
    def command(self, engine_url: str, folder: Path) -> tuple[list[str], dict[str, str]]:
        """Return the command line and additional environment variables."""

    @property
    def health(self) -> str:
        return "/health"

    @abstractmethod
    async def open(self, http: aiohttp.ClientSession, rollout: str) -> Session: ...

    @abstractmethod
    async def record(self, http: aiohttp.ClientSession, session: Session) -> Record:
        """Return the record of a session whose agent has ended."""

    async def update_weights(self, http: aiohttp.ClientSession, version: int) -> None:
        """Have the gateway load new weights into the engine while a turn is being sampled."""
        raise NotImplementedError

    async def deliver(
        self, http: aiohttp.ClientSession, session: Session, turns: Sequence[Sequence[int]], rewards: Sequence[float]
    ) -> Delivery:
        """Return what `feature` is about, for a session whose agent has ended.

        `turns` are the sampled ids of its turns, and `rewards` their rewards, which add up to the reward of the rollout.
        """
        raise NotImplementedError

    async def start(self, http: aiohttp.ClientSession, engine_url: str, folder: Path, limit_s: float = 120.0) -> None:
        command, added = self.command(engine_url, folder)
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **added}
        log = (folder / f"{self.name}.log").open("wb")
        try:
            self.process = subprocess.Popen(  # noqa: ASYNC220, S603  # our own command; returns immediately
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True
            )
        except OSError as error:
            raise CannotStart(f"{command[0]}: {error.strerror}") from None
        finally:
            log.close()
        until = time.monotonic() + limit_s
        while True:
            if self.process.poll() is not None:
                raise CannotStart(f"exited with code {self.process.returncode}: {_log_tail(log.name)}")
            try:
                async with http.get(self.url + self.health) as response:
                    if response.status < 500:
                        return
            except aiohttp.ClientError:
                pass
            if time.monotonic() > until:
                raise CannotStart(f"not ready after {limit_s:.0f} s: {_log_tail(log.name)}")
            await asyncio.sleep(0.1)

    def stop(self) -> None:
        process = self.process
        if process is None:
            return
        try:
            process.terminate()
            process.wait(5)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(
                    process.pid, signal.SIGKILL
                )  # and the processes that it left; nothing else is in its process group
            process.wait()


def _log_tail(log: str) -> str:
    """Return the end of a log file, whose folder is about to be deleted."""
    return " ".join(Path(log).read_text(encoding="utf-8", errors="replace").split())[-300:] or "no output"


def trained_spans(row: Row) -> list[Turn]:
    """Return the trained spans of a row, for gateways that do not report turns."""
    turns: list[Turn] = []
    current: list[int] = []
    for token, trained in zip(row.ids, row.mask, strict=True):
        if trained:
            current.append(token)
        elif current:
            turns.append(Turn(tuple(current)))
            current = []
    if current:
        turns.append(Turn(tuple(current)))
    return turns


def merge_calls(calls: Sequence[tuple[Sequence[int], Sequence[int], Sequence[float | None] | None]]) -> list[Row]:
    """Build rows from single calls (prompt, sampled, log-probabilities), merging calls that extend one another exactly.

    This is the best that a trainer can do with gateways that return calls instead of rows.
    """
    rows: list[Row] = []
    for prompt, sampled, values in sorted(calls, key=lambda call: len(call[0])):
        bases = [row for row in rows if list(row.ids) == list(prompt[: len(row.ids)])]
        base = max(bases, key=lambda row: len(row.ids), default=None)
        ids, mask, logprobs = ([], [], []) if base is None else (list(base.ids), list(base.mask), list(base.logprobs))
        new = list(prompt[len(ids) :])
        usable = values is not None and len(values) == len(sampled)
        row = Row(
            [*ids, *new, *sampled],
            [*mask, *([0] * len(new)), *([int(usable)] * len(sampled))],
            [*logprobs, *([None] * len(new)), *(values if usable and values is not None else [None] * len(sampled))],
        )
        if base is not None:
            rows.remove(base)
        rows.append(row)
    return rows


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


async def _install(command: list[str]) -> None:
    try:
        await run_command(command, limit_s=INSTALL_LIMIT_S)
    except CommandError as error:
        raise CannotStart(f"{' '.join(command[:4])} …: {error.detail}") from None
