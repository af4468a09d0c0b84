"""Tests for SGLang against a stand-in with the wire formats of its versions. `tests/real/test_sglang.py` uses a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tests.engines.standins import DONE, StandIn, answer_stream, answer_with, collect, event, make_request, serving
from tests.speed import scaled
from turngate.engines.sglang import SGLang
from turngate.errors import (
    ContextOverflow,
    EngineBusy,
    EngineError,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    TurngateError,
)
from turngate.types import Constraint, ReasoningTokens, Sampling

pytestmark = pytest.mark.asyncio

IDS = [7, 7, 7, 9, 7, 2]  # repeated ids, so content cannot tell cumulative from incremental
LOGPROBS = [-0.1, -0.2, -0.3, -0.4, -0.5, -0.6]
STEPS = [1, 2, 4, 6]  # tokens sampled by the time of each event
STOP = {"type": "stop", "matched": 2}


def output(ids: Any, positions: Any, total: int, finish: Any = None, **top: Any) -> dict[str, Any]:
    meta = {
        "id": "rid",
        "finish_reason": finish,
        "prompt_tokens": 3,
        "weight_version": "default",
        "input_token_logprobs": [],
        "output_token_logprobs": positions,
        "output_token_logprobs_length": total,
        "completion_tokens": total,
        "cached_tokens": 0,
    }
    if positions is None:
        del meta["output_token_logprobs"]
    return {"text": "…", "output_ids": ids, "meta_info": meta, **top}


def position(index: int) -> list[Any]:
    return [LOGPROBS[index], IDS[index], None]


def stream(*, cumulative_ids: bool, cumulative_logprobs: bool, with_ids: bool = True) -> list[bytes]:
    """Encode one generation in the stream format of one of SGLang's versions."""
    events, before = [], 0
    for total in STEPS:
        ids = IDS[0 if cumulative_ids else before : total]
        positions = [position(index) for index in range(0 if cumulative_logprobs else before, total)]
        finish = STOP if total == len(IDS) else None
        body = output(ids, positions, total, finish)
        if not with_ids:
            del body["output_ids"]
        events.append(event(body))
        before = total
    return events


@asynccontextmanager
async def engine_of(server: StandIn, **settings: Any) -> AsyncIterator[SGLang]:
    engine = SGLang(server.url, **settings)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@pytest.mark.parametrize("cumulative_ids", [True, False])
@pytest.mark.parametrize("cumulative_logprobs", [True, False])
@pytest.mark.parametrize("apart", [True, False])
async def test_cumulative_and_incremental_streams(cumulative_ids: bool, cumulative_logprobs: bool, apart: bool) -> None:
    events = stream(cumulative_ids=cumulative_ids, cumulative_logprobs=cumulative_logprobs)
    parts: list[bytes | float] = []
    for data in events:
        parts += [data, 0.02] if apart else [data]
    server = StandIn(answer_stream(*(parts if apart else [b"".join(events)]), DONE))
    async with serving(server), engine_of(server) as engine, engine.generate(make_request()) as chunks:
        seen = [chunk async for chunk in chunks]
    assert [token for chunk in seen for token in chunk.ids] == IDS
    assert [value for chunk in seen for value in chunk.logprobs or ()] == LOGPROBS
    assert seen[-1].finish == "stop" and all(chunk.finish is None for chunk in seen[:-1])
    assert [len(chunk.ids) for chunk in seen] == ([1, 1, 2, 2] if apart else [6])


async def test_ids_only_in_logprobs() -> None:
    server = StandIn(answer_stream(*stream(cumulative_ids=True, cumulative_logprobs=True, with_ids=False), DONE))
    async with serving(server), engine_of(server) as engine, engine.generate(make_request()) as chunks:
        whole = await collect(chunks)
    assert (whole.ids, whole.logprobs, whole.finish) == (IDS, LOGPROBS, "stop")


