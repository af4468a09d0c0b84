"""Batches: the classes of their rollouts, what stops them, and resuming the same plan."""

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
from tests.batch.kit import AGENT, DECIDE, plan, sandbox_processes
from tests.batch.test_storm import engine, every_session
from tests.cli.kit import run_cli, run_rejected
from tests.speed import scaled
from turngate.client.gateway import GatewayClient
from turngate.client.protocol import FeedConfig
from turngate.errors import ConfigError, SandboxUnavailable
from turngate.rollout.batch import Batch, BatchStopped, rollouts, run_batch
from turngate.rollout.concurrency import Bounds
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.ledger import LEDGER_NAME, AttemptStarted, FinishedRollout, Ledger, read_ledger, timestamp
from turngate.rollout.plan import BatchPlan
from turngate.rollout.progress import BatchProgress
from turngate.sandboxes.local import LocalBackend

pytestmark = [pytest.mark.process, pytest.mark.full]


class Harness:
    def __init__(self, gateway: kit.Running, client: GatewayClient, connector: GatewayConnector, root: Path) -> None:
        self.gateway, self.client, self.connector, self.root = gateway, client, connector, root
        self.out = root / "out"

    def plan(self, *names: str, **fields: Any) -> BatchPlan:
        return plan(self.out, self.root / "s", names, **{"n": 2, **fields})

    def batch(self, plan: BatchPlan, **options: Any) -> Batch:
        return Batch(plan, self.client, self.connector, **options)

    def leftovers(self) -> list[str]:
        folders = (path.name for path in (self.root / "s").iterdir() if path.name != "agent.py")
        return [*folders, *sandbox_processes(self.root).values()]


@asynccontextmanager
async def open_harness() -> AsyncIterator[Harness]:
    """Open a harness, and check at the end that no sandbox and no open session is left."""
    root = Path(tempfile.mkdtemp(prefix="tg-"))
    try:
        async with (
            kit.gateway(engine, model="m") as gateway,
            GatewayClient(gateway.root, gateway.app.admin_key) as client,
            GatewayConnector(gateway.root) as connector,
        ):
            harness = Harness(gateway, client, connector, root)
            yield harness
            opened = [s["id"] for s in (await every_session(gateway)).values() if s["status"] == "open"]
            assert (harness.leftovers(), opened) == ([], [])
    finally:
        shutil.rmtree(root)


@pytest.mark.real
async def test_rollouts_are_classified_by_their_fault() -> None:
    """Infrastructure faults are retried, each time with a new session. An invalid task is not."""
    async with open_harness() as harness:
        seen: list[int] = []

        def watch(tally: BatchProgress) -> None:
            seen.append(tally.done)

        plan = harness.plan("well-0", "sandbox-0", "engine-0", "setup-0", retries=1)
        result = await run_batch(plan, harness.client, harness.connector, watch)
        kinds = {task.task: dict(task.kinds) for task in result.summary.tasks}
        assert kinds == {
            "well-0": {"graded": 2},
            "sandbox-0": {"infrastructure fault": 2},
            "engine-0": {"infrastructure fault": 2},
            "setup-0": {"invalid task": 2},
        }
        attempts = Counter((finished.task, finished.attempt) for finished in result.finished)
        assert attempts == {("well-0", 1): 2, ("sandbox-0", 2): 2, ("engine-0", 2): 2, ("setup-0", 1): 2}
        sessions = Counter(s["config"]["metadata"]["task"] for s in (await every_session(harness.gateway)).values())
        assert sessions == {"well-0": 2, "engine-0": 4}
        assert result.complete and result.stopped == "" and seen == sorted(seen) and seen[-1] == 8
        assert [g.task for g in result.summary.shrunken] == ["sandbox-0", "engine-0", "setup-0"]
        finished = next(finished for finished in result.finished if finished.task == "engine-0")
        assert (finished.boundary, finished.stage, finished.reward) == ("engine", "agent", None)
        outcome = json.loads((harness.out / "rollouts" / finished.session / "outcome.json").read_bytes())
        assert (outcome["rollout"], outcome["attempt"]) == (finished.rollout, 2)
        again = await run_batch(plan, harness.client, harness.connector)
        assert again.finished == result.finished, "a complete batch ran again"


async def test_rollouts_stream_as_they_finish_until_closed() -> None:
    async with open_harness() as harness:
        plan = harness.plan("well-0", "hang-0", n=2, bounds=Bounds(running=3))
        async with aclosing(rollouts(plan, harness.client, harness.connector)) as finished:
            first = await anext(finished)
            assert first.kind == "graded"
        state = read_ledger(harness.out)
        assert first.rollout in state.finished and state.open == {} and len(state.finished) < 4
        streamed = [rollout async for rollout in rollouts(plan, harness.client, harness.connector)]
        assert streamed[0] == first, "rollouts of an earlier run must come first"
        assert {rollout.rollout for rollout in streamed} == set(read_ledger(harness.out).finished) and len(
            streamed
        ) == 4


