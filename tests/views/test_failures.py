"""Failures that differ only in numbers are counted together."""

from __future__ import annotations

import pytest

from turngate.views.failures import remove_numbers


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
