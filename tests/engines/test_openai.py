"""Tests for the relay to chat endpoints: vLLM, OpenAI, and strict ones that reject unknown fields."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.engines.relays import (
    OTHER,
    TOOL,
    foreign_call,
    lost_fields,
    relay_answer,
    relay_call,
    require_tools,
    started,
)
from tests.engines.standins import DONE, Answer, StandIn, answer_stream, answer_with, event, serving
from tests.speed import scaled
from turngate.dialects.chat import ChatHistory
from turngate.engines.base import RelayChunk, RelayRequest
from turngate.engines.observe.openai import OpenAIRelay
from turngate.engines.observe.translate import encode_verbatim, read_messages
from turngate.errors import (
    BadRequest,
    ContextOverflow,
    EngineBusy,
    EngineError,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    NotFound,
)
from turngate.types import Call, CallDelta, Capture, Constraint, Delta, Message, Sampling, ToolCall, Usage

pytestmark = pytest.mark.asyncio

BODY: dict[str, Any] = {"model": "agent's", "messages": [{"role": "user", "content": "hi"}], "metadata": {"a": [1]}}
USAGE = {
    "prompt_tokens": 11,
    "completion_tokens": 5,
    "total_tokens": 16,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 2},
}


def part(delta: dict[str, Any], finish: str | None = None, **choice: Any) -> dict[str, Any]:
    """One event of a chat stream."""
    fields = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **choice}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [fields]}


def logprobs(*values: float) -> dict[str, Any]:
    return {"content": [{"token": "t", "logprob": value, "bytes": None, "top_logprobs": []} for value in values]}


def message(said: dict[str, Any], finish: str = "stop", **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **said}, "finish_reason": finish, **fields}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": USAGE}


@asynccontextmanager
async def relay_of(server: StandIn, **settings: Any) -> AsyncIterator[OpenAIRelay]:
    relay = OpenAIRelay(server.url, "sk-secret", **settings)
    await relay.start()
    try:
        yield relay
    finally:
        await relay.close()


async def relayed(answer: Answer, body: dict[str, Any] | None = None, **settings: Any) -> list[RelayChunk]:
    server = StandIn(answer)
    async with serving(server), relay_of(server, **settings) as relay:
        return await ask_chat(relay, body or BODY | {"stream": True})


def call_of(body: bytes) -> Call:
    """Make a call in the endpoint's own dialect, whose body is forwarded."""
    return Call(model="", history=ChatHistory([]), body=body)


async def ask_chat(relay: OpenAIRelay, body: dict[str, Any], **fields: Any) -> list[RelayChunk]:
    async with relay.relay(RelayRequest(call=call_of(json.dumps(body).encode()), **fields)) as chunks:
        seen = [chunk async for chunk in chunks]
    assert seen[-1].finish is not None and all(chunk.finish is None for chunk in seen[:-1])
    return seen


def events_of(chunks: list[RelayChunk]) -> list[Delta | CallDelta]:
    return [said for chunk in chunks for said in chunk.events]


async def test_gateway_settings_override_agent_request() -> None:
    server = StandIn(answer_with(message({"content": "hello"})))
    messages = b'[{"role": "user",  "content": "\\u00e9 1.10"}]'
    raw = b'{"messages": ' + messages + b', "temperature": 0.2, "top_k": 5, "max_tokens": 9}'
    async with serving(server), relay_of(server) as relay:
        request = RelayRequest(
            call=call_of(raw),
            model="m",
            sampling=Sampling(temperature=0.5, seed=3),
            max_tokens=7,
            session="s",
            request_id="r",
        )
        async with relay.relay(request) as chunks:
            assert [chunk async for chunk in chunks][-1].finish == "stop"
    assert server.paths == ["/v1/chat/completions"]
    assert messages in server.bodies[0]  # forwarded without re-encoding
    body_sent = server.last_body
    assert (body_sent["model"], body_sent["temperature"], body_sent["seed"], body_sent["max_tokens"]) == (
        "m",
        0.5,
        3,
        7,
    )
    assert (body_sent["top_p"], body_sent["top_k"], body_sent["min_p"], body_sent["repetition_penalty"]) == (
        1.0,
        -1,
        0.0,
        1.0,
    )
    assert (body_sent["return_token_ids"], body_sent["logprobs"]) == (True, True)
    assert "stream_options" not in body_sent
    headers = server.headers[0]
    assert headers["Authorization"] == "Bearer sk-secret"
    assert (headers["X-Session-ID"], headers["X-Request-Id"]) == ("s", "r")


