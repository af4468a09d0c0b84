"""Failures that differ only in numbers are counted together, and each has a message."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.store.kit import event
from turngate.store.store import Store
from turngate.views.failures import remove_numbers, summarize_failures
from turngate.views.rollout_index import RolloutIndex


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("exit code 137 after 12 s", "exit code # after # s"),
        ("segfault at 0x7f3a12", "segfault at #"),
        ("container 3fa85f64c1 is gone", "container # is gone"),
        ("container fa85f64c13 is gone", "container # is gone"),
        ("the cache is full", "the cache is full"),
    ],
)
def test_numbers_are_removed(message: str, text: str) -> None:
    assert remove_numbers(message) == text


def test_failure_without_message_shows_its_status(tmp_path: Path) -> None:
    """Such as a rollout that was cancelled before it had a session."""
    store = Store(tmp_path)
    store.events.add(event("lost", "stage", stage="done", status="cancelled"))
    [cancelled] = summarize_failures(RolloutIndex(), store, "")["classes"]
    assert cancelled["messages"] == [{"message": "cancelled", "count": 1, "rollouts": ["lost"]}]
    store.close()
