"""Tests for the gate: calls are taken and answered in the same event loop, another one, or several threads."""

from __future__ import annotations

import asyncio
import gc
import random
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.kit import count_cycles
from tests.speed import scaled
from turngate.engines.base import Chunk, Generate
from turngate.engines.gate import Gate, GateCall
from turngate.errors import BadRequest, Conflict, ContextOverflow, EngineTimeout, EngineUnavailable, Gone, NotFound
from turngate.types import ID_DTYPE, NEUTRAL

STOP = 9


def make_request(prompt: Sequence[int] = (1, 2, 3), **others: Any) -> Generate:
    values: dict[str, Any] = {"max_tokens": 8, "stop_ids": (STOP,), "session": "s"} | others
    return Generate(prompt=np.array(prompt, ID_DTYPE), sampling=NEUTRAL, **values)


async def run_call(gate: Gate, request: Generate) -> list[Chunk]:
    """Run the agent's side of one call to completion."""
    async with gate.generate(request) as chunks:
        return [chunk async for chunk in chunks]


async def take_one(gate: Gate, **how: Any) -> GateCall:
    [call] = await asyncio.wait_for(gate.take(**how), scaled(5))
    return call


def is_empty(gate: Gate) -> bool:
    seen = gate.queue_status()
    return not (seen.waiting or seen.taken)


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    gate = Gate()
    gate.attach(vocabulary=10, version=lambda: 3)
    await gate.start()
    yield gate
    await gate.close()


# ── one call ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_call_is_answered_through_iteration(gate: Gate) -> None:
    agent = asyncio.create_task(run_call(gate, make_request()))
    async for call in gate:
        assert call.prompt.tolist() == [1, 2, 3] and call.max_tokens == 8 and call.session == "s" and call.version == 3
        await call.answer([4, 5, STOP], [-1.0, -0.5, 0.0])
        break
    assert await agent == [Chunk([4, 5, STOP], [-1.0, -0.5, 0.0], "stop", versions=(3, 3))]
    assert is_empty(gate)


async def test_streamed_answer_arrives_in_pieces(gate: Gate) -> None:
    async with gate.generate(make_request()) as chunks:
        first = asyncio.ensure_future(anext(chunks))
        call = await take_one(gate)
        await call.send([4], [-1.0])
        assert (await first).ids == [4]
        await call.send([5, STOP], [-1.0, -2.0])
        await call.finish("stop")
        rest = [chunk async for chunk in chunks]
    assert [(chunk.ids, chunk.finish) for chunk in rest] == [([5, STOP], None), ([], "stop")]


async def test_missing_logprobs_stay_none(gate: Gate) -> None:
    agent = asyncio.create_task(run_call(gate, make_request()))
    await (await take_one(gate)).answer([4, STOP], [None, -1.0])
    assert (await agent)[0].logprobs == [None, -1.0]
    agent = asyncio.create_task(run_call(gate, make_request()))
    await (await take_one(gate)).answer([4, STOP], None)
    assert (await agent)[0].logprobs is None


@pytest.mark.parametrize(
    ("ids", "logprobs", "finish", "words"),
    [
        ([4, 10], [-1, -1], "stop", "ids[1] is 10, which is outside the vocabulary of 10 tokens"),
        ([4, -1], [-1, -1], "stop", "every id must be between 0"),
        ([4, 2**40], [-1, -1], "stop", "every id must be between 0"),
        ([4.5], [-1], "stop", "ids must be a flat list of integers"),
        ([[4]], [[-1]], "stop", "ids must be a flat list of integers"),
        ([True], [-1], "stop", "ids must be a flat list of integers"),
        (["4"], [-1], "stop", "ids must be a flat list of integers"),
        ([4, 5], [-1], "stop", "logprobs has length 1, but ids has length 2"),
        ([4], [0.5], "stop", "logprobs[0] is 0.5; a log-probability must be finite"),
        ([4], [-np.inf], "stop", "logprobs[0] is -inf; a log-probability must be finite"),
        ([4, 5], np.array([-1, np.nan]), "stop", "logprobs[1] is not a number"),
        ([4], ["x"], "stop", "logprobs must be"),
        ([4] * 9, [-1] * 9, "length", "the answer has 9 tokens, which exceeds max_tokens (8"),
        ([], [], "stop", "ids is empty; an answer needs at least one token"),
        ([STOP, 4], [-1, -1], "stop", "ids[0] is the stop token 9,"),
        ([4, STOP], [-1, -1], "length", "ids[1] is the stop token 9,"),
    ],
)
async def test_invalid_answer_is_rejected_and_can_be_retried(
    gate: Gate, ids: Any, logprobs: Any, finish: Any, words: str
) -> None:
    agent = asyncio.create_task(run_call(gate, make_request()))
    call = await take_one(gate)
    with pytest.raises(BadRequest, match=re.escape(words)):
        await call.answer(ids, logprobs, finish)
    assert not agent.done()
    await call.answer([4], [1e-6], "length")  # rounding error above 0 is accepted
    assert (await agent)[0].ids == [4]