async def test_other_fields_are_forwarded_unchanged() -> None:
    server = StandIn(answer_stream(event(part({"content": "x"}, "stop")), DONE))
    body = BODY | {"stream": True, "stream_options": {"x": 1}, "max_completion_tokens": 50, "top_k": 5}
    async with serving(server), relay_of(server, capture="text") as relay:
        await ask_chat(relay, body)
        assert server.last_body == body | {"stream_options": {"x": 1, "include_usage": True}}
        await ask_chat(relay, body, max_tokens=5, sampling=Sampling())
    # neutral fields that OpenAI does not define are omitted, since the endpoint may not know them
    expected = body | {"max_completion_tokens": 5, "temperature": 1.0, "top_p": 1.0}
    expected |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "stream_options": {"x": 1, "include_usage": True}}
    del expected["top_k"]
    assert server.last_body == expected


async def test_sampling_fields_are_reported_as_biases() -> None:
    fields = {
        "allowed_token_ids": [5],
        "x_new": False,
        "bad_words": [],
        "logit_bias": None,
        "min_tokens": 3,
        "user": "u",
    }
    server = StandIn(answer_with(message({"content": "a"})))
    async with serving(server), relay_of(server) as relay:
        free = await ask_chat(relay, BODY | fields)
        pinned = await ask_chat(relay, BODY | fields, sampling=Sampling())
        plain = await ask_chat(relay, BODY)
    assert free[0].biases == ("field allowed_token_ids", "field x_new", "field min_tokens")
    assert pinned[0].biases == ("field allowed_token_ids", "field x_new")  # min_tokens is set by the gateway
    assert not any(chunk.biases for chunk in plain)


async def test_stream_yields_text_reasoning_and_usage() -> None:
    chunks = await relayed(
        answer_stream(
            event(part({"role": "assistant", "content": ""})) + event(part({"reasoning": "hm"})),
            0.02,
            event(part({"reasoning_content": "m"})) + event(part({"content": "grü"})),
            0.02,
            event(part({"content": "ße"})) + event(part({}, "stop")),
            event({"id": "c", "choices": [], "usage": USAGE}) + DONE,
        )
    )
    assert events_of(chunks) == [
        Delta("reasoning", "hm"),
        Delta("reasoning", "m"),
        Delta("content", "grü"),
        Delta("content", "ße"),
    ]
    assert (chunks[-1].finish, chunks[-1].usage) == ("stop", Usage(11, 5, 4, 2))
    assert all(chunk.ids is None and chunk.logprobs is None for chunk in chunks)


async def test_duplicate_reasoning_fields_are_merged() -> None:
    chunks = await relayed(answer_stream(event(part({"reasoning": "a", "reasoning_content": "a"}, "stop")), DONE))
    assert events_of(chunks) == [Delta("reasoning", "a")]


async def test_vllm_token_data() -> None:
    """`prompt_token_ids` at the top of the first event, `token_ids` on the choice, log-probabilities per token."""
    chunks = await relayed(
        answer_stream(
            event(part({"role": "assistant", "content": ""}) | {"prompt_token_ids": [1, 2, 3]}),
            0.02,
            event(part({"content": "a"}, token_ids=[5], logprobs=logprobs(-0.1))),
            event(part({}, token_ids=[6, 7], logprobs=logprobs(-0.2, -9999.0))),  # held back by a parser
            0.02,
            event(part({"content": "b"}, "length", token_ids=[8], logprobs=logprobs(-0.4))),
            DONE,
        )
    )
    assert [token for chunk in chunks for token in chunk.ids or ()] == [5, 6, 7, 8]
    assert [value for chunk in chunks for value in chunk.logprobs or ()] == [-0.1, -0.2, None, -0.4]
    assert [chunk.prompt for chunk in chunks if chunk.prompt] == [[1, 2, 3]]
    assert chunks[-1].finish == "length"


