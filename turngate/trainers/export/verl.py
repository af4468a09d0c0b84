"""verl: the fields of its `AgentLoopOutput` (prompt_ids, response_ids, response_mask, response_logprobs, reward_score, num_turns,
extra_fields), and `uid`, by which its group-relative advantages find the rollouts of a prompt."""

from __future__ import annotations

from collections.abc import Iterator

from turngate.trace.advantage import row_weight
from turngate.trainers.export.base import Choices, Record, only
from turngate.trainers.export.files import Layout
from turngate.trainers.export.filters import usable
from turngate.trainers.export.rows import about, versions
from turngate.trainers.export.source import Group, Left
from turngate.trainers.export.split import FILLED, UNEQUAL, cut

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

    def checked(self, choices: Choices) -> Choices:
        return only(choices)

    def layout(self, choices: Choices) -> Layout:
        return Layout(what="rows of verl", columns=_COLUMNS)

    def lost(self, choices: Choices) -> tuple[str, ...]:
        return (FILLED, UNEQUAL, "what was sampled after the last trained token")

    def scored(self, record: Record) -> str:
        return str(record["extra_fields"]["session"])

    def records(self, group: Group, choices: Choices, left: Left) -> Iterator[Record]:
        for rollout in usable(group, left):
            for row in rollout.rows:
                parts = cut(row)
                yield {
                    "uid": rollout.group or rollout.id,
                    "prompt_ids": parts.prompt,
                    "response_ids": parts.response,
                    "response_mask": parts.mask,
                    "response_logprobs": parts.logprobs,
                    "reward_score": rollout.reward,
                    "num_turns": parts.turns,
                    "extra_fields": {
                        **about(rollout),
                        "branch": row.branch,
                        "weight": row_weight(len(rollout.rows)),
                        "truncated": rollout.truncated,
                        **versions(row),
                    },
                }
