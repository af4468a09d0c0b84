"""Test OpenAI Chat Completions: decoding of the shapes agents send, and encoding of every reply."""

from __future__ import annotations

import json
from typing import Any

import pytest

from turngate.dialects.base import WireRequest
from turngate.dialects.chat import Chat
from turngate.errors import (
    BadRequest,
    Conflict,
    ContextOverflow,
    EngineBusy,
    EngineError,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    NotFound,
    StoreError,
    TooLarge,
    TurngateError,
    Unauthorized,
    Unprocessable,
)
from turngate.types import Call, CallDelta, Constraint, Delta, Done, KeepAlive, Message, TokenScore, ToolCall, Usage

Json = Any
HI = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
chat = Chat()


def decode(headers: dict[str, str] | None = None, **body: Json) -> Call:
    return chat.decode(WireRequest(json.dumps({"model": "m", "messages": [HI], **body}).encode(), headers or {}))


def message(wire: Json) -> Message:
    """Decode one wire message."""
    [got] = decode(messages=[wire]).history.decode(0)
    return got


def decode_error(**body: Json) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        call = decode(**body)
        for n in range(len(call.history.raws)):
            call.history.decode(n)
        if call.tools is not None:
            call.tools.decode()
    return caught.value


def assistant(**fields: Json) -> Message:
    return message({"role": "assistant", **fields})


def call(**function: Json) -> Json:
    return {"id": "c1", "type": "function", "function": {"name": "f", **function}}


# ── messages ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "content",
    [
        "Hello",
        [{"type": "text", "text": "Hello"}],
        [{"type": "input_text", "text": "Hello"}],
        [{"type": "output_text", "text": "Hello", "annotations": []}],
        [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}],
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_text_content_forms(role: str, content: Json) -> None:
    assert message({"role": role, "content": content}).content == "Hello"


@pytest.mark.parametrize("fields", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_empty_content_forms(fields: Json) -> None:
    assert assistant(**fields, tool_calls=[call(arguments="{}")]).content == ""


def test_roles() -> None:
    assert message({"role": "developer", "content": "x"}) == Message("system", "x")
    assert message({"role": "system", "content": "x", "name": "n"}).role == "system"
    assert message({"role": "user", "content": "x", "name": "ann"}) == Message("user", "x", name="ann")
    tool = message({"role": "tool", "content": "x", "tool_call_id": "c1", "name": "f"})
    assert tool == Message("tool", "x", tool_call_id="c1", name="f")


def test_refusal_becomes_content() -> None:
    assert assistant(content=None, refusal="No.").content == "No."
    assert assistant(content=[{"type": "refusal", "refusal": "No."}]).content == "No."
    assert assistant(content="Yes.", refusal=None).content == "Yes."


def test_reasoning_in_either_field() -> None:
    assert assistant(content="x", reasoning="r").reasoning == "r"
    assert assistant(content="x", reasoning_content="r").reasoning == "r"
    assert assistant(content="x", reasoning_content="r", reasoning="r").reasoning == "r"
    assert assistant(content="x", reasoning=None, reasoning_content=None).reasoning == ""


@pytest.mark.parametrize(
    ("wire", "expected"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ('{"a":1}', '{"a":1}'),  # exactly as the model wrote it
        ({"a": 1}, '{"a": 1}'),  # an object instead of a string
        ({}, "{}"),
        ("", "{}"),
        (None, "{}"),
        ("null", "{}"),
        ("not json", "not json"),
        ('{"a": "\\ud83d\\ude00 \\u00e9"}', '{"a": "\\ud83d\\ude00 \\u00e9"}'),
    ],
)
def test_argument_forms(wire: Json, expected: str) -> None:
    [got] = assistant(tool_calls=[call(arguments=wire)]).tool_calls
    assert (got.id, got.name, got.arguments) == ("c1", "f", expected)


def test_minimal_tool_calls() -> None:
    [got] = assistant(tool_calls=[{"function": {"name": "f"}}]).tool_calls
    assert got == ToolCall("", "f", "{}")
    assert assistant(content="x", tool_calls=[]).tool_calls == assistant(content="x", tool_calls=None).tool_calls == ()


def test_tool_result_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert message({"role": "tool", "tool_call_id": "c1", "content": parts}).content == "one\ntwo"
    assert message({"role": "tool", "tool_call_id": "", "content": None}).content == ""


def test_unknown_fields_are_ignored() -> None:
    got = assistant(content="x", audio=None, annotations=[], provider_specific_fields={"a": 1}, function_call=None)
    assert got == Message("assistant", "x")
    assert decode(store=True, verbosity="low", prediction=None, unheard_of={"deep": [1]}).model == "m"


@pytest.mark.parametrize(
    ("wire", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "function", "content": "x"}, "messages[0].name"),
        ({"role": "assistant", "function_call": {"arguments": ""}}, "messages[0]"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "messages[0].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{"id": "x", "custom": {"input": ""}}]}, "messages[0]"),
        ({"role": "assistant", "tool_calls": "f"}, "messages[0]"),
        ({"role": "user", "content": {"text": "x"}}, "messages[0]"),
        ({"content": "x"}, "messages[0]"),
        ("Hi", "messages[0]"),
        (None, "messages[0]"),
    ],
)
def test_invalid_message_names_its_position(wire: Json, param: str) -> None:
    error = decode_error(messages=[wire])
    assert error.param == param and error.message.startswith("messages[0]")