async def test_non_streaming_response() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "bash", "arguments": '{"c": 1}'}}
    said = {"content": "text", "reasoning": "why", "tool_calls": [call]}
    body = message(said, "tool_calls", token_ids=[5, 6], logprobs=logprobs(-0.1, -0.2)) | {"prompt_token_ids": [1]}
    chunks = await relayed(answer_with(body), BODY)
    assert events_of(chunks) == [
        Delta("reasoning", "why"),
        Delta("content", "text"),
        CallDelta(0, ToolCall("a", "bash", '{"c": 1}')),
    ]
    assert (chunks[0].ids, chunks[0].logprobs, chunks[0].prompt) == ([5, 6], [-0.1, -0.2], [1])
    assert (chunks[-1].finish, chunks[-1].usage) == ("tool_calls", Usage(11, 5, 4, 2))


async def test_logprobs_without_ids() -> None:
    chunks = await relayed(answer_stream(event(part({"content": "a"}, "stop", logprobs=logprobs(-0.1))), DONE))
    assert (chunks[0].ids, chunks[0].logprobs) == (None, [-0.1])


async def test_ids_without_logprobs() -> None:
    chunks = await relayed(answer_stream(event(part({"content": "a"}, "stop", token_ids=[5])), DONE))
    assert (chunks[0].ids, chunks[0].logprobs) == ([5], [None])


async def test_logprob_count_mismatch_raises() -> None:
    with pytest.raises(EngineError, match="different numbers of log-probabilities"):
        await relayed(answer_stream(event(part({}, "stop", token_ids=[5, 6], logprobs=logprobs(-0.1))), DONE))


def fragment(index: int | None, name: str | None, arguments: str | None, id: str | None = None) -> dict[str, Any]:
    call: dict[str, Any] = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return call if index is None else call | {"index": index}


async def test_tool_call_fragments_are_joined() -> None:
    chunks = await relayed(
        answer_stream(
            event(part({"tool_calls": [fragment(0, "bash", "", "a")]})),
            0.02,
            event(part({"tool_calls": [fragment(0, None, '{"cmd": "l')]})),
            0.02,
            event(part({"tool_calls": [fragment(0, None, 's"}')]})),
            0.02,
            event(part({"tool_calls": [fragment(1, "read", None, "b"), fragment(2, "write", "{}", "c")]})),
            0.02,
            event(part({}, "tool_calls")),
            DONE,
        )
    )
    first, second, third = (
        CallDelta(0, ToolCall("a", "bash", '{"cmd": "ls"}')),
        CallDelta(1, ToolCall("b", "read", "")),
        CallDelta(2, ToolCall("c", "write", "{}")),
    )
    assert [chunk.events for chunk in chunks if chunk.events] == [(first, second), (third,)]
    assert chunks[-1].finish == "tool_calls"


async def test_tool_calls_without_distinct_indices() -> None:
    for index in (None, 0):
        calls = [fragment(index, "bash", "{}", "a"), fragment(index, "read", "{}", "b")]
        chunks = await relayed(answer_stream(event(part({"tool_calls": calls}, "stop")), DONE))
        assert events_of(chunks) == [
            CallDelta(0, ToolCall("a", "bash", "{}")),
            CallDelta(1, ToolCall("b", "read", "{}")),
        ]


