"""From the rewards of a group's rollouts to their advantages. Over rollouts, never over rows: one that made many rows is still one.

Pure arithmetic, no I/O; called by `feed.py` when a group is handed to a trainer, and where rows are exported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Choice = Literal["normalised", "leave_one_out", "none"]
EPSILON = 1e-6  # added to the standard deviation, so that a group that hardly differs is not blown up
MAX_REWARD = 1e30  # of a reward: what is reckoned from larger ones is no number in a trainer's 32 bits, or in ours


def compute_advantages(rewards: Sequence[float | None], choice: Choice) -> list[float | None]:
    """One per rollout, in the same order. A reward of None is not known or does not count: no advantage, and no say in those of others.
    Nor has one that is too large to reckon with.

    `normalised`     (reward - mean) / (standard deviation + EPSILON), of the whole population (divided by n, not n - 1).
                     Where all rewards are the same, and so in a group of one, nothing can be learned: exactly 0.
    `leave_one_out`  reward - mean of the others' rewards. A group of one has no others: None, rather than a baseline that nobody measured.
    `none`           the reward itself.
    """
    rewards = [None if reward is None or is_too_large(reward) else reward for reward in rewards]
    known = [reward for reward in rewards if reward is not None]
    if choice == "none" or not known:
        return rewards
    total = math.fsum(known)
    # Asked of the rewards themselves: the mean of equal numbers may differ from them in its last digit.
    alike = min(known) == max(known)
    if choice == "leave_one_out":
        others = len(known) - 1
        return [None if r is None or not others else 0.0 if alike else r - (total - r) / others for r in rewards]
    mean = total / len(known)
    deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in known) / len(known))
    return [None if r is None else 0.0 if alike else (r - mean) / (deviation + EPSILON) for r in rewards]


def is_too_large(reward: float) -> bool:
    return not abs(reward) <= MAX_REWARD


def row_weight(rows: int) -> float:
    """Of each of a rollout's rows, so that together they weigh as much as the one row of another rollout."""
    return 1.0 / rows
