"""The real `trl` from PyPI, in an environment of its own: its classes beside ours (`inside_trl/`), and the examples as a user runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tools import parts
from turngate.agents import install
from turngate.agents.spec import find

PART = "trl"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def python() -> str:
    """That has trl, beside the agents that the tests run."""
    reason = parts.missing(PART)
    for agent in ("mini-swe-agent", "pi"):
        reason = reason or install.missing(find(agent).spec)
    if reason:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    return str(parts.ensure(PART) / "bin" / "python")


def ran(*command: str, limit_s: float = 600) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TURNGATE_ADMIN", "PYTEST"))}
    env = {**kept, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


def test_its_own_classes_beside_ours(python: str) -> None:
    """Every test of `inside_trl/`, run there. Its warnings are its own business."""
    told = ran(python, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", "tests/trainers/inside_trl")
    found = re.search(r"(\d+) passed", told)
    assert found and int(found[1]) >= 39 and "skipped" not in told


def test_the_dry_run_trains_for_five_steps(python: str) -> None:
    told = ran(python, "examples/trl/async_grpo.py", "--dry-run")
    steps = [json.loads(line) for line in told.splitlines() if line.startswith('{"step"')]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    assert abs(steps[0]["kl"]) < 1e-5


def test_one_rollout_by_hand_prints_its_rows(python: str) -> None:
    told = ran(python, "examples/trl/one_rollout.py", "--dry-run", "--sandbox", "local")
    assert "pi on fix-add: finished, 1 turns, reward 0" in told
    assert re.search(r"row of \d+ tokens, 32 trained, .* advantage 0, policy version 0", told)
