"""Tests with the real `trl` package in its own environment: the tests of `inside_trl/` and the examples."""

from __future__ import annotations

import json
import re

import pytest

from tests.nested import TIERS, run, run_tests
from tools import parts

pytestmark = [pytest.mark.needs("trl", "agent:pi", "agent:mini-swe-agent"), pytest.mark.full]

PART = "trl"
AT_LEAST = 4  # tests marked as real in `inside_trl/`


@pytest.fixture(scope="module")
def python() -> str:
    """The Python interpreter of the environment with trl."""
    return str(parts.ensure(PART) / "bin" / "python")


@pytest.mark.parametrize("marks", TIERS)
def test_inside_trl_tests_pass(python: str, marks: str) -> None:
    """Run the tests of `inside_trl/` in its environment, without failing on its warnings."""
    passed = run_tests(python, "tests/trainers/inside_trl", marks, "-W", "default")
    assert passed >= (AT_LEAST if marks == "real" else 39 - AT_LEAST)


def test_dry_run_trains_five_steps(python: str) -> None:
    output = run(python, "examples/trl/async_grpo.py", "--dry-run")
    steps = [json.loads(line) for line in output.splitlines() if line.startswith('{"step"')]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    assert abs(steps[0]["kl"]) < 1e-5


def test_one_rollout_example_prints_rows(python: str) -> None:
    output = run(python, "examples/trl/one_rollout.py", "--dry-run", "--sandbox", "local")
    assert "pi on fix-add: finished, 1 turns, reward 0" in output
    assert re.search(r"row of \d+ tokens, 32 trained, .* advantage 0, policy version 0", output)
