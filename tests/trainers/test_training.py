"""A whole training run with agents of their own: gone on with, stopped in the middle, and one whose agents come to nothing."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from examples import demo
from tests import kit
from tests.batch.kit import plan
from tests.engines.local_kit import model  # skips where there is no torch
from tests.speed import scaled
from turngate.client.gateway import GatewayClient
from turngate.errors import ConfigError, TurngateError
from turngate.rollout.connection import GatewayConnector
from turngate.trainers.local import checkpoint
from turngate.trainers.local.grpo import GrpoSettings, Step
from turngate.trainers.local.training import (
    StepTime,
    TimedEngine,
    TrainingCallbacks,
    TrainingEnvironment,
    TrainingGoal,
    train,
)

pytestmark = [pytest.mark.process, pytest.mark.full]


@asynccontextmanager
async def placed(data: Path) -> AsyncIterator[TrainingEnvironment]:
    engine = TimedEngine(model(vocabulary=kit.tokenizer().vocab_size), slots=8, flush_s=0.0)
    async with (
        kit.gateway(engine=engine, data=data, model="m") as gateway,
        GatewayClient(gateway.root, gateway.app.admin_key) as client,
        GatewayConnector(gateway.root) as connector,
    ):
        yield TrainingEnvironment(engine, client, connector)


@pytest.fixture
def root() -> Any:
    folder = Path(tempfile.mkdtemp(prefix="tg-"))
    yield folder
    shutil.rmtree(folder)


def goal(root: Path, steps: int, *names: str, every: int = 10, **fields: Any) -> TrainingGoal:
    session = {"limits": {"sampled_tokens": 4}}
    batch = plan(root / "out" / "rollouts", root / "s", names, **{"n": 2, "session": session, "retries": 0, **fields})
    return TrainingGoal(batch=batch, steps=steps, settings=GrpoSettings(groups=1), every=every)


def numbers(steps: list[Step]) -> list[tuple[int, int]]:
    return [(step.first, step.last) for step in steps]


async def test_a_finished_run_goes_on_when_more_steps_are_asked_for(root: Path) -> None:
    async with placed(root / "data") as place:
        first = await train(place, goal(root, 1, "well-0"), root / "out", "")
        again = await train(place, goal(root, 1, "well-0"), root / "out", "")
    assert numbers(first) == numbers(again) == [(1, 1)]
    async with placed(root / "data") as place:
        more = await train(place, goal(root, 3, "well-0"), root / "out", "")
    assert numbers(more) == [(1, 1), (2, 2), (3, 3)] and more[0] == first[0]


async def test_a_data_folder_of_another_run_is_told_as_such(root: Path) -> None:
    async with placed(root / "data") as place:
        await train(place, goal(root, 1, "well-0"), root / "out", "")
        with pytest.raises(
            ConfigError, match=r"^n was 2 and is now 4; .*: use those settings, or choose another --out"
        ):
            await train(place, goal(root, 1, "well-0", n=4), root / "new", "")
    async with placed(root / "empty") as place:
        with pytest.raises(ConfigError, match=r"^data: the checkpoint is at step 1, .*; pass the --data folder"):
            await train(place, goal(root, 2, "well-0"), root / "out", "")


async def test_what_was_learnt_is_kept_when_it_is_stopped(root: Path) -> None:
    made = asyncio.Event()

    def stepped(step: Step, shares: StepTime) -> None:
        made.set()

    async with placed(root / "data") as place:
        running = asyncio.create_task(
            train(place, goal(root, 50, "well-0"), root / "out", "", TrainingCallbacks(step=stepped)), name="run"
        )
        await asyncio.wait_for(made.wait(), scaled(60))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        found = checkpoint.find_newest(root / "out" / "checkpoints")
        assert found is not None and found.state.step >= 1
        fence = await place.gateway.fence()
        assert (fence.paused, fence.version) == (False, found.state.version)
        assert (await place.gateway.show_feed("grpo")).committed == found.state.number


async def test_agents_that_come_to_nothing_keep_no_trainer_waiting(root: Path) -> None:
    async with placed(root / "data") as place:
        with pytest.raises(
            TurngateError,
            match=r"finished after 1 of 2 steps, because too few groups had graded rollouts \(missing: 1\)",
        ):
            await asyncio.wait_for(train(place, goal(root, 2, "well-0", "sandbox-0"), root / "out", ""), scaled(60))


def test_what_nothing_could_be_learnt_from_is_refused_at_once(root: Path) -> None:
    with pytest.raises(ConfigError, match="n must be at least 2, because advantages compare"):
        goal(root, 1, "well-0", n=1)
    with pytest.raises(ConfigError, match="every must be at least 1, not 0"):
        goal(root, 1, "well-0", every=0)
    fine = goal(root, 1, "well-0").batch
    ungraded = msgspec.structs.replace(fine.tasks[0], grader=None)
    with pytest.raises(ConfigError, match="tasks: 'well-0' has no grader"):
        TrainingGoal(batch=msgspec.structs.replace(fine, tasks=(ungraded,)), steps=1)


def test_the_fast_demo_promises_what_the_whole_one_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert "better" not in demo.TOO_SHORT and f"{demo.STEPS} updates" in demo.TOO_SHORT
    with pytest.raises(SystemExit):
        demo.parse_options(["--help"])
    assert "two to three minutes" in capsys.readouterr().out
