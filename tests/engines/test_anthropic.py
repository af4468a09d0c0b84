"""Tests for the relay to Anthropic's Messages API: requests, streams, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec
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
from turngate.engines.observe.anthropic import FEWER_TOKENS, MAX_TOKENS, AnthropicRelay
from turngate.engines.observe.translate import encode_verbatim
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

BODY: dict[str, Any] = {"model": "agent's", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
HI = Message("user", "hi")


def make_relay(url: str) -> AnthropicRelay:
    return AnthropicRelay(url, "sk-ant-secret")


def start(**usage: int) -> Json:
    return {
        "type": "message_start",
        "message": {"id": "msg_1", "usage": {"input_tokens": 5, "output_tokens": 1, **usage}},
    }


def block(index: int, content: Json, *deltas: Json) -> list[Json]:
    return [
        {"type": "content_block_start", "index": index, "content_block": content},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


def text(index: int, *parts: str) -> list[Json]:
    return block(index, {"type": "text", "text": ""}, *({"type": "text_delta", "text": part} for part in parts))


def end(reason: str = "end_turn", **fields: Json) -> list[Json]:
    delta = {"stop_reason": reason, "stop_sequence": None, **fields}
    return [{"type": "message_delta", "delta": delta, "usage": {"output_tokens": 9}}, {"type": "message_stop"}]


def stream(*events: Json | list[Json]) -> Answer:
    flat = [event for item in events for event in (item if isinstance(item, list) else [item])]
    return answer_stream(*(named_event(event) for event in flat))


OK = stream(start(), text(0, "ok"), end())


# ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_native_request_is_forwarded_verbatim() -> None:
    messages = (
        b'[{"role": "user",  "content": [{"type":"image","source":{"type":"url","url":"http://x/\\u00e9.png"}},'
        b'{"type":"text","text":"1.10","cache_control":{"type":"ephemeral"}}]}]'
    )
    raw = (
        b'{"model":"a","max_tokens":9,"temperature":0.2,"top_k":5,"top_p":0.9,"betas_like":{"a":[1]},"messages":'
        + messages
        + b"}"
    )
    forwarded = {
        "anthropic-beta": "b-1,b-2",
        "anthropic-version": "2026-10-21",
        "X-Api-Key": "tg-agent",
        "authorization": "x",
    }
    async with serving(StandIn(OK)) as server, started(make_relay(server.url + "/v1/")) as relay:
        await relay_call(
            relay,
            native_call("messages", raw, forwarded_headers=forwarded),
            model="m",
            sampling=Sampling(temperature=0.5),
            max_tokens=7,
        )
        assert server.paths == ["/v1/messages"] and messages in server.bodies[0]  # forwarded without re-encoding
        body_sent = {name: value for name, value in server.last_body.items() if name != "messages"}
        assert body_sent == {
            "model": "m",
            "max_tokens": 7,
            "temperature": 0.5,
            "betas_like": {"a": [1]},
            "stream": True,
        }
        headers = server.headers[0]
        assert headers.getall("x-api-key") == ["sk-ant-secret"] and "authorization" not in headers
        assert (headers["anthropic-beta"], headers["anthropic-version"]) == ("b-1,b-2", "2026-10-21")
        await relay_call(relay, native_call("messages", BODY))
        assert server.last_body == BODY | {"stream": True} and server.headers[1]["anthropic-version"] == "2023-06-01"
        assert "sk-ant" not in repr(relay)


async def test_pinned_unsupported_sampling_is_rejected() -> None:
    with pytest.raises(
        EngineRejected, match=r"pins sampling settings that the anthropic endpoint does not support \(min_p, seed\)"
    ):
        await relay_answer(make_relay, OK, native_call("messages", BODY), sampling=Sampling(min_p=0.1, seed=3))


async def test_foreign_dialect_is_translated() -> None:
    call = foreign_call(
        Message("system", "Be brief."),
        Message("system", "Be kind."),
        HI,
        Message("assistant", "Looking.", tool_calls=(ToolCall("a.1", "bash", '{"c": 1}'), ToolCall("b", "read", ""))),
        (Message("tool", "out", tool_call_id="a.1"), Message("tool", "", tool_call_id="b"), Message("user", "go on")),
        Message("system", "Time passes."),
        Message("assistant", "  "),
        Message("user", "end"),
        tools=[TOOL, OTHER],
        stop=("X",),
        sampling={"temperature": 0.3, "top_p": 1.0, "seed": 1},
        parallel_tool_calls=False,
    )
    async with serving(StandIn(OK)) as server, started(make_relay(server.url)) as relay:
        chunks = await relay_call(relay, call, model="claude")
    assert server.last_body == {
        "model": "claude",
        "stream": True,
        "max_tokens": MAX_TOKENS,
        "cache_control": {"type": "ephemeral"},
        "system": "Be brief.\n\nBe kind.",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "Looking."},
                    {"type": "tool_use", "id": "a_1", "name": "bash", "input": {"c": 1}},
                    {"type": "tool_use", "id": "b", "name": "read", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a_1", "content": "out"},
                    {"type": "tool_result", "tool_use_id": "b"},
                    {"type": "text", "text": "go on"},
                ],
            },
            {"role": "system", "content": [{"type": "text", "text": "Time passes."}]},
            {"role": "user", "content": [{"type": "text", "text": "end"}]},
        ],
        "stop_sequences": ["X"],
        "tools": [
            {"name": "bash", "description": "Runs.", "input_schema": {"type": "object"}},
            {"name": "read", "input_schema": {"type": "object"}},
        ],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "temperature": 0.3,
    }
    assert lost_fields(chunks) == ("seed",)
    assert "anthropic-beta" not in server.headers[0]


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        ({"constraint": Constraint("tool", {}, "bash")}, {"tool_choice": {"type": "tool", "name": "bash"}}),
        ({"constraint": require_tools("bash", "read")}, {"tool_choice": {"type": "any"}}),
        (
            {"constraint": Constraint("json_schema", {"type": "object"})},
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        ),
        (
            {"template_hints": {"reasoning_effort": "minimal"}},
            {"thinking": {"type": "adaptive", "display": "summarized"}, "output_config": {"effort": "low"}},
        ),
        ({"template_hints": {"reasoning_effort": "none"}}, {"thinking": {"type": "disabled"}}),
        ({"template_hints": {"enable_thinking": False}}, {"thinking": {"type": "disabled"}}),
        ({"template_hints": {"enable_thinking": True}}, {"thinking": {"type": "adaptive", "display": "summarized"}}),
    ],
)
async def test_constraints_and_thinking_are_translated(fields: Json, body: Json) -> None:
    async with serving(StandIn(OK)) as server, started(make_relay(server.url)) as relay:
        chunks = await relay_call(relay, foreign_call(HI, tools=[TOOL, OTHER], max_tokens=5, **fields), max_tokens=5)
        rest = {
            k: v
            for k, v in server.last_body.items()
            if k not in ("model", "stream", "max_tokens", "messages", "tools", "cache_control")
        }
    assert rest == body and lost_fields(chunks) == () and server.last_body["max_tokens"] == 5


@pytest.mark.parametrize(
    ("constraint", "words"),
    [(Constraint("json_object"), "only with a schema"), (require_tools("bash"), "some of the tools")],
)
async def test_unsupported_constraint_is_bad_request(constraint: Constraint, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        await relay_answer(make_relay, OK, foreign_call(HI, tools=[TOOL, OTHER], constraint=constraint))


async def test_image_from_foreign_dialect_is_bad_request() -> None:
    with pytest.raises(BadRequest, match="no images") as caught:
        await relay_answer(
            make_relay, OK, foreign_call(Message("user", "[image]", unsupported="messages[0]: no images"))
        )
    assert caught.value.param == "messages[0]"


class StrictServer(StandIn):
    """Rejects unknown fields with Anthropic's error messages."""

    def __init__(self, *refusals: tuple[str, str]) -> None:
        super().__init__(self.respond)
        self.refused = refusals

    async def respond(self, request: Any) -> Any:
        for sign, message in self.refused:
            if sign in self.bodies[-1].decode():
                error = {"type": "invalid_request_error", "message": message}
                return await answer_with({"type": "error", "error": error}, 400)(request)
        return await OK(request)


