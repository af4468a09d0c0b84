"""Which rollouts a training format takes: those in which nothing but the agent decided how it went, and something may be trained."""

from __future__ import annotations

from collections.abc import Iterator

from turngate.trace.advantage import is_too_large
from turngate.trainers.export.source import Group, Left, Rollout

TOO_LARGE = "its reward is too large to reckon with"


def usable(group: Group, left: Left, *, untrained: bool = False, reckoned: bool = True) -> Iterator[Rollout]:
    """`untrained`: whether something may be trained is the caller's to say. `reckoned`: something is reckoned from its reward."""
    for rollout in group.wanted:
        if not rollout.agents_fault_at_most:
            left.out(f"{rollout.kind}: not the agent's doing")
        elif not untrained and not rollout.rows:
            left.out("nothing of it may be trained")
        elif reckoned and rollout.reward is not None and is_too_large(rollout.reward):
            left.out(TOO_LARGE)
        else:
            yield rollout
