"""slime and miles: what their `Sample.from_dict` reads. `tokens` is prompt and response; `loss_mask` and `rollout_log_probs` are of the
last `response_length` of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from turngate.trace.advantage import row_weight
from turngate.trainers.export.base import Choices, Record, only
from turngate.trainers.export.files import Layout
from turngate.trainers.export.filters import usable
from turngate.trainers.export.rows import about, versions
from turngate.trainers.export.source import Group, Left, Rollout
from turngate.trainers.export.split import FILLED, UNEQUAL, cut

_COLUMNS = {
    "group_index": "int",
    "index": "int",
    "prompt": "text",
    "tokens": "id[]",
    "response": "text",
    "response_length": "int",
    "label": "text",
    "reward": "number",
    "loss_mask": "bit[]",
    "weight_versions": "text[]",
    "rollout_log_probs": "logprob[]",
    "remove_sample": "flag",
    "status": "text",
    "metadata": "json",
}
_NODES = 2**24  # of a session: more than any has


class Slime:
    name = "slime"
    whole_groups = False

    def checked(self, choices: Choices) -> Choices:
        return only(choices)

    def layout(self, choices: Choices) -> Layout:
        return Layout(what="samples of slime", columns=_COLUMNS)

    def lost(self, choices: Choices) -> tuple[str, ...]:
        return (
            FILLED,
            UNEQUAL,
            "prompt and response in words: the tokens are the truth, and both are empty",
            "what was sampled after the last trained token",
        )

    def scored(self, record: Record) -> str:
        return str(record["metadata"]["session"])

    def records(self, group: Group, choices: Choices, left: Left) -> Iterator[Record]:
        for rollout in usable(group, left):
            for row in rollout.rows:
                parts = cut(row)
                yield {
                    # The store's numbers: the same for all of a group, and another one for each row, which is that of its last node,
                    # however often it is exported.
                    "group_index": group.wanted[0].row.key,
                    "index": rollout.row.key * _NODES + row.branch,
                    "prompt": "",
                    "tokens": np.concatenate([parts.prompt, parts.response]),
                    "response": "",
                    "response_length": len(parts.response),
                    "label": None,
                    "reward": rollout.reward,
                    "loss_mask": parts.mask,
                    "weight_versions": [str(span.version_start) for span in row.spans if span.trained],
                    "rollout_log_probs": parts.logprobs,
                    "remove_sample": False,
                    "status": _status(rollout),
                    "metadata": {
                        **about(rollout),
                        "branch": row.branch,
                        "weight": row_weight(len(rollout.rows)),
                        **versions(row),
                    },
                }


def _status(rollout: Rollout) -> str:
    if rollout.row.status == "cancelled":
        return "aborted"
    return "truncated" if rollout.truncated else "completed"
