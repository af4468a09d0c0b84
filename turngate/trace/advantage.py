"""Compute the advantages of a group's rollouts from their rewards. Each rollout counts once, however many rows it has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Choice = Literal["normalised", "leave_one_out", "none"]
EPSILON = 1e-6  # added to the standard deviation, so that tiny differences are not amplified
MAX_REWARD = 1e30  # advantages of larger rewards overflow 32 bits


def compute_advantages(rewards: Sequence[float | None], choice: Choice) -> list[float | None]:
    """Compute one advantage per rollout, at the same index as its reward.

    A reward of None is unknown or excluded. Its advantage is None, and the other advantages ignore it. The same applies to a reward whose
    magnitude exceeds `MAX_REWARD`.

    `normalised`     (reward - mean) / (standard deviation + EPSILON), with the population standard deviation (divided by n, not n - 1).
                     Exactly 0 if all rewards are equal, as in a group of one: there is nothing to learn.
    `leave_one_out`  reward - mean of the other rewards. None in a group of one, which has no baseline.
    `none`           the reward itself.
    """
    rewards = [None if reward is None or is_too_large(reward) else reward for reward in rewards]
    known = [reward for reward in rewards if reward is not None]
    if choice == "none" or not known:
        return rewards
    total = math.fsum(known)
    # Compare the rewards themselves: the mean of equal numbers may differ from them in the last digit.
    are_equal = min(known) == max(known)
    if choice == "leave_one_out":
        others = len(known) - 1
        return [None if r is None or not others else 0.0 if are_equal else r - (total - r) / others for r in rewards]
    mean = total / len(known)
    deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in known) / len(known))
    return [None if r is None else 0.0 if are_equal else (r - mean) / (deviation + EPSILON) for r in rewards]


def is_too_large(reward: float) -> bool:
    return not abs(reward) <= MAX_REWARD


def row_weight(rows: int) -> float:
    """Return the weight of each row of a rollout that has `rows` rows. The weights of its rows add up to 1."""
    return 1.0 / rows
