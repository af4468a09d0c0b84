"""A gateway that somebody else has started: known by its address, asked by commands.

`open` and `record` are shell commands with `{rollout}` in them. The first prints `{"key": …, "base_url": …}`, both optional; the
second prints `{"turns": [[ids …] …], "rows": [{"ids": […], "mask": […], "logprobs": […]} …], "forks": [{"ids": […], "cause": "…"} …]}`,
all optional too: `ids` of a fork are what was sampled first after it, causes are those of `scenario.Cause`. Without `record` only
what an agent notices is judged.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from gauntlet.gateways.base import CannotStart, Gateway, Record, Row, Session, Turn


@dataclass(frozen=True)
class Address:
    url: str
    key: str = "gauntlet"
    open: str = ""
    record: str = ""


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
        opened = await _said(self._address.open, rollout) if self._address.open else {}
        base_url = str(opened.get("base_url", self._address.url)).rstrip("/")
        return Session(rollout, base_url, str(opened.get("key", self._address.key)))

    async def record(self, http: aiohttp.ClientSession, session: Session) -> Record:
        if not self._address.record:
            return Record()
        told = await _said(self._address.record, session.id)
        rows = [Row(row["ids"], row["mask"], row["logprobs"]) for row in told.get("rows", [])]
        self.names_causes = self.names_causes or "forks" in told
        forks = {tuple(fork["ids"]): str(fork["cause"]) for fork in told.get("forks", [])}
        return Record([Turn(tuple(ids)) for ids in told.get("turns", [])], rows, forks)


async def _said(command: str, rollout: str) -> dict[str, Any]:
    words = [word.replace("{rollout}", rollout) for word in shlex.split(command)]
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    if process.returncode:
        raise CannotStart(f"{words[0]} ended with {process.returncode}")
    said: dict[str, Any] = json.loads(out)
    return said
