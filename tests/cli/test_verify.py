"""`turngate verify` on the command line: output streams and exit codes."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests import kit
from tests.cli.kit import run_cli


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder with one session of one turn."""

    async def record() -> None:
        async with kit.gateway([kit.say("Hello.")], data=tmp_path) as g:
            session = await g.open()
            await g.ask(session.key, "Hi")
            await g.seal(session.id)
            outcome = {"kind": "graded", "reward": 1.0}
            assert (await g.admin.put(f"/admin/sessions/{session.id}/outcome", json=outcome)).status_code == 200

    asyncio.run(record())
    return tmp_path


def sql(data: Path, statement: str) -> None:
    with closing(sqlite3.connect(data / "turngate.db", isolation_level=None)) as db:
        assert db.execute(statement).rowcount == 1


def test_intact_session_passes(data: Path) -> None:
    result = run_cli("verify", "--data", data)
    assert result.exit_code == 0 and "✓ exact" in result.stdout and "structure   18 checks passed" in result.stdout


@pytest.mark.parametrize(
    ("statement", "check"),
    [("UPDATE outcomes SET outcome='{'", "outcome"), ("UPDATE sessions SET status='zzz'", "status")],
)
def test_outcome_and_status_are_checked(statement: str, check: str, data: Path) -> None:
    sql(data, statement)
    result = run_cli("verify", "--data", data)
    assert result.exit_code == 1 and "✗ wrong" in result.stdout and f"✗ {check}  " in result.stdout
    is_readable = (
        "rows        5 checks passed" in result.stdout
    )  # the gateway does not read a session with an unknown status
    assert is_readable == (check == "outcome")


def test_changed_reward_is_detected(data: Path) -> None:
    """It differs from the event of the outcome."""
    sql(data, """UPDATE outcomes SET outcome=CAST('{"kind": "graded", "reward": 0.5}' AS BLOB)""")
    result = run_cli("verify", "--data", data)
    assert result.exit_code == 1 and "✗ events  the outcome's reward is stored as 0.5" in result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["last", "--engine", "vllm", "--engine-url", "http://127.0.0.1:9", "--model", "x"], "127.0.0.1:9"),
        (["--all", "--engine", "vllm", "--engine-url", "http://127.0.0.1:9", "--model", "x"], "127.0.0.1:9"),
        (["nope"], "session 'nope' was not found"),
        (["--tolerance", "-1"], "tolerance must be finite and 0 or greater, not -1"),
        (["--engine", "sglang"], "engine must be vllm or scripted, not 'sglang'"),
        (["--tokenizer", "/nope"], "tokenizer: /nope is not a tokenizer folder"),
        (["--rollouts", "/nope"], "rollouts must be an existing folder, not '/nope'"),
        (
            ["--data", "/nope"],
            "data: no recordings in /nope; run this command in the folder where you ran `turngate run`",
        ),
    ],
)
def test_errors_are_json_with_json_option(options: list[str], words: str, data: Path) -> None:
    result = run_cli("verify", "--json", "--data", data, *options)
    assert result.exit_code == 2
    found = json.loads(result.stdout)
    [undone] = found["undone"]
    assert words in undone and words in result.stderr
    assert not found["ok"] and found["sessions"] == []


def test_help_names_every_exit_code() -> None:
    text = " ".join(run_cli("verify", "--help", env={"COLUMNS": "200"}).stdout.split())
    assert (
        "Exit codes: 0 if no errors were found; 1 if errors were found or, with --all, a session could not be" in text
    )
    assert "2 if an option is invalid, the requested session could not be read, or a requested check could" in text