async def test_parameters_unknown_to_model_are_dropped_and_reported() -> None:
    server = StrictServer(
        ('"cache_control"', "cache_control: Extra inputs are not permitted"),
        (
            '"adaptive"',
            "thinking.type: Input tag 'adaptive' found using 'type' does not match any of the expected tags",
        ),
        ('"effort"', "This model does not support the effort parameter."),
        (
            '"role":"system"',
            'messages: Unexpected role "system". The Messages API accepts a top-level `system` parameter',
        ),
        (
            "32000",
            "max_tokens: 32000 > 8192, which is the maximum allowed number of output tokens for claude-3-5-haiku",
        ),
        ('"temperature"', "temperature: is deprecated for this model"),
    )
    call = foreign_call(
        HI,
        Message("system", "Later."),
        template_hints={"reasoning_effort": "high", "verbosity": "low"},
        sampling={"temperature": 0.5},
    )
    async with serving(server), started(make_relay(server.url)) as relay:
        chunks = await relay_call(relay, call)
        assert len(server.bodies) == 7
        assert lost_fields(chunks) == (
            "the role of later system messages",
            "reasoning_effort",
            "temperature",
            "verbosity",
        )
        messages = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("hi", "Later.")]}]
        assert server.last_body == {"model": "m", "stream": True, "max_tokens": FEWER_TOKENS, "messages": messages}
        await relay_call(relay, call)
        assert len(server.bodies) == 8  # remembered, so no retries
        await relay_call(relay, msgspec.structs.replace(call, model="other"))
        assert len(server.bodies) == 15  # remembered per model
        with pytest.raises(EngineRejected, match="deprecated"):  # pinned sampling is never dropped
            await relay_call(relay, call, sampling=Sampling(temperature=0.5))


