"""Supervised fine-tuning, in three forms that TRL and other Hugging Face trainers read.

messages     {"messages": […], "tools": […]}: one conversation per row. All that its assistant says is learned, so a row in which something
             else than trained turns was said by it is left out; what follows the last trained turn is cut off
completions  {"prompt": […], "completion": [one turn], "tools": […]}: one per trained turn; nothing is left out
tokens       {"input_ids", "labels", "assistant_masks"}: the ids that were sampled, which no template has to make again
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from turngate.trace.sample import Sample, Span
from turngate.trainers.export.base import Choices, Record, only
from turngate.trainers.export.files import Layout
from turngate.trainers.export.filters import usable
from turngate.trainers.export.messages import conversation, spoken, tools
from turngate.trainers.export.rows import about
from turngate.trainers.export.source import Group, Left, Rollout
from turngate.types import Json

IGNORED = -100  # the label of what is not learned
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
_OTHERS = "a row in which the assistant said something that may not be trained (--as completions or tokens takes the rest of it)"


class Sft:
    name = "sft"
    whole_groups = False

    def checked(self, choices: Choices) -> Choices:
        return only(choices, "form", "imitate", forms=("messages", "completions", "tokens"))

    def layout(self, choices: Choices) -> Layout:
        tokens = choices.form == "tokens"
        return Layout(what="conversations", columns=_COLUMNS if tokens else {})

    def lost(self, choices: Choices) -> tuple[str, ...]:
        if choices.form == "tokens":
            return ("log-probabilities and policy versions",)
        return (
            "the exact ids: a template has to make them again, and may make others (--as tokens has them)",
            "log-probabilities and policy versions",
        )

    def scored(self, record: Record) -> str:
        return ""

    def records(self, group: Group, choices: Choices, left: Left) -> Iterator[Record]:
        for rollout in usable(group, left, untrained=choices.imitate, reckoned=False):
            yield from examples(rollout, choices, left)


def examples(rollout: Rollout, choices: Choices, left: Left) -> Iterator[Record]:
    """Of one rollout, in the form that was chosen."""
    made = 0
    for row, learned in _imitable(rollout, choices) if choices.imitate else _trained(rollout):
        made += 1
        known = {**about(rollout), "branch": row.branch}
        if choices.form == "tokens":
            yield {**_tokens(row, learned), **known}
        elif choices.form == "completions":
            yield from ({**one, **known} for one in _completions(rollout, row, learned))
        elif (whole := _messages(rollout, row, learned)) is not None:
            yield {**whole, **known}
        else:
            left.out(_OTHERS)
    if not made:
        left.out("nothing of it may be trained")


def _trained(rollout: Rollout) -> Iterator[tuple[Sample, set[int]]]:
    for row in rollout.rows:
        yield row, {span.node for span in row.spans if span.trained}


def _imitable(rollout: Rollout, choices: Choices) -> Iterator[tuple[Sample, set[int]]]:
    """To imitate a turn neither its log-probabilities nor the distribution that it came from are needed, but it has to be whole."""
    taken: set[int] = set()
    for row in rollout.branches:
        found = {span.node for span in row.spans if span.node not in taken and _whole(rollout, span, choices)}
        taken |= found
        if found:
            yield row, found


def _whole(rollout: Rollout, span: Span, choices: Choices) -> bool:
    info = rollout.turn(span.node).info
    known = info.capture == "tokens" or choices.form != "tokens"
    return known and not info.fault and info.finish in _ENDED and span.role in rollout.session.config.policy.roles


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


def _messages(rollout: Rollout, row: Sample, learned: set[int]) -> dict[str, Json] | None:
    said = conversation(rollout, row)
    last = max(n for n, one in enumerate(said) if one.sampled and one.node in learned)
    said = said[: last + 1]
    if any(one.message.role == "assistant" and not (one.sampled and one.node in learned) for one in said):
        return None
    return {"messages": [spoken(one.message) for one in said], "tools": tools(rollout, row)}


def _completions(rollout: Rollout, row: Sample, learned: set[int]) -> Iterator[dict[str, Json]]:
    said = conversation(rollout, row)
    offered = tools(rollout, row)
    for n, one in enumerate(said):
        if one.sampled and one.node in learned:
            prompt = [spoken(before.message) for before in said[:n]]
            yield {"prompt": prompt, "completion": [spoken(one.message)], "tools": offered, "turn": one.node}
