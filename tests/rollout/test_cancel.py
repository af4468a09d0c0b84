"""A rollout that is cancelled at any stage leaves no process, folder, open session or asyncio task."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.kit import say, until
from tests.rollout.kit import Harness, open_harness
from tests.speed import scaled
from turngate.client.gateway import GatewayClient
from turngate.rollout import rollout as rollout_module
from turngate.rollout.outcome import RolloutProgress
from turngate.rollout.rollout import Rollout
from turngate.tasks.task import Task

pytestmark = pytest.mark.process

STAGES = ["sandbox", "files", "setup", "session", "relay", "launch", "agent", "seal", "collect", "clean"]
PROGRAM = 'print(ask("Hi"), flush=True)\nos.system("sleep 1")'


async def assert_cancelled(harness: Harness, rollout: Rollout, running: asyncio.Task[Any]) -> None:
    """Wait for the end of a cancelled rollout, and check that it left nothing behind."""
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(running), scaled(30))
    collected = rollout.outcome.collected.work  # it was cancelled while cleaning up
    assert rollout.outcome.status == ("finished" if collected else "cancelled")
    assert harness.alive() == []
    assert await harness.open_sessions() == []


@pytest.mark.sample(4)
@pytest.mark.parametrize("delay_s", [0.0, 0.05], ids=["at once", "a little later"])
@pytest.mark.parametrize("stage", STAGES)
async def test_cancelled_rollout_leaves_nothing_behind(stage: str, delay_s: float, tmp_path: Any) -> None:
    (tmp_path / "file").write_text("x")
    async with open_harness() as harness:
        before = asyncio.all_tasks()

        def watch(progress: RolloutProgress) -> None:
            if progress.stage == stage and not cancellations:
                cancellations.append(asyncio.get_running_loop().call_later(delay_s, running.cancel))

        def leftover_tasks() -> list[asyncio.Task[Any]]:
            return [task for task in asyncio.all_tasks() - before if "turngate/rollout" in repr(task)]

        cancellations: list[Any] = []
        program = PROGRAM.replace("sleep 1", "sleep 3600") if stage == "agent" else PROGRAM
        task = Task(
            id="t", instruction=harness.rollout(program)._spec.task.instruction, files=tmp_path, setup="sleep 0.1"
        )
        rollout = harness.rollout(task=task, watch=watch)
        running = asyncio.create_task(rollout.run())
        await asyncio.wait([running], timeout=scaled(60))
        if not running.cancelled():  # it finished before the cancellation
            assert running.result().status == "finished"
            assert delay_s and stage != "agent"
        else:
            await assert_cancelled(harness, rollout, running)
        await until(lambda: leftover_tasks() == [])


async def test_agent_cancelled_while_starting_is_ended() -> None:
    """The agent is cancelled between the start request and the start of its process, which must not run afterwards."""
    async with open_harness() as harness:
        for pause in (0, 0, 0.001, 0.002, 0.005):
            rollout = harness.rollout("time.sleep(600)")
            running = asyncio.create_task(rollout.run())
            await until(lambda rollout=rollout: rollout.progress.stage == "agent", 30)
            await asyncio.sleep(pause)
            running.cancel()
            await assert_cancelled(harness, rollout, running)
            assert rollout.outcome.notes == ()


async def test_turns_recorded_before_cancellation_are_kept(
    harness_with_turn: tuple[Harness, Rollout, asyncio.Task[Any]],
) -> None:
    harness, rollout, running = harness_with_turn
    running.cancel()
    await assert_cancelled(harness, rollout, running)
    outcome = rollout.outcome
    assert (outcome.turns, outcome.rows, outcome.exit_code) == (1, 1, None)
    shown = await harness.gateway.show(outcome.session)
    assert (shown["status"], shown["stop"]) == ("cancelled", "cancelled")


async def test_repeated_cancellation_leaves_nothing_behind(
    harness_with_turn: tuple[Harness, Rollout, asyncio.Task[Any]],
) -> None:
    """A second cancellation does not keep the sandbox from being removed."""
    harness, _, running = harness_with_turn
    running.cancel()
    for _ in range(3):
        await asyncio.sleep(0.05)
        running.cancel()
    await asyncio.wait([running], timeout=scaled(30))
    assert running.cancelled()
    assert harness.alive() == [] and await harness.open_sessions() == []


@pytest.fixture
async def harness_with_turn() -> Any:
    """A running rollout whose agent has received its first reply and ignores SIGTERM."""
    async with open_harness([say("Hello.")]) as harness:
        program = 'import signal\nsignal.signal(15, signal.SIG_IGN)\nask("Hi")\ntime.sleep(600)'
        rollout = harness.rollout(program)
        running = asyncio.create_task(rollout.run())
        await until(lambda: rollout.progress.turns == 1, 30)
        yield harness, rollout, running


async def test_session_with_unanswered_open_request_is_ended() -> None:
    async with open_harness() as harness:

        class Slow(GatewayClient):
            async def open(self, config: Any, session: str | None = None, traceparent: str = "") -> Any:
                await super().open(config, session)
                opened.set()
                await asyncio.sleep(3600)

        opened = asyncio.Event()
        async with Slow(harness.gateway.root, harness.gateway.app.admin_key) as slow:
            rollout = harness.rollout("", client=slow)
            running = asyncio.create_task(rollout.run())
            await asyncio.wait_for(opened.wait(), scaled(30))
            assert len(await harness.open_sessions()) == 1
            running.cancel()
            await assert_cancelled(harness, rollout, running)
        assert rollout.outcome.session == ""


async def test_hanging_gateway_does_not_delay_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngate.rollout.session.END_S", 0.3)
    monkeypatch.setattr(rollout_module, "_QUICK_COUNT_S", 0.3)
    monkeypatch.setattr(rollout_module, "_COUNT_S", 3600.0)  # for rollouts that were not cancelled
    async with open_harness() as harness:

        class Hanging(GatewayClient):
            async def cancel(self, session: str) -> Any:
                await asyncio.sleep(3600)

            async def show(self, session: str) -> Any:
                await asyncio.sleep(3600)

        async with Hanging(harness.gateway.root, harness.gateway.app.admin_key) as hanging:
            rollout = harness.rollout("time.sleep(600)", client=hanging)
            running = asyncio.create_task(rollout.run())
            await until(lambda: rollout.progress.stage == "agent", 30)
            running.cancel()
            await asyncio.wait([running], timeout=scaled(25))
        assert running.cancelled()
        assert any("the session could not be ended" in note for note in rollout.outcome.notes)
        assert any("read from the gateway: no reply within" in note for note in rollout.outcome.notes)


async def test_crashing_watcher_leaves_no_sandbox_behind() -> None:
    """The watcher's error is raised, and everything is cleaned up."""
    async with open_harness() as harness:

        def watch(progress: RolloutProgress) -> None:
            if progress.stage == "agent":
                raise RuntimeError("the watcher's own fault")

        with pytest.raises(RuntimeError, match="own fault"):
            await harness.run(PROGRAM, watch=watch)
        assert harness.alive() == [] and await harness.open_sessions() == []