async def test_custom_call_fragments_are_joined() -> None:
    pieces = [{"name": "patch", "input": ""}, {"input": "*** Begin"}, {"input": "\n"}]
    calls = [{"index": 0, "id": "a" if n == 0 else None, "type": "custom", "custom": c} for n, c in enumerate(pieces)]
    events = [event(part({"tool_calls": [call]})) for call in calls]
    chunks = await relayed(answer_stream(*events, event(part({}, "tool_calls")), DONE))
    assert events_of(chunks) == [CallDelta(0, ToolCall("a", "patch", '{"input":"*** Begin\\n"}'))]


async def test_deprecated_function_call_is_a_call() -> None:
    pieces = [{"name": "bash", "arguments": ""}, {"arguments": '{"cmd": '}, {"arguments": '"ls"}'}]
    events = [event(part({"function_call": piece})) for piece in pieces]
    chunks = await relayed(answer_stream(*events, event(part({}, "function_call")), DONE))
    [call] = events_of(chunks)
    assert isinstance(call, CallDelta) and (call.call.name, call.call.arguments) == ("bash", '{"cmd": "ls"}')
    assert chunks[-1].finish == "tool_calls"


async def test_missing_tool_call_id_is_generated() -> None:
    [call] = events_of(
        await relayed(answer_stream(event(part({"tool_calls": [fragment(0, "bash", "{}")]}, "stop")), DONE))
    )
    assert isinstance(call, CallDelta) and call.call.id.startswith("call_")


async def test_fragment_for_completed_call_raises() -> None:
    calls = [fragment(0, "a", "{", "a"), fragment(1, "b", "{}", "b"), fragment(0, None, "}")]
    with pytest.raises(EngineError, match="tool call that was already complete"):
        await relayed(answer_stream(event(part({"tool_calls": calls}, "stop")), DONE))


async def test_other_choices_are_ignored() -> None:
    other = part({"content": "no"}, "stop", index=1, token_ids=[9])
    chunks = await relayed(answer_stream(event(other), event(part({"content": "yes"}, "stop")), DONE))
    assert events_of(chunks) == [Delta("content", "yes")] and chunks[0].ids is None


async def test_refusal_becomes_text() -> None:
    assert events_of(await relayed(answer_stream(event(part({"refusal": "no"}, "content_filter")), DONE))) == [
        Delta("content", "no")
    ]


class StrictServer(StandIn):
    """Rejects the given fields, as strict endpoints do."""

    def __init__(self, *unknown: str, status: int = 400) -> None:
        super().__init__(self.respond)
        self.unknown = unknown
        self.status = status

    async def respond(self, request: Any) -> Any:
        for field in self.unknown:
            if field in self.last_body:
                error = {"message": f"Unrecognized request argument supplied: {field}", "type": "invalid_request_error"}
                return await answer_with({"error": error}, self.status)(request)
        return await answer_stream(event(part({"content": "ok"}, "stop")), DONE)(request)


@pytest.mark.parametrize(
    ("unknown", "level", "calls"),
    [
        ((), "tokens", 1),
        (("return_token_ids",), "logprobs", 2),
        (("return_token_ids", "logprobs"), "text", 3),
        (("logprobs",), "text", 2),
        (("min_p",), "logprobs", 2),
        (("return_token_ids", "stream_options"), "logprobs", 3),
    ],
)
@pytest.mark.parametrize("status", [400, 422])
async def test_auto_capture_steps_down_and_remembers(
    unknown: tuple[str, ...], level: Capture, calls: int, status: int
) -> None:
    server = StrictServer(*unknown, status=status)
    async with serving(server), relay_of(server) as relay:
        body = BODY | {"stream": True}
        assert events_of(await ask_chat(relay, body, sampling=Sampling())) == [Delta("content", "ok")]
        assert (relay.capture, len(server.bodies)) == (level, calls)
        await ask_chat(relay, body, sampling=Sampling())
        assert len(server.bodies) == calls + 1  # remembered, so no retries
        assert not set(server.last_body) & set(unknown)
        assert server.last_body["messages"] == BODY["messages"] and server.last_body["metadata"] == BODY["metadata"]
        assert relay._client.in_flight == 0


