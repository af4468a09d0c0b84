"""A gateway on the shared store: page, admin API, feeds, exports and metrics; `show`, `verify` and `export` on the same `--data`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests import kit
from tests.cli.kit import run_cli, run_rejected
from tests.server.test_page import fetch, log_in
from tests.store.kit import copy_sessions, finish_rollout, open_shared
from turngate.config import ServeConfig, load_config
from turngate.doctor.context import DoctorContext
from turngate.doctor.machine import check_data
from turngate.errors import ConfigError
from turngate.store.store import Store


@pytest.fixture
async def shared(postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The URL of a shared store with four rollouts in two groups, as recorded by a gateway."""
    monkeypatch.chdir(tmp_path)
    script = lambda request, n: kit.say(f"Answer {n}.")  # noqa: E731
    async with kit.gateway(script, data=tmp_path / "data") as g:
        for n in range(4):
            session = await g.open(metadata={"group": f"g{n // 2}", "task": "t"})
            await g.ask(session.key, "Hi")
            await g.seal(session.id)
            outcome = {"kind": "graded", "reward": float(n % 2), "group": f"g{n // 2}", "task": "t"}
            assert (await g.admin.put(f"/admin/sessions/{session.id}/outcome", json=outcome)).is_success
    source, target = Store.reading(tmp_path / "data"), open_shared(postgres_url)
    copy_sessions(source, target)
    source.close()
    target.close()
    yield postgres_url


@pytest.mark.real
@pytest.mark.needs("postgres")
async def test_gateway_serves_the_shared_store(shared: str) -> None:
    async with kit.gateway(data=shared) as g:
        refused = await g.admin.post("/admin/sessions", json={})
        assert refused.status_code == 409 and "opens no sessions; open them at the gateway of a cell" in refused.text
        sessions = (await g.admin.get("/admin/sessions")).json()
        rows = sessions["sessions"] if isinstance(sessions, dict) else sessions
        assert len(rows) == 4
        name = rows[0]["id"] if isinstance(rows[0], dict) else rows[0]
        assert len((await g.admin.get(f"/admin/sessions/{name}/trace")).json()["nodes"]) == 2
        [row] = await g.samples(name)
        assert len(row["spans"]) == 1
        feed = (await g.admin.put("/admin/feeds/f", json={"n": 2, "from_start": True})).json()
        assert feed["newest"] == 2
        client = await log_in(g)
        for path in ("rollouts", "groups", "training", "failures", f"rollouts/{name}"):
            assert (await fetch(client, path)) is not None
        assert (await fetch(client, "rollouts"))["total"] == 4
        metrics = (await g.admin.get("/metrics")).text
        assert "turngate_" in metrics
        other = open_shared(shared)  # another machine ships a group
        await asyncio.to_thread(finish_rollout, other, "later-1", "g9")
        await asyncio.to_thread(finish_rollout, other, "later-2", "g9")
        other.close()
        assert (await g.admin.get("/admin/feeds/f")).json()["newest"] == 3
        events = (await g.admin.get("/admin/events?after=0&wait=0")).text
        assert events.count('"delivery"') == 3


@pytest.mark.full
@pytest.mark.needs("postgres")
@pytest.mark.process
async def test_commands_read_the_shared_store(shared: str, tmp_path: Path) -> None:
    shown = await asyncio.to_thread(run_cli, "show", "last", "--data", shared)
    assert shown.exit_code == 0 and "Answer 0." in shown.stdout, shown.output
    checked = await asyncio.to_thread(run_cli, "verify", "--all", "--data", shared)
    assert checked.exit_code == 0 and checked.stdout.count("✓") >= 4, checked.output
    done = await asyncio.to_thread(run_cli, "export", "rows", "--out", tmp_path / "rows.jsonl", "--data", shared)
    assert done.exit_code == 0, done.output
    exported = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(exported) == 4
    [outcome] = await check_data(DoctorContext(ServeConfig(data=shared)))
    assert "the shared store answers" in outcome.message
    [outcome] = await check_data(DoctorContext(ServeConfig(data=f"{shared}_missing")))
    assert "does not exist" in outcome.message


@pytest.mark.full
@pytest.mark.needs("postgres")
@pytest.mark.process
async def test_verify_detects_damage_in_the_shared_store(shared: str) -> None:
    store = open_shared(shared)
    with store._writing() as db:
        db.execute("UPDATE nodes SET logprobs=? WHERE kind='sampled' AND session=1", (b"\0" * 4,))
    store.close()
    checked = await asyncio.to_thread(run_cli, "verify", "--all", "--data", shared)
    assert checked.exit_code == 1 and "✗ wrong" in checked.stdout


def test_password_on_the_command_line_is_refused(tmp_path: Path) -> None:
    url = "postgresql://u:s3cret@127.0.0.1:1/db"
    for command in (("show", "last"), ("verify",), ("export", "rows", "--out", "x.jsonl")):
        text = run_rejected(*command, "--data", url)
        assert "do not pass the database password" in str(text) and "s3cret" not in str(text)
    with pytest.raises(ConfigError, match="PGPASSWORD"):
        load_config(None, {"data": url})
    file = tmp_path / "turngate.toml"
    file.write_text(f'data = "{url}"\n')
    config = load_config(file, {})
    assert (
        config.is_shared and config.data_name == "postgresql://u@127.0.0.1:1/db" and "s3cret" not in str(config.folder)
    )


def test_shared_store_has_one_worker() -> None:
    with pytest.raises(ConfigError, match="workers must be 1"):
        ServeConfig(data="postgresql://h/d", workers=2).check()
