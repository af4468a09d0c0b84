"""Tests for VLLM against a server with the wire formats of vLLM 0.32 (`openai/completion`, `scale_out/token_in_token_out`)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from tests.engines.standins import (
    DONE,
    StandIn,
    answer_stream,
    answer_with,
    collect,
    completion,
    event,
    generated,
    make_request,
    serving,
)
from tests.ports import free_port
from tests.speed import scaled
from turngate.engines.base import Chunk
from turngate.engines.vllm import VLLM
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


@asynccontextmanager
async def engine_of(server: StandIn, **settings: Any) -> AsyncIterator[VLLM]:
    engine = VLLM(server.url, "m", **settings)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def whole_of(engine: VLLM, **fields: Any) -> Chunk:
    async with engine.generate(make_request(**fields)) as chunks:
        return await collect(chunks)


async def test_request_body_and_headers() -> None:
    server = StandIn(answer_with(completion([7], [-0.5], "stop")))
    async with serving(server), engine_of(server, key="k", rank=3) as engine:
        request = make_request(
            [0, 5, 151_643],
            max_tokens=9,
            stream=False,
            stop=("\n\n",),
            stop_ids=(2, 151_645),
            session="s1",
            request_id="r1",
            cache_salt="v7",
        )
        async with engine.generate(request) as chunks:
            await collect(chunks)
    assert server.paths == ["/v1/completions"]
    assert b'"prompt":[0,5,151643]' in server.bodies[0]
    assert server.last_body == {
        "prompt": [0, 5, 151_643],
        "model": "m",
        "stream": False,
        "return_tokens_as_token_ids": True,
        "logprobs": 0,
        "n": 1,
        "max_tokens": 9,
        "stop": ["\n\n"],
        "stop_token_ids": [2, 151_645],
        "ignore_eos": False,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "cache_salt": "v7",
        # neutral values are sent, or vLLM would use the model's generation_config
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
    }
    headers = server.headers[0]
    assert headers["X-Request-Id"] == "r1"
    assert headers["X-Session-ID"] == "s1"
    assert headers["X-data-parallel-rank"] == "3"
    assert headers["Authorization"] == "Bearer k"
    assert headers["Content-Type"] == "application/json"


async def test_sampling_parameters_are_sent() -> None:
    server = StandIn(answer_with(completion([7], [-0.5], "stop")))
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1, seed=0, min_tokens=2)
    async with serving(server), engine_of(server) as engine:
        await whole_of(engine, sampling=sampling, stream=False)
    body_sent = server.last_body
    assert (body_sent["temperature"], body_sent["top_p"], body_sent["top_k"], body_sent["min_p"]) == (0.7, 0.9, 20, 0.1)
    assert (body_sent["repetition_penalty"], body_sent["seed"], body_sent["min_tokens"]) == (1.1, 0, 2)
    assert "X-data-parallel-rank" not in server.headers[0] and "X-Session-ID" not in server.headers[0]


async def test_long_and_strided_prompts_arrive_exactly() -> None:
    server = StandIn(answer_with(completion([7], [-0.5], "stop")))
    long = np.random.default_rng(0).integers(0, 151_936, 73_000).astype(np.int32)
    async with serving(server), engine_of(server) as engine:
        for prompt in (long, long[::2], np.tile(long, 5)):  # the last is over 2 MB of JSON
            async with engine.generate(make_request(prompt, stream=False)) as chunks:
                await collect(chunks)
            assert server.last_body["prompt"] == prompt.tolist()


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (Constraint("json_object"), {"json_object": True}),
        (Constraint("json_schema", {"type": "object"}), {"json": {"type": "object"}}),
        (Constraint("tools", {"type": "array", "minItems": 1}), {"json": {"type": "array", "minItems": 1}}),
        (Constraint("tool", {"type": "object"}, "bash"), {"json": {"type": "object"}}),
    ],
)
async def test_constraints_become_structured_outputs(constraint: Constraint, expected: dict[str, Any]) -> None:
    server = StandIn(answer_with(completion([7], [-0.5], "stop")))
    async with serving(server), engine_of(server) as engine:
        await whole_of(engine, constraint=constraint, stream=False)
    assert server.last_body["structured_outputs"] == expected


async def test_constraint_after_reasoning_is_a_second_request() -> None:
    thought = answer_stream(event(completion([50], [-0.1])) + event(completion([7, 51], [-0.2, -0.3], "stop")), DONE)
    rest = answer_with(completion([9, 2], [-0.4, -0.5], "stop"))

    async def answer(request: web.Request) -> web.StreamResponse:
        return await (rest if "structured_outputs" in await request.json() else thought)(request)

    server = StandIn(answer)
    reasoning = ReasoningTokens(opening=50, closing=51, is_open=False)
    forced = Constraint("tool", {"type": "object"}, "bash", after_reasoning=True)
    async with serving(server), engine_of(server) as engine:
        whole = await whole_of(
            engine, constraint=forced, reasoning=reasoning, stop_ids=(2,), stream=False, max_tokens=9
        )
    assert (whole.ids, whole.logprobs, whole.finish) == ([50, 7, 51, 9, 2], [-0.1, -0.2, -0.3, -0.4, -0.5], "stop")
    first, second = map(json.loads, server.bodies)
    assert first["stop_token_ids"] == [2, 51] and first["stream"] and "structured_outputs" not in first
    assert second["prompt"] == [1, 2, 3, 50, 7, 51] and second["structured_outputs"] == {"json": {"type": "object"}}
    assert (second["stop_token_ids"], second["stream"], second["max_tokens"]) == ([2], False, 6)


@pytest.mark.parametrize("stream", [False, True])
async def test_alternatives_are_the_likeliest_tokens(stream: bool) -> None:
    tops: list[dict[str, float] | None] = [{"token_id:7": -2.5, "token_id:5": -0.5, "token_id:6": -1.5}, None]
    scores = {"tokens": ["token_id:7", "token_id:2"], "token_logprobs": [-2.5, -0.1], "top_logprobs": tops}
    body = completion(None, None, "stop")
    body["choices"][0]["logprobs"] = scores
    server = StandIn(answer_stream(event(body), DONE) if stream else answer_with(body))
    request = make_request(top_logprobs=2, stream=stream)
    async with serving(server), engine_of(server) as engine, engine.generate(request) as chunks:
        [chunk] = [chunk async for chunk in chunks]
    assert server.last_body["logprobs"] == 2 and list(chunk.ids) == [7, 2]
    assert chunk.alternatives == [{5: -0.5, 6: -1.5}, {}]
    assert list(chunk.alternatives[0]) == [5, 6]  # likeliest first


async def test_alternatives_with_an_echoed_prompt_are_named_by_id() -> None:
    """Without the second option, vLLM names alternatives by their text, which does not identify a token."""
    server = StandIn(answer_with(completion([7], [-0.5], "stop")))
    async with serving(server), engine_of(server) as engine:
        for top in (0, 2):
            with suppress(EngineError):  # this answer names no ids
                await whole_of(engine, top_logprobs=top, echo_prompt=True, stream=False)
    plain, both = map(json.loads, server.bodies)
    assert plain["return_token_ids"] and "return_tokens_as_token_ids" not in plain
    assert both["return_token_ids"] and both["return_tokens_as_token_ids"]


async def test_alternatives_of_the_generate_api() -> None:
    body = generated([7], [-2.5], "stop")
    body["choices"][0]["logprobs"]["content"][0]["top_logprobs"].append({"token_id": 5, "logprob": -0.5, "rank": 1})
    server = StandIn(answer_with(body))
    request = make_request(top_logprobs=1, stream=False)
    async with serving(server), engine_of(server, api="generate") as engine, engine.generate(request) as chunks:
        [chunk] = [chunk async for chunk in chunks]
    assert server.last_body["sampling_params"]["logprobs"] == 1
    assert chunk.alternatives == [{5: -0.5}]


async def test_missing_schema_is_rejected_before_sending() -> None:
    server = StandIn(answer_with({}))
    async with serving(server), engine_of(server) as engine:
        with pytest.raises(EngineRejected, match="schema"):
            async with engine.generate(make_request(constraint=Constraint("tools"))) as chunks:
                await collect(chunks)
    assert server.bodies == []


async def test_stream_yields_one_chunk_per_read() -> None:
    answer = answer_stream(
        event(completion([5], [-0.1])) + event(completion([6, 7], [-0.2, None])),
        0.05,
        b": keep-alive\n\n",
        0.05,
        event(completion([8], [-0.4])),
        0.05,
        event(completion([9], [-0.5], "stop")) + DONE,
    )
    server = StandIn(answer)
    async with serving(server), engine_of(server) as engine, engine.generate(make_request()) as chunks:
        seen = [chunk async for chunk in chunks]
    assert [list(chunk.ids) for chunk in seen] == [[5, 6, 7], [8], [9]]  # one chunk per read
    assert [list(chunk.logprobs or ()) for chunk in seen] == [[-0.1, -0.2, None], [-0.4], [-0.5]]
    assert [chunk.finish for chunk in seen] == [None, None, "stop"]
    assert server.last_body["stream"] is True


async def test_stream_split_at_any_byte() -> None:
    wire = event(completion([5, 6], [-0.25, -0.5])) + event(completion([7], [-0.75], "length")) + DONE
    cut = 0

    async def answer(request: Any) -> Any:
        return await answer_stream(wire[:cut], 0.001, wire[cut:])(request)

    server = StandIn(answer)
    async with serving(server), engine_of(server) as engine:
        for at in range(1, len(wire), 3):
            cut = at
            async with engine.generate(make_request()) as chunks:
                whole = await collect(chunks)
            assert (whole.ids, whole.logprobs, whole.finish) == ([5, 6, 7], [-0.25, -0.5, -0.75], "length")


async def test_non_streaming_response_is_one_chunk() -> None:
    usage = {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2}
    body = completion([5, 6], [-0.1, -0.2], "length", prompt_token_ids=[1, 2, 3], prompt_logprobs=None)
    server = StandIn(answer_with({**body, "usage": usage}))
    async with serving(server), engine_of(server) as engine, engine.generate(make_request(stream=False)) as chunks:
        seen = [chunk async for chunk in chunks]
    assert len(seen) == 1
    assert (seen[0].ids, seen[0].logprobs, seen[0].finish, seen[0].prompt) == ([5, 6], [-0.1, -0.2], "length", None)


async def test_prompt_is_echoed_on_request() -> None:
    first = event(completion([5], [-0.1], prompt_token_ids=[1, 2, 3]))
    server = StandIn(answer_stream(first, event(completion([6], [-0.1], "stop")), DONE))
    async with serving(server), engine_of(server) as engine:
        for echo, expected in ((True, [1, 2, 3]), (False, None)):
            async with engine.generate(make_request(echo_prompt=echo)) as chunks:
                assert (await collect(chunks)).prompt == expected


async def test_engine_abort_finishes_call() -> None:
    server = StandIn(answer_stream(event(completion([5], [-0.1])), event(completion([], [], "abort")), DONE))
    async with serving(server), engine_of(server) as engine, engine.generate(make_request()) as chunks:
        whole = await collect(chunks)
    assert (whole.ids, whole.finish) == ([5], "abort")


@pytest.mark.parametrize(
    ("api", "answer"),
    [
        ("completions", answer_stream(DONE)),  # what vLLM 0.32 sends: no choice at all
        ("completions", answer_stream(event(completion([], [], "abort")), DONE)),
        ("generate", answer_stream(event(generated([], [], "abort")), DONE)),
    ],
)
async def test_abort_before_first_token_is_busy(api: Any, answer: Any) -> None:
    """`/pause?mode=abort` does this to calls without a first token. The replica stays in its pool."""
    server = StandIn(answer)
    async with serving(server), engine_of(server, api=api) as engine:
        with pytest.raises(EngineBusy, match="before its first token"):
            await whole_of(engine)


async def test_missing_logprobs_stay_none() -> None:
    for given in (None, [None, None], [-9999.0, -9999.0]):
        server = StandIn(answer_with(completion([5, 6], given, "stop")))  # type: ignore[arg-type]
        async with serving(server), engine_of(server) as engine, engine.generate(make_request(stream=False)) as chunks:
            assert (await collect(chunks)).logprobs == [None, None]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (completion([5, 6], [-0.1], "stop"), r"log-probabilities \(1\) and tokens \(2\)"),
        (completion([5], [-0.1, -0.2], "stop"), r"log-probabilities \(2\) and tokens \(1\)"),
        (completion(None, None, "stop"), "return_tokens_as_token_ids"),
        (completion([5], [-0.1], "error"), "'error'"),
        (completion([-5], [-0.1], "stop"), "cannot be decoded"),
        (completion([2**31], [-0.1], "stop"), "cannot be decoded"),
        (
            {**completion([5, 6], [-0.1, -0.2], "stop"), "usage": {"completion_tokens": 3}},
            r"tokens \(3\) than it sent \(2\)",
        ),
    ],
)
async def test_inconsistent_response_raises(body: dict[str, Any], expected: str) -> None:
    for stream in (True, False):
        server = StandIn(answer_stream(event(body), DONE) if stream else answer_with(body))
        async with serving(server), engine_of(server) as engine:
            with pytest.raises(EngineError, match=expected):
                async with engine.generate(make_request(stream=stream)) as chunks:
                    await collect(chunks)


async def test_repeated_or_missing_event_raises() -> None:
    """Only the count at the end of the stream shows it."""
    first, last = event(completion([5, 6], [-0.1, -0.2])), event(completion([7], [-0.3], "stop"))
    usage = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3}})
    for parts, sent in (([first, first, last], 5), ([last], 1), ([first, last], 3)):
        server = StandIn(answer_stream(*parts, 0.01, usage, DONE))
        async with serving(server), engine_of(server) as engine:
            if sent == 3:
                assert (await whole_of(engine)).ids == [5, 6, 7]
                continue
            with pytest.raises(EngineError, match=rf"tokens \(3\) than it sent \({sent}\)"):
                await whole_of(engine)


async def test_malformed_json_raises() -> None:
    for answer in (answer_stream(b"data: {nonsense}\n\n", DONE), answer_stream(b'data: {"choices": 1}\n\n', DONE)):
        server = StandIn(answer)
        async with serving(server), engine_of(server) as engine:
            with pytest.raises(EngineError, match="cannot be decoded"):
                async with engine.generate(make_request()) as chunks:
                    await collect(chunks)


async def test_unfinished_stream_is_unavailable() -> None:
    for answer in (
        answer_stream(event(completion([5], [-0.1])), DONE),
        answer_stream(event(completion([5], [-0.1]))),
        answer_stream(),
    ):
        server = StandIn(answer)
        async with serving(server), engine_of(server) as engine:
            with pytest.raises(EngineUnavailable, match="before the generation finished"):
                async with engine.generate(make_request()) as chunks:
                    await collect(chunks)


@pytest.mark.parametrize(
    ("code", "message", "expected"),
    [
        (400, "This model's maximum context length is 10 tokens.", ContextOverflow),
        (400, "Invalid grammar", EngineRejected),
        (500, "Internal server error", EngineError),
        (503, "Request failed; please retry", EngineUnavailable),
    ],
)
async def test_error_event_maps_to_exception(code: int, message: str, expected: type[TurngateError]) -> None:
    error = {"error": {"message": message, "type": "x", "param": None, "code": code}}
    server = StandIn(answer_stream(event(error), DONE))
    async with serving(server), engine_of(server) as engine:
        with pytest.raises(TurngateError, match=message) as raised:
            async with engine.generate(make_request()) as chunks:
                await collect(chunks)
    assert type(raised.value) is expected


async def test_busy_silent_and_unreachable_engine() -> None:
    busy = StandIn(answer_with({"error": {"message": "slow down"}}, 429))
    async with serving(busy), engine_of(busy) as engine:
        with pytest.raises(EngineBusy):
            async with engine.generate(make_request()) as chunks:
                await collect(chunks)
    silent = StandIn(answer_stream(event(completion([5], [-0.1])), 3600.0))
    async with serving(silent), engine_of(silent, silence_s=0.1) as engine:
        with pytest.raises(EngineTimeout):
            async with engine.generate(make_request()) as chunks:
                await collect(chunks)
    gone = StandIn()
    gone.url = f"http://127.0.0.1:{free_port()}"
    async with engine_of(gone) as engine:
        with pytest.raises(EngineUnavailable):
            async with engine.generate(make_request()) as chunks:
                await collect(chunks)


async def test_early_exit_closes_connection() -> None:
    server = StandIn(answer_stream(event(completion([5], [-0.1])), 3600.0))
    async with serving(server), engine_of(server) as engine:
        async with engine.generate(make_request()) as chunks:
            await anext(chunks)
        await asyncio.wait_for(server.hung_up.wait(), scaled(2))


async def test_generate_api() -> None:
    server = StandIn(
        answer_stream(
            event(generated([5], [-0.1], prompt_token_ids=[1, 2, 3])),
            event(generated([6, 7], [-0.2, -0.3])),
            event(generated([8], [-9999.0], "stop")),
            DONE,
        )
    )
    async with serving(server), engine_of(server, api="generate", rank=0) as engine:
        request = make_request(session="s", request_id="r", cache_salt="v1", stop_ids=(9,), echo_prompt=True)
        async with engine.generate(request) as chunks:
            whole = await collect(chunks)
        assert (whole.ids, whole.logprobs) == ([5, 6, 7, 8], [-0.1, -0.2, -0.3, None])
        assert (whole.finish, whole.prompt) == ("stop", [1, 2, 3])
        async with engine.generate(make_request(stop=("END",), constraint=Constraint("json_object"))) as chunks:
            await collect(chunks)
    assert server.paths == ["/inference/v1/generate"] * 2
    first = json.loads(server.bodies[0])
    assert b'"token_ids":[1,2,3]' in server.bodies[0]
    assert first["sampling_params"]["detokenize"] is False
    assert first["sampling_params"]["stop_token_ids"] == [9]
    assert first["sampling_params"]["max_tokens"] == 64
    assert first["sampling_params"]["logprobs"] == 0
    assert (first["return_token_ids"], first["cache_salt"], first["model"]) == (True, "v1", "m")
    assert server.headers[0]["X-data-parallel-rank"] == "0"
    second = server.last_body["sampling_params"]
    assert (second["stop"], second["detokenize"]) == (["END"], True)  # stop strings need detokenization
    assert second["structured_outputs"] == {"json_object": True}


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([6], "token ids do not match the sampled ids"),
        ([5, 6], r"different numbers of log-probabilities \(1\) and tokens \(2\)"),
    ],
)
async def test_generate_api_rejects_mismatched_logprobs(ids: list[int], expected: str) -> None:
    body = generated([5], [-0.1], "stop")
    body["choices"][0]["token_ids"] = ids
    server = StandIn(answer_with(body))
    async with serving(server), engine_of(server, api="generate") as engine:
        with pytest.raises(EngineError, match=expected):
            async with engine.generate(make_request(stream=False)) as chunks:
                await collect(chunks)


async def test_health() -> None:
    models = {"object": "list", "data": [{"id": "m", "max_model_len": 4096}, {"id": "lora", "max_model_len": None}]}
    server = StandIn(documents={"/health": {}, "/v1/models": models})
    async with serving(server), engine_of(server) as engine:
        [health] = await engine.health()
        assert (health.ok, health.model, health.max_context, health.url) == (True, "m", 4096, server.url)
        engine.model = ""
        [health] = await engine.health()
        assert (health.ok, health.model) == (True, "m")
        engine.model = "other"
        [health] = await engine.health()
        assert not health.ok and "serves m, lora, not other" in health.detail
        server.documents["/v1/models"] = {"object": "list", "data": []}
        engine.model = ""
        [health] = await engine.health()
        assert (health.ok, health.detail) == (False, "the engine serves no models")
        server.documents["/health"] = 503
        [health] = await engine.health()
        assert not health.ok
    [health] = await _unreachable_health()
    assert not health.ok and "connection" in health.detail


async def _unreachable_health() -> Any:
    unreachable = StandIn()
    unreachable.url = f"http://127.0.0.1:{free_port()}"
    async with engine_of(unreachable) as engine:
        return await engine.health()


async def test_url_with_v1_suffix() -> None:
    server = StandIn(answer_with(completion([7], [-0.5], "stop")))
    async with serving(server):
        engine = VLLM(server.url + "/v1/", "m", key="sk-secret")
        assert "sk-secret" not in repr(engine)
        await engine.start()
        async with engine.generate(make_request(stream=False)) as chunks:
            await collect(chunks)
        await engine.close()
    assert server.paths == ["/v1/completions"]
