"""`serve --verify-every n`: sessions are verified in a separate process while the gateway serves."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests import kit
from tests.exact.agent import Agent, World
from tests.exact.test_rows import SYSTEM, talk, user
from tests.speed import scaled
from turngate.config import load_config
from turngate.errors import ConfigError, StoreError
from turngate.gateway.events import GatewayEvent
from turngate.views.background_verifier import VerifierProcess

pytestmark = pytest.mark.process


async def run_agent(world: World) -> Agent:
    agent = world.agent()
    agent.messages = [SYSTEM, user("Say something.")]
    await talk(agent, "something", "more")
    return agent


async def wait_for_verdict(world: World, session_id: str) -> GatewayEvent:
    async with asyncio.timeout(scaled(60)):
        async for page in world.gateway.events.follow(session_id):
            if found := [event for event in page if event.kind == "verified"]:
                return found[0]
    raise AssertionError("the gateway stopped")


async def test_every_second_session_is_verified_and_failures_reported(tmp_path: Path, caplog: Any) -> None:
    async with World.of(tmp_path, kit.renderer(), verify_every=2) as world:
        agents = [await run_agent(world) for _ in range(4)]
        with closing(sqlite3.connect(tmp_path / "turngate.db", isolation_level=None)) as db:
            key = agents[3].session.key
            db.execute("UPDATE nodes SET checksum=checksum+1 WHERE session=? AND id=1", (key,))
        for agent in agents:
            await world.gateway.sessions.seal(agent.session_id)
        fine = await wait_for_verdict(world, agents[1].session_id)
        assert fine.data == {"ok": True, "wrong": [], "notes": 0, "forks": 0}
        damaged = await wait_for_verdict(world, agents[3].session_id)
        assert damaged.data["ok"] is False
        assert {wrong["check"] for wrong in damaged.data["wrong"]} >= {"checksum"}
        kinds = [(e.session, e.kind) for e in world.gateway.events.page() if e.kind == "verified"]
        assert [session for session, _ in kinds] == [agents[1].session_id, agents[3].session_id]
    assert any(agents[3].session_id in r.getMessage() and "checksum" in r.getMessage() for r in caplog.records)


async def test_stopping_does_not_wait_for_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spawned = threading.Event()

    def spawn_hanging(self: VerifierProcess) -> subprocess.Popen[bytes]:
        spawned.set()
        command = [sys.executable, "-c", "import time; time.sleep(3600)"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)

    monkeypatch.setattr(VerifierProcess, "_spawn", spawn_hanging)
    async with asyncio.timeout(scaled(20)), World.of(tmp_path, kit.renderer(), verify_every=1) as world:
        agent = await run_agent(world)
        await world.gateway.sessions.seal(agent.session_id)
        await kit.until(spawned.is_set)


async def test_deleted_session_is_not_verified(tmp_path: Path, caplog: Any) -> None:
    async with World.of(tmp_path, kit.renderer(), verify_every=1) as world:
        deleted, kept = await run_agent(world), await run_agent(world)
        await world.gateway.sessions.delete(deleted.session_id)
        await world.gateway.sessions.seal(kept.session_id)
        await wait_for_verdict(world, kept.session_id)
    assert not [r for r in caplog.records if "could not be verified" in r.getMessage()]


async def test_killed_verifier_restarts(tmp_path: Path) -> None:
    async with World.of(tmp_path, kit.renderer()) as world:
        agent = await run_agent(world)
    verifier = VerifierProcess(tmp_path)
    try:
        assert (await asyncio.to_thread(verifier, agent.session_id)).ok
        assert verifier._process is not None
        verifier._process.kill()
        with pytest.raises(StoreError, match="process exited"):
            await asyncio.to_thread(verifier, agent.session_id)
        assert (await asyncio.to_thread(verifier, agent.session_id)).ok
        with pytest.raises(StoreError, match="session 'nobody' does not exist"):
            await asyncio.to_thread(verifier, "nobody")
    finally:
        verifier.close()


def test_negative_verify_every_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"verify_every must be 0 .* not -1"):
        load_config(None, {"verify_every": -1})
