"""Tests for complete training runs with agents: resumed, cancelled, and with failing agents."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from examples import demo
from tests import kit
from tests.batch.kit import plan
from tests.engines.local_kit import make_request, model  # skips if torch is missing
from tests.speed import scaled
from turngate.client.feed import Row
from turngate.client.gateway import GatewayClient
from turngate.errors import ConfigError, TurngateError
from turngate.rollout.connection import GatewayConnector
from turngate.store.store import Store
from turngate.trainers.local import checkpoint
from turngate.trainers.local.grpo import GrpoSettings, Learner, Step, UpdateMetrics
from turngate.trainers.local.training import (
    StepTime,
    TimedEngine,
    TrainingCallbacks,
    TrainingEnvironment,
    TrainingGoal,
    _open_feed,
    _StepClock,
    train,
)

pytestmark = [pytest.mark.process, pytest.mark.full]


@asynccontextmanager
async def training_environment(data: Path) -> AsyncIterator[TrainingEnvironment]:
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


def delivery_ranges(steps: list[Step]) -> list[tuple[int, int]]:
    return [(step.first, step.last) for step in steps]


async def test_finished_run_continues_with_more_steps(root: Path) -> None:
    async with training_environment(root / "data") as environment:
        first = await train(environment, goal(root, 1, "well-0"), root / "out", "")
        again = await train(environment, goal(root, 1, "well-0"), root / "out", "")
    assert delivery_ranges(first) == delivery_ranges(again) == [(1, 1)]
    async with training_environment(root / "data") as environment:
        more = await train(environment, goal(root, 3, "well-0"), root / "out", "")
    assert delivery_ranges(more) == [(1, 1), (2, 2), (3, 3)] and more[0] == first[0]


async def test_run_continues_on_trees(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The feed is the same; only its rows are delivered in another form."""
    trained: list[Row] = []
    gradients = Learner.gradients

    def note_rows(learner: Learner, rows: Sequence[Row], version: int) -> UpdateMetrics:
        trained.extend(rows)
        return gradients(learner, rows, version)

    monkeypatch.setattr(Learner, "gradients", note_rows)
    on_trees = GrpoSettings(groups=1, prefix_tree=True)
    async with training_environment(root / "data") as environment:
        await train(environment, goal(root, 1, "well-0"), root / "out", "")
        flat = len(trained)
        more = msgspec.structs.replace(goal(root, 2, "well-0"), settings=on_trees)
        steps = await train(environment, more, root / "out", "")
    assert delivery_ranges(steps) == [(1, 1), (2, 2)]
    assert [row.path is not None for row in trained] == [False] * flat + [True] * (len(trained) - flat)
    assert 0 < flat < len(trained)
    assert all(step.measured.difference is not None and step.measured.difference < 1e-4 for step in steps)


async def test_data_folder_of_other_run_is_rejected(root: Path) -> None:
    async with training_environment(root / "data") as environment:
        await train(environment, goal(root, 1, "well-0"), root / "out", "")
        with pytest.raises(
            ConfigError,
            match=r"recorded in this store \(n was 2 and is now 4\); use that run's settings, or choose another --out",
        ):
            await train(environment, goal(root, 1, "well-0", n=4), root / "new", "")
    async with training_environment(root / "empty") as environment:
        with pytest.raises(ConfigError, match=r"^data: the checkpoint is at step 1, .*; pass the --data of that run"):
            await train(environment, goal(root, 2, "well-0"), root / "out", "")


async def test_restored_store_says_where_to_continue(root: Path) -> None:
    async with training_environment(root / "data") as environment:
        await train(environment, goal(root, 1, "well-0"), root / "out", "")
    newest = checkpoint.find_newest(root / "out" / "checkpoints")
    assert newest is not None
    lost = msgspec.structs.replace(newest.state, step=5, number=5)
    with closing(Store(root / "data")) as store:
        store.restores.note("")
    async with training_environment(root / "data") as environment:
        client, again = environment.gateway, goal(root, 6, "well-0")
        with pytest.raises(
            ConfigError,
            match=r"^data: feed 'grpo': the store was restored from a backup.* Continue with after=1 and the mark '.*'; .*"
            r"In trainer.json in the checkpoint of step 5, set 'number' to this value of 'after', and 'mark' to this mark$",
        ):
            await _open_feed(client, again, lost, print)
        mark = (await client.show_feed("grpo")).mark
        async with await _open_feed(client, again, msgspec.structs.replace(lost, number=1, mark=mark), print) as feed:
            assert feed.mark == mark


