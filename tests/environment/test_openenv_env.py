"""The real `openenv` from PyPI, in an environment of its own: its server, its clients and its validator with our environment."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tools import parts

PART = "trl"  # its environment has openenv
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def python() -> str:
    if reason := parts.missing(PART):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    return str(parts.ensure(PART) / "bin" / "python")


def test_its_own_classes_with_ours(python: str) -> None:
    """Every test of `inside/`, run there. Its warnings are its own business."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TURNGATE_ADMIN", "PYTEST"))}
    env = {**kept, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", "tests/environment/inside"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found and int(found[1]) >= 30 and "skipped" not in done.stdout
