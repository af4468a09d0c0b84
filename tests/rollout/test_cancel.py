"""A rollout that is cancelled, at whatever stage: no process, no folder, no open session, no task of it is left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.kit import say, until
from tests.rollout.kit import Stage, open_stage
from tests.speed import scaled
from turngate.client.gateway import GatewayClient
from turngate.rollout import rollout as one
from turngate.rollout.outcome import RolloutProgress
from turngate.rollout.rollout import Rollout
from turngate.tasks.task import Task

pytestmark = pytest.mark.process

STAGES = ["sandbox", "files", "setup", "session", "relay", "launch", "agent", "seal", "collect", "clean"]
PROGRAM = 'print(ask("Hi"), flush=True)\nos.system("sleep 1")'


async def assert_cancelled(stage: Stage, rollout: Rollout, running: asyncio.Task[Any]) -> None:
    """Wait for the end of a cancelled rollout, and check that nothing is left of it."""
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(running), scaled(30))
    over = rollout.outcome.collected.work  # it had come to its end, and was being cleaned up
    assert rollout.outcome.status == ("finished" if over else "cancelled")
    assert stage.alive() == []
    assert await stage.open_sessions() == []


@pytest.mark.parametrize("late", [0.0, 0.05], ids=["at once", "a little later"])
@pytest.mark.parametrize("where", STAGES)
async def test_nothing_is_left_of_a_rollout_that_is_cancelled(where: str, late: float, tmp_path: Any) -> None:
    (tmp_path / "file").write_text("x")
    async with open_stage() as stage:
        before = asyncio.all_tasks()

        def watch(progress: RolloutProgress) -> None:
            if progress.stage == where and not asked:
                asked.append(asyncio.get_running_loop().call_later(late, running.cancel))

        def left() -> list[asyncio.Task[Any]]:
            return [task for task in asyncio.all_tasks() - before if "turngate/rollout" in repr(task)]

        asked: list[Any] = []
        program = PROGRAM.replace("sleep 1", "sleep 3600") if where == "agent" else PROGRAM
        task = Task(
            id="t", instruction=stage.rollout(program)._spec.task.instruction, files=tmp_path, setup="sleep 0.1"
        )
        rollout = stage.rollout(task=task, watch=watch)
        running = asyncio.create_task(rollout.run())
        await asyncio.wait([running], timeout=scaled(60))
        if not running.cancelled():  # it was faster
            assert running.result().status == "finished"
            assert late and where != "agent"
        else:
            await assert_cancelled(stage, rollout, running)
        await until(lambda: left() == [])


async def test_an_agent_that_is_only_just_being_started_is_ended_too() -> None:
    """Between the order to start it and its first breath: what is not there yet cannot be killed, but must not come either."""
    async with open_stage() as stage:
        for pause in (0, 0, 0.001, 0.002, 0.005):
            rollout = stage.rollout("time.sleep(600)")
            running = asyncio.create_task(rollout.run())
            await until(lambda rollout=rollout: rollout.progress.stage == "agent", 30)
            await asyncio.sleep(pause)
            running.cancel()
            await assert_cancelled(stage, rollout, running)
            assert rollout.outcome.notes == ()


async def test_what_was_recorded_before_stays(stage_with_a_turn: tuple[Stage, Rollout, asyncio.Task[Any]]) -> None:
    stage, rollout, running = stage_with_a_turn
    running.cancel()
    await assert_cancelled(stage, rollout, running)
    outcome = rollout.outcome
    assert (outcome.turns, outcome.rows, outcome.exit_code) == (1, 1, None)
    shown = await stage.gateway.show(outcome.session)
    assert (shown["status"], shown["stop"]) == ("cancelled", "cancelled")


async def test_cancelling_again_does_not_leave_anything_behind(
    stage_with_a_turn: tuple[Stage, Rollout, asyncio.Task[Any]],
) -> None:
    """A second cancellation does not keep the sandbox from being removed."""
    stage, _, running = stage_with_a_turn
    running.cancel()
    for _ in range(3):
        await asyncio.sleep(0.05)
        running.cancel()
    await asyncio.wait([running], timeout=scaled(30))
    assert running.cancelled()
    assert stage.alive() == [] and await stage.open_sessions() == []


@pytest.fixture
async def stage_with_a_turn() -> Any:
    """In the middle: the agent has had its first reply and goes on. It does not care for SIGTERM."""
    async with open_stage([say("Hello.")]) as stage:
        program = 'import signal\nsignal.signal(15, signal.SIG_IGN)\nask("Hi")\ntime.sleep(600)'
        rollout = stage.rollout(program)
        running = asyncio.create_task(rollout.run())
        await until(lambda: rollout.progress.turns == 1, 30)
        yield stage, rollout, running


async def test_a_session_whose_opening_was_never_answered_is_ended_too() -> None:
    async with open_stage() as stage:

        class Slow(GatewayClient):
            async def open(self, config: Any, session: str | None = None, traceparent: str = "") -> Any:
                await super().open(config, session)
                opened.set()
                await asyncio.sleep(3600)

        opened = asyncio.Event()
        async with Slow(stage.gateway.root, stage.gateway.app.admin_key) as slow:
            rollout = stage.rollout("", client=slow)
            running = asyncio.create_task(rollout.run())
            await asyncio.wait_for(opened.wait(), scaled(30))
            assert len(await stage.open_sessions()) == 1
            running.cancel()
            await assert_cancelled(stage, rollout, running)
        assert rollout.outcome.session == ""


async def test_a_gateway_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngate.rollout.session.END_S", 0.3)
    monkeypatch.setattr(one, "_QUICK_COUNT_S", 0.3)
    monkeypatch.setattr(one, "_COUNT_S", 3600.0)  # is for rollouts that were not cancelled
    async with open_stage() as stage:

        class Hanging(GatewayClient):
            async def cancel(self, session: str) -> Any:
                await asyncio.sleep(3600)

            async def show(self, session: str) -> Any:
                await asyncio.sleep(3600)

        async with Hanging(stage.gateway.root, stage.gateway.app.admin_key) as hanging:
            rollout = stage.rollout("time.sleep(600)", client=hanging)
            running = asyncio.create_task(rollout.run())
            await until(lambda: rollout.progress.stage == "agent", 30)
            running.cancel()
            await asyncio.wait([running], timeout=scaled(25))
        assert running.cancelled()
        assert any("the session could not be ended" in note for note in rollout.outcome.notes)


async def test_a_crashing_watcher_does_not_leave_a_sandbox_behind() -> None:
    """Not an error of ours to hide; but what was made is cleaned up."""
    async with open_stage() as stage:

        def watch(progress: RolloutProgress) -> None:
            if progress.stage == "agent":
                raise RuntimeError("the watcher's own fault")

        with pytest.raises(RuntimeError, match="own fault"):
            await stage.run(PROGRAM, watch=watch)
        assert stage.alive() == [] and await stage.open_sessions() == []
