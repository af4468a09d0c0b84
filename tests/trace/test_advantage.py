"""Test each advantage estimator against values computed by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from turngate.trace.advantage import EPSILON, MAX_REWARD, Choice, compute_advantages, row_weight


def all_close(actual: list[float | None], expected: list[float | None]) -> bool:
    return all(
        (a is None) == (e is None) and (a is None or e is None or math.isclose(a, e, rel_tol=1e-12))
        for a, e in zip(actual, expected, strict=True)
    )


def test_normalised_advantages() -> None:
    # 1, 0, 0, 1: mean 1/2, each deviates by 1/2, so the standard deviation is 1/2.
    unit = 0.5 / (0.5 + EPSILON)
    assert all_close(compute_advantages([1.0, 0.0, 0.0, 1.0], "normalised"), [unit, -unit, -unit, unit])
    # 4, 1, 1: mean 2, squared deviations 4, 1, 1, population variance 6/3, so the standard deviation is sqrt(2).
    root = math.sqrt(2.0) + EPSILON
    assert all_close(compute_advantages([4.0, 1.0, 1.0], "normalised"), [2 / root, -1 / root, -1 / root])


def test_leave_one_out_advantages() -> None:
    # 1, 0, 0, 1: the others of a 1 have mean 1/3, the others of a 0 have mean 2/3.
    assert all_close(compute_advantages([1.0, 0.0, 0.0, 1.0], "leave_one_out"), [2 / 3, -2 / 3, -2 / 3, 2 / 3])
    # 4, 1, 1: 4 - 1 = 3; 1 - 5/2 = -3/2.
    assert all_close(compute_advantages([4.0, 1.0, 1.0], "leave_one_out"), [3.0, -1.5, -1.5])


def test_none_returns_raw_reward() -> None:
    assert compute_advantages([4.0, None, 0.25], "none") == [4.0, None, 0.25]


def test_missing_rewards_do_not_affect_advantages() -> None:
    for choice in ("normalised", "leave_one_out"):
        without_none = compute_advantages([4.0, 1.0, 1.0], choice)  # type: ignore[arg-type]
        with_none = compute_advantages([None, 4.0, None, 1.0, 1.0], choice)  # type: ignore[arg-type]
        assert with_none == [None, without_none[0], None, without_none[1], without_none[2]]
        assert compute_advantages([None, None], choice) == [None, None]  # type: ignore[arg-type]
        assert compute_advantages([], choice) == []  # type: ignore[arg-type]


def test_group_of_one() -> None:
    assert compute_advantages([0.7], "normalised") == [0.0]
    assert compute_advantages([0.7], "leave_one_out") == [None]  # nothing to compare it with
    assert compute_advantages([None, 0.7], "leave_one_out") == [None, None]
    assert compute_advantages([0.7], "none") == [0.7]


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.3, MAX_REWARD])
@pytest.mark.parametrize("count", [2, 3, 7, 16])
@pytest.mark.parametrize("choice", ["normalised", "leave_one_out"])
def test_equal_rewards_give_zero_advantage(reward: float, count: int, choice: Choice) -> None:
    """The advantage is exactly 0, although the mean is rounded."""
    assert compute_advantages([reward] * count, choice) == [0.0] * count


@pytest.mark.parametrize("choice", ["normalised", "leave_one_out", "none"])
def test_huge_rewards_have_no_advantage(choice: Any) -> None:
    for rewards in ([1e308, 1e308, -1e308, 0.0, 1.0], [1e31, 0.0, 1.0], [MAX_REWARD, -MAX_REWARD, 1.0]):
        advantages = compute_advantages(rewards, choice)
        assert [advantage is None for advantage in advantages] == [abs(reward) > MAX_REWARD for reward in rewards]
        assert all(np.isfinite(np.float32(advantage)) for advantage in advantages if advantage is not None)


def test_row_weights_of_rollout_sum_to_one() -> None:
    assert [row_weight(n) for n in (1, 2, 4)] == [1.0, 0.5, 0.25]
    assert math.isclose(sum(row_weight(3) for _ in range(3)), 1.0)
