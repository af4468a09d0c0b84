"""`turngate verify` at the command line: what it says on which stream, and its exit codes."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests import kit
from tests.cli.kit import ran


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """With one session of one turn."""

    async def recorded() -> None:
        async with kit.gateway([kit.say("Hello.")], data=tmp_path) as g:
            session = await g.open()
            await g.ask(session.key, "Hi")
            await g.seal(session.id)
            outcome = {"kind": "graded", "reward": 1.0}
            assert (await g.admin.put(f"/admin/sessions/{session.id}/outcome", json=outcome)).status_code == 200

    asyncio.run(recorded())
    return tmp_path


def sql(data: Path, statement: str) -> None:
    with closing(sqlite3.connect(data / "turngate.db", isolation_level=None)) as db:
        assert db.execute(statement).rowcount == 1


def test_nothing_is_wrong(data: Path) -> None:
    said = ran("verify", "--data", data)
    assert said.exit_code == 0 and "✓ exact" in said.stdout and " status outcome " in said.stdout


@pytest.mark.parametrize(
    ("statement", "check"),
    [("UPDATE outcomes SET outcome='{'", "outcome"), ("UPDATE sessions SET status='zzz'", "status")],
)
def test_how_it_ended_is_looked_at_too(statement: str, check: str, data: Path) -> None:
    sql(data, statement)
    said = ran("verify", "--data", data)
    assert said.exit_code == 1 and "✗ wrong" in said.stdout and f"✗ {check}  " in said.stdout
    assert "rows        rows masks" in said.stdout, "the trace itself is fine"


def test_a_reward_that_is_another_number_is_noticed(data: Path) -> None:
    """The event of that outcome tells the one that was recorded."""
    sql(data, """UPDATE outcomes SET outcome=CAST('{"kind": "graded", "reward": 0.5}' AS BLOB)""")
    said = ran("verify", "--data", data)
    assert said.exit_code == 1 and "✗ events  the outcome's reward is stored as 0.5" in said.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["last", "--engine", "vllm", "--engine-url", "http://127.0.0.1:9", "--model", "x"], "127.0.0.1:9"),
        (["--all", "--engine", "vllm", "--engine-url", "http://127.0.0.1:9", "--model", "x"], "127.0.0.1:9"),
        (["nope"], "session 'nope' is not recorded here"),
        (["--tolerance", "-1"], "tolerance must be 0 or greater, not -1"),
        (["--engine", "sglang"], "engine must be vllm or scripted to score prompts, not 'sglang'"),
        (["--tokenizer", "/nope"], "tokenizer: /nope is not a tokenizer folder"),
        (["--rollouts", "/nope"], "rollouts folder not found: /nope"),
        (["--data", "/nope"], "data: /nope/turngate.db does not exist"),
    ],
)
def test_what_cannot_be_done_is_json_where_that_was_asked_for(options: list[str], words: str, data: Path) -> None:
    said = ran("verify", "--json", "--data", data, *options)
    assert said.exit_code == 2
    found = json.loads(said.stdout)
    [undone] = found["undone"]
    assert words in undone and said.stderr == f"turngate: {undone}\n"
    assert not found["ok"] and found["sessions"] == []


def test_help_names_every_exit_code() -> None:
    text = " ".join(ran("verify", "--help", env={"COLUMNS": "200"}).stdout.split())
    assert "Exit codes: 0 if no errors were found; 1 if errors were found; 2 if a session could not be read" in text
