"""Test the fence of many cells: no turn is sampled with old weights, or recorded with the wrong version, after an update has returned.

The cells are gateways with their own stores. Their engines share one `World`, which "samples" the version of its weights, so that every
recorded turn shows which weights sampled it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.kit import Running, gateway, renderer, until
from tests.speed import scaled
from tests.store.kit import open_shared
from turngate.engines.scripted import Scripted, ScriptedTurn
from turngate.errors import StoreError
from turngate.gateway.fence import Fence
from turngate.gateway.followers import find_blocking
from turngate.gateway.shared_fence import FenceFollower
from turngate.gateway.weights import WeightUpdates
from turngate.store.shared.fence import FenceFollowerRow, FenceTable, SharedFence

TTL_S = min(scaled(1.0), 4.0)  # a longer one only makes the tests longer


@pytest.mark.parametrize(
    ("row", "blocks"),
    [
        (FenceFollowerRow("a", "", 10, seen=100, epoch=4, now=100), True),  # has not carried it out
        (FenceFollowerRow("a", "", 10, seen=100, epoch=5, now=100), False),
        (FenceFollowerRow("a", "", 10, seen=100, epoch=6, now=100), False),
        (FenceFollowerRow("a", "", 10, seen=100, epoch=4, now=109.9), True),
        (
            FenceFollowerRow("a", "", 10, seen=100, epoch=4, now=110),
            False,
        ),  # its last report before the change has expired
        (
            FenceFollowerRow("a", "", 10, seen=105, epoch=4, now=110),
            False,
        ),  # it has reported since, so it knows the change
        (FenceFollowerRow("a", "", 10, seen=95, epoch=4, now=104.9), True),
        (FenceFollowerRow("a", "", 10, seen=95, epoch=4, now=105), False),
        (FenceFollowerRow("a", "", 10, seen=1, epoch=0, now=100), False),  # died long ago
    ],
)
def test_change_waits_for_followers_that_may_still_serve(row: FenceFollowerRow, blocks: bool) -> None:
    assert bool(find_blocking([row], epoch=5, since=100)) is blocks


@pytest.mark.parametrize(("seen", "epoch", "blocks"), [(105, 4, True), (100, 4, False), (105, 5, False)])
def test_drain_waits_for_followers_that_report_calls_in_flight(seen: float, epoch: int, blocks: bool) -> None:
    row = FenceFollowerRow("a", "", 10, seen=seen, epoch=epoch, now=110)
    assert bool(find_blocking([row], epoch=5, since=100, drains=True)) is blocks


async def test_fence_admits_no_call_after_its_time() -> None:
    fence = Fence()
    assert fence.admits
    fence.valid_until = 0.0
    entering = asyncio.create_task(fence.enter())
    await asyncio.sleep(0.01)
    assert not fence.admits and not entering.done() and fence.paused
    fence.valid_until = float("inf")
    fence.resume()
    await entering
    assert fence.in_flight == 1


class World:
    """The weights of all engines."""

    def __init__(self) -> None:
        self.version = 0
        self.delay_s = 0.005
        self.hang = False

    def turn(self, request: Any, index: int) -> ScriptedTurn:
        ids = [*renderer().tokenizer.encode(str(self.version)), renderer().stop_ids[0]]
        return ScriptedTurn(ids, delay_s=self.delay_s, chunk=1, silent_for=3600 if self.hang else 0)


class CutTable:
    """The table as a cell sees it. While `is_cut`, the cell cannot reach it."""

    def __init__(self, table: FenceTable) -> None:
        self._table = table
        self.is_cut = False

    def report(self, *arguments: Any) -> SharedFence:
        if self.is_cut:
            raise StoreError("the shared store cannot be reached")
        return self._table.report(*arguments)

    def forget(self, follower: str) -> None:
        self._table.forget(follower)


class FollowingCell:
    """A gateway whose fence follows the shared one."""

    def __init__(self, running: Running, follower: FenceFollower, table: CutTable) -> None:
        self.running, self.follower, self.table = running, follower, table
        self.sessions: list[Any] = []

    async def ask(self) -> str:
        session = await self.running.open()
        self.sessions.append(session)
        return str((await self.running.ask(session.key, "Hi", "async stream")).content)

    async def turns(self) -> list[tuple[str, int, int, float]]:
        """The weights that sampled each complete turn, and the recorded versions and start."""
        found = []
        for session in self.sessions:
            for turn in await self.running.turns(session.id):
                if turn["finish"] == "stop":
                    text = turn["message"]["content"]
                    found.append((text, turn["version_start"], turn["version_end"], turn["started"]))
        return found


@asynccontextmanager
async def cell(url: str, name: str, world: World) -> AsyncIterator[FollowingCell]:
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(gateway(engine=Scripted(world.turn)))
        store = open_shared(url)
        stack.callback(store.close)
        table, app = CutTable(store.fence), running.app

        async def abort_calls() -> None:
            for session in list(app.sessions._live.values()):
                for task in list(session.calls):
                    task.cancel()

        follower = FenceFollower(
            app.fence,
            app.barrier,
            app.fence_state,
            app.replicas,
            lambda: table,  # type: ignore[arg-type,return-value]
            abort_calls,
            id=name,
            name=name,
            ttl_s=TTL_S,
        )
        await follower.start()
        stack.push_async_callback(follower.stop)
        yield FollowingCell(running, follower, table)


class FaultyTable:
    """A table in memory. While `is_faulty`, it fails as a table would that has a bug."""

    def __init__(self) -> None:
        self.is_faulty = False
        self.failures = 0

    def report(self, *_: Any) -> SharedFence:
        if self.is_faulty:
            self.failures += 1
            raise KeyError("epoch")
        return SharedFence()

    def forget(self, follower: str) -> None: ...


@asynccontextmanager
async def follow(running: Running, table: FaultyTable, abort_calls: Any) -> AsyncIterator[FenceFollower]:
    app = running.app
    parts: list[Any] = [app.fence, app.barrier, app.fence_state, app.replicas, lambda: table, abort_calls]
    follower = FenceFollower(*parts, id="a", name="a", ttl_s=scaled(0.2))
    await follower.start()
    try:
        yield follower
    finally:
        await follower.stop()


async def test_follower_survives_unexpected_errors_of_reports(caplog: pytest.LogCaptureFixture) -> None:
    table = FaultyTable()
    async with gateway() as g, follow(g, table, asyncio.Event().wait):
        table.is_faulty = True
        await until(lambda: table.failures > 2 and g.app.fence.paused)
        table.is_faulty = False
        await until(lambda: g.app.fence.admits)
    [message] = [record for record in caplog.records if "cannot follow the fence" in record.message]
    assert message.exc_info is not None and isinstance(message.exc_info[1], KeyError)


async def test_follower_survives_unexpected_errors_of_aborts(caplog: pytest.LogCaptureFixture) -> None:
    aborts = 0

    async def abort_calls() -> None:
        nonlocal aborts
        aborts += 1
        if aborts < 3:
            raise KeyError("session")
        g.app.fence.leave()

    table = FaultyTable()
    async with gateway() as g, follow(g, table, abort_calls):
        await g.app.fence.enter()
        table.is_faulty = True
        await until(lambda: not g.app.fence.in_flight)
    assert aborts == 3
    assert len([record for record in caplog.records if "cannot abort the calls" in record.message]) == 1


@asynccontextmanager
async def controller(url: str) -> AsyncIterator[WeightUpdates]:
    """The weight updates of a gateway on the shared store."""
    async with gateway(data=url) as g:
        yield g.app.updates


@pytest.fixture(autouse=True)
def scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway on the shared store keeps its key in the working folder."""
    monkeypatch.chdir(tmp_path)


