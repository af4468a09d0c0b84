"""Tests for the pool: session placement, failover, health checks and data-parallel ranks."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.engines.standins import (
    DONE,
    StandIn,
    answer_stream,
    answer_with,
    collect,
    event,
    make_request,
    serving,
)
from tests.kit import count_cycles
from tests.ports import free_port
from tests.speed import scaled
from turngate.engines import http
from turngate.engines.base import Engine, Health
from turngate.engines.load import EngineLoad
from turngate.engines.pool import Pool
from turngate.engines.replica import PoolTiming
from turngate.engines.scripted import Scripted, ScriptedTurn
from turngate.engines.vllm import VLLM
from turngate.errors import (
    ConfigError,
    ContextOverflow,
    EngineBusy,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    TurngateError,
)

pytestmark = pytest.mark.asyncio


class Replica(Scripted):
    """A scripted engine with switchable health that samples its own number."""

    def __init__(self, number: int, **turn: Any) -> None:
        super().__init__(lambda request, index: ScriptedTurn([number, number], **self.turn), name=f"replica {number}")
        self.number = number
        self.turn = turn
        self.ok = True
        self.checks = 0
        self.started = self.closed = 0
        self.released: list[str] = []

    async def start(self) -> None:
        self.started += 1

    async def close(self) -> None:
        self.closed += 1

    async def health(self) -> list[Health]:
        self.checks += 1
        return [Health(self.name, self.ok, "" if self.ok else "switched off", max_context=100)]

    def release(self, session: str) -> None:
        super().release(session)
        self.released.append(session)


@asynccontextmanager
async def pool_of(*engines: Engine, **settings: Any) -> AsyncIterator[Pool]:
    given = {"check_s": 0.02, "backoff_s": 0.01, **settings}
    timing = PoolTiming(**{name: given.pop(name) for name in PoolTiming.__struct_fields__ if name in given})
    pool = Pool(engines, timing=timing, **given)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


async def served_by(pool: Pool, session: str = "", **fields: Any) -> int:
    """Run one call and return the number of the replica that answered."""
    async with pool.generate(make_request(session=session, **fields)) as chunks:
        whole = await collect(chunks)
    assert len(whole.ids) == 2 and len(set(whole.ids)) == 1 and whole.finish == "stop"
    return whole.ids[0]


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(scaled(2)):
        while not condition():
            await asyncio.sleep(0.005)


async def test_session_stays_on_its_replica() -> None:
    async with pool_of(Replica(0), Replica(1), Replica(2)) as pool:
        homes = {f"s{n}": await served_by(pool, f"s{n}") for n in range(30)}
        assert Counter(homes.values()) == {0: 10, 1: 10, 2: 10}
        for _ in range(3):
            assert {session: await served_by(pool, session) for session in reversed(homes)} == homes


async def test_new_sessions_go_to_least_loaded_replica() -> None:
    slow, fast = Replica(0, hang=True), Replica(1)
    async with pool_of(slow, fast) as pool:
        busy = asyncio.create_task(served_by(pool, "long"))
        await eventually(lambda: slow.in_flight == 1)
        # replica 1 has more sessions, but replica 0 has a call in flight
        assert [await served_by(pool, f"s{n}") for n in range(5)] == [1] * 5
        assert slow.in_flight == 1 and len(slow.received) == 1
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)


async def test_released_sessions_free_capacity() -> None:
    replicas = Replica(0), Replica(1)
    async with pool_of(*replicas) as pool:
        for n in range(10):
            await served_by(pool, f"s{n}")
        for n in range(0, 10, 2):
            pool.release(f"s{n}")
        pool.release("never seen")
        assert replicas[0].released == ["s0", "s2", "s4", "s6", "s8"]
        assert [await served_by(pool, f"t{n}") for n in range(5)] == [0] * 5


async def test_placements_are_bounded() -> None:
    async with pool_of(Replica(0), Replica(1), max_sessions=10) as pool:
        first = await served_by(pool, "keeps coming")
        for n in range(100):
            await served_by(pool, f"s{n}")
            assert await served_by(pool, "keeps coming") == first
        assert len(pool._placed) == 10
        assert sum(lane.load.sessions for lane in pool._lanes) == 10
        for _ in range(20):
            await served_by(pool)  # calls without a session are not remembered
        assert len(pool._placed) == 10


async def test_lost_replica_is_avoided_and_returns() -> None:
    lost, other = Replica(0), Replica(1)
    async with pool_of(lost, other) as pool:
        homes = {f"s{n}": await served_by(pool, f"s{n}") for n in range(6)}
        lost.turn = {"fail_before": True}
        lost.ok = False
        assert [await served_by(pool, session) for session in homes] == [1] * 6
        assert len(lost.received) == 3 + 1  # tried once more, then avoided
        assert [health.ok for health in await pool.health()] == [False, True]
        lost.turn = {}
        lost.ok = True
        await eventually(lambda: all(replica.up for replica in pool._replicas))
        assert [await served_by(pool, session) for session in homes] == [
            1
        ] * 6  # sessions stay where their prefixes are cached
        assert await served_by(pool, "new") == 0


async def test_unreachable_vllm_fails_over() -> None:
    choice = {"index": 0, "text": "", "logprobs": None, "token_ids": [7, 7], "finish_reason": "stop"}
    documents = {"/health": {}, "/v1/models": {"data": [{"id": "m"}]}}
    alive = StandIn(answer_stream(event({"choices": [choice]}), DONE), documents)
    async with serving(alive):
        gone = VLLM(f"http://127.0.0.1:{free_port()}", "m")
        there = VLLM(alive.url, "m")
        async with pool_of(gone, there) as pool:
            assert [health.ok for health in await pool.health()] == [False, True]
            for replica in pool._replicas:
                replica.up = True  # as if it had just failed
            assert [await served_by(pool, f"s{n}") for n in range(4)] == [7] * 4
    assert len(alive.bodies) == 4


async def test_no_retry_after_first_chunk() -> None:
    """Once the caller has received a token, the call is not retried on another replica."""
    cut, other = Replica(0, cut_after=1), Replica(1)
    async with pool_of(cut, other) as pool:
        seen: list[int] = []
        with pytest.raises(EngineUnavailable):
            async with pool.generate(make_request(session="s")) as chunks:
                async for chunk in chunks:
                    seen += chunk.ids
        assert seen == [0] and not other.received and len(cut.received) == 1


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ({"overflow": True}, ContextOverflow),
        ({"short_logprobs": True}, EngineError),
        ({"delay_s": 60}, EngineTimeout),
    ],
)
async def test_non_retryable_errors_are_raised(turn: dict[str, Any], expected: type[TurngateError]) -> None:
    bad, other = Replica(0, **turn), Replica(1)
    bad._silence_s = 0.01
    async with pool_of(bad, other) as pool:
        with pytest.raises(TurngateError) as raised:
            await served_by(pool, "s")
        assert type(raised.value) is expected
        assert not other.received
        assert all(health.ok for health in await pool.health())


async def test_busy_replica_is_retried_once() -> None:
    replicas = [Replica(n, busy=True) for n in range(3)]
    async with pool_of(*replicas) as pool:
        with pytest.raises(EngineBusy):
            await served_by(pool, "s")
        assert sum(len(replica.received) for replica in replicas) == 2
        replicas[2].turn = replicas[1].turn = {}
        assert await served_by(pool, "t") in (1, 2)
        assert all(replica.up for replica in pool._replicas)


async def test_busy_only_replica_raises() -> None:
    only = Replica(0, busy=True)
    async with pool_of(only) as pool:
        with pytest.raises(EngineBusy):
            await served_by(pool, "s")
        assert len(only.received) == 1


async def test_failover_past_several_lost_replicas() -> None:
    replicas = [Replica(n, fail_before=n < 2) for n in range(4)]
    async with pool_of(*replicas, check_s=60, backoff_s=60) as pool:
        assert await served_by(pool, "s") == 2
        assert [replica.up for replica in pool._replicas] == [False, False, True, True]


async def test_attempts_are_bounded() -> None:
    """A request that crashes replicas must not take down the whole pool."""
    replicas = [Replica(n, fail_before=True) for n in range(6)]
    async with pool_of(*replicas, check_s=60, backoff_s=60) as pool:
        with pytest.raises(EngineUnavailable):
            await served_by(pool, "s")
        assert sum(len(replica.received) for replica in replicas) == 3


async def test_call_checks_down_replicas_if_all_are_down() -> None:
    only = Replica(0, fail_before=True)
    async with pool_of(only, check_s=60, backoff_s=60) as pool:
        for _ in range(2):
            with pytest.raises(EngineUnavailable):
                await served_by(pool, "s")
        only.turn = {}
        assert await served_by(pool, "s") == 0
        assert [health.ok for health in await pool.health()] == [True]


async def test_call_gets_the_replica_that_returned_first() -> None:
    replicas = Replica(0), Replica(1)
    async with pool_of(*replicas, check_s=60, backoff_s=60) as pool:
        home = await served_by(pool, "s")
        for replica in replicas:
            replica.ok = False
        for _ in range(2):
            await pool.check()
        with pytest.raises(EngineUnavailable, match="switched off"):
            await served_by(pool, "s")
        assert sum(len(replica.received) for replica in replicas) == 1  # a failed check is enough
        replicas[1 - home].ok = True
        assert await served_by(pool, "s") == 1 - home


async def test_concurrent_calls_share_one_check() -> None:
    class Slow(Replica):
        async def health(self) -> list[Health]:
            await asyncio.sleep(0.01)
            return await super().health()

    slow = Slow(0)
    slow.ok = False
    async with pool_of(slow, check_s=60, backoff_s=60) as pool:
        before = slow.checks
        calls = [asyncio.create_task(served_by(pool, f"s{n}")) for n in range(20)]
        await asyncio.sleep(0)
        calls[0].cancel()  # the others still get the result
        assert all(
            isinstance(error, EngineUnavailable) for error in (await asyncio.gather(*calls, return_exceptions=True))[1:]
        )
        assert slow.checks == before + 1
        slow.ok = True
        assert await served_by(pool, "s0") == 0


async def test_successful_call_does_not_bring_replica_up() -> None:
    """A call that began earlier says nothing about the weights that the engine has now."""
    slow = Replica(0, delay_s=0.05)
    async with pool_of(slow, check_s=60, backoff_s=60) as pool:
        call = asyncio.create_task(served_by(pool, "s"))
        await eventually(lambda: slow.in_flight == 1)
        slow.ok = False
        for _ in range(2):
            await pool.check()
        assert await call == 0
        assert not pool.accepts_calls


async def test_health_checks_remove_and_restore_replicas() -> None:
    first, second = Replica(0), Replica(1)
    async with pool_of(first, second) as pool:
        first.ok = False
        await eventually(lambda: not pool._replicas[0].up)
        assert [await served_by(pool, f"s{n}") for n in range(4)] == [1] * 4
        first.ok = True
        await eventually(lambda: pool._replicas[0].up)
        assert await served_by(pool, "new") == 0


async def test_single_failed_check_keeps_replica_up() -> None:
    first = Replica(0)
    async with pool_of(first, check_s=60) as pool:
        first.ok = False
        await pool._replicas[0].check()
        assert pool._replicas[0].up
        await pool._replicas[0].check()
        assert not pool._replicas[0].up


async def test_replica_down_at_start_is_skipped() -> None:
    absent, there = Replica(0), Replica(1)
    absent.ok = False
    async with pool_of(absent, there, check_s=60, backoff_s=60) as pool:
        assert [await served_by(pool, f"s{n}") for n in range(3)] == [1] * 3


async def test_health_checks_back_off() -> None:
    lost = Replica(0)
    lost.ok = False
    began = time.monotonic()
    async with pool_of(lost, backoff_s=0.01, backoff_max_s=60) as pool:
        await eventually(lambda: lost.checks >= 7)
        assert time.monotonic() - began >= 0.3  # 0.06 without backoff
        assert not pool._replicas[0].up


async def test_early_exit_aborts_call() -> None:
    slow = Replica(0, pace_s=60)
    async with pool_of(slow) as pool:
        async with pool.generate(make_request(session="s")) as chunks:
            await anext(chunks)
            assert (await pool.health())[0].in_flight == 1
        assert slow.aborted == 1 and (await pool.health())[0].in_flight == 0


async def test_cancel_before_first_chunk_aborts_call() -> None:
    hung = Replica(0, hang=True)
    async with pool_of(hung) as pool:
        task = asyncio.create_task(served_by(pool, "s"))
        await eventually(lambda: hung.in_flight)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert hung.aborted == 1 and pool._lanes[0].load.in_flight == 0


async def test_early_exit_with_pending_read_aborts_call() -> None:
    hung = Replica(0, hang=True)
    async with pool_of(hung) as pool:
        async with pool.generate(make_request(session="s")) as chunks:
            pending = asyncio.ensure_future(anext(chunks))
            await eventually(lambda: hung.in_flight)
        assert hung.aborted == 1 and pool._lanes[0].load.in_flight == 0
        pending.cancel()


async def test_engines_are_started_and_closed_once() -> None:
    replicas = Replica(0), Replica(1)
    async with pool_of(*replicas):
        pass
    assert [(replica.started, replica.closed) for replica in replicas] == [(1, 1), (1, 1)]


async def test_empty_pool_is_config_error() -> None:
    with pytest.raises(ConfigError):
        Pool([])


async def test_sessions_spread_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "DRAIN_S", scaled(0.25))
    monkeypatch.setattr(http, "KEEPALIVE_S", scaled(2))
    choice = {"index": 0, "text": "", "logprobs": None, "token_ids": [7, 7], "finish_reason": "stop"}
    documents = {"/health": {}, "/v1/models": {"data": [{"id": "m", "max_model_len": 50}]}}
    server = StandIn(answer_stream(event({"choices": [choice]}), DONE), documents)
    async with serving(server), pool_of(VLLM(server.url, "m", ranks=3), check_s=60, load_s=0) as pool:
        for _ in range(2):
            for n in range(6):
                await served_by(pool, f"s{n}")
        [health] = await pool.health()
        assert (health.ok, health.max_context) == (True, 50)
    ranks = {(headers["X-Session-ID"], headers["X-data-parallel-rank"]) for headers in server.headers}
    assert len(ranks) == 6  # each session on one rank
    assert Counter(rank for _, rank in ranks) == {"0": 2, "1": 2, "2": 2}
    assert len(server.connections) == 1


async def test_lost_replica_takes_down_its_ranks() -> None:
    documents = {"/health": {}, "/v1/models": {"data": [{"id": "m"}]}}
    server = StandIn(documents=documents)
    async with serving(server):
        ranked = VLLM(server.url, "m", ranks=4)
        other = Replica(1)
        async with pool_of(ranked, other, check_s=60, backoff_s=60) as pool:

            async def unavailable(request: Any) -> Any:
                return await answer_with({"error": {"message": "gone"}}, 503)(request)

            server.answer = unavailable
            assert [await served_by(pool, f"s{n}") for n in range(5)] == [1] * 5
    assert len(server.bodies) == 1


class ReportingReplica(Replica):
    """A replica that reports a load."""

    def __init__(self, number: int, report: EngineLoad, **turn: Any) -> None:
        super().__init__(number, **turn)
        self.report = report
        self.reads = 0

    async def load_report(self) -> list[EngineLoad]:
        self.reads += 1
        return [self.report]


async def test_sessions_move_from_crowded_replica_to_free_one() -> None:
    first, second = ReportingReplica(0, EngineLoad(0, 0)), ReportingReplica(1, EngineLoad(50, 0))
    async with pool_of(first, second, load_s=0.01) as pool:
        await eventually(lambda: first.reads and second.reads)
        assert [await served_by(pool, f"s{n}") for n in range(4)] == [0] * 4  # replica 1 has other gateways' calls
        first.report, second.report = EngineLoad(40, 40, 0.99), EngineLoad(3, 0, 0.1)
        seen = first.reads + 2
        await eventually(lambda: first.reads >= seen)
        assert [await served_by(pool, f"s{n}") for n in range(4)] == [0] * 4  # they have no calls there to move
        assert await served_by(pool, "new") == 1
        pool._lanes[0].load.moves_left = 2  # as after a report while two of our calls waited
        assert sorted([await served_by(pool, f"s{n}") for n in range(4)]) == [0, 0, 1, 1]


async def test_burst_between_two_readings_saturates_pool() -> None:
    first, second = ReportingReplica(0, EngineLoad(8, 4)), ReportingReplica(1, EngineLoad(8, 4))
    async with pool_of(first, second, load_s=3600) as pool:
        await eventually(lambda: pool.is_saturated)
        for replica in (first, second):
            replica.report = EngineLoad(6, 0)
        for watched in pool.replicas:
            await watched.read_load(watched.engine)  # type: ignore[arg-type]
        assert pool.room == 12 and not pool.is_saturated
        for n in range(12):  # new sessions and old ones, alternately
            assert not pool.is_saturated
            lane = pool.place(f"s{n // 2}")
            lane.replica.begin_call(lane)
        assert pool.is_saturated and pool.room == 0
        assert [replica.in_flight for replica in pool.replicas] == [6, 6]


async def test_replica_without_load_report_counts_own_calls() -> None:
    class Failing(ReportingReplica):
        async def load_report(self) -> list[EngineLoad]:
            self.reads += 1
            raise EngineError("no metrics today")

    replica = Failing(0, EngineLoad(0, 0))
    async with pool_of(replica, load_s=0.01) as pool:
        await eventually(lambda: replica.reads > 1)
        assert await served_by(pool, "s") == 0 and not pool.is_saturated


async def test_added_replica_serves_calls_and_removed_one_is_closed() -> None:
    first, second = Replica(0), Replica(1)
    async with pool_of(first) as pool:
        assert await served_by(pool, "old") == 0
        await pool.add(second)
        assert await served_by(pool, "new") == 1
        await pool.remove("replica 0")
        assert first.closed == 1 and await served_by(pool, "old") == 1
        await eventually(lambda: second.checks > 2)  # it is watched like the others
        checks = first.checks
        await asyncio.sleep(0.05)
        assert first.checks == checks
    assert second.closed == 1 and first.closed == 1


async def test_draining_replica_finishes_calls_and_its_sessions_move() -> None:
    slow, other = Replica(0, hang=True), Replica(1)
    async with pool_of(slow) as pool:
        running = asyncio.create_task(served_by(pool, "s"))
        await eventually(lambda: slow.in_flight)
        await pool.add(other)
        pool.set_draining("replica 0", True)
        assert await served_by(pool, "s") == 1  # a second call of the session
        assert [await served_by(pool, f"new{n}") for n in range(3)] == [1] * 3
        waiter = asyncio.create_task(pool.wait_until_idle("replica 0"))
        await asyncio.sleep(0.02)
        assert not waiter.done() and slow.in_flight == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await waiter
        pool.set_draining("replica 0", False)
        assert pool.place("fresh").engine is slow


async def test_call_waits_for_busy_engine_then_fails_after_limit() -> None:
    busy = Replica(0, busy=True)
    async with pool_of(busy, wait_s=scaled(60)) as pool:
        call = asyncio.create_task(served_by(pool, "s"))
        await eventually(lambda: pool.waiting == 1)
        assert pool.is_saturated and not call.done()
        busy.turn = {}
        assert await call == 0
        assert pool.waiting == 0 and not pool.is_saturated
        assert (await pool.health())[0].in_flight == 0
    busy.turn = {"busy": True}
    async with pool_of(busy, wait_s=0.3) as pool:
        with pytest.raises(EngineBusy, match=r"waited 0\.3 s"):
            await served_by(pool, "s")
        assert (await pool.health())[0].in_flight == 0


async def test_call_waits_while_every_replica_drains() -> None:
    only = Replica(0)
    async with pool_of(only, wait_s=scaled(60)) as pool:
        pool.set_draining("replica 0", True)
        assert pool.is_saturated
        call = asyncio.create_task(served_by(pool, "s"))
        await eventually(lambda: pool.waiting == 1)
        await pool.add(Replica(1))
        assert await call == 1


async def test_replica_with_wrong_weights_is_never_guessed() -> None:
    class Wrong(Replica):
        responds = True

        async def health(self) -> list[Health]:
            detail = "has version 1 instead of 2" if self.responds else "does not respond"
            return [Health(self.name, False, detail, wrong=self.responds)]

    wrong = Wrong(0)
    async with pool_of(wrong) as pool:
        for responds in (True, False):
            wrong.responds = responds
            await pool.check()
            with pytest.raises(EngineUnavailable, match="no engine has the current weights"):
                await served_by(pool, "s")
        assert not wrong.received


@pytest.mark.sample(2)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "answer",
    [answer_stream(cut=True), answer_with("Internal Server Error", 500), answer_with("Busy", 429)],
    ids=["cut", "error", "busy"],
)
async def test_failed_call_leaves_no_reference_cycle(answer: Any, stream: bool) -> None:
    """An error must not keep the request in memory until a garbage collection. After hundreds of failed calls, that would be a long one."""

    async def fail(pool: Pool) -> None:
        try:
            await served_by(pool, "s", stream=stream)
        except EngineError:
            return
        raise AssertionError("the call did not fail")

    server = StandIn(answer, {"/health": {}, "/v1/models": {"data": [{"id": "m"}]}})
    async with serving(server), pool_of(VLLM(server.url, "m"), wait_s=0.02) as pool:
        await fail(pool)
        with count_cycles() as found:
            await fail(pool)
            await asyncio.sleep(0.01)  # until the connection is closed
        assert not found
