"""Tests for the relay to OpenAI's Responses API: requests, streams, errors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.engines.providers import named_event
from tests.engines.relays import (
    OTHER,
    TOOL,
    Json,
    events_of,
    foreign_call,
    lost_fields,
    native_call,
    relay_answer,
    relay_call,
    require_tools,
    started,
)
from tests.engines.standins import Answer, StandIn, answer_stream, answer_with, serving
from tests.speed import scaled
from turngate.engines.base import RelayRequest
from turngate.engines.observe.responses import ResponsesRelay
from turngate.errors import (
    BadRequest,
    ContextOverflow,
    EngineBusy,
    EngineError,
    EngineRejected,
    EngineUnavailable,
    NotFound,
    TurngateError,
)
from turngate.types import CallDelta, Constraint, Delta, Message, Sampling, ToolCall, Usage

BODY: dict[str, Any] = {"model": "agent's", "input": [{"role": "user", "content": "hi"}]}
HI = Message("user", "hi")
SEALS = "reasoning.encrypted_content"
USAGE = {
    "input_tokens": 11,
    "input_tokens_details": {"cached_tokens": 4},
    "output_tokens": 5,
    "output_tokens_details": {"reasoning_tokens": 2},
    "total_tokens": 16,
}


def make_relay(url: str) -> ResponsesRelay:
    return ResponsesRelay(url, "sk-secret")


def stream(*events: Json) -> Answer:
    return answer_stream(*(named_event(event) for event in events))


def delta(kind: str, text: str, **fields: Json) -> Json:
    return {"type": f"response.{kind}.delta", "item_id": "x", "output_index": 0, "delta": text, **fields}


def done(item: Json) -> Json:
    return {"type": "response.output_item.done", "output_index": 0, "item": item}


def over(status: str = "completed", **fields: Json) -> Json:
    response = {"id": "resp_1", "status": status, "error": None, "incomplete_details": None, "usage": USAGE, **fields}
    return {"type": f"response.{status}", "response": response}


def message(text: str, **fields: Json) -> Json:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content, **fields}


OK = stream(delta("output_text", "ok"), done(message("ok")), over())


# ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_native_request_is_forwarded_verbatim() -> None:
    first = b'{"role":"user",  "content":[{"type":"input_image","image_url":"data:\\u00e9"}],"id":"msg_codex-1"}'
    tool = b'{"type":"custom",  "name":"patch","format":{"type":"text"}}'
    raw = (
        b'{"model":"a","input":[' + first + b'],"tools":[' + tool + b',{"type":"web_search"}],"temperature":0.2,'
        b'"prompt_cache_key":"k","store":false,"include":["web_search_call.results"],"x":{"a":[1]}}'
    )
    forwarded = {"openai-beta": "b", "Authorization": "Bearer tg-agent"}
    async with serving(StandIn(OK)) as server, started(make_relay(server.url)) as relay:
        chunks = await relay_call(
            relay,
            native_call("responses", raw, forwarded_headers=forwarded),
            model="m",
            sampling=Sampling(top_p=0.5),
            max_tokens=20,
        )
        assert server.paths == ["/v1/responses"]
        assert first in server.bodies[0] and tool in server.bodies[0]  # forwarded without re-encoding
        body_sent = server.last_body
        assert (body_sent["model"], body_sent["max_output_tokens"], body_sent["top_p"], body_sent["stream"]) == (
            "m",
            20,
            0.5,
            True,
        )
        assert "temperature" not in body_sent and (body_sent["prompt_cache_key"], body_sent["store"]) == ("k", False)
        assert body_sent["include"] == ["web_search_call.results", SEALS] and body_sent["x"] == {"a": [1]}
        assert [tool["type"] for tool in body_sent["tools"]] == ["custom"] and lost_fields(chunks) == (
            "the tool web_search",
        )
        assert (
            server.headers[0].getall("Authorization") == ["Bearer sk-secret"]
            and server.headers[0]["openai-beta"] == "b"
        )
        await relay_call(relay, native_call("responses", {"input": "hi"}))
        assert server.last_body == {"input": "hi", "stream": True, "include": [SEALS]}


async def test_items_are_sent_with_endpoint_ids() -> None:
    """The agent holds the gateway's ids; the encrypted content carries the endpoint's."""
    mark = "tg" + "0" * 24
    items = [
        {"type": "reasoning", "id": f"rs_{mark}00", "summary": [], "encrypted_content": "rs_68a:gAAA:B=="},
        {"type": "message", "id": f"msg_{mark}01", "role": "assistant", "content": []},
        {"type": "function_call", "id": f"fc_{mark}02", "call_id": "call_1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "id": "fco_codex", "call_id": "call_1", "output": "x"},
        {"type": "reasoning", "id": f"rs_{mark}00", "summary": [], "encrypted_content": "tg1.abc"},
        {"type": "reasoning", "id": "rs_other", "summary": [], "encrypted_content": "gAAA"},
        "no item",
    ]
    async with serving(StandIn(OK)) as server, started(make_relay(server.url)) as relay:
        await relay_call(relay, native_call("responses", BODY | {"input": items}))
    assert server.last_body["input"] == [
        {"type": "reasoning", "id": "rs_68a", "summary": [], "encrypted_content": "gAAA:B=="},
        {"type": "message", "role": "assistant", "content": []},
        {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
        items[3],
        {"type": "reasoning", "summary": []},  # the gateway's own encrypted content is removed
        items[5],
        "no item",
    ]


async def test_foreign_dialect_is_translated() -> None:
    call = foreign_call(
        Message("system", "Be brief."),
        Message("user", "hi", name="ann"),
        Message("assistant", "Looking.", tool_calls=(ToolCall("a", "bash", '{"c": 1}'), ToolCall("b", "read", "[1]"))),
        (Message("tool", "out", tool_call_id="a"), Message("tool", "", tool_call_id="b"), Message("user", "go on")),
        Message("system", "Time passes."),
        tools=[TOOL, OTHER],
        sampling={"temperature": 0.3, "top_k": 5},
        parallel_tool_calls=False,
    )
    async with serving(StandIn(OK)) as server, started(make_relay(server.url)) as relay:
        chunks = await relay_call(relay, call, max_tokens=50)
    user_message = {"type": "message", "role": "user"}
    assert server.last_body == {
        "model": "m",
        "stream": True,
        "store": False,
        "instructions": "Be brief.",
        "input": [
            {**user_message, "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]},
            {"type": "function_call", "call_id": "a", "name": "bash", "arguments": '{"c": 1}'},
            {"type": "function_call", "call_id": "b", "name": "read", "arguments": "[1]"},
            {"type": "function_call_output", "call_id": "a", "output": "out"},
            {"type": "function_call_output", "call_id": "b", "output": ""},
            {**user_message, "content": [{"type": "input_text", "text": "go on"}]},
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Time passes."}]},
        ],
        "include": [SEALS],
        "max_output_tokens": 50,
        "tools": [
            {
                "type": "function",
                "name": "bash",
                "description": "Runs.",
                "parameters": {"type": "object"},
                "strict": False,
            },
            {
                "type": "function",
                "name": "read",
                "description": None,
                "parameters": {"type": "object"},
                "strict": False,
            },
        ],
        "parallel_tool_calls": False,
        "reasoning": {"summary": "auto"},
        "temperature": 0.3,
    }
    assert lost_fields(chunks) == ("names of users", "top_k")


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        ({"constraint": Constraint("tool", {}, "bash")}, {"tool_choice": {"type": "function", "name": "bash"}}),
        ({"constraint": require_tools("bash", "read")}, {"tool_choice": "required"}),
        (
            {"constraint": require_tools("bash")},
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "bash"}],
                }
            },
        ),
        ({"constraint": Constraint("json_object")}, {"text": {"format": {"type": "json_object"}}}),
        (
            {"constraint": Constraint("json_schema", {"type": "object"})},
            {
                "text": {
                    "format": {"type": "json_schema", "name": "answer", "schema": {"type": "object"}, "strict": False}
                }
            },
        ),
        ({"template_hints": {"reasoning_effort": "high"}}, {"reasoning": {"summary": "auto", "effort": "high"}}),
        ({"template_hints": {"enable_thinking": False}}, {"reasoning": {"effort": "none"}}),
    ],
)
async def test_constraints_and_thinking_are_translated(fields: Json, body: Json) -> None:
    async with serving(StandIn(OK)) as server, started(make_relay(server.url)) as relay:
        chunks = await relay_call(relay, foreign_call(HI, tools=[TOOL, OTHER], **fields))
    usual = ("model", "stream", "store", "input", "include", "tools")
    rest = {name: value for name, value in server.last_body.items() if name not in usual}
    assert rest == {"reasoning": {"summary": "auto"}} | body and lost_fields(chunks) == ()


async def test_unsupported_parameters_are_rejected() -> None:
    with pytest.raises(BadRequest, match="stop strings"):
        await relay_answer(make_relay, OK, foreign_call(HI, stop=("X",)))
    with pytest.raises(
        EngineRejected, match=r"pins sampling settings that the responses endpoint does not support \(top_k\)"
    ):
        await relay_answer(make_relay, OK, native_call("responses", BODY), sampling=Sampling(top_k=5))


class StrictServer(StandIn):
    def __init__(self, *refusals: tuple[str, str]) -> None:
        super().__init__(self.respond)
        self.refused = refusals

    async def respond(self, request: Any) -> Any:
        for sign, words in self.refused:
            if sign in self.bodies[-1].decode():
                return await answer_with({"error": {"message": words, "type": "invalid_request_error"}}, 400)(request)
        return await OK(request)


async def test_parameters_unknown_to_model_are_dropped_and_reported() -> None:
    server = StrictServer(
        (SEALS, "Encrypted content is not supported with this model."),
        ('"effort"', "Unsupported parameter: 'reasoning.effort' is not supported with this model."),
        ('"summary"', "Unsupported parameter: 'reasoning.summary' is not supported with this model."),
        ('"temperature"', "Unsupported parameter: 'temperature' is not supported with this model."),
    )
    call = foreign_call(HI, template_hints={"reasoning_effort": "high"}, sampling={"temperature": 0.5})
    async with serving(server), started(make_relay(server.url)) as relay:
        chunks = await relay_call(relay, call)
        assert lost_fields(chunks) == ("reasoning_effort", "temperature")
        assert set(server.last_body) == {"model", "stream", "store", "input"}
        await relay_call(relay, native_call("responses", BODY, model="m"))
        assert "include" not in server.last_body and len(server.bodies) == 6


# ── responses ───────────────────────────────────────────────────────────────────────────────────────────────────────────

REASONING = {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": "gAAA"}
CALL = {
    "id": "fc_1",
    "type": "function_call",
    "status": "completed",
    "call_id": "call_1",
    "name": "bash",
    "arguments": '{"c": 1}',
}
ANSWER = stream(
    {"type": "response.created", "response": {"id": "resp_1"}},
    {"type": "response.in_progress", "response": {"id": "resp_1"}},
    {"type": "response.output_item.added", "output_index": 0, "item": {"type": "reasoning", "id": "rs_1"}},
    {"type": "response.reasoning_summary_part.added", "summary_index": 0},
    delta("reasoning_summary_text", "hm"),
    {"type": "response.reasoning_summary_part.added", "summary_index": 1},
    delta("reasoning_summary_text", "so"),
    done(REASONING),
    delta("output_text", "grü", logprobs=[]),
    delta("output_text", "ße", logprobs=[]),
    done(message("grüße")),
    delta("function_call_arguments", '{"c"'),
    {"type": "response.function_call_arguments.done", "arguments": '{"c": 1}', "name": "bash"},
    done(CALL),
    over(),
)


async def test_stream_yields_text_reasoning_calls_and_usage() -> None:
    chunks = await relay_answer(make_relay, ANSWER, native_call("responses", BODY))
    assert events_of(chunks) == [
        Delta("reasoning", "hm"),
        Delta("reasoning", "\n\n"),
        Delta("reasoning", "so"),
        Delta("signature", "rs_1:gAAA"),
        Delta("content", "grü"),
        Delta("content", "ße"),
        CallDelta(0, ToolCall("call_1", "bash", '{"c": 1}')),
    ]
    assert (chunks[-1].finish, chunks[-1].usage, chunks[-1].verbatim) == ("tool_calls", Usage(11, 5, 4, 2), b"")


async def test_call_kinds_map_to_tool_names() -> None:
    answer = stream(
        done({**CALL, "namespace": "multi_agent"}),
        done({"id": "ctc_1", "type": "custom_tool_call", "call_id": "call_2", "name": "patch", "input": '*** "x"'}),
        done(
            {
                "id": "tsc_1",
                "type": "tool_search_call",
                "call_id": "call_3",
                "arguments": {"q": 1},
                "execution": "client",
            }
        ),
        over(),
    )
    calls = [
        event.call
        for event in events_of(await relay_answer(make_relay, answer, native_call("responses", BODY)))
        if isinstance(event, CallDelta)
    ]
    assert calls == [
        ToolCall("call_1", "multi_agent__bash", '{"c": 1}'),
        ToolCall("call_2", "patch", '{"input":"*** \\"x\\""}'),
        ToolCall("call_3", "tool_search", '{"q": 1}'),
    ]


async def test_sealed_turn_is_replayed_verbatim_for_foreign_dialect() -> None:
    chunks = await relay_answer(make_relay, ANSWER, foreign_call(HI))
    assert not [event for event in events_of(chunks) if isinstance(event, Delta) and event.kind == "signature"]
    turn = Message("assistant", "grüße", tool_calls=(ToolCall("renamed", "bash", '{"c":1}'),))
    call = foreign_call(HI, turn, Message("tool", "1", tool_call_id="renamed"))
    async with serving(StandIn(OK)) as server, started(make_relay(server.url)) as relay:
        await relay_call(relay, call, verbatim={1: chunks[-1].verbatim})
    result = {"type": "function_call_output", "call_id": "call_1", "output": "1"}
    assert server.last_body["input"][1:] == [REASONING, message("grüße"), CALL, result]


async def test_message_phase_is_preserved() -> None:
    commentary = message("x", phase="commentary")
    chunks = await relay_answer(
        make_relay, stream(delta("output_text", "x"), done(commentary), over()), foreign_call(HI)
    )
    async with serving(StandIn(OK)) as server, started(make_relay(server.url)) as relay:
        await relay_call(relay, foreign_call(HI, Message("assistant", "x"), HI), verbatim={1: chunks[-1].verbatim})
    assert server.last_body["input"][1] == commentary


async def test_plain_text_reasoning() -> None:
    item = {"id": "rs_1", "type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    answer = stream(delta("reasoning_text", "hm"), done(item), delta("output_text", "x"), done(message("x")), over())
    assert events_of(await relay_answer(make_relay, answer, native_call("responses", BODY))) == [
        Delta("reasoning", "hm"),
        Delta("content", "x"),
    ]


async def test_logprobs_are_requested_when_captured() -> None:
    tokens = [{"token": "o", "logprob": -0.5, "top_logprobs": []}, {"token": "k", "logprob": -9999.0}]
    answer = stream(delta("output_text", "ok", logprobs=tokens), done(message("ok")), over())
    for call in (native_call("responses", BODY), foreign_call(HI)):
        async with serving(StandIn(answer)) as server, started(ResponsesRelay(server.url, capture="logprobs")) as relay:
            chunks = await relay_call(relay, call)
        assert "message.output_text.logprobs" in server.last_body["include"]
        assert (chunks[0].ids, chunks[0].logprobs) == (None, [-0.5, None])


async def test_finish_reasons() -> None:
    refused = stream(delta("refusal", "I won't."), done(message("")), over())
    assert events_of(await relay_answer(make_relay, refused, foreign_call(HI))) == [Delta("content", "I won't.")]
    cut = over("incomplete", incomplete_details={"reason": "max_output_tokens"})
    assert (await relay_answer(make_relay, stream(delta("output_text", "x"), cut), foreign_call(HI)))[
        -1
    ].finish == "length"
    filtered = over("incomplete", incomplete_details={"reason": "content_filter"})
    last = (await relay_answer(make_relay, stream(delta("output_text", "x"), filtered), foreign_call(HI)))[-1]
    assert (last.finish, last.fault) == ("stop", "responses withheld the answer (content_filter)")
    with pytest.raises(EngineRejected, match="withheld the answer"):
        await relay_answer(make_relay, stream(filtered), foreign_call(HI))


async def test_unsupported_content_raises() -> None:
    for events in (
        [done({"id": "ws_1", "type": "web_search_call", "status": "completed"})],
        [over("incomplete", incomplete_details={"reason": "steered"})],
    ):
        with pytest.raises(EngineError, match="which is not supported"):
            await relay_answer(make_relay, stream(*events), foreign_call(HI))


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("status", "code", "message", "raised"),
    [
        (400, "context_length_exceeded", "Your input exceeds the context window of this model.", ContextOverflow),
        (400, "invalid_prompt", "bad", EngineRejected),
        (429, "rate_limit_exceeded", "slow down", EngineBusy),
        (500, "server_error", "oops", EngineError),
    ],
)
async def test_error_responses_map_to_exceptions(
    status: int, code: str, message: str, raised: type[TurngateError]
) -> None:
    error = {"message": message, "type": "x", "code": code, "param": None}
    for answer in (
        answer_with({"error": error}, status),
        stream(over("failed", error={"code": code, "message": message})),
        stream({"type": "error", "code": code, "message": message, "param": None, "sequence_number": 1}),
        stream({"type": "error", "error": error}),
    ):
        with pytest.raises(raised) as caught:
            await relay_answer(make_relay, answer, foreign_call(HI))
        assert type(caught.value) is raised and message in caught.value.message


async def test_other_errors() -> None:
    with pytest.raises(EngineError, match="rejected the gateway's API key"):
        await relay_answer(
            make_relay,
            answer_with({"error": {"message": "Incorrect API key provided: sk-se***"}}, 401),
            foreign_call(HI),
        )
    with pytest.raises(EngineError, match="unknown error"):
        await relay_answer(
            make_relay, stream({"type": "response.failed", "response": {"error": None}}), foreign_call(HI)
        )
    with pytest.raises(EngineUnavailable, match="before the generation finished"):
        await relay_answer(make_relay, stream(delta("output_text", "x")), foreign_call(HI))
    with pytest.raises(BadRequest, match="JSON object"):
        await relay_answer(make_relay, OK, native_call("responses", b"[]"))


async def test_early_exit_closes_connection() -> None:
    server = StandIn(answer_stream(named_event(delta("output_text", "x")), 3600.0))
    async with serving(server), started(make_relay(server.url)) as relay:
        async with relay.relay(RelayRequest(call=foreign_call(HI))) as chunks:
            assert (await anext(chunks)).events
        await asyncio.wait_for(server.hung_up.wait(), scaled(2))


# ── counting and health ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_count_uses_endpoint_if_available() -> None:
    counted = answer_with({"object": "response.input_tokens", "input_tokens": 42})
    async with serving(StandIn(counted)) as server, started(make_relay(server.url)) as relay:
        assert await relay.count(RelayRequest(call=native_call("responses", BODY), model="m")) == 42
        assert server.paths == ["/v1/responses/input_tokens"] and server.last_body == BODY | {"model": "m"}
        call = foreign_call(Message("system", "s"), HI, tools=[TOOL], max_tokens=5)
        assert await relay.count(RelayRequest(call=call)) == 42
        assert set(server.last_body) == {"model", "instructions", "input", "tools", "reasoning"}
    for status in (404, 405):
        async with serving(StandIn(answer_with("No", status))) as server, started(make_relay(server.url)) as relay:
            with pytest.raises(NotFound, match="estimate"):
                await relay.count(RelayRequest(call=call))


async def test_rejected_count_is_a_bad_request() -> None:
    invalid = answer_with({"error": {"message": "input[0]: bad"}}, 400)
    async with serving(StandIn(invalid)) as server, started(make_relay(server.url)) as relay:
        with pytest.raises(EngineRejected, match=r"input\[0\]: bad"):
            await relay.count(RelayRequest(call=foreign_call(HI)))


async def test_health() -> None:
    async with (
        serving(StandIn(documents={"/v1/models": {"data": []}})) as server,
        started(make_relay(server.url)) as relay,
    ):
        [health] = await relay.health()
        assert health.ok and "sk-secret" not in repr(relay)
