"""Each choice of advantage against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from turngate.trace.advantage import EPSILON, MAX_REWARD, Choice, compute_advantages, row_weight


def close(found: list[float | None], wanted: list[float | None]) -> bool:
    return all(
        (f is None) == (w is None) and (f is None or w is None or math.isclose(f, w, rel_tol=1e-12))
        for f, w in zip(found, wanted, strict=True)
    )


def test_normalised() -> None:
    # 1, 0, 0, 1: mean 1/2, each is 1/2 away from it, so the standard deviation is 1/2.
    one = 0.5 / (0.5 + EPSILON)
    assert close(compute_advantages([1.0, 0.0, 0.0, 1.0], "normalised"), [one, -one, -one, one])
    # 4, 1, 1: mean 2, squares 4, 1, 1, of the population 6/3, so the standard deviation is the root of 2.
    root = math.sqrt(2.0) + EPSILON
    assert close(compute_advantages([4.0, 1.0, 1.0], "normalised"), [2 / root, -1 / root, -1 / root])


def test_leave_one_out() -> None:
    # 1, 0, 0, 1: the others of a 1 have 1/3 on the mean, those of a 0 have 2/3.
    assert close(compute_advantages([1.0, 0.0, 0.0, 1.0], "leave_one_out"), [2 / 3, -2 / 3, -2 / 3, 2 / 3])
    # 4, 1, 1: 4 - 1 = 3; 1 - 5/2 = -3/2.
    assert close(compute_advantages([4.0, 1.0, 1.0], "leave_one_out"), [3.0, -1.5, -1.5])


def test_none_is_the_reward_itself() -> None:
    assert compute_advantages([4.0, None, 0.25], "none") == [4.0, None, 0.25]


def test_what_does_not_count_has_no_say() -> None:
    for choice in ("normalised", "leave_one_out"):
        alone = compute_advantages([4.0, 1.0, 1.0], choice)  # type: ignore[arg-type]
        among = compute_advantages([None, 4.0, None, 1.0, 1.0], choice)  # type: ignore[arg-type]
        assert among == [None, alone[0], None, alone[1], alone[2]]
        assert compute_advantages([None, None], choice) == [None, None]  # type: ignore[arg-type]
        assert compute_advantages([], choice) == []  # type: ignore[arg-type]


def test_a_group_of_one() -> None:
    assert compute_advantages([0.7], "normalised") == [0.0]
    assert compute_advantages([0.7], "leave_one_out") == [None]  # there is nobody to compare it with
    assert compute_advantages([None, 0.7], "leave_one_out") == [None, None]
    assert compute_advantages([0.7], "none") == [0.7]


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.3, MAX_REWARD])
@pytest.mark.parametrize("count", [2, 3, 7, 16])
@pytest.mark.parametrize("choice", ["normalised", "leave_one_out"])
def test_equal_rewards_teach_nothing(reward: float, count: int, choice: Choice) -> None:
    """Exactly 0, though the mean of ten tenths is not a tenth."""
    assert compute_advantages([reward] * count, choice) == [0.0] * count


@pytest.mark.parametrize("choice", ["normalised", "leave_one_out", "none"])
def test_no_advantage_is_more_than_a_trainer_can_reckon_with(choice: Any) -> None:
    for rewards in ([1e308, 1e308, -1e308, 0.0, 1.0], [1e31, 0.0, 1.0], [MAX_REWARD, -MAX_REWARD, 1.0]):
        found = compute_advantages(rewards, choice)
        assert [one is None for one in found] == [abs(reward) > MAX_REWARD for reward in rewards]
        assert all(np.isfinite(np.float32(one)) for one in found if one is not None)


def test_rows_of_a_rollout_weigh_as_one() -> None:
    assert [row_weight(n) for n in (1, 2, 4)] == [1.0, 0.5, 0.25]
    assert math.isclose(sum(row_weight(3) for _ in range(3)), 1.0)
