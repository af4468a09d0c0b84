"""Test Anthropic Messages: decoding of the shapes agents send, and encoding of every reply."""

from __future__ import annotations

import base64
import json
import time
import zlib
from typing import Any

import pytest

from tests.speed import scaled
from turngate.dialects import decode_stored_messages
from turngate.dialects.base import WireRequest
from turngate.dialects.messages import Messages
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
    Stopping,
    StoreError,
    TooLarge,
    TurngateError,
    Unauthorized,
    Unprocessable,
)
from turngate.trace.message_equality import RequestMessages
from turngate.types import Call, CallDelta, Constraint, Delta, Done, KeepAlive, Message, ToolCall, Usage

Json = Any
HI = {"role": "user", "content": "Hi"}
TOOL = {"name": "f", "description": "Does f.", "input_schema": {"type": "object", "properties": {}}}
EPHEMERAL = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
HEX = "0123456789abcdef01234567"
dialect = Messages()


def decode(headers: dict[str, str] | None = None, verb: Any = "generate", **body: Json) -> Call:
    request = {"model": "m", "max_tokens": 100, "messages": [HI], **body}
    return dialect.decode(WireRequest(json.dumps(request).encode(), headers or {}, verb=verb))


def conversation(*wires: Json, **body: Json) -> list[Message]:
    """Decode wire messages, followed by a user message that is left out of the result."""
    history = decode(messages=[*wires, HI], **body).history
    decoded_messages = [m for n in range(len(history.raws)) for m in history.decode(n)]
    return decoded_messages[:-1]


def assistant(*blocks: Json) -> Message:
    [got] = conversation({"role": "assistant", "content": list(blocks)})
    return got


def results(*blocks: Json, **body: Json) -> list[Message]:
    history = decode(messages=[{"role": "user", "content": list(blocks)}], **body).history
    return list(history.decode(0))


def decode_error(**body: Json) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        call = decode(**body)
        for n in range(len(call.history.raws)):
            call.history.decode(n)
        if call.tools is not None:
            call.tools.decode()
    return caught.value


def text(words: str, **more: Json) -> Json:
    return {"type": "text", "text": words, **more}


def tool_use(arguments: Json = None, **more: Json) -> Json:
    return {"type": "tool_use", "id": "toolu_1", "name": "f", "input": arguments, **more}


def result(content: Json = None, **more: Json) -> Json:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **more}


