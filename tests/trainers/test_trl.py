"""The real `trl` from PyPI, in an environment of its own: its classes beside ours (`inside_trl/`), and the examples as a user runs them."""

from __future__ import annotations

import json
import re

import pytest

from tests.nested import TIERS, run, run_tests
from tools import parts

pytestmark = [pytest.mark.needs("trl", "agent:pi", "agent:mini-swe-agent"), pytest.mark.full]

PART = "trl"
AT_LEAST = 4  # tests that stand for the others in `make test-real`


@pytest.fixture(scope="module")
def python() -> str:
    """That has trl, beside the agents that the tests run."""
    return str(parts.ensure(PART) / "bin" / "python")


@pytest.mark.parametrize("marks", TIERS)
def test_its_own_classes_beside_ours(python: str, marks: str) -> None:
    """The tests of `inside_trl/`, run there. Its warnings are its own business."""
    passed = run_tests(python, "tests/trainers/inside_trl", marks, "-W", "default")
    assert passed >= (AT_LEAST if marks == "real" else 39 - AT_LEAST)


def test_the_dry_run_trains_for_five_steps(python: str) -> None:
    told = run(python, "examples/trl/async_grpo.py", "--dry-run")
    steps = [json.loads(line) for line in told.splitlines() if line.startswith('{"step"')]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    assert abs(steps[0]["kl"]) < 1e-5


def test_one_rollout_by_hand_prints_its_rows(python: str) -> None:
    told = run(python, "examples/trl/one_rollout.py", "--dry-run", "--sandbox", "local")
    assert "pi on fix-add: finished, 1 turns, reward 0" in told
    assert re.search(r"row of \d+ tokens, 32 trained, .* advantage 0, policy version 0", told)
