"""API keys: scopes, rotation, revocation, expiry, the operator's choice of a project, and the page."""

from __future__ import annotations

import asyncio
import json
import math
import stat
import time
from pathlib import Path

import httpx
import pytest

from tests.cells.kit import wait_for
from tests.cli.kit import run_cli, run_rejected
from tests.kit import gateway, say
from tests.projects.kit import create_key, create_project, project_client
from turngate.errors import StoreError
from turngate.gateway.api_keys import KeyRing, KnownProjects, hash_key, new_key
from turngate.gateway.cell import api_keys
from turngate.gateway.cell.api_keys import KeyFollower
from turngate.server.web.login import PAGE_HEADER
from turngate.store.audit import NewAuditEntry
from turngate.store.projects import ApiKey, ProjectRow
from turngate.store.store import Store
from turngate.telemetry.logs import redact_known

OWN = {PAGE_HEADER: "1"}


async def test_scopes_open_their_routes_only() -> None:
    async with gateway([say("Hello.")]) as g:
        await create_project(g, "acme")
        clients = {scope: await project_client(g, "acme", scope) for scope in ("sessions", "traces", "feed", "admin")}
        opened = await clients["sessions"].post("/admin/sessions", json={})
        assert opened.status_code == 201
        path = f"/admin/sessions/{opened.json()['id']}"
        allowed = {
            ("GET", f"{path}/trace"): {"traces", "admin"},
            ("GET", path): {"sessions", "traces", "admin"},
            ("GET", "/admin/feeds"): {"feed", "admin"},
            ("GET", "/admin/keys"): {"admin"},
            ("GET", "/admin/fence"): {"sessions", "traces", "feed", "admin"},
            ("GET", "/admin/weights"): set(),
            ("GET", "/metrics"): {"traces", "admin"},
            ("GET", "/v1/models"): {"sessions", "traces", "feed", "admin"},
        }
        for (method, target), scopes in allowed.items():
            for scope, client in clients.items():
                response = await client.request(method, target)
                assert response.status_code == (200 if scope in scopes else 403), (target, scope, response.text)
        refused = (await clients["feed"].get(f"{path}/trace")).json()["error"]["message"]
        assert refused.startswith("this request needs a key with the scope 'traces' or 'admin'; key tgp-")


async def test_rotation_keeps_the_old_key_for_a_while() -> None:
    async with gateway() as g:
        old = await create_key(g, "default", "traces", note="dashboard")
        rotated = (await g.admin.post(f"/admin/keys/{old['prefix']}/rotate", json={"grace_s": 0.2})).json()
        assert rotated["scopes"] == ["traces"] and rotated["note"] == "dashboard" and rotated["key"] != old["key"]
        assert [(await g.http(key["key"]).get("/admin/sessions")).status_code for key in (old, rotated)] == [200, 200]
        await asyncio.sleep(0.25)
        assert [(await g.http(key["key"]).get("/admin/sessions")).status_code for key in (old, rotated)] == [401, 200]
        again = await g.admin.post(f"/admin/keys/{old['prefix']}/rotate", json={})
        assert again.status_code == 409 and "no longer valid" in again.text
        revoked = await g.admin.post(f"/admin/keys/{rotated['prefix']}/revoke", json={})
        assert revoked.json()["valid"] is False
        assert (await g.http(rotated["key"]).get("/admin/sessions")).status_code == 401
        assert old["key"] not in (await g.admin.get("/admin/keys")).text


async def test_project_admins_manage_only_their_own_keys() -> None:
    async with gateway() as g:
        for project in ("acme", "other"):
            await create_project(g, project)
        admin = await project_client(g, "acme", "admin")
        foreign = await create_key(g, "other", "traces")
        made = await admin.post("/admin/keys", json={"scopes": ["traces"]})
        assert made.status_code == 201 and made.json()["project"] == "acme"
        assert {key["project"] for key in (await admin.get("/admin/keys")).json()["keys"]} == {"acme"}
        for verb in ("rotate", "revoke"):
            assert (await admin.post(f"/admin/keys/{foreign['prefix']}/{verb}", json={})).status_code == 404
        assert (await admin.get("/admin/audit?project=other")).status_code == 404
        actions = [entry["action"] for entry in (await admin.get("/admin/audit")).json()["entries"]]
        assert actions == ["project created", "key created", "key created"]
        assert [p["name"] for p in (await admin.get("/admin/projects")).json()["projects"]] == ["acme"]