# ── messages ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "content",
    [
        "Hello",
        [text("Hello")],
        [text("Hello", citations=None)],
        [text("Hello", **EPHEMERAL)],
        [text("Hello"), text("")],
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_text_content_forms(role: str, content: Json) -> None:
    got = conversation({"role": role, "content": content}, {"role": "assistant", "content": ""})[0]
    assert got == Message(role, "Hello")  # type: ignore[arg-type]


def test_user_parts_are_lines_and_assistant_parts_are_joined() -> None:
    assert conversation({"role": "user", "content": [text("a"), text("b")]}, {"role": "assistant", "content": "x"})[
        0
    ] == Message("user", "a\nb")
    assert assistant(text("a "), tool_use({}), text("b")).content == "a b"


@pytest.mark.parametrize("content", [None, "", [], [text("")]])
def test_empty_content_forms(content: Json) -> None:
    assert conversation({"role": "assistant", "content": content}) == [Message("assistant")]
    assert decode(messages=[{"role": "user", "content": content}]).history.decode(0) == (Message("user"),)


def test_consecutive_messages_of_one_role_are_one_turn() -> None:
    """Anthropic merges them too, and some agents send each block of a turn as its own message."""
    parts = [{"type": "thinking", "thinking": "r", "signature": "s"}, text("Let me see."), tool_use({"a": 1})]
    wires = [{"role": "assistant", "content": [part]} for part in parts]
    assert conversation(*wires) == [assistant(*parts)]
    separate = [{"role": "user", "content": [result("ok")]}, {"role": "user", "content": "Go on."}, HI]
    history = decode(messages=separate).history
    assert len(history.raws) == 1
    assert history.decode(0) == (Message("tool", "ok", tool_call_id="toolu_1"), Message("user", "Go on.\nHi"))


def test_system_messages_at_any_position() -> None:
    """Claude Code sends its environment as a system message after the question, first as parts and later as a string."""
    for content in ("Be brief.", [text("Be brief.", **EPHEMERAL)]):
        decoded_messages = conversation(
            HI, {"role": "system", "content": content}, {"role": "assistant", "content": "x"}
        )
        assert decoded_messages[1] == Message("system", "Be brief.")
    two = conversation(HI, {"role": "system", "content": "a"}, {"role": "system", "content": "b"})
    assert [m.content for m in two] == ["Hi", "a", "b"]


def test_system_message_with_only_options_is_skipped() -> None:
    option = {"role": "system", "content": [], "output_config": {"effort": "low"}}
    said = {"role": "system", "content": "Be brief.", "output_config": {"effort": "low"}, "clear_at": "never"}
    assert [m.content for m in conversation(HI, option, said, {"role": "assistant", "content": "x"})] == [
        "Hi",
        "Be brief.",
        "x",
    ]
    assert decode_error(messages=[option]).param == "messages"


BILLING = "x-anthropic-billing-header: cc_version=2.1.325.148; cch=a1b2c;"


@pytest.mark.parametrize(
    "system",
    [
        "You work.\nWell.",
        [text("You work.\nWell.")],
        [text("You work.", **EPHEMERAL), text("Well.")],
        [text(BILLING), text("You work."), text("Well.")],
        [text(BILLING + "\nYou work."), text("Well.")],
        BILLING + "\nYou work.\nWell.",
        [text("You work."), text(""), text("Well.")],
    ],
)
def test_system_prompt_is_normalized_as_first_message(system: Json) -> None:
    history = decode(system=system).history
    assert history.raws[0] == b'{"role":"system","content":"You work.\\nWell."}'
    assert history.decode(0) == (Message("system", "You work.\nWell."),)
    assert history.decode(1) == (Message("user", "Hi"),)


@pytest.mark.parametrize("system", [None, "", [], [text("")], BILLING, [text(BILLING)]])
def test_empty_system_prompt_forms(system: Json) -> None:
    assert len(decode(system=system).history.raws) == 1


def test_thinking_blocks() -> None:
    thought = {"type": "thinking", "thinking": "r", "signature": "sig"}
    got = assistant(thought, text("x"))
    assert (got.reasoning, got.content, got.signature) == ("r", "x", "sig")
    interleaved = assistant(thought, tool_use({}), {**thought, "thinking": "s", "signature": "t"}, text("x"))
    assert (interleaved.reasoning, interleaved.signature) == ("r\n\ns", "sig")
    assert assistant({"type": "redacted_thinking", "data": "opaque"}, text("x")) == Message("assistant", "x")
    assert assistant({"type": "thinking"}, text("x")).reasoning == ""


@pytest.mark.parametrize(
    ("wire", "expected"),
    [
        ({"a": 1}, '{"a": 1}'),
        ({}, "{}"),
        (None, "{}"),
        ([1, 2], "[1, 2]"),
        ("text", '"text"'),
        ({"a": "\ud83d\ude00 é"}, '{"a": "\\ud83d\\ude00 \\u00e9"}'),  # exactly the bytes that were sent
        ({"INVALID_JSON": "{oops"}, "{oops"),
        ({"INVALID_JSON": "{oops", "b": 1}, '{"INVALID_JSON": "{oops", "b": 1}'),
        ({"INVALID_JSON": 5}, '{"INVALID_JSON": 5}'),
    ],
)
def test_argument_forms(wire: Json, expected: str) -> None:
    [got] = assistant(tool_use(wire)).tool_calls
    assert (got.id, got.name, got.arguments) == ("toolu_1", "f", expected)


def test_own_call_ids_are_restored() -> None:
    [ours] = assistant(tool_use({}, id=f"toolu_{HEX}")).tool_calls
    assert ours.id == f"call_{HEX}"
    assert results(result("x", tool_use_id=f"toolu_{HEX}"))[0].tool_call_id == f"call_{HEX}"
    for foreign in ("toolu_01A09q90qw90lq917835lq9", "call_1", f"toolu_{HEX}0", ""):
        assert assistant(tool_use({}, id=foreign)).tool_calls[0].id == foreign


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (result("ok"), "ok"),
        (result("ok", is_error=False), "ok"),
        (result([text("one"), text("two")]), "one\ntwo"),
        (result([text("one", **EPHEMERAL)], **EPHEMERAL), "one"),
        (result("  indented"), "  indented"),
        (result(""), ""),
        (result([]), ""),
        (result(None), ""),
        ({"type": "tool_result", "tool_use_id": "toolu_1"}, ""),
        (result("No such file.", is_error=True), "Error: No such file."),
        (result("Error: no such file.", is_error=True), "Error: no such file."),
        (result("<tool_use_error>No</tool_use_error>", is_error=True), "<tool_use_error>No</tool_use_error>"),
        (result(None, is_error=True), "Error"),
        (result([text("No")], is_error=True), "Error: No"),
    ],
)
def test_tool_result_forms(block: Json, expected: str) -> None:
    assert results(block) == [Message("tool", expected, tool_call_id="toolu_1")]


def test_results_and_text_keep_their_order() -> None:
    got = results(result("1"), result("2", tool_use_id="toolu_2"), text("And"), text("now?"))
    assert [(m.role, m.content, m.tool_call_id) for m in got] == [
        ("tool", "1", "toolu_1"),
        ("tool", "2", "toolu_2"),
        ("user", "And\nnow?", ""),
    ]
    assert [m.role for m in results(text("First"), result("1"), text(""), result("2"))] == ["user", "tool", "tool"]


DEFERRED = {**TOOL, "name": "g", "defer_loading": True}


