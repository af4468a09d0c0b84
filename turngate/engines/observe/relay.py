"""What the relays of observe mode have in common: the call goes out streamed, in the endpoint's format, and comes back as chunks.

`anthropic`, `gemini` and `responses` fill in the format; `openai` is a world of its own, since it can be asked for tokens.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import groupby
from typing import Protocol, TypeVar

import msgspec

from turngate.engines.base import Health, RelayChunk, RelayRequest
from turngate.engines.http import EngineClient, Reply
from turngate.engines.observe.translate import SHRINKS, RejectedFields, RelayBody, select_headers, shrink_to_fit
from turngate.errors import ContextOverflow, EngineRejected, EngineUnavailable, TurngateError
from turngate.types import Finish

T = TypeVar("T")


class AnswerCollector(Protocol):
    """Collects one reply, event by event."""

    finish: Finish | None

    def add(self, data: bytes) -> RelayChunk | None:
        """What one event adds, if anything."""

    def end(self) -> RelayChunk:
        """The last chunk, once the stream is over and `finish` is known."""


async def stream_answer(
    endpoint: str, answer: AnswerCollector, reply: Reply, batches: AsyncIterator[list[bytes]]
) -> AsyncGenerator[RelayChunk, None]:
    """The whole answer. What came in one read goes on together; what came before a failure goes on before it."""
    async for batch in batches:
        chunks: list[RelayChunk] = []
        failure: TurngateError | None = None
        for data in batch:
            try:
                chunk = answer.add(data)
            except TurngateError as error:
                failure = error
                break
            if chunk is not None:
                chunks.append(chunk)
        reply.finished = answer.finish is not None
        for chunk in _merge_chunks(chunks):
            yield chunk
        if failure is not None:
            raise failure
    if answer.finish is None:
        raise EngineUnavailable(f"{endpoint} ended its reply without finishing")
    yield answer.end()


def _merge_chunks(chunks: Sequence[RelayChunk]) -> list[RelayChunk]:
    """Chunks in a row as one; but those whose ids are told are never mixed with others, or it would be told of both."""
    whole: list[RelayChunk] = []
    for told, group in groupby(chunks, lambda chunk: chunk.ids is not None):
        run = list(group)
        logprobs = [value for chunk in run for value in chunk.logprobs or ()]
        whole.append(
            RelayChunk(
                tuple(event for chunk in run for event in chunk.events),
                [token for chunk in run for token in chunk.ids or ()] if told else None,
                logprobs if logprobs or told else None,
                next((chunk.prompt for chunk in run if chunk.prompt is not None), None),
            )
        )
    return whole


class StreamingRelay:
    """One endpoint. The agent may not have asked for a stream, but it is always one that comes: it can be abandoned half-way,
    and says more than nothing while a long answer is made."""

    name: str
    dialect: str

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._unwanted = RejectedFields()

    async def start(self) -> None:
        await self._client.start()

    async def close(self) -> None:
        await self._client.close()

    @asynccontextmanager
    async def relay(self, request: RelayRequest) -> AsyncIterator[AsyncIterator[RelayChunk]]:
        headers = select_headers(request, self.dialect)
        async with self._client.post(self._path(request), b"", headers) as reply:
            yield self._chunks(reply, request)

    def _path(self, request: RelayRequest) -> str:
        raise NotImplementedError

    def _write(self, request: RelayRequest, without: frozenset[str]) -> RelayBody:
        raise NotImplementedError

    def _answer(self, request: RelayRequest) -> AnswerCollector:
        raise NotImplementedError

    async def _chunks(self, reply: Reply, request: RelayRequest) -> AsyncIterator[RelayChunk]:
        written = await self._open(reply, request)
        if written.lost:
            yield RelayChunk(lost=written.lost)
        async with aclosing(stream_answer(self.name, self._answer(request), reply, reply.events())) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _open(self, reply: Reply, request: RelayRequest) -> RelayBody:
        """Send, and again without what the endpoint refuses, where the call can do without it."""
        model = request.model or request.call.model
        shrinks = 0 if request.call.dialect == self.dialect else SHRINKS
        while True:
            without = self._unwanted.of(model)
            written = self._write(request, without)
            reply.body = msgspec.json.encode(written.body)
            try:
                await reply.open()
                return written
            except EngineRejected as error:
                refused = written.refused(error.message) - without
                if not refused:
                    raise
                self._unwanted.add(model, refused)
            except ContextOverflow as error:
                smaller = shrink_to_fit(request, written, error) if shrinks else None
                if smaller is None:
                    raise
                request, shrinks = smaller, shrinks - 1

    async def _ask(self, path: str, body: object, shape: type[T], request: RelayRequest) -> T:
        """A question with one JSON document for an answer."""
        async with self._client.post(path, msgspec.json.encode(body), select_headers(request, self.dialect)) as reply:
            async for [data] in reply.whole():
                reply.finished = True
                return self._client.decode(msgspec.json.Decoder(shape).decode, data)
        raise AssertionError("a document is one batch of one event")

    async def _probe(self, path: str) -> list[Health]:
        """Whether the endpoint answers there."""
        seen = Health(url=self._client.url, ok=True, in_flight=self._client.in_flight)
        try:
            await self._client.ping(path)
        except TurngateError as error:
            return [msgspec.structs.replace(seen, ok=False, detail=error.message)]
        return [seen]
