"""Local HTTP servers that stand in for engines: they send scripted answers and record the requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from aiohttp import web
from multidict import CIMultiDict

from turngate.engines.base import Chunk, Generate
from turngate.types import Ids, Sampling

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_request(prompt: Sequence[int] | Ids = (1, 2, 3), **fields: Any) -> Generate:
    """Make a request with defaults for the fields a test does not care about."""
    given: dict[str, Any] = {"max_tokens": 64, "sampling": Sampling(), **fields}
    return Generate(prompt=np.asarray(prompt, np.int32), **given)


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def completion(
    ids: list[int] | None, logprobs: list[float | None] | None = None, finish: str | None = None, **choice: Any
) -> dict[str, Any]:
    """One event of vLLM's `/v1/completions` stream."""
    given = None
    if logprobs is not None:
        tokens = [f"t{token}" for token in ids or []]
        tops = [None if value is None else {"x": value} for value in logprobs]
        given = {"text_offset": [0] * len(tokens), "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": tops}
    fields = {"index": 0, "text": "x", "logprobs": given, "finish_reason": finish, "stop_reason": None}
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
    return {**head, "choices": [{**fields, "token_ids": ids, **choice}]}


def generated(ids: list[int], logprobs: list[float] | None, finish: str | None = None, **top: Any) -> dict[str, Any]:
    """One event of a `/inference/v1/generate` stream."""
    content = None
    if logprobs is not None:
        pairs = [{"token_id": token, "logprob": value, "rank": 1} for token, value in zip(ids, logprobs, strict=True)]
        content = {"content": [{**pair, "top_logprobs": [pair]} for pair in pairs]}
    choice = {"index": 0, "logprobs": content, "finish_reason": finish, "token_ids": ids, "weight_versions": None}
    return {"request_id": "r", "usage": None, "choices": [choice], "output_mode": "tokens", **top}


class StandIn:
    """One server. `answer` handles POSTs; GETs are served from `documents` by path."""

    def __init__(self, answer: Answer | None = None, documents: dict[str, Any] | None = None) -> None:
        self.answer = answer
        self.documents = documents or {}
        self.url = ""
        self.bodies: list[bytes] = []
        self.headers: list[CIMultiDict[str]] = []
        self.paths: list[str] = []
        self.raw_paths: list[str] = []  # as received, percent-encoded
        self.hung_up = asyncio.Event()  # a client disconnected before its reply was complete
        self.connections: set[Any] = set()

    @property
    def last_body(self) -> dict[str, Any]:
        """The last body, parsed."""
        parsed: dict[str, Any] = json.loads(self.bodies[-1])
        return parsed

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.connections.add(request.transport)
        if request.method == "GET":
            return self._document(request.path)
        self.paths.append(request.path)
        self.raw_paths.append(request.raw_path)
        self.bodies.append(await request.read())
        self.headers.append(request.headers.copy())
        assert self.answer is not None
        try:
            return await self.answer(request)
        except (asyncio.CancelledError, ConnectionError):
            self.hung_up.set()
            raise

    def _document(self, path: str) -> web.Response:
        if path not in self.documents:
            return web.Response(status=404, text="Not Found")
        document = self.documents[path]
        if isinstance(document, int):
            return web.Response(status=document)
        return web.json_response(document)


@asynccontextmanager
async def serving(server: StandIn) -> AsyncIterator[StandIn]:
    app = web.Application(client_max_size=2**28)
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


def answer_stream(*parts: bytes | float | asyncio.Event, cut: bool = False) -> Answer:
    """Stream these parts; a number is a pause in seconds, an event is waited for. `cut`: drop the connection."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        for part in parts:
            if isinstance(part, bytes):
                await response.write(part)
            elif isinstance(part, asyncio.Event):
                await part.wait()
            else:
                await asyncio.sleep(part)
        if cut:
            assert request.transport is not None
            request.transport.close()
        return response

    return answer


def answer_with(value: Any, status: int = 200) -> Answer:
    """Answer with a JSON document, or with plain text for a string."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if isinstance(value, str):
            return web.Response(text=value, status=status)
        return web.json_response(value, status=status)

    return answer


async def collect(chunks: AsyncIterator[Chunk]) -> Chunk:
    """Join all chunks into one."""
    ids: list[int] = []
    logprobs: list[float | None] = []
    finish, prompt = None, None
    async for chunk in chunks:
        assert finish is None, "got a chunk after the final one"
        assert chunk.logprobs is not None and len(chunk.logprobs) == len(chunk.ids)
        ids += chunk.ids
        logprobs += chunk.logprobs
        finish = chunk.finish
        prompt = prompt or chunk.prompt
    return Chunk(ids, logprobs, finish, prompt)
