"""A batch finishes although at least a tenth of its rollouts hit faults, the runner is killed, and the disk fills up once.

`make soak` runs 500 rollouts, the other tiers 32.

At the end every rollout is in exactly one class, only graded rollouts have a reward, and no process, folder or open session remains. The
gateway stays up in this process. The runner is a separate process that is killed and restarted.
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
from tests.batch.kit import ENDS, rollouts_of_task, running_at_once, sandbox_processes, storm_tasks
from tests.batch.test_ledger import fill
from tests.speed import SLOWNESS, scaled, slowness
from turngate.client.keys import ADMIN_KEY
from turngate.engines.base import Generate
from turngate.engines.scripted import ScriptedTurn
from turngate.rollout.ledger import LedgerState, read_ledger

pytestmark = [pytest.mark.needs("root"), pytest.mark.process, pytest.mark.alone, pytest.mark.soak, pytest.mark.full]

ROOT = Path(__file__).parents[2]


def engine(request: Generate, n: int) -> ScriptedTurn:
    """Drop the connection in the middle of an answer if the task says so."""
    dropped = "This is engine" in kit.tokenizer().decode(request.prompt.tolist())
    return kit.say("Heads.", cut_after=1 if dropped else None)


class Runner:
    """A process of `python -m tests.batch.kit`, and its progress."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def until(self, done: Callable[[int], bool]) -> int:
        """Wait until `done` holds or the runner exits. Return the number of finished rollouts."""
        assert self.process.stdout is not None
        count = 0
        while line := await asyncio.wait_for(self.process.stdout.readline(), scaled(120)):
            count = int(line)
            if done(count):
                break
        return count

    async def wait(self) -> tuple[int, str]:
        """Wait for the runner to exit. Return its exit code and its errors."""
        assert self.process.stderr is not None
        await self.until(lambda count: False)
        errors = (await self.process.stderr.read()).decode()
        return await self.process.wait(), errors


@asynccontextmanager
async def runner(url: str, key: str, out: Path, root: Path, scale: float) -> AsyncIterator[Runner]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.batch.kit", url, str(out), str(root), str(scale)),
        cwd=ROOT,
        env={**os.environ, ADMIN_KEY: key, SLOWNESS: str(slowness())},  # the plan must be the same each time
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
    """A small disk for the batch's folder."""
    folder = Path(tempfile.mkdtemp(prefix="tg-disk-"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
    shutil.rmtree(folder)


@pytest.fixture
def root() -> Any:
    folder = Path(tempfile.mkdtemp(prefix="tg-"))  # short, because the path of a unix socket must be short
    yield folder
    shutil.rmtree(folder)


@pytest.mark.real
async def test_batch_survives_faults_kill_and_full_disk(disk: Path, root: Path, storm_scale: float) -> None:
    out, names, n = disk / "out", storm_tasks(storm_scale), rollouts_of_task(storm_scale)
    count = n * len(names)
    async with kit.gateway(engine, model="m") as gateway:
        run = partial(runner, gateway.root, gateway.app.admin_key, out, root, storm_scale)
        async with run() as first:
            assert await first.until(lambda done: done >= 0.4 * count) >= 0.4 * count
            first.process.send_signal(signal.SIGKILL)
            await first.process.wait()
        before = read_ledger(out)
        assert len(before.open) > running_at_once(storm_scale) / 3, "too few rollouts were running at the kill"
        async with run() as second:
            await second.until(lambda done: done >= 0.6 * count)
            fill(disk)
            code, errors = await second.wait()
            assert code == 3 and "free up space and resume the batch" in errors, errors
        (disk / "filler").unlink()
        assert_kept(before, read_ledger(out))
        before = read_ledger(out)
        assert before.open == {}, "the runner stopped and left rollouts open"
        async with run() as third:
            assert await third.wait() == (0, "\n")
        state = read_ledger(out)
        assert_kept(before, state)
        assert_classes(state, names, n)
        sessions = await every_session(gateway)
        assert_sessions(state, sessions)
    ours = ("agent.py", f"turngate-{os.getuid()}")  # the second is where sandboxes put their folders
    assert [str(path) for path in root.rglob("*") if path.name not in ours] == []
    assert sandbox_processes(root) == {}
    assert list(out.glob("rollouts/*/work")) == []


def assert_kept(before: LedgerState, after: LedgerState) -> None:
    """Finished rollouts are unchanged and were not run again."""
    assert before.finished.items() <= after.finished.items()
    assert all(after.attempts.get(id, 0) == before.attempts.get(id, 0) for id in before.finished)


def assert_classes(state: LedgerState, names: list[str], n: int) -> None:
    """Every planned rollout is recorded once, in the class that fits its fault, and only graded ones have a reward."""
    assert state.head is not None
    expected = {f"{state.head.batch}.{name}.{index}" for name in names for index in range(n)}
    assert set(state.finished) == expected
    for rollout in state.finished.values():
        assert rollout.kind == ENDS[rollout.task.partition("-")[0]], rollout
        assert (rollout.reward in (0.0, 1.0)) == (rollout.kind == "graded"), rollout
        assert (rollout.reward is None) == (rollout.kind != "graded"), rollout
    counts = Counter(rollout.kind for rollout in state.finished.values())
    assert counts == Counter(ENDS[name.partition("-")[0]] for name in names for _ in range(n))
    skipped = [rollout for rollout in state.finished.values() if not rollout.attempt]
    assert {rollout.kind for rollout in skipped} <= {"invalid task"}
    assert {rollout.reward for rollout in state.finished.values() if rollout.kind == "graded"} == {0.0, 1.0}


def assert_sessions(state: LedgerState, sessions: dict[str, Any]) -> None:
    """No session is open, each belongs to one attempt, and only that of a rollout's last attempt has the reward."""
    assert [session["id"] for session in sessions.values() if session["status"] == "open"] == []
    finished = {rollout.session: rollout for rollout in state.finished.values() if rollout.session}
    for session in sessions.values():
        outcome = session["outcome"]
        rollout = finished.get(session["id"])
        if rollout is not None and rollout.kind == "graded":
            assert (outcome["reward"], outcome["kind"]) == (rollout.reward, rollout.kind)
        else:
            assert outcome is None or outcome["reward"] is None
    metadata = [session["config"]["metadata"] for session in sessions.values()]
    attempts = Counter((rollout["rollout"], rollout["attempt"]) for rollout in metadata)
    assert set(attempts.values()) == {1}, "an agent ran twice in one attempt"


async def every_session(gateway: kit.Running) -> dict[str, Any]:
    found: dict[str, Any] = {}
    before = ""
    while True:
        page = (await gateway._request("GET", f"/admin/sessions?limit=1000{before}"))["sessions"]
        found |= {session["id"]: session for session in page}
        if len(page) < 1000:
            return found
        before = f"&before={page[-1]['key']}"