async def test_non_streaming_response() -> None:
    server = StandIn(answer_with(output(IDS, [position(i) for i in range(6)], 6, {"type": "length", "length": 6})))
    async with serving(server), engine_of(server) as engine, engine.generate(make_request(stream=False)) as chunks:
        whole = await collect(chunks)
    assert (whole.ids, whole.logprobs, whole.finish) == (IDS, LOGPROBS, "length")
    assert server.last_body["stream"] is False


@pytest.mark.parametrize("cumulative", [True, False])
async def test_alternatives_are_returned_per_token(cumulative: bool) -> None:
    events, before = [], 0
    for total in STEPS:
        body = output(IDS[:total], [position(n) for n in range(total)], total, STOP if total == len(IDS) else None)
        tops = [[position(n), [-9.0, 1, None]] for n in range(0 if cumulative else before, total)]
        body["meta_info"]["output_top_logprobs"] = tops
        events.append(event(body))
        before = total
    server = StandIn(answer_stream(b"".join(events), DONE))
    async with serving(server), engine_of(server) as engine, engine.generate(make_request(top_logprobs=2)) as chunks:
        seen = [chunk async for chunk in chunks]
    assert server.last_body["top_logprobs_num"] == 2
    alternatives = [each for chunk in seen for each in chunk.alternatives or ()]
    assert alternatives == [{token: value, 1: -9.0} for token, value in zip(IDS, LOGPROBS, strict=True)]


async def test_constraint_after_reasoning_is_a_second_request() -> None:
    thought = answer_stream(event(output([50, 51], [[-0.1, 50, None], [-0.2, 51, None]], 2, STOP)), DONE)
    rest = answer_stream(event(output([9, 2], [[-0.3, 9, None], [-0.4, 2, None]], 2, STOP)), DONE)

    async def answer(request: web.Request) -> web.StreamResponse:
        return await (rest if "json_schema" in (await request.json())["sampling_params"] else thought)(request)

    server = StandIn(answer)
    forced = Constraint("json_object", after_reasoning=True)
    reasoning = ReasoningTokens(opening=50, closing=51, is_open=False)
    request = make_request(constraint=forced, reasoning=reasoning, stop_ids=(2,))
    async with serving(server), engine_of(server) as engine, engine.generate(request) as chunks:
        whole = await collect(chunks)
    assert (whole.ids, whole.finish) == ([50, 51, 9, 2], "stop")
    first, second = map(json.loads, server.bodies)
    assert first["sampling_params"]["stop_token_ids"] == [2, 51]
    assert second["input_ids"] == [1, 2, 3, 50, 51] and second["sampling_params"]["stop_token_ids"] == [2]


async def test_request_body_and_headers() -> None:
    server = StandIn(answer_with(output([5], [[-0.1, 5, None]], 1, STOP)))
    async with serving(server), engine_of(server, key="k", rank=1) as engine:
        request = make_request(
            [0, 5, 151_643],
            stream=False,
            max_tokens=9,
            stop=("END",),
            stop_ids=(2,),
            session="s1",
            request_id="r1",
            cache_salt="v7",
            sampling=Sampling(seed=3, min_tokens=1),
            constraint=Constraint("json_schema", {"type": "object"}),
        )
        async with engine.generate(request) as chunks:
            await collect(chunks)
    assert b'"input_ids":[0,5,151643]' in server.bodies[0]
    body_sent = server.last_body
    rid = body_sent.pop("rid")
    assert rid.startswith("r1-") and len(rid) == len("r1-") + 32
    assert body_sent == {
        "input_ids": [0, 5, 151_643],
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "return_text_in_logprobs": False,
        "stream": False,
        "extra_key": "v7",
        "routed_dp_rank": 1,
        "data_parallel_rank": 1,
        "sampling_params": {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_new_tokens": 1,
            "sampling_seed": 3,
            "n": 1,
            "max_new_tokens": 9,
            "stop": ["END"],
            "stop_token_ids": [2],
            "ignore_eos": False,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
            "json_schema": '{"type":"object"}',
        },
    }
    headers = server.headers[0]
    assert (headers["X-SMG-Routing-Key"], headers["X-Request-Id"], headers["Authorization"]) == ("s1", "r1", "Bearer k")


