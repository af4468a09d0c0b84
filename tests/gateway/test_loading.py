"""Test loading evicted traces in slices: one load for all calls that wait, only whole traces, and limited time per loop iteration."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.kit import Gated, Running, gateway, say, until, user
from turngate.common import clock
from turngate.errors import StoreError
from turngate.gateway import eviction
from turngate.gateway.eviction import Evictor
from turngate.gateway.loading import TraceLoader
from turngate.store.sqlite import SessionLoading
from turngate.trace.session import Session

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
            sessions.append(live_session(g, opened.id))
        await g.app.evictor.sweep(time.time() + 7200)
        assert all(session.is_evicted for session in sessions)
        yield g, sessions


def live_session(g: Running, session_id: str) -> Session:
    session = g.app.sessions.find_live(session_id)
    assert session is not None
    return session


class SlicedLoader(TraceLoader):
    """A loader with one node per slice. `loaded` has the size of each loaded trace, `iterations` the loop iteration of each slice."""

    def __init__(self, g: Running) -> None:
        self.loaded: list[int] = []
        self.iterations: list[int] = []
        super().__init__(g.app.store, slice_s=0, on_load=self.loaded.append)
        self._now = 0
        self._counting = g.start(self._count_iterations())
        load_slice = g.app.store.continue_loading

        def continue_loading(loading: SessionLoading, seconds: float) -> bool:
            self.iterations.append(self._now)
            return load_slice(loading, seconds)

        g.app.store.continue_loading = continue_loading  # type: ignore[method-assign]

    async def _count_iterations(self) -> None:
        while True:
            self._now += 1
            await asyncio.sleep(0)

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
        loader = TraceLoader(g.app.store, on_load=evictor.count_loaded)
        first, second, third = sessions
        await loader.load(first)
        assert not first.is_evicted, "a call that waited for the trace can use it"
        await loader.load(second)
        await until(lambda: first.is_evicted)
        await loader.load(third)
        await until(lambda: second.is_evicted)


async def test_calls_in_flight_count_towards_the_limit() -> None:
    async with gateway(engine=Gated([say("One."), say("Two.")]), rest_s=0) as g:
        idle, opened = live_session(g, (await g.open()).id), await g.open()
        busy = live_session(g, opened.id)
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
