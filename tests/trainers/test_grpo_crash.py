"""Test that a trainer killed repeatedly, with its gateway and rollouts, trains each delivery once."""

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

from tests.engines import local_kit  # noqa: F401  # skips if torch is missing
from tests.speed import scaled
from turngate.trainers.local import checkpoint
from turngate.trainers.local.grpo import Step

pytestmark = [pytest.mark.process, pytest.mark.full, pytest.mark.soak]

KILLS, MIN_KILLS = 5, 2
STEPS, EVERY = 9, 2
LONGEST_S = 120.0


def test_kills_lose_nothing_and_train_nothing_twice(tmp_path: Path, storm_scale: float) -> None:
    rng = random.Random(6)
    for _ in range(max(MIN_KILLS, round(KILLS * storm_scale))):
        _run(tmp_path, kill_after=rng.uniform(0.0, 0.15))
    output = _run(tmp_path)
    found = checkpoint.find_newest(tmp_path / "checkpoints")
    assert found is not None and [entry.name for entry in (tmp_path / "checkpoints").glob("step-*")] == [
        f"step-{STEPS:05d}"
    ]
    steps = [msgspec.convert(entry, Step) for entry in found.state.history]
    # The weights contain every delivery once and in order, two per step.
    assert [(step.first, step.last) for step in steps] == [(2 * n + 1, 2 * n + 2) for n in range(STEPS)]
    assert f"committed {2 * STEPS}" in output
    versions = [step.version for step in steps]
    assert versions == sorted(set(versions)) and versions[-1] > STEPS, "version numbers of lost weights were reused"


def _run(folder: Path, kill_after: float | None = None) -> str:
    """Run to completion, or kill it `kill_after` seconds after its first step."""
    command = [sys.executable, "-m", "tests.trainers.grpo_run", str(folder), str(STEPS), str(EVERY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        try:
            if kill_after is None:
                output, _ = process.communicate(timeout=scaled(LONGEST_S))
                assert process.returncode == 0
                return output
            first = process.stdout.readline()
            assert re.match(r"step \d+", first) or "committed" in first, first
            time.sleep(kill_after)
            return first
        finally:
            process.send_signal(signal.SIGKILL)