async def test_cancelled_run_keeps_checkpoint(root: Path) -> None:
    stepped_once = asyncio.Event()

    def on_step(step: Step, shares: StepTime) -> None:
        stepped_once.set()

    async with training_environment(root / "data") as environment:
        running = asyncio.create_task(
            train(environment, goal(root, 50, "well-0"), root / "out", "", TrainingCallbacks(step=on_step)), name="run"
        )
        await asyncio.wait_for(stepped_once.wait(), scaled(60))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        found = checkpoint.find_newest(root / "out" / "checkpoints")
        assert found is not None and found.state.step >= 1
        fence = await environment.gateway.fence()
        assert (fence.paused, fence.version) == (False, found.state.version)
        assert (await environment.gateway.show_feed("grpo")).committed == found.state.number


async def test_ungraded_groups_end_run(root: Path) -> None:
    async with training_environment(root / "data") as environment:
        with pytest.raises(
            TurngateError,
            match=r"stopped after 1 of 2 steps: .* the feed received too few groups for the remaining steps \(missing groups: 1\)",
        ):
            await asyncio.wait_for(
                train(environment, goal(root, 2, "well-0", "sandbox-0"), root / "out", ""), scaled(60)
            )


async def test_run_from_before_sampling_masks_resumes_without_them(root: Path) -> None:
    notes: list[str] = []
    async with training_environment(root / "data") as environment:
        client, state = environment.gateway, checkpoint.TrainerState()
        pinned = goal(root, 1, "well-0", session={"sampling": {"top_p": 0.9}})
        before = msgspec.structs.replace(pinned.feed_config(), side=msgspec.UNSET)
        await client.open_feed(pinned.feed_name, before)
        async with await _open_feed(client, pinned, state, notes.append) as feed:
            assert feed.config == before
        assert len(notes) == 1 and "turns with top-p, top-k or min-p are still not trained" in notes[0]
        with pytest.raises(ConfigError, match="n was 2 and is now 3"):
            await _open_feed(client, goal(root, 1, "well-0", n=3, session=pinned.batch.session), state, notes.append)
        new = msgspec.structs.replace(pinned, feed_name="new")
        async with await _open_feed(client, new, state, notes.append) as feed:
            assert feed.config.side == ("sampling_mask",) and len(notes) == 1


async def test_calls_count_in_the_steps_in_which_they_run() -> None:
    step: Any = SimpleNamespace(seconds={"train": 0.0})
    engine = TimedEngine(model(), slots=2, flush_s=0.0)
    await engine.start()
    clock = _StepClock(engine)
    async with engine.generate(make_request([1], 5)):
        await asyncio.sleep(0.2)
        laps = [clock.lap(step)]
        await asyncio.sleep(0.1)
        laps.append(clock.lap(step))
    laps.append(clock.lap(step))
    await engine.close()
    assert laps[0].sampling >= 0.2 and laps[1].sampling >= 0.1
    assert all(lap.sampling <= lap.whole + 1e-6 for lap in laps)  # rounding


def test_invalid_goals_are_config_errors(root: Path) -> None:
    with pytest.raises(ConfigError, match="n must be at least 2, because advantages compare"):
        goal(root, 1, "well-0", n=1)
    with pytest.raises(ConfigError, match="'every' must be at least 1, not 0"):
        goal(root, 1, "well-0", every=0)
    fine = goal(root, 1, "well-0").batch
    with pytest.raises(ConfigError, match="'ahead' must be at least 1, not 0"):
        TrainingGoal(batch=fine, steps=1, ahead=0)
    with pytest.raises(
        ConfigError, match=r"'ahead' must be at least 'settings\.groups' \(3\), not 2.*set 'ahead' to 3 or more"
    ):
        TrainingGoal(batch=fine, steps=1, settings=GrpoSettings(groups=3), ahead=2)
    assert TrainingGoal(batch=fine, steps=1, settings=GrpoSettings(groups=3), ahead=3).ahead == 3
    ungraded = msgspec.structs.replace(fine.tasks[0], grader=None)
    with pytest.raises(ConfigError, match="'advantages' is 'turn', but the feed does not deliver"):
        TrainingGoal(batch=fine, steps=1, settings=GrpoSettings(advantages="turn"))
    with pytest.raises(ConfigError, match="teacher_kl must be 0 in a TrainingGoal, because its feed has no teacher"):
        TrainingGoal(batch=fine, steps=1, settings=GrpoSettings(teacher_kl=0.1))
    with pytest.raises(ConfigError, match="tasks: 'well-0' has no grader"):
        TrainingGoal(batch=msgspec.structs.replace(fine, tasks=(ungraded,)), steps=1)


def test_fast_demo_texts(capsys: pytest.CaptureFixture[str]) -> None:
    assert "better" not in demo.TOO_SHORT and f"{demo.STEPS} steps" in demo.TOO_SHORT
    with pytest.raises(SystemExit):
        demo.parse_options(["--help"])
    assert "two to three minutes" in capsys.readouterr().out
