"""Select the rollouts of a group that can be trained on."""

from __future__ import annotations

from collections.abc import Iterator

from turngate.rollout.reference import REPLAYED
from turngate.trace.advantage import is_too_large
from turngate.trainers.export.source import Exclusions, RecordedGroup, RecordedRollout

TOO_LARGE = "a rollout whose reward is too large to compute with"


def select_trainable(
    group: RecordedGroup, exclusions: Exclusions, *, allow_untrained: bool = False, uses_reward: bool = True
) -> Iterator[RecordedRollout]:
    """Yield the selected rollouts that can be trained on, and count the others in `exclusions`.

    A rollout is left out if it is marked as a replay by a scripted model, if its outcome is "invalid task" or "infrastructure fault", or if
    a refused call excludes it. It is also left out if it has no trainable rows, unless `allow_untrained` is set, or if its reward is too
    large to compute with and `uses_reward` is set.
    """
    for rollout in group.selected:
        if replayed := rollout.metadata(REPLAYED):
            exclusions.add(f"a rollout with a scripted model instead of a real one (replayed: {replayed})")
        elif not rollout.has_valid_outcome:
            exclusions.add(f"a rollout that ended as {rollout.kind!r}, which is not the agent's fault")
        elif rollout.is_excluded or (not allow_untrained and not rollout.rows):
            exclusions.add(rollout.explain_untrained())
        elif uses_reward and has_too_large_reward(rollout):
            exclusions.add(TOO_LARGE)
        else:
            yield rollout


def has_too_large_reward(rollout: RecordedRollout) -> bool:
    return rollout.reward is not None and is_too_large(rollout.reward)
