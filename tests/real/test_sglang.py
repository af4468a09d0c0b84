"""Tests with real SGLang on a CPU: a tiny mixture-of-experts model with random weights.

The server itself is the reference: it scores the sampled ids again, and reports the experts of a row's ids in one call.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests import kit
from tests.engines.standins import collect, make_request
from tests.exact.agent import Agent, Reply, World
from tests.exact.test_side_data import read_feed
from tests.sglang import CONTEXT, MODEL, Server, start_sglang
from tests.speed import scaled
from turngate.client.feed import Row
from turngate.config import ServeConfig
from turngate.engines.base import Chunk
from turngate.engines.sglang import SGLang
from turngate.engines.weights import PolicyWeights
from turngate.errors import ContextOverflow, EngineRejected
from turngate.server.app import Gateway
from turngate.store.outcomes import RecordedOutcome
from turngate.trainers.export import ExportChoices, export
from turngate.trainers.export.side_data import decode_experts
from turngate.trainers.routed_experts import to_verl
from turngate.types import RaggedArray, Sampling
from turngate.verify import Renderers, SessionReader, VerifyOptions, verify
from turngate.views.session import open_row_source

pytestmark = [pytest.mark.needs("sglang", MODEL), pytest.mark.full]
PROMPT = [9707, 11, 1879, 0, 151936 - 1, 5, 5, 5]  # with an id that no text has
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_sglang(tmp_path_factory.mktemp("sglang") / "log") as server:
        yield server


@pytest.fixture
async def engine(server: Server) -> AsyncIterator[SGLang]:
    engine = SGLang(server.url, expert_shape=server.expert_shape)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def ask(server: Server, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    """Call the server directly, without Turngate's engine."""
    method = "GET" if body is None else "POST"
    response = httpx.request(method, f"{server.url}{path}", json=body, timeout=scaled(60))
    assert response.is_success, response.text
    return response


def score(server: Server, ids: Sequence[int], **options: Any) -> dict[str, Any]:
    """Have the server compute all of these ids in one prompt, without its cache."""
    options |= {"extra_key": f"score {np.random.default_rng().integers(2**60)}"}
    body = {"input_ids": [*map(int, ids)], "sampling_params": {"max_new_tokens": 1, "temperature": 0}, **options}
    meta: dict[str, Any] = ask(server, "/generate", body).json()["meta_info"]
    assert meta["cached_tokens"] == 0
    return meta


def find_experts(server: Server, ids: Sequence[int]) -> np.ndarray:
    """Return the experts that the server itself reports for each of these ids."""
    data = base64.b64decode(score(server, ids, return_routed_experts=True)["routed_experts"])
    return np.frombuffer(data, "<i4").reshape(len(ids), *server.expert_shape)


@pytest.mark.parametrize("stream", [True, False])
async def test_ids_and_logprobs_are_exact(server: Server, engine: SGLang, stream: bool) -> None:
    request = make_request(PROMPT, max_tokens=24, stream=stream, echo_prompt=True, top_logprobs=2)
    async with engine.generate(request) as chunks:
        seen = [chunk async for chunk in chunks]
    ids = [token for chunk in seen for token in chunk.ids]
    logprobs = [value for chunk in seen for value in chunk.logprobs or ()]
    alternatives = [each for chunk in seen for each in chunk.alternatives or ()]
    assert [chunk.prompt for chunk in seen if chunk.prompt is not None] == [PROMPT]
    assert len(ids) == len(logprobs) == len(alternatives) == 24 and seen[-1].finish == "length"
    assert len(seen) > 1 if stream else len(seen) == 1
    assert len({*logprobs}) > 20  # the model prefers some tokens to others
    scored = score(server, PROMPT + ids, return_logprob=True, logprob_start_len=len(PROMPT) - 1)
    again = [(token, value) for value, token, _ in scored["input_token_logprobs"][-len(ids) :]]
    assert [token for token, _ in again] == ids
    assert logprobs == pytest.approx([value for _, value in again], abs=1e-4)
    for value, others in zip(logprobs, alternatives, strict=True):
        assert len(others) >= 2 and value is not None and value <= max(others.values()) + 1e-4


async def test_cached_prompt_gives_the_same_logprobs(engine: SGLang) -> None:
    """The second call of a conversation repeats the tokens of the first, which are then in SGLang's cache."""
    first = await sample(engine, PROMPT, 16, GREEDY)
    again = await sample(engine, [*PROMPT, *first.ids[:8]], 8, GREEDY)
    assert again.ids == first.ids[8:]
    assert again.logprobs == pytest.approx(first.logprobs[8:], abs=1e-4)
    async with engine.generate(make_request(PROMPT + list(first.ids), max_tokens=1)) as chunks:
        assert [chunk.cached async for chunk in chunks][-1] == len(PROMPT) + 15