async def test_cancelled_batch_cleans_up_and_resumes() -> None:
    async with open_harness() as harness:
        plan = harness.plan("hang-0", "well-0", n=2, bounds=Bounds(running=2, warm=1))
        batch = harness.batch(plan)
        running = asyncio.create_task(batch.run())
        await kit.until(lambda: batch.progress.states["run"] == 2 and batch.progress.sampled_tokens > 0, 60)
        with pytest.raises(ConfigError, match="a batch is already running in"):
            await run_batch(plan, harness.client, harness.connector)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert harness.leftovers() == [] and not batch.result.complete
        state = read_ledger(harness.out)
        assert state.open == {} and state.faults == {}, "a cancelled attempt is not a fault"
        result = await run_batch(plan, harness.client, harness.connector)
        assert result.complete
        assert result.summary.overall.kinds == {"graded": 2, "agent failed": 2}


async def test_outcome_known_to_gateway_is_adopted() -> None:
    """The runner was killed after recording at the gateway and before writing its ledger."""
    async with open_harness() as harness:
        plan = harness.plan("well-0", n=3)
        first = await run_batch(plan, harness.client, harness.connector)
        lines = (harness.out / LEDGER_NAME).read_bytes().splitlines(keepends=True)
        cut = next(n for n, line in enumerate(lines) if b'"finished"' in line)
        lost = msgspec.json.decode(lines[cut], type=FinishedRollout)
        (harness.out / LEDGER_NAME).write_bytes(b"".join(lines[:cut] + lines[cut + 1 :]))
        again = await run_batch(plan, harness.client, harness.connector)
        [adopted] = [rollout for rollout in again.finished if rollout.rollout == lost.rollout]
        assert (adopted.session, adopted.reward, adopted.kind) == (lost.session, lost.reward, lost.kind)
        assert len(await every_session(harness.gateway)) == 3 and again.complete == first.complete is True


async def test_sessions_of_killed_runner_are_cancelled() -> None:
    """One session was open, and one had not been opened yet."""
    async with open_harness() as harness:
        plan = harness.plan("well-0", n=2)
        first, batch = (await run_batch(plan, harness.client, harness.connector)).batch, "another"
        head = (harness.out / LEDGER_NAME).read_bytes().splitlines(keepends=True)[0]
        (harness.out / LEDGER_NAME).write_bytes(head.replace(first.encode(), batch.encode()))
        opened = await harness.client.open({"model": "m"})
        ledger = Ledger.open(harness.out)
        for index, session in enumerate((opened.id, "never-opened")):
            await ledger.add(
                AttemptStarted(rollout=f"{batch}.well-0.{index}", attempt=1, session=session, at=timestamp())
            )
        await ledger.close()
        again = await run_batch(plan, harness.client, harness.connector)
        assert [(rollout.attempt, rollout.kind) for rollout in again.finished] == [(2, "graded")] * 2
        assert (await harness.client.show(opened.id)).status == "cancelled"


async def test_superseded_attempt_ends_its_rollout() -> None:
    """Another runner opens the next attempt while the agent runs: the agent is stopped, and the batch does not retry."""
    async with open_harness() as harness:
        plan = harness.plan("hang-0", n=1, timeout_s=scaled(60))
        batch = harness.batch(plan)
        running = asyncio.create_task(batch.run())
        await kit.until(lambda: batch.progress.sampled_tokens > 0, 60)
        [started] = read_ledger(harness.out).open.values()
        superseded = await harness.client.supersede(started.rollout, started.attempt)
        assert superseded.attempt.session == started.session
        [finished] = (await asyncio.wait_for(running, scaled(60))).finished
        assert (finished.kind, finished.reward, finished.attempt) == ("cancelled", None, 1)
        assert finished.message == "the session was cancelled at the gateway: its attempt was superseded"
        shown = await harness.client.show(started.session)
        assert (shown.status, shown.stop, shown.outcome) == ("cancelled", "superseded", None)