async def test_operator_names_a_project() -> None:
    async with gateway([say("Hello.")]) as g:
        await create_project(g, "acme")
        to_acme = {"x-turngate-project": "acme"}
        opened = await g.admin.post("/admin/sessions", json={"id": "s"}, headers=to_acme)
        assert opened.status_code == 201 and opened.json()["api_key"].endswith(".acme")
        assert (await g.admin.get("/admin/sessions/s")).status_code == 404
        assert (await g.admin.get("/admin/sessions/s", headers=to_acme)).status_code == 200
        unknown = await g.admin.get("/admin/sessions", headers={"x-turngate-project": "ghost"})
        assert unknown.status_code == 404 and "unknown project 'ghost'" in unknown.text
        for key in ("", "wrong"):  # the answer does not reveal which projects exist
            answers = {
                name: await g.http(key).get("/admin/sessions", headers={"x-turngate-project": name})
                for name in ("acme", "ghost")
            }
            assert {(a.status_code, a.text) for a in answers.values()} == {(401, answers["ghost"].text)}


async def test_metrics_of_a_project_do_not_count_others() -> None:
    async with gateway(lambda request, n: say("Hello.")) as g:
        await create_project(g, "acme")
        own = await project_client(g, "acme")
        secret = (await own.post("/admin/sessions", json={})).json()["api_key"]
        await g.ask(secret, "Hi")
        for _ in range(3):
            await g.ask((await g.open()).key, "Hi")

        async def opened(client: httpx.AsyncClient) -> list[str]:
            lines = (await client.get("/metrics")).text.splitlines()
            return [line for line in lines if line.startswith("turngate_sessions_open ")]

        default = await project_client(g, "default", "traces")
        assert await opened(own) == ["turngate_sessions_open 1"]
        assert await opened(default) == ["turngate_sessions_open 3"]
        assert await opened(g.admin) == ["turngate_sessions_open 4"]
        assert "process_" not in (await own.get("/metrics")).text


async def test_page_of_a_project_ends_with_its_key() -> None:
    async with gateway(lambda request, n: say("Hello.")) as g:
        await create_project(g, "acme")
        key = await create_key(g, "acme", "traces")
        await g.open(id="other")
        await g.http((await create_key(g, "acme"))["key"]).post("/admin/sessions", json={"id": "mine"})
        page = g.http()
        assert (await page.post("/page/login", json={"key": key["key"]}, headers=OWN)).status_code == 200
        rows = (await page.get("/page/api/rollouts")).json()["rollouts"]
        assert [row["id"] for row in rows] == ["mine"]
        cancelled = await page.post("/page/api/rollouts/mine/cancel", headers=OWN)
        assert cancelled.status_code == 403 and "scope 'sessions'" in cancelled.text
        await g.admin.post(f"/admin/keys/{key['prefix']}/revoke", json={})
        assert (await page.get("/page/api/rollouts")).status_code == 401
        feed = await create_key(g, "acme", "feed")
        assert (await g.http().post("/page/login", json={"key": feed["key"]}, headers=OWN)).status_code == 403


