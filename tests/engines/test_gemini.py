"""Tests for the relay to Google's Gemini API: requests, streams, errors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

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
from tests.engines.standins import Answer, StandIn, answer_stream, answer_with, event, serving
from tests.speed import scaled
from turngate.engines.base import RelayRequest
from turngate.engines.observe.gemini import GeminiRelay
from turngate.errors import (
    BadRequest,
    ContextOverflow,
    EngineBusy,
    EngineError,
    EngineNotFound,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    NotFound,
    TurngateError,
)
from turngate.types import CallDelta, Constraint, Delta, Message, Sampling, ToolCall, Usage

BODY: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
HI = Message("user", "hi")
USAGE = {"promptTokenCount": 11, "candidatesTokenCount": 3, "thoughtsTokenCount": 2, "cachedContentTokenCount": 4}


def make_relay(url: str) -> GeminiRelay:
    return GeminiRelay(url, "AIza-secret")


def chunk(*parts: Json, finish: str = "", **fields: Json) -> Json:
    candidate = {"content": {"parts": list(parts), "role": "model"}, "index": 0, **fields}
    return {
        "candidates": [candidate | ({"finishReason": finish} if finish else {})],
        "modelVersion": "g",
        "responseId": "r",
    }


def stream(*chunks: Json) -> Answer:
    return answer_stream(*(event(item).replace(b"\n\n", b"\r\n\r\n") for item in chunks))


OK = stream(chunk({"text": "ok"}, finish="STOP") | {"usageMetadata": USAGE})


# ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_native_request_is_forwarded_verbatim() -> None:
    contents = b'[{"role":"user", "parts":[{"inlineData":{"mimeType":"image/png","data":"aGk="}},{"text":"1.10"}]}]'
    config = b'{"temperature":0.2,"top_k":5,"topP":0.9,"max_output_tokens":9,"thinkingConfig":{"includeThoughts":true}}'
    raw = b'{"contents":' + contents + b',"generation_config":' + config + b',"safetySettings":[{"a":1}]}'
    forwarded = {"x-goog-api-client": "cli", "x-goog-api-key": "tg-agent"}
    async with serving(StandIn(OK)) as server, started(make_relay(server.url)) as relay:
        call = native_call("gemini", raw, forwarded_headers=forwarded)
        await relay_call(relay, call, model="gemini-3-pro", sampling=Sampling(temperature=0.5), max_tokens=7)
        assert server.paths == ["/v1beta/models/gemini-3-pro:streamGenerateContent"]
        assert contents in server.bodies[0]  # forwarded without re-encoding
        assert server.last_body["generation_config"] == {
            "temperature": 0.5,
            "topP": 1.0,
            "max_output_tokens": 7,
            "thinkingConfig": {"includeThoughts": True},
        }
        assert server.last_body["safetySettings"] == [{"a": 1}] and "generationConfig" not in server.last_body
        assert server.headers[0].getall("x-goog-api-key") == ["AIza-secret"]
        assert server.headers[0]["x-goog-api-client"] == "cli"
        await relay_call(relay, native_call("gemini", BODY, model="models/a b/../c"))
        assert server.last_body == BODY
        assert server.raw_paths[-1] == "/v1beta/models/a%20b%2F..%2Fc:streamGenerateContent?alt=sse"
        assert "AIza" not in repr(relay)


async def test_base_url_variants() -> None:
    for path, expected in (("", "/v1beta"), ("/v1beta/", "/v1beta"), ("/v1", "/v1"), ("/gate", "/gate/v1beta")):
        async with serving(StandIn(OK)) as server, started(make_relay(server.url + path)) as relay:
            await relay_call(relay, native_call("gemini", BODY))
            assert server.paths == [f"{expected}/models/m:streamGenerateContent"]


async def test_logprobs_are_requested_when_captured() -> None:
    tokens = {"chosenCandidates": [{"token": "o", "tokenId": 1, "logProbability": -0.5}, {"token": "k"}]}
    answer = stream(chunk({"text": "ok"}, finish="STOP", logprobsResult=tokens))
    for call in (native_call("gemini", BODY), foreign_call(HI)):
        async with serving(StandIn(answer)) as server, started(GeminiRelay(server.url, capture="logprobs")) as relay:
            chunks = await relay_call(relay, call)
        assert server.last_body["generationConfig"]["responseLogprobs"] is True
        assert (chunks[0].ids, chunks[0].logprobs) == (None, [-0.5, None])


async def test_pinned_unsupported_sampling_is_rejected() -> None:
    with pytest.raises(
        EngineRejected, match=r"pins sampling settings that the gemini endpoint does not support \(repetition_penalty\)"
    ):
        await relay_answer(make_relay, OK, foreign_call(HI), sampling=Sampling(repetition_penalty=1.1))


async def test_foreign_dialect_is_translated() -> None:
    call = foreign_call(
        Message("system", "Be brief."),
        HI,
        Message("assistant", "Looking.", tool_calls=(ToolCall("a", "bash", '{"c": 1}'), ToolCall("b", "read", "[1]"))),
        (Message("tool", "out", tool_call_id="a"), Message("tool", "", tool_call_id="b"), Message("user", "go on")),
        Message("system", "Time passes."),
        tools=[TOOL, OTHER],
        stop=("X",),
        sampling={"temperature": 0.3, "top_k": 5, "min_p": 0.1},
        parallel_tool_calls=False,
    )
    async with serving(StandIn(OK)) as server, started(make_relay(server.url)) as relay:
        chunks = await relay_call(relay, call, max_tokens=50)
    assert server.last_body == {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "hi"}]},
            {
                "role": "model",
                "parts": [
                    {"text": "Looking."},
                    {"functionCall": {"id": "a", "name": "bash", "args": {"c": 1}}},
                    {"functionCall": {"id": "b", "name": "read", "args": {"malformed_arguments": "[1]"}}},
                ],
            },
            {
                "role": "user",
                "parts": [
                    {"functionResponse": {"id": "a", "name": "bash", "response": {"output": "out"}}},
                    {"functionResponse": {"id": "b", "name": "read", "response": {"output": ""}}},
                ],
            },
            {"role": "user", "parts": [{"text": "go on"}]},
            {"role": "user", "parts": [{"text": "Time passes."}]},
        ],
        "tools": [
            {
                "functionDeclarations": [
                    {"name": "bash", "description": "Runs.", "parametersJsonSchema": {"type": "object"}},
                    {"name": "read", "description": "", "parametersJsonSchema": {"type": "object"}},
                ]
            }
        ],
        "generationConfig": {
            "thinkingConfig": {"includeThoughts": True},
            "stopSequences": ["X"],
            "maxOutputTokens": 50,
            "temperature": 0.3,
            "topK": 5,
        },
    }
    assert lost_fields(chunks) == ("the role of later system messages", "parallel_tool_calls", "min_p")


@pytest.mark.parametrize(
    ("fields", "config", "calling"),
    [
        ({"constraint": Constraint("tool", {}, "bash")}, {}, {"mode": "ANY", "allowedFunctionNames": ["bash"]}),
        ({"constraint": require_tools("bash", "read")}, {}, {"mode": "ANY"}),
        ({"constraint": require_tools("bash")}, {}, {"mode": "ANY", "allowedFunctionNames": ["bash"]}),
        ({"constraint": Constraint("json_object")}, {"responseMimeType": "application/json"}, None),
        (
            {"constraint": Constraint("json_schema", {"type": "object"})},
            {"responseMimeType": "application/json", "responseJsonSchema": {"type": "object"}},
            None,
        ),
        (
            {"template_hints": {"reasoning_effort": "high"}},
            {"thinkingConfig": {"includeThoughts": True, "thinkingLevel": "HIGH"}},
            None,
        ),
        ({"template_hints": {"enable_thinking": False}}, {"thinkingConfig": {"thinkingBudget": 0}}, None),
        (
            {"template_hints": {"enable_thinking": True, "thinking_budget": 99}},
            {"thinkingConfig": {"thinkingBudget": 99, "includeThoughts": True}},
            None,
        ),
    ],
)
async def test_constraints_and_thinking_are_translated(fields: Json, config: Json, calling: Json) -> None:
    async with serving(StandIn(OK)) as server, started(make_relay(server.url)) as relay:
        chunks = await relay_call(relay, foreign_call(HI, tools=[TOOL, OTHER], **fields))
    assert server.last_body["generationConfig"] == {"thinkingConfig": {"includeThoughts": True}} | config
    assert server.last_body.get("toolConfig") == (None if calling is None else {"functionCallingConfig": calling})
    assert lost_fields(chunks) == ()


class StrictServer(StandIn):
    def __init__(self, *refusals: tuple[str, str]) -> None:
        super().__init__(self.respond)
        self.refused = refusals

    async def respond(self, request: Any) -> Any:
        for sign, message in self.refused:
            if sign in self.bodies[-1].decode():
                return await answer_with(
                    {"error": {"code": 400, "message": message, "status": "INVALID_ARGUMENT"}}, 400
                )(request)
        return await OK(request)


async def test_parameters_unknown_to_model_are_dropped_and_reported() -> None:
    server = StrictServer(
        ("thinkingLevel", "Thinking level is not supported for this model."),
        ("thinkingConfig", "Unable to submit request because thinking is not supported by this model."),
        ("presencePenalty", "Penalty is not enabled for this model: presencePenalty"),
    )
    call = foreign_call(HI, template_hints={"reasoning_effort": "high"}, sampling={"presence_penalty": 0.5})
    async with serving(server), started(make_relay(server.url)) as relay:
        chunks = await relay_call(relay, call)
        assert (
            lost_fields(chunks) == ("reasoning_effort", "presence_penalty")
            and server.last_body["generationConfig"] == {}
        )
        await relay_call(relay, call)
        assert len(server.bodies) == 5


async def test_unsigned_calls_skip_signature_validation_when_required() -> None:
    message = "Function call `bash` in the 2. content block is missing a `thought_signature`."
    server = StandIn()

    async def respond(request: Any) -> Any:
        if "skip_thought_signature_validator" in server.bodies[-1].decode():
            return await OK(request)
        return await answer_with({"error": {"code": 400, "message": message, "status": "INVALID_ARGUMENT"}}, 400)(
            request
        )

    server.answer = respond
    turn = Message("assistant", tool_calls=(ToolCall("a", "bash", "{}"), ToolCall("b", "bash", "{}")))
    results = (Message("tool", "1", tool_call_id="a"), Message("tool", "2", tool_call_id="b"))
    async with serving(server), started(make_relay(server.url)) as relay:
        await relay_call(relay, foreign_call(HI, turn, results))
    first, second = server.last_body["contents"][1]["parts"]
    assert first["thoughtSignature"] == "skip_thought_signature_validator" and "thoughtSignature" not in second


# ── responses ───────────────────────────────────────────────────────────────────────────────────────────────────────────

ANSWER = stream(
    chunk({"text": "hm", "thought": True}),
    chunk({"text": "m", "thought": True}),
    chunk({"text": "grü"}),
    chunk({"text": "ße", "thoughtSignature": "c2ln"}),
    chunk(
        {"functionCall": {"name": "bash", "args": {"c": 1.0}}, "thoughtSignature": "Y2Fs"},
        {"functionCall": {"name": "read"}},
    ),
    chunk({"text": ""}, finish="STOP") | {"usageMetadata": USAGE},
)


async def test_stream_yields_text_thoughts_calls_and_usage() -> None:
    chunks = await relay_answer(make_relay, ANSWER, native_call("gemini", BODY))
    *words, first, second = events_of(chunks)
    assert words == [
        Delta("reasoning", "hm"),
        Delta("reasoning", "m"),
        Delta("content", "grü"),
        Delta("content", "ße"),
        Delta("signature", "c2ln"),
    ]
    assert isinstance(first, CallDelta) and isinstance(second, CallDelta)
    assert (first.index, first.call.name, first.call.arguments, first.call.signature) == (
        0,
        "bash",
        '{"c": 1.0}',
        "Y2Fs",
    )
    assert (second.index, second.call.name, second.call.arguments, second.call.signature) == (1, "read", "{}", "")
    assert first.call.id.startswith("call_") and first.call.id != second.call.id  # generated, since Gemini sent none
    assert (chunks[-1].finish, chunks[-1].usage, chunks[-1].verbatim) == ("tool_calls", Usage(11, 5, 4, 2), b"")


async def test_signed_turn_is_replayed_verbatim_for_foreign_dialect() -> None:
    chunks = await relay_answer(make_relay, ANSWER, foreign_call(HI))
    calls = [event.call for event in events_of(chunks) if isinstance(event, CallDelta)]
    assert not [event for event in events_of(chunks) if isinstance(event, Delta) and event.kind == "signature"]
    assert {call.signature for call in calls} == {""}
    turn = Message("assistant", "grüße", tool_calls=tuple(calls))
    results = tuple(Message("tool", call.name, tool_call_id=call.id) for call in calls)
    async with serving(StandIn(OK)) as server, started(make_relay(server.url)) as relay:
        await relay_call(relay, foreign_call(HI, turn, results), verbatim={1: chunks[-1].verbatim})
    assert server.last_body["contents"][1:] == [
        {
            "role": "model",
            "parts": [
                {"text": "grüße", "thoughtSignature": "c2ln"},
                {"functionCall": {"name": "bash", "args": {"c": 1.0}}, "thoughtSignature": "Y2Fs"},
                {"functionCall": {"name": "read", "args": {}}},
            ],
        },
        {
            "role": "user",
            "parts": [
                {"functionResponse": {"name": "bash", "response": {"output": "bash"}}},
                {"functionResponse": {"name": "read", "response": {"output": "read"}}},
            ],
        },
    ]


@pytest.mark.parametrize(("reason", "finish"), [("STOP", "stop"), ("MAX_TOKENS", "length"), ("CONTINUATION", "length")])
async def test_finish_reasons_map_to_finish(reason: str, finish: str) -> None:
    chunks = await relay_answer(make_relay, stream(chunk({"text": "x"}, finish=reason)), foreign_call(HI))
    assert (chunks[-1].finish, chunks[-1].fault, chunks[-1].usage) == (finish, "", None)


async def test_withheld_answer_sets_fault_or_raises_if_empty() -> None:
    kept_back = chunk(finish="SAFETY", finishMessage="Harm.")
    chunks = await relay_answer(make_relay, stream(chunk({"text": "I'd"}), kept_back), foreign_call(HI))
    assert events_of(chunks) == [Delta("content", "I'd")]  # the model's text is unchanged
    assert (chunks[-1].finish, chunks[-1].fault) == ("stop", "gemini withheld the answer (SAFETY): Harm.")
    with pytest.raises(EngineRejected, match="withheld the answer"):
        await relay_answer(make_relay, stream({"candidates": [{"finishReason": "RECITATION"}]}), foreign_call(HI))
    with pytest.raises(EngineRejected, match=r"blocked the prompt \(PROHIBITED_CONTENT\)"):
        await relay_answer(
            make_relay, stream({"promptFeedback": {"blockReason": "PROHIBITED_CONTENT"}}), foreign_call(HI)
        )


async def test_transient_finish_reasons_are_retryable() -> None:
    for reason in ("MALFORMED_FUNCTION_CALL", "OTHER", "UNEXPECTED_TOOL_CALL"):
        with pytest.raises(EngineUnavailable, match=reason) as caught:
            await relay_answer(make_relay, stream(chunk({"text": "x"}), chunk(finish=reason)), foreign_call(HI))
        assert caught.value.retry_safe


async def test_unsupported_content_raises() -> None:
    for part in (
        {"executableCode": {"code": "x"}},
        {"inlineData": {"data": "aGk="}},
        {"functionCall": {"name": "f", "willContinue": True}},
    ):
        with pytest.raises(EngineError, match="unsupported content"):
            await relay_answer(make_relay, stream(chunk(part, finish="STOP")), foreign_call(HI))


async def test_other_candidates_are_ignored() -> None:
    other = {"candidates": [{"index": 1, "content": {"parts": [{"text": "no"}]}, "finishReason": "STOP"}]}
    chunks = await relay_answer(make_relay, stream(other, chunk({"text": "yes"}, finish="STOP")), foreign_call(HI))
    assert events_of(chunks) == [Delta("content", "yes")]


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

TOO_LONG = "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576)."


@pytest.mark.parametrize(
    ("code", "status", "message", "raised", "words"),
    [
        (400, "INVALID_ARGUMENT", TOO_LONG, ContextOverflow, "1200000"),
        (400, "INVALID_ARGUMENT", "contents: bad", EngineRejected, "contents: bad"),
        (
            400,
            "INVALID_ARGUMENT",
            "API key not valid. Please pass a valid API key.",
            EngineError,
            "rejected the gateway's API key",
        ),
        (401, "UNAUTHENTICATED", "who?", EngineError, "rejected the gateway's API key"),
        (403, "PERMISSION_DENIED", "not yours", EngineError, "not yours"),
        (404, "NOT_FOUND", "models/x is not found", EngineNotFound, "models/x"),
        (429, "RESOURCE_EXHAUSTED", "quota", EngineBusy, "quota"),
        (500, "INTERNAL", "oops", EngineError, "oops"),
        (503, "UNAVAILABLE", "The model is overloaded.", EngineBusy, "overloaded"),
        (503, "UNAVAILABLE", "down", EngineUnavailable, "down"),
        (504, "DEADLINE_EXCEEDED", "too long", EngineTimeout, "too long"),
    ],
)
async def test_error_responses_map_to_exceptions(
    code: int, status: str, message: str, raised: type[TurngateError], words: str
) -> None:
    body = {"error": {"code": code, "message": message, "status": status}}
    for answer in (answer_with(body, code), answer_with([body], code), stream(chunk({"text": "x"}), body)):
        with pytest.raises(raised, match=words) as caught:
            await relay_answer(make_relay, answer, foreign_call(HI))
        assert type(caught.value) is raised
        if isinstance(caught.value, ContextOverflow):
            assert (caught.value.limit, caught.value.size) == (1_048_576, 1_200_000)


async def test_broken_stream_raises() -> None:
    with pytest.raises(EngineUnavailable, match="before the generation finished"):
        await relay_answer(make_relay, stream(chunk({"text": "x"})), foreign_call(HI))
    with pytest.raises(EngineError, match="cannot be decoded"):
        await relay_answer(make_relay, answer_stream(b"data: []\n\n"), foreign_call(HI))
    call = b'{"functionCall": {"name": "bash", "args": {"command": "\xff"}}}'
    with pytest.raises(EngineError, match="cannot be decoded"):
        await relay_answer(
            make_relay,
            answer_stream(b'data: {"candidates": [{"content": {"parts": [' + call + b"]}}]}\n\n"),
            foreign_call(HI),
        )
    with pytest.raises(BadRequest, match="JSON object"):
        await relay_answer(make_relay, OK, native_call("gemini", b"[]"))


async def test_early_exit_closes_connection() -> None:
    server = StandIn(answer_stream(event(chunk({"text": "x"})), 3600.0))
    async with serving(server), started(make_relay(server.url)) as relay:
        async with relay.relay(RelayRequest(call=foreign_call(HI))) as chunks:
            assert (await anext(chunks)).events
        await asyncio.wait_for(server.hung_up.wait(), scaled(2))


# ── counting and health ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_count_uses_endpoint() -> None:
    async with serving(StandIn(answer_with({"totalTokens": 42}))) as server, started(make_relay(server.url)) as relay:
        assert await relay.count(RelayRequest(call=native_call("gemini", BODY), model="g")) == 42
        assert server.paths == ["/v1beta/models/g:countTokens"] and server.last_body == BODY
        inner = {"generateContentRequest": BODY | {"model": "models/agents"}}
        assert await relay.count(RelayRequest(call=native_call("gemini", inner), model="g")) == 42
        assert server.last_body == {"generateContentRequest": BODY | {"model": "models/g"}}
        call = foreign_call(Message("system", "s"), HI, tools=[TOOL])
        assert await relay.count(RelayRequest(call=call, model="g")) == 42
        [inner_body] = server.last_body.values()
        assert (
            set(inner_body) == {"model", "systemInstruction", "contents", "tools"} and inner_body["model"] == "models/g"
        )


async def test_missing_count_suggests_estimating() -> None:
    message = "models/g is not found for API version v1beta, or is not supported for countTokens."
    for status in (404, 405):
        missing = answer_with({"error": {"code": status, "message": message, "status": "NOT_FOUND"}}, status)
        async with serving(StandIn(missing)) as server, started(make_relay(server.url)) as relay:
            with pytest.raises(NotFound, match=r"\(gemini: models/g is not found .*\); estimate them instead"):
                await relay.count(RelayRequest(call=foreign_call(HI), model="g"))


async def test_health() -> None:
    async with (
        serving(StandIn(documents={"/v1beta/models": {"models": []}})) as server,
        started(make_relay(server.url)) as relay,
    ):
        [health] = await relay.health()
        assert health.ok
    async with started(make_relay("http://127.0.0.1:1")) as relay:
        [health] = await relay.health()
        assert not health.ok
