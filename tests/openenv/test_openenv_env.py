"""The real `openenv` from PyPI, in an environment of its own: its server, its clients and its validator with our environment."""

from __future__ import annotations

import pytest

from tests.nested import TIERS, run_tests
from tools import parts

pytestmark = [pytest.mark.needs("trl"), pytest.mark.full]

PART = "trl"  # its environment has openenv
AT_LEAST = 3  # tests that stand for the others in `make test-real`


@pytest.fixture(scope="module")
def python() -> str:
    return str(parts.ensure(PART) / "bin" / "python")


@pytest.mark.parametrize("marks", TIERS)
def test_its_own_classes_with_ours(python: str, marks: str) -> None:
    """The tests of `inside/`, run there. Its warnings are its own business."""
    passed = run_tests(python, "tests/openenv/inside", marks, "-W", "default")
    assert passed >= (AT_LEAST if marks == "real" else 30 - AT_LEAST)