async def update(updates: WeightUpdates, world: World, version: int) -> float:
    """Update the weights of all engines, and return when that was done."""
    await updates.pause("drain", None)
    world.version = version
    await updates.resume(version, None)
    return time.time()


@pytest.mark.needs("postgres")
@pytest.mark.real
@pytest.mark.promise(1)
async def test_no_turn_is_sampled_under_old_version_after_update(postgres_url: str) -> None:
    world = World()
    async with controller(postgres_url) as updates, AsyncExitStack() as stack:
        cells = [await stack.enter_async_context(cell(postgres_url, f"c{n}", world)) for n in range(3)]
        done = asyncio.Event()

        async def work(one: FollowingCell) -> None:
            while not done.is_set():
                with suppress(openai.APIError):  # aborted, if the machine is so slow that a cell stops
                    await one.ask()
                    answers.append(one)
                await asyncio.sleep(0.05)

        async def wait_for_new_turn() -> None:
            before = len(answers)
            await until(lambda: len(answers) > before + len(cells))  # at least one of them begins now

        answers: list[FollowingCell] = []
        workers = [asyncio.create_task(work(one)) for one in cells]
        returned = {}
        for version in (1, 2):
            await wait_for_new_turn()
            returned[version] = await update(updates, world, version)
        await wait_for_new_turn()
        done.set()
        await asyncio.gather(*workers)
        turns = [turn for one in cells for turn in await one.turns()]
        assert {first for _, first, _, _ in turns} == {0, 1, 2}
        for text, first, last, started in turns:
            assert text == str(first) == str(last)
            assert all(first >= version for version, at in returned.items() if started > at)


