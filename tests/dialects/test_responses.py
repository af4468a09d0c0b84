"""Test OpenAI Responses: decoding of the items agents send, and encoding of every event."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from turngate.dialects import decode_stored_messages
from turngate.dialects.base import EarlierReply, ReplyRecord, WireRequest
from turngate.dialects.responses import Responses
from turngate.dialects.responses_items import (
    encode_message,
    encode_page,
    list_input,
    read_output,
    read_page,
    rebuild_reply,
    response_of_item,
)
from turngate.errors import (
    BadRequest,
    Conflict,
    ContextOverflow,
    EngineBusy,
    EngineError,
    EngineUnavailable,
    NotFound,
    Stopping,
    TooLarge,
    TurngateError,
    Unauthorized,
)
from turngate.trace.message_equality import RequestMessages
from turngate.types import (
    Call,
    CallDelta,
    Constraint,
    Delta,
    Done,
    Finish,
    KeepAlive,
    Message,
    ReplyEvent,
    ToolCall,
    Usage,
)

Json = Any
responses = Responses()
event_adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)

PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
RUN = {"type": "function", "name": "run", "description": "Runs.", "parameters": {"type": "object"}, "strict": False}
TEAM = {"type": "namespace", "name": "team", "description": "Helpers.", "tools": [{**RUN, "name": "spawn"}, PATCH]}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": {"type": "object"}}


def decode(headers: dict[str, str] | None = None, **body: Json) -> Call:
    return responses.decode(WireRequest(json.dumps({"model": "m", "input": "Hi", **body}).encode(), headers or {}))


def decode_pieces(*items: Json, **body: Json) -> list[tuple[Message, ...]]:
    """Decode the messages of each piece of these items."""
    history = decode(input=list(items), **body).history
    return [history.decode(n) for n in range(len(history.raws))]


def messages(*items: Json, **body: Json) -> list[Message]:
    return [message for piece in decode_pieces(*items, **body) for message in piece]


def decode_error(**body: Json) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        call = decode(**body)
        for n in range(len(call.history.raws)):
            call.history.decode(n)
        if call.tools is not None:
            call.tools.decode()
    return caught.value


def message_item(text: str, **fields: Json) -> Json:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **fields}


def reasoning_item(text: str, **fields: Json) -> Json:
    return {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": text}], **fields}


def call_item(call_id: str, arguments: str = "{}", **fields: Json) -> Json:
    return {"type": "function_call", "call_id": call_id, "name": "run", "arguments": arguments, **fields}


def result_item(call_id: str, output: Json = "ok") -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def visible_functions(*tools: Json, **body: Json) -> dict[str, Json]:
    """Return the functions that the model sees."""
    call = decode(tools=list(tools), **body)
    return {tool.name: tool.wire["function"] for tool in call.tools.decode()} if call.tools is not None else {}


# ── input items ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_string_input_and_instructions() -> None:
    history = decode(input="Hi", instructions="Be brief.").history
    assert [history.decode(n) for n in range(2)] == [(Message("system", "Be brief."),), (Message("user", "Hi"),)]


@pytest.mark.parametrize(
    ("role", "ours"), [("system", "system"), ("developer", "system"), ("user", "user"), ("assistant", "assistant")]
)
@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize(
    "content",
    [
        "Hello",
        [{"type": "input_text", "text": "Hello"}],
        [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
        [{"type": "text", "text": "Hello"}],
        [{"type": "refusal", "refusal": "Hello"}],
    ],
)
def test_message_forms(role: str, ours: str, typed: bool, content: Json) -> None:
    item = {"role": role, "content": content, **({"type": "message", "id": "msg_1", "status": "done"} if typed else {})}
    [message] = messages(item)
    assert (message.role, message.content) == (ours, "Hello")


@pytest.mark.parametrize(
    ("texts", "expected"),
    [(["One.", "Two."], "One.\nTwo."), (["Output:\n", "x"], "Output:\nx"), (["", "x"], "x"), ([], "")],
)
def test_text_parts_are_separate_lines(texts: list[str], expected: str) -> None:
    parts = [{"type": "input_text", "text": text} for text in texts]
    assert [m.content for m in messages({"role": "user", "content": parts}, result_item("c", parts))] == [expected] * 2


def test_items_of_one_turn_become_one_message() -> None:
    [turn] = messages(
        reasoning_item("Hm."), message_item("Well, "), message_item("yes."), call_item("a", '{"x":1}'), call_item("b")
    )
    assert turn == Message(
        "assistant", "Well, yes.", "Hm.", (ToolCall("a", "run", '{"x":1}'), ToolCall("b", "run", "{}"))
    )


def test_other_items_separate_turns() -> None:
    pieces = decode_pieces(
        message_item("One."),
        {"role": "user", "content": "And?"},
        reasoning_item("Hm."),
        call_item("a"),
        result_item("a"),
        message_item("Two."),
    )
    assert [[m.role for m in piece] for piece in pieces] == [
        ["assistant"],
        ["user"],
        ["assistant"],
        ["tool"],
        ["assistant"],
    ]


def test_own_ids_separate_adjacent_turns() -> None:
    first, second = reply_items(Delta("content", "One.")), reply_items(Delta("content", "Two."))
    assert [m.content for m in messages(*first, *second)] == ["One.", "Two."]
    for item in second:
        del item["id"]
    assert [m.content for m in messages(*first, *second)] == ["One.Two."]


def test_interleaved_calls_and_results_are_one_turn() -> None:
    thinking, first, second = reply_items(Delta("reasoning", "Both."), call_delta("a", "run"), call_delta("b", "run"))
    interleaved = messages(
        thinking, first, result_item("a"), second, result_item("b"), {"role": "user", "content": "Go on"}
    )
    ordered = messages(
        thinking, first, second, result_item("a"), result_item("b"), {"role": "user", "content": "Go on"}
    )
    assert interleaved == ordered
    assert [m.role for m in interleaved] == ["assistant", "tool", "tool", "user"]
    # Without our ids they are two turns.
    for item in (first, second):
        del item["id"]
    assert [m.role for m in messages(first, result_item("a"), second, result_item("b"))] == ["assistant", "tool"] * 2


def test_stored_messages_decode_the_same() -> None:
    items = [
        *reply_items(Delta("reasoning", "Hm."), Delta("content", "One."), call_delta("a", "run")),
        result_item("a"),
        message_item("Two."),
    ]
    history = decode(input=items, instructions="Be brief.").history
    stored = b"[" + b",".join(history.raws) + b"]"
    assert decode_stored_messages("responses", stored) == [
        m for n in range(len(history.raws)) for m in history.decode(n)
    ]


def test_unchanged_history_keeps_its_bytes() -> None:
    items = [
        {"role": "user", "content": "Hi"},
        *reply_items(Delta("content", "One."), call_delta("a", "run")),
        result_item("a"),
    ]
    before = decode(input=items, instructions="Be brief.").history.raws
    after = decode(input=[*items, message_item("Two."), {"role": "user", "content": "Go on"}], instructions="Be brief.")
    assert list(after.history.raws[: len(before)]) == list(before)


@pytest.mark.parametrize(
    ("item", "reasoning", "signature"),
    [
        (reasoning_item("Hm."), "Hm.", ""),
        ({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}, "Hm.", ""),
        (reasoning_item("short", content=[{"type": "reasoning_text", "text": "long"}]), "long", ""),
        (reasoning_item("Hm.", content=None, encrypted_content="gAAAA=="), "Hm.", "gAAAA=="),
        ({"type": "reasoning", "summary": [], "encrypted_content": "gAAAA=="}, "", "gAAAA=="),
        (reasoning_item("One.", summary=[{"text": "One."}, {"text": "Two."}]), "One.\n\nTwo.", ""),
    ],
)
def test_reasoning_item_forms(item: Json, reasoning: str, signature: str) -> None:
    [turn] = messages(item, message_item("x"))
    assert (turn.reasoning, turn.signature) == (reasoning, signature)


@pytest.mark.parametrize("output", ["ok", [{"type": "input_text", "text": "ok"}]])
@pytest.mark.parametrize("kind", ["function_call_output", "custom_tool_call_output"])
def test_tool_result_forms(kind: str, output: Json) -> None:
    item = {"type": kind, "id": "x", "call_id": "c", "output": output, "status": "completed"}
    assert messages(item) == [Message("tool", "ok", tool_call_id="c")]


def test_agent_message_becomes_user_message() -> None:
    content = [
        {"type": "input_text", "text": "Sender: /root\nPayload:\n"},
        {"type": "encrypted_content", "encrypted_content": "Count the files."},
    ]
    item = {"type": "agent_message", "author": "/root", "recipient": "/root/count", "content": content}
    assert messages(item) == [Message("user", "Sender: /root\nPayload:\nCount the files.")]


def test_object_and_missing_arguments() -> None:
    [turn] = messages(
        {**call_item("a"), "arguments": {"x": 1}}, call_item("b", ""), {**call_item("c"), "arguments": None}
    )
    assert [call.arguments.replace(" ", "") for call in turn.tool_calls] == ['{"x":1}', "{}", "{}"]


@pytest.mark.parametrize("kind", ["input_image", "input_file", "input_audio"])
def test_non_text_part_names_its_position(kind: str) -> None:
    first, second = (messages({"role": "user", "content": [{"type": kind, "image_url": url}]})[0] for url in ("a", "b"))
    assert first.unsupported == f"input[0].content[0].type: {kind!r} parts are not supported here; send text instead"
    assert first.content != second.content or kind != "input_image"
    [tool] = messages(result_item("c", [{"type": kind}]))
    assert tool.unsupported.startswith("input[0].output[0].type:")


def test_provider_tool_item_names_its_position() -> None:
    [turn] = messages(
        reasoning_item("Hm."), {"type": "web_search_call", "id": "ws_1", "action": {}}, message_item("Found.")
    )
    assert turn.content == "Found." and turn.unsupported.startswith("input[1].type: 'web_search_call'")
    [answer] = messages({"type": "computer_call_output", "call_id": "c", "output": {}} | {"output": None})
    assert answer.unsupported.startswith("input[0].type: 'computer_call_output'")


INVALID_ITEMS: dict[str, tuple[Json, str]] = {
    "unknown type": ({"type": "hologram"}, "input[0].type 'hologram'"),
    "compaction of another provider": ({"type": "compaction", "encrypted_content": "x"}, "input[0].type 'compaction'"),
    "reference": ({"type": "item_reference", "id": "msg_1"}, "input[0]: no item with id 'msg_1' is stored"),
    "untyped reference": ({"id": "msg_1"}, "input[0]: no item with id 'msg_1' is stored"),
    "role": (
        {"role": "critic", "content": "x"},
        "input[0].role must be one of system, developer, user, assistant, not 'critic'",
    ),
    "part": ({"role": "user", "content": [{"type": "smell"}]}, "input[0].content[0].type 'smell'"),
    "content": ({"role": "user", "content": 7}, "input[0].content: Expected"),
    "item": (7, "input[0]: Expected `object`"),
    "type of type": ({"type": 7}, "input[0].type: Expected"),
    "call without id": ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[0].call_id is missing"),
    "call without name": ({"type": "function_call", "call_id": "c", "arguments": "{}"}, "input[0].name is missing"),
    "custom call without input": (
        {"type": "custom_tool_call", "call_id": "c", "name": "p"},
        "input[0].input is missing",
    ),
    "result without id": (
        {"type": "function_call_output", "output": "x"},
        "input[0].call_id is missing; a result needs",
    ),
    "result that is an object": (result_item("c", {"a": 1}), "input[0].output: Expected"),
    "tools not a list": ({"type": "additional_tools", "role": "developer", "tools": 7}, "input[0].tools: Expected"),
}


@pytest.mark.parametrize("case", INVALID_ITEMS)
def test_invalid_item_names_its_position(case: str) -> None:
    item, message = INVALID_ITEMS[case]
    error = decode_error(input=[item])
    assert error.message.startswith(message) and error.param and error.param.startswith("input[0]")
    # The position is that in the input list, not that of the piece.
    error = decode_error(
        instructions="Be brief.", input=[message_item("a"), message_item("b"), {"role": "user", "content": "x"}, item]
    )
    assert error.message.startswith(message.replace("input[0]", "input[3]"))


def test_invalid_item_inside_turn_names_its_position() -> None:
    error = decode_error(
        input=[
            message_item("a"),
            message_item("b"),
            {**message_item("c"), "content": [{"type": "output_text", "text": 7}]},
        ]
    )
    assert error.message.startswith("input[2].content[0].text: Expected") and error.param == "input[2].content[0].text"


# ── request fields ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_codex_request() -> None:
    """Decode the fields that Codex sends."""
    call = decode(
        {"authorization": "Bearer k", "openai-beta": "x=1", "session-id": "s"},
        tools=[RUN],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "low", "summary": "auto", "context": "all_turns"},
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        text={"verbosity": "low"},
        client_metadata={"thread_id": "t"},
        service_tier="auto",
        truncation="auto",
        metadata={"a": "b"},
        stream_options={"include_obfuscation": False},
        max_tool_calls=3,
        user="u",
    )
    assert call.dialect == "responses" and call.stream and call.parallel_tool_calls and call.constraint is None
    assert call.template_hints == {"reasoning_effort": "low", "verbosity": "low"} and call.template_kwargs == {}
    assert call.forwarded_headers == {"openai-beta": "x=1"}
    assert json.loads(call.body)["prompt_cache_key"] == "k"


def test_reasoning_effort_becomes_template_hint() -> None:
    assert decode(reasoning={"effort": "xhigh"}).template_hints == {"reasoning_effort": "high"}
    none = decode(reasoning={"effort": "none"}).template_hints
    assert none == {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    assert decode(reasoning={"summary": "auto"}).template_hints == decode(reasoning=None).template_hints == {}


def test_sampling_max_tokens_and_retry_headers() -> None:
    call = decode(
        {"x-stainless-retry-count": "1", "idempotency-key": "i"}, temperature=0.5, top_p=0.9, max_output_tokens=7
    )
    assert (call.sampling, call.max_tokens) == ({"temperature": 0.5, "top_p": 0.9}, 7)
    assert call.retried and call.idempotency_key == "i" and not call.stream
    assert decode(chat_template_kwargs={"x": 1}).template_kwargs == {"x": 1}


INVALID_REQUESTS: dict[str, tuple[dict[str, Json], str, str]] = {
    "no input": ({"input": None}, "input", "must contain at least one item"),
    "empty input": ({"input": []}, "input", "must contain at least one item"),
    "input of tools": (
        {"input": [{"type": "additional_tools", "role": "developer", "tools": [RUN]}]},
        "input",
        "must contain at least one item that is not of type 'additional_tools'",
    ),
    "input that is a number": ({"input": 7}, "input", "Expected `str | array | null`"),
    "conversation": ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
    "prompt": ({"prompt": {"id": "pmpt_1"}}, "prompt", "no prompts are stored"),
    "background": ({"background": True}, "background", "stream the response"),
    "logprobs": ({"include": ["message.output_text.logprobs"]}, "include", "only in the chat dialect"),
    "top_logprobs": ({"top_logprobs": 3}, "top_logprobs", "only in the chat dialect"),
    "context_management": ({"context_management": [{"type": "compaction"}]}, "context_management", "does not compact"),
    "moderation": ({"moderation": {"model": "x"}}, "moderation", "is not supported"),
    "temperature": ({"temperature": 3}, "temperature", "Expected `float` <= 2.0"),
    "max_output_tokens": ({"max_output_tokens": 0}, "max_output_tokens", "must be at least 1, not 0"),
    "truncation": ({"truncation": "maybe"}, "truncation", "Invalid enum value"),
    "text": ({"text": {"format": {"type": "xml"}}}, "text", "Invalid enum value"),
    "schema": ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "is missing"),
    "tools": ({"tools": {"a": 1}}, "tools", "Expected `array`"),
    "tool of the provider": (
        {"tools": [{"type": "code_interpreter"}]},
        "tools[0].type",
        "only the provider can run it",
    ),
    "unknown tool": ({"tools": [{"type": "teleport"}]}, "tools[0].type", "is not supported"),
    "tool without a name": ({"tools": [{"type": "function"}]}, "tools[0].name", "is missing"),
    "tools of one name": ({"tools": [RUN, RUN]}, "tools", "two tools named 'run'"),
    "namespace": ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name", "is missing"),
    "tool in a namespace": (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]},
        "tools[0].tools[0].type",
        "must be 'function' or 'custom' in a namespace",
    ),
    "tool_choice": ({"tools": [RUN], "tool_choice": "maybe"}, "tool_choice", "must be 'none'"),
    "all forms of tool_choice": ({"tools": [RUN], "tool_choice": 1}, "tool_choice", "{'type': 'tool_search'}"),
    "choice of no tool": ({"tool_choice": "required"}, "tool_choice", "the request has no tools"),
    "choice of another tool": (
        {"tools": [RUN], "tool_choice": {"type": "function", "name": "x"}},
        "tool_choice",
        "'x', which is not one of the tools",
    ),
    "choice of the provider's search": (
        {"tools": [RUN, {"type": "tool_search"}], "tool_choice": {"type": "tool_search"}},
        "tool_choice",
        "needs a tool_search tool with execution 'client'",
    ),
    "choice of the provider's tool": (
        {"tools": [RUN], "tool_choice": {"type": "web_search_preview"}},
        "tool_choice",
        "which is not supported; choose a function, a custom tool or tool_search",
    ),
    "invalid allowed tool": (
        {"tools": [RUN], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
        "tool_choice.tools[0]",
        "or {'type': 'tool_search'}",
    ),
    "no allowed tool": (
        {"tools": [RUN], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}},
        "tool_choice.tools",
        "must name at least one of the tools",
    ),
    "two constraints": (
        {"tools": [RUN], "tool_choice": "required", "text": {"format": {"type": "json_object"}}},
        "tool_choice",
        "cannot force a tool together with text.format",
    ),
}


@pytest.mark.parametrize("case", INVALID_REQUESTS)
def test_invalid_request_names_its_field(case: str) -> None:
    body, field, message = INVALID_REQUESTS[case]
    error = decode_error(**body)
    assert error.param == field and message in error.message and error.message.startswith(field)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"input": "\xff"}', b"[" * 5000])
def test_invalid_bodies(body: bytes) -> None:
    with pytest.raises(BadRequest):
        responses.decode(WireRequest(body))


def test_previous_response_is_not_found() -> None:
    error = decode_error(previous_response_id="resp_1")
    body = json.loads(responses.encode_error(error))["error"]
    assert (responses.error_status(error), body["code"]) == (400, "previous_response_not_found")
    assert body["param"] == "previous_response_id" and "'resp_1' not found" in body["message"]


def test_forced_constraints() -> None:
    schema = {"type": "object"}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    assert decode(text=text).constraint == Constraint("json_schema", schema)
    assert decode(text={"format": {"type": "json_object"}}).constraint == Constraint("json_object")
    assert decode(text={"format": {"type": "text"}}).constraint is None
    named = decode(tools=[RUN, PATCH], tool_choice={"type": "custom", "name": "apply_patch"}).constraint
    assert named is not None and (named.kind, named.tool) == ("tool", "apply_patch")
    assert named.schema["required"] == ["input"]
    inner = decode(tools=[TEAM], tool_choice={"type": "function", "name": "spawn", "namespace": "team"}).constraint
    assert inner is not None and inner.tool == "team__spawn"
    required = decode(tools=[RUN, PATCH], tool_choice="required", parallel_tool_calls=False).constraint
    assert required is not None and required.kind == "tools" and required.schema["maxItems"] == 1


def test_allowed_tools() -> None:
    allowed = {"type": "allowed_tools", "tools": [{"type": "function", "name": "run"}, {"type": "web_search"}]}
    both = [RUN, PATCH]
    assert list(visible_functions(*both, tool_choice={**allowed, "mode": "auto"})) == ["run"]
    assert list(visible_functions(*both, tool_choice={**allowed, "mode": "required"})) == ["run", "apply_patch"]
    forced = decode(tools=both, tool_choice={**allowed, "mode": "required"}).constraint
    assert forced is not None and len(forced.schema["items"]["anyOf"]) == 1
    assert visible_functions(*both, tool_choice="none") == {}
    # The visible tools differ, so their raw form must differ too.
    calls = [decode(tools=both, tool_choice=c) for c in ("auto", {**allowed, "mode": "auto"})]
    raws = [call.tools.raw for call in calls if call.tools is not None]
    assert len(set(raws)) == 2 and all(json.loads(raw) for raw in raws)


# ── tools ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_function_tool() -> None:
    assert visible_functions(RUN) == {"run": {"name": "run", "description": "Runs.", "parameters": {"type": "object"}}}
    assert visible_functions({"type": "function", "name": "f"})["f"]["parameters"] == {
        "type": "object",
        "properties": {},
    }


def test_custom_tool_becomes_function_with_string_input() -> None:
    function = visible_functions(PATCH)["apply_patch"]
    assert function["parameters"]["properties"]["input"]["type"] == "string"
    assert (
        function["description"].startswith("Edits files.") and "lark grammar:\nstart: /.+/" in function["description"]
    )
    plain = visible_functions({"type": "custom", "name": "c", "format": {"type": "text"}})["c"]
    assert "grammar" not in plain["description"]


def test_namespace_prefixes_tool_names() -> None:
    functions = visible_functions(RUN, TEAM)
    assert list(functions) == ["run", "team__spawn", "team__apply_patch"]
    assert functions["team__spawn"]["description"] == "Runs.\n\nAbout the team tools: Helpers."
    assert "Helpers." not in functions["team__apply_patch"]["description"]
    # The default namespace of OpenAI's models is not a prefix.
    assert list(visible_functions({"type": "namespace", "name": "functions", "description": "", "tools": [RUN]})) == [
        "run"
    ]


def test_provider_tools_are_hidden_from_model() -> None:
    hosted = [{"type": "web_search", "external_web_access": True}, {"type": "image_generation"}]
    assert list(
        visible_functions(RUN, *hosted, {"type": "web_search_preview_2025_03_11"}, {"type": "tool_search"})
    ) == ["run"]
    assert visible_functions(*hosted) == {}


def test_additional_tools_item_adds_tools() -> None:
    item = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [TEAM]}
    call = decode(input=[item, {"role": "user", "content": "Hi"}], tools=[RUN])
    assert call.tools is not None
    assert [tool.name for tool in call.tools.decode()] == ["run", "team__spawn", "team__apply_patch"]
    assert len(call.history.raws) == 1
    # Later tools replace earlier ones of the same name.
    renewed = decode(
        input=[item, {**item, "tools": [{**RUN, "description": "Anew."}]}, message_item("x")], tools=[RUN]
    ).tools
    assert renewed is not None
    assert next((t.name, t.wire["function"]["description"]) for t in renewed.decode()) == ("run", "Anew.")
    # Item ids change when an agent compacts, but the tools stay the same.
    other = decode(input=[{**item, "id": "at_2"}, {"role": "user", "content": "Hi"}], tools=[RUN])
    assert other.tools is not None and other.tools.raw == call.tools.raw


def test_client_tool_search() -> None:
    assert visible_functions(SEARCH)["tool_search"]["description"] == "Finds."
    search_call = {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "spawn"}}
    found = {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [TEAM]}
    turn, answer = messages(search_call, found)
    assert [(c.name, json.loads(c.arguments)) for c in turn.tool_calls] == [("tool_search", {"query": "spawn"})]
    assert answer.role == "tool" and answer.tool_call_id == "c"
    names = [tool["function"]["name"] for tool in json.loads(answer.content)]
    assert names == ["team__spawn", "team__apply_patch"]


# ── replies ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def call_delta(call_id: str, name: str, arguments: str = "{}") -> CallDelta:
    return CallDelta(0, ToolCall(call_id, name, arguments))


def done_of(events: tuple[ReplyEvent, ...], finish: Finish = "stop") -> Done:
    text = {kind: "".join(e.text for e in events if isinstance(e, Delta) and e.kind == kind) for kind in KINDS}
    calls = tuple(e.call for e in events if isinstance(e, CallDelta))
    message = Message("assistant", text["content"], text["reasoning"], calls, signature=text["signature"])
    return Done(finish, message, Usage(10, 5, 3, 2))


KINDS = ("content", "reasoning", "signature")


def parse_events(data: bytes) -> list[Json]:
    """Parse the events of a stream and validate each against the SDK's types."""
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        name, body = block.split("\n")
        event = json.loads(body.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        event_adapter.validate_python(event)
        found.append(event)
    return found


def encode_stream(*events: ReplyEvent, finish: Finish = "stop", **body: Json) -> list[Json]:
    stream = responses.open_stream(decode(**body))
    data = stream.begin() + b"".join(stream.event(event) for event in (*events, done_of(events, finish)))
    found = parse_events(data)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def reply_items(*events: ReplyEvent, **body: Json) -> list[Json]:
    """Return the items of a reply that an agent keeps."""
    items: list[Json] = encode_stream(*events, **body)[-1]["response"]["output"]
    return items


def encode_reply(*events: ReplyEvent, finish: Finish = "stop", **body: Json) -> Json:
    response = json.loads(responses.encode_reply(decode(**body), done_of(events, finish)))
    Response.model_validate(response)
    return response


def event_types(events: list[Json]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_percent_signs_are_plain_text() -> None:
    percent_signs = '%b %d %% {"a": 1} \n"'
    call = ToolCall("call_%d", "run%b", json.dumps({"x": percent_signs}))
    events = (Delta("reasoning", percent_signs), Delta("content", percent_signs), CallDelta(0, call))
    request = {"instructions": percent_signs, "metadata": {"m": "%d%b"}, "model": "%b"}
    for response in (encode_stream(*events, **request)[-1]["response"], encode_reply(*events, **request)):
        thinking, answer, function_call = response["output"]
        assert (
            thinking["content"][0]["text"] == percent_signs == answer["content"][0]["text"] == response["instructions"]
        )
        assert (function_call["call_id"], function_call["name"], function_call["arguments"]) == (
            call.id,
            call.name,
            call.arguments,
        )
        assert response["model"] == "%b" and response["metadata"] == request["metadata"]


def test_text_answer_events() -> None:
    events = encode_stream(Delta("content", "Hel"), Delta("content", ""), Delta("content", "lo."))
    assert event_types(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    final = events[-1]["response"]
    assert final["status"] == "completed" and final["id"] == events[0]["response"]["id"]
    assert events[0]["response"]["output"] == [] and events[0]["response"]["status"] == "in_progress"
    [item] = final["output"]
    assert item == events[-2]["item"] and item["content"][0]["text"] == "Hello." == events[6]["text"]
    assert final["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 15,
    }


def test_reasoning_summary_events() -> None:
    events = encode_stream(Delta("reasoning", "Hm"), Delta("reasoning", "."), reasoning={"summary": "auto"})
    assert event_types(events)[2:-1] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    [item] = events[-1]["response"]["output"]
    assert item["summary"] == [{"type": "summary_text", "text": "Hm."}] and "content" not in item


def test_reasoning_text_events() -> None:
    events = encode_stream(Delta("reasoning", "Hm"), Delta("reasoning", "."), Delta("content", "Yes."))
    assert event_types(events)[2:9] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]
    thinking, message = events[-1]["response"]["output"]
    assert thinking["content"] == [{"type": "reasoning_text", "text": "Hm."}] and thinking["summary"] == []
    assert message["content"][0]["text"] == "Yes."
    assert [e["output_index"] for e in events if "output_index" in e] == [0] * 7 + [1] * 6


def test_tool_call_events() -> None:
    events = encode_stream(
        call_delta("a", "run", '{"x": 1}'),
        call_delta("b", "apply_patch", '{"input": "*** Begin"}'),
        call_delta("c", "team__spawn"),
        call_delta("d", "tool_search", '{"query": "q"}'),
        call_delta("e", "unheard_of", "not json"),
        finish="tool_calls",
        tools=[RUN, PATCH, TEAM, SEARCH],
    )
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    custom = ["output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"]
    assert event_types(events)[2:-1] == [*call, *custom, *call, "output_item.added", "output_item.done", *call]
    ends = [event for event in events if event["type"].endswith(("arguments.done", "input.done"))]
    assert [event.get("name") for event in ends] == ["run", None, "spawn", "unheard_of"]
    assert [
        {k: v for k, v in item.items() if k not in ("id", "status")} for item in events[-1]["response"]["output"]
    ] == [
        {"type": "function_call", "call_id": "a", "name": "run", "arguments": '{"x": 1}'},
        {"type": "custom_tool_call", "call_id": "b", "name": "apply_patch", "input": "*** Begin"},
        {"type": "function_call", "call_id": "c", "name": "spawn", "namespace": "team", "arguments": "{}"},
        {"type": "tool_search_call", "call_id": "d", "execution": "client", "arguments": {"query": "q"}},
        {"type": "function_call", "call_id": "e", "name": "unheard_of", "arguments": "not json"},
    ]


def test_keep_alive_is_in_progress_event() -> None:
    stream = responses.open_stream(decode())
    events = parse_events(stream.begin() + stream.event(Delta("content", "a")) + stream.event(KeepAlive()))
    assert event_types(events)[-1] == "in_progress" and events[-1]["response"]["output"] == []


@pytest.mark.parametrize("stream", [True, False])
def test_truncated_answer_is_incomplete(stream: bool) -> None:
    events = (Delta("content", "One two"),)
    if stream:
        last = encode_stream(*events, finish="length")[-1]
        assert last["type"] == "response.incomplete"
        response = last["response"]
    else:
        response = encode_reply(*events, finish="length")
    assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete" and response["completed_at"] is None


def test_empty_answer_is_empty_message() -> None:
    [item] = reply_items()
    assert item["type"] == "message" and item["content"][0]["text"] == ""
    assert messages(item) == [Message("assistant")]


def assert_round_trip(*events: ReplyEvent, **body: Json) -> None:
    """Check that the items an agent sends back mean what was sampled, streamed or not, with keys in either order."""
    sampled = done_of(events).message
    for items in (reply_items(*events, **body), encode_reply(*events, **body)["output"]):
        for kept in (items, [dict(sorted(item.items(), reverse=True)) for item in items]):
            call = decode(**{**body, "input": [{"role": "user", "content": "Hi"}, *kept]})
            assert len(call.history.raws) == 2
            [turn] = call.history.decode(1)
            reading = RequestMessages(call.history, b"")
            assert reading.meaning(1) == RequestMessages(_SingleMessageHistory(sampled), b"").meaning(0)
            assert turn.reasoning == sampled.reasoning and turn.signature == sampled.signature
            assert [c.id for c in turn.tool_calls] == [c.id for c in sampled.tool_calls]


class _SingleMessageHistory:
    """A history of one message."""

    raws = (b"",)

    def __init__(self, message: Message) -> None:
        self._message = message

    def decode(self, index: int) -> tuple[Message, ...]:
        return (self._message,)


ARGUMENTS = [
    "{}",
    '{"x": 1.0}',
    '{"input": "a\\nb"}',
    '{"input": "a", "more": 1}',
    '{"patch": "x"}',
    "[1]",
    '"s"',
    "oops",
]


@pytest.mark.parametrize("arguments", [*ARGUMENTS, '{"input": 7}', r'{"input": "\ud800"}', '{"input": "{\\"a\\": 1}"}'])
@pytest.mark.parametrize(
    "name", ["run", "apply_patch", "team__spawn", "team__apply_patch", "tool_search", "unheard_of"]
)
def test_tool_call_round_trips(name: str, arguments: str) -> None:
    tools = [RUN, PATCH, TEAM, SEARCH]
    assert_round_trip(
        Delta("content", "Look."), call_delta("a", name, arguments), call_delta("b", name, arguments), tools=tools
    )


@pytest.mark.parametrize("include", [[], ["reasoning.encrypted_content", "file_search_call.results"]])
@pytest.mark.parametrize("reasoning", [{}, {"summary": "auto"}, {"generate_summary": "detailed"}])
@pytest.mark.parametrize("text", ["Hm.", "Größe\n\n 汉字 👩‍👩‍👧 \n", " "])
def test_reasoning_round_trips(include: list[str], reasoning: Json, text: str) -> None:
    assert_round_trip(Delta("reasoning", text), Delta("content", "Yes."), include=include, reasoning=reasoning)


def test_text_after_call_round_trips() -> None:
    events = (Delta("content", "One. "), call_delta("a", "run"), Delta("content", "Two."), Delta("reasoning", "Hm."))
    assert [item["type"] for item in reply_items(*events)] == ["message", "function_call", "message", "reasoning"]
    assert_round_trip(*events)


def test_provider_signature_round_trips() -> None:
    assert_round_trip(Delta("reasoning", "Hm."), Delta("signature", "gAAAA=="), Delta("content", "Yes."))
    assert_round_trip(Delta("signature", "gAAAA=="), Delta("content", "Yes."), reasoning={"summary": "auto"})


def test_encrypted_reasoning_restores_dropped_text() -> None:
    [item, _] = reply_items(
        Delta("reasoning", "Größe."), Delta("content", "x"), include=["reasoning.encrypted_content"]
    )
    kept = item["encrypted_content"]
    assert kept.startswith("tg1.") and "Größe" not in kept
    [turn] = messages(
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": kept}, message_item("x")
    )
    assert (turn.reasoning, turn.signature) == ("Größe.", "")


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: kept[:-4],
        lambda kept: kept[:-2] + "==",
        lambda kept: "tg1.",
        lambda kept: "tg1.%%%",
        lambda kept: "tg1." + base64.urlsafe_b64encode(b"forged thoughts").decode(),
        lambda kept: "tg1.é",
    ],
)
def test_damaged_encrypted_reasoning_is_refused(damage: Any) -> None:
    [item] = reply_items(Delta("reasoning", "Some thought."), include=["reasoning.encrypted_content"])
    error = decode_error(input=[{**item, "encrypted_content": damage(item["encrypted_content"])}])
    assert (error.kind, error.param) == ("invalid_encrypted_content", "input[0].encrypted_content")


