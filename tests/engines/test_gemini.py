"""Tests for the relay to Google's Gemini API: requests, streams, errors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.speed import scaled
from turngate.engines.base import RelayRequest
from turngate.engines.observe.gemini import GeminiRelay
from turngate.errors import (
    BadRequest,
    ContextOverflow,
    EngineBusy,
    EngineError,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    TurngateError,
)
from turngate.types import CallDelta, Constraint, Delta, Message, Sampling, ToolCall, Usage

from .relays import OTHER, TOOL, Json, answered, any_of, heard, lost, meant, own, said, started
from .standins import Answer, StandIn, event, says, serving, streams

BODY: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
HI = Message("user", "hi")
USAGE = {"promptTokenCount": 11, "candidatesTokenCount": 3, "thoughtsTokenCount": 2, "cachedContentTokenCount": 4}


def make(url: str) -> GeminiRelay:
    return GeminiRelay(url, "AIza-secret")


def chunk(*parts: Json, finish: str = "", **fields: Json) -> Json:
    candidate = {"content": {"parts": list(parts), "role": "model"}, "index": 0, **fields}
    return {
        "candidates": [candidate | ({"finishReason": finish} if finish else {})],
        "modelVersion": "g",
        "responseId": "r",
    }


def stream(*chunks: Json) -> Answer:
    return streams(*(event(one).replace(b"\n\n", b"\r\n\r\n") for one in chunks))


OK = stream(chunk({"text": "ok"}, finish="STOP") | {"usageMetadata": USAGE})


# ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_native_request_is_forwarded_verbatim() -> None:
    contents = b'[{"role":"user", "parts":[{"inlineData":{"mimeType":"image/png","data":"aGk="}},{"text":"1.10"}]}]'
    config = b'{"temperature":0.2,"top_k":5,"topP":0.9,"max_output_tokens":9,"thinkingConfig":{"includeThoughts":true}}'
    raw = b'{"contents":' + contents + b',"generation_config":' + config + b',"safetySettings":[{"a":1}]}'
    passed = {"x-goog-api-client": "cli", "x-goog-api-key": "tg-agent"}
    async with serving(StandIn(OK)) as server, started(make(server.url)) as relay:
        call = own("gemini", raw, forwarded_headers=passed)
        await heard(relay, call, model="gemini-3-pro", sampling=Sampling(temperature=0.5), max_tokens=7)
        assert server.paths == ["/v1beta/models/gemini-3-pro:streamGenerateContent"]
        assert contents in server.bodies[0]  # forwarded without re-encoding
        assert server.asked["generation_config"] == {
            "temperature": 0.5,
            "topP": 1.0,
            "max_output_tokens": 7,
            "thinkingConfig": {"includeThoughts": True},
        }
        assert server.asked["safetySettings"] == [{"a": 1}] and "generationConfig" not in server.asked
        assert server.headers[0].getall("x-goog-api-key") == ["AIza-secret"]
        assert server.headers[0]["x-goog-api-client"] == "cli"
        await heard(relay, own("gemini", BODY, model="models/a b/../c"))
        assert server.asked == BODY
        assert server.raw_paths[-1] == "/v1beta/models/a%20b%2F..%2Fc:streamGenerateContent?alt=sse"
        assert "AIza" not in repr(relay)


async def test_base_url_variants() -> None:
    for path, expected in (("", "/v1beta"), ("/v1beta/", "/v1beta"), ("/v1", "/v1"), ("/gate", "/gate/v1beta")):
        async with serving(StandIn(OK)) as server, started(make(server.url + path)) as relay:
            await heard(relay, own("gemini", BODY))
            assert server.paths == [f"{expected}/models/m:streamGenerateContent"]


async def test_logprobs_are_requested_when_captured() -> None:
    tokens = {"chosenCandidates": [{"token": "o", "tokenId": 1, "logProbability": -0.5}, {"token": "k"}]}
    answer = stream(chunk({"text": "ok"}, finish="STOP", logprobsResult=tokens))
    for call in (own("gemini", BODY), meant(HI)):
        async with serving(StandIn(answer)) as server, started(GeminiRelay(server.url, capture="logprobs")) as relay:
            chunks = await heard(relay, call)
        assert server.asked["generationConfig"]["responseLogprobs"] is True
        assert (chunks[0].ids, chunks[0].logprobs) == (None, [-0.5, None])


async def test_pinned_unsupported_sampling_is_rejected() -> None:
    with pytest.raises(EngineRejected, match="pins repetition_penalty"):
        await answered(make, OK, meant(HI), sampling=Sampling(repetition_penalty=1.1))


async def test_foreign_dialect_is_translated() -> None:
    call = meant(
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
    async with serving(StandIn(OK)) as server, started(make(server.url)) as relay:
        chunks = await heard(relay, call, max_tokens=50)
    assert server.asked == {
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
    assert lost(chunks) == ("the role of later system messages", "parallel_tool_calls", "min_p")


@pytest.mark.parametrize(
    ("fields", "config", "calling"),
    [
        ({"constraint": Constraint("tool", {}, "bash")}, {}, {"mode": "ANY", "allowedFunctionNames": ["bash"]}),
        ({"constraint": any_of("bash", "read")}, {}, {"mode": "ANY"}),
        ({"constraint": any_of("bash")}, {}, {"mode": "ANY", "allowedFunctionNames": ["bash"]}),
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
    async with serving(StandIn(OK)) as server, started(make(server.url)) as relay:
        chunks = await heard(relay, meant(HI, tools=[TOOL, OTHER], **fields))
    assert server.asked["generationConfig"] == {"thinkingConfig": {"includeThoughts": True}} | config
    assert server.asked.get("toolConfig") == (None if calling is None else {"functionCallingConfig": calling})
    assert lost(chunks) == ()


class Picky(StandIn):
    def __init__(self, *refusals: tuple[str, str]) -> None:
        super().__init__(self.judge)
        self.refused = refusals

    async def judge(self, request: Any) -> Any:
        for sign, message in self.refused:
            if sign in self.bodies[-1].decode():
                return await says({"error": {"code": 400, "message": message, "status": "INVALID_ARGUMENT"}}, 400)(
                    request
                )
        return await OK(request)


async def test_parameters_unknown_to_model_are_dropped_and_reported() -> None:
    server = Picky(
        ("thinkingLevel", "Thinking level is not supported for this model."),
        ("thinkingConfig", "Unable to submit request because thinking is not supported by this model."),
        ("presencePenalty", "Penalty is not enabled for this model: presencePenalty"),
    )
    call = meant(HI, template_hints={"reasoning_effort": "high"}, sampling={"presence_penalty": 0.5})
    async with serving(server), started(make(server.url)) as relay:
        chunks = await heard(relay, call)
        assert lost(chunks) == ("reasoning_effort", "presence_penalty") and server.asked["generationConfig"] == {}
        await heard(relay, call)
        assert len(server.bodies) == 5


async def test_unsigned_calls_skip_signature_validation_when_required() -> None:
    message = "Function call `bash` in the 2. content block is missing a `thought_signature`."
    server = StandIn()

    async def judge(request: Any) -> Any:
        if "skip_thought_signature_validator" in server.bodies[-1].decode():
            return await OK(request)
        return await says({"error": {"code": 400, "message": message, "status": "INVALID_ARGUMENT"}}, 400)(request)

    server.answer = judge
    turn = Message("assistant", tool_calls=(ToolCall("a", "bash", "{}"), ToolCall("b", "bash", "{}")))
    results = (Message("tool", "1", tool_call_id="a"), Message("tool", "2", tool_call_id="b"))
    async with serving(server), started(make(server.url)) as relay:
        await heard(relay, meant(HI, turn, results))
    first, second = server.asked["contents"][1]["parts"]
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
    chunks = await answered(make, ANSWER, own("gemini", BODY))
    *words, first, second = said(chunks)
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
    chunks = await answered(make, ANSWER, meant(HI))
    calls = [event.call for event in said(chunks) if isinstance(event, CallDelta)]
    assert not [event for event in said(chunks) if isinstance(event, Delta) and event.kind == "seal"]
    assert {call.signature for call in calls} == {""}
    turn = Message("assistant", "grüße", tool_calls=tuple(calls))
    results = tuple(Message("tool", call.name, tool_call_id=call.id) for call in calls)
    async with serving(StandIn(OK)) as server, started(make(server.url)) as relay:
        await heard(relay, meant(HI, turn, results), verbatim={1: chunks[-1].verbatim})
    assert server.asked["contents"][1:] == [
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
    chunks = await answered(make, stream(chunk({"text": "x"}, finish=reason)), meant(HI))
    assert (chunks[-1].finish, chunks[-1].fault, chunks[-1].usage) == (finish, "", None)


async def test_withheld_answer_sets_fault_or_raises_if_empty() -> None:
    kept_back = chunk(finish="SAFETY", finishMessage="Harm.")
    chunks = await answered(make, stream(chunk({"text": "I'd"}), kept_back), meant(HI))
    assert said(chunks) == [Delta("content", "I'd")]  # the model's text is unchanged
    assert (chunks[-1].finish, chunks[-1].fault) == ("stop", "gemini withheld the answer (SAFETY): Harm.")
    with pytest.raises(EngineRejected, match="withheld the answer"):
        await answered(make, stream({"candidates": [{"finishReason": "RECITATION"}]}), meant(HI))
    with pytest.raises(EngineRejected, match=r"blocked the prompt \(PROHIBITED_CONTENT\)"):
        await answered(make, stream({"promptFeedback": {"blockReason": "PROHIBITED_CONTENT"}}), meant(HI))


async def test_transient_finish_reasons_are_retryable() -> None:
    for reason in ("MALFORMED_FUNCTION_CALL", "OTHER", "UNEXPECTED_TOOL_CALL"):
        with pytest.raises(EngineUnavailable, match=reason) as caught:
            await answered(make, stream(chunk({"text": "x"}), chunk(finish=reason)), meant(HI))
        assert caught.value.retry_safe


async def test_unsupported_content_raises() -> None:
    for part in (
        {"executableCode": {"code": "x"}},
        {"inlineData": {"data": "aGk="}},
        {"functionCall": {"name": "f", "willContinue": True}},
    ):
        with pytest.raises(EngineError, match="which is not supported"):
            await answered(make, stream(chunk(part, finish="STOP")), meant(HI))


async def test_other_candidates_are_ignored() -> None:
    other = {"candidates": [{"index": 1, "content": {"parts": [{"text": "no"}]}, "finishReason": "STOP"}]}
    chunks = await answered(make, stream(other, chunk({"text": "yes"}, finish="STOP")), meant(HI))
    assert said(chunks) == [Delta("content", "yes")]


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
        (404, "NOT_FOUND", "models/x is not found", EngineRejected, "models/x"),
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
    for answer in (says(body, code), says([body], code), stream(chunk({"text": "x"}), body)):
        with pytest.raises(raised, match=words) as caught:
            await answered(make, answer, meant(HI))
        assert type(caught.value) is raised
        if isinstance(caught.value, ContextOverflow):
            assert (caught.value.limit, caught.value.size) == (1_048_576, 1_200_000)


async def test_broken_stream_raises() -> None:
    with pytest.raises(EngineUnavailable, match="before the generation finished"):
        await answered(make, stream(chunk({"text": "x"})), meant(HI))
    with pytest.raises(EngineError, match="cannot be decoded"):
        await answered(make, streams(b"data: []\n\n"), meant(HI))
    with pytest.raises(BadRequest, match="JSON object"):
        await answered(make, OK, own("gemini", b"[]"))


async def test_early_exit_closes_connection() -> None:
    server = StandIn(streams(event(chunk({"text": "x"})), 3600.0))
    async with serving(server), started(make(server.url)) as relay:
        async with relay.relay(RelayRequest(call=meant(HI))) as chunks:
            assert (await anext(chunks)).events
        await asyncio.wait_for(server.hung_up.wait(), scaled(2))


# ── counting and health ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_count_uses_endpoint() -> None:
    async with serving(StandIn(says({"totalTokens": 42}))) as server, started(make(server.url)) as relay:
        assert await relay.count(RelayRequest(call=own("gemini", BODY), model="g")) == 42
        assert server.paths == ["/v1beta/models/g:countTokens"] and server.asked == BODY
        inner = {"generateContentRequest": BODY | {"model": "models/agents"}}
        assert await relay.count(RelayRequest(call=own("gemini", inner), model="g")) == 42
        assert server.asked == {"generateContentRequest": BODY | {"model": "models/g"}}
        call = meant(Message("system", "s"), HI, tools=[TOOL])
        assert await relay.count(RelayRequest(call=call, model="g")) == 42
        [asked] = server.asked.values()
        assert set(asked) == {"model", "systemInstruction", "contents", "tools"} and asked["model"] == "models/g"


async def test_health() -> None:
    async with (
        serving(StandIn(documents={"/v1beta/models": {"models": []}})) as server,
        started(make(server.url)) as relay,
    ):
        [health] = await relay.health()
        assert health.ok
    async with started(make("http://127.0.0.1:1")) as relay:
        [health] = await relay.health()
        assert not health.ok
