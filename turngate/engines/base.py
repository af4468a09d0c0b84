"""The engine seam: token ids in, token ids with log-probabilities out, streamed.

Implementations: `vllm`, `sglang`, `scripted`, `gate`; `pool` spreads sessions over several of them. Called by `turn.py` only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol

import msgspec
import orjson

from turngate.types import Call, CallDelta, Constraint, Delta, Finish, Ids, PromptIds, Sampling, Usage, ids_to_json


class Generate(msgspec.Struct, frozen=True, kw_only=True):
    """One generation request."""

    prompt: Ids | PromptIds
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None
    stream: bool = True  # False: one chunk with everything is enough
    session: str = ""  # for affinity; never a secret
    request_id: str = ""
    cache_salt: str = ""
    version: int = 0  # of the policy, when it was asked
    model: str = ""  # under which the engine knows that version; empty: the engine's own
    echo_prompt: bool = False  # ask the engine which prompt ids it saw, as a check

    def body(self, field: str, others: dict[str, Any]) -> bytes:
        """A JSON object that begins with the prompt. The ids never become Python numbers on the way, and are copied once."""
        inside = self.prompt.items if isinstance(self.prompt, PromptIds) else ids_to_json(self.prompt)
        return b"".join((f'{{"{field}":['.encode(), inside, b"],", orjson.dumps(others)[1:]))


class Chunk(msgspec.Struct, frozen=True):
    """What the engine sampled since the last chunk.

    `ids` include a sampled stop token. `logprobs` has one entry per id; None where the engine gave none. `prompt` is the prompt
    that the engine says it saw, when it was asked to echo it. `versions`: the policy's at the first and last of these tokens, where the
    engine knows better than the fence.
    """

    ids: Sequence[int]
    logprobs: Sequence[float | None] | None
    finish: Literal["stop", "length", "abort"] | None = None
    prompt: Sequence[int] | None = None
    versions: tuple[int, int] | None = None


class Health(msgspec.Struct, frozen=True):
    """One replica, as last seen."""

    url: str
    ok: bool
    detail: str = ""
    model: str = ""
    max_context: int | None = None
    in_flight: int = 0
    wrong: bool = False  # it answers, and must not be used all the same


class Engine(Protocol):
    """Implementations raise only `EngineError`s and `ContextOverflow`.

    `generate` is a context manager around a stream of chunks: leaving it early, by whatever way, aborts the generation.
    Entering it does nothing yet; all work and waiting happens in the stream.
    The last chunk has `finish` set; a stream that ends without one raises `EngineUnavailable` inside the implementation.
    """

    name: str

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def health(self) -> list[Health]: ...

    def generate(self, request: Generate) -> AbstractAsyncContextManager[AsyncIterator[Chunk]]: ...

    def release(self, session: str) -> None:
        """The session is over; forget its placement."""


class RelayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One call to relay (observe mode), with the gateway's model and sampling laid over it.

    To an endpoint of its own dialect it goes as it came (`call.body`); to another one, as what it means.
    """

    call: Call
    model: str = ""  # empty: as the agent asked
    sampling: Sampling | None = None  # the session's pinned sampling, if any
    max_tokens: int | None = None
    session: str = ""
    request_id: str = ""
    verbatim: Mapping[
        int, bytes
    ] = {}  # by index of the raw piece: turns as this endpoint wrote them (`RelayChunk.verbatim`)


class RelayChunk(msgspec.Struct, frozen=True):
    """What the endpoint answered since the last chunk, with whatever token data it gave along."""

    events: tuple[Delta | CallDelta, ...] = ()
    ids: Sequence[int] | None = None
    logprobs: Sequence[float | None] | None = None
    prompt: Sequence[int] | None = None
    finish: Finish | None = None
    usage: Usage | None = None
    stopped_by: str = ""  # the stop string that ended it, if one did
    fault: str = ""  # why the turn is not the model's own last word: a filter of the provider's ended it
    lost: tuple[str, ...] = ()  # what the agent asked for and this endpoint was not told
    biases: tuple[str, ...] = ()  # what the endpoint was told that may change how it samples
    verbatim: bytes = b""  # the whole turn in the endpoint's own words, where those must be given back as they are


class Relay(Protocol):
    """The observe-mode seam: an endpoint that renders and parses by itself."""

    name: str

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def health(self) -> list[Health]: ...

    def relay(self, request: RelayRequest) -> AbstractAsyncContextManager[AsyncIterator[RelayChunk]]: ...

    async def count(self, request: RelayRequest) -> int:
        """How many tokens the prompt has; `NotFound` where the endpoint cannot tell."""
