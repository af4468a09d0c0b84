"""A trainer is killed over and over, with its gateway and its rollouts, and each delivery is in its weights once."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tests.engines import local_kit  # noqa: F401  # skips where there is no torch
from tests.speed import scaled
from turngate.trainers.local import checkpoint
from turngate.trainers.local.grpo import Step

pytestmark = [pytest.mark.process, pytest.mark.full]

KILLS, STEPS, EVERY = 5, 9, 2
LONGEST_S = 120.0


def test_killed_at_any_moment_nothing_is_lost_and_nothing_trained_twice(tmp_path: Path) -> None:
    chosen = random.Random(6)
    for _ in range(KILLS):
        _run(tmp_path, kill_after=chosen.uniform(0.0, 0.15))
    said = _run(tmp_path)
    found = checkpoint.find_newest(tmp_path / "checkpoints")
    assert found is not None and [one.name for one in (tmp_path / "checkpoints").glob("step-*")] == [
        f"step-{STEPS:05d}"
    ]
    steps = [msgspec.convert(one, Step) for one in found.state.history]
    # What is in the weights: every delivery, in order, once. Two make a step.
    assert [(step.first, step.last) for step in steps] == [(2 * n + 1, 2 * n + 2) for n in range(STEPS)]
    assert f"committed {2 * STEPS}" in said
    versions = [step.version for step in steps]
    assert versions == sorted(set(versions)) and versions[-1] > STEPS, (
        "lost weights give their version's number to no others"
    )


def _run(folder: Path, kill_after: float | None = None) -> str:
    """To its end, or so many seconds beyond its first step."""
    command = [sys.executable, "-m", "tests.trainers.grpo_run", str(folder), str(STEPS), str(EVERY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        try:
            if kill_after is None:
                said, _ = process.communicate(timeout=scaled(LONGEST_S))
                assert process.returncode == 0
                return said
            first = process.stdout.readline()
            assert re.match(r"step \d+", first) or "committed" in first, first
            time.sleep(kill_after)
            return first
        finally:
            process.send_signal(signal.SIGKILL)
