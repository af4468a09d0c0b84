"""The `areal` format: the fields that an AReaL workflow returns, as lists with one value per token, and the reward as a number.

AReaL expects tensors with a batch dimension: `{name: torch.tensor([record[name]]) for name in FIELDS}`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from turngate.trace.advantage import row_weight
from turngate.trace.sample import UNKNOWN_VERSION, Sample
from turngate.trainers.export.base import ExportChoices, Record, reject_unused
from turngate.trainers.export.files import RecordLayout
from turngate.trainers.export.filters import select_trainable
from turngate.trainers.export.rows import describe_rollout
from turngate.trainers.export.source import Exclusions, RecordedGroup
from turngate.trainers.export.split import FILLED_LOGPROBS, ROW_WEIGHTS

FIELDS = ("input_ids", "loss_mask", "logprobs", "versions", "attention_mask", "rewards")
NO_VERSION = -1  # of a token that is not trained
UNKNOWN_REWARD = "a rollout with an unknown reward (the format requires a number)"
_COLUMNS = {
    "input_ids": "id[]",
    "loss_mask": "bit[]",
    "logprobs": "logprob[]",
    "versions": "int[]",
    "attention_mask": "bit[]",
    "rewards": "number",
    "metadata": "json",
}


class Areal:
    name = "areal"
    whole_groups = False

    def check(self, choices: ExportChoices) -> ExportChoices:
        return reject_unused(choices)

    def layout(self, choices: ExportChoices) -> RecordLayout:
        return RecordLayout(what="AReaL rows", columns=_COLUMNS)

    def list_losses(self, choices: ExportChoices) -> tuple[str, ...]:
        return (
            FILLED_LOGPROBS,
            ROW_WEIGHTS,
            "policy versions of tokens, if the engine did not report them: all tokens of a turn then have the turn's first version",
        )

    def find_scored_session(self, record: Record) -> str:
        return str(record["metadata"]["session"])

    def records(self, group: RecordedGroup, choices: ExportChoices, exclusions: Exclusions) -> Iterator[Record]:
        for rollout in select_trainable(group, exclusions):
            if rollout.reward is None:
                exclusions.add(UNKNOWN_REWARD)
                continue
            for row in rollout.rows:
                yield {
                    "input_ids": row.ids,
                    "loss_mask": row.mask.astype(np.int8),
                    "logprobs": np.where(row.mask, row.logprobs, np.float32(0)),
                    "versions": list_versions(row),
                    "attention_mask": np.ones(row.ids.size, np.int8),
                    "rewards": rollout.reward,
                    "metadata": {
                        **describe_rollout(rollout),
                        "branch": row.branch,
                        "weight": row_weight(len(rollout.rows)),
                        "truncated": rollout.truncated,
                    },
                }


def list_versions(row: Sample) -> np.ndarray:
    """Return the policy version of each token. An unknown version becomes the turn's first version. Untrained tokens have `NO_VERSION`."""
    versions = row.token_versions()
    for span in row.spans:
        own = versions[span.start : span.end]
        own[own == UNKNOWN_VERSION] = span.version_start
    return np.where(row.mask, versions, NO_VERSION).astype(np.int32)
