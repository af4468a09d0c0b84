"""A batch of one project on a real Ray cluster: the keys of that project read it, and the keys of another find nothing of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.cluster.batch_kit import AGENT, NAME, Driver, check_leftovers, sweep_sandboxes
from tests.cluster.ray_kit import start_ray
from tests.kit import Running, gateway
from tests.projects.kit import create_project, project_client
from turngate.rollout.ledger import read_ledger

pytestmark = [pytest.mark.needs("ray", "postgres", f"agent:{AGENT}"), pytest.mark.repeat]
ROLLOUTS = 2
OF_A_SESSION = ("/admin/sessions/{id}", "/admin/sessions/{id}/trace", "/admin/sessions/{id}/samples")
LISTS = ("/admin/sessions?limit=1000", "/admin/events?wait=0", "/metrics")


async def test_batch_is_visible_only_to_its_own_project(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with gateway(data=postgres_url) as g:
        for project in ("acme", "other"):
            await create_project(g, project)
        sessions = await asyncio.to_thread(run_batch, f"{postgres_url}/projects/acme", tmp_path / "out")
        await check_owner(await project_client(g, "acme"), sessions)
        await check_stranger(g, sessions)


def run_batch(url: str, out: Path) -> set[str]:
    """Run a batch in a project. Return its sessions."""
    with start_ray(slots=ROLLOUTS) as cluster:
        Driver(cluster, url, out, n=ROLLOUTS, concurrency=ROLLOUTS, pause_s=1).wait()
        check_leftovers(cluster)
    sweep_sandboxes()
    finished = read_ledger(out).finished.values()
    assert [one.kind for one in finished] == ["graded"] * ROLLOUTS
    return {one.session for one in finished}


async def check_owner(acme: httpx.AsyncClient, sessions: set[str]) -> None:
    listed = (await acme.get(LISTS[0])).json()
    assert {one["id"] for one in listed["sessions"]} == sessions
    for session in sessions:
        for path in OF_A_SESSION:
            response = await acme.get(path.format(id=session))
            assert response.status_code == 200, (path, response.text)


async def check_stranger(g: Running, sessions: set[str]) -> None:
    """Check that the keys of the other project, and those of the default one, find nothing of the batch."""
    for project in ("other", "default"):
        stranger = await project_client(g, project)
        for session in sessions:
            for path in OF_A_SESSION:
                response = await stranger.get(path.format(id=session))
                assert response.status_code == 404, (project, path, response.text)
        for path in LISTS:
            response = await stranger.get(path)
            assert response.status_code == 200, (project, path, response.text)
            found = [name for name in (*sessions, f"{NAME}.", "acme") if name in response.text]
            assert not found, (project, path, found)
