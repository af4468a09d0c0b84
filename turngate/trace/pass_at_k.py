"""pass@k: the chance that at least one of k rollouts passes."""

from __future__ import annotations

from math import comb


def pass_at_k(graded: int, passed: int, k: int) -> float:
    """The unbiased estimate. `k` may not exceed the number of graded rollouts."""
    if not 1 <= k <= graded or not 0 <= passed <= graded:
        raise ValueError(f"pass@{k} of {passed} in {graded} is not defined")
    return 1.0 - comb(graded - passed, k) / comb(graded, k)


def pass_curve(graded: int, passed: int) -> list[tuple[int, float]]:
    """pass@k for k = 1, 2, 4, … and `graded`, in one pass over k: thousands of rollouts have a curve too."""
    curve: list[tuple[int, float]] = []
    none = 1.0  # the chance that none of k passes
    for k in range(1, graded + 1):
        none *= max(0, graded - passed - k + 1) / (graded - k + 1)
        if k & (k - 1) == 0 or k == graded:
            curve.append((k, 1.0 - none))
    return curve


def has_passed(reward: float | None, resolved: bool | None) -> bool | None:
    """Whether a rollout passed. None: unknown."""
    if reward is None:
        return None
    return resolved if resolved is not None else reward >= 1.0
