"""Test fair shares between the cells that use the same engines: in a simulation of the engines' queue, and on PostgreSQL."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.kit import Json, Running, gateway, say, until
from tests.postgres import PostgresServer
from tests.projects.kit import create_key, create_project
from tests.store.kit import open_shared
from turngate.engines.base import Chunk, Generate
from turngate.engines.load import EngineLoad
from turngate.engines.placement import is_crowded
from turngate.engines.pool import Pool
from turngate.engines.replica import PoolTiming
from turngate.engines.scripted import Scripted
from turngate.gateway.fair_shares import POLL_S, FairQueue, ProjectCalls
from turngate.gateway.shared_calls import ReportedCalls, add_up, identify_engines

Call = tuple[int, str]  # cell, project


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


def test_only_calls_at_the_same_engines_are_added_up() -> None:
    reports = [
        ReportedCalls("e", {"a": 2}, {"a": 1}),
        ReportedCalls("e", {"a": 3, "b": 1}, {}),
        ReportedCalls("other", {"a": 50}, {"c": 50}),
    ]
    assert add_up(reports, "e") == ProjectCalls({"a": 5, "b": 1}, {"a": 1})
    assert add_up([], "e") == ProjectCalls()


class SimulatedCell:
    """The queue of one cell, and what it last knew of the engine."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.queue: FairQueue[Call] = FairQueue(lambda project: weights.get(project, 1.0))
        self.is_saturated = False


class Simulation:
    """Cells whose agents call one engine without a pause. `agents` has the number of agents of each project, by cell.

    The engine runs `slots` calls at a time, in order. Cells read its load every two seconds, and each other's calls every second, at
    different times. The agents of project `late` come when those of the others already use all slots.
    """

    def __init__(self, agents: Sequence[Mapping[str, int]], weights: Mapping[str, float], slots: int = 32) -> None:
        self._cells = [SimulatedCell(weights) for _ in agents]
        self._slots = slots
        self._random = random.Random(1)
        self._running: list[tuple[float, Call]] = []  # with the time of their end
        self._queue: deque[Call] = deque()
        self._reports: dict[int, ProjectCalls] = {}
        comings = [
            ((60 if project == "late" else 0) + 30 * n / number, (cell, project))
            for cell, projects in enumerate(agents)
            for project, number in projects.items()
            for n in range(number)
        ]
        self._coming = deque(sorted(comings))
        self.ended: Counter[str] = Counter()
        self.idle = 0

    def run(self, seconds: int, warm_up: int) -> None:
        """Count the calls that end after `warm_up`, and how many slots are idle then, in each step."""
        for step in range(round(seconds / POLL_S)):
            now = step * POLL_S
            if now == warm_up:
                self.ended.clear()
                self.idle = 0
            while self._coming and self._coming[0][0] <= now:
                self._begin(self._coming.popleft()[1])
            self._end_calls(now)
            for number, cell in enumerate(self._cells):
                self._step_cell(number, cell, step + 7 * number, now)
            self.idle += self._slots - len(self._running)

    def _begin(self, call: Call) -> None:
        number, project = call
        cell = self._cells[number]
        queue = cell.queue
        if queue.waiting or (queue.running and cell.is_saturated) or queue.is_limited(project):
            queue.add(project, "", call)
        else:
            queue.begin(project, "")
            self._queue.append(call)

    def _end_calls(self, now: float) -> None:
        ended = [call for end, call in self._running if end <= now]
        self._running = [one for one in self._running if one[0] > now]
        for number, project in ended:
            self.ended[project] += 1
            queue = self._cells[number].queue
            queue.end(project, "")
            if (chosen := queue.choose()) is not None:
                self._queue.append(chosen)
            self._begin((number, project))
        while self._queue and len(self._running) < self._slots:
            self._running.append((now + self._random.uniform(2, 6), self._queue.popleft()))

    def _step_cell(self, number: int, cell: SimulatedCell, step: int, now: float) -> None:
        if step % 20 == 0:
            cell.is_saturated = is_crowded(EngineLoad(len(self._running), len(self._queue)))
        if step % 10 == 0:
            self._reports[number] = own = cell.queue.count()
            reports = [ReportedCalls("", dict(one.running), dict(one.waiting)) for one in self._reports.values()]
            reports.remove(ReportedCalls("", dict(own.running), dict(own.waiting)))
            cell.queue.count_others(add_up(reports, ""), now + 5, is_saturated=cell.is_saturated)
        if cell.queue.waiting:
            self._queue += cell.queue.choose_for_room(now, is_saturated=cell.is_saturated)


@pytest.mark.parametrize(
    ("agents", "weights", "expected"),
    [
        # A project gets no more because it runs on three cells.
        ([{"a": 60}, {"a": 60}, {"a": 60}, {"b": 60}], {}, {"a": 0.5, "b": 0.5}),
        ([{"a": 60}, {"a": 60}, {"a": 60}, {"late": 60}], {}, {"a": 0.5, "late": 0.5}),
        ([{"a": 60}, {"a": 60}, {"a": 60}, {"a": 60, "late": 60}], {}, {"a": 0.5, "late": 0.5}),
        ([{"a": 60}, {"a": 60}, {"a": 60}, {"late": 60}], {"late": 3.0}, {"a": 0.25, "late": 0.75}),
        ([{"a": 60}, {"a": 60}, {"b": 60}, {"late": 60}], {}, {"a": 0.33, "b": 0.33, "late": 0.33}),
        # What a project does not use goes to the others.
        ([{"a": 60}, {"a": 60}, {"a": 60}, {"late": 4}], {}, {"a": 0.9, "late": 0.1}),
        # Cells with the same projects.
        ([{"a": 60, "b": 60}, {"a": 60, "b": 60}], {}, {"a": 0.5, "b": 0.5}),
        ([{"a": 60}, {"a": 60}], {}, {"a": 1.0}),
    ],
)
def test_shares_hold_for_all_cells(
    agents: Sequence[Mapping[str, int]], weights: Mapping[str, float], expected: Mapping[str, float]
) -> None:
    simulation = Simulation(agents, weights)
    simulation.run(seconds=200, warm_up=120)
    total = simulation.ended.total()
    assert {project: ended / total for project, ended in simulation.ended.items()} == pytest.approx(expected, abs=0.08)
    assert simulation.idle == 0  # no slot is idle while calls wait


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
    """An engine that runs a few calls at a time, reports its load, and counts the calls of each project that ended."""

    def __init__(self, slots: int) -> None:
        super().__init__(lambda request, n: say("Hello."))
        self._free = asyncio.Semaphore(slots)
        self.running = self.queued = 0
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
            await until(lambda: large.queue.waiting >= 6, 60)
            for _ in range(8):
                agents.create_task(work("small"))
            await until(lambda: small.queue.running >= large.queue.running - 1, 60)  # it began with one
            engine.ended.clear()
            await until(lambda: engine.ended.total() >= 60, 60)
            ended = dict(engine.ended)
            done.set()
        assert ended["small"] == pytest.approx(30, abs=10), ended
