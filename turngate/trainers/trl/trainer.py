"""TRL's trainer, with the feed's numbers in its checkpoints: a run that is killed and resumed trains no row twice and leaves none out.

    worker = TurngateWorker(config, checkpoint=last)
    trainer = CheckpointedTrainer(model, …, rollout_worker=worker)
    trainer.train(resume_from_checkpoint=last)

TRL's trainer reads ahead, so what it took from its queue says little about what it trained: the rows of each step are counted here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.experimental.async_grpo import AsyncGRPOTrainer

from turngate.errors import ConfigError
from turngate.trainers.trl.worker import LAST, STATE, TurngateWorker


class CheckpointedTrainer(AsyncGRPOTrainer):  # type: ignore[misc]
    """Used with a `TurngateWorker`; with any other worker it is TRL's own."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        # How many rows, on all ranks together: TRL gives tokens and their mean per row. Read before the step, which may empty `inputs`.
        rows = round(float(inputs["global_n_forward_tokens"][0]) / float(inputs["mean_seq_len"][0]))
        loss = super().training_step(model, inputs, num_items_in_batch)
        if isinstance(self.rollout_worker, TurngateWorker):
            self.rollout_worker.rollout_buffer.trained(rows)
        return loss

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        worker = self.rollout_worker
        if isinstance(
            worker, TurngateWorker
        ):  # the same bounds for both: TRL must not drop a row that we count as given
            if self.args.temperature != worker.config.temperature:
                raise ConfigError(
                    f"temperature: the trainer has {self.args.temperature:g}, its worker {worker.config.temperature:g}; make them equal",
                    param="temperature",
                )
            own, buffer = worker.config.choices.max_staleness, worker.rollout_buffer
            buffer.bound = self.args.max_staleness if own is None else min(own, self.args.max_staleness)
            buffer.longest = self.args.token_budget if self.args.token_budget > 0 else None
        return loader

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        worker = self.rollout_worker
        if isinstance(worker, TurngateWorker):
            _check_same(worker.checkpoint, kwargs.get("resume_from_checkpoint"))
        return super()._inner_training_loop(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        worker = self.rollout_worker
        if not isinstance(worker, TurngateWorker):
            super()._save_checkpoint(model, trial)
            return
        folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        state = worker.state()
        # A run that is killed in here leaves a checkpoint that says either what it was trained on, or that it is not whole. In this
        # order, since TRL deletes older checkpoints as soon as it has written this one.
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LAST).unlink(missing_ok=True)  # of a run that was resumed from before this step
        _write(folder / STATE, msgspec.json.format(msgspec.json.encode(state)))
        super()._save_checkpoint(model, trial)
        worker.commit(state.delivery)


def _check_same(worker: Path | None, trainer: str | None) -> None:
    """That rows go on where weights do."""
    if trainer is None and worker is not None:
        raise ConfigError(
            f"checkpoint: the worker goes on from {worker}, but the trainer begins anew; train(resume_from_checkpoint={str(worker)!r})",
            param="checkpoint",
        )
    # Without one, the worker was told that what is committed counts: right for weights that have never seen this feed.
    given = worker is not None or (trainer is not None and Path(trainer, STATE).is_file())
    if trainer is not None and given and (worker is None or worker.resolve() != Path(trainer).resolve()):
        raise ConfigError(
            f"checkpoint: the trainer goes on from {trainer}, but its worker from "
            f"{worker or 'what the feed has as committed'}; give both the same",
            param="checkpoint",
        )


def _write(file: Path, data: bytes) -> None:
    """All of it or nothing, and on the disk before anything that relies on it."""
    beside = file.with_name(f".{file.name}")
    with beside.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    beside.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
