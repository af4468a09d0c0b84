"""Tests for the scripted engine."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from tests.engines.standins import collect, make_request
from tests.speed import scaled
from turngate.engines.base import Engine, Generate
from turngate.engines.scripted import Scripted, ScriptedTurn, derive_logprobs
from turngate.errors import ContextOverflow, EngineBusy, EngineError, EngineTimeout, EngineUnavailable, TurngateError
from turngate.types import Sampling

pytestmark = pytest.mark.asyncio


async def play(engine: Engine, **fields: Any) -> list[list[int]]:
    async with engine.generate(make_request(**fields)) as chunks:
        return [list(chunk.ids) async for chunk in chunks]


async def test_scripted_ids_chunks_and_finish() -> None:
    engine = Scripted(
        [
            ScriptedTurn([5, 6, 7, 8, 9], chunk=2),
            ScriptedTurn([1], finish="abort"),
            ScriptedTurn([3, 4], chunk=0),
            ScriptedTurn([]),
        ]
    )
    async with engine.generate(make_request()) as chunks:
        seen = [chunk async for chunk in chunks]
    assert [list(chunk.ids) for chunk in seen] == [[5, 6], [7, 8], [9]]
    assert [chunk.finish for chunk in seen] == [None, None, "stop"]
    async with engine.generate(make_request()) as chunks:
        assert (await collect(chunks)).finish == "abort"
    assert await play(engine) == [[3, 4]]
    assert await play(engine) == [[]]


async def test_derived_logprobs_depend_on_full_prefix() -> None:
    prompt = np.array([1, 2, 3], np.int32)
    values = derive_logprobs(prompt, [5, 6, 7])
    assert values == derive_logprobs(prompt, [5, 6, 7])
    assert values[:2] == derive_logprobs(prompt, [5, 6])
    assert all(-5 < value < 0 for value in derive_logprobs(prompt, range(10_000)))
    assert np.array(values, np.float32).tolist() == values  # exact in float32
    assert values[2] != derive_logprobs(prompt, [5, 8, 7])[2]
    assert values[0] != derive_logprobs(np.array([1, 2, 4], np.int32), [5])[0]
    async with Scripted([ScriptedTurn([5, 6, 7])]).generate(make_request(prompt)) as chunks:
        assert (await collect(chunks)).logprobs == values


async def test_given_logprobs_are_used() -> None:
    async with Scripted([ScriptedTurn([5, 6], [-1.0, None])]).generate(make_request()) as chunks:
        assert (await collect(chunks)).logprobs == [-1.0, None]


async def test_max_tokens_and_max_context() -> None:
    engine = Scripted([ScriptedTurn([5, 6, 7])] * 3, max_context=5)
    async with engine.generate(make_request(max_tokens=2)) as chunks:
        whole = await collect(chunks)
    assert (whole.ids, whole.finish) == ([5, 6], "length")
    async with engine.generate(make_request([1, 2, 3, 4])) as chunks:
        assert ((await collect(chunks)).ids) == [5]
    with pytest.raises(ContextOverflow):
        await play(engine, prompt=[1, 2, 3, 4, 5])
    [health] = await engine.health()
    assert health.ok and health.max_context == 5


async def test_sessions_play_their_own_script() -> None:
    engine = Scripted([ScriptedTurn([1]), ScriptedTurn([2])])
    assert await play(engine, session="a") == [[1]]
    assert await play(engine, session="b") == [[1]]
    assert await play(engine, session="a") == [[2]]
    with pytest.raises(EngineError, match="its script ends after call 2"):
        await play(engine, session="a")
    engine.release("a")
    assert await play(engine, session="a") == [[1]]


async def test_script_function_receives_request() -> None:
    def script(request: Generate, index: int) -> ScriptedTurn:
        return ScriptedTurn([*request.prompt.tolist(), index])

    engine = Scripted(script)
    assert await play(engine, prompt=[9], stream=False) == [[9, 0]]
    assert await play(engine, prompt=[8], stream=False) == [[8, 1]]


async def test_received_requests_are_bounded() -> None:
    engine = Scripted(lambda request, index: ScriptedTurn([1]), keep=2)
    for token in (1, 2, 3):
        await play(engine, prompt=[token])
    assert [request.prompt.tolist() for request in engine.received] == [[2], [3]]


@pytest.mark.parametrize(
    ("turn", "expected", "delivered"),
    [
        (ScriptedTurn([5, 6], fail_before=True), EngineUnavailable, []),
        (ScriptedTurn([5, 6], busy=True), EngineBusy, []),
        (ScriptedTurn([5, 6], overflow=True), ContextOverflow, []),
        (ScriptedTurn([5, 6, 7], cut_after=2), EngineUnavailable, [5, 6]),
        (ScriptedTurn([5, 6, 7], cut_after=2, chunk=0), EngineUnavailable, [5, 6]),
        (ScriptedTurn([5, 6, 7], cut_after=3), EngineUnavailable, [5, 6, 7]),
        (ScriptedTurn([5, 6, 7], cut_after=0), EngineUnavailable, []),
        (ScriptedTurn([5, 6], short_logprobs=True), EngineError, []),
        (ScriptedTurn([5, 6], logprobs=[-1.0]), EngineError, []),
        (ScriptedTurn([5, 6], hang=True), EngineTimeout, []),
        (ScriptedTurn([5, 6], silent_for=60), EngineTimeout, [5]),
        (ScriptedTurn([5, 6], delay_s=60), EngineTimeout, []),
    ],
)
async def test_scripted_faults_raise(turn: ScriptedTurn, expected: type[TurngateError], delivered: list[int]) -> None:
    engine = Scripted([turn], silence_s=0.02)
    seen: list[int] = []
    with pytest.raises(TurngateError) as raised:
        async with engine.generate(make_request()) as chunks:
            async for chunk in chunks:
                assert chunk.finish is None
                seen += chunk.ids
    assert type(raised.value) is expected and seen == delivered
    assert engine.aborted == 0 and engine.in_flight == 0


async def test_null_logprobs() -> None:
    async with Scripted([ScriptedTurn([5, 6], null_logprobs=True)]).generate(make_request()) as chunks:
        assert (await collect(chunks)).logprobs == [None, None]


async def test_aborts_are_counted() -> None:
    engine = Scripted(lambda request, index: ScriptedTurn([5, 6, 7]))
    async with engine.generate(make_request()) as chunks:
        await anext(chunks)
        assert engine.in_flight == 1
    assert (engine.aborted, engine.in_flight) == (1, 0)
    async with engine.generate(make_request(max_tokens=1)) as chunks:
        await anext(chunks)  # the final chunk, so not an early exit
    assert engine.aborted == 1
    hung = Scripted([ScriptedTurn(hang=True)])
    task = asyncio.create_task(play(hung))
    while not hung.in_flight:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert hung.aborted == 1


async def test_delay_and_pace() -> None:
    started = time.perf_counter()
    async with asyncio.timeout(scaled(5)):
        await play(Scripted([ScriptedTurn([1, 2, 3], delay_s=0.03, pace_s=0.02, silent_for=0.02)]))
    assert time.perf_counter() - started >= 0.09


async def test_prompt_is_echoed_on_request() -> None:
    engine = Scripted([ScriptedTurn([1, 2]), ScriptedTurn([1, 2])])
    async with engine.generate(make_request([4, 5], echo_prompt=True)) as chunks:
        assert [chunk.prompt async for chunk in chunks] == [[4, 5], None]
    async with engine.generate(make_request([4, 5])) as chunks:
        assert (await collect(chunks)).prompt is None


async def test_random_is_reproducible_and_varied() -> None:
    async def run(seed: int) -> list[list[int]]:
        engine = Scripted.random(100, [7, 8], seed, (1, 20))
        return [(await play(engine, prompt=[n % 3], stream=False, session=f"{n}"))[0] for n in range(12)]

    first = await run(1)
    assert first == await run(1) and first != await run(2)
    assert first[0] != first[3]  # repeated prompts give new samples
    for ids in first:
        assert 1 <= len(ids) <= 20
        assert ids[-1] in (7, 8) and not set(ids[:-1]) & {7, 8} and max(ids) < 100


async def test_random_is_independent_of_call_order() -> None:
    engine = Scripted.random(1000, [0], 3, (5, 9), pace_s=0.001)
    runs = await asyncio.gather(*(play(engine, prompt=[n], sampling=Sampling(seed=n)) for n in range(50)))
    again = Scripted.random(1000, [0], 3, (5, 9))
    for n, run in reversed(list(enumerate(runs))):
        assert run == await play(again, prompt=[n], sampling=Sampling(seed=n))
    assert engine.in_flight == 0 and engine.aborted == 0
