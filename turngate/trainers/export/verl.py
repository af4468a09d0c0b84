"""The `verl` format: the fields of verl's `AgentLoopOutput`, and the `uid` by which verl groups rollouts to compute advantages."""

from __future__ import annotations

from collections.abc import Iterator

from turngate.trace.advantage import row_weight
from turngate.trainers.export.base import ExportChoices, Record, reject_unused
from turngate.trainers.export.files import RecordLayout
from turngate.trainers.export.filters import select_trainable
from turngate.trainers.export.rows import describe_rollout, describe_versions
from turngate.trainers.export.side_data import check_experts, encode_experts
from turngate.trainers.export.source import Exclusions, RecordedGroup
from turngate.trainers.export.split import FILLED_LOGPROBS, ROW_WEIGHTS, split_row
from turngate.trainers.export.turn_rewards import count_missing_rewards, describe_rewards

_COLUMNS = {
    "uid": "text",
    "prompt_ids": "id[]",
    "response_ids": "id[]",
    "response_mask": "bit[]",
    "response_logprobs": "logprob[]",
    "reward_score": "number",
    "num_turns": "int",
    "extra_fields": "json",
}


class Verl:
    name = "verl"
    whole_groups = False

    def check(self, choices: ExportChoices) -> ExportChoices:
        return check_experts(reject_unused(choices, "side", "turn_rewards"))

    def layout(self, choices: ExportChoices) -> RecordLayout:
        return RecordLayout(what="verl rows", columns=_COLUMNS | dict.fromkeys(choices.side, "json"))

    def list_losses(self, choices: ExportChoices) -> tuple[str, ...]:
        return (FILLED_LOGPROBS, ROW_WEIGHTS, "tokens after the last trained token")

    def find_scored_session(self, record: Record) -> str:
        return str(record["extra_fields"]["session"])

    def records(self, group: RecordedGroup, choices: ExportChoices, exclusions: Exclusions) -> Iterator[Record]:
        for rollout in select_trainable(group, exclusions):
            count_missing_rewards(rollout, choices, exclusions)
            for row in rollout.rows_with(choices.side):
                parts = split_row(row)
                experts = encode_experts(row, len(parts.prompt) + len(parts.response), choices.side, exclusions)
                if experts is None:
                    continue
                start = len(parts.prompt)
                rewards = (
                    describe_rewards(rollout, row, start, start + len(parts.response)) if choices.turn_rewards else {}
                )
                yield {
                    **experts,
                    "uid": rollout.group or rollout.id,
                    "prompt_ids": parts.prompt,
                    "response_ids": parts.response,
                    "response_mask": parts.mask,
                    "response_logprobs": parts.logprobs,
                    "reward_score": rollout.reward,
                    "num_turns": parts.turns,
                    "extra_fields": {
                        **describe_rollout(rollout),
                        "branch": row.branch,
                        "weight": row_weight(len(rollout.rows)),
                        "truncated": rollout.truncated,
                        **describe_versions(row, start, start + len(parts.response)),
                        **rewards,
                    },
                }