def test_response_and_item_ids_are_unique() -> None:
    ids = [
        item["id"]
        for _ in range(3)
        for item in reply_items(Delta("content", "a"), call_delta("a", "run"), call_delta("b", "run"))
    ]
    assert len(set(ids)) == 9
    assert len({encode_stream()[0]["response"]["id"] for _ in range(3)}) == 3


def test_response_echoes_request() -> None:
    response = encode_reply(
        Delta("content", "Yes."),
        model="some-model",
        instructions="Be brief.",
        tools=[RUN, PATCH, TEAM, {"type": "web_search"}],
        tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "run"}]},
        metadata={"a": "b"},
        temperature=0.5,
        max_output_tokens=9,
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "text"}, "verbosity": "low"},
        prompt_cache_key="k",
        store=True,
        truncation="auto",
    )
    assert response["model"] == "some-model" and response["instructions"] == "Be brief."
    assert [tool["type"] for tool in response["tools"]] == ["function", "custom", "namespace", "web_search"]
    assert response["tool_choice"]["type"] == "allowed_tools" and response["metadata"] == {"a": "b"}
    assert (response["temperature"], response["top_p"], response["max_output_tokens"]) == (0.5, None, 9)
    assert response["reasoning"] == {"effort": "low", "summary": "auto"} and response["text"]["verbosity"] == "low"
    assert response["parallel_tool_calls"] is False and response["prompt_cache_key"] == "k"
    # Settings that were overridden show their actual value.
    assert response["truncation"] == "disabled"