async def test_pieces_respect_max_tokens_and_stop_token(gate: Gate) -> None:
    agent = asyncio.create_task(run_call(gate, make_request()))
    call = await take_one(gate)
    await call.send([4] * 6, None)
    with pytest.raises(BadRequest, match=r"9 tokens, which exceeds max_tokens \(8\)"):
        await call.send([4] * 3, None)
    await call.send([STOP], None)
    with pytest.raises(BadRequest, match="ended with a stop token"):
        await call.send([4], None)
    await call.finish()
    assert sum(len(chunk.ids) for chunk in await agent) == 7


async def test_versions_span_take_to_answer_unless_given() -> None:
    gate, version = Gate(), [3]
    gate.attach(vocabulary=10, version=lambda: version[0])
    agents = [asyncio.create_task(run_call(gate, make_request())) for _ in range(2)]
    first, second = await take_one(gate), await take_one(gate)
    version[0] = 5
    await first.answer([STOP], [-1])
    with pytest.raises(BadRequest, match="version must be between 0 and the gateway's current version 5, not 6"):
        await second.answer([STOP], [-1], version=6)
    await second.answer([STOP], [-1], version=4)
    assert [(await agent)[0].versions for agent in agents] == [(3, 5), (4, 4)]


# ── end of a call ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_second_answer_conflicts(gate: Gate) -> None:
    agent = asyncio.create_task(run_call(gate, make_request()))
    call = await take_one(gate)
    await call.answer([STOP], [-1])
    with pytest.raises(Conflict, match="already"):
        await call.answer([STOP], [-1])
    with pytest.raises(Conflict, match="has already ended: it was answered"):
        gate.accept_piece(call.id, call.lease, 0, np.array([4, STOP], ID_DTYPE), None, "stop")
    with pytest.raises(Conflict):
        gate.fail_call(call.id, call.lease, "x")
    with pytest.raises(NotFound):
        gate.fail_call("another", call.lease, "x")
    assert len(await agent) == 1


async def test_repeated_piece_is_idempotent(gate: Gate) -> None:
    agent = asyncio.create_task(run_call(gate, make_request()))
    call = await take_one(gate)
    for _ in range(2):
        gate.accept_piece(call.id, call.lease, 0, np.array([4], ID_DTYPE), None, None)
    with pytest.raises(Conflict, match="'at' must be 1, the number of tokens sent so far, not 0"):
        gate.accept_piece(call.id, call.lease, 0, np.array([5], ID_DTYPE), None, None)
    for _ in range(2):
        gate.accept_piece(call.id, call.lease, 1, np.array([STOP], ID_DTYPE), None, "stop")
    assert [chunk.ids for chunk in await agent] == [[4], [STOP]]


async def test_answering_after_disconnect_is_gone(gate: Gate) -> None:
    agent = asyncio.create_task(run_call(gate, make_request()))
    call = await take_one(gate)
    agent.cancel()
    await asyncio.gather(agent, return_exceptions=True)
    with pytest.raises(Gone, match="the agent disconnected, or its session ended"):
        await call.answer([STOP], [-1])
    assert call.gone and is_empty(gate)
    with pytest.raises(Gone):
        await call.fail("x")


async def test_cancelled_call_leaves_queue(gate: Gate) -> None:
    agent = asyncio.create_task(run_call(gate, make_request()))
    while not gate.queue_status().waiting:
        await asyncio.sleep(0)
    agent.cancel()
    await asyncio.gather(agent, return_exceptions=True)
    assert is_empty(gate) and await gate.take(wait_s=0.01) == []


async def test_fail_raises_matching_error(gate: Gate) -> None:
    for fault, error in (("unavailable", EngineUnavailable), ("overflow", ContextOverflow)):
        agent = asyncio.create_task(run_call(gate, make_request()))
        await (await take_one(gate)).fail("out of memory", fault)  # type: ignore[arg-type]
        with pytest.raises(error, match="out of memory"):
            await agent
    assert is_empty(gate)


async def test_failed_call_leaves_no_reference_cycle(gate: Gate) -> None:
    async def fail() -> None:
        agent = asyncio.create_task(run_call(gate, make_request()))
        call = await take_one(gate)
        await call.fail("out of memory")
        [error] = await asyncio.gather(agent, return_exceptions=True)
        assert isinstance(error, EngineUnavailable)

    with count_cycles() as found:
        await fail()
    assert not found


