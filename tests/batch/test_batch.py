"""A batch as a trainer or a person meets it: what comes of its rollouts, what stops it, and that the same plan goes on with the rest."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests import kit
from tests.batch.kit import AGENT, DECIDE, plan
from tests.batch.test_storm import engine, every_session, sandbox_processes
from tests.cli.kit import ran, refused
from tests.speed import scaled
from turngate.client.gateway import GatewayClient
from turngate.errors import ConfigError, SandboxUnavailable
from turngate.rollout.batch import Batch, BatchStopped, rollouts, run_batch
from turngate.rollout.concurrency import Bounds
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.ledger import LEDGER_NAME, AttemptStarted, FinishedRollout, Ledger, read_ledger, timestamp
from turngate.rollout.plan import BatchPlan
from turngate.rollout.progress import BatchProgress
from turngate.sandboxes.local import LocalBackend

pytestmark = [pytest.mark.process, pytest.mark.full]


class Stage:
    def __init__(self, gateway: kit.Running, client: GatewayClient, connector: GatewayConnector, root: Path) -> None:
        self.gateway, self.client, self.connector, self.root = gateway, client, connector, root
        self.out = root / "out"

    def plan(self, *names: str, **fields: Any) -> BatchPlan:
        return plan(self.out, self.root / "s", names, **{"n": 2, **fields})

    def batch(self, wanted: BatchPlan, **how: Any) -> Batch:
        return Batch(wanted, self.client, self.connector, **how)

    def left(self) -> list[str]:
        return [path.name for path in (self.root / "s").iterdir() if path.name != "agent.py"] + sandbox_processes(
            self.root
        )


@asynccontextmanager
async def open_stage() -> AsyncIterator[Stage]:
    """Nothing of any sandbox, and no open session, is there when it is struck."""
    root = Path(tempfile.mkdtemp(prefix="tg-"))
    try:
        async with (
            kit.gateway(engine, model="m") as gateway,
            GatewayClient(gateway.root, gateway.app.admin_key) as client,
            GatewayConnector(gateway.root) as connector,
        ):
            stage = Stage(gateway, client, connector, root)
            yield stage
            opened = [s["id"] for s in (await every_session(gateway)).values() if s["status"] == "open"]
            assert (stage.left(), opened) == ([], [])
    finally:
        shutil.rmtree(root)


@pytest.mark.real
async def test_each_rollout_is_in_the_class_of_what_befell_it() -> None:
    """Faults of others are tried again, each time with a session of its own; an invalid task is not."""
    async with open_stage() as stage:
        seen: list[int] = []

        def watch(tally: BatchProgress) -> None:
            seen.append(tally.done)

        wanted = stage.plan("well-0", "sandbox-0", "engine-0", "setup-0", retries=1)
        result = await run_batch(wanted, stage.client, stage.connector, watch)
        kinds = {task.task: dict(task.kinds) for task in result.summary.tasks}
        assert kinds == {
            "well-0": {"graded": 2},
            "sandbox-0": {"infrastructure fault": 2},
            "engine-0": {"infrastructure fault": 2},
            "setup-0": {"invalid task": 2},
        }
        attempts = Counter((one.task, one.attempt) for one in result.finished)
        assert attempts == {("well-0", 1): 2, ("sandbox-0", 2): 2, ("engine-0", 2): 2, ("setup-0", 1): 2}
        sessions = Counter(s["config"]["metadata"]["task"] for s in (await every_session(stage.gateway)).values())
        assert sessions == {"well-0": 2, "engine-0": 4}
        assert result.complete and result.stopped == "" and seen == sorted(seen) and seen[-1] == 8
        assert [g.task for g in result.summary.shrunken] == ["sandbox-0", "engine-0", "setup-0"]
        one = next(one for one in result.finished if one.task == "engine-0")
        assert (one.boundary, one.stage, one.reward) == ("engine", "agent", None)
        outcome = json.loads((stage.out / "rollouts" / one.session / "outcome.json").read_bytes())
        assert (outcome["rollout"], outcome["attempt"]) == (one.rollout, 2)
        again = await run_batch(wanted, stage.client, stage.connector)
        assert again.finished == result.finished, "a batch that is done is not done again"


async def test_rollouts_come_as_they_are_finished_and_closing_stops() -> None:
    async with open_stage() as stage:
        wanted = stage.plan("well-0", "hang-0", n=2, bounds=Bounds(running=3))
        async with aclosing(rollouts(wanted, stage.client, stage.connector)) as finished:
            first = await anext(finished)
            assert first.kind == "graded"
        known = read_ledger(stage.out)
        assert first.rollout in known.finished and known.open == {} and len(known.finished) < 4
        told = [one async for one in rollouts(wanted, stage.client, stage.connector)]
        assert told[0] == first, "those of an earlier run come first"
        assert {one.rollout for one in told} == set(read_ledger(stage.out).finished) and len(told) == 4


async def test_being_cancelled_ends_what_runs_and_the_same_plan_goes_on() -> None:
    async with open_stage() as stage:
        wanted = stage.plan("hang-0", "well-0", n=2, bounds=Bounds(running=2, warm=1))
        batch = stage.batch(wanted)
        running = asyncio.create_task(batch.run())
        await kit.until(lambda: batch.progress.states["run"] == 2 and batch.progress.sampled_tokens > 0, 60)
        with pytest.raises(ConfigError, match="another batch is running in"):
            await run_batch(wanted, stage.client, stage.connector)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert stage.left() == [] and not batch.result.complete
        known = read_ledger(stage.out)
        assert known.open == {} and known.faults == {}, "a cancelled attempt is not a fault"
        result = await run_batch(wanted, stage.client, stage.connector)
        assert result.complete
        assert result.summary.overall.kinds == {"graded": 2, "agent failed": 2}


async def test_an_attempt_that_the_gateway_has_the_outcome_of_is_not_run_again() -> None:
    """The runner was killed between the record at the gateway and the line in its ledger."""
    async with open_stage() as stage:
        wanted = stage.plan("well-0", n=3)
        first = await run_batch(wanted, stage.client, stage.connector)
        lines = (stage.out / LEDGER_NAME).read_bytes().splitlines(keepends=True)
        cut = next(n for n, line in enumerate(lines) if b'"finished"' in line)
        lost = msgspec.json.decode(lines[cut], type=FinishedRollout)
        (stage.out / LEDGER_NAME).write_bytes(b"".join(lines[:cut] + lines[cut + 1 :]))
        again = await run_batch(wanted, stage.client, stage.connector)
        [adopted] = [one for one in again.finished if one.rollout == lost.rollout]
        assert (adopted.session, adopted.reward, adopted.kind) == (lost.session, lost.reward, lost.kind)
        assert len(await every_session(stage.gateway)) == 3 and again.complete == first.complete is True


async def test_sessions_of_a_killed_runner_are_ended() -> None:
    """One was opened, and one was about to be."""
    async with open_stage() as stage:
        wanted = stage.plan("well-0", n=2)
        batch = (await run_batch(wanted, stage.client, stage.connector)).batch
        head = (stage.out / LEDGER_NAME).read_bytes().splitlines(keepends=True)[0]
        (stage.out / LEDGER_NAME).write_bytes(head)
        opened = await stage.client.open({"model": "m"})
        ledger = Ledger.open(stage.out)
        for index, session in enumerate((opened.id, "never-opened")):
            await ledger.add(
                AttemptStarted(rollout=f"{batch}.well-0.{index}", attempt=1, session=session, at=timestamp())
            )
        await ledger.close()
        again = await run_batch(wanted, stage.client, stage.connector)
        assert [(one.attempt, one.kind) for one in again.finished] == [(2, "graded")] * 2
        assert (await stage.client.show(opened.id)).status == "cancelled"


async def test_a_task_that_is_known_to_be_invalid_is_not_tried_any_more() -> None:
    async with open_stage() as stage:
        wanted = stage.plan("setup-0", n=8, bounds=Bounds(running=1, warm=0, grading=1))
        batch = stage.batch(wanted)
        result = await batch.run()
        assert result.summary.overall.kinds == {"invalid task": 8}
        tried = Counter(one.attempt for one in result.finished)
        assert 3 <= tried[1] <= 4 and tried[0] == 8 - tried[1], "two are looked after at once"
        assert any(
            "task setup-0 is invalid; its remaining rollouts are skipped: setup: setup.sh" in note
            for note in batch.progress.notes
        )


async def test_another_plan_on_the_same_folder_is_refused_with_what_differs() -> None:
    async with open_stage() as stage:
        await run_batch(stage.plan("well-0", n=1), stage.client, stage.connector)
        before = (stage.out / LEDGER_NAME).read_bytes()
        for other, line in (
            (stage.plan("well-0", n=2), "n: was 1, is now 2"),
            (stage.plan("well-1", n=1), "tasks: well-0 was removed; tasks: well-1 was added"),
            (stage.plan("well-0", n=1, model="other"), "model: was m, is now other"),
        ):
            with pytest.raises(ConfigError, match=line):
                await run_batch(other, stage.client, stage.connector)
        assert (stage.out / LEDGER_NAME).read_bytes() == before


# ── what stops a batch ──────────────────────────────────────────────────────────────────────────────────────────────


class Gone(LocalBackend):
    """Sandboxes could be made at first, and then no more."""

    def __init__(self, root: Path, after: int) -> None:
        super().__init__(root)
        self._left = after

    async def check(self) -> None:
        if self._left <= 0:
            raise SandboxUnavailable("the daemon is gone; start it")
        await super().check()

    async def create(self, spec: Any) -> Any:
        self._left -= 1
        return await super().create(spec)


async def test_a_sandbox_that_cannot_be_made_any_more_stops_the_batch() -> None:
    async with open_stage() as stage:
        wanted = stage.plan("well-0", n=5, bounds=Bounds(running=1, warm=0))
        broken = msgspec.structs.replace(wanted, backend=Gone(stage.root / "s", after=4))
        result = await run_batch(broken, stage.client, stage.connector)
        assert result.stopped == "sandboxes cannot be created: the daemon is gone; start it"
        assert not result.complete and read_ledger(stage.out).faults == {}
        assert all(one.kind == "graded" for one in result.finished), "nothing was burnt"
        with pytest.raises(SandboxUnavailable):
            await run_batch(broken, stage.client, stage.connector)
        assert (await run_batch(wanted, stage.client, stage.connector)).summary.overall.kinds == {"graded": 5}


async def test_a_gateway_that_is_gone_stops_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngate.rollout.health.RESTART_S", scaled(0.5))
    async with open_stage() as stage:
        wanted = stage.plan("well-0", n=2, bounds=Bounds(running=1, warm=0))
        async with GatewayClient("http://127.0.0.1:9", "x") as nobody:
            with pytest.raises(BatchStopped, match="cannot be reached"):
                _ = [one async for one in rollouts(wanted, nobody, stage.connector)]
        assert read_ledger(stage.out).finished == {}
        assert (await run_batch(wanted, stage.client, stage.connector)).complete


async def test_where_everything_fails_not_everything_is_burnt() -> None:
    async with open_stage() as stage:
        wanted = stage.plan(*(f"sandbox-{n}" for n in range(40)), n=4, retries=0, bounds=Bounds(running=4))
        result = await run_batch(wanted, stage.client, stage.connector)
        assert "attempts were all infrastructure faults" in result.stopped
        assert result.summary.overall.finished < 40


# ── as a command ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = Path(tempfile.mkdtemp(prefix="tg-"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("HOME", str(folder / "nobody"))
    (folder / "agent.py").write_text(AGENT)
    for name in ("one", "two"):
        tests = folder / "tasks" / name / "tests"
        tests.mkdir(parents=True)
        (tests.parent / "instruction.md").write_text(f"Guess. This is {name}.")
        (tests / "test.sh").write_text(DECIDE)
    yield folder
    left = [path.name for path in folder.glob("turngate-*/*")]
    shutil.rmtree(folder)
    assert left == []


def command(home: Path, *more: str) -> list[str]:
    agent = f"exec {shlex.quote(sys.executable)} -I -S {home / 'agent.py'}"
    words = ["batch", "--agent", "shell", "--set", f"command={agent}", "--tasks", str(home / "tasks")]
    return [*words, "--data", str(home / "data"), *more]


def test_the_command_tells_what_came_of_it_and_where_it_is(home: Path) -> None:
    told = ran(*command(home, "--n", "3", "--concurrency", "3", "--out", str(home / "out")))
    assert told.exit_code == 0, told.stderr
    for wanted in (
        "6 rollouts (2 tasks × 3)",
        "pass@1",
        "pass@3",
        "one ",
        "two ",
        "mean seconds per stage",
        "plot.svg",
    ):
        assert wanted in told.stdout
    summary = json.loads((home / "out" / "summary.json").read_text())
    assert summary["overall"]["graded"] == 6 and summary["overall"]["kinds"] == {"graded": 6}
    assert (home / "out" / "plot.svg").read_text().startswith("<svg")
    again = ran(*command(home, "--n", "3", "--out", str(home / "out"), "--json", "--resume"))
    assert again.exit_code == 0
    assert json.loads(again.stdout) == summary
    assert "6 of 6 rollouts are already finished" in again.stderr
    other = ran(*command(home, "--n", "2", "--out", str(home / "out")))
    assert other.exit_code == 2 and "contains a different batch (n: was 3, is now 2)" in other.stderr


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--n", "0"], "n must be at least 1, not 0"),
        (["--concurrency", "0"], "concurrency must be at least 1, not 0"),
        (["--retries", "-1"], "retries must be at least 0, not -1"),
        (
            ["--name", "a/b"],
            "name must be 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit, not 'a/b'",
        ),
        (["--only", "three"], "task: no task in"),
        (["--on-timeout", "ignore"], "on_timeout must be one of grade, exclude, zero, not 'ignore'"),
        (["--out", "/dev/null/x"], "out folder /dev/null/x is not writable"),
        (["--resume"], "resume failed: "),
    ],
)
def test_what_does_not_fit_is_refused_by_name(more: list[str], line: str, home: Path) -> None:
    assert refused(*command(home, *more)).startswith(line)


def test_ctrl_c_stops_cleanly_and_the_same_command_goes_on(home: Path) -> None:
    (home / "tasks" / "one" / "instruction.md").write_text("Guess, and hang.")
    (home / "tasks" / "one" / "task.toml").write_text(f"[agent]\ntimeout_sec = {scaled(0.75)}\n")
    words = [sys.executable, "-m", "turngate", *command(home, "--n", "2", "--concurrency", "2", "--warm", "0")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ}, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    ledger = Path(line.strip().rpartition(" in ")[2]) / LEDGER_NAME
    end = time.monotonic() + scaled(30)
    while not (ledger.is_file() and len(read_ledger(ledger.parent).open) >= 2):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=scaled(60))
    assert process.returncode == 130, said
    assert "Run the same command to resume the batch" in said
    known = read_ledger(ledger.parent)
    assert known.open == {} and known.finished == {}
    told = ran(*command(home, "--n", "2", "--concurrency", "4"))
    assert told.exit_code == 0, told.stderr
    assert len(read_ledger(ledger.parent).finished) == 4