async def sample(engine: SGLang, prompt: Sequence[int], tokens: int, sampling: Sampling | None = None) -> Chunk:
    async with engine.generate(make_request(prompt, max_tokens=tokens, sampling=sampling or Sampling())) as chunks:
        return await collect(chunks)


@pytest.mark.parametrize("stream", [True, False])
async def test_sampling_masks_are_exact(server: Server, engine: SGLang, stream: bool) -> None:
    """The kept ids are the likeliest ones, and the log-probabilities are those among them, according to the server's own scores."""
    # The model is random, so the likeliest ids are almost equally likely, and only a high min-p cuts some of them.
    sampling = Sampling(top_p=0.8, top_k=20, min_p=0.99, temperature=0.7)
    request = make_request(PROMPT, max_tokens=16, sampling=sampling, stream=stream, sampling_mask=True)
    async with engine.generate(request) as chunks:
        seen = [chunk async for chunk in chunks]
    ids = [token for chunk in seen for token in chunk.ids]
    logprobs = [value for chunk in seen for value in chunk.logprobs or ()]
    arrays = [array.values for chunk in seen for array in chunk.side]
    masks = [each.tolist() for values in arrays if isinstance(values, RaggedArray) for each in values.lists()]
    scored = score(server, PROMPT + ids, return_logprob=True, logprob_start_len=len(PROMPT) - 1, top_logprobs_num=40)
    tops = [{token: value for value, token, _ in top} for top in scored["input_top_logprobs"][-len(ids) :]]
    assert len(masks) == len(ids) == len(tops) == 16
    for token, value, kept, top in zip(ids, logprobs, masks, tops, strict=True):
        assert token in kept and len(kept) <= 20
        lowest = min(top[each] for each in kept)
        assert all(top[each] <= lowest + 1e-4 for each in top if each not in kept)
        scores = np.array([top[each] for each in kept]) / sampling.temperature
        assert value == pytest.approx(top[token] / sampling.temperature - np.logaddexp.reduce(scores), abs=1e-3)
    assert min(len(kept) for kept in masks) < 20


async def test_closed_call_is_aborted(server: Server, engine: SGLang) -> None:
    before = count_aborts(server)
    async with engine.generate(make_request(PROMPT, max_tokens=CONTEXT - 100)) as chunks:
        async for _ in chunks:
            await wait_for_calls(engine, 1)
            break
    await wait_for_calls(engine, 0)
    assert count_aborts(server) == before + 1


