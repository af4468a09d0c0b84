"""The gateway cancels the sessions of killed runners, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.kit import Running, gateway, say, until
from turngate.client.gateway import GatewayClient
from turngate.common.owner import Owner, current_owner
from turngate.rollout.outcome import Outcome
from turngate.rollout.stage_events import StageEvents

pytestmark = pytest.mark.process
PRINT_OWNER = "from turngate.common.owner import current_owner as c; print(c()); import sys; sys.stdin.read()"


async def open_session(g: Running, runner: str) -> str:
    """Open a session, and announce the first stage of its rollout as a runner does."""
    session = await g.open()
    g.app.events.announce(session.id, "stage", {"stage": "sandbox", **({"runner": runner} if runner else {})})
    return session.id


async def show(g: Running, session: str) -> tuple[str, str]:
    shown: Any = await g.show(session)
    return shown["status"], shown["stop"]


async def test_session_of_killed_runner_is_cancelled_at_next_start(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PRINT_OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        runner = process.stdout.readline().strip()
        elsewhere = str(msgspec.structs.replace(current_owner(), host="another-machine", pid=1))
        async with gateway([say("Hi.")], data=tmp_path) as g:
            lost = await open_session(g, runner)
            others = [await open_session(g, text) for text in ("", "garbage", elsewhere, str(current_owner()))]
            await g.app._housekeeper._lost_runners.cancel_sessions()
            assert {await show(g, session) for session in [lost, *others]} == {("open", "")}
        process.kill()  # it stays a zombie until `wait`
        async with gateway([say("Hi.")], data=tmp_path) as g:
            await until(lambda: g.app.sessions.open_count == len(others))
            assert await show(g, lost) == ("cancelled", "runner lost")
            assert {await show(g, session) for session in others} == {("open", "")}
            shown: Any = await g.show(lost)
            assert shown["outcome"] is None
    process.wait()


async def test_running_gateway_cancels_sessions_of_killed_runner() -> None:
    done = subprocess.run([sys.executable, "-c", PRINT_OWNER], input="", capture_output=True, text=True, check=True)
    async with gateway([say("Hi.")], idle_s=2.0) as g:
        session = await open_session(g, done.stdout.strip())
        await until(lambda: not g.app.sessions.open_count, seconds=10)
        assert await show(g, session) == ("cancelled", "runner lost")


async def test_malformed_runner_is_ignored() -> None:
    """An event can come from any client with a key. It must not stop the maintenance of other sessions."""
    here = current_owner()
    texts = [f"{here.host} {here.boot} {here.namespace} {number} 1" for number in ("²", "9" * 5000, str(2**31), "-1")]
    async with gateway([say("Hi.")]) as g:
        sessions = [await open_session(g, text[:4000]) for text in texts]
        await g.app._housekeeper._lost_runners.cancel_sessions()
        assert {await show(g, session) for session in sessions} == {("open", "")}


def test_process_in_unknown_place_is_not_gone() -> None:
    other = msgspec.structs.replace(current_owner(), pid=2**22 + 1)
    assert other.gone
    assert not msgspec.structs.replace(other, boot="-", namespace="-").gone
    assert not msgspec.structs.replace(other, namespace="pid:[1]").gone


def test_process_whose_state_is_denied_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hidepid=1, /proc shows only that the processes of other users exist."""
    other = msgspec.structs.replace(current_owner(), started=1)
    assert other.gone

    def deny(path: Path) -> bytes:
        raise PermissionError

    monkeypatch.setattr(Path, "read_bytes", deny)
    assert not other.gone


@pytest.mark.parametrize(("url", "announced"), [("http://127.0.0.1:1", True), ("http://gateway.example:1", False)])
async def test_runner_is_announced_only_to_gateway_on_its_machine(url: str, announced: bool) -> None:
    """Another machine may have the same name and boot id, if both were restored from one image."""
    async with GatewayClient(url, "key") as client:
        events = StageEvents(client, "s")
        events.send("sandbox", Outcome(task="t", agent="a", version="1", sandbox="local", model="m"))
        first = events._queue.get_nowait()
    assert first is not None
    assert (first.get("runner") == str(current_owner())) is announced


def test_process_that_proc_hides_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the mount option `hidepid`, /proc does not show the processes of other users."""
    other = msgspec.structs.replace(current_owner(), pid=2**22 + 1)
    assert isinstance(other, Owner) and other.gone

    def deny(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr("os.kill", deny)
    assert not other.gone
