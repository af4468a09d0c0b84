"""The engine interface: token ids in, token ids with log-probabilities out, streamed.

Implementations: `vllm`, `sglang`, `local`, `scripted`, `gate`; `pool` spreads sessions over several engines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import orjson

from turngate.errors import EngineError, EngineRejected
from turngate.types import (
    ID_DTYPE,
    Call,
    CallDelta,
    Constraint,
    Delta,
    Finish,
    Ids,
    PromptIds,
    ReasoningTokens,
    Sampling,
    SideArray,
    Usage,
    ids_to_json,
)

VersionRuns = tuple[tuple[int, int], ...]  # (policy version, number of tokens), in the order of sampling


class Generate(msgspec.Struct, frozen=True, kw_only=True):
    """One generation request."""

    prompt: Ids | PromptIds
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None
    reasoning: ReasoningTokens | None = None  # set if the constraint applies only after the reasoning
    top_logprobs: int = 0  # number of most likely tokens to report at each position
    stream: bool = True  # False if a single chunk is enough
    session: str = ""  # keeps a session on one replica; never a secret
    request_id: str = ""
    cache_salt: str = ""
    version: int = 0  # policy version when the call was made
    model: str = ""  # the engine's model name for that version; empty for its default model
    echo_prompt: bool = False  # ask the engine to return the prompt ids it received, as a check
    routed_experts: int | None = None  # index of the first token whose routed experts are needed, or None
    sampling_mask: bool = False  # return the ids that were left to sample from at each token, if the engine can

    def body(self, field: str, others: dict[str, Any]) -> bytes:
        """Encode a JSON request body: the prompt in field `field`, then `others`. For speed, ids are not converted to Python integers."""
        inside = self.prompt.items if isinstance(self.prompt, PromptIds) else ids_to_json(self.prompt)
        return b"".join((f'{{"{field}":['.encode(), inside, b"],", orjson.dumps(others)[1:]))


class Chunk(msgspec.Struct, frozen=True):
    """Tokens sampled since the previous chunk.

    `ids` includes the stop token, if one was sampled. `logprobs` has one entry per id, or is None if the engine returned no
    log-probabilities. `prompt` contains the prompt ids that the engine echoed, if requested. `versions` contains the policy versions of the
    first and the last token in `ids`, if the engine reports them. `alternatives` contains the most likely ids at each position with their
    log-probabilities, if requested. `cached` is the number of prompt tokens that were in the engine's cache, if the engine reports it.
    `version_runs` lists pairs (policy version, number of tokens) for the whole reply so far, if the engine reports versions.
    `counted` is the number of sampled tokens in the whole reply, if the engine reports it.
    `side` contains other data per token of the prompt or the reply, such as routed experts and sampling masks.
    """

    ids: Sequence[int]
    logprobs: Sequence[float | None] | None
    finish: Literal["stop", "length", "abort"] | None = None
    prompt: Sequence[int] | None = None
    versions: tuple[int, int] | None = None
    alternatives: Sequence[Mapping[int, float]] | None = None
    cached: int | None = None
    version_runs: VersionRuns | None = None
    counted: int | None = None
    side: tuple[SideArray, ...] = ()


def refuse_top_logprobs(name: str, request: Generate) -> None:
    """Reject `top_logprobs` for an engine that returns only the log-probability of the sampled token."""
    if request.top_logprobs:
        raise EngineRejected(
            f"{name} returns only the log-probability of the sampled token; set top_logprobs to 0", param="top_logprobs"
        )


def check_echo(chunk: Chunk, request: Generate) -> None:
    """Raise `EngineError` if the engine echoed a different prompt from the one in the request."""
    if chunk.prompt is not None and not np.array_equal(np.asarray(chunk.prompt, ID_DTYPE), request.prompt):
        raise EngineError("the engine echoed a different prompt from the one it was sent, so the turn was rejected")


class Health(msgspec.Struct, frozen=True):
    """The state of a replica at its last check."""

    url: str
    ok: bool
    detail: str = ""
    model: str = ""
    max_context: int | None = None
    in_flight: int = 0
    wrong: bool = False  # the replica responds, but must not be used


class Engine(Protocol):
    """The interface of an engine. Implementations raise only `EngineError`s and `ContextOverflow`.

    `generate` returns a context manager around a stream of chunks. Leaving the context early, for any reason, aborts the generation.
    Entering the context never waits: all waiting happens while the stream is read. The last chunk has `finish` set. If the stream ends
    without such a chunk, the implementation raises `EngineUnavailable`.
    """

    name: str

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def health(self) -> list[Health]: ...

    def generate(self, request: Generate) -> AbstractAsyncContextManager[AsyncIterator[Chunk]]: ...

    def release(self, session: str) -> None:
        """Forget which replica served a session. Called when the session has ended."""


class RelayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A call to relay to an endpoint (observe mode), with the model and sampling that the gateway sets.

    An endpoint that speaks the call's dialect receives the agent's body (`call.body`) with these overrides. Any other endpoint receives a
    translation of the call.
    """

    call: Call
    model: str = ""  # empty for the model that the agent requested
    sampling: Sampling | None = None  # the session's pinned sampling, if any
    max_tokens: int | None = None
    session: str = ""
    request_id: str = ""
    # Earlier turns in this endpoint's own format (`RelayChunk.verbatim`), by index of the raw message.
    verbatim: Mapping[int, bytes] = {}


class RelayChunk(msgspec.Struct, frozen=True):
    """Output of the endpoint since the previous chunk, with any token data it returned."""

    events: tuple[Delta | CallDelta, ...] = ()
    ids: Sequence[int] | None = None
    logprobs: Sequence[float | None] | None = None
    prompt: Sequence[int] | None = None
    finish: Finish | None = None
    usage: Usage | None = None
    stopped_by: str = ""  # the stop string that ended the answer, if any
    fault: str = ""  # why the turn is not the model's own output, for example because the provider filtered it
    lost: tuple[str, ...] = ()  # parts of the request that this endpoint does not support
    biases: tuple[str, ...] = ()  # settings sent to the endpoint that may bias its sampling
    verbatim: bytes = b""  # the whole turn in the endpoint's format, if it must be sent back unchanged


class Relay(Protocol):
    """The interface of a relay to an endpoint (observe mode). The endpoint renders prompts and parses replies itself."""

    name: str

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def health(self) -> list[Health]: ...

    def relay(self, request: RelayRequest) -> AbstractAsyncContextManager[AsyncIterator[RelayChunk]]: ...

    async def count(self, request: RelayRequest) -> int:
        """Count the tokens of the prompt. Raise `NotFound` if the endpoint cannot count tokens."""
