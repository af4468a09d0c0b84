"""Run tests in the Python environment of a part: the tests in `inside*/` folders import TRL, OpenEnv or verifiers."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.speed import scaled

ROOT = Path(__file__).parents[1]
# `make test-real` and `make test-all` run the `real` tests of such a folder, and `make soak` runs all of them, in one process.
TIERS = [
    pytest.param("real", marks=pytest.mark.real),
    pytest.param("", marks=pytest.mark.repeat, id="all"),
]


def environment(*paths: Path, **more: str) -> dict[str, str]:
    """Return the environment variables for a process in another Python environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TURNGATE_ADMIN", "PYTEST"))}
    path = os.pathsep.join(map(str, (ROOT, *paths)))
    return {**kept, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1", **more}


def run(*command: str, env: dict[str, str] | None = None) -> str:
    """Run a command that must succeed, and return its output."""
    with tempfile.TemporaryDirectory(prefix="n") as scratch:  # torch leaves files there
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**(env or environment()), "TMPDIR": scratch},
            capture_output=True,
            text=True,
            timeout=scaled(300),
            check=False,
        )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


def run_tests(python: str, folder: str, marks: str, *options: str, env: dict[str, str] | None = None) -> int:
    """Run the tests of a folder that match the marks; none may fail or be skipped. Return how many passed."""
    printed = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, *options, folder, env=env)
    found = re.search(r"(\d+) passed", printed)
    assert found and "skipped" not in printed, printed[-8000:]
    return int(found[1])