async def test_unanswered_call_times_out() -> None:
    silence_s = scaled(0.05)
    gate = Gate(silence_s=silence_s)
    with pytest.raises(EngineTimeout, match="no trainer answered this call") as caught:
        await run_call(gate, make_request())
    assert caught.value.retry_safe and is_empty(gate)
    agent = asyncio.create_task(run_call(gate, make_request()))
    call = await take_one(gate)
    with pytest.raises(EngineTimeout, match="took this call, but no tokens arrived for"):
        await agent
    with pytest.raises(Gone, match=f"it timed out after {silence_s:g} s without progress"):
        await call.answer([STOP], [-1])


async def test_close_fails_open_calls_and_ends_iteration() -> None:
    gate = Gate()
    agents = [asyncio.create_task(run_call(gate, make_request())) for _ in range(3)]
    call = await take_one(gate)
    others: list[GateCall] = []

    async def consume() -> None:
        async for call in gate:
            others.append(call)

    consumer = asyncio.create_task(consume())
    while len(others) < 2:
        await asyncio.sleep(0)
    await gate.close()
    await asyncio.wait_for(consumer, scaled(5))
    for agent in agents:
        with pytest.raises(EngineUnavailable, match="the gateway is stopping"):
            await agent
    for late in (call, *others):
        with pytest.raises(Gone, match="the gateway was stopped"):
            await late.answer([STOP], [-1])
    with pytest.raises(EngineUnavailable):
        await run_call(gate, make_request())
    assert is_empty(gate)


# ── leases ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_expired_lease_passes_call_to_next_taker(gate: Gate) -> None:
    agent = asyncio.create_task(run_call(gate, make_request()))
    dead = await take_one(gate, lease_s=0.05)
    successor = await take_one(gate)
    assert successor.id == dead.id
    with pytest.raises(Conflict, match="its lease expired"):
        await dead.answer([STOP], [-1])
    await successor.answer([4, STOP], [-1, -1])
    assert (await agent)[0].ids == [4, STOP]


async def test_lease_is_renewed_explicitly_and_by_each_piece(gate: Gate) -> None:
    agent = asyncio.create_task(run_call(gate, make_request()))
    call = await take_one(gate, lease_s=scaled(0.1))
    for _ in range(6):
        await asyncio.sleep(scaled(0.02))
        gate.renew_lease(call.id, call.lease)
    for _ in range(6):
        await asyncio.sleep(scaled(0.02))
        await call.send([4], [-1])
    await call.finish("length")
    assert len(await agent) == 7


async def test_lease_expiry_mid_answer_fails_call(gate: Gate) -> None:
    agent = asyncio.create_task(run_call(gate, make_request()))
    call = await take_one(gate, lease_s=scaled(0.05))
    await call.send([4], [-1])
    with pytest.raises(EngineUnavailable, match="stopped responding in the middle"):
        await agent
    with pytest.raises(Gone, match="in the middle of the answer"):
        await call.finish()


async def test_lease_and_silence_that_end_together_are_one_error() -> None:
    gate = Gate(silence_s=0.05)
    gate.attach(vocabulary=10, version=lambda: 3)
    await gate.start()
    agent = asyncio.create_task(run_call(gate, make_request()))
    call = await take_one(gate, lease_s=0.05)
    await call.send([4], [-1])
    time.sleep(0.2)  # both deadlines pass before the loop runs again
    with pytest.raises(EngineUnavailable, match="stopped responding in the middle"):
        await agent
    with pytest.raises(Gone, match="its lease expired in the middle of the answer"):
        await call.finish()
    await gate.close()


async def test_returned_call_is_taken_next(gate: Gate) -> None:
    agents = [asyncio.create_task(run_call(gate, make_request(request_id=name))) for name in "ab"]
    async with await take_one(gate) as first:
        assert first.id == "a"
    with pytest.raises(Conflict):
        await first.answer([STOP], [-1])
    async with await take_one(gate) as again:
        assert again.id == "a"
        await again.answer([STOP], [-1])
    with pytest.raises(ZeroDivisionError):
        async with await take_one(gate) as second:
            await second.send([4], [-1])
            1 / 0  # noqa: B018
    assert (await agents[0])[0].ids == [STOP]
    with pytest.raises(EngineUnavailable, match="stopped in the middle"):
        await agents[1]


# ── threads ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=lambda: asyncio.run(work()), daemon=True)
    thread.start()
    return thread