async def test_json_object_constraint() -> None:
    server = StandIn(answer_with(output([5], [[-0.1, 5, None]], 1, STOP)))
    request = make_request(stream=False, constraint=Constraint("json_object"))
    async with serving(server), engine_of(server) as engine, engine.generate(request) as chunks:
        await collect(chunks)
    assert json.loads(server.last_body["sampling_params"]["json_schema"]) == {"type": "object"}


async def test_prompt_is_echoed_once() -> None:
    events = [
        event(output([5], [[-0.1, 5, None]], 1, prompt_token_ids=[1, 2, 3])),
        event(output([5, 6], [[-0.1, 5, None], [-0.2, 6, None]], 2, STOP, prompt_token_ids=[1, 2, 3])),
    ]
    server = StandIn(answer_stream(events[0], 0.02, events[1], DONE))
    async with serving(server), engine_of(server) as engine, engine.generate(make_request(echo_prompt=True)) as chunks:
        assert [chunk.prompt async for chunk in chunks] == [[1, 2, 3], None]
    assert server.last_body["return_prompt_token_ids"] is True


async def test_null_logprobs_stay_null() -> None:
    for positions in ([[None, 5, None]], None):
        server = StandIn(answer_with(output([5], positions, 1, STOP)))
        async with serving(server), engine_of(server) as engine, engine.generate(make_request(stream=False)) as chunks:
            assert (await collect(chunks)).logprobs == [None]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (output([5, 6], [[-0.1, 5, None]], 2, STOP), r"tokens: 1 instead of 2 \(all\) or 2 \(only the new ones\)"),
        (output([5], [[-0.1, 6, None]], 1, STOP), "token ids do not match the sampled ids"),
        (output([5, 6, 7], [[-0.1, 5, None]], 1, STOP), r"tokens: 3 instead of 1 \(all\)"),
        (output(None, None, 1, STOP), "no token ids"),
        (output([5], [[-0.1, 5, None]], 1, {"type": "odd"}), "'odd'"),
        ({"text": "only text"}, "meta_info"),
        ({"output_ids": [5], "meta_info": {}}, "cannot be decoded"),
        (output([-5], [[-0.1, -5, None]], 1, STOP), "cannot be decoded"),
    ],
)
async def test_inconsistent_response_raises(body: dict[str, Any], expected: str) -> None:
    for streamed in (True, False):
        server = StandIn(answer_stream(event(body), DONE) if streamed else answer_with(body))
        async with serving(server), engine_of(server) as engine:
            with pytest.raises(EngineError, match=expected):
                async with engine.generate(make_request(stream=streamed)) as chunks:
                    await collect(chunks)


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (400, "Input length (9 tokens) exceeds the maximum allowed length (5 tokens).", ContextOverflow),
        (400, "Grammar error", EngineRejected),
        (503, "The request queue is full.", EngineBusy),
        (503, "gone", EngineUnavailable),
        (500, "boom", EngineError),
    ],
)
async def test_abort_with_error_status_raises(status: int, message: str, expected: type[TurngateError]) -> None:
    finish = {"type": "abort", "message": message, "status_code": status, "err_type": "X"}
    server = StandIn(answer_stream(event(output([], [], 0, finish)), DONE))
    async with serving(server), engine_of(server) as engine:
        with pytest.raises(TurngateError) as raised:
            async with engine.generate(make_request()) as chunks:
                await collect(chunks)
    assert type(raised.value) is expected and message in raised.value.message


