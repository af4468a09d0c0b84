"""The engine seam: token ids in, token ids with log-probabilities out, streamed.

Implementations: `vllm`, `sglang`, `local`, `scripted`, `gate`; `pool` spreads sessions over several of them.
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
    stream: bool = True  # False: a single chunk is enough
    session: str = ""  # for affinity; never a secret
    request_id: str = ""
    cache_salt: str = ""
    version: int = 0  # of the policy when the call was made
    model: str = ""  # the engine's name for that version; empty: its default
    echo_prompt: bool = False  # ask the engine which prompt ids it saw, as a check

    def body(self, field: str, others: dict[str, Any]) -> bytes:
        """Encode a JSON object that starts with the prompt. The ids never become Python integers, and are copied once."""
        inside = self.prompt.items if isinstance(self.prompt, PromptIds) else ids_to_json(self.prompt)
        return b"".join((f'{{"{field}":['.encode(), inside, b"],", orjson.dumps(others)[1:]))


class Chunk(msgspec.Struct, frozen=True):
    """Tokens sampled since the last chunk.

    `ids` include a sampled stop token. `logprobs` has one entry per id; None if the engine gave none. `prompt`: the prompt ids that the
    engine echoed, if requested. `versions`: of the policy at the first and last of these tokens, if the engine knows them.
    """

    ids: Sequence[int]
    logprobs: Sequence[float | None] | None
    finish: Literal["stop", "length", "abort"] | None = None
    prompt: Sequence[int] | None = None
    versions: tuple[int, int] | None = None


class Health(msgspec.Struct, frozen=True):
    """The state of a replica at its last check."""

    url: str
    ok: bool
    detail: str = ""
    model: str = ""
    max_context: int | None = None
    in_flight: int = 0
    wrong: bool = False  # it answers, but must not be used


class Engine(Protocol):
    """Implementations raise only `EngineError`s and `ContextOverflow`.

    `generate` is a context manager around a stream of chunks: leaving it early, in any way, aborts the generation.
    Entering it does no work; all work and waiting happens in the stream.
    The last chunk has `finish` set; a stream that ends without one raises `EngineUnavailable` inside the implementation.
    """

    name: str

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def health(self) -> list[Health]: ...

    def generate(self, request: Generate) -> AbstractAsyncContextManager[AsyncIterator[Chunk]]: ...

    def release(self, session: str) -> None:
        """Forget the placement of a session that has ended."""


class RelayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A call to relay (observe mode), with the gateway's model and sampling.

    An endpoint of the same dialect gets the original body (`call.body`); another one gets a translation.
    """

    call: Call
    model: str = ""  # empty: the model that the agent requested
    sampling: Sampling | None = None  # the session's pinned sampling, if any
    max_tokens: int | None = None
    session: str = ""
    request_id: str = ""
    verbatim: Mapping[
        int, bytes
    ] = {}  # by index of the raw message: turns as this endpoint wrote them (`RelayChunk.verbatim`)


class RelayChunk(msgspec.Struct, frozen=True):
    """Output of the endpoint since the last chunk, with the token data it gave."""

    events: tuple[Delta | CallDelta, ...] = ()
    ids: Sequence[int] | None = None
    logprobs: Sequence[float | None] | None = None
    prompt: Sequence[int] | None = None
    finish: Finish | None = None
    usage: Usage | None = None
    stopped_by: str = ""  # the stop string that ended the answer, if any
    fault: str = ""  # why the turn is not the model's own output: for example, the provider filtered it
    lost: tuple[str, ...] = ()  # what the agent requested and this endpoint does not support
    biases: tuple[str, ...] = ()  # settings sent to the endpoint that may bias its sampling
    verbatim: bytes = b""  # the whole turn in the endpoint's format, if it must be returned unchanged


class Relay(Protocol):
    """The seam of observe mode: an endpoint that renders and parses by itself."""

    name: str

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def health(self) -> list[Health]: ...

    def relay(self, request: RelayRequest) -> AbstractAsyncContextManager[AsyncIterator[RelayChunk]]: ...

    async def count(self, request: RelayRequest) -> int:
        """Count the tokens of the prompt; raises `NotFound` if the endpoint cannot."""
