"""The terminal display of a training run."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tests.engines import local_kit  # noqa: F401  # skips where there is no torch
from turngate.trainers.local import display
from turngate.trainers.local.display import TrainingDisplay


class Progress:
    """The part of a batch's progress that the display reads."""

    def __init__(self, done: int) -> None:
        self.done = done
        self.states = {"start": 0, "run": 1, "grade": 0}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    return now


def test_remaining_time_is_estimated_from_finished_rollouts(clock: list[float]) -> None:
    printed = io.StringIO()
    shown = TrainingDisplay(Console(file=printed, width=200), steps=2, rollouts=20)
    shown.start_phase("training", 20)
    for done in (0, 3, 5):
        clock[0] += 30.0
        shown.update(Progress(done))  # type: ignore[arg-type]
    assert [line.partition(", ")[2] for line in printed.getvalue().splitlines()] == ["", "", "about 4 min left"]


def test_rollouts_of_an_earlier_process_do_not_shorten_the_estimate(clock: list[float]) -> None:
    printed = io.StringIO()
    shown = TrainingDisplay(Console(file=printed, width=200), steps=2, rollouts=20)
    shown.start_phase("training", 20)
    shown.update(Progress(10))  # type: ignore[arg-type]
    clock[0] += 60.0
    shown.update(Progress(15))  # type: ignore[arg-type]
    assert printed.getvalue().endswith("15/20 rollouts (1 running), about 1 min left\n")
