"""The real `openenv` package in its own Python environment: its server, clients and validator with our environment."""

from __future__ import annotations

import pytest

from tests.nested import TIERS, run_tests
from tools import parts

pytestmark = [pytest.mark.needs("trl"), pytest.mark.full]

PART = "trl"  # its environment has openenv
REAL_TESTS = 3  # tests that run in `make test-real`


@pytest.fixture(scope="module")
def python() -> str:
    return str(parts.ensure(PART) / "bin" / "python")


@pytest.mark.parametrize("marks", TIERS)
def test_openenv_integration(python: str, marks: str) -> None:
    """Run the tests of `inside/`, without turning the package's warnings into errors."""
    passed = run_tests(python, "tests/openenv/inside", marks, "-W", "default")
    assert passed >= (REAL_TESTS if marks == "real" else 30)