def test_deferred_tools_are_shown_where_referenced() -> None:
    call = decode(tools=[TOOL, DEFERRED])
    assert call.tools is not None and [tool.name for tool in call.tools.decode()] == ["f"]
    reference = {"type": "tool_reference", "tool_name": "g"}
    [got] = results(result([text("Found:"), reference]), tools=[TOOL, DEFERRED])
    said, function = got.content.split("\n")
    assert said == "Found:"
    assert json.loads(function.removeprefix("<function>").removesuffix("</function>"))["name"] == "g"
    wrong = {"type": "tool_reference", "tool_name": "h"}
    assert decode_error(messages=[{"role": "user", "content": [result([wrong])]}], tools=[TOOL]).param == (
        "messages.0.content.0.content.0"
    )


def test_tool_additions_and_removals() -> None:
    changes = [
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "g"}},
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {**TOOL, "name": "h"}}},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}},
    ]
    messages = [HI, {"role": "system", "content": changes}]
    [got] = decode(messages=messages, tools=[TOOL, DEFERRED]).history.decode(1)
    added, inline, removed = got.content.split("\n")
    assert '"name": "g"' in added and '"name": "h"' in inline and removed == "The tool f is no longer available."
    # Stored messages are decoded without the tools.
    stored = b"[" + json.dumps({"role": "system", "content": changes[:1]}).encode() + b"]"
    assert decode_stored_messages("messages", stored) == [Message("system", "The tool g is available now.")]


@pytest.mark.parametrize(
    ("block", "param"),
    [
        ({"type": "tool_reference"}, "tool_name"),
        ({"type": "tool_addition", "tool": {"type": "tool_reference"}}, "tool.name"),
        ({"type": "tool_removal", "tool": {"type": "tool_reference", "name": ""}}, "tool.name"),
    ],
)
def test_tool_reference_without_name_is_refused(block: Json, param: str) -> None:
    error = decode_error(messages=[{"role": "user", "content": [block]}], tools=[TOOL, DEFERRED])
    assert (error.param, error.message) == (
        f"messages.0.content.0.{param}",
        f"messages.0.content.0.{param} is missing or empty",
    )


def test_stored_tool_reference_without_name_is_still_read() -> None:
    stored = b'[{"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "tool_reference"}]}]'
    assert decode_stored_messages("messages", stored) == [Message("user", "hello\nThe tool  is available now.")]


@pytest.mark.parametrize(
    ("definition", "field", "words"),
    [
        ({"name": 3}, "", ": name: Expected `str`, got `int`"),
        (None, "", ": Expected `object`, got `null`"),
        ({"name": "h"}, ".input_schema", " is missing"),
    ],
)
def test_invalid_tool_in_message_names_its_position(definition: Json, field: str, words: str) -> None:
    change = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": definition}}
    error = decode_error(messages=[HI, {"role": "system", "content": [change]}], tools=[TOOL])
    assert error.param == "messages.1.content.0.tool.definition" + field
    assert error.message == error.param + words


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "hi"}}


@pytest.mark.parametrize(
    ("block", "at"),
    [
        (IMAGE, "messages.0.content.1"),
        (DOCUMENT, "messages.0.content.1"),
        ({"type": "search_result", "source": "x", "title": "t", "content": [text("x")]}, "messages.0.content.1"),
        ({"type": "container_upload", "file_id": "f"}, "messages.0.content.1"),
        (result([text("ok"), IMAGE]), "messages.0.content.1.content.1"),
    ],
)
def test_non_text_block_names_its_position(block: Json, at: str) -> None:
    """Unsupported blocks are marked: a provider of this dialect may accept them, and `prompt.py` refuses them otherwise."""
    [unsupported] = [m.unsupported for m in results(text("Look:"), block) if m.unsupported]
    assert unsupported.startswith(f"{at}: '") and "not supported" in unsupported


@pytest.mark.parametrize("kind", ["server_tool_use", "web_search_tool_result", "mcp_tool_use", "compaction", "image"])
def test_provider_tool_block_names_its_position(kind: str) -> None:
    got = assistant(text("x"), {"type": kind, "id": "s1", "name": "web_search", "input": {}})
    assert got.content == "x" and got.unsupported.startswith(f"messages.0.content.1: {kind!r}")


@pytest.mark.parametrize(
    ("wire", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages.0.role"),
        ({"role": "developer", "content": "x"}, "messages.0.role"),
        ({"role": "user", "content": [{"type": "tool_result", "content": "x"}]}, "messages.0.content.0.tool_use_id"),
        ({"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}, "messages.0.content.0.name"),
        ({"role": "user", "content": {"text": "x"}}, "messages.0"),
        ({"role": "user", "content": ["x"]}, "messages.0"),
        ({"role": "user", "content": [text(5)]}, "messages.0"),  # type: ignore[arg-type]
        ({"content": "x"}, "messages.0"),
        ("Hi", "messages.0"),
        (None, "messages.0"),
    ],
)
def test_invalid_message_names_its_position(wire: Json, param: str) -> None:
    error = decode_error(messages=[wire, HI])
    assert error.param == param and error.message.startswith("messages.0")


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "tool_result", "content": "x"}], "messages.2.content.0.tool_use_id"),
        (["x"], "messages.2"),
        ({"text": "x"}, "messages.2"),
    ],
)
def test_invalid_message_after_others_of_its_role_names_its_own_position(content: Json, param: str) -> None:
    option = {"role": "system", "content": [], "output_config": {"effort": "low"}}
    wrong = {"role": "user", "content": content}
    for skipped in (option, HI):
        error = decode_error(messages=[HI, skipped, wrong])
        assert error.param == param and error.message.startswith("messages.2")