@pytest.mark.parametrize(("sent", "stored"), [(None, True), (True, True), (False, False)])
def test_responses_are_stored_unless_store_is_false(sent: bool | None, stored: bool) -> None:
    call = decode(store=sent)
    assert call.store is stored and encode_reply(store=sent)["store"] is stored


# ── references to earlier responses ─────────────────────────────────────────────────────────────────────────────────


class Earlier:
    """The replies that requests in these tests may refer to."""

    def __init__(self, **replies: tuple[Call, Sequence[bytes]]) -> None:
        self._replies = {name: EarlierReply(call.history, output) for name, (call, output) in replies.items()}

    def find(self, reply_id: str) -> EarlierReply | None:
        return self._replies.get(reply_id)

    def find_item(self, item_id: str) -> bytes | None:
        items = [item for reply in self._replies.values() for item in reply.output]
        return next((item for item in items if json.loads(item)["id"] == item_id), None)


def decode_later(earlier: Earlier, **body: Json) -> Call:
    return responses.decode(WireRequest(json.dumps({"model": "m", **body}).encode(), earlier=earlier))


def complete(call: Call, *events: ReplyEvent) -> ReplyRecord:
    stream = responses.open_stream(call)
    stream.whole(done_of(events))
    return stream.record()


def decoded(call: Call) -> list[Message]:
    return [message for n in range(len(call.history.raws)) for message in call.history.decode(n)]