async def test_max_tokens_is_reduced_to_fit_context() -> None:
    server = StrictServer(
        ("32000", "input length and `max_tokens` exceed context limit: 190000 + 32000 > 200000, decrease")
    )
    async with serving(server), started(make_relay(server.url)) as relay:
        await relay_call(relay, foreign_call(HI))
        assert server.last_body["max_tokens"] == 10_000
        with pytest.raises(ContextOverflow) as caught:  # native requests are not changed
            await relay_call(relay, native_call("messages", BODY | {"max_tokens": 32000}))
        assert (caught.value.limit, caught.value.size) == (200_000, 222_000)


# ── responses ───────────────────────────────────────────────────────────────────────────────────────────────────────────

ANSWER = stream(
    start(cache_read_input_tokens=3, cache_creation_input_tokens=2),
    {"type": "ping"},
    block(
        0,
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "thinking_delta", "thinking": "hm"},
        {"type": "thinking_delta", "thinking": "m"},
        {"type": "signature_delta", "signature": "sig=="},
    ),
    block(1, {"type": "redacted_thinking", "data": "hidden=="}),
    text(2, "grü", "ße"),
    block(
        3,
        {"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {}},
        {"type": "input_json_delta", "partial_json": ""},
        {"type": "input_json_delta", "partial_json": '{"c": '},
        {"type": "input_json_delta", "partial_json": "1}"},
    ),
    block(4, {"type": "tool_use", "id": "toolu_2", "name": "read", "input": {}}),
    end("tool_use"),
)


async def test_stream_yields_text_thinking_calls_and_usage() -> None:
    chunks = await relay_answer(make_relay, ANSWER, native_call("messages", BODY))
    assert events_of(chunks) == [
        Delta("reasoning", "hm"),
        Delta("reasoning", "m"),
        Delta("signature", "sig=="),
        Delta("signature", "redacted_thinking:hidden=="),
        Delta("content", "grü"),
        Delta("content", "ße"),
        CallDelta(0, ToolCall("toolu_1", "bash", '{"c": 1}')),
        CallDelta(1, ToolCall("toolu_2", "read", "{}")),
    ]
    assert (chunks[-1].finish, chunks[-1].usage, chunks[-1].verbatim) == ("tool_calls", Usage(10, 9, 3), b"")
    assert all(chunk.ids is None and chunk.logprobs is None for chunk in chunks)


