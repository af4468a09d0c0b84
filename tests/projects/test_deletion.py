"""A deleted project is gone with its keys and data, and cannot return. Only the audit log remembers it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.cells.kit import start_cell, wait_for
from tests.kit import gateway, say, until
from tests.projects.kit import create_key, create_project, project_client
from tests.projects.test_cells import ask
from tests.store.kit import finish_rollout
from turngate.common.database_url import parse_database_url
from turngate.errors import ConfigError, Conflict, NotFound, StoreError
from turngate.store.audit import NewAuditEntry
from turngate.store.location import count_unfinished
from turngate.store.projects import ApiKey, ProjectRow, locate_project
from turngate.store.shared.store import SharedStore
from turngate.store.store import Store

CREATED = NewAuditEntry("operator", "acme", "project created", "acme")
DELETED = NewAuditEntry("operator", "acme", "project deleted", "acme")


def test_rows_of_a_project_are_deleted_and_the_audit_log_stays(store: Store) -> None:
    table = store.projects
    table.create(ProjectRow("acme", 1.0), CREATED)
    table.create(ProjectRow("other", 1.0), CREATED)
    for prefix, project in (("tgp-1", "acme"), ("tgp-2", "other")):
        table.add_key(ApiKey(prefix, b"x", project, frozenset({"traces"}), "", 1.0), CREATED)
    store.quotas.take("acme", "live_sessions", "h", wanted=1, limit=5)
    table.delete("acme", DELETED)
    assert [row.name for row in table.list_projects()] == ["default", "other"]
    assert [key.prefix for key in table.list_keys()] == ["tgp-2"]
    assert store.quotas.used("acme", "live_sessions") == 0 and table.list_deleted() == {"acme"}
    assert store.audit.page(project="acme")[-1].action == "project deleted"
    with pytest.raises(Conflict, match="was deleted, and its name cannot be reused"):
        table.create(ProjectRow("acme", 1.0), CREATED)
    with pytest.raises(NotFound, match="unknown project 'acme'"):
        table.delete("acme", DELETED)


@pytest.mark.needs("postgres")
@pytest.mark.full
def test_the_schema_is_dropped_and_not_created_again(postgres_url: str) -> None:
    whole = SharedStore(parse_database_url(postgres_url))
    whole.projects.create(ProjectRow("acme", 1.0), CREATED)
    address = parse_database_url(locate_project(postgres_url, "acme"))
    project = SharedStore(address)
    finish_rollout(project, "s", "g")
    assert count_unfinished(postgres_url, "acme") == 0
    with project.database.writing() as db:
        db.execute("INSERT INTO attempts VALUES ('r', 1, 'unshipped', 'cell', 'running', 1.0, NULL)")
    assert count_unfinished(postgres_url, "acme") == 1
    whole.projects.delete("acme", DELETED)
    with whole.database.reading() as db:
        assert db.execute("SELECT to_regnamespace('project_acme')::text").fetchone() == (None,)
    for _ in range(2):  # a process that has not noticed
        with pytest.raises(ConfigError, match="project 'acme' was deleted"):
            SharedStore(address)
    project.close()
    whole.close()


async def test_project_is_deleted_while_the_gateway_runs(tmp_path: Path) -> None:
    async with gateway([say("Hello.")], data=tmp_path) as g:
        await create_project(g, "acme")
        await create_project(g, "other")
        client, other = await project_client(g, "acme"), await project_client(g, "other")
        opened = (await client.post("/admin/sessions", json={"id": "s"})).json()
        assert (await other.post("/admin/sessions", json={"id": "s"})).status_code == 201
        refused = await g.admin.delete("/admin/projects/acme")
        assert (
            refused.status_code == 409
            and "has sessions that are open, or that a cell has not shipped yet (1 in all)" in refused.text
        )
        for by in (client, other):
            assert (await by.delete("/admin/projects/acme?force=true")).status_code == 403
        assert (await g.admin.delete("/admin/projects/default?force=true")).status_code == 409
        assert (await g.admin.delete("/admin/projects/ghost")).status_code == 404
        assert (await g.admin.delete("/admin/projects/acme?force=true")).json() == {"deleted": "acme"}
        assert (await client.get("/admin/sessions")).status_code == 401
        await until(lambda: not (tmp_path / "projects" / "acme").exists())
        await until(lambda: [project.project for project in g.app.hosted] == ["other"])
        assert [path.name for path in (tmp_path / "projects").iterdir()] == ["other"]
        call = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
        assert (await g.http(opened["api_key"]).post("/v1/chat/completions", json=call)).status_code == 401
        assert (await other.get("/admin/sessions/s")).status_code == 200
        assert (await g.admin.get("/metrics")).status_code == 200
        assert (await g.admin.post("/admin/projects", json={"name": "acme"})).status_code == 409
        entries = (await g.admin.get("/admin/audit?project=acme")).json()["entries"]
        assert (entries[-1]["action"], entries[-1]["details"]) == (
            "project deleted",
            {"unfinished_sessions": 1, "force": True},
        )
    (tmp_path / "projects" / "acme").mkdir()  # as if the gateway had been killed before it removed the folder
    async with gateway([say("Hello.")], data=tmp_path) as g:
        await until(lambda: not (tmp_path / "projects" / "acme").exists())
        assert [project.project for project in g.app.hosted] == ["other"]


async def test_project_is_closed_even_if_its_requests_cannot_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway([say("Hello.")], data=tmp_path) as g:
        for name in ("acme", "next"):
            await create_project(g, name)
            client = await project_client(g, name)
            assert (await client.get("/admin/sessions")).status_code == 200  # opens the project
        [project] = [project for project in g.app.hosted if project.project == "acme"]
        close, closed = project.close, asyncio.Event()

        async def fail() -> None:
            raise StoreError("the requests cannot be ended")

        async def note() -> None:
            await close()
            closed.set()

        monkeypatch.setattr(project, "end_requests", fail)
        monkeypatch.setattr(project, "close", note)
        for name in ("acme", "next"):  # the second shows that the gateway still watches
            assert (await g.admin.delete(f"/admin/projects/{name}?force=true")).json() == {"deleted": name}
            await until(lambda name=name: not (tmp_path / "projects" / name).exists())
        assert closed.is_set()


@pytest.mark.needs("postgres")
@pytest.mark.process
@pytest.mark.full
async def test_cells_end_and_remove_a_deleted_project(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with gateway(data=postgres_url) as g:
        await create_project(g, "acme")
        key = (await create_key(g, "acme"))["key"]
        with start_cell(tmp_path / "cell", postgres_url, lease_s=30) as cell:
            folder = tmp_path / "cell" / "projects" / "acme"
            settings = {"id": "s", "rollout": "r"}
            opened = (await asyncio.to_thread(ask, cell, key, "POST", "/admin/sessions", json=settings)).json()
            assert await asyncio.to_thread(cell.say, opened["api_key"])
            refused = await g.admin.delete("/admin/projects/acme")
            assert refused.status_code == 409, refused.text  # the cell has announced the session
            assert folder.is_dir()
            assert (await g.admin.delete("/admin/projects/acme?force=true")).is_success
            await asyncio.to_thread(wait_for, lambda: not folder.exists())
            assert (await asyncio.to_thread(ask, cell, key, "GET", "/admin/sessions")).status_code == 401
            other = await asyncio.to_thread(cell.finish, "still-serves")
            await asyncio.to_thread(wait_for, lambda: g.app.store.find(other) is not None)
        assert [project.project for project in g.app.hosted] == []