@pytest.mark.parametrize(
    ("role", "parts", "place"),
    [
        ("user", [{"type": "image_url", "image_url": {"url": "x"}}], "messages[0].content[0]: "),
        ("user", [{"type": "text", "text": "a"}, {"type": "file", "file": {}}], "messages[0].content[1]: "),
        ("tool", [{"type": "input_audio"}], "messages[0].content[0]: "),
    ],
)
def test_non_text_parts_are_marked_unsupported(role: str, parts: Json, place: str) -> None:
    """Unsupported parts are marked, not refused, because an endpoint of this dialect may accept images."""
    got = message({"role": role, "content": parts, "tool_call_id": "c"})
    assert got.unsupported.startswith(place) and f"[{parts[-1]['type']} " in got.content


def test_different_images_have_different_content() -> None:
    one, other = (
        message({"role": "user", "content": [{"type": "image_url", "image_url": {"url": u}}]}) for u in ("a", "b")
    )
    assert one.content != other.content and one.unsupported == other.unsupported


def test_messages_are_decoded_lazily() -> None:
    """Known messages are matched by their bytes, so a long history is not decoded again."""
    got = decode(messages=[{"role": "wizard"}, HI])
    assert len(got.history.raws) == 2 and got.history.decode(1) == (Message("user", "Hi"),)
    with pytest.raises(BadRequest):
        got.history.decode(0)


def test_raw_messages_are_the_sent_bytes() -> None:
    raws = [b'{ "role":"user" ,"content": "a\\u00e9" }', b'{"content":"b","role":"user"}']
    body = b' {"stop": null, "messages" : [ ' + b" ,\n".join(raws) + b' ], "model":"m"}'
    assert [bytes(raw) for raw in chat.decode(WireRequest(body)).history.raws] == raws


# ── other request fields ────────────────────────────────────────────────────────────────────────────────────────────


def test_minimal_request() -> None:
    got = chat.decode(WireRequest(b'{"messages": [{"role": "user", "content": "Hi"}]}'))
    assert (got.model, got.tools, got.sampling, got.max_tokens, got.stop) == ("", None, {}, None, ())
    assert (got.constraint, got.stream, got.include_usage, got.retried) == (None, False, False, False)
    assert got.parallel_tool_calls and got.template_kwargs == {} and got.idempotency_key == ""


NULLS = (
    *("stream", "stream_options", "tools", "tool_choice", "parallel_tool_calls", "response_format", "max_tokens"),
    *(
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "stop",
    ),
    *("n", "logprobs", "top_logprobs", "logit_bias", "functions", "function_call", "modalities", "audio"),
    *("chat_template_kwargs", "reasoning_effort", "web_search_options"),
)


def test_null_fields_equal_missing_fields() -> None:
    got, plain = decode(**dict.fromkeys(NULLS)), decode()
    for field in Call.__struct_fields__:
        if field not in ("body", "history"):
            assert getattr(got, field) == getattr(plain, field), field


