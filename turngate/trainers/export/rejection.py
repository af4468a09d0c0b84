"""Rejection sampling: what `sft` writes, of the rollouts that earned it. `--keep best` takes one of each group."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from turngate.trainers.export.base import Choices, Record, only
from turngate.trainers.export.files import Layout
from turngate.trainers.export.filters import usable
from turngate.trainers.export.sft import Sft, examples
from turngate.trainers.export.source import Group, Left, Rollout

LEAST = 1.0  # the reward, where none is given


class Rejection:
    name = "rejection"
    whole_groups = False

    def checked(self, choices: Choices) -> Choices:
        choices = only(choices, "form", "imitate", "keep", forms=("messages", "completions", "tokens"))
        wanted = choices.wanted
        least = LEAST if wanted.min_reward is None else wanted.min_reward
        return msgspec.structs.replace(choices, wanted=msgspec.structs.replace(wanted, min_reward=least))

    def layout(self, choices: Choices) -> Layout:
        return Sft().layout(choices)

    def lost(self, choices: Choices) -> tuple[str, ...]:
        return Sft().lost(choices)

    def scored(self, record: Record) -> str:
        return ""

    def records(self, group: Group, choices: Choices, left: Left) -> Iterator[Record]:
        found = list(usable(group, left, untrained=choices.imitate, reckoned=False))
        if choices.keep == "best" and group.name:
            found = sorted(found, key=_best)[:1]
        for rollout in found:
            yield from examples(rollout, choices, left)


def _best(rollout: Rollout) -> tuple[float, int, int]:
    """The highest reward; of equals the one that came to it with the fewest tokens, and then the oldest."""
    assert rollout.reward is not None, "others are not wanted"
    return -rollout.reward, rollout.session.sampled_tokens, rollout.row.key
