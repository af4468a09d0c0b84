"""The session of a killed `turngate run`, as the next commands on its data folder show it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cli.kit import CALL_ONCE, SLEEP_S, run_cli, sessions, shell_run, start_cli
from tests.sandboxes import kit as sandboxes
from turngate.store.store import Store

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("own_temporary_folder")]


def oldest(data: Path) -> list[str]:
    store = Store.reading(data)
    try:
        return [row.id for row in store.sessions(limit=10)][-1:]
    finally:
        store.close()


def test_session_of_killed_run_ends_without_reward(data: Path) -> None:
    with start_cli(*shell_run(data, f"{CALL_ONCE}; sleep {SLEEP_S}"), TMPDIR=os.environ["TMPDIR"]) as running:
        running.wait_until(lambda: sandboxes.processes(f"sleep\0{SLEEP_S}"))
        running.send(signal.SIGKILL)
        running.wait_for_exit()
    assert sessions(data) == [("open", "")]
    assert "status  open (runner lost), " in run_cli("show", "--data", data).stdout
    assert run_cli(*shell_run(data, "true")).exit_code == 0
    assert sessions(data) == [("sealed", ""), ("cancelled", "runner lost")]
    session = run_cli("show", "--data", data, *oldest(data)).stdout
    assert "status  cancelled (runner lost), " in session and "reward" not in session
    verified = run_cli("verify", "--data", data, *oldest(data))
    assert verified.exit_code == 0 and "✓ exact" in verified.stdout and "1 turn, " in verified.stdout