@pytest.mark.parametrize("instructions", [None, "Be brief."])
def test_previous_response_continues_with_its_input_and_output(instructions: str | None) -> None:
    first = decode(instructions=instructions, tools=[RUN])
    record = complete(first, Delta("reasoning", "Hm."), Delta("content", "Look."), call_delta("a", "run"))
    earlier = Earlier(**{record.id: (first, record.output)})
    result = result_item("a", "done")
    chained = decode_later(
        earlier, instructions=instructions, tools=[RUN], previous_response_id=record.id, input=[result]
    )
    resent = decode(
        instructions=instructions,
        tools=[RUN],
        input=[{"role": "user", "content": "Hi"}, *map(json.loads, record.output), result],
    )
    assert decoded(chained) == decoded(resent) and len(chained.history.items) == 5
    echoed = json.loads(responses.encode_reply(chained, done_of(())))
    assert echoed["previous_response_id"] == record.id


def test_instructions_of_previous_response_are_not_kept() -> None:
    first = decode(instructions="Be brief.")
    record = complete(first, Delta("content", "Hello."))
    earlier = Earlier(**{record.id: (first, record.output)})
    chained = decode_later(earlier, previous_response_id=record.id, input="More", instructions="Be long.")
    assert [message.content for message in decoded(chained)] == ["Be long.", "Hi", "Hello.", "More"]
    chained = decode_later(earlier, previous_response_id=record.id, input="More")
    assert [message.role for message in decoded(chained)] == ["user", "assistant", "user"]


