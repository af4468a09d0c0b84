"""pass@k: the probability that at least one of k rollouts passes."""

from __future__ import annotations

from math import comb


def pass_at_k(graded: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of pass@k. `k` must not exceed the number of graded rollouts."""
    if not 1 <= k <= graded or not 0 <= passed <= graded:
        raise ValueError(f"pass@{k} is undefined (graded rollouts: {graded}, passed: {passed})")
    return 1.0 - comb(graded - passed, k) / comb(graded, k)


def pass_curve(graded: int, passed: int) -> list[tuple[int, float]]:
    """Return the pairs (k, pass@k) for k = 1, 2, 4, … and for k = `graded`.

    Computing each probability from the previous one is fast even for thousands of rollouts.
    """
    curve: list[tuple[int, float]] = []
    none = 1.0  # the probability that none of k rollouts passes
    for k in range(1, graded + 1):
        none *= max(0, graded - passed - k + 1) / (graded - k + 1)
        if k & (k - 1) == 0 or k == graded:
            curve.append((k, 1.0 - none))
    return curve


def has_passed(reward: float | None, resolved: bool | None) -> bool | None:
    """Return whether a rollout passed, or None if its reward is unknown. If `resolved` is None, a reward of at least 1 is a pass."""
    if reward is None:
        return None
    return resolved if resolved is not None else reward >= 1.0