async def test_redacted_thinking_round_trips() -> None:
    """The agent returns a `thinking` block; the provider gets its original block."""
    given = [
        {"type": "thinking", "thinking": "", "signature": "redacted_thinking:hidden=="},
        {"type": "text", "text": "x"},
    ]
    body = BODY | {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": given}]}
    async with serving(StandIn(OK)) as server, started(make_relay(server.url)) as relay:
        await relay_call(relay, native_call("messages", body))
    hidden, rest = server.last_body["messages"][1]["content"]
    assert (hidden, rest) == ({"type": "redacted_thinking", "data": "hidden=="}, given[1])


async def test_signed_turn_is_replayed_verbatim_for_foreign_dialect() -> None:
    chunks = await relay_answer(make_relay, ANSWER, foreign_call(HI))
    assert not [event for event in events_of(chunks) if isinstance(event, Delta) and event.kind == "signature"]
    verbatim = chunks[-1].verbatim
    # The agent dropped the thinking, renamed the calls and added an argument.
    turn = Message(
        "assistant", "grüße", tool_calls=(ToolCall("x", "bash", '{"c":1,"d":2}'), ToolCall("y", "read", "{}"))
    )
    call = foreign_call(HI, turn, Message("tool", "1", tool_call_id="y"), Message("tool", "2", tool_call_id="x"))
    async with serving(StandIn(OK)) as server, started(make_relay(server.url)) as relay:
        again = await relay_call(relay, call, verbatim={1: verbatim})
    assert server.last_body["messages"][1]["content"] == [
        {"type": "thinking", "thinking": "hmm", "signature": "sig=="},
        {"type": "redacted_thinking", "data": "hidden=="},
        {"type": "text", "text": "grüße"},
        {"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {"c": 1}},
        {"type": "tool_use", "id": "toolu_2", "name": "read", "input": {}},
    ]
    assert [b["tool_use_id"] for b in server.last_body["messages"][2]["content"]] == ["toolu_2", "toolu_1"]
    assert lost_fields(again) == ()


async def test_unsigned_thinking_is_dropped_and_reported() -> None:
    chunks = await relay_answer(make_relay, OK, foreign_call(HI, Message("assistant", "a", "because"), HI))
    assert lost_fields(chunks) == ("reasoning of earlier turns",) and chunks[-1].verbatim == b""


async def test_truncated_arguments_are_preserved() -> None:
    cut = {"type": "input_json_delta", "partial_json": '{"c": '}
    answer = stream(
        start(), block(0, {"type": "tool_use", "id": "t", "name": "bash", "input": {}}, cut), end("max_tokens")
    )
    chunks = await relay_answer(make_relay, answer, foreign_call(HI))
    assert events_of(chunks) == [CallDelta(0, ToolCall("t", "bash", '{"c": '))] and chunks[-1].finish == "length"
    turn = Message("assistant", tool_calls=(ToolCall("t", "bash", '{"c": '),))
    async with serving(StandIn(OK)) as server, started(make_relay(server.url)) as relay:
        await relay_call(relay, foreign_call(HI, turn, Message("tool", "no JSON", tool_call_id="t")))
    assert server.last_body["messages"][1]["content"][0]["input"] == {"malformed_arguments": '{"c": '}


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("tool_use", "tool_calls"),
    ],
)
async def test_stop_reasons_map_to_finish(reason: str, finish: str) -> None:
    chunks = await relay_answer(
        make_relay, stream(start(), text(0, "x"), end(reason, stop_sequence="STOP")), foreign_call(HI)
    )
    assert (chunks[-1].finish, chunks[-1].stopped_by, chunks[-1].fault) == (finish, "STOP", "")


async def test_refusal_sets_fault_or_raises_if_empty() -> None:
    details = {"type": "refusal", "category": "cyber", "explanation": "It may do harm."}
    chunks = await relay_answer(
        make_relay, stream(start(), text(0, "I'd"), end("refusal", stop_details=details)), foreign_call(HI)
    )
    assert events_of(chunks) == [Delta("content", "I'd")]  # the model's text is unchanged
    assert (chunks[-1].finish, chunks[-1].fault) == ("stop", "anthropic refused to answer: It may do harm.")
    with pytest.raises(EngineRejected, match="refused to answer"):
        await relay_answer(make_relay, stream(start(), end("refusal")), foreign_call(HI))


@pytest.mark.parametrize(
    "events",
    [
        [start(), block(0, {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}})],
        [start(), text(0, "x"), end("pause_turn")],
    ],
)
async def test_unsupported_content_raises(events: Sequence[Json]) -> None:
    with pytest.raises(EngineError, match="which is not supported"):
        await relay_answer(make_relay, stream(*events), foreign_call(HI))


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def error(kind: str, message: str) -> Json:
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}


@pytest.mark.parametrize(
    ("status", "kind", "message", "raised", "words"),
    [
        (400, "invalid_request_error", "prompt is too long: 208310 tokens > 200000 maximum", ContextOverflow, "208310"),
        (400, "invalid_request_error", "messages.0: bad", EngineRejected, "messages.0"),
        (401, "authentication_error", "invalid x-api-key sk-ant", EngineError, "rejected the gateway's API key"),
        (402, "billing_error", "no credit", EngineError, "no credit"),
        (403, "permission_error", "not yours", EngineError, "not yours"),
        (404, "not_found_error", "model: x", EngineNotFound, "model: x"),
        (429, "rate_limit_error", "slow down", EngineBusy, "slow down"),
        (500, "api_error", "oops", EngineError, "oops"),
        (504, "timeout_error", "too long", EngineTimeout, "too long"),
        (529, "overloaded_error", "Overloaded", EngineBusy, "Overloaded"),
    ],
)
async def test_error_responses_map_to_exceptions(
    status: int, kind: str, message: str, raised: type[TurngateError], words: str
) -> None:
    for answer in (answer_with(error(kind, message), status), stream(start(), error(kind, message))):
        with pytest.raises(raised, match=words) as caught:
            await relay_answer(make_relay, answer, foreign_call(HI))
        assert type(caught.value) is raised and "sk-ant" not in caught.value.message
        if isinstance(caught.value, ContextOverflow):
            assert (caught.value.limit, caught.value.size) == (200_000, 208_310)


