"""A gateway that is already running, identified by its URL and controlled through commands.

`--open` and `--record` are command lines that contain `{rollout}` and are run without a shell. They print JSON in the form of `OpenOutput`
and `RecordOutput`. Without `--record`, only what an agent notices is scored.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import aiohttp
import msgspec

from gauntlet.commands import CommandError, run_command
from gauntlet.gateways.base import CannotStart, Gateway, Record, Row, Session, Turn

Output = TypeVar("Output", "OpenOutput", "RecordOutput")
Id = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class CommandFailed(Exception):
    """The `--open` or `--record` command failed."""


@dataclass(frozen=True)
class Address:
    url: str
    key: str = "gauntlet"
    open: str = ""
    record: str = ""


class OpenOutput(msgspec.Struct, frozen=True):
    """The output of the `--open` command."""

    key: str | None = None  # default: `--key`
    base_url: str | None = None  # default: `--url`


class RowOutput(msgspec.Struct, frozen=True):
    ids: list[Id]
    mask: list[int | bool]
    logprobs: list[float | None]

    def __post_init__(self) -> None:
        sizes = len(self.ids), len(self.mask), len(self.logprobs)
        if len(set(sizes)) > 1:
            raise ValueError("`ids`, `mask` and `logprobs` differ in length: {}, {}, {}".format(*sizes))


class ForkOutput(msgspec.Struct, frozen=True):
    ids: list[Id]  # the first ids sampled after the fork
    cause: str | None  # one of `scenario.Cause`, or null if the gateway does not know


class RecordOutput(msgspec.Struct, frozen=True):
    """The output of the `--record` command."""

    turns: list[list[Id]] | None = None  # the sampled ids of each turn
    rows: list[RowOutput] | None = None
    forks: list[ForkOutput] | None = None  # None: the gateway does not report why its record forks
    refused: Annotated[int, msgspec.Meta(ge=0)] | None = None  # None: the gateway does not report refused calls


class External(Gateway):
    name = "external"
    about = "the gateway at --url"

    def __init__(self, address: Address, dialects: tuple[str, ...]) -> None:
        super().__init__()
        self.dialects = dialects
        self.trains = bool(address.record)
        self._address = address

    def command(self, engine_url: str, folder: Path) -> tuple[list[str], dict[str, str]]:
        raise CannotStart("an external gateway cannot be started")

    async def start(self, http: aiohttp.ClientSession, engine_url: str, folder: Path, limit_s: float = 120.0) -> None:
        """Check that the gateway is running."""
        try:
            async with http.get(self._address.url):
                pass
        except aiohttp.ClientError as error:
            raise CannotStart(f"nothing answers at {self._address.url}: {error}") from None

    async def open(self, http: aiohttp.ClientSession, rollout: str) -> Session:
        command = self._address.open
        opened = await _run_option("--open", command, rollout, OpenOutput) if command else OpenOutput()
        base_url = (opened.base_url or self._address.url).rstrip("/")
        return Session(rollout, base_url, opened.key or self._address.key)

    async def record(self, http: aiohttp.ClientSession, session: Session) -> Record:
        if not self._address.record:
            return Record()
        data = await _run_option("--record", self._address.record, session.id, RecordOutput)
        self.names_causes = self.names_causes or data.forks is not None
        self.reports_refusals = self.reports_refusals or data.refused is not None
        return Record(
            [Turn(tuple(ids)) for ids in data.turns or []],
            [Row(row.ids, row.mask, row.logprobs) for row in data.rows or []],
            {tuple(fork.ids): fork.cause or "" for fork in data.forks or []},
            data.refused or 0,
        )


def explain_unusable(command: str) -> str:
    """Explain why a command line cannot be run. Return an empty string if it can."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        return str(error)
    if not words:
        return "the command is empty"
    if "{rollout}" not in words[0] and shutil.which(words[0]) is None:
        return f"command not found: {words[0]}"
    return ""


async def _run_option(option: str, command: str, rollout: str, kind: type[Output]) -> Output:
    """Run the command of an option for a rollout, and decode its output. Its stderr is forwarded."""
    try:
        done = await run_command([word.replace("{rollout}", rollout) for word in shlex.split(command)])
        _forward(done.errors)
        return msgspec.convert(_parse_json(done.out), kind)
    except CommandError as error:
        _forward(error.errors)
        raise CommandFailed(f"{option} {command!r}: {error}") from None
    except (CommandFailed, msgspec.ValidationError) as error:
        raise CommandFailed(f"{option} {command!r}: {error}") from None


def _forward(errors: str) -> None:
    if errors:
        print(errors, file=sys.stderr)


def _parse_json(out: str) -> object:
    try:
        return json.loads(out)
    except ValueError:
        text = out.strip()
        raise CommandFailed(f"printed {text[:60]!r}, which is not JSON" if text else "printed nothing") from None
