"""Test for the fast demo: a real agent, model and sandbox, trained with GRPO."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines import local_kit  # noqa: F401  # skips where there is no torch
from tests.speed import scaled

pytestmark = [
    pytest.mark.needs("smollm2", "torch", "bubblewrap", "agent:mini-swe-agent"),
    pytest.mark.real,
    pytest.mark.soak,
]

ROOT = Path(__file__).parents[2]


def test_fast_demo_trains_real_agent(tmp_path: Path, storm_scale: float) -> None:
    """Runs one update and two held-out tasks here, and in `make soak` all three updates and five tasks."""
    count, held_out = max(1, round(3 * storm_scale)), max(2, round(5 * storm_scale))
    out = tmp_path / "demo"
    command = [
        sys.executable,
        str(ROOT / "examples" / "demo.py"),
        "--fast",
        "--steps",
        str(count),
        "--held-out",
        str(held_out),
        "--out",
        str(out),
        "--sandbox",
        "bubblewrap",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(300), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = json.loads((out / "steps.json").read_text())
    assert [step["step"] for step in steps] == [*range(1, count + 1)]
    for step in steps:
        measured = step["measured"]
        assert measured["compared"] == measured["rows"] == 8 and not measured["refused"]
        assert measured["difference"] < 1e-3  # trainer and engine log-probabilities agree
    assert count == 1 or any(step["measured"]["signal"] for step in steps), "no group had both successes and failures"
    assert (out / "reward.svg").read_text().startswith("<svg")
    assert [folder.name for folder in (out / "checkpoints").iterdir()] == [f"step-{count:05}"]
    for expected in ("held-out tasks, before", "held-out tasks, after", "passed, held-out tasks", "before", "Plot:"):
        assert expected in done.stdout
    first = done.stdout[: done.stdout.index("held-out tasks, before")]
    for text in (
        "watch    http://127.0.0.1:",
        "admin-key",
        "outcome graded · reward",
        "mean log-probability",
        "more rollouts, with training",
    ):
        assert text in first, first
