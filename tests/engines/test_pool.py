"""Sessions stay where they are, move when they must, and nothing that was delivered is ever sampled again."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.speed import scaled
from turngate.engines import http
from turngate.engines.base import Engine, Health
from turngate.engines.pool import Pool
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

from .standins import DONE, StandIn, ask, collected, event, free_port, says, serving, streams

pytestmark = pytest.mark.asyncio


class Replica(Scripted):
    """A scripted engine whose health can be switched, and which says who it is by the id it samples."""

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
    pool = Pool(engines, **{"check_s": 0.02, "backoff_s": 0.01, **settings})
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


async def served_by(pool: Pool, session: str = "", **fields: Any) -> int:
    """Which replica answered."""
    async with pool.generate(ask(session=session, **fields)) as chunks:
        whole = await collected(chunks)
    assert len(whole.ids) == 2 and len(set(whole.ids)) == 1 and whole.finish == "stop"
    return whole.ids[0]


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(scaled(2)):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_session_stays_where_it_is() -> None:
    async with pool_of(Replica(0), Replica(1), Replica(2)) as pool:
        homes = {f"s{n}": await served_by(pool, f"s{n}") for n in range(30)}
        assert Counter(homes.values()) == {0: 10, 1: 10, 2: 10}
        for _ in range(3):
            assert {session: await served_by(pool, session) for session in reversed(homes)} == homes


async def test_new_sessions_go_where_the_least_is_under_way() -> None:
    slow, fast = Replica(0, hang=True), Replica(1)
    async with pool_of(slow, fast) as pool:
        busy = asyncio.create_task(served_by(pool, "long"))
        await eventually(lambda: slow.in_flight == 1)
        # more and more sessions live on the other one, but the first has a call in flight
        assert [await served_by(pool, f"s{n}") for n in range(5)] == [1] * 5
        assert slow.in_flight == 1 and len(slow.received) == 1
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)


async def test_released_sessions_leave_room() -> None:
    replicas = Replica(0), Replica(1)
    async with pool_of(*replicas) as pool:
        for n in range(10):
            await served_by(pool, f"s{n}")
        for n in range(0, 10, 2):
            pool.release(f"s{n}")
        pool.release("never seen")
        assert replicas[0].released == ["s0", "s2", "s4", "s6", "s8"]
        assert [await served_by(pool, f"t{n}") for n in range(5)] == [0] * 5


async def test_placements_do_not_grow_without_bound() -> None:
    async with pool_of(Replica(0), Replica(1), max_sessions=10) as pool:
        first = await served_by(pool, "keeps coming")
        for n in range(100):
            await served_by(pool, f"s{n}")
            assert await served_by(pool, "keeps coming") == first
        assert len(pool._placed) == 10
        assert sum(lane.sessions for lane in pool._lanes) == 10
        for _ in range(20):
            await served_by(pool)  # without a session nothing is remembered
        assert len(pool._placed) == 10


async def test_a_lost_replica_is_left_and_comes_back() -> None:
    lost, other = Replica(0), Replica(1)
    async with pool_of(lost, other) as pool:
        homes = {f"s{n}": await served_by(pool, f"s{n}") for n in range(6)}
        lost.turn = {"fail_before": True}
        lost.ok = False
        assert [await served_by(pool, session) for session in homes] == [1] * 6
        assert len(lost.received) == 3 + 1  # it was asked once more, found gone, and then left alone
        assert [health.ok for health in await pool.health()] == [False, True]
        lost.turn = {}
        lost.ok = True
        await eventually(lambda: all(replica.up for replica in pool._replicas))
        assert [await served_by(pool, session) for session in homes] == [1] * 6  # their prefixes are there now
        assert await served_by(pool, "new") == 0


async def test_a_real_server_that_goes_away() -> None:
    choice = {"index": 0, "text": "", "logprobs": None, "token_ids": [7, 7], "finish_reason": "stop"}
    documents = {"/health": {}, "/v1/models": {"data": [{"id": "m"}]}}
    alive = StandIn(streams(event({"choices": [choice]}), DONE), documents)
    async with serving(alive):
        gone = VLLM(f"http://127.0.0.1:{free_port()}", "m")
        there = VLLM(alive.url, "m")
        async with pool_of(gone, there) as pool:
            assert [health.ok for health in await pool.health()] == [False, True]
            for replica in pool._replicas:
                replica.up = True  # as if it had gone just now
            assert [await served_by(pool, f"s{n}") for n in range(4)] == [7] * 4
    assert len(alive.bodies) == 4


async def test_the_first_chunk_is_the_point_of_no_return() -> None:
    """Cut after one token: the caller has seen it, so the call is not made again, although another replica is there."""
    cut, other = Replica(0, cut_after=1), Replica(1)
    async with pool_of(cut, other) as pool:
        seen: list[int] = []
        with pytest.raises(EngineUnavailable):
            async with pool.generate(ask(session="s")) as chunks:
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
async def test_what_is_not_made_again(turn: dict[str, Any], expected: type[TurngateError]) -> None:
    bad, other = Replica(0, **turn), Replica(1)
    bad._silence_s = 0.01
    async with pool_of(bad, other) as pool:
        with pytest.raises(TurngateError) as raised:
            await served_by(pool, "s")
        assert type(raised.value) is expected
        assert not other.received
        assert all(health.ok for health in await pool.health())


async def test_busy_is_passed_over_once() -> None:
    replicas = [Replica(n, busy=True) for n in range(3)]
    async with pool_of(*replicas) as pool:
        with pytest.raises(EngineBusy):
            await served_by(pool, "s")
        assert sum(len(replica.received) for replica in replicas) == 2
        replicas[2].turn = replicas[1].turn = {}
        assert await served_by(pool, "t") in (1, 2)
        assert all(replica.up for replica in pool._replicas)


async def test_busy_with_nowhere_else_to_go() -> None:
    only = Replica(0, busy=True)
    async with pool_of(only) as pool:
        with pytest.raises(EngineBusy):
            await served_by(pool, "s")
        assert len(only.received) == 1


async def test_several_are_lost_at_once() -> None:
    replicas = [Replica(n, fail_before=n < 2) for n in range(4)]
    async with pool_of(*replicas, check_s=60, backoff_s=60) as pool:
        assert await served_by(pool, "s") == 2
        assert [replica.up for replica in pool._replicas] == [False, False, True, True]


async def test_attempts_are_bounded() -> None:
    """A request that kills whatever touches it must not take the whole pool along."""
    replicas = [Replica(n, fail_before=True) for n in range(6)]
    async with pool_of(*replicas, check_s=60, backoff_s=60) as pool:
        with pytest.raises(EngineUnavailable):
            await served_by(pool, "s")
        assert sum(len(replica.received) for replica in replicas) == 3


async def test_with_all_down_one_is_tried_all_the_same() -> None:
    only = Replica(0, fail_before=True)
    async with pool_of(only, check_s=60, backoff_s=60) as pool:
        for _ in range(2):
            with pytest.raises(EngineUnavailable):
                await served_by(pool, "s")
        only.turn = {}
        assert await served_by(pool, "s") == 0
        assert [health.ok for health in await pool.health()] == [True]


async def test_health_checks_take_replicas_out_and_bring_them_back() -> None:
    one, two = Replica(0), Replica(1)
    async with pool_of(one, two) as pool:
        one.ok = False
        await eventually(lambda: not pool._replicas[0].up)
        assert [await served_by(pool, f"s{n}") for n in range(4)] == [1] * 4
        one.ok = True
        await eventually(lambda: pool._replicas[0].up)
        assert await served_by(pool, "new") == 0


async def test_one_missed_check_proves_nothing() -> None:
    one = Replica(0)
    async with pool_of(one, check_s=60) as pool:
        one.ok = False
        await pool._replicas[0].check()
        assert pool._replicas[0].up
        await pool._replicas[0].check()
        assert not pool._replicas[0].up


async def test_a_replica_that_was_never_there_is_not_waited_for() -> None:
    absent, there = Replica(0), Replica(1)
    absent.ok = False
    async with pool_of(absent, there, check_s=60, backoff_s=60) as pool:
        assert [await served_by(pool, f"s{n}") for n in range(3)] == [1] * 3


async def test_checks_of_a_lost_replica_become_rarer() -> None:
    lost = Replica(0)
    lost.ok = False
    began = time.monotonic()
    async with pool_of(lost, backoff_s=0.01, backoff_max_s=60) as pool:
        await eventually(lambda: lost.checks >= 7)
        assert time.monotonic() - began >= 0.3  # 0.06 if they went on as they began
        assert not pool._replicas[0].up


async def test_leaving_early_aborts_and_is_counted() -> None:
    slow = Replica(0, pace_s=60)
    async with pool_of(slow) as pool:
        async with pool.generate(ask(session="s")) as chunks:
            await anext(chunks)
            assert (await pool.health())[0].in_flight == 1
        assert slow.aborted == 1 and (await pool.health())[0].in_flight == 0


async def test_cancelling_before_the_first_chunk_aborts() -> None:
    hung = Replica(0, hang=True)
    async with pool_of(hung) as pool:
        task = asyncio.create_task(served_by(pool, "s"))
        await eventually(lambda: hung.in_flight)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert hung.aborted == 1 and pool._lanes[0].in_flight == 0


async def test_leaving_while_another_task_waits_for_a_chunk() -> None:
    hung = Replica(0, hang=True)
    async with pool_of(hung) as pool:
        async with pool.generate(ask(session="s")) as chunks:
            pending = asyncio.ensure_future(anext(chunks))
            await eventually(lambda: hung.in_flight)
        assert hung.aborted == 1 and pool._lanes[0].in_flight == 0
        pending.cancel()


async def test_engines_are_started_and_closed_once() -> None:
    replicas = Replica(0), Replica(1)
    async with pool_of(*replicas):
        pass
    assert [(replica.started, replica.closed) for replica in replicas] == [(1, 1), (1, 1)]


async def test_an_empty_pool_is_a_mistake() -> None:
    with pytest.raises(ConfigError):
        Pool([])


async def test_ranks_are_lanes_of_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "DRAIN_S", scaled(0.25))
    monkeypatch.setattr(http, "KEEPALIVE_S", scaled(2))
    choice = {"index": 0, "text": "", "logprobs": None, "token_ids": [7, 7], "finish_reason": "stop"}
    documents = {"/health": {}, "/v1/models": {"data": [{"id": "m", "max_model_len": 50}]}}
    server = StandIn(streams(event({"choices": [choice]}), DONE), documents)
    async with serving(server), pool_of(VLLM(server.url, "m", ranks=3), check_s=60) as pool:
        for _ in range(2):
            for n in range(6):
                await served_by(pool, f"s{n}")
        [health] = await pool.health()
        assert (health.ok, health.max_context) == (True, 50)
    ranks = {(headers["X-Session-ID"], headers["X-data-parallel-rank"]) for headers in server.headers}
    assert len(ranks) == 6  # each session on one rank
    assert Counter(rank for _, rank in ranks) == {"0": 2, "1": 2, "2": 2}
    assert len(server.connections) == 1


async def test_a_lost_replica_takes_its_ranks_along() -> None:
    documents = {"/health": {}, "/v1/models": {"data": [{"id": "m"}]}}
    server = StandIn(documents=documents)
    async with serving(server):
        ranked = VLLM(server.url, "m", ranks=4)
        other = Replica(1)
        async with pool_of(ranked, other, check_s=60, backoff_s=60) as pool:

            async def unavailable(request: Any) -> Any:
                return await says({"error": {"message": "gone"}}, 503)(request)

            server.answer = unavailable
            assert [await served_by(pool, f"s{n}") for n in range(5)] == [1] * 5
    assert len(server.bodies) == 1