def test_duplicate_role_is_refused() -> None:
    body = b'{"messages": [{"role":"user","content":"x","role":"assistant"}, {"role":"user","content":"y"}]}'
    with pytest.raises(BadRequest, match=r"messages\.0\.role"):
        dialect.decode(WireRequest(body)).history.decode(0)


def test_messages_are_decoded_lazily() -> None:
    """Known messages are matched by their bytes, so a long history is not decoded again."""
    call = decode(messages=[{"role": "assistant", "content": [{"type": "tool_use"}]}, HI])
    assert call.history.decode(1) == (Message("user", "Hi"),)
    with pytest.raises(BadRequest):
        call.history.decode(0)


def test_raw_messages_are_the_sent_bytes() -> None:
    raws = [b'{ "role":"user" ,"content": "a\\u00e9" }', b'{"content":"b","role":"assistant"}', b'{"role": "user"}']
    body = b' {"stop_sequences": null, "messages" : [ ' + b" ,\n".join(raws) + b' ], "model":"m"}'
    assert list(dialect.decode(WireRequest(body)).history.raws) == raws


def test_stored_messages_decode_the_same() -> None:
    wires = [
        HI,
        HI,
        {"role": "system", "content": [text("Be brief.")]},
        {"role": "assistant", "content": [text("a")]},
        {"role": "assistant", "content": [tool_use({"k": 1})]},
        {"role": "user", "content": [result("ok"), text("next")]},
    ]
    history = decode(messages=wires, system=[text("You work.")]).history
    live = [m for n in range(len(history.raws)) for m in history.decode(n)]
    assert decode_stored_messages("messages", b"[" + b",".join(history.raws) + b"]") == live
    assert [m.role for m in live] == ["system", "user", "system", "assistant", "tool", "user"]


def test_cache_control_does_not_change_meaning() -> None:
    plain = [HI, {"role": "assistant", "content": [tool_use({})]}, {"role": "user", "content": [result("ok")]}]
    marked = [HI, plain[1], {"role": "user", "content": [result([text("ok", **EPHEMERAL)], **EPHEMERAL)]}]
    digests = [RequestMessages(decode(messages=m).history, b"").meanings(0, 3) for m in (plain, marked)]
    assert digests[0] == digests[1]


def test_long_history_decodes_quickly() -> None:
    wires: list[Json] = []
    for n in range(100):
        wires += [{"role": "user", "content": [result("output\n" * 200)]}, {"role": "assistant", "content": f"{n}"}]
    body = json.dumps({"model": "m", "max_tokens": 5, "messages": [*wires, HI]}).encode()
    best = min(_cpu_time(lambda: dialect.decode(WireRequest(body))) for _ in range(20))
    assert best < scaled(0.001), f"{best * 1000:.2f} ms"  # it takes 0.3 ms on an idle core


def _cpu_time(work: Any) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


# ── other request fields ────────────────────────────────────────────────────────────────────────────────────────────


def test_minimal_request() -> None:
    got = dialect.decode(WireRequest(b'{"messages": [{"role": "user", "content": "Hi"}]}'))
    assert (got.model, got.tools, got.sampling, got.max_tokens, got.stop) == ("", None, {}, None, ())
    assert (got.constraint, got.stream, got.retried, got.dialect) == (None, False, False, "messages")
    assert got.parallel_tool_calls and got.template_hints == {} and got.idempotency_key == ""


NULLS = (
    *("system", "stream", "tools", "tool_choice", "thinking", "output_config", "output_format", "stop_sequences"),
    *("temperature", "top_p", "top_k", "context_management", "mcp_servers", "container", "compaction", "thread"),
    *("metadata", "service_tier", "cache_control", "fallbacks"),
)


def test_null_fields_equal_missing_fields() -> None:
    got, plain = decode(**dict.fromkeys(NULLS)), decode()
    for field in Call.__struct_fields__:
        if field not in ("body", "history"):
            assert getattr(got, field) == getattr(plain, field), field