def test_sampling_parameters() -> None:
    got = decode(temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=-3, presence_penalty=-2, frequency_penalty=2)
    assert got.sampling == {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 0,
        "min_p": 0.1,
        "seed": -3,
        "presence_penalty": -2,
        "frequency_penalty": 2,
    }


def test_stop_strings_and_max_tokens() -> None:
    assert decode(stop="x").stop == ("x",) and decode(stop=["x", "y"]).stop == ("x", "y")
    assert decode(max_tokens=5).max_tokens == decode(max_completion_tokens=5, max_tokens=9).max_tokens == 5


def test_stream_and_include_usage() -> None:
    assert decode(stream=True).stream and not decode(stream=True).include_usage
    assert decode(stream=True, stream_options={"include_usage": True, "include_obfuscation": False}).include_usage


def test_retry_headers() -> None:
    assert not decode({"x-stainless-retry-count": "0"}).retried and decode({"x-stainless-retry-count": "2"}).retried
    assert decode({"idempotency-key": "k1"}).idempotency_key == "k1"


def test_api_key_header() -> None:
    for header, key in [
        ("Bearer abc", "abc"),
        ("bearer  abc ", "abc"),
        ("BEARER abc", "abc"),
        ("Basic abc", ""),
        ("abc", ""),
        ("Bearer", ""),
        ("", ""),
    ]:
        assert chat.read_key({"authorization": header}, {}) == key
    assert chat.read_key({}, {}) == ""


