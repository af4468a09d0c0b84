"""The `rejection` format: `sft` examples from rollouts whose reward is at least `--min-reward`.

The default minimum is 1. `--keep best` keeps only the best rollout of each group.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from turngate.trainers.export.base import ExportChoices, Record, reject_unused
from turngate.trainers.export.files import RecordLayout
from turngate.trainers.export.filters import select_trainable
from turngate.trainers.export.sft import Sft, build_examples
from turngate.trainers.export.source import Exclusions, RecordedGroup, RecordedRollout

DEFAULT_MIN_REWARD = 1.0


class Rejection:
    name = "rejection"
    whole_groups = False

    def check(self, choices: ExportChoices) -> ExportChoices:
        choices = reject_unused(choices, "form", "imitate", "keep", forms=("messages", "completions", "tokens"))
        filter = choices.wanted
        if filter.min_reward is None:
            filter = msgspec.structs.replace(filter, min_reward=DEFAULT_MIN_REWARD)
        return msgspec.structs.replace(choices, wanted=filter)

    def layout(self, choices: ExportChoices) -> RecordLayout:
        return Sft().layout(choices)

    def list_losses(self, choices: ExportChoices) -> tuple[str, ...]:
        return Sft().list_losses(choices)

    def find_scored_session(self, record: Record) -> str:
        return ""

    def records(self, group: RecordedGroup, choices: ExportChoices, exclusions: Exclusions) -> Iterator[Record]:
        rollouts = list(select_trainable(group, exclusions, allow_untrained=choices.imitate, uses_reward=False))
        if choices.keep == "best" and group.name:
            rollouts = sorted(rollouts, key=_best)[:1]
        for rollout in rollouts:
            yield from build_examples(rollout, choices, exclusions)


def _best(rollout: RecordedRollout) -> tuple[float, int, int]:
    """Return a sort key: highest reward first, then fewest sampled tokens, then oldest."""
    assert rollout.reward is not None, "the filter sets a minimum reward"
    return -rollout.reward, rollout.session.sampled_tokens, rollout.row.key
