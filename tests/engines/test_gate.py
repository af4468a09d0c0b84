"""The gate by itself: calls come in one event loop, and are taken and answered in the same, in another, or in several threads."""

from __future__ import annotations

import asyncio
import gc
import random
import re
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.speed import scaled
from turngate.engines.base import Chunk, Generate
from turngate.engines.gate import Gate, GateCall
from turngate.errors import BadRequest, Conflict, ContextOverflow, EngineTimeout, EngineUnavailable, Gone, NotFound
from turngate.types import ID_DTYPE, NEUTRAL

STOP = 9


def asked(prompt: Sequence[int] = (1, 2, 3), **other: Any) -> Generate:
    values: dict[str, Any] = {"max_tokens": 8, "stop_ids": (STOP,), "session": "s"} | other
    return Generate(prompt=np.array(prompt, ID_DTYPE), sampling=NEUTRAL, **values)


async def made(gate: Gate, request: Generate) -> list[Chunk]:
    """The agent's side of one call, to its end."""
    async with gate.generate(request) as chunks:
        return [chunk async for chunk in chunks]


async def taken(gate: Gate, **how: Any) -> GateCall:
    [call] = await asyncio.wait_for(gate.take(**how), scaled(5))
    return call


def empty(gate: Gate) -> bool:
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


async def test_a_call_is_answered_by_whoever_iterates(gate: Gate) -> None:
    agent = asyncio.create_task(made(gate, asked()))
    async for call in gate:
        assert call.prompt.tolist() == [1, 2, 3] and call.max_tokens == 8 and call.session == "s" and call.version == 3
        await call.answer([4, 5, STOP], [-1.0, -0.5, 0.0])
        break
    assert await agent == [Chunk([4, 5, STOP], [-1.0, -0.5, 0.0], "stop", versions=(3, 3))]
    assert empty(gate)


async def test_an_answer_in_pieces_is_read_piece_by_piece(gate: Gate) -> None:
    async with gate.generate(asked()) as chunks:
        first = asyncio.ensure_future(anext(chunks))
        call = await taken(gate)
        await call.send([4], [-1.0])
        assert (await first).ids == [4]
        await call.send([5, STOP], [-1.0, -2.0])
        await call.finish("stop")
        rest = [chunk async for chunk in chunks]
    assert [(chunk.ids, chunk.finish) for chunk in rest] == [([5, STOP], None), ([], "stop")]


async def test_unknown_log_probabilities_are_kept_as_unknown_and_crash_nobody(gate: Gate) -> None:
    agent = asyncio.create_task(made(gate, asked()))
    await (await taken(gate)).answer([4, STOP], [None, -1.0])
    assert (await agent)[0].logprobs == [None, -1.0]
    agent = asyncio.create_task(made(gate, asked()))
    await (await taken(gate)).answer([4, STOP], None)
    assert (await agent)[0].logprobs is None


