"""Five hundred rollouts through everything that goes wrong: a tenth of them meet faults, the runner is killed, the disk is full once.

In the end every rollout is in exactly one class, no fault of others has a reward, and nothing is left: no process, no folder, no open
session. The gateway is here, and goes on while the runner, a process of its own, comes and goes.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import kit
from tests.batch.kit import ENDS, STORM
from tests.batch.test_ledger import fill
from turngate.engines.base import Generate
from turngate.engines.scripted import Turn
from turngate.rollout.ledger import Known, read
from turngate.sandboxes import folders
from turngate.server.auth import ADMIN_KEY

ROOT = Path(__file__).parents[2]


def engine(request: Generate, n: int) -> Turn:
    """Drops the connection in the middle of an answer where the task says so."""
    dropped = "This is engine" in kit.tokenizer().decode(request.prompt.tolist())
    return kit.say("Heads.", cut_after=1 if dropped else None)


class Runner:
    """`python -m tests.batch.kit`, and how far it has come."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def until(self, done: Callable[[int], bool]) -> int:
        """How many are finished when that holds, or when it has ended."""
        assert self.process.stdout is not None
        count = 0
        while line := await asyncio.wait_for(self.process.stdout.readline(), 120):
            count = int(line)
            if done(count):
                break
        return count

    async def ended(self) -> tuple[int, str]:
        """Its exit code, and what it said last."""
        assert self.process.stderr is not None
        await self.until(lambda count: False)
        said = (await self.process.stderr.read()).decode()
        return await self.process.wait(), said


@asynccontextmanager
async def runner(url: str, key: str, out: Path, root: Path) -> AsyncIterator[Runner]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.batch.kit", url, str(out), str(root)),
        cwd=ROOT,
        env={**os.environ, ADMIN_KEY: key},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )
    try:
        yield Runner(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.fixture
def disk() -> Any:
    """A small disk of its own for the batch's folder, where one can be mounted."""
    folder = Path(tempfile.mkdtemp(prefix="tg-disk-"))
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], capture_output=True)
    if made.returncode and os.environ.get("CI") == "true":
        pytest.fail(f"a disk that can be filled needs root to mount: {made.stderr.decode()}")
    yield folder, not made.returncode
    if not made.returncode:
        subprocess.run(["umount", str(folder)], check=True)
    shutil.rmtree(folder)


@pytest.fixture
def root() -> Any:
    folder = Path(tempfile.mkdtemp(prefix="tg-"))  # short, because a unix socket's path must be
    yield folder
    shutil.rmtree(folder)


async def test_five_hundred_rollouts_through_a_storm(disk: tuple[Path, bool], root: Path) -> None:
    (folder, fillable), out = disk, disk[0] / "out"
    async with kit.gateway(engine, model="m") as gateway:
        run = partial(runner, gateway.root, gateway.app.admin_key, out, root)
        async with run() as first:
            assert await first.until(lambda done: done >= 200) >= 200
            first.process.send_signal(signal.SIGKILL)
            await first.process.wait()
        before = read(out)
        assert len(before.open) > 20, "it was killed with its hands full"
        if fillable:
            async with run() as second:
                await second.until(lambda done: done >= 350)
                fill(folder)
                code, said = await second.ended()
                assert code == 3 and "the disk is full" in said, said
            (folder / "filler").unlink()
            assert_kept(before, read(out))
            before = read(out)
            assert before.open == {}, "whoever stops in order leaves nothing open"
        async with run() as third:
            assert await third.ended() == (0, "\n")
        known = read(out)
        assert_kept(before, known)
        assert_classes(known)
        sessions = await every_session(gateway)
        assert_sessions(known, sessions)
    ours = ("agent.py", f"turngate-{os.getuid()}")  # the second holds such folders, while there are any
    assert [str(path) for path in root.rglob("*") if path.name not in ours] == []
    assert marked(root) == []
    assert list(out.glob("rollouts/*/work")) == []


def assert_kept(before: Known, after: Known) -> None:
    """What was finished is as it was, and was not done again."""
    assert before.finished.items() <= after.finished.items()
    assert all(after.attempts.get(id, 0) == before.attempts.get(id, 0) for id in before.finished)


def assert_classes(known: Known) -> None:
    """Every rollout of the plan is there once, in the class that befits what befell it; and only the agents' own have a reward."""
    assert known.head is not None
    wanted = {f"{known.head.batch}.{name}.{index}" for name in STORM for index in range(4)}
    assert set(known.finished) == wanted and len(wanted) == 500
    for one in known.finished.values():
        assert one.kind == ENDS[one.task.partition("-")[0]], one
        assert (one.reward in (0.0, 1.0)) == (one.kind == "graded"), one
        assert (one.reward is None) == (one.kind != "graded"), one
    counts = Counter(one.kind for one in known.finished.values())
    assert counts == {"graded": 448, "infrastructure fault": 24, "agent failed": 12, "invalid task": 16}
    skipped = [one for one in known.finished.values() if not one.attempt]
    assert {one.kind for one in skipped} <= {"invalid task"}
    assert {one.reward for one in known.finished.values() if one.kind == "graded"} == {0.0, 1.0}


def assert_sessions(known: Known, sessions: dict[str, Any]) -> None:
    """No session is open; each belongs to one attempt, and a rollout's reward is in that of its last and in no other."""
    assert [session["id"] for session in sessions.values() if session["status"] == "open"] == []
    finished = {one.session: one for one in known.finished.values() if one.session}
    for session in sessions.values():
        outcome = session["outcome"]
        one = finished.get(session["id"])
        if one is not None and one.kind == "graded":
            assert (outcome["reward"], outcome["kind"]) == (one.reward, one.kind)
        else:
            assert outcome is None or outcome["reward"] is None
    told = [session["config"]["metadata"] for session in sessions.values()]
    attempts = Counter((one["rollout"], one["attempt"]) for one in told)
    assert set(attempts.values()) == {1}, "no agent ran twice in one attempt"


async def every_session(gateway: kit.Running) -> dict[str, Any]:
    found: dict[str, Any] = {}
    before = ""
    while True:
        page = (await gateway._ask("GET", f"/admin/sessions?limit=1000{before}"))["sessions"]
        found |= {session["id"]: session for session in page}
        if len(page) < 1000:
            return found
        before = f"&before={page[-1]['key']}"


def marked(root: Path) -> list[str]:
    """Processes of any sandbox below that folder."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                environment = (process / "environ").read_bytes()
                if f"{folders.MARK}=local-".encode() in environment and str(root).encode() in environment:
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                pass
    return found