@pytest.mark.needs("postgres")
@pytest.mark.full
async def test_drain_waits_for_a_call_that_takes_longer_than_the_lease(postgres_url: str) -> None:
    world = World()
    world.delay_s = 3 * TTL_S
    async with controller(postgres_url) as updates, cell(postgres_url, "busy", world) as busy:
        asking = asyncio.create_task(busy.ask())
        await until(lambda: busy.running.app.fence.in_flight == 1)
        await updates.pause("drain", None)
        assert busy.running.app.fence.in_flight == 0
        assert await asking == "0"


@pytest.mark.needs("postgres")
@pytest.mark.full
async def test_unreachable_cell_stops_before_update_returns(postgres_url: str) -> None:
    world = World()
    async with controller(postgres_url) as updates, AsyncExitStack() as stack:
        near = await stack.enter_async_context(cell(postgres_url, "near", world))
        far = await stack.enter_async_context(cell(postgres_url, "far", world))
        assert await near.ask() == await far.ask() == "0"
        world.hang = True
        hanging = asyncio.create_task(far.ask())
        await until(lambda: far.running.app.fence.in_flight == 1)
        world.hang = False
        far.table.is_cut = True
        began = time.monotonic()
        await updates.pause("drain", None)
        # It had not heard of the update, and its call was in flight. Both ended by its own clock.
        assert far.running.app.fence.in_flight == 0 and not far.running.app.fence.admits
        assert time.monotonic() - began <= TTL_S + scaled(2)
        with pytest.raises(openai.APIError):
            await hanging
        world.version = 1
        await updates.resume(1, None)
        assert await near.ask() == "1"
        asking = asyncio.create_task(far.ask())  # held, since the cell does not know which version is in force
        await asyncio.sleep(TTL_S / 2)
        assert not asking.done() and far.running.app.fence.version == 0
        far.table.is_cut = False
        assert await asking == "1"
        for one in (near, far):
            assert all(text == str(first) == str(last) for text, first, last, _ in await one.turns())
        assert far.running.app.fence.version == 1


@pytest.mark.needs("postgres")
@pytest.mark.full
async def test_hold_outlives_restarts_of_controller_and_cells(postgres_url: str) -> None:
    world = World()
    async with controller(postgres_url) as updates, cell(postgres_url, "a", world) as one:
        await updates.pause("hold", None)
        assert one.running.app.fence.paused
    async with cell(postgres_url, "b", world) as one:  # a new cell, while the trainer still sends weights
        asking = asyncio.create_task(one.ask())
        await asyncio.sleep(0.05)
        assert not asking.done()
        world.version = 7
        async with controller(postgres_url) as updates:  # restarted
            assert (await updates.describe_fence()).paused
            await updates.resume(7, None)
            assert await asking == "7"
            await updates.pause("hold", scaled(0.3))  # a trainer that dies
            await until(lambda: not one.running.app.fence.paused)
            assert await one.ask() == "7"
        assert [turn[1] for turn in await one.turns()] == [7, 7]


@pytest.mark.needs("postgres")
@pytest.mark.full
async def test_cell_does_not_follow_store_back_to_old_version(postgres_url: str) -> None:
    world = World()
    async with controller(postgres_url) as updates, cell(postgres_url, "a", world) as one:
        world.version = 5
        await updates.resume(5, None)
        assert await one.ask() == "5"
        store = open_shared(postgres_url)
        store.fence.write("open", 3, "", "")  # as after a restore from an old backup
        store.close()
        await until(lambda: one.running.app.fence.paused)
        asking = asyncio.create_task(one.ask())
        await asyncio.sleep(TTL_S / 2)
        assert not asking.done()
        world.version = 6
        await updates.resume(6, None)
        assert await asking == "6"
