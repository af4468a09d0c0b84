"""Tests for what training changed: the thirds of the versions, rewards by kind of task, and the rollouts shown before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from turngate.views.improvement import RewardedRollout, RewardTotal, choose_evenly, summarize_improvement

Rewards = dict[tuple[str, int], list[float]]  # of the rollouts, by task and version
KINDS = {"rename-1": "rename", "rename-2": "rename", "delete-1": "delete", "other": ""}


def summarize(rewards: Rewards, kinds: dict[str, str] = KINDS) -> dict[str, Any] | None:
    """Summarize rollouts with ids such as `rename-1@3.0`: task, version and number."""
    totals = [
        RewardTotal(task=task, kind=kinds.get(task, ""), version=version, total=sum(of), graded=len(of))
        for (task, version), of in rewards.items()
    ]

    def find(task: str, version: int) -> Sequence[RewardedRollout]:
        return [RewardedRollout(f"{task}@{version}.{n}", reward) for n, reward in enumerate(rewards[task, version])]

    return summarize_improvement(totals, find)


def choose(rewards: Rewards) -> dict[str, Any] | None:
    summary = summarize(rewards)
    assert summary is not None
    example: dict[str, Any] | None = summary["example"]
    return example


def test_one_version_has_no_before_and_after() -> None:
    assert summarize({}) is None
    assert summarize({("rename-1", 4): [0.0, 1.0]}) is None


@pytest.mark.parametrize(
    ("versions", "before", "after"),
    [
        ([0, 7], (0, 0), (7, 7)),
        ([0, 1, 2], (0, 0), (2, 2)),
        ([0, 1, 2, 3, 4], (0, 0), (4, 4)),
        ([0, 2, 4, 6, 8, 10], (0, 2), (8, 10)),
    ],
)
def test_versions_are_split_into_thirds(versions: list[int], before: tuple[int, int], after: tuple[int, int]) -> None:
    summary = summarize({("other", version): [0.0] for version in versions})
    assert summary is not None
    assert tuple(summary["before"].values()) == before and tuple(summary["after"].values()) == after


def test_rewards_by_kind_use_only_the_first_and_last_third() -> None:
    rewards: Rewards = {
        ("rename-1", 0): [0.0, 1.0],
        ("rename-2", 0): [0.0, 0.0],
        ("delete-1", 1): [9.0],  # in neither third
        ("rename-1", 2): [1.0],
        ("other", 2): [0.5],
    }
    summary = summarize(rewards)
    assert summary is not None
    assert summary["kinds"] == [
        {"kind": "rename", "before": {"mean": 0.25, "graded": 4}, "after": {"mean": 1.0, "graded": 1}},
        {"kind": "", "before": {"mean": None, "graded": 0}, "after": {"mean": 0.5, "graded": 1}},
    ]
    unknown = summarize(rewards, {})
    assert unknown is not None and unknown["kinds"] == []


def test_example_is_the_task_that_rose_most() -> None:
    example = choose(
        {
            ("rename-1", 0): [0.0, 0.0],
            ("rename-1", 3): [0.5, 0.5],
            ("rename-2", 0): [0.0, 0.0, 0.0],
            ("rename-2", 3): [1.0, 0.0, 1.0],  # the largest gain
            ("delete-1", 1): [0.0],  # between the thirds
            ("delete-1", 3): [1.0],
        }
    )
    assert example == {
        "task": "rename-2",
        "before": {"version": 0, "rollout": "rename-2@0.0", "reward": 0.0, "mean": 0.0, "graded": 3},
        "after": {"version": 3, "rollout": "rename-2@3.0", "reward": 1.0, "mean": pytest.approx(2 / 3), "graded": 3},
    }


def test_example_shows_the_first_and_last_version_and_the_rollout_nearest_to_the_mean() -> None:
    example = choose(
        {
            ("rename-1", 0): [1.0, 0.2, 0.0],
            ("rename-1", 1): [0.0, 0.0],
            ("other", 2): [0.0],
            ("other", 3): [0.0],
            ("rename-1", 4): [0.9, 0.9],
            ("rename-1", 5): [0.0, 1.0, 1.0],
        }
    )
    assert example is not None
    assert (example["before"]["rollout"], example["before"]["mean"]) == ("rename-1@0.1", pytest.approx(0.24))
    assert (example["after"]["rollout"], example["after"]["mean"]) == ("rename-1@5.1", pytest.approx(0.76))


def test_ties_are_decided_by_name_even_if_sums_are_rounded() -> None:
    gains = [0.1, 0.2, 0.3]
    example = choose(
        {
            ("b", 0): [0.0] * 3,
            ("b", 1): gains,
            ("a", 0): [0.0] * 3,
            ("a", 1): gains[::-1],  # adds up to another number
        }
    )
    assert example is not None and example["task"] == "a"


@pytest.mark.parametrize(
    "rewards",
    [
        {("rename-1", 0): [0.5], ("rename-1", 1): [0.5]},
        {("rename-1", 0): [1.0], ("rename-1", 1): [0.0]},
        {("rename-1", 0): [0.0], ("rename-2", 1): [1.0]},
        {("", 0): [0.0], ("", 1): [1.0]},
    ],
    ids=["equal", "fell", "no task in both", "tasks without a name"],
)
def test_no_example_if_no_mean_rose(rewards: Rewards) -> None:
    assert choose(rewards) is None


def test_no_example_if_its_rollouts_were_deleted() -> None:
    totals = [RewardTotal(task="a", kind="", version=v, total=float(v), graded=1) for v in (0, 1)]
    summary = summarize_improvement(totals, lambda task, version: [])
    assert summary is not None and summary["example"] is None


def test_versions_are_chosen_evenly() -> None:
    assert choose_evenly([0, 1, 5], 4) == [0, 1, 5]
    assert choose_evenly(range(100), 4) == [0, 33, 66, 99]
