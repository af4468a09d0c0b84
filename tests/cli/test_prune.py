"""`turngate prune` and `turngate load-archive`: their output, options and errors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.kit import run_cli, run_rejected
from tests.kit import gateway, say, until
from turngate.cli.prune import parse_age
from turngate.config import ServeConfig
from turngate.errors import ConfigError
from turngate.gateway import retention
from turngate.store.audit import NewAuditEntry
from turngate.store.projects import ProjectRow
from turngate.store.pruning import PruneResult, prune
from turngate.store.store import Store


async def record(data: Path) -> list[str]:
    """Record two graded sessions and an open one, and return their ids."""
    async with gateway([say("Hello."), say("Yes."), say("Hm.")], data=data) as g:
        sessions = []
        for reward in (1.0, 0.0):
            session = await g.open()
            await g.ask(session.key, "Hi.")
            await g.seal(session.id)
            outcome = {"kind": "graded", "reward": reward, "group": "g"}
            assert (await g.admin.put(f"/admin/sessions/{session.id}/outcome", json=outcome)).is_success
            sessions.append(session.id)
        opened = await g.open()
        await g.ask(opened.key, "Hi.")
        dry = await asyncio.to_thread(run_cli, "prune", "--data", data, "--older-than", "0m", "--dry-run")
        assert dry.exit_code == 0 and "would remove 2 sessions; kept 1 session" in dry.stdout
        refused = await asyncio.to_thread(run_rejected, "prune", "--data", data, "--older-than", "0m")
        assert "is in use by another turngate process" in refused
        return [*sessions, opened.id]


def test_dry_run_leaves_out_projects_without_a_store(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.projects.create(ProjectRow("acme"), NewAuditEntry("operator", "acme", "project created", "acme", {}))
    store.close()
    dry = run_cli("prune", "--data", tmp_path, "--older-than", "1h", "--dry-run")
    assert dry.exit_code == 0 and dry.stdout == "would remove 0 sessions; kept 0 sessions\n"


async def test_pruned_sessions_can_be_verified_and_exported_from_the_archive(tmp_path: Path) -> None:
    data, archive, old = tmp_path / "data", tmp_path / "archive", tmp_path / "old"
    first, second, opened = await record(data)
    prune = ("prune", "--data", data, "--archive", archive, "--older-than")
    kept = run_cli(*prune, "1h")
    assert "removed 0 sessions; kept 3 sessions" in kept.stdout and "2 × it ended too recently" in kept.stdout
    done = run_cli(*prune, "0m")
    assert "removed 2 sessions (written to the archive: 2); kept 1 session" in done.stdout
    assert "1 × the session is open" in done.stdout
    again = json.loads(run_cli(*prune, "0m", "--json").stdout)
    assert again == {
        "dry_run": False,
        "projects": {
            "default": {"removed": 0, "archived": 0, "files": [], "kept": {"the session is open": 1}, "damaged": []}
        },
    }
    assert run_cli("show", first, "--data", data).exit_code == 2
    loaded = run_cli("load-archive", archive, "--data", old, "--session", first)
    assert loaded.stdout == f"added 1 session to {old}\n"
    some = ("--session", second, "--session", "x", "--session", "y")
    assert (
        run_rejected("load-archive", archive, "--data", old, *some)
        == f"archive: {archive} has no session x or y, so nothing was loaded; pass the ids of archived sessions"
    )
    assert run_cli("load-archive", archive, "--data", old).stdout == f"added 1 session to {old}; already there: 1\n"
    verified = run_cli("verify", "--data", old)
    assert verified.exit_code == 0, verified.output
    assert "Hello." in run_cli("show", second, "--data", old).stdout
    exported = run_cli("export", "rows", "--data", old, "--out", tmp_path / "rows.jsonl", "--json")
    assert json.loads(exported.stdout)["rollouts"] == 2
    store = Store.reading(data)
    assert store.ids(10) == [opened]
    store.close()


@pytest.mark.parametrize(
    ("text", "seconds"), [("30d", 2_592_000), ("1.5h", 5400), ("2w", 1_209_600), ("10m", 600), (" 0d ", 0)]
)
def test_ages(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["prune", "--older-than", "30"],
            "--older-than must be a number of minutes (m), hours (h), days (d) or weeks (w), such as 30d, not '30'",
        ),
        (["prune", "--older-than", "-1d"], "--older-than must be"),
        (["prune", "--older-than", "1d"], "data: no recordings in "),
        (["prune", "--older-than", "1d", "--data", "postgresql://u:pw@h/d"], "data: do not pass the database password"),
        (["load-archive", "nothing"], "archive: nothing has no sessions"),
        (
            ["load-archive", "nothing", "--data", "postgresql://h/d"],
            "data: an archive can only be loaded into a folder",
        ),
    ],
)
def test_invalid_option_is_named(
    arguments: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = [] if "--data" in arguments else ["--data", "nothing"]
    message = run_rejected(*arguments, *data)
    assert message.startswith(line) and "pw" not in message.replace("password", "")


async def record_long_ago(data: Path, *changes: str) -> list[str]:
    """Record two old sessions and an open one, make further changes to the store, and return the ids of the sessions."""
    sessions = await record(data)
    store = Store(data)
    with store.database.writing() as db:
        db.execute("UPDATE sessions SET closed=closed-90000")
        db.execute("UPDATE outcomes SET recorded=recorded-90000")
        for change in changes:
            db.execute(change)
    store.close()
    return sessions


async def test_session_days_removes_old_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="session_days must be 0"):
        ServeConfig(session_days=-1).check()
    with pytest.raises(ConfigError, match="'archive' has no effect without session_days"):
        ServeConfig(archive="x").check()
    monkeypatch.setattr(retention, "_FIRST_S", 0.01)
    *old, opened = await record_long_ago(tmp_path / "data")
    settings = {"session_days": 1, "archive": str(tmp_path / "archive")}
    async with gateway([say("Hi.")], data=tmp_path / "data", **settings) as g:
        await until(lambda: g.app.store.ids(10) == [opened])
        deleted = [event.session for event in g.app.events.page() if event.kind == "deleted"]
        assert deleted == old and len(list((tmp_path / "archive").iterdir())) == 1


async def test_session_days_reports_each_damaged_session_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retention, "_FIRST_S", 0.01)
    monkeypatch.setattr(retention, "_INTERVAL_S", 0.01)
    results: list[PruneResult] = []

    def prune_and_count(*arguments: Any, **options: Any) -> PruneResult:
        results.append(prune(*arguments, **options))
        return results[-1]

    monkeypatch.setattr(retention, "prune", prune_and_count)
    damage = "UPDATE nodes SET checksum=1 WHERE session=(SELECT min(key) FROM sessions) AND id=1"
    first, *others = await record_long_ago(tmp_path / "data", damage)
    settings = {"session_days": 1, "archive": str(tmp_path / "archive")}
    async with gateway([say("Hi.")], data=tmp_path / "data", **settings) as g:
        await until(lambda: len(results) >= 3)
        assert sorted(g.app.store.ids(10)) == sorted([first, *others])
        with g.app.store.database.writing() as db:  # so that tests/verify/everywhere.py finds plausible times
            db.execute("UPDATE sessions SET closed=closed+90000")
    reports = [record.getMessage() for record in caplog.records if first in record.getMessage()]
    assert reports == [
        f"session {first} cannot be archived: node 1 is damaged on disk; the session and its group are not removed "
        "(see docs/retention.md)"
    ]