async def test_calls_answered_from_several_threads(gate: Gate) -> None:
    """Each of 1500 calls is answered once, with its own answer, by several takers in several threads."""
    seen: list[str] = []

    async def trainer() -> None:
        async def consume() -> None:
            async for call in gate:
                seen.append(call.id)
                await call.answer([int(call.prompt[0]) % 9, STOP], [-1, -1])

        await asyncio.gather(*(consume() for _ in range(4)))

    threads = [in_thread(trainer) for _ in range(3)]
    total = 1500
    replies = await asyncio.wait_for(
        asyncio.gather(*(run_call(gate, make_request([n], request_id=f"{n}")) for n in range(total))), scaled(60)
    )
    assert [chunks[0].ids[0] for chunks in replies] == [n % 9 for n in range(total)]
    assert sorted(map(int, seen)) == list(range(total)) and is_empty(gate)
    await gate.close()
    for thread in threads:
        await asyncio.to_thread(thread.join, scaled(5))
        assert not thread.is_alive()


async def test_gate_can_be_consumed_before_start() -> None:
    """Neither creating the gate nor waiting on it binds it to an event loop."""
    gate = Gate()
    answered = threading.Event()

    async def trainer() -> None:
        async for call in gate:
            await call.answer([STOP], [-1])
            answered.set()

    thread = in_thread(trainer)
    while not gate.queue_status().takers:
        await asyncio.sleep(0.001)
    await gate.start()
    assert (await run_call(gate, make_request()))[0].ids == [STOP]
    await gate.close()
    await asyncio.to_thread(thread.join, scaled(5))
    assert answered.is_set() and not thread.is_alive()


async def test_taker_with_dead_loop_does_not_block_calls(gate: Gate) -> None:
    """If a taker's loop was stopped or closed while waiting, its wake-up is lost but the call is not."""
    stopped, closed = asyncio.new_event_loop(), asyncio.new_event_loop()
    waits = []
    for loop in (stopped, closed):

        def wait(loop: asyncio.AbstractEventLoop = loop) -> None:
            async def begin() -> None:
                waits.append(asyncio.ensure_future(gate.take()))
                await asyncio.sleep(0)

            loop.run_until_complete(begin())

        await asyncio.to_thread(wait)
    closed.close()
    assert gate.queue_status().takers == 2
    agent = asyncio.create_task(run_call(gate, make_request()))
    await (await take_one(gate)).answer([STOP], [-1])
    assert (await agent)[0].ids == [STOP]

    def end() -> None:
        waits[0].cancel()
        stopped.run_until_complete(asyncio.gather(waits[0], return_exceptions=True))
        stopped.close()

    await asyncio.to_thread(end)
    waits[1]._log_destroy_pending = False  # silence the warning about the pending task
    waits.clear()
    gc.collect()


async def test_taker_cancelled_on_wakeup_loses_no_call(gate: Gate) -> None:
    for _ in range(200):
        takers = [asyncio.create_task(gate.take()) for _ in range(2)]
        await asyncio.sleep(0)
        agent = asyncio.create_task(run_call(gate, make_request()))
        await asyncio.sleep(0)
        takers[0].cancel()
        done = await asyncio.wait_for(asyncio.gather(*takers, return_exceptions=True), scaled(5))
        [call] = [call for found in done if isinstance(found, list) for call in found]
        await call.answer([STOP], [-1])
        await agent


async def test_answer_racing_disconnect_ends_call_once(gate: Gate) -> None:
    """Either the answer or the disconnect wins; nothing hangs and nothing is left over."""
    outcomes = {"answered": 0, "gone": 0}

    async def trainer() -> None:
        async def consume() -> None:
            async for call in gate:
                try:
                    await call.answer([STOP], [-1])
                    outcomes["answered"] += 1
                except Gone:
                    outcomes["gone"] += 1

        await asyncio.gather(*(consume() for _ in range(3)))

    thread = in_thread(trainer)
    rng = random.Random(1)
    ended = 0
    for _ in range(300):
        agents = [asyncio.create_task(run_call(gate, make_request())) for _ in range(4)]
        await asyncio.sleep(rng.random() * 0.0005)
        for agent in agents[::2]:
            agent.cancel()
        done = await asyncio.wait_for(asyncio.gather(*agents, return_exceptions=True), scaled(10))
        ended += len(done)
        assert all(isinstance(reply, list | asyncio.CancelledError) for reply in done)
        assert all(isinstance(reply, list) for reply in done[1::2])  # agents that stayed were answered
    assert ended == 1200 and is_empty(gate)
    await gate.close()
    await asyncio.to_thread(thread.join, scaled(5))
    assert outcomes["answered"] >= 600