def test_template_arguments() -> None:
    got = decode(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert got.template_kwargs == {"enable_thinking": False}
    assert got.template_hints == {"reasoning_effort": "low"}  # applies if the template supports it


# ── tools and constraints ───────────────────────────────────────────────────────────────────────────────────────────


def test_tools_keep_their_wire_form() -> None:
    got = decode(tools=[{**TOOL, "strict": True}])
    assert got.tools is not None
    [tool] = got.tools.decode()
    assert (tool.name, tool.wire) == ("f", {**TOOL, "strict": True})
    assert decode(tools=[]).tools is None and decode(tools=[TOOL], tool_choice="none").tools is None
    assert decode(tools=[TOOL], tool_choice="auto").tools is not None


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("f", "tools"),
        ([5], "tools"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([TOOL, {"function": {"name": "g"}}], "tools[1].type"),
        ([{"type": "function"}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": ""}}], "tools[0].function.name"),
        ([{"type": "function", "function": "f"}], "tools[0].function.name"),
    ],
)
def test_invalid_tool_names_its_position(tools: Json, param: str) -> None:
    assert decode_error(tools=tools).param == param


def test_forced_tool_constraints() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    assert decode(tools=[TOOL], tool_choice=named).constraint == Constraint("tool", {"type": "object"}, "f")
    required = decode(tools=[TOOL, {"type": "function", "function": {"name": "g"}}], tool_choice="required").constraint
    assert required is not None and required.kind == "tools"
    names = [item["properties"]["name"]["const"] for item in required.schema["items"]["anyOf"]]
    assert names == ["f", "g"] and required.schema["items"]["anyOf"][1]["properties"]["arguments"] == {"type": "object"}


PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Patches files."}}
OTHER = {"type": "function", "function": {"name": "g"}}


def names_of(call: Call) -> list[str]:
    return [] if call.tools is None else [tool.name for tool in call.tools.decode()]


def allow(mode: str, *tools: Json) -> Json:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def test_custom_tool_is_a_function_to_the_model() -> None:
    got = decode(tools=[PATCH, TOOL]).tools
    assert got is not None
    patch, function = got.decode()
    assert function.wire == TOOL and patch.name == "patch"
    about = patch.wire["function"]
    assert about["description"].startswith("Patches files.") and about["parameters"]["required"] == ["input"]
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: WORD"}}
    limited = decode(tools=[{"type": "custom", "custom": {"name": "patch", "format": grammar}}]).tools
    assert limited is not None and limited.decode()[0].wire["function"]["description"].endswith("start: WORD")


def test_custom_tool_can_be_forced() -> None:
    forced = decode(tools=[PATCH, TOOL], tool_choice={"type": "custom", "custom": {"name": "patch"}}).constraint
    assert forced is not None and (forced.kind, forced.tool) == ("tool", "patch")
    assert forced.schema["required"] == ["input"]


def test_allowed_tools() -> None:
    named = {"type": "function", "function": {"name": "g"}}
    some = decode(tools=[TOOL, OTHER, PATCH], tool_choice=allow("auto", named, PATCH))
    assert names_of(some) == ["g", "patch"] and some.constraint is None
    assert names_of(decode(tools=[TOOL], tool_choice=allow("auto"))) == []
    required = decode(tools=[TOOL, OTHER], tool_choice=allow("required", named))
    assert names_of(required) == ["f", "g"]  # the others stay in the prompt; the constraint rules them out
    assert required.constraint is not None
    items = required.constraint.schema["items"]["anyOf"]
    assert [item["properties"]["name"]["const"] for item in items] == ["g"]


def test_allowed_tools_can_be_read_back_from_a_store() -> None:
    tools = decode(tools=[TOOL, OTHER], tool_choice=allow("auto", OTHER)).tools
    assert tools is not None
    assert chat.read_stored_tools(tools.raw).decode() == tools.decode()
    whole = decode(tools=[TOOL, OTHER]).tools
    assert whole is not None and chat.read_stored_tools(whole.raw).decode() == whole.decode()


def test_old_functions_are_tools() -> None:
    functions = [{"name": "f", "description": "d", "parameters": {"type": "object"}}, {"name": "g"}]
    got = decode(functions=functions)
    assert got.tools is not None and not got.parallel_tool_calls
    assert [tool.wire for tool in got.tools.decode()] == [{"type": "function", "function": f} for f in functions]
    assert names_of(decode(functions=functions, function_call="none")) == []
    forced = decode(functions=functions, function_call={"name": "g"}).constraint
    assert forced == Constraint("tool", {"type": "object"}, "g")


def test_error_in_old_functions_names_their_field() -> None:
    deep: Json = {}
    for _ in range(200):
        deep = {"items": deep}
    tools = decode(functions=[{"name": "f"}, {"name": "g", "parameters": deep}]).tools
    assert tools is not None
    with pytest.raises(BadRequest, match=r"^functions\[1\] is nested too deeply") as caught:
        tools.decode()
    assert caught.value.param == "functions[1]"


def test_forced_tool_overrides_response_format() -> None:
    got = decode(tools=[TOOL], tool_choice="required", response_format={"type": "json_object"}).constraint
    assert got is not None and got.kind == "tools"
    assert (
        decode_error(tools=[TOOL], tool_choice="required", response_format={"type": "xml"}).param == "response_format"
    )


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"logprobs": False}, None),
        ({"top_logprobs": 0}, None),
        ({}, None),
    ],
)
def test_logprobs(body: Json, count: int | None) -> None:
    assert decode(**body).top_logprobs == count


def test_response_formats() -> None:
    schema = {"type": "object"}
    assert decode(response_format={"type": "text"}).constraint is None
    assert decode(response_format={"type": "json_object"}).constraint == Constraint("json_object")
    json_schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    assert decode(response_format=json_schema).constraint == Constraint("json_schema", schema)
    for invalid in ("json", {"type": "yaml"}, {}, {"type": "json_schema", "json_schema": {"name": "n"}}):
        assert decode_error(response_format=invalid).param == "response_format"


# ── replies ─────────────────────────────────────────────────────────────────────────────────────────────────────────

USAGE = Usage(10, 3)


def encode_reply(message: Message, finish: Any = "stop", usage: Usage | None = USAGE) -> Json:
    return json.loads(chat.encode_reply(decode(), Done(finish, message, usage, 1)))


def test_whole_reply() -> None:
    got = encode_reply(Message("assistant", "Hello."))
    assert got.pop("id").startswith("chatcmpl-") and got.pop("created") > 1_600_000_000
    message = {"role": "assistant", "content": "Hello.", "refusal": None}
    assert got == {
        "object": "chat.completion",
        "model": "m",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13},
    }


