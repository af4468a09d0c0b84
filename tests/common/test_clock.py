"""The clock of sessions and turns does not jump."""

from __future__ import annotations

import time

import pytest

from turngate.common import clock


def test_clock_shows_the_time_of_day(monkeypatch: pytest.MonkeyPatch) -> None:
    assert abs(clock.now() - time.time()) < 60
    before = clock.now()
    monkeypatch.setattr(time, "time", lambda: before - 3600)  # the clock is set back
    assert before <= clock.now() < before + 60