def test_irrelevant_fields_are_ignored() -> None:
    plain = decode()
    got = decode(
        metadata={"user_id": "u"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        inference_geo="eu",
        speed="fast",
        betas=["x"],
        unheard_of={"deep": [1]},
        mcp_servers=[],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )
    for field in Call.__struct_fields__:
        if field not in ("body", "history", "reply_options"):
            assert getattr(got, field) == getattr(plain, field), field


def test_sampling_stop_sequences_and_max_tokens() -> None:
    got = decode(temperature=0.5, top_p=0.9, top_k=40, stop_sequences=["END", "\n\n"])
    assert got.sampling == {"temperature": 0.5, "top_p": 0.9, "top_k": 40}
    assert got.stop == ("END", "\n\n") and got.max_tokens == 100


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"system": [IMAGE]}, "system.0.type"),
        ({"system": 5}, "system"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"thinking": True}, "thinking"),
        ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "mcp_servers"),
        ({"container": {"skills": []}}, "container"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"messages": [HI, {"role": "assistant", "content": "The answer is ("}]}, "messages"),
    ],
)
def test_invalid_or_unsupported_field_is_named(body: Json, param: str) -> None:
    assert decode_error(**body).param == param


def test_forced_tool_overrides_output_format() -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    got = decode(tools=[TOOL], tool_choice={"type": "any"}, output_config=form).constraint
    assert got is not None and got.kind == "tools"


LONE_SURROGATE = b'{"messages": [{"role": "user", "content": "half of an emoji: \\ud83d"}]}'  # Anthropic refuses it too


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'"x"', b"[" * 5000, LONE_SURROGATE])
def test_invalid_bodies(body: bytes) -> None:
    with pytest.raises(BadRequest):
        dialect.decode(WireRequest(body))


def test_prefill_is_refused_but_can_be_counted() -> None:
    prefilled = [HI, {"role": "assistant", "content": "{"}]
    message = decode_error(messages=prefilled).message
    assert "prefill" in message and "must end with a user message" in message and "output_config.format" in message
    assert len(decode(verb="count", messages=prefilled).history.raws) == 2


def test_retry_headers() -> None:
    assert not decode({"x-stainless-retry-count": "0"}).retried and decode({"x-stainless-retry-count": "2"}).retried
    assert decode({"idempotency-key": "k1"}).idempotency_key == "k1"


def test_api_key_headers() -> None:
    assert dialect.read_key({"x-api-key": " abc "}, {}) == "abc"
    assert dialect.read_key({"authorization": "Bearer abc"}, {}) == "abc"
    assert dialect.read_key({"x-api-key": "abc", "authorization": "Bearer other"}, {}) == "abc"
    assert dialect.read_key({"x-api-key": "", "authorization": "Bearer abc"}, {}) == "abc"
    assert dialect.read_key({"authorization": "Basic abc"}, {}) == dialect.read_key({}, {}) == ""


def test_anthropic_headers_are_forwarded() -> None:
    got = decode({"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "secret"})
    assert got.forwarded_headers == {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}


@pytest.mark.parametrize(
    ("body", "hints"),
    [
        ({}, {}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, {"enable_thinking": True, "thinking": True}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2048}},
            {"enable_thinking": True, "thinking": True, "thinking_budget": 2048},
        ),
        ({"thinking": {"type": "between_tools"}}, {}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
    ],
)
def test_thinking_and_effort_become_template_hints(body: Json, hints: Json) -> None:
    got = decode(**body)
    assert got.template_hints == hints and got.template_kwargs == {}


# ── tools and constraints ───────────────────────────────────────────────────────────────────────────────────────────


def test_tools_become_function_tools() -> None:
    more = {**EPHEMERAL, "strict": True, "eager_input_streaming": True, "type": "custom"}
    got = decode(tools=[{**TOOL, **more}, {"name": "g", "input_schema": {"type": "object"}}]).tools
    assert got is not None
    first, second = got.decode()
    function = {"name": "f", "description": "Does f.", "parameters": TOOL["input_schema"]}
    assert (first.name, first.wire) == ("f", {"type": "function", "function": function})
    assert second.wire["function"] == {"name": "g", "parameters": {"type": "object"}}
    assert decode(tools=[]).tools is None
    assert decode(tools=[TOOL], tool_choice={"type": "none"}).tools is None
    assert decode(tools=[TOOL], tool_choice={"type": "auto"}).tools is not None


def test_input_examples_are_in_parameters() -> None:
    got = decode(tools=[{**TOOL, "input_examples": [{"a": 1}]}]).tools
    assert got is not None
    assert got.decode()[0].wire["function"]["parameters"]["examples"] == [{"a": 1}]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("f", "tools"),
        ([5], "tools.0"),
        ([TOOL, {"name": 3}], "tools.1"),
        ([TOOL, TOOL], "tools"),
        ([{"type": "web_search_20250305", "name": "web_search"}], "tools.0.type"),
        ([TOOL, {"type": "bash_20250124", "name": "bash"}], "tools.1.type"),
        ([{"input_schema": {"type": "object"}}], "tools.0.name"),
        ([{"name": "f"}], "tools.0.input_schema"),
    ],
)
def test_invalid_tool_names_its_position(tools: Json, param: str) -> None:
    error = decode_error(tools=tools)
    assert error.param == param and error.message.startswith("tools")


