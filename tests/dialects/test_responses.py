"""OpenAI Responses, wire JSON ⇄ our types: the items that agents send, and every event that we send."""

from __future__ import annotations

import base64
import json
from typing import Any

import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from turngate.dialects import decode_stored_messages
from turngate.dialects.base import WireRequest
from turngate.dialects.responses import Responses
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
strictly: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)

PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
RUN = {"type": "function", "name": "run", "description": "Runs.", "parameters": {"type": "object"}, "strict": False}
TEAM = {"type": "namespace", "name": "team", "description": "Helpers.", "tools": [{**RUN, "name": "spawn"}, PATCH]}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": {"type": "object"}}


def decoded(headers: dict[str, str] | None = None, **body: Json) -> Call:
    return responses.decode(WireRequest(json.dumps({"model": "m", "input": "Hi", **body}).encode(), headers or {}))


def read(*items: Json, **body: Json) -> list[tuple[Message, ...]]:
    """What each piece of these items says."""
    history = decoded(input=list(items), **body).history
    return [history.decode(n) for n in range(len(history.raws))]


def messages(*items: Json, **body: Json) -> list[Message]:
    return [message for piece in read(*items, **body) for message in piece]


def refused(**body: Json) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        call = decoded(**body)
        for n in range(len(call.history.raws)):
            call.history.decode(n)
        if call.tools is not None:
            call.tools.decode()
    return caught.value


def said(text: str, **fields: Json) -> Json:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **fields}