async def test_concurrent_calls_step_down_together() -> None:
    server = StrictServer("return_token_ids", "logprobs")
    async with serving(server), relay_of(server) as relay:
        runs = await asyncio.gather(*(ask_chat(relay, BODY | {"stream": True}) for _ in range(8)))
        assert all(events_of(run) == [Delta("content", "ok")] for run in runs)
        assert relay.capture == "text"


async def test_fixed_capture_level_does_not_step_down() -> None:
    server = StrictServer("return_token_ids")
    async with serving(server), relay_of(server, capture="tokens") as relay:
        with pytest.raises(EngineRejected, match="return_token_ids"):
            await ask_chat(relay, BODY)
    assert len(server.bodies) == 1


async def test_unrelated_rejection_reaches_agent() -> None:
    server = StandIn(answer_with({"error": {"message": "tools[0].name is too long"}}, 400))
    async with serving(server), relay_of(server) as relay:
        with pytest.raises(EngineRejected, match=r"tools\[0\]"):
            await ask_chat(relay, BODY)
        assert relay.capture == "tokens" and len(server.bodies) == 1


async def test_error_responses_map_to_exceptions() -> None:
    overflow = {"error": {"message": "too long", "code": "context_length_exceeded"}}
    with pytest.raises(ContextOverflow):
        await relayed(answer_with(overflow, 400))
    with pytest.raises(EngineBusy):
        await relayed(answer_with({"error": {"message": "quota"}}, 429))
    with pytest.raises(EngineError, match="rejected the gateway's API key"):
        await relayed(answer_with({"error": {"message": "Incorrect API key provided: sk-se***et"}}, 401))
    with pytest.raises(EngineError, match="boom"):
        await relayed(answer_stream(event({"error": {"message": "boom", "code": "server_error"}}), DONE))
    with pytest.raises(EngineUnavailable):
        await relayed(answer_stream(event(part({"content": "a"})), DONE))
    with pytest.raises(EngineUnavailable):
        await relayed(answer_stream(event(part({"content": "a"})), 0.02, cut=True))
    with pytest.raises(EngineTimeout):
        await relayed(answer_stream(event(part({"content": "a"})), 3600.0), silence_s=0.1)
    with pytest.raises(EngineError, match="cannot be decoded"):
        await relayed(answer_with("not json"), BODY)
    with pytest.raises(EngineError, match="cannot be decoded"):
        await relayed(answer_with('{"x": ' + "[" * 5000), BODY)
    server = StandIn()
    async with serving(server), relay_of(server) as relay:
        with pytest.raises(BadRequest):
            async with relay.relay(RelayRequest(call=call_of(b"[]"))) as chunks:
                await anext(chunks)
        with pytest.raises(BadRequest, match="stream_options"):
            await ask_chat(relay, BODY | {"stream": True, "stream_options": [1]})


async def test_early_exit_closes_connection() -> None:
    server = StandIn(answer_stream(event(part({"content": "a"})), 3600.0))
    async with serving(server), relay_of(server) as relay:
        async with relay.relay(RelayRequest(call=call_of(json.dumps(BODY | {"stream": True}).encode()))) as chunks:
            await anext(chunks)
        await asyncio.wait_for(server.hung_up.wait(), scaled(2))


async def test_health_with_base_url_variants() -> None:
    models: dict[str, Any] = {"data": [{"id": "m", "max_model_len": 99}]}
    server = StandIn(documents={"/v1/models": models, "/api/models": {"data": []}})
    async with serving(server):
        for url, model in ((server.url, "m"), (server.url + "/v1/", "m"), (server.url + "/api", "")):
            relay = OpenAIRelay(url, "sk-secret")
            assert "sk-secret" not in repr(relay)
            await relay.start()
            [health] = await relay.health()
            assert health.ok and health.model == model
            await relay.close()
        relay = OpenAIRelay(server.url + "/nowhere")
        await relay.start()
        [health] = await relay.health()
        assert not health.ok
        await relay.close()


# ── foreign dialects ────────────────────────────────────────────────────────────────────────────────────────────────────

