"""Preference pairs within a group: a better and a worse answer to the very same prompt.

    messages  {"prompt": […], "chosen": [one turn], "rejected": [one turn], "tools"}: the first turn at which the two rollouts differ. What
              came after is answers to different prompts, and results of tools that nobody may be taught
    tokens    {"prompt_ids", "chosen_ids", "chosen_mask", "rejected_ids", "rejected_mask"}: from there to the end, masked where it is not
              the model's

The prompt is the same where the same ids were sent. Rollouts whose prompts differ (a date, a path) make no pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import msgspec
import numpy as np

from turngate.errors import ConfigError
from turngate.trace.sample import Sample
from turngate.trace.tree import Sampled, path_to
from turngate.trainers.export.base import Choices, Record, only
from turngate.trainers.export.files import Layout
from turngate.trainers.export.filters import usable
from turngate.trainers.export.messages import conversation, spoken, tools
from turngate.trainers.export.source import Group, Left, Rollout
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


class _Parting(msgspec.Struct, frozen=True):
    """Where two rollouts part: the turns that do, and how many tokens they have in common."""

    better: Sampled
    worse: Sampled
    start: int


class Dpo:
    name = "dpo"
    whole_groups = False

    def checked(self, choices: Choices) -> Choices:
        for name, least in (("margin", 0.0), ("pairs", 1)):
            if not getattr(choices, name) >= least:
                raise ConfigError(f"{name}: {getattr(choices, name)} must be at least {least:g}", param=name)
        return only(choices, "form", "margin", "pairs", forms=("messages", "tokens"))

    def layout(self, choices: Choices) -> Layout:
        return Layout(what="pairs of conversations", columns=_COLUMNS if choices.form == "tokens" else {})

    def lost(self, choices: Choices) -> tuple[str, ...]:
        gone = "branches other than the main one, log-probabilities and policy versions"
        if choices.form == "tokens":
            return (gone,)
        return (
            "all that follows the first turn at which two rollouts differ",
            "the exact ids (--as tokens has them)",
            gone,
        )

    def scored(self, record: Record) -> str:
        return ""

    def records(self, group: Group, choices: Choices, left: Left) -> Iterator[Record]:
        if not group.name:
            left.out("it is of no group, so there is none to compare it with", len(group.wanted))
            return
        rollouts = list(usable(group, left))
        scored = [one for one in rollouts if one.reward is not None]
        left.out("its reward is not known, so it is neither better nor worse", len(rollouts) - len(scored))
        if len({one.reward for one in scored}) < 2:
            left.out("groups without two different rewards: nothing is better than something else", bool(scored))
            return
        found = 0
        for better, worse in sorted(product(scored, scored), key=_by_margin):
            margin = _margin(better, worse)
            if found == choices.pairs or margin <= 0 or margin < choices.margin:
                if margin > 0 and found == 0 and margin < choices.margin:
                    left.out(f"pairs whose rewards are less than {choices.margin:g} (--margin) apart")
                break
            parting = _parting(better, worse)
            if parting is None:
                left.out("pairs whose prompts differ, or that part at something else than a trained turn")
                continue
            found += 1
            made = _tokens if choices.form == "tokens" else _messages
            yield {**made(better, worse, parting), **_about(better, worse)}


def _margin(better: Rollout, worse: Rollout) -> float:
    assert better.reward is not None and worse.reward is not None
    return better.reward - worse.reward


def _by_margin(pair: tuple[Rollout, Rollout]) -> tuple[float, int, int]:
    """The widest first; then the oldest."""
    better, worse = pair
    return -_margin(better, worse), better.row.key, worse.row.key


def _main(rollout: Rollout) -> Sample:
    return rollout.rows[0]


def _parting(better: Rollout, worse: Rollout) -> _Parting | None:
    trained = [{span.node for span in _main(one).spans if span.trained} for one in (better, worse)]
    start = 0
    for one, other in zip(
        path_to(better.nodes[_main(better).branch]), path_to(worse.nodes[_main(worse).branch]), strict=False
    ):
        if np.array_equal(one.ids, other.ids):
            start += one.size
        elif isinstance(one, Sampled) and isinstance(other, Sampled):
            return _Parting(one, other, start) if one.id in trained[0] and other.id in trained[1] else None
        else:
            return None
    return None


def _messages(better: Rollout, worse: Rollout, parting: _Parting) -> dict[str, Json]:
    row = _main(better)
    said = conversation(better, row)
    at = next(n for n, one in enumerate(said) if one.node == parting.better.id)
    other = next(one for one in conversation(worse, _main(worse)) if one.node == parting.worse.id)
    return {
        "prompt": [spoken(one.message) for one in said[:at]],
        "chosen": [spoken(said[at].message)],
        "rejected": [spoken(other.message)],
        "tools": tools(better, row),
    }


def _tokens(better: Rollout, worse: Rollout, parting: _Parting) -> dict[str, Json]:
    def rest(rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
        row = _main(rollout)
        end = int(np.nonzero(row.mask)[0][-1]) + 1
        return row.ids[parting.start : end], row.mask[parting.start : end].astype(np.int8)

    chosen, rejected = rest(better), rest(worse)
    return {
        "prompt_ids": _main(better).ids[: parting.start],
        "chosen_ids": chosen[0],
        "chosen_mask": chosen[1],
        "rejected_ids": rejected[0],
        "rejected_mask": rejected[1],
    }


def _about(better: Rollout, worse: Rollout) -> dict[str, Json]:
    return {
        "group": better.group,
        "task": better.task,
        "chosen_session": better.id,
        "rejected_session": worse.id,
        "chosen_reward": better.reward,
        "rejected_reward": worse.reward,
    }