def test_content_is_null_only_with_tool_calls() -> None:
    with_calls = encode_reply(Message("assistant", tool_calls=(ToolCall("c1", "f", '{"a": 1}'),)), "tool_calls")[
        "choices"
    ][0]
    assert with_calls["message"]["content"] is None and with_calls["finish_reason"] == "tool_calls"
    assert with_calls["message"]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    ]
    silent = encode_reply(Message("assistant"))["choices"][0]["message"]
    assert silent["content"] == "" and "tool_calls" not in silent and "reasoning" not in silent


def test_reasoning_is_sent_in_both_fields() -> None:
    got = encode_reply(Message("assistant", "x", "thought"))["choices"][0]["message"]
    assert got["reasoning"] == got["reasoning_content"] == "thought"


CUSTOM_REPLIES = [
    ('{"input": "*** Begin\\n"}', "*** Begin\n", "call_1"),
    ('{"input":""}', "", "call_1"),
    ('{"input": "x", "more": 1}', '{"input": "x", "more": 1}', "call_args_1"),
    ("not json", "not json", "call_args_1"),
]


@pytest.mark.parametrize(("arguments", "text", "call_id"), CUSTOM_REPLIES)
def test_custom_call_round_trips(arguments: str, text: str, call_id: str) -> None:
    """The agent sees the input, and sends it back as the arguments that the model wrote."""
    sampled = ToolCall("call_1", "patch", arguments)
    reply = Done("tool_calls", Message("assistant", tool_calls=(sampled,)), USAGE, 1)
    wire = json.loads(chat.encode_reply(decode(tools=[PATCH]), reply))["choices"][0]["message"]
    assert wire["tool_calls"] == [{"id": call_id, "type": "custom", "custom": {"name": "patch", "input": text}}]
    [streamed] = [
        chunk["choices"][0]["delta"]["tool_calls"]
        for chunk in encode_stream(CallDelta(0, sampled), reply, tools=[PATCH])
        if chunk != "data: [DONE]" and "tool_calls" in chunk["choices"][0]["delta"]
    ]
    assert streamed == [{"index": 0, **wire["tool_calls"][0]}]
    [got] = assistant(**wire).tool_calls
    assert (got.id, got.name, json_or_text(got.arguments)) == ("call_1", "patch", json_or_text(arguments))
    answer = message({"role": "tool", "tool_call_id": call_id, "content": "ok"})
    assert answer.tool_call_id == "call_1"


def json_or_text(text: str) -> Json:
    try:
        return json.loads(text)
    except ValueError:
        return text


def test_old_function_call_round_trips() -> None:
    sampled = Message("assistant", "", "", (ToolCall("call_9", "f", '{"a": 1}'),))
    done = Done("tool_calls", sampled, USAGE, 1)
    [choice] = json.loads(chat.encode_reply(decode(functions=[{"name": "f"}]), done))["choices"]
    assert choice["finish_reason"] == "function_call" and "tool_calls" not in choice["message"]
    assert choice["message"]["function_call"] == {"name": "f", "arguments": '{"a": 1}'}
    *chunks, _ = encode_stream(CallDelta(0, sampled.tool_calls[0]), done, functions=[{"name": "f"}])
    assert chunks[1]["choices"][0]["delta"] == {"function_call": {"name": "f", "arguments": '{"a": 1}'}}
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"
    [call] = assistant(**choice["message"]).tool_calls
    answer = message({"role": "function", "name": "f", "content": "A"})
    assert (call.name, call.arguments) == ("f", '{"a": 1}')
    assert answer == Message("tool", "A", tool_call_id=call.id, name="f") and call.id.startswith("call_")


def test_scores_are_sent_without_ids() -> None:
    scores = (
        TokenScore("Hi", b"Hi", -0.5, (TokenScore("Hi", b"Hi", -0.5), TokenScore("Yo", b"Yo", -1.5))),
        TokenScore("\ufffd", b"\xf0", None),
    )
    done = Done("stop", Message("assistant", "Hi"), USAGE, 1, "", scores)
    [choice] = json.loads(chat.encode_reply(decode(logprobs=True), done))["choices"]
    hi = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}
    yo = {"token": "Yo", "logprob": -1.5, "bytes": [89, 111]}
    content = [
        {**hi, "top_logprobs": [hi, yo]},
        {"token": "\ufffd", "logprob": None, "bytes": [240], "top_logprobs": []},
    ]
    assert choice["logprobs"] == {"content": content, "refusal": None}
    *chunks, _ = encode_stream(Delta("content", "Hi"), Delta("content", "", scores), done, logprobs=True)
    sent = [c["choices"][0]["logprobs"] for c in chunks]
    assert sent == [None, None, choice["logprobs"], None]  # once, although `Done` has them too