async def test_projects_survive_a_restart(tmp_path: Path) -> None:
    async with gateway(lambda request, n: say("Hello."), data=tmp_path) as g:
        await create_project(g, "acme", weight=2.0, quotas={"live_sessions": 5})
        key = (await create_key(g, "acme"))["key"]
        secret = (await g.http(key).post("/admin/sessions", json={"id": "s"})).json()["api_key"]
    assert (tmp_path / "projects" / "acme" / "turngate.db").exists()
    async with gateway(lambda request, n: say("Hello."), data=tmp_path) as g:
        assert (await g.ask(secret, "Hi")).content == "Hello."
        assert (await g.http(key).get("/admin/sessions/s")).json()["turns"] == 1
        [acme, default] = (await g.admin.get("/admin/projects")).json()["projects"]
        assert (acme["name"], acme["weight"], acme["quotas"]) == ("acme", 2.0, {"live_sessions": 5})
        assert default["name"] == "default"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"name": "Acme"}, "name must be 1 to 40 lowercase letters"),
        ({"name": "default"}, "project 'default' already exists"),
        ({"name": "a", "weight": 0}, "weight"),
        ({"name": "a", "quotas": {"live": 1}}, "live"),
    ],
)
async def test_invalid_projects_are_refused(body: dict[str, object], message: str) -> None:
    async with gateway() as g:
        response = await g.admin.post("/admin/projects", json=body)
        assert response.status_code in (400, 409) and message in response.text


def test_ring_reads_again_after_a_second_and_rejects_wrong_keys() -> None:
    secret, prefix, digest = new_key()
    key = ApiKey(prefix, digest, "acme", frozenset({"traces"}), "", 0.0)
    known = KnownProjects({"acme": ProjectRow("acme")}, {prefix: key})
    reads = 0
    now = 0.0

    def read() -> KnownProjects:
        nonlocal reads
        reads += 1
        return known

    ring = KeyRing(read, clock=lambda: now)
    assert ring.find(secret) == key and ring.find(secret) == key and reads == 1
    for wrong in ("", secret[:-1], secret + "x", prefix, f"{prefix}-{'x' * 43}", "tga-" + "x" * 43):
        assert ring.find(wrong) is None
    known = KnownProjects({}, {})
    assert ring.find(secret) == key
    now = 1.0
    assert ring.find(secret) is None and reads == 2
    expired = ApiKey(prefix, digest, "acme", frozenset({"traces"}), "", 0.0, time.time() - 1)
    ring.update(KnownProjects({}, {prefix: expired}))
    assert ring.find(secret) is None and hash_key(secret) == digest
    assert secret not in redact_known(f"the key {secret} is wrong")


