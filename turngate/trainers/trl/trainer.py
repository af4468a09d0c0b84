"""A variant of TRL's trainer that stores the feed position in its checkpoints, so that a resumed run trains no row twice.

    worker = TurngateWorker(config, checkpoint=last)
    trainer = CheckpointedTrainer(model, …, rollout_worker=worker)
    trainer.train(resume_from_checkpoint=last)

TRL's trainer prefetches rows, so a row that it has taken may not have been trained yet. `CheckpointedTrainer` therefore counts the rows of
each step.
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
    """TRL's trainer, with the feed position of its `TurngateWorker` in its checkpoints.

    With any other worker, it behaves like TRL's trainer.
    """

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        # Rows of all ranks, computed from TRL's token count and mean row length. Read before the step, which may clear `inputs`.
        rows = round(float(inputs["global_n_forward_tokens"][0]) / float(inputs["mean_seq_len"][0]))
        loss = super().training_step(model, inputs, num_items_in_batch)
        if isinstance(self.rollout_worker, TurngateWorker):
            self.rollout_worker.rollout_buffer.mark_trained(rows)
        return loss

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        worker = self.rollout_worker
        if isinstance(worker, TurngateWorker):
            if self.args.temperature != worker.config.temperature:
                raise ConfigError(
                    f"temperature is {self.args.temperature:g} in the trainer, but {worker.config.temperature:g} in its worker; "
                    "set both to the same value",
                    param="temperature",
                )
            # The buffer applies TRL's limits, so that TRL never drops a row after taking it.
            own, buffer = worker.config.choices.max_staleness, worker.rollout_buffer
            buffer.bound = self.args.max_staleness if own is None else min(own, self.args.max_staleness)
            buffer.longest = self.args.token_budget if self.args.token_budget > 0 else None
        return loader

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        worker = self.rollout_worker
        if isinstance(worker, TurngateWorker):
            _check_same_checkpoint(worker.checkpoint, kwargs.get("resume_from_checkpoint"))
        return super()._inner_training_loop(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        worker = self.rollout_worker
        if not isinstance(worker, TurngateWorker):
            super()._save_checkpoint(model, trial)
            return
        folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        state = worker.state()
        # If the run is killed here, the checkpoint either contains the state or can be recognized as incomplete. The state must be written
        # first, because TRL deletes older checkpoints as soon as it has written this one.
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LAST).unlink(missing_ok=True)  # left by a run that was resumed before this step
        _write_durably(folder / STATE, msgspec.json.format(msgspec.json.encode(state)))
        super()._save_checkpoint(model, trial)
        worker.commit(state.delivery)


def _check_same_checkpoint(worker: Path | None, trainer: str | None) -> None:
    """Raise `ConfigError` if the worker and the trainer do not resume from the same checkpoint.

    If the trainer's checkpoint contains no feed position, the worker may start without a checkpoint.
    """
    if trainer is None and worker is not None:
        raise ConfigError(
            f"checkpoint: the worker resumes from {worker}, but the trainer does not; call train(resume_from_checkpoint={str(worker)!r})",
            param="checkpoint",
        )
    # Without a checkpoint, the worker starts after the committed deliveries, which is right for weights not trained on this feed.
    has_position = worker is not None or (trainer is not None and Path(trainer, STATE).is_file())
    if trainer is not None and has_position and (worker is None or worker.resolve() != Path(trainer).resolve()):
        raise ConfigError(
            f"checkpoint: the trainer resumes from {trainer}, but its worker "
            f"{'starts after the committed deliveries' if worker is None else f'resumes from {worker}'}; pass the same checkpoint to both",
            param="checkpoint",
        )


def _write_durably(file: Path, data: bytes) -> None:
    """Write a file atomically and sync it to disk."""
    temporary = file.with_name(f".{file.name}")
    with temporary.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