def test_unknown_usage_is_null() -> None:
    assert encode_reply(Message("assistant", "x"), usage=None)["usage"] is None


def encode_stream(*events: Any, **body: Json) -> list[Json]:
    encoder = chat.open_stream(decode(stream=True, **body))
    data = encoder.begin() + b"".join(encoder.event(event) for event in events)
    *parts, rest = data.decode().split("\n\n")
    assert rest == "" and all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [part if part == "data: [DONE]" else json.loads(part.removeprefix("data: ")) for part in parts]


def test_streamed_reply() -> None:
    tool_call = ToolCall("c1", "f", '{"a": "line\\n"}')
    done = Done("tool_calls", Message("assistant", "Hi\n\n", "r", (tool_call,)), USAGE, 1)
    events = (Delta("reasoning", "r"), Delta("content", "Hi\n\n"), KeepAlive(), CallDelta(0, tool_call), done)
    *chunks, end = encode_stream(*events)
    assert end == "data: [DONE]"
    assert {(c["id"], c["object"], c["model"]) for c in chunks} == {(chunks[0]["id"], "chat.completion.chunk", "m")}
    wire = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "line\\n"}'}}
    assert [c["choices"][0]["delta"] for c in chunks] == [
        {"role": "assistant", "content": ""},
        {"reasoning": "r", "reasoning_content": "r"},
        {"content": "Hi\n\n"},
        {},
        {"tool_calls": [wire]},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 5 + ["tool_calls"]
    assert all("usage" not in c and c["choices"][0]["logprobs"] is None for c in chunks)


def test_streamed_reply_with_usage() -> None:
    *chunks, last, _ = encode_stream(
        Delta("content", "x"), Done("stop", Message("assistant", "x"), USAGE, 1), stream_options={"include_usage": True}
    )
    assert all(c["usage"] is None for c in chunks)
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 13


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "retry"),
    [
        (BadRequest("x", param="n"), 400, "invalid_request_error", "invalid_request_error", False),
        (ContextOverflow("x"), 400, "invalid_request_error", "context_length_exceeded", False),
        (Unauthorized("x"), 401, "authentication_error", "invalid_api_key", False),
        (NotFound("x"), 404, "not_found_error", "not_found", False),
        (Conflict("x"), 409, "conflict_error", "conflict", False),
        (TooLarge("x"), 413, "invalid_request_error", "request_too_large", False),
        (Unprocessable("x"), 422, "invalid_request_error", "invalid_request_error", False),
        (EngineRejected("x"), 400, "invalid_request_error", "invalid_request_error", False),
        (EngineBusy("x"), 429, "rate_limit_error", "rate_limit_exceeded", True),
        (EngineError("x"), 502, "server_error", "engine_error", False),
        (EngineUnavailable("x"), 503, "server_error", "engine_unavailable", True),
        (EngineTimeout("x"), 504, "server_error", "engine_timeout", True),
        (StoreError("x"), 503, "server_error", "store_error", False),
    ],
)
def test_error_bodies_and_statuses(error: TurngateError, status: int, kind: str, code: str, retry: bool) -> None:
    body = {"error": {"message": "x", "type": kind, "param": error.param, "code": code}}
    assert json.loads(chat.encode_error(error)) == body and (error.status, error.retry_safe) == (status, retry)
    in_stream = chat.open_stream(decode(stream=True)).error(error)
    assert in_stream.startswith(b"data: ") and in_stream.endswith(b"\n\n")
    assert json.loads(in_stream.removeprefix(b"data: ")) == body


def test_list_models() -> None:
    got = json.loads(chat.encode_models(["a", "b"], 5))
    assert got["object"] == "list" and [m["id"] for m in got["data"]] == ["a", "b"]
    assert got["data"][0] == {"id": "a", "object": "model", "created": 5, "owned_by": "turngate"}