def test_forced_tool_constraints() -> None:
    named = decode(tools=[TOOL], tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True})
    assert named.constraint == Constraint("tool", TOOL["input_schema"], "f") and not named.parallel_tool_calls
    other = {"name": "g", "input_schema": {"type": "object"}}
    forced = decode(tools=[TOOL, other], tool_choice={"type": "any"}).constraint
    assert forced is not None and forced.kind == "tools" and "maxItems" not in forced.schema
    single = decode(tools=[TOOL, other], tool_choice={"type": "any", "disable_parallel_tool_use": True}).constraint
    assert single is not None and single.schema["maxItems"] == 1
    auto = decode(tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert auto.constraint is None and not auto.parallel_tool_calls


def test_output_formats() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "schema": schema}
    assert decode(output_config={"format": form}).constraint == Constraint("json_schema", schema)
    assert decode(output_format=form).constraint == Constraint("json_schema", schema)
    assert decode(output_config={"effort": "high", "task_budget": {"type": "tokens"}}).constraint is None


# ── replies ─────────────────────────────────────────────────────────────────────────────────────────────────────────

USAGE = Usage(10, 3)
CALL = ToolCall(f"call_{HEX}", "f", '{"a": "line\\n"}')
OMITTED = {"thinking": {"type": "adaptive", "display": "omitted"}}
SHOWN = {"thinking": {"type": "adaptive"}}
UNREQUESTED: list[Json] = [{}, {"thinking": {"type": "disabled"}}, {"output_config": {"effort": "high"}}]


def encode_reply(
    message: Message, finish: Any = "stop", usage: Usage | None = USAGE, stop: str = "", **body: Json
) -> Json:
    return json.loads(dialect.encode_reply(decode(**body), Done(finish, message, usage, 1, stop)))


