"""Tests for TRL's trainer on a real agent's rows: it trains on what the gateway recorded, also after a resume."""

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

from tests.trainers.inside_trl.kit import equals_row
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
    """Command-line flags of the example."""
    monkeypatch.setattr(sys, "argv", ["async_grpo.py", "--dry-run", "--output", str(tmp_path)])
    given = async_grpo.parse_options()
    given.staleness = 20  # resuming creates a new weight version, which makes earlier samples older
    given.agent = "pi"  # it starts fast; each of its rollouts is one row of this model
    given.rows, given.steps, given.save_steps = 1, 4, 1
    given.model = str(cpu.make_model(tmp_path / "model"))
    return given


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RolloutSample]]:
    """Every row that the trainer took, in order; filled during the test."""
    taken: list[RolloutSample] = []
    get = RowBuffer.get

    def record(self: RowBuffer, *how: Any, **more: Any) -> RolloutSample:
        sample = get(self, *how, **more)
        taken.append(sample)
        return sample

    monkeypatch.setattr(RowBuffer, "get", record)
    cpu.patch_trl()
    yield taken


def make_tasks() -> tuple[Task, ...]:
    chance = Function(name=f"{Path(async_grpo.HERE) / 'random_grader.py'}:grade")
    return tuple(msgspec.structs.replace(task, grader=chance) for task in tasks.read_tasks(str(TASK)))


async def recorded_rows(stage: cpu.LocalGateway) -> list[Any]:
    async with GatewayClient(stage.url, stage.key) as gateway:
        rows = [row for session in await gateway.sessions() for row in await gateway.samples(session)]
        return [msgspec.to_builtins(row) for row in rows]


async def open_sessions(stage: cpu.LocalGateway) -> list[str]:
    async with GatewayClient(stage.url, stage.key) as gateway:
        return [one for one in await gateway.sessions() if (await gateway.show(one)).status == "open"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_training_resumes_after_crash(given: argparse.Namespace, seen: list[RolloutSample]) -> None:
    output: Path = given.output
    with cpu.run_gateway(Path(given.model), given.served) as stage:
        trainer = async_grpo.train(given, make_tasks(), stage.url, stage.key, stage.policy)
        steps = [line for line in trainer.state.log_history if "loss" in line]
        assert len(steps) == 4
        # On the sampling weights, the trainer recomputes the recorded log-probabilities.
        assert abs(steps[0]["ratio"] - 1) < 1e-4 and abs(steps[0]["kl"]) < 1e-5
        assert all(step["grad_norm"] > 0 for step in steps)
        before, after = weights(output / "model"), weights(output / "checkpoint-4")
        assert all(not torch.equal(before[name], after[name]) for name in before)
        # The engine serves the trained weights.
        served = stage.policy.model.state_dict()
        assert all(torch.equal(served[name], tensor) for name, tensor in after.items())
        rows = asyncio.run(recorded_rows(stage))
        assert len(seen) >= 4 and all(any(equals_row(sample, row) for row in rows) for sample in seen)
        assert {sample.model_version for sample in seen} >= {1}
        assert asyncio.run(open_sessions(stage)) == []

        # Resume as if killed after the third step: that checkpoint lacks the fourth.
        state = msgspec.json.decode((output / "checkpoint-3" / STATE).read_bytes(), type=FeedState)
        assert state.delivery * 2 + sum(map(len, state.rows.values())) == 3  # 2 rows per delivery, one row per step
        first = list(seen)
        seen.clear()
        given.resume, given.steps = output / "checkpoint-3", 5
        trainer = async_grpo.train(given, make_tasks(), stage.url, stage.key, stage.policy)
        assert trainer.state.global_step == 5
        assert seen[0].input_ids.tolist() == first[3].input_ids.tolist()
        assert all(not torch.equal(after[name], tensor) for name, tensor in weights(output / "checkpoint-5").items())


@pytest.fixture
def trainer_without_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointedTrainer:
    """A trainer at step 3 without a model."""
    config = WorkerConfig(gateway="http://x", feed="f", choices=FeedConfig(n=2))
    trainer = CheckpointedTrainer.__new__(CheckpointedTrainer)
    trainer.rollout_worker = TurngateWorker(config, admin_key="k")
    trainer.state = SimpleNamespace(global_step=3)
    monkeypatch.setattr(CheckpointedTrainer, "_get_output_dir", lambda self, trial: str(tmp_path))
    return trainer


def test_interrupted_checkpoint_is_rejected_on_resume(
    trainer_without_model: CheckpointedTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when overwriting a checkpoint of the same step from an earlier run."""
    folder = tmp_path / "checkpoint-3"
    config = trainer_without_model.rollout_worker.config
    folder.mkdir()
    (folder / STATE).write_text('{"feed":"f","delivery":9}')
    (folder / LAST).write_text("{}")

    def killed(self: object, model: object, trial: object) -> None:
        raise SystemExit

    monkeypatch.setattr(AsyncGRPOTrainer, "_save_checkpoint", killed)
    with pytest.raises(SystemExit):
        trainer_without_model._save_checkpoint(None, None)
    with pytest.raises(ConfigError, match="so it is incomplete; resume from the previous"):
        TurngateWorker(config, admin_key="k", checkpoint=folder)

    def killed_late(self: object, model: object, trial: object) -> None:
        (folder / LAST).write_text("{}")
        raise SystemExit

    monkeypatch.setattr(AsyncGRPOTrainer, "_save_checkpoint", killed_late)
    with pytest.raises(SystemExit):
        trainer_without_model._save_checkpoint(None, None)
    resumed = TurngateWorker(config, admin_key="k", checkpoint=folder)
    assert resumed._from == trainer_without_model.rollout_worker.state()
    assert sorted(file.name for file in folder.iterdir()) == sorted([STATE, LAST])


def test_trainer_and_worker_need_same_checkpoint(
    trainer_without_model: CheckpointedTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AsyncGRPOTrainer, "_inner_training_loop", lambda self, **given: "trained")
    (tmp_path / STATE).write_text('{"feed":"f","delivery":9}')
    (tmp_path / LAST).write_text("{}")
    with pytest.raises(
        ConfigError, match=r"its worker starts after the committed deliveries; pass the same checkpoint to both"
    ):
        trainer_without_model._inner_training_loop(resume_from_checkpoint=str(tmp_path))
    worker = TurngateWorker(trainer_without_model.rollout_worker.config, admin_key="k", checkpoint=tmp_path)
    trainer, trainer_without_model.rollout_worker = trainer_without_model, worker
    with pytest.raises(ConfigError, match=r"but the trainer does not; call train\(resume_from_checkpoint="):
        trainer._inner_training_loop(resume_from_checkpoint=None)
    assert trainer._inner_training_loop(resume_from_checkpoint=f"{tmp_path}/") == "trained"
