"""A rollout that nobody could judge is asked for again at the page: of a batch that runs, and of one that will be run again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.batch.kit import Unsteady
from tests.batch.test_batch import Stage, staged
from turngate.errors import SandboxError
from turngate.rollout.batch import run_batch
from turngate.rollout.gates import Bounds
from turngate.rollout.ledger import read
from turngate.sandboxes.base import SandboxSpec
from turngate.sandboxes.supervised import Supervised
from turngate.server import page

OWN = {"x-turngate-page": "1"}


class Once(Unsteady):
    """The first sandbox of a task that is called so cannot be made."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.failed = asyncio.Event()

    async def create(self, spec: SandboxSpec) -> Supervised:
        if spec.labels["task"].startswith("once") and not self.failed.is_set():
            self.failed.set()
            raise SandboxError("no sandbox today")
        return await super().create(spec)


async def entered(stage: Stage) -> httpx.AsyncClient:
    client = stage.gateway.http()
    response = await client.post("/page/login", json={"key": stage.gateway.app.admin_key}, headers=OWN)
    assert response.status_code == 200
    return client


async def failed_one(client: httpx.AsyncClient) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            listed = await client.get("/page/api/rollouts", params={"class": "infrastructure fault"})
            if found := listed.json()["rollouts"]:
                return dict(found[0])
            await asyncio.sleep(0.02)


async def test_a_batch_that_runs_takes_it_up_at_once() -> None:
    async with staged() as stage:
        backend = Once(stage.root / "s")
        wanted = stage.plan("once-0", "hang-0", n=1, retries=0, backend=backend, bounds=Bounds(running=2))
        running = asyncio.create_task(run_batch(wanted, stage.client, stage.wayout))
        client = await entered(stage)
        one = await failed_one(client)
        assert (one["status"], one["turns"], one["attempt"], one["task"]) == ("done", 0, 1, "once-0")
        about = (await client.get(f"/page/api/rollouts/{one['id']}")).json()
        assert about["can"]["retry"] == {"ok": True, "why": ""}
        assert about["error"]["boundary"] == "sandbox" and "no sandbox today" in about["error"]["message"]
        asked = await client.post(f"/page/api/rollouts/{one['id']}/retry", headers=OWN)
        assert asked.json() == {"asked": True, "taken": True, "message": "it is tried again, as attempt 2"}
        result = await running
        kinds = {finished.task: (finished.kind, finished.attempt) for finished in result.finished}
        assert kinds == {"once-0": ("graded", 2), "hang-0": ("agent failed", 1)} and result.complete
        graded = next(finished for finished in result.finished if finished.task == "once-0")
        refused = await client.post(f"/page/api/rollouts/{graded.session}/retry", headers=OWN)
        assert refused.status_code == 409 and "judged: graded" in refused.json()["error"]["message"]
        later = (await client.get(f"/page/api/rollouts/{one['id']}")).json()["can"]["retry"]
        assert later == {"ok": False, "why": "attempt 2 of it is there already"}


async def test_a_batch_that_is_run_again_takes_it_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_ANSWER_S", 0.2)
    async with staged() as stage:
        backend = Once(stage.root / "s")
        wanted = stage.plan("once-0", "well-0", n=1, retries=0, backend=backend)
        first = await run_batch(wanted, stage.client, stage.wayout)
        assert first.complete and {one.kind for one in first.finished} == {"graded", "infrastructure fault"}
        client = await entered(stage)
        one = await failed_one(client)
        for _ in range(2):  # who presses twice is not given two
            asked = (await client.post(f"/page/api/rollouts/{one['id']}/retry", headers=OWN)).json()
            assert asked["taken"] is None and "run again on its folder" in asked["message"]
        second = await run_batch(wanted, stage.client, stage.wayout)
        assert [(o.task, o.kind, o.attempt) for o in second.finished] == [
            ("once-0", "graded", 2),
            ("well-0", "graded", 1),
        ]
        third = await run_batch(wanted, stage.client, stage.wayout)
        assert third.finished == second.finished and read(stage.out).attempts[one["name"]] == 2