HI = Message("user", "hi")
OK = answer_stream(event(part({"content": "ok"}, "stop")), DONE)


def make_relay(url: str) -> OpenAIRelay:
    return OpenAIRelay(url, "sk-secret")


async def test_repeated_call_ids_are_made_unique() -> None:
    ids = ("a", "a_2", "a", "a", "a_3")  # `a_2` is also what the second `a` would be renamed to
    asked = [Message("assistant", tool_calls=(ToolCall(one, "bash", "{}"),)) for one in ids]
    results = [Message("tool", "out", tool_call_id=one) for one in ids]
    pairs = [message for pair in zip(asked, results, strict=True) for message in pair]
    translated = [entry.message for entry in read_messages(RelayRequest(call=foreign_call(*pairs)))]
    sent = [message.tool_calls[0].id for message in translated[::2]]
    assert len(set(sent)) == len(ids)
    assert [message.tool_call_id for message in translated[1::2]] == sent


@pytest.mark.parametrize("index", [0, 2, 4])
async def test_call_ids_of_verbatim_turns_are_not_reused(index: int) -> None:
    """The endpoint's own ids cannot be renamed, so other turns get different ones."""
    asked = Message("assistant", tool_calls=(ToolCall("a", "bash", "{}"),))
    call = foreign_call(*[asked, Message("tool", "out", tool_call_id="a")] * 3)
    request = RelayRequest(call=call, verbatim={index: encode_verbatim({}, ["a"])})
    translated = [entry.message for entry in read_messages(request)]
    sent = [message.tool_calls[0].id for message in translated[::2]]
    assert len(set(sent)) == 3 and sent[index // 2] == "a"
    assert [message.tool_call_id for message in translated[1::2]] == sent


async def test_foreign_dialect_is_translated() -> None:
    call = foreign_call(
        Message("system", "Be brief."),
        Message("system", "Be kind."),
        Message("user", "hi", name="ann"),
        Message("assistant", "", "why", (ToolCall("a", "bash", '{"c": 1}'), ToolCall("a", "read", ""))),
        (Message("tool", "out", tool_call_id="a"), Message("user", "go on")),
        Message("system", "Time passes."),
        tools=[TOOL, OTHER],
        stop=("X",),
        sampling={"temperature": 0.3, "top_k": 5},
        parallel_tool_calls=False,
        forwarded_headers={"openai-beta": "not for this dialect"},
    )
    async with serving(StandIn(OK)) as server, started(make_relay(server.url)) as relay:
        chunks = await relay_call(relay, call, max_tokens=50, session="s")
    calls = [
        {"id": "a", "type": "function", "function": {"name": "bash", "arguments": '{"c": 1}'}},
        {"id": "a_1", "type": "function", "function": {"name": "read", "arguments": "{}"}},  # ids are made unique
    ]
    assert server.last_body == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief.\n\nBe kind."},
            {"role": "user", "content": "hi", "name": "ann"},
            {"role": "assistant", "content": None, "reasoning_content": "why", "tool_calls": calls},
            {"role": "tool", "content": "out", "tool_call_id": "a_1"},
            {"role": "user", "content": "go on"},
            {"role": "system", "content": "Time passes."},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "logprobs": True,
        "max_tokens": 50,
        "stop": ["X"],
        "tools": [TOOL, OTHER],
        "parallel_tool_calls": False,
        "temperature": 0.3,
        "top_k": 5,
    }
    assert (
        lost_fields(chunks) == ()
        and server.headers[0]["X-Session-ID"] == "s"
        and "openai-beta" not in server.headers[0]
    )


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        (
            {"constraint": Constraint("tool", {}, "bash")},
            {"tool_choice": {"type": "function", "function": {"name": "bash"}}},
        ),
        ({"constraint": require_tools("bash", "read")}, {"tool_choice": "required"}),
        (
            {"constraint": require_tools("bash")},
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [{"type": "function", "function": {"name": "bash"}}],
                    },
                }
            },
        ),
        ({"constraint": Constraint("json_object")}, {"response_format": {"type": "json_object"}}),
        (
            {"constraint": Constraint("json_schema", {"type": "object"})},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}},
                }
            },
        ),
        (
            {"template_hints": {"reasoning_effort": "high", "verbosity": "low", "enable_thinking": True}},
            {"reasoning_effort": "high", "verbosity": "low"},
        ),
        ({"template_hints": {"enable_thinking": False}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"a": 1}}),
    ],
)
async def test_constraints_and_thinking_are_translated(fields: Any, body: Any) -> None:
    async with serving(StandIn(OK)) as server, started(OpenAIRelay(server.url, capture="text")) as relay:
        chunks = await relay_call(relay, foreign_call(HI, tools=[TOOL, OTHER], **fields))
    rest = {
        k: v for k, v in server.last_body.items() if k not in ("model", "messages", "stream", "stream_options", "tools")
    }
    assert rest == body and lost_fields(chunks) == ()


