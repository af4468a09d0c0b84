"""Test loading traces in slices: one load for all calls that wait, only whole traces, and limited time per loop iteration."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.kit import Gated, OpenSession, Running, gateway, say, until, user
from tests.projects.kit import create_project
from turngate.common import clock
from turngate.errors import StoreError
from turngate.gateway import eviction
from turngate.gateway.events import Events, GatewayEvent
from turngate.gateway.eviction import Evictor
from turngate.gateway.loading import TimeSlicer, TraceLoader
from turngate.store.store import SessionLoading, Store
from turngate.trace.session import Session, SessionConfig
from turngate.trace.tree import RefusedCalls

TURNS = 3
NODES = 2 * TURNS


@asynccontextmanager
async def evicted_sessions(count: int) -> AsyncIterator[tuple[Running, list[Session]]]:
    """Open sessions, make three turns in each, and evict them."""
    async with gateway([say(f"Answer {n}.") for n in range(TURNS + 1)], rest_s=3600) as g:
        sessions = []
        for _ in range(count):
            opened, history = await g.open(), [user("Hi")]
            for _ in range(TURNS):
                history += [(await g.ask(opened.key, history)).message(), user("More")]
            sessions.append(g.live(opened.id))
        await g.app.evictor.sweep(time.time() + 7200)
        assert all(session.is_evicted for session in sessions)
        yield g, sessions


def burn(seconds: float) -> None:
    """Use CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class SliceLog:
    """Records the loop iteration of each slice."""

    def __init__(self, g: Running) -> None:
        self.iterations: list[int] = []
        self._now = 0
        g.start(self._count_iterations())

    async def _count_iterations(self) -> None:
        while True:
            self._now += 1
            await asyncio.sleep(0)

    def watch(self, store: Store, *, burn_s: float = 0) -> None:
        """Record the slices that are read from a store. Each takes at least `burn_s` seconds of CPU time."""
        load_slice = store.continue_loading

        def continue_loading(loading: SessionLoading, seconds: float) -> bool:
            self.iterations.append(self._now)
            burn(burn_s)
            return load_slice(loading, seconds)

        store.continue_loading = continue_loading  # type: ignore[method-assign]


class SlicedLoader(TraceLoader):
    """A loader with one node per slice. `loaded` has the size of each loaded trace, `iterations` the loop iteration of each slice."""

    def __init__(self, g: Running) -> None:
        self.loaded: list[int] = []
        super().__init__(g.app.store, TimeSlicer(slice_s=0), on_load=self.loaded.append)
        slices = SliceLog(g)
        slices.watch(g.app.store)
        self.iterations = slices.iterations

    async def load_until_slice(self, session: Session, slices: int) -> asyncio.Task[None]:
        """Start to load a trace, and return while the load is in progress."""
        task = asyncio.create_task(self.load(session))
        while len(self.iterations) < slices:
            await asyncio.sleep(0)
        assert session.is_evicted, "a call must not see a partial trace"
        return task


async def test_calls_that_wait_for_a_trace_share_one_load() -> None:
    async with evicted_sessions(1) as (g, [session]):
        loader = SlicedLoader(g)
        first = await loader.load_until_slice(session, 2)
        second = asyncio.create_task(loader.load(session))
        first.cancel()  # the second call still needs the trace
        await second
        assert [node.id for node in session.trace.nodes] == list(range(1, NODES + 1))
        assert loader.loaded == [session.trace.estimate_bytes()]
        assert (session.turns, session.sampled_tokens) == (TURNS, sum(turn.size for turn in session.trace.turns()))


async def test_concurrent_loads_share_the_time_of_a_loop_iteration() -> None:
    async with evicted_sessions(3) as (g, sessions):
        loader = SlicedLoader(g)
        await asyncio.gather(*(loader.load(session) for session in sessions))
        assert len(loader.loaded) == 3 and len(loader.iterations) > 3 * NODES
        assert len(set(loader.iterations)) == len(loader.iterations)


