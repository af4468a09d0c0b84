"""A reward file holds a finite number in one of Harbor's formats."""

from __future__ import annotations

import pytest

from turngate.tasks.grading.result import Undecided
from turngate.tasks.grading.script import _parse_reward


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
