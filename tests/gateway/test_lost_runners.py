"""The gateway cancels the sessions of killed runners, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.kit import Running, gateway, say, until
from turngate.common.owner import Owner, current_owner

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


def test_process_that_proc_hides_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the mount option `hidepid`, /proc does not show the processes of other users."""
    other = msgspec.structs.replace(current_owner(), pid=2**22 + 1)
    assert isinstance(other, Owner) and other.gone

    def deny(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr("os.kill", deny)
    assert not other.gone
