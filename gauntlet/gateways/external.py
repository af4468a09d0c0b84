"""A gateway that somebody else has started: known by its address, asked by commands.

`--open` and `--record` are command lines with `{rollout}` in them, run without a shell. What they print is JSON: `Opened` and `Told`
below are its shape. Without `--record` only what an agent notices is judged.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import aiohttp
import msgspec

from gauntlet.gateways.base import CannotStart, Gateway, Record, Row, Session, Turn

Printed = TypeVar("Printed", "Opened", "Told")
Id = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class CommandFailed(Exception):
    """What `--open` or `--record` names did not do its part in a rollout. Says which of them, and why."""


@dataclass(frozen=True)
class Address:
    url: str
    key: str = "gauntlet"
    open: str = ""
    record: str = ""


class Opened(msgspec.Struct, frozen=True):
    """What `--open` prints."""

    key: str | None = None  # that of `--key` unless told
    base_url: str | None = None  # that of `--url` unless told


class ToldRow(msgspec.Struct, frozen=True):
    ids: list[Id]
    mask: list[int | bool]
    logprobs: list[float | None]

    def __post_init__(self) -> None:
        sizes = len(self.ids), len(self.mask), len(self.logprobs)
        if len(set(sizes)) > 1:
            raise ValueError("`ids`, `mask` and `logprobs` are not of one length: {}, {}, {}".format(*sizes))


class ToldFork(msgspec.Struct, frozen=True):
    ids: list[Id]  # what was sampled first after the fork
    cause: str | None  # one of `scenario.Cause`; null where the gateway does not know


class Told(msgspec.Struct, frozen=True):
    """What `--record` prints."""

    turns: list[list[Id]] | None = None  # what was sampled, turn by turn
    rows: list[ToldRow] | None = None
    forks: list[ToldFork] | None = None  # None: this gateway does not say why its record forks


class External(Gateway):
    name = "external"
    about = "whatever listens there"

    def __init__(self, address: Address, dialects: tuple[str, ...]) -> None:
        super().__init__()
        self.dialects = dialects
        self.trains = bool(address.record)
        self._address = address

    def command(self, engine_url: str, folder: Path) -> tuple[list[str], dict[str, str]]:
        raise CannotStart("it is started by somebody else")

    async def start(self, http: aiohttp.ClientSession, engine_url: str, folder: Path, limit_s: float = 120.0) -> None:
        """It runs already, or should."""
        try:
            async with http.get(self._address.url):
                pass
        except aiohttp.ClientError as error:
            raise CannotStart(f"nothing answers at {self._address.url}: {error}") from None

    async def open(self, http: aiohttp.ClientSession, rollout: str) -> Session:
        command = self._address.open
        opened = await _printed("--open", command, rollout, Opened) if command else Opened()
        base_url = (opened.base_url or self._address.url).rstrip("/")
        return Session(rollout, base_url, opened.key or self._address.key)

    async def record(self, http: aiohttp.ClientSession, session: Session) -> Record:
        if not self._address.record:
            return Record()
        told = await _printed("--record", self._address.record, session.id, Told)
        self.names_causes = self.names_causes or told.forks is not None
        return Record(
            [Turn(tuple(ids)) for ids in told.turns or []],
            [Row(row.ids, row.mask, row.logprobs) for row in told.rows or []],
            {tuple(fork.ids): fork.cause or "" for fork in told.forks or []},
        )


def unusable(command: str) -> str:
    """Why a command line cannot be run at all, if so."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        return str(error)
    if not words:
        return "names no command"
    if "{rollout}" not in words[0] and shutil.which(words[0]) is None:
        return f"there is no command {words[0]}"
    return ""


async def _printed(option: str, command: str, rollout: str, kind: type[Printed]) -> Printed:
    """What a command prints for a rollout, in the shape that it should have."""
    try:
        out = await _run([word.replace("{rollout}", rollout) for word in shlex.split(command)])
        return msgspec.convert(_json(out), kind)
    except (CommandFailed, msgspec.ValidationError) as error:
        raise CommandFailed(f"{option} {command!r}: {error}") from None


async def _run(words: list[str]) -> bytes:
    """What a command prints. What it says on stderr is passed on; of one that fails, the last line is the reason."""
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(*words, stdout=pipe, stderr=pipe)
    except OSError as error:
        raise CommandFailed(f"{words[0]}: {error.strerror}") from None
    try:
        out, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = said.decode(errors="replace").strip().splitlines()
    if lines:
        print(*lines, sep="\n", file=sys.stderr)
    if process.returncode:
        raise CommandFailed(f"ended with {process.returncode}: {lines[-1] if lines else 'it said nothing'}")
    return out


def _json(out: bytes) -> object:
    try:
        return json.loads(out)
    except ValueError:
        said = out.decode(errors="replace").strip()
        raise CommandFailed(f"printed {said[:60]!r}, which is not JSON" if said else "printed nothing") from None
