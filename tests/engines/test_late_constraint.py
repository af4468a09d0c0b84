"""Test constraints that begin after the reasoning: the generations that they need, and the reply that these form."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest

from tests.engines.standins import make_request
from turngate.engines.base import Chunk, Generate, VersionRuns
from turngate.engines.late_constraint import generate_after_reasoning
from turngate.engines.scripted import Scripted, ScriptedTurn
from turngate.errors import EngineError, EngineUnavailable
from turngate.types import Constraint, PromptIds, ReasoningTokens, ids_to_json

pytestmark = pytest.mark.asyncio

OPEN, CLOSE, STOP = 50, 51, 2
FORCED = Constraint("tool", {"type": "object"}, "f", after_reasoning=True)
REQUEST = make_request([1, 3], max_tokens=10, constraint=FORCED, stop_ids=(STOP,), request_id="r", stream=False)


async def run(
    script: Sequence[ScriptedTurn], *, is_open: bool = False, request: Generate = REQUEST
) -> tuple[list[Chunk], Scripted]:
    engine = Scripted(script)
    tokens = ReasoningTokens(OPEN, CLOSE, is_open)
    async with generate_after_reasoning(engine.generate, request, tokens) as chunks:
        return [chunk async for chunk in chunks], engine


def ids_of(chunks: Sequence[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.ids]


@pytest.mark.parametrize(("is_open", "thought"), [(False, [OPEN, 7, 8, CLOSE]), (True, [7, 8, CLOSE]), (True, [CLOSE])])
async def test_constraint_applies_only_after_the_reasoning(is_open: bool, thought: list[int]) -> None:
    chunks, engine = await run([ScriptedTurn(thought), ScriptedTurn([9, STOP])], is_open=is_open)
    assert ids_of(chunks) == [*thought, 9, STOP]
    assert [c.finish for c in chunks][-1] == "stop" and all(c.finish is None for c in chunks[:-1])
    assert all(c.logprobs is not None and len(c.logprobs) == len(c.ids) for c in chunks)
    first, second = engine.received
    assert first.constraint is None and first.stop_ids == (STOP, CLOSE) and first.prompt.tolist() == [1, 3]
    assert second.constraint is FORCED and second.stop_ids == (STOP,)
    assert second.prompt.tolist() == [1, 3, *thought] and second.max_tokens == 10 - len(thought)
    assert first.request_id != second.request_id


async def test_reply_without_reasoning_starts_over() -> None:
    chunks, engine = await run([ScriptedTurn([9, 9, STOP]), ScriptedTurn([6, STOP])])
    assert ids_of(chunks) == [6, STOP]
    first, second = engine.received
    assert first.constraint is None and second.constraint is FORCED
    assert second.prompt.tolist() == [1, 3] and second.max_tokens == 10
    assert engine.aborted == 1  # the generation without the constraint


@pytest.mark.parametrize(
    ("turn", "finish"),
    [
        (ScriptedTurn([OPEN, 7, STOP]), "stop"),  # the model ends its turn
        (ScriptedTurn([OPEN, *[7] * 20]), "length"),
        (ScriptedTurn([OPEN, 7], finish="abort"), "abort"),
    ],
)
async def test_reply_may_end_in_its_reasoning(turn: ScriptedTurn, finish: str) -> None:
    chunks, engine = await run([turn])
    assert chunks[-1].finish == finish and len(engine.received) == 1


@pytest.mark.parametrize(
    ("reasoning", "rest", "whole"),
    [
        (((4, 3),), ((4, 2),), ((4, 5),)),  # the same weights
        (((4, 3),), ((5, 2),), ((4, 3), (5, 2))),
        (((3, 1), (4, 2)), ((4, 1), (5, 1)), ((3, 1), (4, 3), (5, 1))),
        (None, ((4, 2),), None),
    ],
)
async def test_policy_versions_of_both_parts_are_joined(
    reasoning: VersionRuns | None, rest: VersionRuns, whole: VersionRuns | None
) -> None:
    parts = iter(
        [
            Chunk([OPEN, 7, CLOSE], [-1.0] * 3, "stop", version_runs=reasoning),
            Chunk([9, STOP], [-1.0] * 2, "stop", version_runs=rest),
        ]
    )

    @asynccontextmanager
    async def generate(request: Generate) -> AsyncIterator[AsyncIterator[Chunk]]:
        async def chunks() -> AsyncIterator[Chunk]:
            yield next(parts)

        yield chunks()

    async with generate_after_reasoning(generate, REQUEST, ReasoningTokens(OPEN, CLOSE, False)) as chunks:
        assert [chunk.version_runs async for chunk in chunks] == [reasoning, whole]


async def test_no_room_after_the_reasoning() -> None:
    chunks, engine = await run([ScriptedTurn([OPEN, *[7] * 8, CLOSE])])
    assert len(ids_of(chunks)) == 10 and chunks[-1].finish == "length" and len(engine.received) == 1


async def test_failure_of_the_second_generation_is_raised() -> None:
    with pytest.raises(EngineUnavailable):
        await run([ScriptedTurn([OPEN, CLOSE]), ScriptedTurn([9, STOP], fail_before=True)])


async def test_leaving_early_aborts_the_generation() -> None:
    engine = Scripted([ScriptedTurn([OPEN, 7, 7, CLOSE])])
    async with generate_after_reasoning(engine.generate, REQUEST, ReasoningTokens(OPEN, CLOSE, False)) as chunks:
        await anext(chunks)
        assert engine.in_flight == 1
    assert engine.in_flight == 0 and engine.aborted == 1


async def test_encoded_prompt_is_extended_and_its_echo_checked() -> None:
    prompt = PromptIds([ids_to_json(np.array([1, 3], np.int32))], 2)
    request = Generate(prompt=prompt, max_tokens=9, sampling=REQUEST.sampling, constraint=FORCED, echo_prompt=True)
    chunks, engine = await run([ScriptedTurn([OPEN, CLOSE]), ScriptedTurn([9, STOP])], request=request)
    assert engine.received[1].prompt.tolist() == [1, 3, OPEN, CLOSE]
    assert isinstance(engine.received[1].prompt, PromptIds)
    assert [chunk.prompt for chunk in chunks if chunk.prompt is not None] == [[1, 3]]


async def test_wrong_echo_of_the_second_prompt_is_an_error() -> None:
    engine = Scripted([ScriptedTurn([OPEN, CLOSE]), ScriptedTurn([9, STOP])])

    @asynccontextmanager
    async def generate(request: Generate) -> AsyncIterator[AsyncIterator[Chunk]]:
        async with engine.generate(request) as chunks:
            if request.constraint is None:
                yield chunks
            else:
                yield (msgspec.structs.replace(chunk, prompt=[1, 3, OPEN]) async for chunk in chunks)

    with pytest.raises(EngineError, match="echoed a different prompt"):
        async with generate_after_reasoning(generate, REQUEST, ReasoningTokens(OPEN, CLOSE, False)) as chunks:
            _ = [chunk async for chunk in chunks]