async def test_remaining_rollouts_of_invalid_task_are_skipped() -> None:
    async with open_harness() as harness:
        plan = harness.plan("setup-0", n=8, bounds=Bounds(running=1, warm=0, grading=1))
        batch = harness.batch(plan)
        result = await batch.run()
        assert result.summary.overall.kinds == {"invalid task": 8}
        tried = Counter(rollout.attempt for rollout in result.finished)
        assert 3 <= tried[1] <= 4 and tried[0] == 8 - tried[1], "two rollouts are in progress at a time"
        assert any(
            "task setup-0 is invalid; its remaining rollouts are skipped, unless one that is already running is graded; the error was: "
            "setup: the setup script failed" in note
            for note in batch.progress.notes
        )


async def test_note_about_invalid_task_names_graders_log() -> None:
    async with open_harness() as harness:
        batch = harness.batch(harness.plan("grader-0", n=3))
        result = await batch.run()
        assert {rollout.message.count("the grader fails in the same way") for rollout in result.finished} == {1}
        [note] = [note for note in batch.progress.notes if "task grader-0 is invalid" in note]
        log = note.partition("the grader's complete output is in ")[2].partition(
            "; the error was: the grader's script"
        )[0]
        assert Path(log).is_file() and Path(log).is_relative_to(harness.out)


async def test_different_plan_in_same_folder_is_refused() -> None:
    async with open_harness() as harness:
        await run_batch(harness.plan("well-0", n=1), harness.client, harness.connector)
        before = (harness.out / LEDGER_NAME).read_bytes()
        for other, line in (
            (harness.plan("well-0", n=2), "n: was 1, is now 2"),
            (harness.plan("well-1", n=1), "tasks: well-0 was removed; tasks: well-1 was added"),
            (harness.plan("well-0", n=1, model="other"), "model: was m, is now other"),
        ):
            with pytest.raises(ConfigError, match=line):
                await run_batch(other, harness.client, harness.connector)
        assert (harness.out / LEDGER_NAME).read_bytes() == before


# ── what stops a batch ──────────────────────────────────────────────────────────────────────────────────────────────


class ExhaustedBackend(LocalBackend):
    """Sandboxes can be created `after` times, then no more."""

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


class RestartedBackend(LocalBackend):
    """The second sandbox cannot be created, because the daemon restarts. It is up again after `checks` checks."""

    def __init__(self, root: Path, checks: int) -> None:
        super().__init__(root)
        self._checks = checks
        self._created = 0

    async def check(self) -> None:
        if self._created > 1 and self._checks > 0:
            self._checks -= 1
            raise SandboxUnavailable("the daemon is restarting")
        await super().check()

    async def create(self, spec: Any) -> Any:
        self._created += 1
        return await super().create(spec)


async def test_batch_waits_for_sandboxes_that_return() -> None:
    async with open_harness() as harness:
        plan = harness.plan("well-0", n=3, bounds=Bounds(running=1, warm=0))
        restarted = msgspec.structs.replace(plan, backend=RestartedBackend(harness.root / "s", checks=3))
        result = await run_batch(restarted, harness.client, harness.connector)
        assert result.stopped == "" and result.summary.overall.kinds == {"graded": 3}
        assert read_ledger(harness.out).faults, "the daemon was not missed"


async def test_unavailable_sandboxes_stop_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngate.rollout.health.RESTART_S", 0.2)
    async with open_harness() as harness:
        plan = harness.plan("well-0", n=5, bounds=Bounds(running=1, warm=0))
        broken = msgspec.structs.replace(plan, backend=ExhaustedBackend(harness.root / "s", after=4))
        result = await run_batch(broken, harness.client, harness.connector)
        assert result.stopped == "sandboxes cannot be created: the daemon is gone; start it"
        assert not result.complete and read_ledger(harness.out).faults == {}
        assert all(rollout.kind == "graded" for rollout in result.finished), "rollouts were used up"
        with pytest.raises(SandboxUnavailable):
            await run_batch(broken, harness.client, harness.connector)
        assert (await run_batch(plan, harness.client, harness.connector)).summary.overall.kinds == {"graded": 5}


async def test_unreachable_gateway_stops_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngate.rollout.health.RESTART_S", scaled(0.5))
    async with open_harness() as harness:
        plan = harness.plan("well-0", n=2, bounds=Bounds(running=1, warm=0))
        async with GatewayClient("http://127.0.0.1:9", "x") as unreachable:
            with pytest.raises(BatchStopped, match="nothing is listening at"):
                _ = [rollout async for rollout in rollouts(plan, unreachable, harness.connector)]
        assert read_ledger(harness.out).finished == {}
        assert (await run_batch(plan, harness.client, harness.connector)).complete


