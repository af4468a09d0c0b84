"""Retry requests from the page, to a batch that runs and to one that is resumed later."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.batch.kit import Unsteady
from tests.batch.test_batch import Stage, open_stage
from tests.speed import scaled
from turngate.errors import SandboxError
from turngate.rollout import retry_listener
from turngate.rollout.batch import run_batch
from turngate.rollout.concurrency import Bounds
from turngate.rollout.ledger import FinishedRollout, Ledger, LedgerEntry, ReopenedRollout, read_ledger
from turngate.rollout.plan import batch_stream
from turngate.rollout.progress import BatchProgress
from turngate.sandboxes.base import SandboxSpec
from turngate.sandboxes.supervised import SupervisedSandbox
from turngate.server.web import rollout

pytestmark = [pytest.mark.process, pytest.mark.full]

OWN = {"x-turngate-page": "1"}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is slow to answer is not taken for one that does not."""
    monkeypatch.setattr(rollout, "_ANSWER_S", scaled(4.0))
    monkeypatch.setattr(retry_listener, "_REPLY_S", scaled(2.0))


class Once(Unsteady):
    """The first sandbox of a task that is called so cannot be made."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.failed = asyncio.Event()

    async def create(self, spec: SandboxSpec) -> SupervisedSandbox:
        if spec.labels["task"].startswith("once") and not self.failed.is_set():
            self.failed.set()
            raise SandboxError("no sandbox today")
        return await super().create(spec)


async def log_in(stage: Stage) -> httpx.AsyncClient:
    client = stage.gateway.http()
    response = await client.post("/page/login", json={"key": stage.gateway.app.admin_key}, headers=OWN)
    assert response.status_code == 200
    return client


async def row(client: httpx.AsyncClient, **params: str) -> dict[str, Any]:
    async with asyncio.timeout(scaled(20)):
        while True:
            listed = await client.get("/page/api/rollouts", params=params)
            if found := [one for one in listed.json()["rollouts"] if one["status"] != "running" or one["turns"]]:
                return dict(found[0])
            await asyncio.sleep(0.02)


async def find_fault(client: httpx.AsyncClient) -> dict[str, Any]:
    return await row(client, **{"class": "infrastructure fault"})


async def test_a_batch_that_runs_takes_it_up_at_once() -> None:
    async with open_stage() as stage:
        backend = Once(stage.root / "s")
        wanted = stage.plan("once-0", "hang-0", n=1, retries=0, backend=backend, bounds=Bounds(running=2))
        running = asyncio.create_task(run_batch(wanted, stage.client, stage.connector))
        client = await log_in(stage)
        one = await find_fault(client)
        assert (one["status"], one["turns"], one["attempt"], one["task"]) == ("done", 0, 1, "once-0")
        about = (await client.get(f"/page/api/rollouts/{one['id']}")).json()
        assert about["can"]["retry"] == {"ok": True, "why": ""}
        assert about["error"]["boundary"] == "sandbox" and "no sandbox today" in about["error"]["message"]
        asked = await client.post(f"/page/api/rollouts/{one['id']}/retry", headers=OWN)
        assert asked.json() == {"asked": True, "taken": True, "message": "the rollout will be retried as attempt 2"}
        result = await running
        kinds = {finished.task: (finished.kind, finished.attempt) for finished in result.finished}
        assert kinds == {"once-0": ("graded", 2), "hang-0": ("agent failed", 1)} and result.complete
        graded = next(finished for finished in result.finished if finished.task == "once-0")
        refused = await client.post(f"/page/api/rollouts/{graded.session}/retry", headers=OWN)
        assert refused.status_code == 409 and "judged: graded" in refused.json()["error"]["message"]
        later = (await client.get(f"/page/api/rollouts/{one['id']}")).json()["can"]["retry"]
        assert later == {"ok": False, "why": "attempt 2 already exists"}


async def test_a_batch_that_is_run_again_takes_it_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "_ANSWER_S", 0.2)
    async with open_stage() as stage:
        backend = Once(stage.root / "s")
        wanted = stage.plan("once-0", "well-0", n=1, retries=0, backend=backend)
        first = await run_batch(wanted, stage.client, stage.connector)
        assert first.complete and {one.kind for one in first.finished} == {"graded", "infrastructure fault"}
        client = await log_in(stage)
        one = await find_fault(client)
        for _ in range(2):  # who presses twice is not given two
            asked = (await client.post(f"/page/api/rollouts/{one['id']}/retry", headers=OWN)).json()
            assert asked["taken"] is None and "run the batch again on its folder" in asked["message"]
        second = await run_batch(wanted, stage.client, stage.connector)
        assert [(o.task, o.kind, o.attempt) for o in second.finished] == [
            ("once-0", "graded", 2),
            ("well-0", "graded", 1),
        ]
        third = await run_batch(wanted, stage.client, stage.connector)
        assert third.finished == second.finished and read_ledger(stage.out).attempts[one["name"]] == 2


def build_request(stage: Stage, task: str, kind: str) -> dict[str, Any]:
    """Build the request that the page would send for the rollout of a task in a class."""
    [one] = [one for one in read_ledger(stage.out).finished.values() if (one.task, one.kind) == (task, kind)]
    return {"rollout": one.rollout, "session": one.session, "attempt": one.attempt}


async def answers(stage: Stage, seq: int | None = None) -> list[bool | None]:
    """What was answered to one wish, or to all of them."""
    told = []
    head = read_ledger(stage.out).head
    assert head is not None
    async for event in stage.client.events(batch_stream(head.batch), wait=False):
        if event.kind == "note" and seq in (None, event.data.get("retry")) and "retry" in event.data:
            told.append(event.data["taken"])
    return told


async def test_who_cancels_one_may_ask_for_it_at_once() -> None:
    async with open_stage() as stage:
        wanted = stage.plan("hang-0", "hang-1", n=1, retries=0, bounds=Bounds(running=2))
        running = asyncio.create_task(run_batch(wanted, stage.client, stage.connector))
        client = await log_in(stage)
        one = await row(client, status="running")
        assert (await client.post(f"/page/api/rollouts/{one['id']}/cancel", headers=OWN)).status_code == 200
        asked = (await client.post(f"/page/api/rollouts/{one['id']}/retry", headers=OWN)).json()
        first = await running
        again = [finished.attempt for finished in first.finished if finished.rollout == one["name"]]
        assert asked["taken"] in (True, None) and again == [2] and (await answers(stage))[-1] is True
        second = await run_batch(wanted, stage.client, stage.connector)
        assert second.finished == first.finished


async def test_a_wish_that_comes_before_the_ledger_has_the_end_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_listener, "_REPLY_S", 0.0)
    written, append = threading.Event(), Ledger._append

    def slowly(self: Ledger, data: bytes) -> None:
        if b'"finished"' in data:
            written.wait(scaled(60))
        append(self, data)

    monkeypatch.setattr(Ledger, "_append", slowly)
    async with open_stage() as stage:
        wanted = stage.plan("once-0", n=1, retries=0, backend=Once(stage.root / "s"))
        running = asyncio.create_task(run_batch(wanted, stage.client, stage.connector))
        client = await log_in(stage)
        one = await find_fault(client)
        asked = (await client.post(f"/page/api/rollouts/{one['id']}/retry", headers=OWN)).json()
        assert asked["taken"] is None and "attempt 1 has not ended yet" in asked["message"]
        written.set()
        result = await running
        assert [(finished.kind, finished.attempt) for finished in result.finished] == [("graded", 2)]
        assert await answers(stage) == [None, True]


async def test_a_wish_is_answered_once_and_one_that_was_refused_is_never_granted() -> None:
    async with open_stage() as stage:
        wanted = stage.plan("once-0", "well-0", n=1, retries=0, backend=Once(stage.root / "s"))
        first = await run_batch(wanted, stage.client, stage.connector)
        of, wish = batch_stream(first.batch), build_request(stage, "once-0", "infrastructure fault")
        refused = stage.gateway.app.events.announce(of, "retry", wish)
        await stage.client.announce(of, "note", {"retry": refused, "taken": False, "message": "no"})
        assert (await run_batch(wanted, stage.client, stage.connector)).finished == first.finished
        put_off = stage.gateway.app.events.announce(of, "retry", wish)
        await stage.client.announce(of, "note", {"retry": put_off, "taken": None, "message": "later"})
        nonsense = stage.gateway.app.events.announce(of, "retry", build_request(stage, "well-0", "graded"))
        for _ in range(3):
            last = await run_batch(wanted, stage.client, stage.connector)
            assert [(one.kind, one.attempt) for one in last.finished] == [("graded", 2), ("graded", 1)]
        told = [await answers(stage, seq) for seq in (refused, put_off, nonsense)]
        assert told == [[False], [None, True], [False]]


async def test_a_batch_does_not_end_over_a_wish_that_it_is_writing_down(monkeypatch: pytest.MonkeyPatch) -> None:
    others_done, add = asyncio.Event(), Ledger.add

    async def late(self: Ledger, entry: LedgerEntry) -> None:
        if isinstance(entry, ReopenedRollout):
            await others_done.wait()
        await add(self, entry)

    def watch(tally: BatchProgress) -> None:
        if tally.done == 2:
            others_done.set()

    monkeypatch.setattr(Ledger, "add", late)
    async with open_stage() as stage:
        backend = Once(stage.root / "s")
        wanted = stage.plan("once-0", "hang-0", n=1, retries=0, backend=backend, bounds=Bounds(running=2))
        running = asyncio.create_task(run_batch(wanted, stage.client, stage.connector, watch))
        client = await log_in(stage)
        one = await find_fault(client)
        await client.post(f"/page/api/rollouts/{one['id']}/retry", headers=OWN)
        result = await running
        assert result.complete and {o.task: o.attempt for o in result.finished} == {"once-0": 2, "hang-0": 1}


class Held(Once):
    """Beside that, a task's sandbox is made when it may be."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.may = {"well": asyncio.Event(), "once": asyncio.Event()}

    async def create(self, spec: SandboxSpec) -> SupervisedSandbox:
        what = spec.labels["task"].partition("-")[0]
        if what == "well" or self.failed.is_set():
            await self.may[what].wait()
        return await super().create(spec)


