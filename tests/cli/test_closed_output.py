"""Commands whose output is closed, as in `turngate run | head -1`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.kit import CALL_ONCE, ROOT, SLEEP_S, outcome_of, sessions, shell_run
from tests.sandboxes import kit as sandboxes
from tests.speed import scaled

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("own_temporary_folder")]


def run_until(line: str, *arguments: str | Path, merged: bool = False) -> tuple[int, str]:
    """Run `turngate …`, and close its output once it has printed a line that contains `line`. Return its exit code and error output."""
    process = subprocess.Popen(
        [sys.executable, "-m", "turngate", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        for printed in process.stdout:
            if line in printed:
                break
        process.stdout.close()
        errors = "" if process.stderr is None else process.stderr.read()
        return process.wait(scaled(40)), errors
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


@pytest.mark.parametrize("merged", [False, True], ids=["stdout", "stderr too"])
def test_run_ends_its_session_and_sandbox(merged: bool, data: Path) -> None:
    # The run prints its next line when the agent starts or, if that was too early, after one of the agent's calls.
    command = f"sleep {SLEEP_S} & while :; do {CALL_ONCE}; sleep 1; done"
    assert run_until("launch", *shell_run(data, command), merged=merged) == (130, "")
    assert sandboxes.processes(SLEEP_S) == []
    assert sessions(data) == [("cancelled", "cancelled")]
    assert outcome_of(data)["reward"] is None


def test_finished_run_keeps_its_exit_code(data: Path) -> None:
    code, errors = run_until("done", *shell_run(data, CALL_ONCE))
    assert (code, errors) == (0, "")
    assert sessions(data) == [("sealed", "")]
