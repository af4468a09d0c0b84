"""Helpers for the tests of the service: the service on a scripted engine, and agents that are small programs.

    async with run_service([say("Hello.")]) as service:
        result = await service.rollouts.run(service.request('print(ask("Hi"))'))
        assert result.log_tails["stdout"] == "Hello.\\n"

The agent is the catalogue's `shell` with Python as its command; its program is the instruction, after `PRELUDE`. When the service closes,
no process, sandbox folder, task, open session or input may be left.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from tests import kit
from tests.rollout.kit import PRELUDE
from tests.speed import scaled
from turngate.engines.base import Engine
from turngate.engines.scripted import Script, Scripted, ScriptedTurn
from turngate.sandboxes import folders
from turngate.sandboxes.base import Backend
from turngate.sandboxes.local import LocalBackend
from turngate.service.catalog import Endpoint
from turngate.service.config import ServiceConfig
from turngate.service.request import RolloutRequest
from turngate.service.result import RolloutEvent
from turngate.service.rollouts import Rollouts

KEY = "scripted://m"


class Service:
    """A service and its folders."""

    def __init__(self, rollouts: Rollouts, engine: Scripted, root: Path, data: Path) -> None:
        self.rollouts = rollouts
        self.engine = engine
        self.root = root
        self.data = data

    def request(self, program: str = "", **more: Any) -> RolloutRequest:
        """A request for a rollout of a small program."""
        return RolloutRequest(
            **{"model_key": KEY, "instruction": PRELUDE + program, "agent_timeout_s": scaled(60), **more}
        )

    async def wait_for_stage(self, rollout: str, stage: str) -> None:
        """Wait until a rollout reaches a stage."""
        await kit.until(lambda: self.rollouts.state(rollout).stage == stage, 120)

    async def all_events(self, rollout: str, limit: int = 3) -> list[RolloutEvent]:
        """Read all events of a rollout, in small pages."""
        found: list[RolloutEvent] = []
        while True:
            page = await self.rollouts.events(rollout, found[-1].cursor if found else 0, limit, wait_s=120)
            found += page.events
            if page.over:
                return found

    def leftovers(self) -> list[str]:
        """Leftover sandbox processes, sandbox folders and inputs."""
        found = [path.name for path in self.root.iterdir()]
        found += [f"input {path.name}" for path in (self.data / "service" / "inputs").iterdir()]
        mark = f"{folders.SANDBOX_ENV}=local-".encode()
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                try:
                    environ = (process / "environ").read_bytes()
                    if mark in environ and str(self.root).encode() in environ:
                        found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
                except OSError:
                    pass
        return found


def config(data: Path, **more: Any) -> ServiceConfig:
    return ServiceConfig(
        **{
            "data": str(data),
            "endpoints": {KEY: Endpoint(model="m")},
            "sandbox": "local",
            "agents": ["shell"],
            "agent_options": {"shell": {"command": "exec python3 -"}},
            **more,
        }
    )


@asynccontextmanager
async def run_service(
    script: Script | Sequence[ScriptedTurn] = (),
    *,
    data: Path | None = None,
    root: Path | None = None,
    backend: Callable[[Path], Backend] = LocalBackend,
    engines: Mapping[str, Engine] = {},
    **more: Any,
) -> AsyncIterator[Service]:
    """Run a service on a scripted engine, which says "Done." without a script."""
    root = root or Path(tempfile.mkdtemp(prefix="tg-"))  # short, since the path of a unix socket is limited
    own = data is None
    data = data or Path(tempfile.mkdtemp(prefix="tg-data-", dir=kit.MEMORY_FOLDER))
    engine = Scripted(script or (lambda request, n: kit.say("Done.")), model="m", max_context=131_072)
    before = asyncio.all_tasks()
    try:
        rollouts = Rollouts(config(data, **more), backend=backend(root), engines={KEY: engine, **engines})
        service = Service(rollouts, engine, root, data)
        async with rollouts:
            yield service
        assert service.leftovers() == []
        assert engine.in_flight == 0
        assert open_sessions(data) == []
        assert {task for task in asyncio.all_tasks() - before if not task.done()} == set()
    finally:
        shutil.rmtree(root, ignore_errors=True)
        if own:
            shutil.rmtree(data, ignore_errors=True)


def open_sessions(data: Path) -> list[str]:
    """Open sessions in the stores of the service's gateways."""
    found: list[str] = []
    for store in data.glob("gateways/*/turngate.db"):
        with closing(sqlite3.connect(store)) as db:
            found += [row[0] for row in db.execute("SELECT id FROM sessions WHERE status = 'open'")]
    return found