def thought(text: str, **fields: Json) -> Json:
    return {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": text}], **fields}


def ran(call_id: str, arguments: str = "{}", **fields: Json) -> Json:
    return {"type": "function_call", "call_id": call_id, "name": "run", "arguments": arguments, **fields}


def result(call_id: str, output: Json = "ok") -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def shown(*tools: Json, **body: Json) -> dict[str, Json]:
    """The functions that the model sees."""
    call = decoded(tools=list(tools), **body)
    return {tool.name: tool.wire["function"] for tool in call.tools.decode()} if call.tools is not None else {}


# ── what is said ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_string_is_a_question_and_instructions_come_first() -> None:
    history = decoded(input="Hi", instructions="Be brief.").history
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
def test_messages_however_they_are_wrapped(role: str, ours: str, typed: bool, content: Json) -> None:
    item = {"role": role, "content": content, **({"type": "message", "id": "msg_1", "status": "done"} if typed else {})}
    [message] = messages(item)
    assert (message.role, message.content) == (ours, "Hello")


@pytest.mark.parametrize(
    ("texts", "read_as"),
    [(["One.", "Two."], "One.\nTwo."), (["Output:\n", "x"], "Output:\nx"), (["", "x"], "x"), ([], "")],
)
def test_parts_that_others_say_stand_on_lines_of_their_own(texts: list[str], read_as: str) -> None:
    parts = [{"type": "input_text", "text": text} for text in texts]
    assert [m.content for m in messages({"role": "user", "content": parts}, result("c", parts))] == [read_as] * 2


def test_one_turn_is_one_message_however_many_items_it_is_spread_over() -> None:
    [turn] = messages(thought("Hm."), said("Well, "), said("yes."), ran("a", '{"x":1}'), ran("b"))
    assert turn == Message(
        "assistant", "Well, yes.", "Hm.", (ToolCall("a", "run", '{"x":1}'), ToolCall("b", "run", "{}"))
    )


def test_turns_are_told_apart_by_what_stands_between_them() -> None:
    pieces = read(
        said("One."), {"role": "user", "content": "And?"}, thought("Hm."), ran("a"), result("a"), said("Two.")
    )
    assert [[m.role for m in piece] for piece in pieces] == [
        ["assistant"],
        ["user"],
        ["assistant"],
        ["tool"],
        ["assistant"],
    ]


def test_turns_with_nothing_between_them_are_told_apart_by_the_ids_that_we_gave() -> None:
    one, two = reply(Delta("content", "One.")), reply(Delta("content", "Two."))
    assert [m.content for m in messages(*one, *two)] == ["One.", "Two."]
    for item in two:
        del item["id"]
    assert [m.content for m in messages(*one, *two)] == ["One.Two."]


def test_calls_that_are_mixed_with_their_results_are_one_turn_again() -> None:
    thinking, first, second = reply(Delta("reasoning", "Both."), called("a", "run"), called("b", "run"))
    mixed = messages(thinking, first, result("a"), second, result("b"), {"role": "user", "content": "Go on"})
    straight = messages(thinking, first, second, result("a"), result("b"), {"role": "user", "content": "Go on"})
    assert mixed == straight
    assert [m.role for m in mixed] == ["assistant", "tool", "tool", "user"]
    # Without our ids nobody can know; then they are two turns, as they would be at any other time.
    for item in (first, second):
        del item["id"]
    assert [m.role for m in messages(first, result("a"), second, result("b"))] == ["assistant", "tool"] * 2


def test_what_was_recorded_reads_the_same_again() -> None:
    items = [*reply(Delta("reasoning", "Hm."), Delta("content", "One."), called("a", "run")), result("a"), said("Two.")]
    history = decoded(input=items, instructions="Be brief.").history
    stored = b"[" + b",".join(history.raws) + b"]"
    assert decode_stored_messages("responses", stored) == [
        m for n in range(len(history.raws)) for m in history.decode(n)
    ]


def test_pieces_of_an_unchanged_history_keep_their_bytes() -> None:
    items = [{"role": "user", "content": "Hi"}, *reply(Delta("content", "One."), called("a", "run")), result("a")]
    before = decoded(input=items, instructions="Be brief.").history.raws
    after = decoded(input=[*items, said("Two."), {"role": "user", "content": "Go on"}], instructions="Be brief.")
    assert list(after.history.raws[: len(before)]) == list(before)


@pytest.mark.parametrize(
    ("item", "reasoning", "signature"),
    [
        (thought("Hm."), "Hm.", ""),
        ({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}, "Hm.", ""),
        (thought("short", content=[{"type": "reasoning_text", "text": "long"}]), "long", ""),
        (thought("Hm.", content=None, encrypted_content="gAAAA=="), "Hm.", "gAAAA=="),
        ({"type": "reasoning", "summary": [], "encrypted_content": "gAAAA=="}, "", "gAAAA=="),
        (thought("One.", summary=[{"text": "One."}, {"text": "Two."}]), "One.\n\nTwo.", ""),
    ],
)
def test_reasoning_however_it_is_kept(item: Json, reasoning: str, signature: str) -> None:
    [turn] = messages(item, said("x"))
    assert (turn.reasoning, turn.signature) == (reasoning, signature)


@pytest.mark.parametrize("output", ["ok", [{"type": "input_text", "text": "ok"}]])
@pytest.mark.parametrize("kind", ["function_call_output", "custom_tool_call_output"])
def test_results(kind: str, output: Json) -> None:
    item = {"type": kind, "id": "x", "call_id": "c", "output": output, "status": "completed"}
    assert messages(item) == [Message("tool", "ok", tool_call_id="c")]


def test_a_message_of_another_agent_is_told_like_a_users() -> None:
    content = [
        {"type": "input_text", "text": "Sender: /root\nPayload:\n"},
        {"type": "encrypted_content", "encrypted_content": "Count the files."},
    ]
    item = {"type": "agent_message", "author": "/root", "recipient": "/root/count", "content": content}
    assert messages(item) == [Message("user", "Sender: /root\nPayload:\nCount the files.")]


def test_arguments_as_an_object_or_not_at_all() -> None:
    [turn] = messages({**ran("a"), "arguments": {"x": 1}}, ran("b", ""), {**ran("c"), "arguments": None})
    assert [call.arguments.replace(" ", "") for call in turn.tool_calls] == ['{"x":1}', "{}", "{}"]


@pytest.mark.parametrize("kind", ["input_image", "input_file", "input_audio"])
def test_what_is_more_than_text_is_named_and_not_lost(kind: str) -> None:
    one, two = (messages({"role": "user", "content": [{"type": kind, "image_url": url}]})[0] for url in ("a", "b"))
    assert (
        one.unsupported == f"input[0].content[0].type: {kind!r} parts are not supported; this model accepts text only"
    )
    assert one.content != two.content or kind != "input_image"
    [tool] = messages(result("c", [{"type": kind}]))
    assert tool.unsupported.startswith("input[0].output[0].type:")


def test_items_of_the_providers_own_tools_belong_to_the_turn_and_are_named() -> None:
    [turn] = messages(thought("Hm."), {"type": "web_search_call", "id": "ws_1", "action": {}}, said("Found."))
    assert turn.content == "Found." and turn.unsupported.startswith("input[1].type: 'web_search_call'")
    [answer] = messages({"type": "computer_call_output", "call_id": "c", "output": {}} | {"output": None})
    assert answer.unsupported.startswith("input[0].type: 'computer_call_output'")


WRONG_ITEMS: dict[str, tuple[Json, str]] = {
    "unknown type": ({"type": "hologram"}, "input[0].type 'hologram'"),
    "compaction of another provider": ({"type": "compaction", "encrypted_content": "x"}, "input[0].type 'compaction'"),
    "reference": ({"type": "item_reference", "id": "msg_1"}, "input[0] refers to an item by its id"),
    "untyped reference": ({"id": "msg_1"}, "input[0] refers to an item by its id"),
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
    "result of an odd kind": (result("c", {"a": 1}), "input[0].output: Expected"),
    "tools that are none": ({"type": "additional_tools", "role": "developer", "tools": 7}, "input[0].tools: Expected"),
}


@pytest.mark.parametrize("case", WRONG_ITEMS)
def test_wrong_items_are_refused_by_their_place(case: str) -> None:
    item, why = WRONG_ITEMS[case]
    error = refused(input=[item])
    assert error.message.startswith(why) and error.param and error.param.startswith("input[0]")
    # The place is that in the list, whatever else became a piece.
    error = refused(instructions="Be brief.", input=[said("a"), said("b"), {"role": "user", "content": "x"}, item])
    assert error.message.startswith(why.replace("input[0]", "input[3]"))


def test_a_wrong_item_in_the_middle_of_a_turn_is_found() -> None:
    error = refused(input=[said("a"), said("b"), {**said("c"), "content": [{"type": "output_text", "text": 7}]}])
    assert error.message.startswith("input[2].content[0].text: Expected") and error.param == "input[2].content[0].text"


# ── what is asked for ───────────────────────────────────────────────────────────────────────────────────────────────


def test_an_agents_request() -> None:
    """The fields that Codex sends."""
    call = decoded(
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


def test_effort_is_told_as_far_as_templates_know_it() -> None:
    assert decoded(reasoning={"effort": "xhigh"}).template_hints == {"reasoning_effort": "high"}
    none = decoded(reasoning={"effort": "none"}).template_hints
    assert none == {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    assert decoded(reasoning={"summary": "auto"}).template_hints == decoded(reasoning=None).template_hints == {}


def test_sampling_length_and_retries() -> None:
    call = decoded(
        {"x-stainless-retry-count": "1", "idempotency-key": "i"}, temperature=0.5, top_p=0.9, max_output_tokens=7
    )
    assert (call.sampling, call.max_tokens) == ({"temperature": 0.5, "top_p": 0.9}, 7)
    assert call.retried and call.idempotency_key == "i" and not call.stream
    assert decoded(chat_template_kwargs={"x": 1}).template_kwargs == {"x": 1}


WRONG: dict[str, tuple[dict[str, Json], str, str]] = {
    "no input": ({"input": None}, "input", "must contain at least one item"),
    "empty input": ({"input": []}, "input", "must contain at least one item"),
    "input of an odd kind": ({"input": 7}, "input", "Expected `str | array | null`"),
    "conversation": ({"conversation": "conv_1"}, "conversation", "nothing is stored"),
    "prompt": ({"prompt": {"id": "pmpt_1"}}, "prompt", "nothing is stored"),
    "background": ({"background": True}, "background", "responses are not stored"),
    "logprobs": ({"include": ["message.output_text.logprobs"]}, "include", "does not return to agents"),
    "top_logprobs": ({"top_logprobs": 3}, "top_logprobs", "does not return to agents"),
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
    "choice of no tool": ({"tool_choice": "required"}, "tool_choice", "the request has no tools"),
    "choice of another tool": (
        {"tools": [RUN], "tool_choice": {"type": "function", "name": "x"}},
        "tool_choice",
        "'x', which is not one of the tools",
    ),
    "choice of the provider's tool": (
        {"tools": [RUN], "tool_choice": {"type": "web_search_preview"}},
        "tool_choice",
        "which only the provider can run",
    ),
    "allowed what is none": (
        {"tools": [RUN], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
        "tool_choice.tools[0]",
        "must be",
    ),
    "two shapes": (
        {"tools": [RUN], "tool_choice": "required", "text": {"format": {"type": "json_object"}}},
        "tool_choice",
        "cannot force a tool together with text.format",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_requests_are_refused_by_field(case: str) -> None:
    body, field, why = WRONG[case]
    error = refused(**body)
    assert error.param == field and why in error.message and error.message.startswith(field)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"input": "\xff"}', b"[" * 5000])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        responses.decode(WireRequest(body))


def test_earlier_responses_are_not_found_in_the_providers_words() -> None:
    error = refused(previous_response_id="resp_1")
    body = json.loads(responses.encode_error(error))["error"]
    assert (responses.error_status(error), body["code"]) == (400, "previous_response_not_found")
    assert body["param"] == "previous_response_id" and "'resp_1' not found" in body["message"]


def test_forced_shapes() -> None:
    schema = {"type": "object"}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    assert decoded(text=text).constraint == Constraint("json_schema", schema)
    assert decoded(text={"format": {"type": "json_object"}}).constraint == Constraint("json_object")
    assert decoded(text={"format": {"type": "text"}}).constraint is None
    named = decoded(tools=[RUN, PATCH], tool_choice={"type": "custom", "name": "apply_patch"}).constraint
    assert named is not None and (named.kind, named.tool) == ("tool", "apply_patch")
    assert named.schema["required"] == ["input"]
    inner = decoded(tools=[TEAM], tool_choice={"type": "function", "name": "spawn", "namespace": "team"}).constraint
    assert inner is not None and inner.tool == "team__spawn"
    some = decoded(tools=[RUN, PATCH], tool_choice="required", parallel_tool_calls=False).constraint
    assert some is not None and some.kind == "tools" and some.schema["maxItems"] == 1


def test_allowed_tools() -> None:
    allowed = {"type": "allowed_tools", "tools": [{"type": "function", "name": "run"}, {"type": "web_search"}]}
    both = [RUN, PATCH]
    assert list(shown(*both, tool_choice={**allowed, "mode": "auto"})) == ["run"]
    assert list(shown(*both, tool_choice={**allowed, "mode": "required"})) == ["run", "apply_patch"]
    forced = decoded(tools=both, tool_choice={**allowed, "mode": "required"}).constraint
    assert forced is not None and len(forced.schema["items"]["anyOf"]) == 1
    assert shown(*both, tool_choice="none") == {}
    # Shown are other tools than before, and whoever remembers them must notice.
    calls = [decoded(tools=both, tool_choice=c) for c in ("auto", {**allowed, "mode": "auto"})]
    raws = [call.tools.raw for call in calls if call.tools is not None]
    assert len(set(raws)) == 2 and all(json.loads(raw) for raw in raws)


# ── what is offered ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_function_is_shown_as_it_is() -> None:
    assert shown(RUN) == {"run": {"name": "run", "description": "Runs.", "parameters": {"type": "object"}}}
    assert shown({"type": "function", "name": "f"})["f"]["parameters"] == {"type": "object", "properties": {}}


def test_a_custom_tool_is_a_function_with_one_string() -> None:
    function = shown(PATCH)["apply_patch"]
    assert function["parameters"]["properties"]["input"]["type"] == "string"
    assert (
        function["description"].startswith("Edits files.") and "lark grammar:\nstart: /.+/" in function["description"]
    )
    plain = shown({"type": "custom", "name": "c", "format": {"type": "text"}})["c"]
    assert "grammar" not in plain["description"]


def test_a_namespace_is_part_of_the_names() -> None:
    functions = shown(RUN, TEAM)
    assert list(functions) == ["run", "team__spawn", "team__apply_patch"]
    assert functions["team__spawn"]["description"] == "Runs.\n\nAbout the team tools: Helpers."
    assert "Helpers." not in functions["team__apply_patch"]["description"]
    # The namespace that OpenAI's models have by default is none.
    assert list(shown({"type": "namespace", "name": "functions", "description": "", "tools": [RUN]})) == ["run"]


def test_tools_that_the_provider_would_run_are_not_shown() -> None:
    hosted = [{"type": "web_search", "external_web_access": True}, {"type": "image_generation"}]
    assert list(shown(RUN, *hosted, {"type": "web_search_preview_2025_03_11"}, {"type": "tool_search"})) == ["run"]
    assert shown(*hosted) == {}


def test_tools_that_come_as_an_item_are_offered_and_not_said() -> None:
    item = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [TEAM]}
    call = decoded(input=[item, {"role": "user", "content": "Hi"}], tools=[RUN])
    assert call.tools is not None
    assert [tool.name for tool in call.tools.decode()] == ["run", "team__spawn", "team__apply_patch"]
    assert len(call.history.raws) == 1
    # What comes later takes the place of what was there.
    renewed = decoded(input=[item, {**item, "tools": [{**RUN, "description": "Anew."}]}, said("x")], tools=[RUN]).tools
    assert renewed is not None
    assert next((t.name, t.wire["function"]["description"]) for t in renewed.decode()) == ("run", "Anew.")
    # Their ids change when an agent compacts; the tools do not.
    other = decoded(input=[{**item, "id": "at_2"}, {"role": "user", "content": "Hi"}], tools=[RUN])
    assert other.tools is not None and other.tools.raw == call.tools.raw


def test_an_agents_own_search_for_tools() -> None:
    assert shown(SEARCH)["tool_search"]["description"] == "Finds."
    called_it = {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "spawn"}}
    found = {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [TEAM]}
    turn, answer = messages(called_it, found)
    assert [(c.name, json.loads(c.arguments)) for c in turn.tool_calls] == [("tool_search", {"query": "spawn"})]
    assert answer.role == "tool" and answer.tool_call_id == "c"
    names = [tool["function"]["name"] for tool in json.loads(answer.content)]
    assert names == ["team__spawn", "team__apply_patch"]


# ── what we answer ──────────────────────────────────────────────────────────────────────────────────────────────────


def called(call_id: str, name: str, arguments: str = "{}") -> CallDelta:
    return CallDelta(0, ToolCall(call_id, name, arguments))


def done_of(events: tuple[ReplyEvent, ...], finish: Finish = "stop") -> Done:
    text = {kind: "".join(e.text for e in events if isinstance(e, Delta) and e.kind == kind) for kind in KINDS}
    calls = tuple(e.call for e in events if isinstance(e, CallDelta))
    message = Message("assistant", text["content"], text["reasoning"], calls, signature=text["signature"])
    return Done(finish, message, Usage(10, 5, 3, 2))


KINDS = ("content", "reasoning", "signature")


def parsed(data: bytes) -> list[Json]:
    """The events of a stream, each held against the SDK's own types."""
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        name, body = block.split("\n")
        event = json.loads(body.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        strictly.validate_python(event)
        found.append(event)
    return found


def streamed(*events: ReplyEvent, finish: Finish = "stop", **body: Json) -> list[Json]:
    stream = responses.open_stream(decoded(**body))
    data = stream.begin() + b"".join(stream.event(event) for event in (*events, done_of(events, finish)))
    found = parsed(data)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def reply(*events: ReplyEvent, **body: Json) -> list[Json]:
    """The items of a reply, as an agent keeps them."""
    items: list[Json] = streamed(*events, **body)[-1]["response"]["output"]
    return items


def whole(*events: ReplyEvent, finish: Finish = "stop", **body: Json) -> Json:
    response = json.loads(responses.encode_reply(decoded(**body), done_of(events, finish)))
    Response.model_validate(response)
    return response


def types(events: list[Json]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_signs_that_templates_use_are_only_text() -> None:
    odd = '%b %d %% {"a": 1} \n"'
    call = ToolCall("call_%d", "run%b", json.dumps({"x": odd}))
    events = (Delta("reasoning", odd), Delta("content", odd), CallDelta(0, call))
    request = {"instructions": odd, "metadata": {"m": "%d%b"}, "model": "%b"}
    for given in (streamed(*events, **request)[-1]["response"], whole(*events, **request)):
        thinking, answer, called = given["output"]
        assert thinking["content"][0]["text"] == odd == answer["content"][0]["text"] == given["instructions"]
        assert (called["call_id"], called["name"], called["arguments"]) == (call.id, call.name, call.arguments)
        assert given["model"] == "%b" and given["metadata"] == request["metadata"]


def test_the_events_of_an_answer() -> None:
    events = streamed(Delta("content", "Hel"), Delta("content", ""), Delta("content", "lo."))
    assert types(events) == [
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


def test_the_events_of_reasoning_as_a_summary() -> None:
    events = streamed(Delta("reasoning", "Hm"), Delta("reasoning", "."), reasoning={"summary": "auto"})
    assert types(events)[2:-1] == [
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


def test_the_events_of_reasoning_itself() -> None:
    events = streamed(Delta("reasoning", "Hm"), Delta("reasoning", "."), Delta("content", "Yes."))
    assert types(events)[2:9] == [
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


def test_the_events_of_calls() -> None:
    events = streamed(
        called("a", "run", '{"x": 1}'),
        called("b", "apply_patch", '{"input": "*** Begin"}'),
        called("c", "team__spawn"),
        called("d", "tool_search", '{"query": "q"}'),
        called("e", "unheard_of", "not json"),
        finish="tool_calls",
        tools=[RUN, PATCH, TEAM, SEARCH],
    )
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    custom = ["output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"]
    assert types(events)[2:-1] == [*call, *custom, *call, "output_item.added", "output_item.done", *call]
    assert [
        {k: v for k, v in item.items() if k not in ("id", "status")} for item in events[-1]["response"]["output"]
    ] == [
        {"type": "function_call", "call_id": "a", "name": "run", "arguments": '{"x": 1}'},
        {"type": "custom_tool_call", "call_id": "b", "name": "apply_patch", "input": "*** Begin"},
        {"type": "function_call", "call_id": "c", "name": "spawn", "namespace": "team", "arguments": "{}"},
        {"type": "tool_search_call", "call_id": "d", "execution": "client", "arguments": {"query": "q"}},
        {"type": "function_call", "call_id": "e", "name": "unheard_of", "arguments": "not json"},
    ]


def test_signs_of_life_are_progress() -> None:
    stream = responses.open_stream(decoded())
    events = parsed(stream.begin() + stream.event(Delta("content", "a")) + stream.event(KeepAlive()))
    assert types(events)[-1] == "in_progress" and events[-1]["response"]["output"] == []


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_was_cut_short_is_incomplete(stream: bool) -> None:
    events = (Delta("content", "One two"),)
    if stream:
        last = streamed(*events, finish="length")[-1]
        assert last["type"] == "response.incomplete"
        response = last["response"]
    else:
        response = whole(*events, finish="length")
    assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete" and response["completed_at"] is None


def test_an_answer_of_nothing_is_a_message_all_the_same() -> None:
    [item] = reply()
    assert item["type"] == "message" and item["content"][0]["text"] == ""
    assert messages(item) == [Message("assistant")]


def same(*events: ReplyEvent, **body: Json) -> None:
    """What the agent sends back means what was sampled, streamed or not, and by the very bytes or respelled."""
    sampled = done_of(events).message
    for items in (reply(*events, **body), whole(*events, **body)["output"]):
        for kept in (items, [dict(sorted(item.items(), reverse=True)) for item in items]):
            call = decoded(**{**body, "input": [{"role": "user", "content": "Hi"}, *kept]})
            assert len(call.history.raws) == 2
            [turn] = call.history.decode(1)
            reading = RequestMessages(call.history, b"")
            assert reading.meaning(1) == RequestMessages(_One(sampled), b"").meaning(0)
            assert turn.reasoning == sampled.reasoning and turn.signature == sampled.signature
            assert [c.id for c in turn.tool_calls] == [c.id for c in sampled.tool_calls]


class _One:
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
def test_a_call_goes_there_and_back(name: str, arguments: str) -> None:
    tools = [RUN, PATCH, TEAM, SEARCH]
    same(Delta("content", "Look."), called("a", name, arguments), called("b", name, arguments), tools=tools)


@pytest.mark.parametrize("include", [[], ["reasoning.encrypted_content", "file_search_call.results"]])
@pytest.mark.parametrize("reasoning", [{}, {"summary": "auto"}, {"generate_summary": "detailed"}])
@pytest.mark.parametrize("text", ["Hm.", "Größe\n\n 汉字 👩‍👩‍👧 \n", " "])
def test_reasoning_goes_there_and_back(include: list[str], reasoning: Json, text: str) -> None:
    same(Delta("reasoning", text), Delta("content", "Yes."), include=include, reasoning=reasoning)


def test_text_after_a_call_goes_there_and_back() -> None:
    events = (Delta("content", "One. "), called("a", "run"), Delta("content", "Two."), Delta("reasoning", "Hm."))
    assert [item["type"] for item in reply(*events)] == ["message", "function_call", "message", "reasoning"]
    same(*events)


def test_what_a_provider_sealed_goes_there_and_back() -> None:
    same(Delta("reasoning", "Hm."), Delta("signature", "gAAAA=="), Delta("content", "Yes."))
    same(Delta("signature", "gAAAA=="), Delta("content", "Yes."), reasoning={"summary": "auto"})


def test_reasoning_that_the_agent_keeps_for_us_survives_the_loss_of_its_words() -> None:
    [item, _] = reply(Delta("reasoning", "Größe."), Delta("content", "x"), include=["reasoning.encrypted_content"])
    kept = item["encrypted_content"]
    assert kept.startswith("tg1.") and "Größe" not in kept
    [turn] = messages({"type": "reasoning", "summary": [], "content": None, "encrypted_content": kept}, said("x"))
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
def test_reasoning_that_was_damaged_is_refused(damage: Any) -> None:
    [item] = reply(Delta("reasoning", "Some thought."), include=["reasoning.encrypted_content"])
    error = refused(input=[{**item, "encrypted_content": damage(item["encrypted_content"])}])
    assert (error.kind, error.param) == ("invalid_encrypted_content", "input[0].encrypted_content")


def test_ids_are_never_given_twice() -> None:
    ids = [
        item["id"] for _ in range(3) for item in reply(Delta("content", "a"), called("a", "run"), called("b", "run"))
    ]
    assert len(set(ids)) == 9
    assert len({streamed()[0]["response"]["id"] for _ in range(3)}) == 3


def test_the_response_repeats_the_request() -> None:
    response = whole(
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
    # What was done otherwise than asked is told as it was done.
    assert response["store"] is False and response["truncation"] == "disabled"


def test_whole_and_streamed_say_the_same() -> None:
    events = (Delta("reasoning", "Hm."), Delta("content", "Look."), called("a", "run"), called("b", "apply_patch"))
    body: dict[str, Json] = {
        "tools": [RUN, PATCH],
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"],
    }

    def plain(response: Json) -> Json:
        items = [{k: v for k, v in item.items() if k != "id"} for item in response["output"]]
        return {**response, "output": items, "id": "", "created_at": 0, "completed_at": 0}

    assert plain(whole(*events, **body)) == plain(streamed(*events, **body)[-1]["response"])


def test_counting_and_models() -> None:
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
def test_errors_read_as_the_providers(error: TurngateError, status: int, kind: str, code: str, in_stream: str) -> None:
    body = json.loads(responses.encode_error(error))["error"]
    assert (responses.error_status(error), body["type"], body["code"]) == (status, kind, code)
    assert body["message"] and set(body) == {"message", "type", "param", "code"}
    assert responses.sends_in_stream(error) == isinstance(error, ContextOverflow)
    stream = responses.open_stream(decoded())
    failed = [
        json.loads(block.split("data: ", 1)[1])
        for block in (stream.begin() + stream.event(Delta("content", "Hal")) + stream.error(error))
        .decode()
        .split("\n\n")
        if block
    ][-1]
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == in_stream and failed["response"]["output"] == []


def test_an_overflow_says_how_much_it_is_in_the_words_that_agents_look_for() -> None:
    body = json.loads(responses.encode_error(ContextOverflow("no", param="messages", limit=5, size=9)))["error"]
    assert body["param"] == "input" and "exceeds the context window" in body["message"]
    assert "maximum context length is 5 tokens" in body["message"] and "has 9." in body["message"]
    vague = json.loads(responses.encode_error(ContextOverflow("no")))["error"]["message"]
    assert vague.endswith("try again.")


def test_a_busy_engine_says_when_to_try_again() -> None:
    failed = responses.open_stream(decoded()).error(EngineBusy("All engines are busy.")).decode()
    assert "All engines are busy. Please try again in 1s." in failed