async def test_feed_that_wants_other_groups_is_noted_once() -> None:
    async with open_harness() as harness:
        for name, n, groups in (("large", 8, ""), ("same", 2, ""), ("other", 8, "elsewhere.")):
            await harness.client.open_feed(name, FeedConfig(n=n, groups=groups))
        batch = harness.batch(harness.plan("well-0", n=2))
        assert (await batch.run()).complete
        assert batch.progress.notes == [
            "feed large expects groups of 8, but this batch runs groups of 2; use the same n for both"
        ]
        assert [(feed.name, feed.newest) for feed in await harness.client.feeds()] == [
            ("large", 1),  # closed by the batch, so it is delivered anyway
            ("same", 1),
            ("other", 0),
        ]


async def test_batch_stops_early_if_every_attempt_fails() -> None:
    async with open_harness() as harness:
        plan = harness.plan(*(f"sandbox-{n}" for n in range(40)), n=4, retries=0, bounds=Bounds(running=4))
        result = await run_batch(plan, harness.client, harness.connector)
        assert "attempts all ended with infrastructure faults" in result.stopped
        assert result.summary.overall.finished < 40


# ── as a command ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Any:
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
    leftovers = [path.name for path in folder.glob("turngate-*/*")]
    shutil.rmtree(folder)
    assert leftovers == []


def command(folder: Path, *more: str) -> list[str]:
    agent = f"exec {shlex.quote(sys.executable)} -I -S {folder / 'agent.py'}"
    words = ["batch", "--agent", "shell", "--set", f"command={agent}", "--tasks", str(folder / "tasks")]
    return [*words, "--data", str(folder / "data"), *more]


def test_command_prints_summary_and_resumes(folder: Path) -> None:
    result = run_cli(*command(folder, "--n", "3", "--concurrency", "3", "--out", str(folder / "out")))
    assert result.exit_code == 0, result.stderr
    for text in (
        "6 rollouts (2 tasks × 3)",
        "pass@1",
        "pass@3",
        "one ",
        "two ",
        "mean seconds per stage",
        "plot.svg",
    ):
        assert text in result.stdout
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert summary["overall"]["graded"] == 6 and summary["overall"]["kinds"] == {"graded": 6}
    assert (folder / "out" / "plot.svg").read_text().startswith("<svg")
    again = run_cli(*command(folder, "--n", "3", "--out", str(folder / "out"), "--json", "--resume"))
    assert again.exit_code == 0
    assert json.loads(again.stdout) == summary
    assert "rollouts already finished: 6 of 6" in again.stderr
    one = run_cli(*command(folder, "--n", "2", "--only", "one", "--out", str(folder / "one")))
    assert "2 rollouts (1 task × 2) in" in one.stdout
    other = run_cli(*command(folder, "--n", "2", "--out", str(folder / "out")))
    assert other.exit_code == 2 and "contains a different batch (n: was 3, is now 2)" in other.stderr


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--n", "0"], "--n must be at least 1, not 0"),
        (["--concurrency", "0"], "--concurrency must be at least 1, not 0"),
        (["--retries", "-1"], "--retries must be at least 0, not -1"),
        (
            ["--name", "a/b"],
            "--name cannot be 'a/b'; use 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit",
        ),
        (["--only", "three"], "task: no task in"),
        (
            ["--script", "reference"],
            "task one: script 'reference' cannot be used: the description of the agent shell has no [shell_call]; add [shell_call]",
        ),
        (["--on-timeout", "ignore"], "--on-timeout must be one of grade, exclude, zero, not 'ignore'"),
        (["--out", "/dev/null/x"], "out: /dev/null is not a folder"),
        (["--resume"], "--resume: "),
    ],
)
def test_invalid_option_error_names_option(more: list[str], line: str, folder: Path) -> None:
    assert run_rejected(*command(folder, *more)).startswith(line)


def test_ctrl_c_stops_cleanly_and_command_resumes(folder: Path) -> None:
    (folder / "tasks" / "one" / "instruction.md").write_text("Guess, and hang.")
    (folder / "tasks" / "one" / "task.toml").write_text(f"[agent]\ntimeout_sec = {scaled(0.75)}\n")
    words = [sys.executable, "-m", "turngate", *command(folder, "--n", "2", "--concurrency", "2", "--warm", "0")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ}, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    ledger = Path(line.strip().rpartition(" in ")[2]) / LEDGER_NAME
    end = time.monotonic() + scaled(30)
    while not (ledger.is_file() and len(read_ledger(ledger.parent).open) >= 2):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=scaled(60))
    assert process.returncode == 130, output
    assert "Run the same command to resume the batch" in output
    state = read_ledger(ledger.parent)
    assert state.open == {} and state.finished == {}
    result = run_cli(*command(folder, "--n", "2", "--concurrency", "4"))
    assert result.exit_code == 0, result.stderr
    assert len(read_ledger(ledger.parent).finished) == 4
