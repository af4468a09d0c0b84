"""The `dpo` format: preference pairs within a group, with a better and a worse answer to the same prompt.

    messages  {"prompt": […], "chosen": [one turn], "rejected": [one turn], "tools"}: the first turn at which the two rollouts differ.
              Later turns answer different prompts, so they are left out
    tokens    {"prompt_ids", "chosen_ids", "chosen_mask", "rejected_ids", "rejected_mask"}: both rollouts from that turn to their last
              trained token, with a mask of the trained tokens

Prompts are equal if their ids are equal. Rollouts whose prompts differ, for example in a date or a path, do not form a pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import msgspec
import numpy as np

from turngate.errors import ConfigError
from turngate.trace.sample import Sample
from turngate.trace.tree import Sampled, path_to
from turngate.trainers.export.base import ExportChoices, Record, reject_unused
from turngate.trainers.export.files import RecordLayout
from turngate.trainers.export.filters import select_trainable
from turngate.trainers.export.messages import read_conversation, read_tools, to_template_message
from turngate.trainers.export.source import Exclusions, RecordedGroup, RecordedRollout
from turngate.types import Json

_COLUMNS = {
    "prompt_ids": "id[]",
    "chosen_ids": "id[]",
    "chosen_mask": "bit[]",
    "rejected_ids": "id[]",
    "rejected_mask": "bit[]",
    "group": "text",
    "task": "text",
    "chosen_session": "text",
    "rejected_session": "text",
    "chosen_reward": "number",
    "rejected_reward": "number",
}


class _Divergence(msgspec.Struct, frozen=True):
    """The turn of each rollout at which the two rollouts first differ, and the number of tokens before it."""

    better: Sampled
    worse: Sampled
    start: int


class Dpo:
    name = "dpo"
    whole_groups = False

    def check(self, choices: ExportChoices) -> ExportChoices:
        for name, minimum in (("margin", 0.0), ("pairs", 1)):
            if not (value := getattr(choices, name)) >= minimum:
                raise ConfigError(f"--{name} must be at least {minimum:g}, not {value}", param=name)
        return reject_unused(choices, "form", "margin", "pairs", forms=("messages", "tokens"))

    def layout(self, choices: ExportChoices) -> RecordLayout:
        return RecordLayout(what="conversation pairs", columns=_COLUMNS if choices.form == "tokens" else {})

    def list_losses(self, choices: ExportChoices) -> tuple[str, ...]:
        dropped = "branches other than the main one, log-probabilities and policy versions"
        if choices.form == "tokens":
            return (dropped,)
        return (
            "everything after the first turn at which two rollouts differ",
            "the exact ids (--as tokens keeps them)",
            dropped,
        )

    def find_scored_session(self, record: Record) -> str:
        return ""

    def records(self, group: RecordedGroup, choices: ExportChoices, exclusions: Exclusions) -> Iterator[Record]:
        if not group.name:
            exclusions.add("a rollout that cannot be compared, because it has no group", len(group.selected))
            return
        rollouts = list(select_trainable(group, exclusions))
        scored = [one for one in rollouts if one.reward is not None]
        exclusions.add("a rollout that cannot be compared, because its reward is unknown", len(rollouts) - len(scored))
        if len({one.reward for one in scored}) < 2:
            exclusions.add("a group without two different rewards", bool(scored))
            return
        found = 0
        for better, worse in sorted(product(scored, scored), key=_by_margin):
            margin = _margin(better, worse)
            if found == choices.pairs or margin <= 0 or margin < choices.margin:
                if margin > 0 and found == 0 and margin < choices.margin:
                    exclusions.add(
                        f"a group without a usable pair whose rewards differ by at least {choices.margin:g} (--margin)"
                    )
                break
            divergence = _find_divergence(better, worse)
            if divergence is None:
                exclusions.add("a pair whose prompts differ, or that does not diverge at a trained turn")
                continue
            found += 1
            build = _tokens if choices.form == "tokens" else _messages
            yield {**build(better, worse, divergence), **_describe_pair(better, worse)}


def _margin(better: RecordedRollout, worse: RecordedRollout) -> float:
    assert better.reward is not None and worse.reward is not None
    return better.reward - worse.reward


def _by_margin(pair: tuple[RecordedRollout, RecordedRollout]) -> tuple[float, int, int]:
    """Return a sort key: widest margin first, then oldest rollouts first."""
    better, worse = pair
    return -_margin(better, worse), better.row.key, worse.row.key


def _main(rollout: RecordedRollout) -> Sample:
    return rollout.rows[0]


def _find_divergence(better: RecordedRollout, worse: RecordedRollout) -> _Divergence | None:
    trained = [{span.node for span in _main(one).spans if span.trained} for one in (better, worse)]
    start = 0
    for one, other in zip(
        path_to(better.nodes[_main(better).branch]), path_to(worse.nodes[_main(worse).branch]), strict=False
    ):
        if np.array_equal(one.ids, other.ids):
            start += one.size
        elif isinstance(one, Sampled) and isinstance(other, Sampled):
            return _Divergence(one, other, start) if one.id in trained[0] and other.id in trained[1] else None
        else:
            return None
    return None


def _messages(better: RecordedRollout, worse: RecordedRollout, divergence: _Divergence) -> dict[str, Json]:
    row = _main(better)
    messages = read_conversation(better, row)
    at = next(n for n, one in enumerate(messages) if one.node == divergence.better.id)
    other = next(one for one in read_conversation(worse, _main(worse)) if one.node == divergence.worse.id)
    return {
        "prompt": [to_template_message(one.message) for one in messages[:at]],
        "chosen": [to_template_message(messages[at].message)],
        "rejected": [to_template_message(other.message)],
        "tools": read_tools(better, row),
    }


def _tokens(better: RecordedRollout, worse: RecordedRollout, divergence: _Divergence) -> dict[str, Json]:
    def rest(rollout: RecordedRollout) -> tuple[np.ndarray, np.ndarray]:
        row = _main(rollout)
        end = int(np.nonzero(row.mask)[0][-1]) + 1
        return row.ids[divergence.start : end], row.mask[divergence.start : end].astype(np.int8)

    chosen, rejected = rest(better), rest(worse)
    return {
        "prompt_ids": _main(better).ids[: divergence.start],
        "chosen_ids": chosen[0],
        "chosen_mask": chosen[1],
        "rejected_ids": rejected[0],
        "rejected_mask": rejected[1],
    }


def _describe_pair(better: RecordedRollout, worse: RecordedRollout) -> dict[str, Json]:
    return {
        "group": better.group,
        "task": better.task,
        "chosen_session": better.id,
        "rejected_session": worse.id,
        "chosen_reward": better.reward,
        "rejected_reward": worse.reward,
    }
