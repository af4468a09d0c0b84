"""Projects in cells: sessions are shipped to their project's store, and keys are checked without waiting for PostgreSQL."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from tests.cells.kit import CellProcess, start_cell, wait_for
from tests.kit import Json, Running, gateway
from tests.postgres import CutOffProxy
from tests.projects.kit import create_key, create_project
from tests.speed import scaled
from turngate.client.gateway import RequestRejected
from turngate.common.sharding import Shard
from turngate.config import ServeConfig
from turngate.errors import ConfigError
from turngate.gateway.cell.api_keys import FOLLOW_S
from turngate.rollout.cluster.open_cluster import open_shared_gateway
from turngate.rollout.cluster.order_runner import ProjectExecutors
from turngate.server.app import Gateway
from turngate.store.outcomes import RecordedOutcome
from turngate.store.projects import locate_project
from turngate.verify.shared_reader import open_session_reader

pytestmark = [pytest.mark.needs("postgres"), pytest.mark.process, pytest.mark.full]
LEASE_S = 6.0


def ask(cell: CellProcess, key: str, method: str, path: str, **request: Json) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.request(method, cell.url + path, headers=headers, trust_env=False, timeout=scaled(30), **request)


async def run_session(cell: CellProcess, key: str, name: str) -> Json:
    """Run a session with one turn and an outcome in the key's project."""
    opened = (await asyncio.to_thread(ask, cell, key, "POST", "/admin/sessions", json={"id": name})).json()
    assert await asyncio.to_thread(cell.say, opened["api_key"])
    await asyncio.to_thread(ask, cell, key, "POST", f"/admin/sessions/{name}/seal", json={})
    outcome = {"kind": "graded", "reward": 1.0, "group": "g"}
    recorded = await asyncio.to_thread(ask, cell, key, "PUT", f"/admin/sessions/{name}/outcome", json=outcome)
    assert recorded.is_success, recorded.text
    return opened


async def shipped(g: Running, key: str, name: str) -> bool:
    return (await g.http(key).get(f"/admin/sessions/{name}/trace")).status_code == 200


async def test_worker_0_ships_the_sessions_of_a_project_that_only_another_worker_serves(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with gateway(data=postgres_url) as g:
        with start_cell(tmp_path / "cell", postgres_url, "--workers", "2", lease_s=LEASE_S) as cell:
            await create_project(g, "alpha")
            key = (await create_key(g, "alpha"))["key"]
            name = Shard(1, 2).new_session_id()
            path = f"/admin/sessions/{name}"
            async with httpx.AsyncClient(base_url=cell.url, trust_env=False, timeout=scaled(30)) as client:
                client.headers["authorization"] = f"Bearer {key}"
                # The path of its first request assigns the connection to worker 1, which then serves the others too.
                while (await client.get(path)).status_code == 401:  # until it knows the key
                    await asyncio.sleep(0.1)
                assert (await client.post("/admin/sessions", json={"id": name})).status_code == 201
                assert (await client.post(f"{path}/seal", json={})).is_success
                assert (await client.put(f"{path}/outcome", json={"kind": "graded", "reward": 1.0})).is_success
            end = time.monotonic() + scaled(15)
            while not await shipped(g, key, name):
                assert time.monotonic() < end
                await asyncio.sleep(0.1)


async def test_cell_serves_projects_of_the_shared_store(
    postgres_url: str, cut_off_proxy: CutOffProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with gateway(data=postgres_url) as g:
        for project in ("alpha", "beta"):
            await create_project(g, project)
        alpha, beta = [(await create_key(g, project))["key"] for project in ("alpha", "beta")]
        with start_cell(tmp_path / "cell", cut_off_proxy.url, lease_s=LEASE_S) as cell:
            for key in (alpha, beta, cell.admin["authorization"].removeprefix("Bearer ")):
                await run_session(cell, key, "same")
            for key in (alpha, beta, g.app.admin_key):
                end = time.monotonic() + scaled(30)
                while not await shipped(g, key, "same"):
                    assert time.monotonic() < end
                    await asyncio.sleep(0.1)
                assert len((await g.http(key).get("/admin/sessions")).json()["sessions"]) == 1
            with open_session_reader(locate_project(postgres_url, "alpha")) as reader:  # the verifier's own
                assert reader.session_ids() == ["same"] and len(reader.read_session("same").turns) == 1

            late = await create_key(g, "alpha", "traces")
            path = "/admin/sessions/same"

            def status(key: str) -> int:
                return ask(cell, key, "GET", path).status_code

            await asyncio.to_thread(wait_for, lambda: status(late["key"]) == 200, FOLLOW_S + 3)
            await g.admin.post(f"/admin/keys/{late['prefix']}/revoke", json={})
            await asyncio.to_thread(wait_for, lambda: status(late["key"]) == 401, 5)
            refused = await asyncio.to_thread(ask, cell, alpha, "POST", "/admin/keys", json={"scopes": ["traces"]})
            assert refused.status_code == 409 and "manage projects and keys at the gateway" in refused.text

            cut_off_proxy.cut()
            began = time.monotonic()
            assert await asyncio.to_thread(status, alpha) == 200  # from memory, without waiting
            assert time.monotonic() - began < LEASE_S / 2
            await asyncio.to_thread(wait_for, lambda: status(alpha) == 503, LEASE_S + 10)
            cut_off_proxy.mend()
            await asyncio.to_thread(wait_for, lambda: status(alpha) == 200, 30)


async def test_orders_carry_their_project_to_the_cell(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a Ray cluster, but without Ray: the driver's gateway on the shared store, a cell, and an order for it."""
    monkeypatch.chdir(tmp_path)
    config = ServeConfig(data=locate_project(postgres_url, "acme"), port=0)
    with pytest.raises(ConfigError, match="is the store of one project; serve postgresql://"):
        Gateway(config)
    with pytest.raises(RequestRejected, match="unknown project 'acme'"):
        async with open_shared_gateway(config):
            pass
    async with gateway(data=postgres_url) as g:
        await create_project(g, "acme")
    async with open_shared_gateway(config) as driver:
        assert driver.project == "acme"
        with start_cell(tmp_path / "cell", postgres_url, lease_s=LEASE_S) as running:
            key = running.admin["authorization"].removeprefix("Bearer ")
            cell = SimpleNamespace(url=running.url, admin_key=key)
            async with AsyncExitStack() as stack:
                executors = ProjectExecutors(cell, None, None, stack)  # type: ignore[arg-type]
                executor = await executors.open("acme")
                assert await executors.open("acme") is executor
                client = executor._gateway
                opened = await client.open({"mode": "exact"}, "s1")
                assert opened.key.endswith(".acme") and await asyncio.to_thread(running.say, opened.key)
                await client.seal("s1")
                await client.record("s1", RecordedOutcome(kind="graded", reward=1.0, group="g"))
            end = time.monotonic() + scaled(30)
            while not await driver.sessions():
                assert time.monotonic() < end
                await asyncio.sleep(0.1)
            assert (await driver.show("s1")).turns == 1
