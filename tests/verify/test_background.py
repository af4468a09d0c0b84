"""`serve --verify-every n`: sessions are proven while the gateway serves, by a process of its own."""

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
from turngate.views.verdict import VerifierProcess

pytestmark = pytest.mark.process


async def spoken(world: World) -> Agent:
    agent = world.agent()
    agent.messages = [SYSTEM, user("Say something.")]
    await talk(agent, "something", "more")
    return agent


async def verified(world: World, session_id: str) -> GatewayEvent:
    async with asyncio.timeout(scaled(60)):
        async for event in world.gateway.events.follow(session_id):
            if event is not None and event.kind == "verified":
                return event
    raise AssertionError("the gateway stopped")


async def test_every_second_session_that_ends_is_proven_and_what_is_wrong_is_told(tmp_path: Path, caplog: Any) -> None:
    async with World.of(tmp_path, kit.renderer(), verify_every=2) as world:
        agents = [await spoken(world) for _ in range(4)]
        with closing(sqlite3.connect(tmp_path / "turngate.db", isolation_level=None)) as db:
            key = agents[3].session.key
            db.execute("UPDATE nodes SET checksum=checksum+1 WHERE session=? AND id=1", (key,))
        for agent in agents:
            await world.gateway.sessions.seal(agent.session_id)
        fine = await verified(world, agents[1].session_id)
        assert fine.data == {"ok": True, "wrong": [], "notes": 0, "forks": 0}
        told = await verified(world, agents[3].session_id)
        assert told.data["ok"] is False
        assert {wrong["check"] for wrong in told.data["wrong"]} >= {"checksum"}
        kinds = [(e.session, e.kind) for e in world.gateway.events.page() if e.kind == "verified"]
        assert [session for session, _ in kinds] == [agents[1].session_id, agents[3].session_id]
    assert any(agents[3].session_id in r.getMessage() and "checksum" in r.getMessage() for r in caplog.records)


async def test_a_gateway_that_stops_does_not_wait_for_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def never(self: VerifierProcess) -> subprocess.Popen[bytes]:
        asked.set()
        command = [sys.executable, "-c", "import time; time.sleep(3600)"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)

    monkeypatch.setattr(VerifierProcess, "_spawn", never)
    async with asyncio.timeout(scaled(20)), World.of(tmp_path, kit.renderer(), verify_every=1) as world:
        agent = await spoken(world)
        await world.gateway.sessions.seal(agent.session_id)
        await kit.until(asked.is_set)


async def test_a_deleted_session_is_not_looked_at(tmp_path: Path, caplog: Any) -> None:
    async with World.of(tmp_path, kit.renderer(), verify_every=1) as world:
        gone, kept = await spoken(world), await spoken(world)
        await world.gateway.sessions.delete(gone.session_id)
        await world.gateway.sessions.seal(kept.session_id)
        await verified(world, kept.session_id)
    assert not [r for r in caplog.records if "could not be verified" in r.getMessage()]


async def test_the_process_is_begun_again_if_it_was_killed(tmp_path: Path) -> None:
    async with World.of(tmp_path, kit.renderer()) as world:
        agent = await spoken(world)
    apart = VerifierProcess(tmp_path)
    try:
        assert (await asyncio.to_thread(apart, agent.session_id)).ok
        assert apart._process is not None
        apart._process.kill()
        with pytest.raises(StoreError, match="process exited"):
            await asyncio.to_thread(apart, agent.session_id)
        assert (await asyncio.to_thread(apart, agent.session_id)).ok
        with pytest.raises(StoreError, match="session 'nobody' is not recorded here"):
            await asyncio.to_thread(apart, "nobody")
    finally:
        apart.close()


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"verify_every must be 0 .* not -1"):
        load_config(None, {"verify_every": -1})
