"""What the Gauntlet needs of a gateway: start it in front of an engine, open a session, fetch what was recorded.

A gateway declares what it can do; what it does not claim is shown as a dash and not tried.
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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from gauntlet.tokens import cache

PACKAGE = Path(__file__).resolve().parent.parent
INSTALL_LIMIT_S = 1800.0


class CannotStart(Exception):
    """The gateway is not here, or does not come up. Says why."""


@dataclass(frozen=True)
class Session:
    id: str
    base_url: str  # without the dialect's path
    key: str


@dataclass(frozen=True)
class Row:
    """One training row, as a trainer gets it. `logprobs` may be anything where the mask is 0."""

    ids: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float | None]


@dataclass(frozen=True)
class Turn:
    """One recorded model call: its sampled ids, or its text where no ids are kept."""

    ids: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class Record:
    turns: list[Turn] = field(default_factory=list)
    rows: list[Row] | None = None  # None: this gateway makes no rows
    # By the sampled ids of a turn at which the record forks: why, in the words of `scenario.Cause`, or "" for none.
    forks: dict[tuple[int, ...], str] = field(default_factory=dict)


class Gateway(ABC):
    name: str
    about: str  # which version, how it is run
    dialects: tuple[str, ...]
    trains: bool = True  # gives tokens that can be trained
    names_causes: bool = False  # says why its record forks
    by_default: bool = True  # put through when none is named
    requirements: tuple[str, ...] = ()  # from PyPI, into an environment of its own

    def __init__(self) -> None:
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def home(self) -> Path:
        """Where a peer's environment is."""
        return cache() / "gauntlet" / self.name.partition("-")[0]

    @property
    def python(self) -> Path:
        return self.home / "bin" / "python"

    async def install(self) -> None:
        """Make the environment, once."""
        ready = self.home / ".gauntlet"
        wanted = "\n".join(self.requirements)
        if not self.requirements or (ready.exists() and ready.read_text(encoding="utf-8") == wanted):
            return
        print(f"gauntlet: making an environment for {self.name} in {self.home} …", file=sys.stderr)
        if not self.python.exists():
            await _run([sys.executable, "-m", "venv", str(self.home)])
        await _run(
            [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *self.requirements]
        )
        ready.write_text(wanted, encoding="utf-8")

    @abstractmethod
    def command(self, engine_url: str, folder: Path) -> tuple[list[str], dict[str, str]]:
        """The command line and what it adds to the environment."""

    @property
    def health(self) -> str:
        return "/health"

    @abstractmethod
    async def open(self, http: aiohttp.ClientSession, rollout: str) -> Session: ...

    @abstractmethod
    async def record(self, http: aiohttp.ClientSession, session: Session) -> Record:
        """What the gateway has of a session whose agent has ended."""

    async def start(self, http: aiohttp.ClientSession, engine_url: str, folder: Path, limit_s: float = 120.0) -> None:
        command, added = self.command(engine_url, folder)
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **added}
        log = (folder / f"{self.name}.log").open("wb")
        try:
            self.process = subprocess.Popen(  # noqa: ASYNC220, S603  # our own command, and it returns at once
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True
            )
        except OSError as error:
            raise CannotStart(f"{command[0]}: {error.strerror}") from None
        finally:
            log.close()
        until = time.monotonic() + limit_s
        while True:
            if self.process.poll() is not None:
                raise CannotStart(f"it ended with {self.process.returncode}: {_last_words(log.name)}")
            try:
                async with http.get(self.url + self.health) as response:
                    if response.status < 500:
                        return
            except aiohttp.ClientError:
                pass
            if time.monotonic() > until:
                raise CannotStart(f"not ready after {limit_s:.0f} s: {_last_words(log.name)}")
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
                os.killpg(process.pid, signal.SIGKILL)  # whatever it left: nothing else is in its session
            process.wait()


def _last_words(log: str) -> str:
    """The end of what a program wrote; its folder is about to go."""
    return " ".join(Path(log).read_text(encoding="utf-8", errors="replace").split())[-300:] or "it said nothing"


def runs(row: Row) -> list[Turn]:
    """The stretches of a row that are trained, for gateways that tell of turns in no other way."""
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


def merged(calls: Sequence[tuple[Sequence[int], Sequence[int], Sequence[float | None] | None]]) -> list[Row]:
    """Rows from single calls (prompt, sampled, log-probabilities), joined where one goes on exactly from another.

    For gateways that hand out calls and leave rows to the trainer: the best that a trainer can do with exact ids.
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


async def _run(command: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(INSTALL_LIMIT_S):
            _, told = await process.communicate()
    except TimeoutError:
        raise CannotStart(f"{' '.join(command[:4])} …: not done after {INSTALL_LIMIT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise CannotStart(f"{' '.join(command[:4])} …: {told.decode(errors='replace').strip()[-300:]}")
