"""Retry requests from the page, to a running batch and to one that is resumed later."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.batch.kit import FlakyBackend
from tests.batch.test_batch import Harness, open_harness
from tests.speed import scaled
from turngate.errors import SandboxError
from turngate.rollout import retry_listener
from turngate.rollout.batch import run_batch
from turngate.rollout.concurrency import Bounds
from turngate.rollout.ledger import FinishedRollout, Ledger, LedgerEntry, ReopenedRollout, read_ledger
from turngate.rollout.plan import batch_stream
from turngate.rollout.progress import BatchProgress
from turngate.sandboxes.base import SandboxSpec
from turngate.sandboxes.supervised_sandbox import SupervisedSandbox
from turngate.server.web import rollout

pytestmark = [pytest.mark.process, pytest.mark.full]

PAGE_HEADERS = {"x-turngate-page": "1"}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow a slow machine enough time to answer requests."""
    monkeypatch.setattr(rollout, "_ANSWER_S", scaled(4.0))
    monkeypatch.setattr(retry_listener, "_REPLY_S", scaled(2.0))


class FailOnceBackend(FlakyBackend):
    """The first sandbox of a `once` task fails to start."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.failed = asyncio.Event()

    async def create(self, spec: SandboxSpec) -> SupervisedSandbox:
        if spec.labels["task"].startswith("once") and not self.failed.is_set():
            self.failed.set()
            raise SandboxError("no sandbox today")
        return await super().create(spec)


async def log_in(harness: Harness) -> httpx.AsyncClient:
    client = harness.gateway.http()
    response = await client.post("/page/login", json={"key": harness.gateway.app.admin_key}, headers=PAGE_HEADERS)
    assert response.status_code == 200
    return client


async def wait_for_row(client: httpx.AsyncClient, **params: str) -> dict[str, Any]:
    async with asyncio.timeout(scaled(20)):
        while True:
            listed = await client.get("/page/api/rollouts", params=params)
            if found := [row for row in listed.json()["rollouts"] if row["status"] != "running" or row["turns"]]:
                return dict(found[0])
            await asyncio.sleep(0.02)


async def find_fault(client: httpx.AsyncClient) -> dict[str, Any]:
    return await wait_for_row(client, **{"class": "infrastructure fault"})


async def test_running_batch_retries_at_once() -> None:
    async with open_harness() as harness:
        backend = FailOnceBackend(harness.root / "s")
        plan = harness.plan("once-0", "hang-0", n=1, retries=0, backend=backend, bounds=Bounds(running=2))
        running = asyncio.create_task(run_batch(plan, harness.client, harness.connector))
        client = await log_in(harness)
        failed_row = await find_fault(client)
        assert (failed_row["status"], failed_row["turns"], failed_row["attempt"], failed_row["task"]) == (
            "done",
            0,
            1,
            "once-0",
        )
        about = (await client.get(f"/page/api/rollouts/{failed_row['id']}")).json()
        assert about["can"]["retry"] == {"ok": True, "why": ""}
        assert about["error"]["boundary"] == "sandbox" and "no sandbox today" in about["error"]["message"]
        reply = await client.post(f"/page/api/rollouts/{failed_row['id']}/retry", headers=PAGE_HEADERS)
        assert reply.json() == {"asked": True, "taken": True, "message": "the rollout will be retried as attempt 2"}
        result = await running
        kinds = {finished.task: (finished.kind, finished.attempt) for finished in result.finished}
        assert kinds == {"once-0": ("graded", 2), "hang-0": ("agent failed", 1)} and result.complete
        graded = next(finished for finished in result.finished if finished.task == "once-0")
        refused = await client.post(f"/page/api/rollouts/{graded.session}/retry", headers=PAGE_HEADERS)
        assert refused.status_code == 409 and "it already has an outcome: graded" in refused.json()["error"]["message"]
        later = (await client.get(f"/page/api/rollouts/{failed_row['id']}")).json()["can"]["retry"]
        assert later == {"ok": False, "why": "attempt 2 already exists"}


async def test_resumed_batch_retries_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "_ANSWER_S", 0.2)
    async with open_harness() as harness:
        backend = FailOnceBackend(harness.root / "s")
        plan = harness.plan("once-0", "well-0", n=1, retries=0, backend=backend)
        first = await run_batch(plan, harness.client, harness.connector)
        assert first.complete and {finished.kind for finished in first.finished} == {
            "graded",
            "infrastructure fault",
        }
        client = await log_in(harness)
        failed_row = await find_fault(client)
        for _ in range(2):  # two requests give one retry
            reply = (await client.post(f"/page/api/rollouts/{failed_row['id']}/retry", headers=PAGE_HEADERS)).json()
            assert reply["taken"] is None and "reads the request when you resume it" in reply["message"]
        second = await run_batch(plan, harness.client, harness.connector)
        assert [(finished.task, finished.kind, finished.attempt) for finished in second.finished] == [
            ("once-0", "graded", 2),
            ("well-0", "graded", 1),
        ]
        third = await run_batch(plan, harness.client, harness.connector)
        assert third.finished == second.finished and read_ledger(harness.out).attempts[failed_row["name"]] == 2


def build_request(harness: Harness, task: str, kind: str) -> dict[str, Any]:
    """Build the request that the page would send for the rollout of a task in a class."""
    [finished] = [
        finished
        for finished in read_ledger(harness.out).finished.values()
        if (finished.task, finished.kind) == (task, kind)
    ]
    return {"rollout": finished.rollout, "session": finished.session, "attempt": finished.attempt}


async def list_answers(harness: Harness, seq: int | None = None) -> list[bool | None]:
    """Return the answers to one request, or to all."""
    taken = []
    head = read_ledger(harness.out).head
    assert head is not None
    async for event in harness.client.events(batch_stream(head.batch), wait=False):
        if event.kind == "note" and seq in (None, event.data.get("retry")) and "retry" in event.data:
            taken.append(event.data["taken"])
    return taken


async def test_cancelled_rollout_can_be_retried_at_once() -> None:
    async with open_harness() as harness:
        plan = harness.plan("hang-0", "hang-1", n=1, retries=0, bounds=Bounds(running=2))
        running = asyncio.create_task(run_batch(plan, harness.client, harness.connector))
        client = await log_in(harness)
        running_row = await wait_for_row(client, status="running")
        assert (
            await client.post(f"/page/api/rollouts/{running_row['id']}/cancel", headers=PAGE_HEADERS)
        ).status_code == 200
        reply = (await client.post(f"/page/api/rollouts/{running_row['id']}/retry", headers=PAGE_HEADERS)).json()
        first = await running
        again = [finished.attempt for finished in first.finished if finished.rollout == running_row["name"]]
        assert reply["taken"] in (True, None) and again == [2] and (await list_answers(harness))[-1] is True
        second = await run_batch(plan, harness.client, harness.connector)
        assert second.finished == first.finished


async def test_early_request_waits_for_end_of_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_listener, "_REPLY_S", 0.0)
    written, append = threading.Event(), Ledger._append

    def slowly(self: Ledger, data: bytes) -> None:
        if b'"finished"' in data:
            written.wait(scaled(60))
        append(self, data)

    monkeypatch.setattr(Ledger, "_append", slowly)
    async with open_harness() as harness:
        plan = harness.plan("once-0", n=1, retries=0, backend=FailOnceBackend(harness.root / "s"))
        running = asyncio.create_task(run_batch(plan, harness.client, harness.connector))
        client = await log_in(harness)
        failed_row = await find_fault(client)
        reply = (await client.post(f"/page/api/rollouts/{failed_row['id']}/retry", headers=PAGE_HEADERS)).json()
        assert reply["taken"] is None and "attempt 1 has not ended yet" in reply["message"]
        written.set()
        result = await running
        assert [(finished.kind, finished.attempt) for finished in result.finished] == [("graded", 2)]
        assert await list_answers(harness) == [None, True]


async def test_request_is_answered_once_and_refusal_is_final() -> None:
    async with open_harness() as harness:
        plan = harness.plan("once-0", "well-0", n=1, retries=0, backend=FailOnceBackend(harness.root / "s"))
        first = await run_batch(plan, harness.client, harness.connector)
        stream, request = batch_stream(first.batch), build_request(harness, "once-0", "infrastructure fault")
        refused = harness.gateway.app.events.announce(stream, "retry", request)
        await harness.client.announce(stream, "note", {"retry": refused, "taken": False, "message": "no"})
        assert (await run_batch(plan, harness.client, harness.connector)).finished == first.finished
        put_off = harness.gateway.app.events.announce(stream, "retry", request)
        await harness.client.announce(stream, "note", {"retry": put_off, "taken": None, "message": "later"})
        nonsense = harness.gateway.app.events.announce(stream, "retry", build_request(harness, "well-0", "graded"))
        for _ in range(3):
            last = await run_batch(plan, harness.client, harness.connector)
            assert [(finished.kind, finished.attempt) for finished in last.finished] == [("graded", 2), ("graded", 1)]
        replies = [await list_answers(harness, seq) for seq in (refused, put_off, nonsense)]
        assert replies == [[False], [None, True], [False]]


async def test_batch_waits_for_request_being_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    others_done, add = asyncio.Event(), Ledger.add

    async def late(self: Ledger, entry: LedgerEntry) -> None:
        if isinstance(entry, ReopenedRollout):
            await others_done.wait()
        await add(self, entry)

    def watch(tally: BatchProgress) -> None:
        if tally.done == 2:
            others_done.set()

    monkeypatch.setattr(Ledger, "add", late)
    async with open_harness() as harness:
        backend = FailOnceBackend(harness.root / "s")
        plan = harness.plan("once-0", "hang-0", n=1, retries=0, backend=backend, bounds=Bounds(running=2))
        running = asyncio.create_task(run_batch(plan, harness.client, harness.connector, watch))
        client = await log_in(harness)
        failed_row = await find_fault(client)
        await client.post(f"/page/api/rollouts/{failed_row['id']}/retry", headers=PAGE_HEADERS)
        result = await running
        assert result.complete and {o.task: o.attempt for o in result.finished} == {"once-0": 2, "hang-0": 1}


class GatedBackend(FailOnceBackend):
    """Like `FailOnceBackend`, but each sandbox waits until it is allowed to start."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.allowed = {"well": asyncio.Event(), "once": asyncio.Event()}

    async def create(self, spec: SandboxSpec) -> SupervisedSandbox:
        kind = spec.labels["task"].partition("-")[0]
        if kind == "well" or self.failed.is_set():
            await self.allowed[kind].wait()
        return await super().create(spec)