async def test_engine_abort_finishes_call() -> None:
    finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    five = [[-0.1, 5, None]]
    server = StandIn(answer_stream(event(output([5], five, 1)), event(output([5], five, 1, finish))))
    async with serving(server), engine_of(server) as engine, engine.generate(make_request()) as chunks:
        whole = await collect(chunks)
    assert (whole.ids, whole.finish) == ([5], "abort")


async def test_abort_before_first_token_is_busy() -> None:
    finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    server = StandIn(answer_stream(event(output([], [], 0, finish)), DONE))
    async with serving(server), engine_of(server) as engine:
        with pytest.raises(EngineBusy, match="before its first token"):
            async with engine.generate(make_request()) as chunks:
                await collect(chunks)


async def test_error_event_raises() -> None:
    text = "The input (9 tokens) is longer than the model's context length (5 tokens)."
    server = StandIn(answer_stream(event({"error": {"message": text}}), DONE))
    async with serving(server), engine_of(server) as engine:
        with pytest.raises(ContextOverflow):
            async with engine.generate(make_request()) as chunks:
                await collect(chunks)


async def test_unfinished_stream_is_unavailable() -> None:
    server = StandIn(answer_stream(event(output([5], [[-0.1, 5, None]], 1)), DONE))
    async with serving(server), engine_of(server) as engine:
        with pytest.raises(EngineUnavailable):
            async with engine.generate(make_request()) as chunks:
                await collect(chunks)


class Aborting(StandIn):
    """Generates slowly and accepts aborts."""

    def __init__(self) -> None:
        super().__init__(self.generate)
        self.aborted: asyncio.Queue[str] = asyncio.Queue()

    async def generate(self, request: Any) -> Any:
        if request.path == "/abort_request":
            self.aborted.put_nowait(self.last_body["rid"])
            return await answer_with("")(request)
        return await answer_stream(event(output([5], [[-0.1, 5, None]], 1)), 3600.0)(request)


async def test_early_exit_aborts_and_closes_connection() -> None:
    server = Aborting()
    async with serving(server), engine_of(server) as engine:
        async with engine.generate(make_request(request_id="r")) as chunks:
            await anext(chunks)
        rid = await asyncio.wait_for(server.aborted.get(), scaled(2))
        assert rid == json.loads(server.bodies[0])["rid"]
        await asyncio.wait_for(server.hung_up.wait(), scaled(2))


async def test_silence_timeout_aborts() -> None:
    server = Aborting()
    async with serving(server), engine_of(server, silence_s=0.1) as engine:
        with pytest.raises(EngineTimeout):
            async with engine.generate(make_request()) as chunks:
                await collect(chunks)
        await asyncio.wait_for(server.aborted.get(), scaled(2))


async def test_finished_generation_is_not_aborted() -> None:
    server = StandIn(answer_stream(event(output([5], [[-0.1, 5, None]], 1, STOP)), DONE))
    async with serving(server), engine_of(server) as engine:
        async with engine.generate(make_request()) as chunks:
            await anext(chunks)
        async with engine.generate(make_request()):
            pass  # never read
    assert server.paths == ["/generate"]


async def test_health() -> None:
    documents: dict[str, Any] = {
        "/health": {},
        "/get_model_info": {"model_path": "/models/q", "is_generation": True},
        "/get_server_info": {"context_length": 4096, "max_req_input_len": 4090, "internal_states": [{}]},
        "/v1/models": {"data": [{"id": "q", "max_model_len": 32768}]},
    }
    server = StandIn(documents=documents)
    async with serving(server), engine_of(server) as engine:
        [health] = await engine.health()
        assert (health.ok, health.model, health.max_context) == (True, "/models/q", 4096)
    documents["/get_server_info"] = {"context_length": None}
    async with serving(server), engine_of(server, model="named") as engine:
        [health] = await engine.health()
        assert (health.ok, health.model, health.max_context) == (True, "named", 32768)
        documents["/health"] = 503
        [health] = await engine.health()
        assert not health.ok
