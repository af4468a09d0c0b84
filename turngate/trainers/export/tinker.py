"""The `tinker` format: the fields of tinker's `Datum`.

    Datum(model_input=ModelInput.from_ints(record["model_input"]), loss_fn_inputs=record["loss_fn_inputs"])

The inputs are all tokens except the last, and the targets all tokens except the first. A target that is not trained has the
advantage 0; `mask` distinguishes such a target from a trained one whose advantage is 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from turngate.trace.advantage import row_weight
from turngate.trainers.export.base import ExportChoices, Record, reject_unused
from turngate.trainers.export.files import RecordLayout
from turngate.trainers.export.filters import select_trainable
from turngate.trainers.export.rows import compute_group_advantages, describe_rollout, describe_versions
from turngate.trainers.export.source import Exclusions, RecordedGroup
from turngate.trainers.export.split import FILLED_LOGPROBS, ROW_WEIGHTS

UNKNOWN_REWARD = "a rollout without an advantage, because its reward is unknown"
ONLY_REWARD = "a rollout without an advantage, because its group has no other reward to compare with"
_COLUMNS = {"model_input": "id[]", "loss_fn_inputs": "json", "mask": "bit[]", "metadata": "json"}


class Tinker:
    name = "tinker"
    whole_groups = True  # for the advantages

    def check(self, choices: ExportChoices) -> ExportChoices:
        return reject_unused(choices, "advantage")

    def layout(self, choices: ExportChoices) -> RecordLayout:
        return RecordLayout(what="tinker data", columns=_COLUMNS)

    def list_losses(self, choices: ExportChoices) -> tuple[str, ...]:
        return (FILLED_LOGPROBS, ROW_WEIGHTS)

    def find_scored_session(self, record: Record) -> str:
        return str(record["metadata"]["session"])

    def records(self, group: RecordedGroup, choices: ExportChoices, exclusions: Exclusions) -> Iterator[Record]:
        trainable = {rollout.id for rollout in select_trainable(group, exclusions)}
        # `select_trainable` has already counted the rollouts that are left out.
        for rollout, advantage in compute_group_advantages(group, choices, Exclusions()):
            if rollout.id not in trainable:
                continue
            if advantage is None:
                exclusions.add(UNKNOWN_REWARD if rollout.reward is None else ONLY_REWARD)
                continue
            for row in rollout.rows:
                mask = row.mask[1:]
                yield {
                    "model_input": row.ids[:-1],
                    "loss_fn_inputs": {
                        "target_tokens": row.ids[1:].tolist(),
                        "logprobs": np.where(mask, row.logprobs[1:], np.float32(0)).tolist(),
                        "advantages": np.where(mask, np.float32(advantage), np.float32(0)).tolist(),
                    },
                    "mask": mask.astype(np.int8),
                    "metadata": {
                        **describe_rollout(rollout),
                        "branch": row.branch,
                        "advantage": advantage,
                        "weight": row_weight(len(rollout.rows)),
                        "truncated": rollout.truncated,
                        **describe_versions(row, 1, len(row.ids)),
                    },
                }