async def test_retry_before_its_group_starts_runs_once() -> None:
    async with open_harness() as harness:
        backend = GatedBackend(harness.root / "s")
        plan = harness.plan("well-0", "well-1", "once-0", n=1, retries=0, backend=backend, bounds=Bounds(running=3))
        running = asyncio.create_task(run_batch(plan, harness.client, harness.connector))
        client = await log_in(harness)
        failed_row = await find_fault(client)
        async with asyncio.timeout(scaled(20)):
            while not read_ledger(harness.out).finished:
                await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.wait([running])
        first_done, allow_second = asyncio.Event(), asyncio.Event()
        backend.allowed["well"].set()

        async def pace(ordinal: int) -> None:
            if ordinal >= 0:  # a group with only a fault does not count
                await allow_second.wait()

        def watch(tally: BatchProgress) -> None:
            if tally.kinds["graded"]:
                first_done.set()
            if tally.kinds["graded"] == 2:
                backend.allowed["once"].set()

        running = asyncio.create_task(run_batch(plan, harness.client, harness.connector, watch, throttle=pace))
        await first_done.wait()
        reply = (await client.post(f"/page/api/rollouts/{failed_row['id']}/retry", headers=PAGE_HEADERS)).json()
        allow_second.set()
        result = await running
        assert reply["taken"] and result.complete
        lines = (harness.out / "ledger.jsonl").read_text().splitlines()
        assert sum('"begun"' in line and failed_row["name"] in line for line in lines) == 2


def test_no_time_estimate_while_progress_is_negative() -> None:
    tally = BatchProgress(total=6, before=5, done=5)
    tally.remove(FinishedRollout(rollout="b.t.0", task="t", index=0, kind="cancelled", at=0.0))
    assert tally.remaining_s is None
