"""Shared parts of the observe-mode relays, which send a call in the endpoint's format and stream the answer as chunks.

The relays in `anthropic`, `gemini` and `responses` extend `StreamingRelay`. The relay in `openai` does not, because it also relays calls
that are not streamed, and adapts to the token data that an endpoint can return.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import groupby
from typing import Protocol, TypeVar

import msgspec

from turngate.engines.base import Health, RelayChunk, RelayRequest
from turngate.engines.http import EngineClient, Reply, map_errors
from turngate.engines.observe.translate import SHRINKS, RejectedFields, RelayBody, select_headers, shrink_to_fit
from turngate.errors import (
    ContextOverflow,
    EngineNotFound,
    EngineRejected,
    EngineUnavailable,
    NotFound,
    TurngateError,
)
from turngate.types import Finish

T = TypeVar("T")


class AnswerCollector(Protocol):
    """The interface of a collector that turns the events of one reply into chunks."""

    finish: Finish | None

    def add(self, data: bytes) -> RelayChunk | None:
        """Return the chunk for an event, or None if it adds nothing."""

    def end(self) -> RelayChunk:
        """Return the last chunk. This is called once, after the end of the stream."""


async def stream_answer(
    endpoint: str, answer: AnswerCollector, reply: Reply, batches: AsyncIterator[list[bytes]]
) -> AsyncGenerator[RelayChunk, None]:
    """Yield the answer in chunks. Chunks from the same read are merged where possible.

    If an event is an error or is invalid, the output that precedes it is yielded before the error is raised. Raise `EngineUnavailable` if
    the reply ends without a finish reason.
    """
    async for batch in batches:
        chunks: list[RelayChunk] = []
        failure: TurngateError | None = None
        for data in batch:
            try:
                with map_errors(endpoint):  # for JSON inside an event
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
            try:
                raise failure
            finally:
                del failure  # the error's traceback refers to this frame; a cycle would keep the request in memory
    if answer.finish is None:
        raise EngineUnavailable(f"{endpoint} ended its reply before the generation finished")
    with map_errors(endpoint):
        end = answer.end()
    yield end


def _merge_chunks(chunks: Sequence[RelayChunk]) -> list[RelayChunk]:
    """Merge consecutive chunks. Chunks with ids are never merged with chunks without ids."""
    merged: list[RelayChunk] = []
    for has_ids, group in groupby(chunks, lambda chunk: chunk.ids is not None):
        run = list(group)
        logprobs = [value for chunk in run for value in chunk.logprobs or ()]
        merged.append(
            RelayChunk(
                tuple(event for chunk in run for event in chunk.events),
                [token for chunk in run for token in chunk.ids or ()] if has_ids else None,
                logprobs if logprobs or has_ids else None,
                next((chunk.prompt for chunk in run if chunk.prompt is not None), None),
                usage=next((chunk.usage for chunk in reversed(run) if chunk.usage is not None), None),
            )
        )
    return merged


class StreamingRelay:
    """The base class of relays that always stream.

    The endpoint streams every answer, even if the agent did not ask for a stream, because a stream can be aborted.
    """

    name: str
    dialect: str

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._rejected = RejectedFields()

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
        body = await self._open(reply, request)
        if body.lost:
            yield RelayChunk(lost=body.lost)
        async with aclosing(stream_answer(self.name, self._answer(request), reply, reply.events())) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _open(self, reply: Reply, request: RelayRequest) -> RelayBody:
        """Send the call, and return the body that the endpoint accepted.

        If the call is rejected, send it again without the rejected optional fields or with a lower token limit, if possible.
        """
        model = request.model or request.call.model
        shrinks = 0 if request.call.dialect == self.dialect else SHRINKS
        while True:
            without = self._rejected.for_model(model)
            body = self._write(request, without)
            reply.body = msgspec.json.encode(body.body)
            try:
                await reply.open()
                return body
            except EngineRejected as error:
                rejected = body.find_rejected(error.message) - without
                if not rejected:
                    raise
                self._rejected.add(model, rejected)
            except ContextOverflow as error:
                smaller = shrink_to_fit(request, body, error) if shrinks else None
                if smaller is None:
                    raise
                request, shrinks = smaller, shrinks - 1

    async def _request_count(self, path: str, body: object, shape: type[T], request: RelayRequest) -> T:
        """Request a token count, and decode the JSON reply as `shape`. Raise `NotFound` if the endpoint answers with 404 or 405."""
        headers = select_headers(request, self.dialect)
        try:
            async with self._client.post(path, msgspec.json.encode(body), headers) as reply:
                async for [data] in reply.whole():
                    reply.finished = True
                    return self._client.decode(msgspec.json.Decoder(shape).decode, data)
        except EngineNotFound as error:
            # Not all endpoints can count tokens. An unknown model may have the same status, so the endpoint's message is included.
            raise NotFound(
                f"the observed endpoint did not count the tokens ({error.message}); estimate them instead"
            ) from None
        raise AssertionError("`Reply.whole` always yields one batch with one event")

    async def _probe(self, path: str) -> list[Health]:
        """Return the endpoint's health: whether a GET of `path` returns status 200."""
        seen = Health(url=self._client.url, ok=True, in_flight=self._client.in_flight)
        try:
            await self._client.ping(path)
        except TurngateError as error:
            return [msgspec.structs.replace(seen, ok=False, detail=error.message)]
        return [seen]