async def test_projects_share_the_time_of_a_loop_iteration() -> None:
    async with evicted_sessions(1) as (g, [session]):
        await create_project(g, "acme")
        acme = g.app.hosted.open("acme")
        other, _ = acme.sessions.open(SessionConfig())
        await acme.evictor.sweep(time.time() + 7200)
        slices = SliceLog(g)
        for project in (g.app, acme):
            slices.watch(project.store, burn_s=0.02)  # more than all slices may take in one iteration
        await asyncio.gather(g.app.trace_loader.load(session), acme.trace_loader.load(other))
        assert not session.is_evicted and not other.is_evicted
        assert len(set(slices.iterations)) == len(slices.iterations)


async def run_turn(log: list[str], steps: int) -> None:
    """Compute in several iterations of the event loop, as a turn does."""
    for _ in range(steps):
        burn(0.0005)
        log.append("turn")
        await asyncio.sleep(0)


def start_read(log: list[str], *, slices: int, slice_s: float) -> asyncio.Future[None]:
    """Start a read of several slices."""

    def run_slice(seconds: float) -> bool:
        burn(slice_s)
        log.append("slice")
        return log.count("slice") == slices

    return TimeSlicer().run(run_slice)


async def test_turn_waits_for_one_slice_and_not_for_one_in_each_of_its_steps() -> None:
    log: list[str] = []
    await asyncio.gather(start_read(log, slices=3, slice_s=0.1), run_turn(log, 6))
    assert log == ["slice", *["turn"] * 6, "slice", "slice"]


async def test_read_ends_although_turns_are_always_ready() -> None:
    log: list[str] = []
    turns = asyncio.create_task(run_turn(log, 10**9))
    await start_read(log, slices=3, slice_s=0.01)
    turns.cancel()
    between = "".join(log).split("slice")[1:3]
    assert all(steps.count("turn") >= 5 for steps in between), log


async def test_load_alternates_with_the_pages_of_many_followers() -> None:
    log: list[str] = []
    slicer = TimeSlicer()

    def load(seconds: float) -> bool:
        log.append("load")
        return log.count("load") == 3

    pages = [slicer.call(lambda: log.append("page")) for _ in range(8)]
    waiting = [asyncio.ensure_future(page) for page in pages]
    await asyncio.sleep(0)  # the pages are waiting now
    await slicer.run(load)
    await asyncio.gather(*waiting)
    assert "".join(log).rpartition("load")[0].count("page") <= 3 and log.count("page") == 8, log


async def test_turn_waits_for_one_page_of_one_follower(tmp_path: Path) -> None:
    log: list[str] = []

    class LoggedEvents(Events):
        def page(self, session: str = "", after: int = 0, limit: int = 1) -> list[GatewayEvent]:
            burn(0.1)
            log.append("page")
            return super().page(session, after, limit)

    async def read_all() -> None:
        assert len([page async for page in events.follow(wait=False)]) == 2

    with closing(Store(tmp_path)) as store:
        events = LoggedEvents(store)
        for _ in range(2):
            events.add("s", "note", {})
        await asyncio.gather(read_all(), read_all(), run_turn(log, 6))
    *waited, _ = "".join(log).rpartition("turn")
    assert waited[0].count("page") == 1 and log.count("page") == 6, log


async def test_error_while_loading_reaches_all_calls_and_the_next_call_loads_again() -> None:
    async with evicted_sessions(1) as (g, [session]):
        loader = SlicedLoader(g)
        with g.app.store._writing() as db:
            db.execute("UPDATE nodes SET checksum=checksum+1 WHERE id=4")
        both = await asyncio.gather(loader.load(session), loader.load(session), return_exceptions=True)
        assert all(isinstance(error, StoreError) and "node 4 is damaged" in error.message for error in both)
        assert session.is_evicted and not loader.loaded
        with g.app.store._writing() as db:
            db.execute("UPDATE nodes SET checksum=checksum-1 WHERE id=4")
        await loader.load(session)
        assert len(session.trace.nodes) == NODES


async def test_turn_marked_undelivered_during_load_is_undelivered_in_the_trace() -> None:
    async with evicted_sessions(1) as (g, [session]):
        loader = SlicedLoader(g)
        load = await loader.load_until_slice(session, 4)
        g.app.recorder.mark_undelivered(session, 2)
        await load
        assert [turn.delivered for turn in session.trace.turns()] == [False, True, True]


