"""The in-process engine over HTTP, called by the SGLang client of cells: the same tokens as in the process, and only with the key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
import pytest

from tests.engines.local_kit import model as small_model
from turngate.engines.base import Chunk, Generate
from turngate.engines.local import LocalEngine
from turngate.engines.sglang import SGLang
from turngate.errors import ConfigError, ContextOverflow, EngineError, EngineRejected, EngineUnavailable
from turngate.trainers.local.engine_server import EngineServer
from turngate.types import ID_DTYPE, Constraint, Sampling

KEY = "the-key-of-this-run"
PROMPT = np.arange(1, 9, dtype=ID_DTYPE)


@asynccontextmanager
async def serve(key: str = KEY) -> AsyncIterator[tuple[LocalEngine, SGLang]]:
    """Serve a small model, and connect to it."""
    engine = LocalEngine(small_model(), slots=2, max_context=64)
    await engine.start()
    try:
        async with EngineServer(engine, KEY, host="127.0.0.1") as server:
            client = SGLang(server.url, key=key)
            await client.start()
            try:
                yield engine, client
            finally:
                await client.close()
    finally:
        await engine.close()


def ask(**fields: object) -> Generate:
    given = {"prompt": PROMPT, "max_tokens": 12, "sampling": Sampling(seed=7), "stop_ids": (0,)}
    return Generate(**{**given, **fields})


async def collect(engine: LocalEngine | SGLang, request: Generate) -> Chunk:
    ids: list[int] = []
    logprobs: list[float | None] = []
    finish = prompt = None
    async with engine.generate(request) as chunks:
        async for chunk in chunks:
            ids += chunk.ids
            logprobs += chunk.logprobs or []
            finish, prompt = chunk.finish, prompt or chunk.prompt
    return Chunk(ids, logprobs, finish, prompt)


@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_and_logprobs_are_the_same_as_in_the_process(stream: bool) -> None:
    async with serve() as (engine, client):
        request = ask(stream=stream, echo_prompt=True)
        here, there = await collect(engine, request), await collect(client, request)
        assert len(there.ids) == 12 and there.finish == "length" and list(there.prompt or ()) == PROMPT.tolist()
        assert (there.ids, there.logprobs) == (here.ids, here.logprobs)


async def test_health_context_and_load() -> None:
    async with serve() as (_, client):
        [health] = await client.health()
        assert health.ok and health.max_context == 64
        [load] = await client.load_report()
        assert (load.running, load.waiting) == (0, 0)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (ask(prompt=np.ones(70, ID_DTYPE)), ContextOverflow),
        (ask(constraint=Constraint("json_object")), EngineRejected),
        (ask(model="adapter"), EngineRejected),
        (ask(prompt=np.array([10**6], ID_DTYPE)), EngineRejected),
    ],
)
async def test_errors_are_those_of_the_engine(request_: Generate, error: type[Exception]) -> None:
    async with serve() as (_, client):
        with pytest.raises(error) as raised:
            await collect(client, request_)
        if isinstance(raised.value, ContextOverflow):
            assert (raised.value.size, raised.value.limit) == (70, 64)


async def test_leaving_a_call_ends_it_in_the_engine() -> None:
    async with serve() as (engine, client):
        async with client.generate(ask(max_tokens=50)) as chunks:
            async for _ in chunks:
                break
        async with asyncio.timeout(10):
            while (await engine.health())[0].in_flight:
                await asyncio.sleep(0.01)


async def test_stopped_engine_is_unavailable() -> None:
    async with serve() as (engine, client):
        await engine.close()
        with pytest.raises(EngineUnavailable):
            await collect(client, ask())
        assert not (await client.health())[0].ok


async def test_wrong_key_is_refused() -> None:
    async with serve(key="another") as (_, client):
        with pytest.raises(EngineError, match="rejected the gateway's API key"):
            await collect(client, ask())
        async with aiohttp.ClientSession() as stranger, stranger.get(f"{client.address}/get_model_info") as reply:
            assert reply.status == 401


async def test_address_of_another_machine_is_refused() -> None:
    engine = LocalEngine(small_model(), slots=1, max_context=64)
    with pytest.raises(ConfigError, match="engine_host"):
        await EngineServer(engine, KEY, host="198.51.100.7").__aenter__()