def test_cell_keeps_reading_keys_after_an_unexpected_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A newer version of Turngate added a quota that this one does not know. Later the quota is removed, and a key is revoked."""
    monkeypatch.setattr(api_keys, "FOLLOW_S", 0.02)
    store = Store(tmp_path)
    secret, prefix, digest = new_key()
    entry = NewAuditEntry("operator", "key created", "acme")
    store.projects.create(ProjectRow("acme"), entry)
    store.projects.add_key(ApiKey(prefix, digest, "acme", frozenset({"traces"}), "", 0.0), entry)
    ring = KeyRing(lambda: KnownProjects({}, {}), refresh_s=math.inf)
    follower = KeyFollower(ring, lambda: store.projects)
    follower.start()
    try:
        assert ring.find(secret) is not None
        with store.database.writing() as db:
            db.execute("UPDATE projects SET quotas=?", (b'{"gpu_hours":1}',))
        wait_for(lambda: "cannot read the API keys" in caplog.text)
        with store.database.writing() as db:
            db.execute("UPDATE projects SET quotas=?", (b"{}",))
        store.projects.revoke_key(prefix, entry)
        wait_for(lambda: ring.find(secret) is None)
    finally:
        follower.stop()
        store.close()


async def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway([say("Hello.")]) as g:
        monkeypatch.setenv("TURNGATE_ADMIN_KEY", g.app.admin_key)

        async def run(*arguments: str) -> str:
            result = await asyncio.to_thread(run_cli, *arguments, "--gateway", g.root)
            assert result.exit_code == 0, result.output
            return str(result.stdout)

        assert "acme" in await run("projects", "create", "acme", "--tokens-per-day", "1000000")
        weightless = ("projects", "create", "beta", "--weight", "0", "--gateway", g.root)
        assert "weight must be a number greater than 0" in await asyncio.to_thread(run_rejected, *weightless)
        assert "1,000,000" in await run("projects", "list")
        assert "2" in await run("projects", "change", "acme", "--weight", "2")
        for changed, quotas in (
            (("--live-sessions", "50"), {"tokens_per_day": 1_000_000, "live_sessions": 50}),
            (("--stored-bytes", "7", "--live-sessions", "0"), {"tokens_per_day": 1_000_000, "stored_bytes": 7}),
        ):
            [project] = json.loads(await run("projects", "change", "acme", *changed, "--json"))["projects"]
            assert project["quotas"] == quotas and project["weight"] == 2
        out = tmp_path / "key"
        create = ("keys", "create", "--project", "acme", "--scope", "traces", "--out", str(out))
        printed = await run(*create)
        key = out.read_text().strip()
        assert stat.S_IMODE(out.stat().st_mode) == 0o600 and key not in printed and key[:12] in printed
        assert (await g.http(key).get("/admin/sessions")).status_code == 200
        rejected = await asyncio.to_thread(run_rejected, *create, "--gateway", g.root)
        assert "already exists; choose another file" in rejected
        prefix = key[:12]
        assert key[:12] in await run("keys", "list", "--project", "acme")
        fresh = (await run("keys", "rotate", prefix, "--grace-hours", "0")).strip()
        assert (await g.http(key).get("/admin/sessions")).status_code == 401
        assert (await g.http(fresh).get("/admin/sessions")).status_code == 200
        assert "revoked" in await run("keys", "revoke", fresh[:12])
        log = await run("audit", "--project", "acme", "--json")
        assert "key rotated" in log and fresh not in log and key not in log
        assert "Deleted project acme." in await run("projects", "delete", "acme")
        assert "acme" not in await run("projects", "list")
        assert "project deleted" in await run("audit", "--project", "acme")
        numbers = [line.split()[0] for line in (await run("audit", "--project", "acme")).splitlines()]
        assert numbers == ["number", *map(str, range(1, len(numbers)))]
        newest = await run("audit", "--project", "acme", "--limit", "1")
        assert "project deleted" in newest and len(newest.splitlines()) == 2
        assert "project created" in await run("audit", "--project", "acme", "--limit", "1", "--after", "0")


async def test_audit_log_has_changes_deletions_and_exports(tmp_path: Path) -> None:
    async with gateway(lambda request, n: say("Hello."), data=tmp_path) as g:
        await create_project(g, "acme")
        key = await create_key(g, "acme")
        client = g.http(key["key"])
        for name in ("a", "b", "c"):
            secret = (await client.post("/admin/sessions", json={"id": name})).json()["api_key"]
            await g.ask(secret, "Hi")
            await client.post(f"/admin/sessions/{name}/seal", json={})
        await client.post("/page/login", json={"key": key["key"]}, headers=OWN)
        for format in ("rows", "trace"):
            assert (await client.get(f"/page/api/rollouts/a/export?format={format}")).status_code == 200
        assert (await client.delete("/admin/sessions/a")).status_code == 200
        assert (await client.delete("/sessions/b")).json() == {"deleted": True}
        assert (await g.admin.delete("/admin/sessions/c", headers={"x-turngate-project": "acme"})).status_code == 200
        entries = (await client.get("/admin/audit?limit=1000")).json()["entries"]
        seen = [(entry["actor"], entry["action"], entry["subject"]) for entry in entries]
        prefix = key["prefix"]
        assert seen == [
            ("operator", "project created", "acme"),
            ("operator", "key created", prefix),
            (prefix, "export made", "a"),
            (prefix, "export made", "a"),
            (prefix, "session deleted", "a"),
            (prefix, "session deleted", "b"),
            ("operator", "session deleted", "c"),
        ]
        changed = await g.admin.put("/admin/projects/acme", json={"quotas": {"live_sessions": 9}})
        assert changed.is_success
        [entry] = (await client.get(f"/admin/audit?after={entries[-1]['number']}")).json()["entries"]
        assert (entry["action"], entry["details"]) == ("project changed", {"quotas": {"live_sessions": 9}})
        log = (await g.admin.get("/admin/audit?limit=1000")).text
        assert key["key"] not in log and secret not in log
        for change in ("UPDATE audit SET actor='x'", "DELETE FROM audit"):
            with pytest.raises(StoreError, match="append-only"), g.app.store.database.writing() as db:
                db.execute(change)