async def test_broken_stream_raises() -> None:
    with pytest.raises(EngineUnavailable, match="before the generation finished"):
        await relay_answer(make_relay, stream(start(), text(0, "x")), foreign_call(HI))
    with pytest.raises(EngineUnavailable):
        await relay_answer(make_relay, answer_stream(named_event(start()), 0.02, cut=True), foreign_call(HI))
    with pytest.raises(EngineError, match="cannot be decoded"):
        await relay_answer(make_relay, answer_stream(b"data: {}\n\n"), foreign_call(HI))
    block = b'{"type": "tool_use", "name": "bash", "input": {"command": "\xff"}}'
    opened = b'data: {"type": "content_block_start", "content_block": ' + block + b"}\n\n"
    with pytest.raises(EngineError, match="cannot be decoded"):
        await relay_answer(
            make_relay, answer_stream(opened, named_event({"type": "content_block_stop"})), foreign_call(HI)
        )
    with pytest.raises(BadRequest, match="JSON object"):
        await relay_answer(make_relay, OK, native_call("messages", b"[]"))


async def test_early_exit_closes_connection() -> None:
    server = StandIn(answer_stream(named_event(start()), *(named_event(e) for e in text(0, "x")), 3600.0))
    async with serving(server), started(make_relay(server.url)) as relay:
        async with relay.relay(RelayRequest(call=foreign_call(HI))) as chunks:
            assert (await anext(chunks)).events
        await asyncio.wait_for(server.hung_up.wait(), scaled(2))


# ── counting and health ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_count_uses_endpoint() -> None:
    async with serving(StandIn(answer_with({"input_tokens": 42}))) as server, started(make_relay(server.url)) as relay:
        mine = {"model": "agent's", "messages": BODY["messages"], "thinking": {"type": "adaptive"}}
        request = RelayRequest(call=native_call("messages", mine, forwarded_headers={"anthropic-beta": "b"}), model="m")
        assert await relay.count(request) == 42
        assert server.paths == ["/v1/messages/count_tokens"] and server.last_body == mine | {"model": "m"}
        assert server.headers[0]["anthropic-beta"] == "b"
        call = foreign_call(Message("system", "s"), HI, tools=[TOOL], max_tokens=5)
        assert await relay.count(RelayRequest(call=call)) == 42
        assert set(server.last_body) == {"model", "system", "messages", "tools"}
    with pytest.raises(EngineBusy):
        async with (
            serving(StandIn(answer_with(error("rate_limit_error", "no"), 429))) as server,
            started(make_relay(server.url)) as relay,
        ):
            await relay.count(RelayRequest(call=call))


@pytest.mark.parametrize(
    ("status", "body", "quoted"),
    [
        (404, {"detail": "Not Found"}, "Not Found"),
        (404, error("not_found_error", "model: m"), "model: m"),
        (405, "No", "No"),
    ],
)
async def test_missing_count_suggests_estimating(status: int, body: Json, quoted: str) -> None:
    async with serving(StandIn(answer_with(body, status))) as server, started(make_relay(server.url)) as relay:
        with pytest.raises(
            NotFound, match=rf"did not count the tokens \(anthropic: .*{quoted}.*\); estimate them instead"
        ):
            await relay.count(RelayRequest(call=foreign_call(HI), model="m"))


async def test_health() -> None:
    async with (
        serving(StandIn(documents={"/v1/models": {"data": []}})) as server,
        started(make_relay(server.url)) as relay,
    ):
        [health] = await relay.health()
        assert health.ok
    async with started(make_relay("http://127.0.0.1:1")) as relay:
        [health] = await relay.health()
        assert not health.ok and "127.0.0.1" not in health.detail


def test_encode_verbatim_is_json() -> None:
    assert json.loads(encode_verbatim([{"type": "text"}], ["a"])) == {"ids": ["a"], "turn": [{"type": "text"}]}