async def test_fields_unknown_to_endpoint_are_dropped_and_reported() -> None:
    server = StrictServer(
        "return_token_ids", "logprobs", "reasoning_effort", "chat_template_kwargs", "verbosity", "temperature"
    )
    hints = {"reasoning_effort": "none", "verbosity": "low", "thinking_budget": 9}
    call = foreign_call(HI, template_hints=hints, sampling={"temperature": 0.5, "min_p": 0.1, "top_p": 0.9})
    async with serving(server), started(make_relay(server.url)) as relay:
        chunks = await relay_call(relay, call)
        assert lost_fields(chunks) == (
            "reasoning_effort",
            "verbosity",
            "thinking_budget",
            "chat_template_kwargs",
            "temperature",
            "min_p",
        )
        assert set(server.last_body) == {"model", "messages", "stream", "stream_options", "top_p"}
        calls = len(server.bodies)
        await relay_call(relay, call)
        assert len(server.bodies) == calls + 1


class RejectingServer(StandIn):
    """Rejects bodies that contain a given string, with a given message."""

    def __init__(self, *refusals: tuple[str, str]) -> None:
        super().__init__(self.respond)
        self.refused = refusals

    async def respond(self, request: Any) -> Any:
        for sign, words in self.refused:
            if sign in self.bodies[-1].decode():
                return await answer_with({"error": {"message": words}}, 400)(request)
        return await OK(request)


async def test_rejected_fields_use_alternative_encodings() -> None:
    server = RejectingServer(
        ('"max_tokens"', "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."),
        ('"reasoning_content"', "Additional properties are not allowed ('reasoning_content' was unexpected)"),
        ('"role":"system","content":"Later."', "System message must be at the beginning."),
    )
    call = foreign_call(HI, Message("assistant", "a", "why"), Message("system", "Later."))
    async with serving(server), started(make_relay(server.url)) as relay:
        chunks = await relay_call(relay, call, max_tokens=9)
    assert server.last_body["max_completion_tokens"] == 9 and "max_tokens" not in server.last_body
    assert server.last_body["messages"][1:] == [
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "Later."},
    ]
    assert lost_fields(chunks) == ("reasoning of earlier turns", "the role of later system messages")


