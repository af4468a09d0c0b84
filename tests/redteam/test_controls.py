"""Controls of the attacks on graders: they deceive a grader that trusts what the work wrote, so their failure elsewhere shows a wall."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.redteam import attacks
from tests.speed import scaled
from tests.tasks.grading import kit

pytestmark = [pytest.mark.process, pytest.mark.full]

# Attacks that aim at our own grader, at its witness or to break it, and one that pytest itself detects.
SPECIAL = {
    "compiled code in place of tests",
    "a package in place of a test's module",
    "forges the witness report and exits",
    "a folder in place of the report",
    "a report too long to read",
    "very long output",
}
# Without a sandbox, attacks that kill processes would kill this one, and all others.
NAIVE = [name for name, work in attacks.REPOSITORY.items() if name not in SPECIAL and "os.kill" not in str(work)]
PAID = [name for name, code in attacks.SCRIPT.items() if code.startswith(attacks.PAY) and "os.kill" not in code]


def passes_naive_grader(folder: Path) -> bool:
    """Grade like a grader that runs the tests in the agent's folder and believes the exit code, or the output."""
    command = [sys.executable, *kit.PYTEST.split()[1:]]
    env = {"PATH": os.defpath, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # the plugins of our own tests, which take half the time
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, timeout=scaled(60), check=False, start_new_session=True
    )
    return not done.returncode or all(f"PASSED {name}".encode() in done.stdout for name in (*kit.PASS, *kit.FAIL))


def make_folder(folder: Path, changes: attacks.Changes) -> Path:
    """Make a repository with the hidden tests, and an agent's changes."""
    kit.write_files(folder, kit.REPO)
    subprocess.run(["patch", "-p1", "--quiet"], input=kit.TEST_PATCH.encode(), cwd=folder, check=True)
    return kit.make_work(folder, changes, {}).folder


@pytest.mark.parametrize("name", NAIVE)
def test_attack_deceives_naive_grader(name: str, tmp_path: Path) -> None:
    assert passes_naive_grader(make_folder(tmp_path, attacks.REPOSITORY[name]))


def test_naive_grader_rejects_the_bug(tmp_path: Path) -> None:
    assert not passes_naive_grader(make_folder(tmp_path / "bug", {}))
    assert passes_naive_grader(make_folder(tmp_path / "fix", {"shop/prices.py": kit.FIX}))


@pytest.mark.parametrize("name", PAID)
def test_attack_writes_the_reward(name: str, tmp_path: Path) -> None:
    (tmp_path / "verifier").mkdir()
    env = {"PATH": os.defpath, "TURNGATE_LOGS": str(tmp_path)}
    subprocess.run([sys.executable, "-c", attacks.SCRIPT[name]], cwd=tmp_path, env=env, timeout=scaled(30), check=False)
    assert (tmp_path / "verifier" / "reward.txt").read_text() == "1"
