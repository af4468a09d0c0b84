"""The numbers of a batch, against counting by hand; and the pictures of them."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from statistics import fmean
from typing import Any

import pytest

from turngate.rollout.ledger import FinishedRollout
from turngate.rollout.plot import build_panels, render_lines, render_svg
from turngate.rollout.summary import build_histogram, pass_at_k, summarize


def rollout(task: str, index: int, reward: float | None = None, **fields: Any) -> FinishedRollout:
    known = {"kind": "graded" if reward is not None else "infrastructure fault", "attempt": 1, "at": 1.0, **fields}
    return FinishedRollout(rollout=f"b.{task}.{index}", task=task, index=index, reward=reward, **known)


@pytest.mark.parametrize("graded", range(1, 8))
def test_pass_at_k_is_the_share_of_all_choices_of_k_with_a_pass_in_it(graded: int) -> None:
    for passed in range(graded + 1):
        results = [True] * passed + [False] * (graded - passed)
        for k in range(1, graded + 1):
            choices = list(itertools.combinations(results, k))
            assert pass_at_k(graded, passed, k) == pytest.approx(fmean(any(choice) for choice in choices))


@pytest.mark.parametrize(("graded", "passed", "k"), [(3, 1, 4), (0, 0, 1), (3, 4, 1), (3, 1, 0)])
def test_pass_at_k_of_more_than_was_tried_is_not_made_up(graded: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match="is undefined for"):
        pass_at_k(graded, passed, k)


def test_only_known_rewards_count() -> None:
    """Three of four are known; the fourth is in no mean, is not 0, and makes the group a shrunken one."""
    found = [
        rollout("a", 0, 1.0),
        rollout("a", 1, 0.0),
        rollout("a", 2, 0.5),
        rollout("a", 3, message="boom"),
    ]
    summary = summarize("b", ["a"], 4, found)
    [task] = summary.tasks
    assert (task.graded, task.passed, task.mean_reward) == (3, 1, 0.5)
    assert task.rewards == (1.0, 0.0, 0.5, None)
    assert [p.k for p in task.pass_at] == [1, 2, 3] and task.pass_at[0].estimate == pytest.approx(1 / 3)
    assert [(g.task, g.graded, g.wanted, dict(g.why)) for g in summary.shrunken] == [
        ("a", 3, 4, {"infrastructure fault": 1})
    ]
    assert summary.no_signal == ()
    assert summary.messages == {"infrastructure fault": [("boom", 1)]}


def test_resolved_wins_over_the_reward_in_what_a_pass_is() -> None:
    found = [
        rollout("a", 0, 0.9, resolved=True),
        rollout("a", 1, 1.0, resolved=False),
        rollout("a", 2, 1.0),
        rollout("a", 3, 0.99),
    ]
    assert summarize("b", ["a"], 4, found).overall.passed == 2


def test_groups_whose_rewards_are_all_the_same_have_no_signal() -> None:
    found = [
        *(rollout("zeros", n, 0.0) for n in range(2)),
        *(rollout("ones", n, 1.0) for n in range(2)),
        *(rollout("mixed", n, float(n)) for n in range(2)),
        rollout("alone", 0, 0.5),
        rollout("alone", 1),
        rollout("nobody", 0),
        rollout("nobody", 1),
    ]
    summary = summarize("b", ["zeros", "ones", "mixed", "alone", "nobody", "later"], 2, found)
    assert [(g.task, g.reward) for g in summary.no_signal] == [("zeros", 0.0), ("ones", 1.0), ("alone", 0.5)]
    assert [g.task for g in summary.shrunken] == ["alone", "nobody"]
    assert summary.overall.mean_reward == pytest.approx(3.5 / 7)
    assert {k: (p.estimate, p.tasks) for k, p in enumerate(summary.overall.pass_at, 1)} == {
        1: ((0 + 1 + 0.5 + 0) / 4, 4),
        2: ((0 + 1 + 1) / 3, 3),
    }
    later = summary.tasks[-1]
    assert (later.finished, later.wanted, later.mean_reward, later.pass_at) == (0, 2, None, ())


def test_a_group_is_of_one_round() -> None:
    """The same task, better in the second round: neither group has a signal, though their rewards differ."""
    found = [rollout("a", i, float(r), round=r) for r in range(2) for i in range(2)] + [
        rollout("b", 0, 1.0),
        rollout("b", 1),
    ]
    summary = summarize("b", ["a", "b"], 2, found, rounds=3)
    assert [(g.task, g.round, g.reward) for g in summary.no_signal] == [("a", 0, 0.0), ("a", 1, 1.0), ("b", 0, 1.0)]
    assert [(g.task, g.round, g.graded, g.wanted) for g in summary.shrunken] == [("b", 0, 1, 2)]
    assert [(r.round, r.wanted, r.finished, r.mean_reward) for r in summary.rounds] == [
        (0, 4, 4, pytest.approx(1 / 3)),
        (1, 4, 2, 1.0),
        (2, 4, 0, None),
    ]
    assert summary.rounds[1].pass_at[1].estimate == 1.0 and summary.rounds[1].pass_at[1].tasks == 1
    assert summary.tasks[0].rewards == (0.0, 0.0, 1.0, 1.0, None, None) and summary.overall.wanted == 12
    assert [p.k for p in summary.tasks[0].pass_at] == [1, 2], "never of more than a group has"


def test_every_finished_rollout_is_in_one_class() -> None:
    kinds = ["graded", "agent failed", "invalid task", "infrastructure fault", "not graded", "cancelled", "stale"]
    summary = summarize("b", ["a"], 7, [rollout("a", n, kind=kind) for n, kind in enumerate(kinds)])
    assert dict(summary.overall.kinds) == dict.fromkeys(kinds, 1)
    assert summary.overall.mean_reward is None and summary.overall.pass_at == ()


def test_times_are_means_over_those_that_came_so_far() -> None:
    found = [
        rollout(
            "a", 0, 1.0, seconds={"sandbox": 1.0, "setup": 1.0, "agent": 4.0, "grade": 2.0}, turns=3, sampled_tokens=9
        ),
        rollout("a", 1, seconds={"sandbox": 3.0}),
    ]
    overall = summarize("b", ["a"], 2, found).overall
    assert overall.stages == {"sandbox": 2.0, "setup": 1.0, "agent": 4.0, "grade": 2.0}
    assert overall.phases == {"start": 2.5, "run": 4.0, "grade": 2.0}
    assert (overall.mean_turns, overall.mean_tokens) == (3, 9)


def test_the_histogram_has_every_reward_once() -> None:
    rewards = [0.0, 0.05, 0.1, 0.999, 1.0, -0.5, 2.0]
    bins = build_histogram(rewards)
    assert sum(b.count for b in bins) == len(rewards)
    assert (bins[0].low, bins[-1].high) == (-0.5, 2.0)
    assert [b.count for b in build_histogram([0.0, 1.0])] == [1, *[0] * 8, 1]
    assert build_histogram([]) == ()


def test_the_picture_is_well_formed_whatever_a_task_is_called() -> None:
    found = [
        rollout("a<b>&\"'", n, float(n % 2), seconds={"agent": 1.0}, turns=n, sampled_tokens=n * 100) for n in range(8)
    ]
    summary = summarize("<batch>", ["a<b>&\"'"], 8, found)
    root = ET.fromstring(render_svg(summary, found))
    said = " ".join(text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text"))
    for wanted in ("<batch>", "mean reward 0.500", "pass@k", "k = 8", "100.0%", "turns per rollout", "agent", "1.00 s"):
        assert wanted in said
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 8


def test_a_batch_of_nothing_has_a_picture_too() -> None:
    summary = summarize("b", ["a"], 2, [])
    assert "no rewards" in render_svg(summary, [])
    ET.fromstring(render_svg(summary, []))
    assert render_lines(build_panels(summary, [])[0]) == ["rewards: no data"]


def test_bars_are_as_long_as_what_they_show() -> None:
    found = [rollout("a", n, 1.0 if n else 0.0) for n in range(5)]
    rewards = render_lines(build_panels(summarize("b", ["a"], 5, found), found)[0], width=8)
    assert rewards[1].endswith("██ 1") and rewards[-1].endswith("████████ 4")