async def test_trace_loaded_elsewhere_during_load_is_kept() -> None:
    async with evicted_sessions(1) as (g, [session]):
        loader = SlicedLoader(g)
        load = await loader.load_until_slice(session, 2)
        trace = session.trace
        await load
        assert session.trace is trace and not loader.loaded


async def test_session_deleted_during_load_is_not_loaded() -> None:
    async with evicted_sessions(1) as (g, [session]):
        loader = SlicedLoader(g)
        load = await loader.load_until_slice(session, 2)
        await g.app.sessions.delete(session.id)
        await load
        assert session.is_evicted and not loader.loaded


async def test_loading_more_than_a_share_of_the_limit_starts_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "_LIMITED_S", 3600.0)  # otherwise, a sweep starts every second anyway
    async with evicted_sessions(3) as (g, sessions):
        evictor = Evictor(g.app.store, g.app.sessions, rest_s=0, max_loaded_mb=0.001)
        assert evictor.interval_s == 3600
        g.start(evictor.run())
        loader = TraceLoader(g.app.store, TimeSlicer(), on_load=evictor.count_loaded)
        first, second, third = sessions
        await loader.load(first)
        assert not first.is_evicted, "a call that waited for the trace can use it"
        await loader.load(second)
        await until(lambda: first.is_evicted)
        await loader.load(third)
        await until(lambda: second.is_evicted)


async def test_calls_in_flight_count_towards_the_limit() -> None:
    async with gateway(engine=Gated([say("One."), say("Two.")]), rest_s=0) as g:
        idle, opened = g.live((await g.open()).id), await g.open()
        busy = g.live(opened.id)
        evictor = Evictor(g.app.store, g.app.sessions, rest_s=0, max_loaded_mb=0.2)
        assert await evictor.sweep(clock.now()) == 0
        call = g.start(g.ask(opened.key, [user("Hi " * 40_000)]))
        await until(lambda: g.gated.waiting)
        assert busy.estimate_call_bytes() > 3 * 120_000
        assert await evictor.sweep(clock.now()) > 0
        assert idle.is_evicted and not busy.is_evicted
        g.gated.gate.set()
        await call
        assert busy.estimate_call_bytes() == 0


async def test_call_that_takes_longer_than_rest_s_counts_towards_the_limit() -> None:
    async with gateway(engine=Gated([say("One.")]), rest_s=0) as g:
        idle, opened = g.live((await g.open()).id), await g.open()
        evictor = Evictor(g.app.store, g.app.sessions, rest_s=60, max_loaded_mb=0.2)
        call = g.start(g.ask(opened.key, [user("Hi " * 40_000)]))
        await until(lambda: g.gated.waiting)
        later = clock.now() + 61
        idle.last_used = later
        assert await evictor.sweep(later) == 1
        assert idle.is_evicted
        g.gated.gate.set()
        await call


async def test_refused_call_does_not_load_the_trace() -> None:
    async with evicted_sessions(1) as (g, [session]):
        g.app.recorder.record_refusal(session, 413, "the body is too large", b"")
        assert session.is_evicted
        await g.app.trace_loader.load(session)
        assert session.trace.refused == RefusedCalls(1, 413, "the body is too large")


async def test_call_refused_during_load_is_in_the_trace() -> None:
    async with evicted_sessions(1) as (g, [session]):
        loader = SlicedLoader(g)
        load = await loader.load_until_slice(session, 2)
        g.app.recorder.record_refusal(session, 413, "the body is too large", b"")
        await load
        assert session.trace.refused == RefusedCalls(1, 413, "the body is too large")
        assert len(session.trace.nodes) == NODES


async def test_short_trace_does_not_wait_for_a_long_one() -> None:
    async with evicted_sessions(2) as (g, [long, short]):
        with g.app.store._writing() as db:
            rows = db.execute("SELECT * FROM nodes WHERE session=? AND id>2", (short.key,)).fetchall()
            db.execute("DELETE FROM nodes WHERE session=? AND id>2", (short.key,))
        loader = SlicedLoader(g)
        load = await loader.load_until_slice(long, 1)
        await loader.load(short)
        assert len(short.trace.nodes) == 2 and long.is_evicted
        await load
        with g.app.store._writing() as db:  # the stored session is whole again
            db.executemany(f"INSERT INTO nodes VALUES ({','.join('?' * len(rows[0]))})", rows)