@pytest.mark.parametrize(
    "words",
    [
        "This model's maximum context length is 4096 tokens. However, you requested 3000 output tokens and your prompt contains "
        "at least 2000 input tokens, for a total of at least 5000 tokens. Please reduce the length of the input prompt.",
        "'max_tokens' or 'max_completion_tokens' is too large: 3000. This model's maximum context length is 4096 tokens and your "
        "request has 2000 input tokens (3000 > 4096 - 2000).",
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens (2000 in the messages, 3000 in "
        "the completion).",
        "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total of 5000 tokens: "
        "2000 tokens from the input messages and 3000 tokens for the completion.",
    ],
)
async def test_max_tokens_is_reduced_to_fit_context(words: str) -> None:
    """Agents request their own provider's maximum, which exceeds most context lengths."""
    server = RejectingServer(("3000", words))
    async with serving(server), started(make_relay(server.url)) as relay:
        await relay_call(relay, foreign_call(HI), max_tokens=3000)
        assert server.last_body["max_tokens"] == 2096
        with pytest.raises(ContextOverflow) as caught:  # native requests are not changed
            await relay_call(relay, call_of(json.dumps(BODY | {"max_tokens": 3000}).encode()))
        assert (caught.value.limit, caught.value.size) == (4096, 5000)


async def test_reasoning_is_restored_for_foreign_dialect() -> None:
    made = [fragment(0, "bash", "{}", "a")]
    answer = answer_stream(
        event(part({"reasoning": "why"})), event(part({"content": "x", "tool_calls": made}, "stop")), DONE
    )
    chunks = await relay_answer(make_relay, answer, foreign_call(HI))
    assert chunks[-1].finish == "tool_calls"  # corrected from "stop"
    turn = Message("assistant", "x", tool_calls=(ToolCall("renamed", "bash", "{}"),))
    call = foreign_call(HI, turn, Message("tool", "out", tool_call_id="renamed"))
    async with serving(StandIn(OK)) as server, started(make_relay(server.url)) as relay:
        await relay_call(relay, call, verbatim={1: chunks[-1].verbatim})
    calls = [{"id": "a", "type": "function", "function": {"name": "bash", "arguments": "{}"}}]
    assert server.last_body["messages"][1:] == [
        {"role": "assistant", "content": "x", "reasoning_content": "why", "tool_calls": calls},
        {"role": "tool", "content": "out", "tool_call_id": "a"},
    ]
    assert (await relayed(answer))[-1].verbatim == b""  # not kept for the native dialect


async def test_completed_call_carries_no_new_ids() -> None:
    """Ids are None if the call's fragments had none."""
    for ids, expected in (([6], []), (None, None)):
        made = part({"tool_calls": [fragment(0, "bash", "{}", "a")]}, token_ids=ids)
        chunks = await relayed(
            answer_stream(event(part({"content": "x"}, token_ids=[5])), event(made), event(part({}, "stop")), DONE)
        )
        assert [isinstance(said, CallDelta) for said in chunks[-1].events] == [True] and chunks[-1].ids == expected


async def test_finish_reasons() -> None:
    chunks = await relayed(answer_stream(event(part({"content": "x"}, "stop", stop_reason="X")), DONE))
    assert (chunks[-1].finish, chunks[-1].stopped_by) == ("stop", "X")
    chunks = await relayed(answer_stream(event(part({"content": "x"}, "stop", stop_reason=128009)), DONE))
    assert chunks[-1].stopped_by == ""
    chunks = await relayed(answer_stream(event(part({"content": "x"}, "content_filter")), DONE))
    assert (chunks[-1].finish, chunks[-1].fault) == ("stop", "openai withheld the answer (content_filter)")
    for reason in ("abort", "error", "insufficient_system_resource"):
        assert (await relayed(answer_stream(event(part({"content": "x"}, reason)), DONE)))[-1].finish == "abort"


async def test_forwarded_headers_exclude_credentials() -> None:
    forwarded = {"openai-beta": "b", "authorization": "Bearer tg-agent", "Cookie": "c"}
    call = Call(model="", history=ChatHistory([]), body=json.dumps(BODY).encode(), forwarded_headers=forwarded)
    async with (
        serving(StandIn(answer_with(message({"content": "x"})))) as server,
        started(make_relay(server.url)) as relay,
    ):
        await relay_call(relay, call)
    assert server.headers[0].getall("Authorization") == ["Bearer sk-secret"] and "Cookie" not in server.headers[0]
    assert server.headers[0]["openai-beta"] == "b"


async def test_count_is_not_supported() -> None:
    async with started(make_relay("http://127.0.0.1:1")) as relay:
        with pytest.raises(NotFound, match="estimate"):
            await relay.count(RelayRequest(call=foreign_call(HI)))
