"""The `sft` format: supervised fine-tuning examples for TRL and other Hugging Face trainers, in three forms.

messages     {"messages": […], "tools": […]}: one conversation per row, cut after the last trained turn. Trainers train on every
             assistant message, so rows with an untrained assistant message are left out
completions  {"prompt": […], "completion": [one turn], "tools": […]}: one example per trained turn; no trained turn is left out
tokens       {"input_ids", "labels", "assistant_masks"}: the recorded ids, so that nothing is rendered again
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from turngate.trace.sample import RowSpan, Sample
from turngate.trainers.export.base import ExportChoices, Record, reject_unused
from turngate.trainers.export.files import RecordLayout
from turngate.trainers.export.filters import select_trainable
from turngate.trainers.export.messages import read_conversation, read_tools, to_template_message
from turngate.trainers.export.rows import describe_rollout
from turngate.trainers.export.source import Exclusions, RecordedGroup, RecordedRollout
from turngate.types import Json

IGNORED = -100  # label of tokens that the loss ignores
_COLUMNS = {
    "input_ids": "id[]",
    "labels": "id[]",
    "assistant_masks": "bit[]",
    "session": "text",
    "group": "text",
    "task": "text",
    "attempt": "int",
    "kind": "text",
    "reward": "number",
    "resolved": "flag",
    "branch": "int",
}
_ENDED = ("stop", "tool_calls")
_MIXED_ROW = "a row with an untrained assistant message (--as completions or --as tokens exports its trained turns)"


class Sft:
    name = "sft"
    whole_groups = False

    def check(self, choices: ExportChoices) -> ExportChoices:
        return reject_unused(choices, "form", "imitate", forms=("messages", "completions", "tokens"))

    def layout(self, choices: ExportChoices) -> RecordLayout:
        tokens = choices.form == "tokens"
        return RecordLayout(what="conversations", columns=_COLUMNS if tokens else {})

    def list_losses(self, choices: ExportChoices) -> tuple[str, ...]:
        if choices.form == "tokens":
            return ("log-probabilities and policy versions",)
        return (
            "the exact ids: the trainer renders the messages again, perhaps differently (--as tokens keeps the ids)",
            "log-probabilities and policy versions",
        )

    def find_scored_session(self, record: Record) -> str:
        return ""

    def records(self, group: RecordedGroup, choices: ExportChoices, exclusions: Exclusions) -> Iterator[Record]:
        for rollout in select_trainable(group, exclusions, allow_untrained=choices.imitate, uses_reward=False):
            yield from build_examples(rollout, choices, exclusions)


def build_examples(rollout: RecordedRollout, choices: ExportChoices, exclusions: Exclusions) -> Iterator[Record]:
    """Yield the examples of a rollout, in the chosen form."""
    count = 0
    for row, learned in _select_imitable(rollout, choices) if choices.imitate else _select_trained(rollout):
        count += 1
        fields = {**describe_rollout(rollout), "branch": row.branch}
        if choices.form == "tokens":
            yield {**_tokens(row, learned), **fields}
        elif choices.form == "completions":
            yield from ({**example, **fields} for example in _completions(rollout, row, learned))
        elif (conversation := _messages(rollout, row, learned)) is not None:
            yield {**conversation, **fields}
        else:
            exclusions.add(_MIXED_ROW)
    if not count:
        token_ids = ", have token ids" if choices.form == "tokens" else ""
        exclusions.add(
            f"a rollout without a turn to imitate: such a turn must be complete{token_ids} and have a trained role"
        )


def _select_trained(rollout: RecordedRollout) -> Iterator[tuple[Sample, set[int]]]:
    for row in rollout.rows:
        yield row, {span.node for span in row.spans if span.trained}


def _select_imitable(rollout: RecordedRollout, choices: ExportChoices) -> Iterator[tuple[Sample, set[int]]]:
    """Yield each branch that has turns to imitate, with the nodes of these turns. A shared turn is yielded only once.

    A turn to imitate must be complete and have a trained role and, in the `tokens` form, token ids. It may lack log-probabilities or have
    been sampled with a bias.
    """
    used: set[int] = set()
    for row in rollout.branches:
        found = {span.node for span in row.spans if span.node not in used and _is_complete(rollout, span, choices)}
        used |= found
        if found:
            yield row, found


def _is_complete(rollout: RecordedRollout, span: RowSpan, choices: ExportChoices) -> bool:
    info = rollout.turn(span.node).info
    is_usable = choices.form != "tokens" or (info.capture == "tokens" and span.end > span.start)
    return is_usable and not info.fault and info.finish in _ENDED and span.role in rollout.session.config.policy.roles


def _tokens(row: Sample, learned: set[int]) -> dict[str, Json]:
    mask = np.zeros(len(row.ids), np.bool_)
    for span in row.spans:
        mask[span.start : span.end] = span.node in learned
    end = int(np.nonzero(mask)[0][-1]) + 1
    ids, mask = row.ids[:end], mask[:end]
    return {
        "input_ids": ids,
        "labels": np.where(mask, ids, np.int32(IGNORED)),
        "assistant_masks": mask.astype(np.int8),
    }


def _messages(rollout: RecordedRollout, row: Sample, learned: set[int]) -> dict[str, Json] | None:
    messages = read_conversation(rollout, row)
    last = max(n for n, one in enumerate(messages) if one.sampled and one.node in learned)
    messages = messages[: last + 1]
    if any(one.message.role == "assistant" and not (one.sampled and one.node in learned) for one in messages):
        return None
    return {"messages": [to_template_message(one.message) for one in messages], "tools": read_tools(rollout, row)}


def _completions(rollout: RecordedRollout, row: Sample, learned: set[int]) -> Iterator[dict[str, Json]]:
    messages = read_conversation(rollout, row)
    offered = read_tools(rollout, row)
    for n, one in enumerate(messages):
        if one.sampled and one.node in learned:
            prompt = [to_template_message(before.message) for before in messages[:n]]
            yield {
                "prompt": prompt,
                "completion": [to_template_message(one.message)],
                "tools": offered,
                "turn": one.node,
            }