@pytest.mark.parametrize(
    ("ids", "logprobs", "finish", "words"),
    [
        ([4, 10], [-1, -1], "stop", "ids[1] is 10, which is outside the vocabulary of 10 tokens"),
        ([4, -1], [-1, -1], "stop", "ids must be between 0"),
        ([4, 2**40], [-1, -1], "stop", "ids must be between 0"),
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
async def test_an_answer_that_cannot_be_is_refused_and_can_be_put_right(
    gate: Gate, ids: Any, logprobs: Any, finish: Any, words: str
) -> None:
    agent = asyncio.create_task(made(gate, asked()))
    call = await taken(gate)
    with pytest.raises(BadRequest, match=re.escape(words)):
        await call.answer(ids, logprobs, finish)
    assert not agent.done()
    await call.answer([4], [1e-6], "length")  # above 0 by a rounding
    assert (await agent)[0].ids == [4]


async def test_pieces_together_obey_max_tokens_and_end_at_a_stop_token(gate: Gate) -> None:
    agent = asyncio.create_task(made(gate, asked()))
    call = await taken(gate)
    await call.send([4] * 6, None)
    with pytest.raises(BadRequest, match=r"9 tokens, which exceeds max_tokens \(8\)"):
        await call.send([4] * 3, None)
    await call.send([STOP], None)
    with pytest.raises(BadRequest, match="ended with a stop token"):
        await call.send([4], None)
    await call.finish()
    assert sum(len(chunk.ids) for chunk in await agent) == 7


async def test_versions_span_from_the_taking_to_the_answer_unless_the_trainer_knows() -> None:
    gate, version = Gate(), [3]
    gate.attach(vocabulary=10, version=lambda: version[0])
    agents = [asyncio.create_task(made(gate, asked())) for _ in range(2)]
    first, second = await taken(gate), await taken(gate)
    version[0] = 5
    await first.answer([STOP], [-1])
    with pytest.raises(BadRequest, match="version must be between 0 and the gateway's current version 5, not 6"):
        await second.answer([STOP], [-1], version=6)
    await second.answer([STOP], [-1], version=4)
    assert [(await agent)[0].versions for agent in agents] == [(3, 5), (4, 4)]


# ── how a call ends, once ───────────────────────────────────────────────────────────────────────────────────────────


async def test_an_answered_call_cannot_be_answered_again(gate: Gate) -> None:
    agent = asyncio.create_task(made(gate, asked()))
    call = await taken(gate)
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


async def test_a_piece_whose_receipt_was_lost_may_be_sent_again(gate: Gate) -> None:
    agent = asyncio.create_task(made(gate, asked()))
    call = await taken(gate)
    for _ in range(2):
        gate.accept_piece(call.id, call.lease, 0, np.array([4], ID_DTYPE), None, None)
    with pytest.raises(Conflict, match="at must be 1, the number of tokens sent so far, not 0"):
        gate.accept_piece(call.id, call.lease, 0, np.array([5], ID_DTYPE), None, None)
    for _ in range(2):
        gate.accept_piece(call.id, call.lease, 1, np.array([STOP], ID_DTYPE), None, "stop")
    assert [chunk.ids for chunk in await agent] == [[4], [STOP]]


async def test_a_call_that_is_left_waits_for_nobody_and_says_why(gate: Gate) -> None:
    agent = asyncio.create_task(made(gate, asked()))
    call = await taken(gate)
    agent.cancel()
    await asyncio.gather(agent, return_exceptions=True)
    with pytest.raises(Gone, match="the agent disconnected, or its session ended"):
        await call.answer([STOP], [-1])
    assert call.gone and empty(gate)
    with pytest.raises(Gone):
        await call.fail("x")


async def test_a_call_that_was_never_taken_leaves_the_queue(gate: Gate) -> None:
    agent = asyncio.create_task(made(gate, asked()))
    while not gate.queue_status().waiting:
        await asyncio.sleep(0)
    agent.cancel()
    await asyncio.gather(agent, return_exceptions=True)
    assert empty(gate) and await gate.take(wait_s=0.01) == []


async def test_a_failed_call_fails_in_the_way_it_is_said(gate: Gate) -> None:
    for fault, error in (("unavailable", EngineUnavailable), ("overflow", ContextOverflow)):
        agent = asyncio.create_task(made(gate, asked()))
        await (await taken(gate)).fail("out of memory", fault)  # type: ignore[arg-type]
        with pytest.raises(error, match="out of memory"):
            await agent
    assert empty(gate)


async def test_a_call_that_nobody_answers_fails_in_time_and_may_be_repeated() -> None:
    silence_s = scaled(0.05)
    gate = Gate(silence_s=silence_s)
    with pytest.raises(EngineTimeout, match="no trainer took this call") as caught:
        await made(gate, asked())
    assert caught.value.retry_safe and empty(gate)
    agent = asyncio.create_task(made(gate, asked()))
    call = await taken(gate)
    with pytest.raises(EngineTimeout, match="took this call but sent nothing for"):
        await agent
    with pytest.raises(Gone, match=f"it timed out after {silence_s:g} s without an answer"):
        await call.answer([STOP], [-1])


async def test_closing_resolves_every_call_and_ends_every_iteration() -> None:
    gate = Gate()
    agents = [asyncio.create_task(made(gate, asked())) for _ in range(3)]
    call = await taken(gate)
    other: list[GateCall] = []

    async def consume() -> None:
        async for call in gate:
            other.append(call)

    consumer = asyncio.create_task(consume())
    while len(other) < 2:
        await asyncio.sleep(0)
    await gate.close()
    await asyncio.wait_for(consumer, scaled(5))
    for agent in agents:
        with pytest.raises(EngineUnavailable, match="the gateway is stopping"):
            await agent
    for late in (call, *other):
        with pytest.raises(Gone, match="the gateway was stopped"):
            await late.answer([STOP], [-1])
    with pytest.raises(EngineUnavailable):
        await made(gate, asked())
    assert empty(gate)


# ── leases ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_dead_takers_call_goes_to_the_next_one_and_the_dead_cannot_answer_it(gate: Gate) -> None:
    agent = asyncio.create_task(made(gate, asked()))
    dead = await taken(gate, lease_s=0.05)
    heir = await taken(gate)
    assert heir.id == dead.id
    with pytest.raises(Conflict, match="its lease expired"):
        await dead.answer([STOP], [-1])
    await heir.answer([4, STOP], [-1, -1])
    assert (await agent)[0].ids == [4, STOP]


async def test_a_lease_is_renewed_by_word_and_by_each_piece(gate: Gate) -> None:
    agent = asyncio.create_task(made(gate, asked()))
    call = await taken(gate, lease_s=scaled(0.1))
    for _ in range(6):
        await asyncio.sleep(scaled(0.02))
        gate.renew_lease(call.id, call.lease)
    for _ in range(6):
        await asyncio.sleep(scaled(0.02))
        await call.send([4], [-1])
    await call.finish("length")
    assert len(await agent) == 7


async def test_a_taker_that_dies_in_the_middle_of_an_answer_fails_the_call(gate: Gate) -> None:
    agent = asyncio.create_task(made(gate, asked()))
    call = await taken(gate, lease_s=scaled(0.05))
    await call.send([4], [-1])
    with pytest.raises(EngineUnavailable, match="stopped responding in the middle"):
        await agent
    with pytest.raises(Gone, match="in the middle of the answer"):
        await call.finish()


async def test_a_call_that_is_given_back_is_the_next_to_be_taken(gate: Gate) -> None:
    agents = [asyncio.create_task(made(gate, asked(request_id=name))) for name in "ab"]
    async with await taken(gate) as first:
        assert first.id == "a"
    with pytest.raises(Conflict):
        await first.answer([STOP], [-1])
    async with await taken(gate) as again:
        assert again.id == "a"
        await again.answer([STOP], [-1])
    with pytest.raises(ZeroDivisionError):
        async with await taken(gate) as second:
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


async def test_calls_are_taken_and_answered_in_other_threads_and_loops(gate: Gate) -> None:
    """Thousands of them, from several threads with several takers each: each is answered once, with its own answer."""
    seen: list[str] = []

    async def trainer() -> None:
        async def one() -> None:
            async for call in gate:
                seen.append(call.id)
                await call.answer([int(call.prompt[0]) % 9, STOP], [-1, -1])

        await asyncio.gather(*(one() for _ in range(4)))

    threads = [in_thread(trainer) for _ in range(3)]
    total = 1500
    replies = await asyncio.wait_for(
        asyncio.gather(*(made(gate, asked([n], request_id=f"{n}")) for n in range(total))), scaled(60)
    )
    assert [chunks[0].ids[0] for chunks in replies] == [n % 9 for n in range(total)]
    assert sorted(map(int, seen)) == list(range(total)) and empty(gate)
    await gate.close()
    for thread in threads:
        await asyncio.to_thread(thread.join, scaled(5))
        assert not thread.is_alive()


async def test_a_gate_is_consumed_before_the_gateway_runs() -> None:
    """Nothing is tied to a loop when the gate is made, nor when it is first waited on."""
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
    assert (await made(gate, asked()))[0].ids == [STOP]
    await gate.close()
    await asyncio.to_thread(thread.join, scaled(5))
    assert answered.is_set() and not thread.is_alive()


async def test_a_taker_whose_loop_never_runs_again_keeps_no_call_from_others(gate: Gate) -> None:
    """Its thread was ended in the middle of waiting, or its loop stands still: a wake-up for it is lost, a call is not."""
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
    agent = asyncio.create_task(made(gate, asked()))
    await (await taken(gate)).answer([STOP], [-1])
    assert (await agent)[0].ids == [STOP]

    def end() -> None:
        waits[0].cancel()
        stopped.run_until_complete(asyncio.gather(waits[0], return_exceptions=True))
        stopped.close()

    await asyncio.to_thread(end)
    waits[1]._log_destroy_pending = False  # as an ended thread leaves it
    waits.clear()
    gc.collect()


async def test_a_taker_that_is_cancelled_just_when_it_is_woken_loses_no_call(gate: Gate) -> None:
    for _ in range(200):
        takers = [asyncio.create_task(gate.take()) for _ in range(2)]
        await asyncio.sleep(0)
        agent = asyncio.create_task(made(gate, asked()))
        await asyncio.sleep(0)
        takers[0].cancel()
        done = await asyncio.wait_for(asyncio.gather(*takers, return_exceptions=True), scaled(5))
        [call] = [call for found in done if isinstance(found, list) for call in found]
        await call.answer([STOP], [-1])
        await agent


async def test_an_answer_and_a_hang_up_at_the_same_moment_end_the_call_once(gate: Gate) -> None:
    """The race between unregister and a waiting answer: one of the two wins, nothing hangs, nothing is left."""
    outcomes = {"answered": 0, "gone": 0}

    async def trainer() -> None:
        async def one() -> None:
            async for call in gate:
                try:
                    await call.answer([STOP], [-1])
                    outcomes["answered"] += 1
                except Gone:
                    outcomes["gone"] += 1

        await asyncio.gather(*(one() for _ in range(3)))

    thread = in_thread(trainer)
    draw = random.Random(1)
    ended = 0
    for _ in range(300):
        agents = [asyncio.create_task(made(gate, asked())) for _ in range(4)]
        await asyncio.sleep(draw.random() * 0.0005)
        for agent in agents[::2]:
            agent.cancel()
        done = await asyncio.wait_for(asyncio.gather(*agents, return_exceptions=True), scaled(10))
        ended += len(done)
        assert all(isinstance(reply, list | asyncio.CancelledError) for reply in done)
        assert all(isinstance(reply, list) for reply in done[1::2])  # who stayed was answered
    assert ended == 1200 and empty(gate)
    await gate.close()
    await asyncio.to_thread(thread.join, scaled(5))
    assert outcomes["answered"] >= 600
