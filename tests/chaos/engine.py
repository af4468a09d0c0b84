"""A vLLM stand-in whose every answer is unique and checksummed, and which misbehaves on request.

The log-probabilities are those of the scripted engine: they prove after which ids each token was sampled. `generations` is the ground
truth: what the engine sampled, for which session.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.engines.standins import DONE, StandIn, completion, event, generated, serving
from tests.kit import say
from turngate.engines.scripted import derive_logprobs

MODEL = "policy"
TOOL = "read_file"  # the tool that it calls
_WORDS = ("look", "at", "the", "file", "then", "run", "each", "test", "again", "until", "it", "passes", "and", "stop")
_ANSWER = re.compile(r"<(\d+)((?: [a-z]+)+) ([0-9a-f]{8})>")
_STEP = 6  # tokens per event

Json = dict[str, Any]
Values = list[float | None]


@dataclass(frozen=True)
class Generation:
    """What the engine sampled in one call."""

    serial: int
    session: str
    prompt: list[int]
    ids: list[int]
    logprobs: Values


def write_answer(serial: int) -> str:
    """Write a text that is unique to one generation and shows whether a part of it is missing or repeated."""
    words = random.Random(serial).choices(_WORDS, k=5 + serial % 9)
    body = f"{serial} {' '.join(words)}"
    return f"<{body} {zlib.crc32(body.encode()):08x}>"


def read_serials(text: str) -> list[int]:
    """Find the intact answers in a text."""
    found = _ANSWER.finditer(text)
    return [int(m[1]) for m in found if f"{zlib.crc32((m[1] + m[2]).encode()):08x}" == m[3]]


def write_thought(serial: int) -> str:
    return f"Step {serial}."


def _write_reply(serial: int) -> str:
    answer = write_answer(serial)
    match serial % 3:
        case 0:
            return f"<think>\n{write_thought(serial)}\n</think>\n\n{answer}"
        case 1:
            return answer
        case _:
            call = {"name": TOOL, "arguments": {"path": answer}}
            return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


class CallInProgress:
    """One call to the engine, with methods to answer it."""

    def __init__(self, request: web.Request, body: Json, generation: Generation) -> None:
        self.request, self.body, self.generation = request, body, generation

    def events(self, ids: list[int] | None = None, logprobs: Values | None = None, finish: str = "stop") -> list[bytes]:
        """Encode tokens as the events of a stream, or as one document."""
        ids = self.generation.ids if ids is None else ids
        logprobs = self.generation.logprobs if logprobs is None else logprobs
        step = _STEP if self.body["stream"] else len(ids)
        starts = range(0, len(ids), step)
        parts = [
            self._encode(ids[n : n + step], logprobs[n : n + step], finish if n == starts[-1] else None, first=n == 0)
            for n in starts
        ]
        usage = {"prompt_tokens": len(self.generation.prompt), "completion_tokens": len(self.generation.ids)}
        if not self.body["stream"]:
            return [json.dumps({**parts[0], "usage": usage}).encode()]
        return [*map(event, parts), event({"choices": [], "usage": usage}), DONE]

    def _encode(self, ids: list[int], logprobs: Values, finish: str | None, *, first: bool) -> Json:
        prompt = self.generation.prompt if first else None
        if "token_ids" in self.body:  # the `generate` API
            return generated(ids, logprobs, finish, prompt_token_ids=prompt)  # type: ignore[arg-type]  # null is a fault
        return completion(ids, logprobs, finish, prompt_token_ids=prompt)

    async def send(self, parts: list[bytes], *, pause_s: float = 0.0, hang: bool = False) -> web.StreamResponse:
        kind = "text/event-stream" if self.body["stream"] else "application/json"
        response = web.StreamResponse(headers={"content-type": kind})
        await response.prepare(self.request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(pause_s)
        if hang:
            await asyncio.sleep(3600)
        await response.write_eof()
        return response


Misbehavior = Callable[[CallInProgress], Awaitable[web.StreamResponse]]


class ChaosEngine:
    """The engine behind the gateways. `misbehavior` answers a share of the calls while it is set."""

    def __init__(self, rng: random.Random) -> None:
        self.generations: dict[int, Generation] = {}
        self.misbehavior: Misbehavior | None = None
        self.share = 1.0
        self.url = ""
        self._rng = rng
        self._serials = itertools.count(1)
        self.documents: Json = {"/health": {}, "/v1/models": {"data": [{"id": MODEL, "max_model_len": 65_536}]}}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        prompt = body["token_ids"] if "token_ids" in body else body["prompt"]
        serial = next(self._serials)
        ids = list(say(_write_reply(serial)).ids)
        logprobs: Values = [*derive_logprobs(prompt, ids)]
        session = request.headers.get("X-Session-ID", "")
        self.generations[serial] = Generation(serial, session, prompt, ids, logprobs)
        call = CallInProgress(request, body, self.generations[serial])
        if self.misbehavior is not None and self._rng.random() < self.share:
            return await self.misbehavior(call)
        return await call.send(call.events(), pause_s=self._rng.choice((0.0, 0.002, 0.01)))


@asynccontextmanager
async def serve_engine(rng: random.Random) -> AsyncIterator[ChaosEngine]:
    engine = ChaosEngine(rng)
    async with serving(StandIn(engine.answer, engine.documents)) as server:
        engine.url = server.url
        yield engine
