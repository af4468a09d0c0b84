"""The scripted engine, which replays the token ids, delays and faults in its script. It runs in process, without HTTP.

It is used, for example, by tests and by `turngate serve --engine scripted`. Unless the script sets log-probabilities, they are derived from
the prompt and the ids (`derive_logprobs`), so they prove which prompt a recorded turn was conditioned on.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Literal

import msgspec
import numpy as np

from turngate.engines.base import Chunk, Generate, Health, refuse_top_logprobs
from turngate.engines.http import align_logprobs
from turngate.errors import ContextOverflow, EngineBusy, EngineError, EngineTimeout, EngineUnavailable
from turngate.types import Ids, PromptIds

SYNTHETIC_NOTE = (
    "the scripted engine generated these turns: nothing was sampled, and the log-probabilities are synthetic"
)
DEFAULT_CONTEXT = 131_072  # tokens, if the gateway's settings contain no context length
_STEPS = 2**18  # multiples of 2^-18 are exact in float32, so stored values equal those sent
_REMEMBERED = 10_000  # maximum number of sessions or prompts with a counter


class ScriptedTurn(msgspec.Struct, frozen=True):
    """One scripted generation: its ids, timing and faults."""

    ids: Sequence[int] = ()
    logprobs: Sequence[float | None] | None = None  # None to derive them from the prompt and the ids
    finish: Literal["stop", "length", "abort"] = "stop"
    chunk: int = 1  # tokens per chunk; 0 for a single chunk
    delay_s: float = 0.0  # pause before the first chunk
    pace_s: float = 0.0  # pause before each later chunk

    fail_before: bool = False  # the engine is unavailable
    busy: bool = False  # the engine rejects the request as busy
    overflow: bool = False  # the prompt does not fit
    cut_after: int | None = None  # the stream ends early, after this many tokens
    silent_for: float = 0.0  # seconds without data after the first chunk
    null_logprobs: bool = False  # every log-probability is None
    short_logprobs: bool = False  # one log-probability is missing at the end
    hang: bool = False  # no token is ever sampled


Script = Callable[[Generate, int], ScriptedTurn]


def derive_logprobs(prompt: Ids | PromptIds, ids: Sequence[int]) -> list[float]:
    """Compute a log-probability in (-5, 0) for each id, from the prompt, the earlier ids and the id itself. Values are exact in float32."""
    state = _hash(prompt)
    values = []
    for token in ids:
        state = zlib.crc32(int(token).to_bytes(4, "little"), state)
        values.append(-(1 + state % (5 * _STEPS - 1)) / _STEPS)
    return values


def _hash(prompt: Ids | PromptIds) -> int:
    return zlib.crc32(np.ascontiguousarray(prompt, np.int32).data)


class Scripted:
    """An engine that follows a script.

    `script` is a list of turns, or a function that returns a turn for a request and its index. The index is the number of earlier
    calls of the same session, so sessions are independent of each other. A call fails if the list has no turn for it. `received` contains
    the last `keep` requests, newest last. As with the HTTP engines, a call fails after `silence_s` seconds without data.
    """

    def __init__(
        self,
        script: Script | Sequence[ScriptedTurn],
        *,
        name: str = "scripted",
        model: str = "scripted",
        max_context: int | None = None,
        silence_s: float | None = None,
        keep: int = 100,
    ) -> None:
        self.name = name
        self.model = model
        self.received: deque[Generate] = deque(maxlen=keep)
        self.aborted = 0
        self.in_flight = 0
        self._script = script if callable(script) else _play(list(script), name)
        self._max_context = max_context
        self._silence_s = silence_s
        self._calls = _Counter()

    @classmethod
    def random(
        cls,
        vocab_size: int,
        stop_ids: Sequence[int],
        seed: int = 0,
        lengths: tuple[int, int] = (8, 64),
        *,
        name: str = "scripted",
        max_context: int | None = None,
        keep: int = 100,
        chunk: int = 1,
        delay_s: float = 0.0,
        pace_s: float = 0.0,
    ) -> Scripted:
        """Create an engine that returns random ids and then a stop id.

        The ids depend on `seed`, the request's seed, the prompt, and the number of earlier requests with the same prompt.
        """
        plain = [token for token in range(vocab_size) if token not in set(stop_ids)]
        seen = _Counter()

        def script(request: Generate, index: int) -> ScriptedTurn:
            prompt = _hash(request.prompt)
            draw = random.Random(f"{seed} {request.sampling.seed} {prompt} {seen.next(str(prompt))}")
            ids = draw.choices(plain, k=max(0, draw.randint(*lengths) - 1))
            return ScriptedTurn([*ids, draw.choice(stop_ids)], chunk=chunk, delay_s=delay_s, pace_s=pace_s)

        return cls(script, name=name, max_context=max_context, keep=keep)

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def health(self) -> list[Health]:
        return [Health(self.name, True, model=self.model, max_context=self._max_context, in_flight=self.in_flight)]

    def release(self, session: str) -> None:
        self._calls.forget(session)

    @asynccontextmanager
    async def generate(self, request: Generate) -> AsyncIterator[AsyncIterator[Chunk]]:
        call = _Call(self.name, request, self._begin(request), self._room(request), self._silence_s)
        self.in_flight += 1
        try:
            yield call.chunks()
        finally:
            self.in_flight -= 1
            self.aborted += not call.over

    def _begin(self, request: Generate) -> ScriptedTurn:
        self.received.append(request)
        return self._script(request, self._calls.next(request.session))

    def _room(self, request: Generate) -> int:
        """Return the maximum number of tokens to sample. It is below 1 if the prompt leaves no room in the context."""
        if self._max_context is None:
            return request.max_tokens
        return min(request.max_tokens, self._max_context - len(request.prompt))


class _Call:
    """A running generation. `over` becomes true when the generation succeeds or fails, but not when the caller aborts it."""

    def __init__(self, name: str, request: Generate, turn: ScriptedTurn, room: int, silence_s: float | None) -> None:
        self.over = False
        self._name = name
        self._request = request
        self._turn = turn
        self._room = room
        self._silence_s = silence_s

    async def chunks(self) -> AsyncIterator[Chunk]:
        try:
            async for chunk in self._sample():
                self.over = chunk.finish is not None
                yield chunk
        except (EngineError, ContextOverflow):
            self.over = True
            raise

    async def _sample(self) -> AsyncIterator[Chunk]:
        turn, request = self._turn, self._request
        await self._fail_first()
        ids = list(turn.ids)[: self._room]
        logprobs = self._logprobs(ids)
        finish = turn.finish if len(ids) == len(turn.ids) else "length"
        step = len(ids) if turn.chunk == 0 or not request.stream else turn.chunk
        starts = range(0, len(ids), step) if ids else [0]
        for start in starts:
            end = min(start + step, len(ids))
            await self._wait(turn.delay_s if start == 0 else turn.pace_s)
            if turn.cut_after is not None and end >= min(turn.cut_after, len(ids)):
                if turn.cut_after > start:
                    yield Chunk(ids[start : turn.cut_after], logprobs[start : turn.cut_after])
                raise EngineUnavailable(f"{self._name} ended its reply before the generation finished")
            prompt = request.prompt.tolist() if request.echo_prompt and start == 0 else None
            yield Chunk(ids[start:end], logprobs[start:end], finish if end == len(ids) else None, prompt)
            if start == 0:
                await self._wait(turn.silent_for)

    async def _fail_first(self) -> None:
        turn = self._turn
        refuse_top_logprobs(self._name, self._request)
        if turn.fail_before:
            raise EngineUnavailable(f"{self._name} is unavailable")
        if turn.busy:
            raise EngineBusy(f"{self._name} is busy")
        if turn.overflow or self._room < 1:
            raise ContextOverflow(
                f"{self._name}: the prompt leaves no room for a reply in the context (prompt tokens: {len(self._request.prompt)})"
            )
        if turn.hang:
            await self._wait(float("inf"))

    def _logprobs(self, ids: list[int]) -> list[float | None]:
        turn = self._turn
        if turn.null_logprobs:
            return [None] * len(ids)
        logprobs = derive_logprobs(self._request.prompt, ids) if turn.logprobs is None else turn.logprobs[: len(ids)]
        return align_logprobs(self._name, ids, logprobs[:-1] if turn.short_logprobs else logprobs)

    async def _wait(self, seconds: float) -> None:
        if self._silence_s is not None and seconds > self._silence_s:
            await asyncio.sleep(self._silence_s)
            raise EngineTimeout(f"timed out waiting for {self._name}")
        if seconds == float("inf"):
            await asyncio.Event().wait()
        elif seconds:
            await asyncio.sleep(seconds)


class _Counter:
    """A counter per key. When there are too many keys, the least recently used key is forgotten."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, int] = OrderedDict()

    def next(self, key: str) -> int:
        count = self._counts.pop(key, 0)
        self._counts[key] = count + 1
        if len(self._counts) > _REMEMBERED:
            self._counts.popitem(last=False)
        return count

    def forget(self, key: str) -> None:
        self._counts.pop(key, None)


def _play(turns: list[ScriptedTurn], name: str) -> Script:
    def script(request: Generate, index: int) -> ScriptedTurn:
        if index >= len(turns):
            raise EngineError(
                f"{name} has no reply for call {index + 1}: its script ends after call {len(turns)}; add more replies"
            )
        return turns[index]

    return script
