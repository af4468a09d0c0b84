"""`turngate run` after Ctrl-C and other signals, and on a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.kit import CALL_ONCE, SLEEP_S, outcome_of, run_cli, sessions, shell_run, start_cli
from tests.sandboxes import kit as sandboxes
from tests.speed import paced, scaled

pytestmark = [pytest.mark.process, pytest.mark.full, pytest.mark.usefixtures("own_temporary_folder")]

# ── signals ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.repeat)]
)
def test_signal_cleans_up_and_keeps_recording(number: signal.Signals, data: Path) -> None:
    with start_cli(*shell_run(data, f"{CALL_ONCE}; sleep {SLEEP_S}"), TMPDIR=os.environ["TMPDIR"]) as running:
        running.wait_until(lambda: sandboxes.processes(f"sleep\0{SLEEP_S}"))
        running.send(number)
        assert running.wait_for_exit() == 130
        assert "Stopping: ending the agent and removing its sandbox; the recording is kept …\n" in running.output
        assert "cancelled after " in running.output
        assert "  trace   1 turn (1 main), " in running.output and ", 1 row, kept\n" in running.output
        assert "  inspect turngate show " in running.output
        assert "Traceback" not in running.output
    assert sandboxes.processes(SLEEP_S) == []
    assert sessions(data) == [("cancelled", "cancelled")]
    assert outcome_of(data)["status"] == "cancelled"
    assert "turns   1 (1 main)" in run_cli("show", "--data", data).stdout


def test_second_ctrl_c_waits_and_third_quits(data: Path) -> None:
    """The agent ignores SIGTERM: it is killed after a second in the first run, and never in the second."""
    set_kill_timeout = (
        "from turngate.sandboxes.supervised_sandbox import SupervisedJob; SupervisedJob.kill.__defaults__ = ({},)"
    )
    stubborn = f"trap '' TERM; sleep {SLEEP_S} & while :; do wait; done"
    env = {"TMPDIR": os.environ["TMPDIR"]}
    with start_cli(*shell_run(data, stubborn), before=set_kill_timeout.format(paced(0.75)), **env) as running:
        running.wait_until(lambda: sandboxes.processes(f"sleep\0{SLEEP_S}"))
        running.send(signal.SIGINT)
        running.wait_for_output("Stopping")
        running.send(signal.SIGINT)
        running.wait_for_output(
            "Still cleaning up. Press Ctrl-C again to quit immediately and leave the cleanup to the next run."
        )
        assert running.wait_for_exit() == 130
        assert "cancelled after" in running.output
    with start_cli(*shell_run(data, stubborn), before=set_kill_timeout.format(3600), **env) as running:
        running.wait_until(lambda: sandboxes.processes(f"sleep\0{SLEEP_S}"))
        for expected in ("Stopping", "Still"):
            running.send(signal.SIGINT)
            running.wait_for_output(expected)
        running.send(signal.SIGINT)
        assert running.wait_for_exit() == 130 and "cancelled after" not in running.output
    end = time.monotonic() + scaled(10)
    while sandboxes.processes(SLEEP_S) or list(Path(os.environ["TMPDIR"]).glob("turngate-*/*")):
        assert time.monotonic() < end  # the sandbox supervisor notices
        time.sleep(0.05)
    assert [status for status, _ in sessions(data)][1:] == ["cancelled"]


def test_ctrl_c_before_rollout_starts(data: Path) -> None:
    with start_cli(*shell_run(data, "true", "--tunnel", f"sleep {SLEEP_S}"), TMPDIR=os.environ["TMPDIR"]) as running:
        running.wait_until(lambda: sandboxes.processes(f"sleep\0{SLEEP_S}"))
        running.send(signal.SIGINT)
        assert running.wait_for_exit() == 130
        assert running.output.endswith("Cancelled before the rollout started.\n")
    assert sandboxes.processes(SLEEP_S) == [] and sessions(data) == []


@pytest.mark.needs("docker")
@pytest.mark.real
@pytest.mark.real
def test_ctrl_c_leaves_no_container(data: Path) -> None:
    sandboxes.need("docker")
    words = shell_run(data, f"{CALL_ONCE}; sleep {SLEEP_S}", "--sandbox", "docker")
    with start_cli(*words, TMPDIR=os.environ["TMPDIR"]) as running:
        running.wait_until(lambda: sandboxes.processes(f"sleep\0{SLEEP_S}"), 90)
        running.send(signal.SIGINT)
        assert running.wait_for_exit() == 130
    listed = ["docker", "ps", "--all", "--format", '{{.Label "turngate.owner"}}']
    owners = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    assert f" {running.process.pid} " not in owners
    assert sandboxes.processes(SLEEP_S) == []


# ── on a terminal ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_progress_updates_one_line(data: Path) -> None:
    """On a terminal of 40 columns, narrower than the line."""
    with start_cli(*shell_run(data, f"{CALL_ONCE}; sleep {paced(0.5):.1f}"), columns=40) as running:
        assert running.wait_for_exit() == 0
        raw = running.output
        assert raw.count("\x1b[?25l") == raw.count("\x1b[?25h") == 1  # hides and restores the cursor
        for stage in ("relay", "agent"):
            assert stage in running.plain
        assert "1 turn ·" in running.plain
        assert "0:0" in running.plain and "\x1b[2K" in raw
        last = running.plain[running.plain.rindex("finished (exit code 0)") :]
        session = outcome_of(data)["session"]
        # Longer than the terminal is wide, but not wrapped.
        assert f"\n  inspect turngate show {session} --data {data}\n" in last
        progress = [line for line in running.plain[: running.plain.rindex("finished")].split("\r") if line.strip()]
        assert all(len(line.rstrip("\n")) <= 40 for line in progress), progress


def test_ctrl_c_on_terminal(data: Path) -> None:
    with start_cli(
        *shell_run(data, f"{CALL_ONCE}; sleep {SLEEP_S}"), columns=100, TMPDIR=os.environ["TMPDIR"]
    ) as running:
        running.wait_until(lambda: sandboxes.processes(f"sleep\0{SLEEP_S}"))
        running.type(b"\x03")
        assert running.wait_for_exit() == 130
        assert "Stopping" in running.plain and "cancelled after" in running.plain
        assert running.output.rindex("\x1b[?25h") > running.output.rindex("\x1b[?25l")
    assert sandboxes.processes(SLEEP_S) == []
