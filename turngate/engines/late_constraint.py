"""Apply a constraint only after the model's reasoning, on an engine that would apply it from the first token.

The reasoning is sampled first, without the constraint. The rest of the reply is a second generation, which continues after the
reasoning. If the model does not reason, the reply starts over with the constraint, because its first token was sampled without it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager

import msgspec
import numpy as np

from turngate.engines.base import Chunk, Generate, VersionRuns, check_echo
from turngate.types import ID_DTYPE, Ids, PromptIds, ReasoningTokens, SideArray, ids_to_json

Generation = AbstractAsyncContextManager[AsyncIterator[Chunk]]


@asynccontextmanager
async def generate_after_reasoning(
    generate: Callable[[Generate], Generation], request: Generate, tokens: ReasoningTokens
) -> AsyncIterator[AsyncIterator[Chunk]]:
    """Sample the reasoning without the constraint and the rest with it, and stream both as one reply.

    `generate` is the engine's own method, which constrains a reply from its first token.
    """
    async with aclosing(_generate(generate, request, tokens)) as chunks:
        yield chunks


async def _generate(
    generate: Callable[[Generate], Generation], request: Generate, tokens: ReasoningTokens
) -> AsyncGenerator[Chunk, None]:
    reasoning = msgspec.structs.replace(
        request,
        constraint=None,
        stream=True,  # to find out early whether the model reasons
        stop_ids=(*request.stop_ids, tokens.closing),
        request_id=f"{request.request_id}-reasoning",
    )
    sampled: list[int] = []
    runs: VersionRuns | None = None  # policy versions of the reasoning tokens
    async with generate(reasoning) as chunks:
        async for chunk in chunks:
            if not sampled and not tokens.is_open and list(chunk.ids[:1]) != [tokens.opening]:
                if chunk.ids or chunk.finish is not None:
                    break  # the model does not reason
                continue
            sampled += chunk.ids
            if chunk.finish == "stop" and sampled[-1:] == [tokens.closing]:
                runs = chunk.version_runs
                yield msgspec.structs.replace(chunk, finish=None)
                break
            yield chunk
            if chunk.finish is not None:
                return  # the reply was cut off, or the model ended its turn in the middle of its reasoning
    left = request.max_tokens - len(sampled)
    if left < 1:
        yield Chunk([], [], "length")
        return
    first_missing = request.routed_experts
    if sampled and first_missing is not None:  # start at the last reasoning token, which was not an input yet
        first_missing = len(request.prompt) + len(sampled) - 1
    rest = msgspec.structs.replace(
        request, prompt=_extend(request.prompt, sampled), max_tokens=left, routed_experts=first_missing
    )
    async with generate(rest) as chunks:
        async for chunk in chunks:
            check_echo(chunk, rest)
            rest_runs = chunk.version_runs
            if sampled and rest_runs is not None:
                rest_runs = None if runs is None else _join_runs(runs, rest_runs)
            cached = None if sampled else chunk.cached  # already reported with the reasoning
            side = tuple(SideArray(each.name, each.first + len(sampled), each.values) for each in chunk.side)
            yield msgspec.structs.replace(chunk, prompt=None, cached=cached, version_runs=rest_runs, side=side)


def _join_runs(runs: VersionRuns, more: VersionRuns) -> VersionRuns:
    """Join the version runs of two consecutive parts of a reply."""
    if runs and more and runs[-1][0] == more[0][0]:
        version, tokens = more[0]
        return (*runs[:-1], (version, runs[-1][1] + tokens), *more[1:])
    return (*runs, *more)


def _extend(prompt: Ids | PromptIds, sampled: Sequence[int]) -> Ids | PromptIds:
    added = np.array(sampled, ID_DTYPE)
    if isinstance(prompt, PromptIds):
        return PromptIds([prompt.items, ids_to_json(added)], len(prompt) + len(added))
    return np.concatenate([prompt, added])