async def test_store_closed_during_load_ends_the_wait() -> None:
    async with evicted_sessions(1) as (g, [session]):
        loader = SlicedLoader(g)
        loads = [await loader.load_until_slice(session, 2), asyncio.create_task(loader.load(session))]
        g.app.store.close()
        errors = await asyncio.gather(*loads, return_exceptions=True)
        assert [type(error) for error in errors] == [StoreError, StoreError] and not session.busy


async def test_session_sealed_during_load_is_not_loaded() -> None:
    async with evicted_sessions(1) as (g, [session]):
        loader = SlicedLoader(g)
        load = await loader.load_until_slice(session, 2)
        await g.app.sessions.seal(session.id)
        await load
        assert session.is_evicted and not session.busy


@pytest.mark.parametrize("action", ["seal", "cancel"])
async def test_ending_an_evicted_session_loads_its_trace_in_slices(action: str) -> None:
    async with evicted_sessions(1) as (g, [session]):
        g.app.slicer._slice_s = 0  # one node per slice
        slices = SliceLog(g)
        slices.watch(g.app.store)
        reply = (await g.admin.post(f"/admin/sessions/{session.id}/{action}", json={})).json()
        assert (reply["status"], reply["turns"], reply["roles"]) == (session.status, TURNS, {"main": TURNS})
        assert len(set(slices.iterations)) == len(slices.iterations) > NODES


async def test_ending_an_evicted_session_reads_a_damaged_trace_once() -> None:
    async with evicted_sessions(1) as (g, [session]):
        g.app.slicer._slice_s = 0
        slices = SliceLog(g)
        slices.watch(g.app.store)
        with g.app.store._writing() as db:
            db.execute("UPDATE nodes SET checksum=checksum+1 WHERE id=4")
        reply = (await g.admin.post(f"/admin/sessions/{session.id}/seal", json={})).json()
        assert (reply["status"], reply["turns"], reply["tokens"]) == ("sealed", TURNS, None)
        assert "node 4 is damaged" in reply["unreadable"]
        assert len(set(slices.iterations)) == len(slices.iterations) == 4
        with g.app.store._writing() as db:
            db.execute("UPDATE nodes SET checksum=checksum-1 WHERE id=4")


@asynccontextmanager
async def restarted_gateway(
    tmp_path: Path,
) -> AsyncIterator[tuple[Running, OpenSession, SliceLog, list[dict[str, Any]]]]:
    """Make three turns in a session, and restart the gateway. Slices contain one node."""
    history: list[dict[str, Any]] = [user("Hi")]
    async with gateway([say(f"Answer {n}.") for n in range(TURNS)], data=tmp_path) as g:
        session = await g.open()
        for _ in range(TURNS):
            history += [(await g.ask(session.key, history)).message(), user("More")]
    async with gateway([say("One more."), say("Another.")], data=tmp_path) as g:
        g.app.slicer._slice_s = 0
        slices = SliceLog(g)
        slices.watch(g.app.store)
        yield g, session, slices, history


def was_loaded_once(slices: SliceLog) -> bool:
    """Return whether the trace was loaded once, with at most one slice in each loop iteration."""
    return len(set(slices.iterations)) == len(slices.iterations) == NODES + 1


async def test_first_calls_after_a_restart_load_the_session_once_and_in_slices(tmp_path: Path) -> None:
    async with restarted_gateway(tmp_path) as (g, session, slices, history):
        assert g.app.sessions.find_live(session.id) is None
        await asyncio.gather(*(g.ask(session.key, history) for _ in range(2)))
        assert was_loaded_once(slices)
        shown = await g.show(session.id)
        assert (shown["turns"], shown["forks"][0]["cause"]) == (TURNS + 2, "resample")
        assert g.live(session.id).turns == TURNS + 2


@pytest.mark.parametrize("path", ["seal", "cancel", "tools"])
async def test_other_requests_after_a_restart_load_the_session_in_slices(tmp_path: Path, path: str) -> None:
    async with restarted_gateway(tmp_path) as (g, session, slices, _):
        if path == "tools":
            reply = await g.admin.get(f"/admin/sessions/{session.id}/tools")
        else:
            reply = await g.admin.post(f"/admin/sessions/{session.id}/{path}", json={})
        assert reply.status_code == 200 and was_loaded_once(slices)
        if path in ("seal", "cancel"):
            assert (reply.json()["turns"], reply.json()["roles"]) == (TURNS, {"main": TURNS})


