"""Test how cells that use the same engines report their calls to each other: what counts, and two cells on PostgreSQL."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.kit import Json, Running, gateway, say, until
from tests.postgres import PostgresServer
from tests.projects.kit import create_key, create_project
from tests.store.kit import open_shared
from turngate.engines.base import Chunk, Generate
from turngate.engines.load import EngineLoad
from turngate.engines.placement import LONG_QUEUE
from turngate.engines.pool import Pool
from turngate.engines.replica import PoolTiming
from turngate.engines.scripted import Scripted
from turngate.gateway.fair_shares import FairShares
from turngate.gateway.fence import Fence
from turngate.gateway.shared_calls import SharedCalls, identify_engines


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ((["http://e1:8000", "http://e2:8000"], "h1"), (["http://e2:8000", "http://e1:8000"], "h2"), True),
        ((["http://e1:8000"], "h1"), (["http://e1:8000", "http://e2:8000"], "h1"), False),
        ((["http://127.0.0.1:8000"], "h1"), (["http://127.0.0.1:8000"], "h1"), True),  # two cells on one machine
        ((["http://127.0.0.1:8000"], "h1"), (["http://127.0.0.1:8000"], "h2"), False),
        ((["http://localhost:8000"], "h1"), (["http://localhost:8000"], "h2"), False),
        ((["http://[::1]:8000"], "h1"), (["http://[::1]:8000"], "h2"), False),
    ],
)
def test_cells_share_engines(first: tuple[list[str], str], second: tuple[list[str], str], is_same: bool) -> None:
    assert (identify_engines(*first) == identify_engines(*second)) is is_same


def report_of(pool: Pool, *running: str, waiting: int = 0) -> str:
    """Return the report of a cell that runs calls of these projects, while calls of project `b` wait."""
    shares = FairShares(lambda: True, lambda project: 1.0)
    shares.is_active = True
    for project in running:
        shares.queue.begin(project, "")
    for _ in range(waiting):
        shares.queue.add("b", "", asyncio.get_running_loop().create_future())
    return SharedCalls(shares, pool, Fence()).encode()


async def test_report_is_empty_without_projects_or_engines() -> None:
    pool = Pool([], may_be_empty=True)
    assert report_of(pool, "a") == ""
    await pool.add(Scripted(lambda request, n: say("Hello.")))
    assert report_of(pool, "a", "a", waiting=1).endswith('"running":{"a":2},"waiting":{"b":1}}')
    shares = FairShares(lambda: True, lambda project: 1.0)  # not active
    assert SharedCalls(shares, pool, Fence()).encode() == ""
    shares.is_active = True
    held = Fence()
    await held.pause()
    assert SharedCalls(shares, pool, held).encode() == ""
    await pool.close()


async def test_only_readable_reports_of_the_same_engines_count(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool([Scripted(lambda request, n: say("Hello."))])
    await pool.check()
    shares = FairShares(lambda: True, lambda project: 1.0)
    for _ in range(8):
        shares.queue.begin("a", "")
    calls = SharedCalls(shares, pool, Fence())
    same = report_of(pool, waiting=50)
    elsewhere = same.replace('"engines":"', '"engines":"other')
    wrong = ("-50", '"50"', "9" * 400)
    unreadable = ["", "{", "[]", '{"engines":"e"}', *(same.replace(":50", f":{number}") for number in wrong)]

    def is_limited(reports: Sequence[str]) -> bool:
        calls.update(reports, 60)
        return shares.queue.is_limited("a")

    assert [is_limited(reports) for reports in ([same], [], [elsewhere])] == [True, False, False]
    assert not caplog.records
    assert not is_limited(unreadable) and is_limited([*unreadable, same])
    (record,) = caplog.records  # once
    assert "cannot read how many calls another process reports" in record.message


@pytest.mark.needs("postgres")
@pytest.mark.full
def test_calls_count_until_they_are_too_old(postgres_url: str) -> None:
    store = open_shared(postgres_url)
    fence = store.fence
    fence.report("old", "", 60.0, 0, "", "O")
    fence.report("none", "", 60.0, 0)
    for follower, calls in (("a", "A1"), ("b", "B"), ("a", "A2")):
        fence.report(follower, "", 60.0, 0, "", calls)
    assert fence.list_calls("a", 0.9) == ["B", "O"] and fence.list_calls("b", 0.9) == ["A2", "O"]
    with store.database.writing() as db:  # it has not reported for almost its whole lease
        db.execute("UPDATE fence_followers SET seen=seen-55 WHERE id='old'")
    assert fence.list_calls("a", 0.9) == ["B"]
    fence.report("b", "", 60.0, 0)  # it holds its calls
    assert not fence.list_calls("a", 0.9)
    fence.forget("a")
    assert not fence.list_calls("b", 0.9)
    store.close()


@pytest.mark.needs("postgres")
@pytest.mark.full
def test_store_without_calls_is_migrated(postgres_server: PostgresServer, postgres_url: str) -> None:
    store = open_shared(postgres_url)
    store.fence.report("c", "c", 60.0, 7)
    store.close()
    before = "ALTER TABLE fence_followers DROP COLUMN calls; UPDATE turngate_version SET version=10;"
    postgres_server.query(before, postgres_url.rpartition("/")[2])
    store = open_shared(postgres_url)
    assert [row.epoch for row in store.fence.list_followers()] == [7] and not store.fence.list_calls("", 1.0)
    store.fence.report("c", "c", 60.0, 7, "", "C")
    assert store.fence.list_calls("", 1.0) == ["C"]
    store.close()


class SlottedEngine(Scripted):
    """An engine that runs a few calls at a time, reports its load, and counts the calls of each project that ended.

    While it is crowded, a call ends only if enough others wait, so that the engine stays crowded on a slow machine too.
    """

    def __init__(self, slots: int) -> None:
        super().__init__(lambda request, n: say("Hello."))
        self._free = asyncio.Semaphore(slots)
        self.running = self.queued = 0
        self.is_crowded = False
        self.ended: Counter[str] = Counter()

    async def load_report(self) -> list[EngineLoad]:
        return [EngineLoad(self.running, self.queued)]

    @asynccontextmanager
    async def generate(self, request: Generate) -> AsyncIterator[AsyncIterator[Chunk]]:
        self.queued += 1
        try:
            await self._free.acquire()
        finally:
            self.queued -= 1
        self.running += 1
        try:
            await asyncio.sleep(0.4)
            while self.is_crowded and self.queued < LONG_QUEUE:
                await asyncio.sleep(0.02)
            async with super().generate(request) as chunks:
                yield chunks
            self.ended[request.session.partition("/")[0]] += 1
        finally:
            self.running -= 1
            self._free.release()


@pytest.mark.needs("postgres")
@pytest.mark.full
async def test_projects_share_the_engines_of_two_cells(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a gateway on the shared store keeps its key in the working folder
    engine = SlottedEngine(slots=4)
    async with gateway(data=postgres_url) as g, AsyncExitStack() as stack:
        keys: dict[str, str] = {}
        for project in ("large", "small"):
            await create_project(g, project)
            keys[project] = (await create_key(g, project))["key"]
        cells: dict[str, Running] = {}
        for project in keys:
            pool = Pool([engine], timing=PoolTiming(load_s=0.1))
            settings: Json = {"shared": postgres_url, "cell_name": project, "lease_s": 120.0}
            cells[project] = await stack.enter_async_context(gateway(engine=pool, **settings))
        large, small = cells["large"].app.shares, cells["small"].app.shares
        done = asyncio.Event()

        async def work(project: str) -> None:
            """Call the model in a loop, as an agent."""
            cell = cells[project]
            opened = (await cell.http(keys[project]).post("/admin/sessions", json={})).json()
            while not done.is_set():
                await cell.ask(opened["api_key"], "Hi")

        async with asyncio.TaskGroup() as agents:
            for n in range(16):
                agents.create_task(work("large"))
                if n == 7:
                    await until(large.is_saturated, 60)
            engine.is_crowded = True
            await until(lambda: large.queue.waiting >= 6, 60)
            for _ in range(8):
                agents.create_task(work("small"))
            await until(lambda: small.queue.running >= large.queue.running - 1, 60)  # it began with one
            engine.ended.clear()
            await until(lambda: engine.ended.total() >= 60, 60)
            ended = dict(engine.ended)
            engine.is_crowded = False
            done.set()
        assert ended["small"] == pytest.approx(30, abs=10), ended
