"""TRL's real trainer and optimizer on rows of a real agent: what it trains on is what the gateway recorded, also after it was resumed."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import async_grpo
import cpu
import msgspec
import pytest
import torch
from safetensors.torch import load_file
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from tests.trainers.inside_trl.kit import same
from turngate import tasks
from turngate.client.gateway import GatewayClient
from turngate.client.protocol import FeedConfig
from turngate.errors import ConfigError
from turngate.tasks.task import Function, Task
from turngate.trainers.trl.rows import RowBuffer
from turngate.trainers.trl.trainer import CheckpointedTrainer
from turngate.trainers.trl.worker import LAST, STATE, FeedState, TurngateWorker, WorkerConfig

pytestmark = pytest.mark.process

TASK = Path(__file__).parents[3] / "examples" / "tasks" / "fix-add"


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """What the example is started with."""
    monkeypatch.setattr(sys, "argv", ["async_grpo.py", "--dry-run", "--output", str(tmp_path)])
    given = async_grpo.flags()
    given.staleness = (
        20  # a resumed trainer's weights are of a new version, and what was sampled before is that much older
    )
    given.model = str(cpu.make_model(tmp_path / "model"))
    return given


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RolloutSample]]:
    """Every row that the trainer took, in order."""
    taken: list[RolloutSample] = []
    get = RowBuffer.get

    def noted(self: RowBuffer, *how: Any, **more: Any) -> RolloutSample:
        sample = get(self, *how, **more)
        taken.append(sample)
        return sample

    monkeypatch.setattr(RowBuffer, "get", noted)
    cpu.patch_trl()
    yield taken


def wanted() -> tuple[Task, ...]:
    chance = Function(name=f"{Path(async_grpo.HERE) / 'chance.py'}:grade")
    return tuple(msgspec.structs.replace(task, grader=chance) for task in tasks.read_tasks(str(TASK)))


async def recorded(stage: cpu.Stage) -> list[Any]:
    async with GatewayClient(stage.url, stage.key) as gateway:
        rows = [row for session in await gateway.sessions() for row in await gateway.samples(session)]
        return [msgspec.to_builtins(row) for row in rows]


async def left_open(stage: cpu.Stage) -> list[str]:
    async with GatewayClient(stage.url, stage.key) as gateway:
        return [one for one in await gateway.sessions() if (await gateway.show(one)).status == "open"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_five_steps_and_then_one_more_after_a_crash(given: argparse.Namespace, seen: list[RolloutSample]) -> None:
    output: Path = given.output
    with cpu.stage(Path(given.model), given.served) as stage:
        trainer = async_grpo.train(given, wanted(), stage.url, stage.key, stage.transfer)
        steps = [line for line in trainer.state.log_history if "loss" in line]
        assert len(steps) == 5
        # On the weights that sampled them, the trainer finds the log-probabilities that were recorded.
        assert abs(steps[0]["ratio"] - 1) < 1e-4 and abs(steps[0]["kl"]) < 1e-5
        assert all(step["grad_norm"] > 0 for step in steps)
        before, after = weights(output / "model"), weights(output / "checkpoint-5")
        assert all(not torch.equal(before[name], after[name]) for name in before)
        # The engine samples with what was trained.
        served = stage.transfer.model.state_dict()
        assert all(torch.equal(served[name], tensor) for name, tensor in after.items())
        rows = asyncio.run(recorded(stage))
        assert len(seen) >= 10 and all(any(same(sample, row) for row in rows) for sample in seen)
        assert {sample.model_version for sample in seen} >= {1}
        assert asyncio.run(left_open(stage)) == []

        # As if it had been killed after its fourth step: what the fifth trained is not in that checkpoint.
        state = msgspec.json.decode((output / "checkpoint-4" / STATE).read_bytes(), type=FeedState)
        assert state.delivery * 6 + sum(map(len, state.rows.values())) == 8  # of 6 rows each, 2 a step
        first = list(seen)
        seen.clear()
        given.resume, given.steps = output / "checkpoint-4", 6
        trainer = async_grpo.train(given, wanted(), stage.url, stage.key, stage.transfer)
        assert trainer.state.global_step == 6
        assert [sample.input_ids.tolist() for sample in seen[:2]] == [s.input_ids.tolist() for s in first[8:10]]
        assert all(not torch.equal(after[name], tensor) for name, tensor in weights(output / "checkpoint-6").items())


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointedTrainer:
    """A trainer at its third step, without a model."""
    config = WorkerConfig(gateway="http://x", feed="f", choices=FeedConfig(n=2))
    trainer = CheckpointedTrainer.__new__(CheckpointedTrainer)
    trainer.rollout_worker = TurngateWorker(config, admin_key="k")
    trainer.state = SimpleNamespace(global_step=3)
    monkeypatch.setattr(CheckpointedTrainer, "_get_output_dir", lambda self, trial: str(tmp_path))
    return trainer


def test_a_kill_in_the_middle_of_a_checkpoint_leaves_none_that_is_resumed_in_silence(
    bare: CheckpointedTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also over one of the same step, by a run that was resumed from before it."""
    folder = tmp_path / "checkpoint-3"
    config = bare.rollout_worker.config
    folder.mkdir()
    (folder / STATE).write_text('{"feed":"f","delivery":9}')
    (folder / LAST).write_text("{}")

    def killed(self: object, model: object, trial: object) -> None:
        raise SystemExit

    monkeypatch.setattr(AsyncGRPOTrainer, "_save_checkpoint", killed)
    with pytest.raises(SystemExit):
        bare._save_checkpoint(None, None)
    with pytest.raises(ConfigError, match="so it is incomplete; resume from the previous"):
        TurngateWorker(config, admin_key="k", checkpoint=folder)

    def killed_late(self: object, model: object, trial: object) -> None:
        (folder / LAST).write_text("{}")
        raise SystemExit

    monkeypatch.setattr(AsyncGRPOTrainer, "_save_checkpoint", killed_late)
    with pytest.raises(SystemExit):
        bare._save_checkpoint(None, None)
    resumed = TurngateWorker(config, admin_key="k", checkpoint=folder)
    assert resumed._from == bare.rollout_worker.state()
    assert sorted(file.name for file in folder.iterdir()) == sorted([STATE, LAST])


def test_weights_and_rows_go_on_from_one_checkpoint(
    bare: CheckpointedTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AsyncGRPOTrainer, "_inner_training_loop", lambda self, **given: "trained")
    (tmp_path / STATE).write_text('{"feed":"f","delivery":9}')
    (tmp_path / LAST).write_text("{}")
    with pytest.raises(
        ConfigError, match=r"its worker resumes from the committed deliveries; pass the same checkpoint to both"
    ):
        bare._inner_training_loop(resume_from_checkpoint=str(tmp_path))
    worker = TurngateWorker(bare.rollout_worker.config, admin_key="k", checkpoint=tmp_path)
    trainer, bare.rollout_worker = bare, worker
    with pytest.raises(ConfigError, match=r"but the trainer does not; call train\(resume_from_checkpoint="):
        trainer._inner_training_loop(resume_from_checkpoint=None)
    assert trainer._inner_training_loop(resume_from_checkpoint=f"{tmp_path}/") == "trained"
