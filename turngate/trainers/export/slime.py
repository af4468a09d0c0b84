"""The `slime` format, for slime and miles: input for their `Sample.from_dict`.

`tokens` is the prompt followed by the response. `loss_mask` and `rollout_log_probs` cover the last `response_length` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from turngate.trace.advantage import row_weight
from turngate.trainers.export.base import ExportChoices, Record, reject_unused
from turngate.trainers.export.files import RecordLayout
from turngate.trainers.export.filters import select_trainable
from turngate.trainers.export.rows import describe_rollout, describe_versions
from turngate.trainers.export.side_data import check_experts, encode_experts
from turngate.trainers.export.source import Exclusions, RecordedGroup, RecordedRollout
from turngate.trainers.export.split import FILLED_LOGPROBS, ROW_WEIGHTS, split_row
from turngate.trainers.export.turn_rewards import count_missing_rewards, describe_rewards

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
_EXPERTS = "rollout_routed_experts"
_NODES = 2**24  # more nodes than any session has


class Slime:
    name = "slime"
    whole_groups = False

    def check(self, choices: ExportChoices) -> ExportChoices:
        return check_experts(reject_unused(choices, "side", "turn_rewards"))

    def layout(self, choices: ExportChoices) -> RecordLayout:
        return RecordLayout(what="slime samples", columns=_COLUMNS | ({_EXPERTS: "json"} if choices.side else {}))

    def list_losses(self, choices: ExportChoices) -> tuple[str, ...]:
        return (
            FILLED_LOGPROBS,
            ROW_WEIGHTS,
            "the text of the prompt and the response: only tokens are exported, so both fields are empty",
            "tokens after the last trained token",
        )

    def find_scored_session(self, record: Record) -> str:
        return str(record["metadata"]["session"])

    def records(self, group: RecordedGroup, choices: ExportChoices, exclusions: Exclusions) -> Iterator[Record]:
        for rollout in select_trainable(group, exclusions):
            count_missing_rewards(rollout, choices, exclusions)
            for row in rollout.rows_with(choices.side):
                parts = split_row(row)
                size = len(parts.prompt) + len(parts.response)
                experts = encode_experts(row, size, choices.side, exclusions, field=_EXPERTS)
                if experts is None:
                    continue
                start = len(parts.prompt)
                rewards = (
                    describe_rewards(rollout, row, start, start + len(parts.response)) if choices.turn_rewards else {}
                )
                yield {
                    **experts,
                    # Both numbers derive from session keys, so they do not change if the export is repeated. `group_index` is the same for
                    # all rows of a group, and `index` is unique per row.
                    "group_index": group.selected[0].row.key,
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
                        **describe_rollout(rollout),
                        "branch": row.branch,
                        "weight": row_weight(len(rollout.rows)),
                        **describe_versions(row, start, start + len(parts.response)),
                        **rewards,
                    },
                }


def _status(rollout: RecordedRollout) -> str:
    if rollout.row.status == "cancelled":
        return "aborted"
    return "truncated" if rollout.truncated else "completed"
