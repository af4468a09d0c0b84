"""TRL's trainer, with the feed's numbers in its checkpoints: a run that is killed and resumed trains no row twice and leaves none out.

    worker = TurngateWorker(config, checkpoint=last)
    trainer = CheckpointedTrainer(model, …, rollout_worker=worker)
    trainer.train(resume_from_checkpoint=last)

TRL's trainer reads ahead, so what it took from its queue says little about what it trained: the rows of each step are counted here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.experimental.async_grpo import AsyncGRPOTrainer

from turngate.errors import ConfigError
from turngate.trainers.trl.worker import STATE, TurngateWorker


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

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        worker = self.rollout_worker
        if isinstance(worker, TurngateWorker):
            folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            state = worker.state()
            (folder / STATE).write_bytes(msgspec.json.format(msgspec.json.encode(state)))
            worker.commit(state.delivery)
