"""The summary of a batch, compared with counting by hand, and its plots."""

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
    defaults = {"kind": "graded" if reward is not None else "infrastructure fault", "attempt": 1, "at": 1.0, **fields}
    return FinishedRollout(rollout=f"b.{task}.{index}", task=task, index=index, reward=reward, **defaults)


@pytest.mark.parametrize("graded", range(1, 8))
def test_pass_at_k_matches_enumeration(graded: int) -> None:
    for passed in range(graded + 1):
        results = [True] * passed + [False] * (graded - passed)
        for k in range(1, graded + 1):
            choices = list(itertools.combinations(results, k))
            assert pass_at_k(graded, passed, k) == pytest.approx(fmean(any(choice) for choice in choices))


@pytest.mark.parametrize(("graded", "passed", "k"), [(3, 1, 4), (0, 0, 1), (3, 4, 1), (3, 1, 0)])
def test_pass_at_k_is_undefined_beyond_attempts(graded: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match="is undefined"):
        pass_at_k(graded, passed, k)


def test_only_known_rewards_count() -> None:
    """Three of four rewards are known. The fourth is in no mean, does not count as 0, and makes the group shrunken."""
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


def test_equal_failures_are_counted_together_whatever_the_grader_printed() -> None:
    output = "the grader's script gave no reward (exit code 1); the output ended with:\n3 failed in 0.{}2s"
    found = [rollout("a", n, kind="invalid task", message=output.format(n)) for n in range(3)]
    summary = summarize("b", ["a"], 3, found)
    assert summary.messages == {"invalid task": [("the grader's script gave no reward (exit code 1)", 3)]}


def test_resolved_takes_precedence_over_reward() -> None:
    found = [
        rollout("a", 0, 0.9, resolved=True),
        rollout("a", 1, 1.0, resolved=False),
        rollout("a", 2, 1.0),
        rollout("a", 3, 0.99),
    ]
    assert summarize("b", ["a"], 4, found).overall.passed == 2


def test_groups_with_equal_rewards_have_no_signal() -> None:
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


def test_only_trained_rollouts_give_a_signal() -> None:
    found = [
        *(rollout("part", n, float(n % 2), trained_tokens=9 * (n % 2)) for n in range(4)),
        *(rollout("none", n, float(n % 2), trained_tokens=0) for n in range(4)),
        *(rollout("most", n, float(n % 2), trained_tokens=9 * (n > 0)) for n in range(4)),
    ]
    summary = summarize("b", ["part", "none", "most"], 4, found)
    assert [(g.task, g.graded, g.reward) for g in summary.no_signal] == [("part", 4, 1.0)]
    assert summary.overall.untrained == 2 + 4 + 1


def test_warnings_are_not_cut_before_their_fix() -> None:
    warning = f"no tokens are trained: a model call by the agent was refused (404: {'x' * 500}); ask for a served model"
    found = [rollout("a", n, 1.0, warnings=(warning,)) for n in range(2)]
    assert summarize("b", ["a"], 2, found).warnings == [(warning, 2)]


def test_groups_are_separate_per_round() -> None:
    """A task scores higher in the second round: neither group has a signal, although their rewards differ."""
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
    assert [p.k for p in summary.tasks[0].pass_at] == [1, 2], "k must not exceed the group size"


def test_every_finished_rollout_has_one_class() -> None:
    kinds = ["graded", "agent failed", "invalid task", "infrastructure fault", "not graded", "cancelled", "stale"]
    summary = summarize("b", ["a"], 7, [rollout("a", n, kind=kind) for n, kind in enumerate(kinds)])
    assert dict(summary.overall.kinds) == dict.fromkeys(kinds, 1)
    assert summary.overall.mean_reward is None and summary.overall.pass_at == ()


def test_stage_times_are_means_over_rollouts_that_reached_them() -> None:
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


def test_histogram_counts_every_reward_once() -> None:
    rewards = [0.0, 0.05, 0.1, 0.999, 1.0, -0.5, 2.0]
    bins = build_histogram(rewards)
    assert sum(b.count for b in bins) == len(rewards)
    assert (bins[0].low, bins[-1].high) == (-0.5, 2.0)
    assert [b.count for b in build_histogram([0.0, 1.0])] == [1, *[0] * 8, 1]
    assert build_histogram([]) == ()


def test_plot_escapes_task_names() -> None:
    found = [
        rollout("a<b>&\"'", n, float(n % 2), seconds={"agent": 1.0}, turns=n, sampled_tokens=n * 100) for n in range(8)
    ]
    summary = summarize("<batch>", ["a<b>&\"'"], 8, found)
    root = ET.fromstring(render_svg(summary, found))
    svg_text = " ".join(text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text"))
    for wanted in ("<batch>", "mean reward 0.500", "pass@k", "k = 8", "100.0%", "turns per rollout", "agent", "1.00 s"):
        assert wanted in svg_text
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 8


def test_empty_batch_has_plot() -> None:
    summary = summarize("b", ["a"], 2, [])
    assert "no rewards" in render_svg(summary, [])
    ET.fromstring(render_svg(summary, []))
    assert render_lines(build_panels(summary, [])[0]) == ["rewards: no data"]


def test_bar_lengths_match_counts() -> None:
    found = [rollout("a", n, 1.0 if n else 0.0) for n in range(5)]
    rewards = render_lines(build_panels(summarize("b", ["a"], 5, found), found)[0], width=8)
    assert rewards[1].endswith("██ 1") and rewards[-1].endswith("████████ 4")


def test_untrained_rollouts_are_counted_by_reason() -> None:
    found = [
        rollout("a", 0, 1.0, trained_tokens=0, warnings=("no tokens are trained: greedy",)),
        rollout("a", 1, 0.0, trained_tokens=0, warnings=("no tokens are trained: greedy",)),
        rollout("a", 2, 0.0, trained_tokens=0, warnings=("no tokens are trained: refused",), refused_calls=3),
        rollout("a", 3, 1.0, trained_tokens=7),
        rollout("b", 0, 1.0),  # of an older gateway, which does not report it
    ]
    summary = summarize("b", ["a", "b"], 4, found)
    assert summary.warnings == [("no tokens are trained: greedy", 2), ("no tokens are trained: refused", 1)]
    assert (summary.overall.untrained, summary.overall.refused, summary.overall.trained_tokens) == (3, 1, 7)
    assert [task.untrained for task in summary.tasks] == [3, 0]