async def test_one_that_is_asked_for_before_its_group_comes_is_not_given_out_twice() -> None:
    async with open_stage() as stage:
        backend = Held(stage.root / "s")
        wanted = stage.plan("well-0", "well-1", "once-0", n=1, retries=0, backend=backend, bounds=Bounds(running=3))
        running = asyncio.create_task(run_batch(wanted, stage.client, stage.connector))
        client = await log_in(stage)
        one = await find_fault(client)
        async with asyncio.timeout(scaled(20)):
            while not read_ledger(stage.out).finished:
                await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.wait([running])
        one_done, second_may = asyncio.Event(), asyncio.Event()
        backend.may["well"].set()

        async def pace(ordinal: int) -> None:
            if ordinal >= 0:  # the group that has nothing but a fault counts for none
                await second_may.wait()

        def watch(tally: BatchProgress) -> None:
            if tally.kinds["graded"]:
                one_done.set()
            if tally.kinds["graded"] == 2:
                backend.may["once"].set()

        running = asyncio.create_task(run_batch(wanted, stage.client, stage.connector, watch, throttle=pace))
        await one_done.wait()
        asked = (await client.post(f"/page/api/rollouts/{one['id']}/retry", headers=OWN)).json()
        second_may.set()
        result = await running
        assert asked["taken"] and result.complete
        lines = (stage.out / "ledger.jsonl").read_text().splitlines()
        assert sum('"begun"' in line and one["name"] in line for line in lines) == 2


def test_what_is_left_is_not_told_while_less_is_done_than_before() -> None:
    tally = BatchProgress(total=6, before=5, done=5)
    tally.remove(FinishedRollout(rollout="b.t.0", task="t", index=0, kind="cancelled", at=0.0))
    assert tally.remaining_s is None