def test_item_references_stand_for_their_items() -> None:
    first = decode(tools=[RUN])
    record = complete(first, Delta("reasoning", "Hm."), Delta("content", "Look."), call_delta("a", "run"))
    earlier = Earlier(**{record.id: (first, record.output)})
    ids = [json.loads(item)["id"] for item in record.output]
    items = [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": ids[0]}, {"id": ids[1]}]
    call = decode_later(
        earlier, tools=[RUN], input=[*items, {"type": "item_reference", "id": ids[2]}, result_item("a", "done")]
    )
    [_, turn, answer] = decoded(call)
    assert (turn.reasoning, turn.content, [c.name for c in turn.tool_calls]) == ("Hm.", "Look.", ["run"])
    assert answer.role == "tool"


def test_item_is_referenced_only_once() -> None:
    first = decode()
    record = complete(first, Delta("content", "Hello."))
    reference = {"type": "item_reference", "id": json.loads(record.output[0])["id"]}
    with pytest.raises(BadRequest, match="is referenced twice; leave this reference out") as caught:
        decode_later(Earlier(**{record.id: (first, record.output)}), input=[reference, reference])
    assert caught.value.param == "input[1]"


@pytest.mark.parametrize("where", ["previous response", "request"])
def test_error_position_counts_only_own_items(where: str) -> None:
    first = decode()
    record = complete(first, Delta("content", "Hello."))
    earlier = Earlier(**{record.id: (first, record.output)})
    items = [{"role": "user", "content": "More"}, {"type": "item_reference", "id": "msg_tg0"}]
    previous = {"previous_response_id": record.id} if where == "previous response" else {}
    with pytest.raises(BadRequest) as caught:
        decode_later(earlier, input=items, **previous)
    assert (caught.value.status, caught.value.param) == (404, "input[1]")
    assert "'msg_tg0'" in caught.value.message and "store=false" in caught.value.message


def test_record_is_delivered_response() -> None:
    call = decode(instructions="Be brief.", tools=[RUN])
    stream = responses.open_stream(call)
    whole = stream.whole(done_of((Delta("content", "Hello."),)))
    record = stream.record()
    assert record.head + record.echo + record.tail == whole and read_output(record.tail) == list(record.output)
    assert json.loads(whole)["id"] == record.id


def test_rebuilt_reply_has_tools_from_items() -> None:
    tools = {"type": "additional_tools", "role": "developer", "tools": [RUN]}
    first = decode(instructions="Be brief.", input=[tools, {"role": "user", "content": "Hi"}])
    record = complete(first, call_delta("a", "run"))
    reply = rebuild_reply(record.echo, record.tools, first.history.raws, record.output)
    call = decode_later(
        Earlier(),
        input=[*map(json.loads, reply.history.items), *map(json.loads, reply.output), result_item("a", "done")],
    )
    assert call.tools is not None and [tool.name for tool in call.tools.decode()] == ["run"]
    assert [message.role for message in decoded(call)] == ["user", "assistant", "tool"]


MESSAGES = {
    "user": Message("user", "Hi"),
    "system": Message("system", "Be brief."),
    "result": Message("tool", "done", tool_call_id="a"),
    "empty answer": Message("assistant"),
    "answer": Message("assistant", "Look.", "Hm.", (ToolCall("a", "run", '{"x":1}'),)),
    "calls alone": Message("assistant", "", "", (ToolCall("a", "run", "{}"), ToolCall("b", "run", "{}"))),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_encoded_messages_decode_the_same(case: str) -> None:
    items = encode_message(MESSAGES[case])
    assert decode_stored_messages("responses", b"[" + b",".join(items) + b"]") == [MESSAGES[case]]


ITEMS = [json.dumps({"id": f"msg_{n}", "type": "message"}).encode() for n in range(5)]
PAGES: dict[str, tuple[dict[str, Any], list[int], bool]] = {
    "newest first": ({}, [4, 3, 2, 1, 0], False),
    "oldest first": ({"order": "asc"}, [0, 1, 2, 3, 4], False),
    "first page": ({"order": "asc", "limit": 2}, [0, 1], True),
    "next page": ({"order": "asc", "limit": 2, "after": "msg_1"}, [2, 3], True),
    "last page": ({"order": "asc", "limit": 2, "after": "msg_3"}, [4], False),
    "next page, newest first": ({"limit": 2, "after": "msg_3"}, [2, 1], True),
    "past the end": ({"after": "msg_0"}, [], False),
}


@pytest.mark.parametrize("case", PAGES)
def test_pages_of_items(case: str) -> None:
    query, expected, more = PAGES[case]
    page = json.loads(encode_page(ITEMS, read_page(**query)))
    ids = [item["id"] for item in page["data"]]
    assert ids == [f"msg_{n}" for n in expected] and page["has_more"] is more and page["object"] == "list"
    assert (page["first_id"], page["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))


@pytest.mark.parametrize("limit", [0, 101])
def test_invalid_page_names_its_field(limit: int) -> None:
    with pytest.raises(BadRequest) as caught:
        read_page(limit=limit)
    assert caught.value.param == "limit" and caught.value.message.startswith("limit")


def test_page_after_unknown_item() -> None:
    with pytest.raises(BadRequest, match="no input item has the id 'msg_9'"):
        encode_page(ITEMS, read_page(after="msg_9"))


def test_item_ids_name_their_response() -> None:
    record = complete(decode(), Delta("content", "Hello."))
    assert [response_of_item(json.loads(item)["id"]) for item in record.output] == [record.id]
    [listed] = list_input(EarlierReply(decode().history, record.output), record.id)
    assert response_of_item(json.loads(listed)["id"]) == record.id
    assert json.loads(listed)["content"] == [{"type": "input_text", "text": "Hi"}]
    assert [response_of_item(name) for name in ("", "msg_1", "msg_tg12", "resp_x")] == ["", "", "", ""]


def test_streamed_reply_equals_whole_reply() -> None:
    events = (
        Delta("reasoning", "Hm."),
        Delta("content", "Look."),
        call_delta("a", "run"),
        call_delta("b", "apply_patch"),
    )
    body: dict[str, Json] = {
        "tools": [RUN, PATCH],
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"],
    }

    def without_ids(response: Json) -> Json:
        items = [{k: v for k, v in item.items() if k != "id"} for item in response["output"]]
        return {**response, "output": items, "id": "", "created_at": 0, "completed_at": 0}

    assert without_ids(encode_reply(*events, **body)) == without_ids(encode_stream(*events, **body)[-1]["response"])


def test_encode_count_and_models() -> None:
    assert json.loads(responses.encode_count(7)) == {"object": "response.input_tokens", "input_tokens": 7}
    assert json.loads(responses.encode_models(["a"], 1))["data"][0]["id"] == "a"
    assert json.loads(responses.encode_model("a", 1))["owned_by"] == "turngate"


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────────────────

ERRORS: list[tuple[TurngateError, int, str, str, str]] = [
    (BadRequest("x: no", param="x"), 400, "invalid_request_error", "invalid_request_error", "invalid_prompt"),
    (
        ContextOverflow("no", limit=5, size=9),
        400,
        "invalid_request_error",
        "context_length_exceeded",
        "context_length_exceeded",
    ),
    (Unauthorized("no"), 401, "authentication_error", "invalid_api_key", "invalid_prompt"),
    (NotFound("no", param="model"), 404, "not_found_error", "model_not_found", "invalid_prompt"),
    (NotFound("no"), 404, "not_found_error", "not_found", "invalid_prompt"),
    (Conflict("no"), 409, "conflict_error", "conflict", "invalid_prompt"),
    (TooLarge("no"), 413, "invalid_request_error", "request_too_large", "invalid_prompt"),
    (EngineBusy("no"), 429, "rate_limit_error", "rate_limit_exceeded", "rate_limit_exceeded"),
    (EngineError("no"), 502, "server_error", "engine_error", "server_error"),
    (EngineUnavailable("no"), 503, "server_error", "engine_unavailable", "server_error"),
    (Stopping("no"), 503, "server_error", "gateway_stopping", "server_error"),
    (TurngateError("no"), 500, "server_error", "internal_error", "server_error"),
]


@pytest.mark.parametrize(("error", "status", "kind", "code", "in_stream"), ERRORS)
def test_error_bodies_and_statuses(error: TurngateError, status: int, kind: str, code: str, in_stream: str) -> None:
    body = json.loads(responses.encode_error(error))["error"]
    assert (responses.error_status(error), body["type"], body["code"]) == (status, kind, code)
    assert body["message"] and set(body) == {"message", "type", "param", "code"}
    assert responses.sends_in_stream(error) == isinstance(error, ContextOverflow)
    stream = responses.open_stream(decode())
    failed = [
        json.loads(block.split("data: ", 1)[1])
        for block in (stream.begin() + stream.event(Delta("content", "Hal")) + stream.error(error))
        .decode()
        .split("\n\n")
        if block
    ][-1]
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == in_stream and failed["response"]["output"] == []


def test_context_overflow_message() -> None:
    body = json.loads(responses.encode_error(ContextOverflow("no", param="messages", limit=5, size=9)))["error"]
    assert body["param"] == "input" and "exceeds the context window" in body["message"]
    assert "maximum context length is 5 tokens" in body["message"] and "has 9." in body["message"]
    without_sizes = json.loads(responses.encode_error(ContextOverflow("no")))["error"]["message"]
    assert without_sizes.endswith("try again.")


def test_busy_engine_error_has_retry_delay() -> None:
    failed = responses.open_stream(decode()).error(EngineBusy("All engines are busy.")).decode()
    assert "All engines are busy. Please try again in 1s." in failed
