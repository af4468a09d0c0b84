"""A reward file holds a finite number in one of Harbor's formats. The grade of a function has a finite reward, or none if it may."""

from __future__ import annotations

import pytest

from turngate.tasks.grading.function import _to_grade
from turngate.tasks.grading.result import Undecided
from turngate.tasks.grading.script import _parse_reward
from turngate.tasks.grading.types import Grade


@pytest.mark.parametrize(
    ("kind", "content", "reward"),
    [
        ("txt", b"1", 1.0),
        ("txt", b" 0.25\n", 0.25),
        ("txt", b"-1", -1.0),
        ("json", b'{"reward": 1}', 1.0),
        ("json", b'{"reward": 0.5, "style": 1.0}', 0.5),
        ("json", b'{"accuracy": 0.75}', 0.75),
        ("json", b"0.5", 0.5),
    ],
)
def test_valid_rewards(kind: str, content: bytes, reward: float) -> None:
    assert _parse_reward(kind, content) == reward


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("txt", b""),
        ("txt", b"yes"),
        ("txt", b"nan"),
        ("txt", b"inf"),
        ("txt", b"1 1"),
        ("txt", b"\xff"),
        ("json", b""),
        ("json", b"{}"),
        ("json", b'{"a": 1, "b": 0}'),
        ("json", b'{"reward": "1"}'),
        ("json", b'{"reward": true}'),
        ("json", b'{"reward": 1e999}'),
        ("json", b'{"reward": null}'),
        ("json", b"[1]"),
        ("json", b"NaN"),
        pytest.param("json", b"[" * 5000, id="nested"),
    ],
)
def test_invalid_reward_is_undecided(kind: str, content: bytes) -> None:
    with pytest.raises(Undecided):
        _parse_reward(kind, content)


@pytest.mark.parametrize(
    ("grade", "problem"),
    [
        (Grade(kind="graded"), "without a finite reward"),
        (Grade(kind="agent failed", reward=float("nan")), "without a finite reward"),
        (Grade(kind="invalid task", reward=1.0), "kind 'invalid task' with a reward"),
        (Grade(kind="infrastructure fault", reward=0.0), "kind 'infrastructure fault' with a reward"),
    ],
)
def test_grades_that_the_store_would_reject(grade: Grade, problem: str) -> None:
    with pytest.raises(Undecided, match=problem):
        _to_grade("graders.py:grade", grade)


@pytest.mark.parametrize("grade", [Grade(kind="agent failed"), Grade(kind="agent failed", reward=0.0)])
def test_failed_agent_may_have_a_reward(grade: Grade) -> None:
    assert _to_grade("graders.py:grade", grade) is grade