def count_aborts(server: Server) -> float:
    lines = ask(server, "/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("sglang:num_aborted_requests_total{"))


async def wait_for_calls(engine: SGLang, number: int) -> None:
    """Wait until SGLang, which publishes its load at intervals, reports this number of calls."""
    async with asyncio.timeout(scaled(60)):
        while [load.calls for load in await engine.load_report()] != [number]:
            await asyncio.sleep(0.1)


async def test_health_load_and_metrics(server: Server, engine: SGLang) -> None:
    [health] = await engine.health()
    assert health.ok and health.model == str(server.folder) and health.max_context == CONTEXT
    [load] = await engine.load_report()
    assert load.calls == 0 and load.kv_use is not None and 0 <= load.kv_use <= 1
    assert "sglang:num_running_reqs" in ask(server, "/metrics").text


async def test_prompt_beyond_the_context_is_a_context_overflow(engine: SGLang) -> None:
    with pytest.raises(ContextOverflow):
        await sample(engine, PROMPT * CONTEXT, 8)


def negate_layer(model: Path, folder: Path) -> str:
    """Save a copy of the model with one negated matrix, so that its output differs."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        tensors["model.layers.0.self_attn.o_proj.weight"] *= -1
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
    return str(folder)


@asynccontextmanager
async def restored_weights(engine: SGLang) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await engine.resume()
        await engine.reload_initial_weights(frozen=False)


async def test_new_weights_are_served_and_reported(server: Server, engine: SGLang, tmp_path: Path) -> None:
    before = await sample(engine, PROMPT, 8, GREEDY)
    weights = PolicyWeights(version=7, path=negate_layer(server.folder, tmp_path / "other"))
    async with restored_weights(engine):
        engine.expect(weights)
        [health] = await engine.health()
        assert health.wrong and "instead of 7" in health.detail
        await engine.load(weights, frozen=False)
        [health] = await engine.health()
        assert health.ok and engine.reports_weights
        async with engine.generate(make_request(PROMPT, max_tokens=8, sampling=GREEDY)) as chunks:
            after = [chunk async for chunk in chunks]
        assert [token for chunk in after for token in chunk.ids] != before.ids
        assert after[-1].version_runs == ((7, 8),)
        with pytest.raises(EngineRejected, match="Failed to get weights"):
            await engine.load(PolicyWeights(version=8, path=str(tmp_path / "none")), frozen=False)
        [health] = await engine.health()
        assert health.wrong and "its update to weight version 8 has not completed" in health.detail
    engine.expect(None)
    assert (await sample(engine, PROMPT, 8, GREEDY)).ids == before.ids


async def test_weights_change_during_a_call(server: Server, engine: SGLang, tmp_path: Path) -> None:
    """The call continues with the new weights, and SGLang reports which weights sampled which tokens."""
    weights = PolicyWeights(version=9, path=negate_layer(server.folder, tmp_path / "other"))
    request = make_request(PROMPT, max_tokens=200, version=8)
    async with restored_weights(engine), engine.generate(request) as chunks:
        sampled = 0
        async for chunk in chunks:
            if not sampled:
                await engine.pause()
                await engine.load(weights, frozen=True)
                engine.expect(weights)
                await engine.resume()
            sampled += len(chunk.ids)
            runs = chunk.version_runs
    assert sampled == 200 and runs is not None
    assert [version for version, _ in runs] == [8, 9] and sum(count for _, count in runs) == 200


@asynccontextmanager
async def serve(server: Server, folder: Path) -> AsyncIterator[World]:
    layers, experts = server.expert_shape
    config = ServeConfig(
        data=str(folder),
        engine="sglang",
        engine_url=[server.url],
        model="m",
        tokenizer=str(server.folder),
        routed_experts=f"{layers}x{experts}",
        echo_prompt=True,
    )
    gateway = Gateway(config.check(), renderer=(kit.renderer(server.folder), None))
    await gateway.start()
    try:
        yield World(gateway, gateway.engine)  # type: ignore[arg-type]
    finally:
        await gateway.stop()


async def call(agent: Agent) -> Reply:
    reply = await agent.call(kit.say(""), stream=True, max_tokens=12)
    assert reply.status == 200, reply.error
    agent.messages = [*agent.messages, reply.message, kit.user("Go on.")]
    return reply


async def converse(agent: Agent) -> None:
    """Three turns, and a branch from the first. Each prompt repeats the tokens of the turns before it."""
    agent.tools = None
    agent.messages = [kit.user("Begin.")]
    first = await call(agent)
    await call(agent)
    await call(agent)
    agent.messages = [kit.user("Begin."), first.message, kit.user("Another way.")]
    await call(agent)


async def test_experts_of_a_conversation_are_those_of_sglang(server: Server, tmp_path: Path) -> None:
    async with serve(server, tmp_path) as world:
        agent = world.agent(metadata={"group": "g"})
        await converse(agent)
        await world.gateway.sessions.seal(agent.session_id)
        world.gateway.outcomes.record(agent.session_id, RecordedOutcome(kind="graded", reward=1.0, group="g", task="t"))
        rows = await read_feed(world)
    assert len(rows) == 4  # two, as they are and rebuilt from a tree
    expected = {tuple(row.ids.tolist()): find_experts(server, row.ids.tolist()) for row in rows}
    for row in rows:
        check_row(row, expected[tuple(row.ids.tolist())])
    for format, field in (("verl", "routed_experts"), ("slime", "rollout_routed_experts")):
        out = tmp_path / f"{format}.jsonl"
        export(tmp_path, out, ExportChoices(format=format, side=("routed_experts",)))
        records = [json.loads(line) for line in out.read_text().splitlines()]
        ids = [record.get("tokens") or record["prompt_ids"] + record["response_ids"] for record in records]
        assert {*map(tuple, ids)} == expected.keys()
        for tokens, record in zip(ids, records, strict=True):
            assert np.array_equal(decode_experts(record[field]), expected[tuple(tokens)][:-1])
    with SessionReader(tmp_path) as reader, open_row_source(tmp_path) as source:
        options = VerifyOptions(rows=source, renderers=Renderers(given=kit.renderer(server.folder)))
        verdict = verify(reader, agent.session_id, options)
    assert verdict.ok, verdict.wrong


def check_row(row: Row, expected: np.ndarray) -> None:
    """All tokens but the last, which was never an input, have the experts that SGLang computes for the whole row."""
    column = row.side["routed_experts"]
    assert column.spans == ((0, len(row.ids) - 1),)
    assert np.array_equal(to_verl(column, len(row.ids)), expected[:-1])
    assert len(np.unique(expected)) == 8  # all experts are used, so a shift by one token would show