def test_whole_reply() -> None:
    got = encode_reply(Message("assistant", "Hello."))
    assert got.pop("id").startswith("msg_")
    assert got == {
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "Hello."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 10,
            "output_tokens": 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def test_whole_reply_blocks() -> None:
    thought, said, called = encode_reply(Message("assistant", "Hi", "r", (CALL,)), "tool_calls", **SHOWN)["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "r") and thought["signature"].startswith("tg1.")
    assert said == {"type": "text", "text": "Hi"}
    assert called == {"type": "tool_use", "id": f"toolu_{HEX}", "name": "f", "input": {"a": "line\n"}}
    assert encode_reply(Message("assistant"))["content"] == []


def test_partial_and_unknown_usage() -> None:
    assert encode_reply(Message("assistant", "x"), usage=None)["usage"]["output_tokens"] == 0
    got = encode_reply(Message("assistant", "x"), usage=Usage(10, 3, cached_tokens=4, reasoning_tokens=2))["usage"]
    assert (got["input_tokens"], got["cache_read_input_tokens"]) == (6, 4)
    assert got["output_tokens_details"] == {"thinking_tokens": 2}


@pytest.mark.parametrize(
    ("finish", "stop", "reason"),
    [
        ("stop", "", "end_turn"),
        ("stop", "END", "stop_sequence"),
        ("length", "", "max_tokens"),
        ("tool_calls", "", "tool_use"),
        ("tool_calls", "END", "tool_use"),
        ("abort", "", "end_turn"),
    ],
)
def test_stop_reasons(finish: Any, stop: str, reason: str) -> None:
    got = encode_reply(Message("assistant", "x"), finish, stop=stop)
    assert (got["stop_reason"], got["stop_sequence"]) == (reason, stop if reason == "stop_sequence" else None)


def encode_stream(*events: Any, **body: Json) -> list[Json]:
    encoder = dialect.open_stream(decode(stream=True, **body))
    assert encoder.media == "text/event-stream; charset=utf-8"
    data = encoder.begin() + b"".join(encoder.event(event) for event in events)
    *parts, rest = data.decode().split("\n\n")
    assert rest == ""
    found = []
    for part in parts:
        name, payload = part.split("\n")
        found.append(json.loads(payload.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_percent_signs_are_plain_text() -> None:
    percent_signs = '%b %d %% {"a": 1} \n"'
    call = ToolCall("toolu_%d", "run%b", json.dumps({"x": percent_signs}))
    message = Message("assistant", percent_signs, percent_signs, (call,))
    events = [Delta("reasoning", percent_signs), Delta("content", percent_signs), CallDelta(0, call)]
    got = join_events(encode_stream(*events, Done("stop", message, Usage(1, 2)), model="%b", **SHOWN))
    thinking, text_block, use = got["content"]
    assert thinking["thinking"] == percent_signs == text_block["text"] and got["model"] == "%b"
    assert (use["id"], use["name"], use["input"]) == (call.id, call.name, {"x": percent_signs})


def join_events(events: list[Json]) -> Json:
    """Assemble the message from the events as a client does."""
    message: Json = {}
    texts: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block = message["content"][event["index"]]
                match event["delta"]:
                    case {"type": "text_delta", "text": part}:
                        block["text"] += part
                    case {"type": "thinking_delta", "thinking": part}:
                        block["thinking"] += part
                    case {"type": "signature_delta", "signature": seal}:
                        block["signature"] = seal
                    case {"type": "input_json_delta", "partial_json": part}:
                        texts[event["index"]] = texts.get(event["index"], "") + part
            case "content_block_stop":
                if event["index"] in texts:
                    message["content"][event["index"]]["input"] = json.loads(texts[event["index"]])
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
                message |= {k: v for k, v in event.items() if k == "context_management"}
    return message


REPLIES = [
    Message("assistant", "Hello."),
    Message("assistant"),
    Message("assistant", "Hi\n\n", "thought", (CALL, ToolCall("c2", "g", "{}"))),
    Message("assistant", "", "only thought"),
    Message("assistant", tool_calls=(ToolCall("c2", "g", "not json"),)),
    Message("assistant", "x", "thought", signature="a provider's"),
    Message("assistant", "x", "", signature="a provider's"),
]


def events_of(message: Message) -> list[Any]:
    events: list[Any] = [Delta("reasoning", c) for c in message.reasoning]
    events += [Delta("signature", message.signature)] if message.signature else []
    events += [Delta("content", c) for c in message.content]
    return events + [CallDelta(n, call) for n, call in enumerate(message.tool_calls)]


@pytest.mark.parametrize("body", [{}, SHOWN, OMITTED, {"context_management": {"edits": []}, **SHOWN}])
@pytest.mark.parametrize("message", REPLIES)
def test_streamed_reply_equals_whole_reply(message: Message, body: Json) -> None:
    done = Done("tool_calls" if message.tool_calls else "stop", message, USAGE, 1)
    got, expected = (
        join_events(encode_stream(*events_of(message), done, **body)),
        encode_reply(message, done.finish, **body),
    )
    assert got.pop("id") != expected.pop("id")
    assert got == expected


@pytest.mark.parametrize("body", [{}, SHOWN, OMITTED])
@pytest.mark.parametrize("message", REPLIES)
def test_sampled_message_round_trips(message: Message, body: Json) -> None:
    done = Done("tool_calls" if message.tool_calls else "stop", message, USAGE, 1)
    returned = join_events(encode_stream(*events_of(message), done, **body))["content"]
    [got] = conversation({"role": "assistant", "content": returned})
    assert (got.content, got.tool_calls) == (message.content, message.tool_calls)
    # Hidden thinking is in the signature, unless the signature is a provider's.
    is_sent = body and not (message.signature and body is OMITTED)
    assert got.reasoning == (message.reasoning if is_sent else "")


@pytest.mark.parametrize("body", UNREQUESTED)
@pytest.mark.parametrize("message", REPLIES)
def test_no_thinking_blocks_unless_requested(message: Message, body: Json) -> None:
    done = Done("stop", message, USAGE, 1)
    for got in (encode_reply(message, **body), join_events(encode_stream(*events_of(message), done, **body))):
        assert all(block["type"] in ("text", "tool_use") for block in got["content"])


def test_message_start_counts_the_prompt() -> None:
    encoder = dialect.open_stream(decode(stream=True))
    start = json.loads(encoder.begin(Usage(10, 0, cached_tokens=4)).decode().split("data: ")[1])
    usage = start["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (6, 4, 0)


def test_streamed_reply_events() -> None:
    message = Message("assistant", "Hi", "r", (CALL,))
    done = Done("tool_calls", message, USAGE, 1)
    events = encode_stream(
        Delta("reasoning", "r"), KeepAlive(), Delta("content", "Hi"), KeepAlive(), CallDelta(0, CALL), done, **SHOWN
    )
    assert [(e["type"], e.get("index")) for e in events] == [
        ("message_start", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("ping", None),
        ("content_block_delta", 0),  # the signature
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("ping", None),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_delta", 2),
        ("content_block_stop", 2),
        ("message_delta", None),
        ("message_stop", None),
    ]
    assert events[0]["message"]["stop_reason"] is None and events[0]["message"]["usage"]["input_tokens"] == 0
    assert events[4]["delta"]["type"] == "signature_delta"
    assert events[10]["content_block"] == {"type": "tool_use", "id": f"toolu_{HEX}", "name": "f", "input": {}}
    assert events[11]["delta"] == {"type": "input_json_delta", "partial_json": CALL.arguments}
    assert events[13]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[13]["usage"]["input_tokens"] == 10 and "context_management" not in events[13]


def test_text_after_call_is_its_own_block() -> None:
    done = Done("tool_calls", Message("assistant", "ab", tool_calls=(CALL,)), USAGE, 1)
    got = join_events(encode_stream(Delta("content", "a"), CallDelta(0, CALL), Delta("content", "b"), done))["content"]
    assert [block["type"] for block in got] == ["text", "tool_use", "text"]
    assert assistant(*got) == Message("assistant", "ab", tool_calls=(CALL,))


def test_hidden_thinking_is_not_sent() -> None:
    message = Message("assistant", "x", "a secret thought")
    events = encode_stream(*events_of(message), Done("stop", message, USAGE, 1), **OMITTED)
    assert not any(e.get("delta", {}).get("type") == "thinking_delta" for e in events)
    assert "secret" not in json.dumps(events)


@pytest.mark.parametrize(
    "signature",
    [
        "",
        "sig",
        "tg1.",
        "tg1.t",
        "tg1.t???",
        "tg1.p",
        "tg1.p/w==",
        "tg1.pé",
        "tg1.tAAAA",
        "tg1.teJzzVChKTUxR",
        "tg1.dx",
        "tg1.té",
    ],
)
def test_foreign_and_damaged_signatures_are_ignored(signature: str) -> None:
    got = assistant({"type": "thinking", "thinking": "", "signature": signature}, text("x"))
    assert (got.reasoning, got.content) == ("", "x")


@pytest.mark.parametrize("size", [4_000, 3_999_999, 50_000_000])
def test_decompression_bomb_signature_is_ignored(size: int) -> None:
    bomb = base64.urlsafe_b64encode(zlib.compress(b"a" * size, 9)).decode()
    got = assistant({"type": "thinking", "thinking": "", "signature": "tg1.t" + bomb}, text("x"))
    assert got == Message("assistant", "x", signature="tg1.t" + bomb)


def test_compressed_signature_is_still_read() -> None:
    old = "tg1.t" + base64.urlsafe_b64encode(zlib.compress(b"I read the file first.")).decode()
    assert assistant({"type": "thinking", "thinking": "", "signature": old}).reasoning == "I read the file first."


def test_repeated_tool_references_decode_tools_once() -> None:
    tools = [{"name": f"t{n}", "input_schema": {"type": "object"}, "defer_loading": True} for n in range(2000)]
    found = {
        "type": "tool_result",
        "tool_use_id": "x",
        "content": [{"type": "tool_reference", "tool_name": "t1999"}] * 2000,
    }
    started = time.process_time()
    decoded_messages = results(found, tools=tools)
    assert decoded_messages[0].content.count('"t1999"') == 2000
    assert time.process_time() - started < scaled(0.5)  # it used to take more than a minute


def test_many_tools_decode_quickly() -> None:
    tools = [{"name": f"t{n}", "input_schema": {"type": "object"}} for n in range(20_000)]
    started = time.process_time()
    call = decode(tools=tools)
    assert call.tools is not None
    assert len(call.tools.decode()) == 20_000
    assert time.process_time() - started < scaled(0.5)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BadRequest("x", param="n"), 400, "invalid_request_error"),
        (Unprocessable("x"), 400, "invalid_request_error"),
        (EngineRejected("x"), 400, "invalid_request_error"),
        (Unauthorized("x"), 401, "authentication_error"),
        (Conflict("x"), 403, "permission_error"),
        (NotFound("x"), 404, "not_found_error"),
        (TooLarge("x"), 413, "request_too_large"),
        (EngineBusy("x"), 429, "rate_limit_error"),
        (EngineError("x"), 500, "api_error"),
        (StoreError("x"), 500, "api_error"),
        (TurngateError("x"), 500, "api_error"),
        (EngineTimeout("x"), 504, "timeout_error"),
        (EngineUnavailable("x"), 529, "overloaded_error"),
        (Stopping("x"), 529, "overloaded_error"),
    ],
)
def test_error_bodies_and_statuses(error: TurngateError, status: int, kind: str) -> None:
    body = {"type": "error", "error": {"type": kind, "message": "x"}, "request_id": None}
    assert json.loads(dialect.encode_error(error)) == body and dialect.error_status(error) == status
    in_stream = dialect.open_stream(decode(stream=True)).error(error)
    assert in_stream.startswith(b"event: error\ndata: ") and in_stream.endswith(b"\n\n")
    assert json.loads(in_stream.removeprefix(b"event: error\ndata: ")) == body
    assert not dialect.sends_in_stream(error)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ContextOverflow("x", limit=100, size=120), "prompt is too long: 120 tokens > 100 maximum"),
        (ContextOverflow("it does not fit"), "prompt is too long: it does not fit"),
    ],
)
def test_context_overflow_message(error: TurngateError, message: str) -> None:
    assert json.loads(dialect.encode_error(error))["error"] == {"type": "invalid_request_error", "message": message}
    assert dialect.error_status(error) == 400


def test_unsupported_thread_error_details() -> None:
    error = json.loads(dialect.encode_error(decode_error(thread={"type": "create"})))["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_encode_models_and_counts() -> None:
    got = json.loads(dialect.encode_models(["a", "b"], 5))
    assert (got["has_more"], got["first_id"], got["last_id"]) == (False, "a", "b")
    assert [m["id"] for m in got["data"]] == ["a", "b"]
    model = json.loads(dialect.encode_model("a", 5))
    assert (model["type"], model["display_name"], model["created_at"]) == ("model", "a", "1970-01-01T00:00:05Z")
    assert json.loads(dialect.encode_models([], 5))["data"] == []
    assert json.loads(dialect.encode_count(7)) == {"input_tokens": 7}