async def test_session_is_usable_if_the_first_caller_disconnects_during_the_load(tmp_path: Path) -> None:
    async with restarted_gateway(tmp_path) as (g, session, slices, history):
        first = asyncio.create_task(g.app.sessions.find(session.id))
        while len(slices.iterations) < 2:
            await asyncio.sleep(0)
        second = asyncio.create_task(g.app.sessions.find(session.id))
        first.cancel()
        assert (await second) is g.live(session.id)
        await g.ask(session.key, history)
        assert was_loaded_once(slices)


async def test_session_damaged_on_disk_is_reported_after_a_restart_and_can_be_deleted(tmp_path: Path) -> None:
    async with restarted_gateway(tmp_path) as (g, session, _, history):
        with g.app.store._writing() as db:
            db.execute("UPDATE nodes SET checksum=checksum+1 WHERE id=4")
        for _ in range(2):
            reply = await g.http(session.key).post("/v1/chat/completions", json={"model": "m", "messages": history})
            assert reply.status_code == 503 and "node 4 is damaged" in reply.text
        assert g.app.sessions.find_live(session.id) is None and not g.engine.received
        assert (await g.admin.delete(f"/admin/sessions/{session.id}")).status_code == 200
        assert (await g.admin.get(f"/admin/sessions/{session.id}")).status_code == 404


async def test_session_sealed_during_the_load_after_a_restart_is_not_used(tmp_path: Path) -> None:
    async with restarted_gateway(tmp_path) as (g, session, slices, history):
        seal = asyncio.create_task(g.app.sessions.seal(session.id))
        while len(slices.iterations) < 2:
            await asyncio.sleep(0)
        second = await g.app.sessions.find(session.id)
        assert (await seal) is second and second.status == "sealed"
        assert was_loaded_once(slices) and g.app.sessions.find_live(session.id) is None
        with pytest.raises(openai.ConflictError):
            await g.ask(session.key, history)


async def load_until_slice(g: Running, slices: SliceLog, session: OpenSession, history: list[dict[str, Any]]) -> Any:
    """Start a call that needs the session, and return while the session is being loaded."""
    call = g.start(g.ask(session.key, history))
    while len(slices.iterations) < 2:
        await asyncio.sleep(0)
    return call


async def test_session_that_a_call_is_loading_is_not_idle(tmp_path: Path) -> None:
    async with restarted_gateway(tmp_path) as (g, session, slices, history):
        call = await load_until_slice(g, slices, session, history)
        g.app.sessions._started = clock.now() - 3601  # the limit passes during the load
        assert g.app.sessions.find_idle(clock.now(), 3600) == []
        assert (await call).content == "One more."
        assert g.live(session.id).status == "open"


async def test_session_used_while_others_are_sealed_is_not_sealed(tmp_path: Path) -> None:
    async with restarted_gateway(tmp_path) as (g, session, _, _):
        other = await g.open()
        sessions = g.app.sessions
        sessions._started = clock.now() - 3601
        g.live(other.id).last_used = clock.now() - 3601
        housekeeper = g.app._housekeeper
        housekeeper._idle_s = 3600
        assert sorted(sessions.find_idle(clock.now(), 3600)) == sorted([session.id, other.id])
        [first, last] = sessions.find_idle(clock.now(), 3600)
        seal = sessions.seal

        async def seal_slowly(session_id: str, stop: str = "") -> Session:
            (await sessions.find(last)).last_used = clock.now()
            return await seal(session_id, stop)

        sessions.seal = seal_slowly  # type: ignore[method-assign]
        await housekeeper._seal_idle()
        assert sessions.find_live(first) is None and g.live(last).status == "open"


async def test_call_that_is_loading_its_session_does_not_start_once_the_gateway_stops(tmp_path: Path) -> None:
    async with restarted_gateway(tmp_path) as (g, session, slices, history):
        call = await load_until_slice(g, slices, session, history)
        await g.app.end_requests()
        with pytest.raises(openai.APIStatusError, match="stopping"):
            await call
        assert not g.engine.received
