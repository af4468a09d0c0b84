"""Test Gemini: decoding of the shapes agents send, and encoding of every reply."""

from __future__ import annotations

import base64
import json
import random
import time
from typing import Any

import pytest

from tests.speed import scaled
from turngate.dialects import decode_stored_messages
from turngate.dialects.base import Verb, WireRequest
from turngate.dialects.gemini import Gemini
from turngate.dialects.gemini_history import RAW_ARGUMENTS, decode_signature, encode_signature, to_camel
from turngate.dialects.gemini_tools import to_json_schema
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
from turngate.trace.message_equality import RequestMessages, meaning_digest
from turngate.types import Call, CallDelta, Constraint, Delta, Done, KeepAlive, Message, ToolCall, Usage

Json = Any
HI = {"role": "user", "parts": [{"text": "Hi"}]}
F = {"name": "f", "description": "Does f.", "parametersJsonSchema": {"type": "object"}}
TOOLS = [{"functionDeclarations": [F, {"name": "g"}]}]
gemini = Gemini()


def decode(
    body: Json = None, *, verb: Verb = "generate", headers: Any = None, query: Any = None, **fields: Json
) -> Call:
    body = {"contents": [HI], **fields} if body is None else body
    return gemini.decode(WireRequest(json.dumps(body).encode(), headers or {}, query or {}, verb, "m"))


def messages(*contents: Json, **fields: Json) -> list[tuple[Message, ...]]:
    """Decode the messages of each turn."""
    history = decode(contents=list(contents), **fields).history
    return [history.decode(n) for n in range(len(history.raws))]


def model(*parts: Json) -> Message:
    [_, (message,)] = messages(HI, {"role": "model", "parts": list(parts)})
    return message


def user(*parts: Json) -> tuple[Message, ...]:
    [turn] = messages({"role": "user", "parts": list(parts)})
    return turn


def call(name: str = "f", **fields: Json) -> Json:
    return {"functionCall": {"name": name, **fields}}


def result(response: Json, name: str = "f", **fields: Json) -> Json:
    return {"functionResponse": {"name": name, "response": response, **fields}}


def decode_error(**fields: Json) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        got = decode(**fields)
        for n in range(len(got.history.raws)):
            for message in got.history.decode(n):
                if message.unsupported:  # the pipeline refuses it unless the call is forwarded unchanged
                    raise BadRequest(message.unsupported, param=message.unsupported.partition(": ")[0])
        if got.tools is not None:
            got.tools.decode()
    assert caught.value.param is not None and caught.value.message.startswith(caught.value.param)
    return caught.value


# ── contents ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_user_contents() -> None:
    assert user({"text": "Hello"}) == (Message("user", "Hello"),)
    assert user({"text": "<context>"}, {"text": "Do it"}) == (Message("user", "<context>\nDo it"),)
    assert messages({"parts": [{"text": "x"}]}) == [(Message("user", "x"),)]  # no role means user
    assert messages({"parts": {"text": "x"}}) == [(Message("user", "x"),)]  # a single part instead of a list
    assert decode({"contents": {"parts": {"text": "x"}}}).history.decode(0) == (Message("user", "x"),)


def test_system_instruction_is_first_turn() -> None:
    for system in (
        {"parts": [{"text": "Be good"}]},
        {"parts": [{"text": "Be good"}], "role": "user"},
        {"role": "system", "parts": {"text": "Be good"}},
    ):
        for name in ("systemInstruction", "system_instruction"):
            assert messages(HI, **{name: system}) == [(Message("system", "Be good"),), (Message("user", "Hi"),)]
    two = {"parts": [{"text": "Be good"}, {"text": "Be brief"}]}
    assert messages(HI, systemInstruction=two)[0] == (Message("system", "Be good\nBe brief"),)


def test_model_contents() -> None:
    assert model({"text": "I "}, {"text": "see."}) == Message("assistant", "I see.")  # chunks of one text
    assert model({"text": "r", "thought": True}, {"text": "x"}) == Message("assistant", "x", "r")
    got = model({"text": "Look. "}, call("f", id="c1", args={"a": 1}), call("g", id="c2", args={}))
    assert got == Message(
        "assistant", "Look. ", tool_calls=(ToolCall("c1", "f", '{"a": 1}'), ToolCall("c2", "g", "{}"))
    )
    assert model() == model({"text": ""}) == Message("assistant")
    assert model(call("f")).tool_calls == model(call("f", args=None)).tool_calls == (ToolCall("call_0", "f", "{}"),)


def test_consecutive_contents_of_one_role_are_one_turn() -> None:
    """Streaming SDKs keep every chunk as its own content; Gemini CLI joins them."""
    chunks = [{"role": "model", "parts": [part]} for part in ({"text": "a "}, {"text": "b"}, call("f", id="c1"))]
    whole = {"role": "model", "parts": [{"text": "a b"}, call("f", id="c1")]}
    answers = [{"role": "function", "parts": [result({"output": "1"}, id="c1")]}, {"parts": [{"text": "Go on"}]}]
    joined = {"role": "user", "parts": [result({"output": "1"}, id="c1"), {"text": "Go on"}]}
    split, merged = messages(HI, *chunks, *answers), messages(HI, whole, joined)
    assert split == merged and len(split) == 3
    assert split[2] == (Message("tool", "1", tool_call_id="c1", name="f"), Message("user", "Go on"))
    assert messages(HI, HI) == [(Message("user", "Hi\nHi"),)]


def test_raw_turns_are_the_sent_bytes() -> None:
    raws = [
        b'{ "role":"user" ,"parts": [{"text":"a\\u00e9"}] }',
        b'{"parts":[{"text":"b"}],"role":"model"}',
        b'{"parts":[],"role":"model" }',
        b'{"role":"user","parts":[{"text":"c"}]}',
    ]
    body = b' {"contents" : [ ' + b" ,\n".join(raws) + b' ], "systemInstruction": {"parts" : [{"text": "s"}]}}'
    got = gemini.decode(WireRequest(body)).history.raws
    assert got == [b'{"role":"system","parts":[{"text": "s"}]}', raws[0], raws[1] + b"," + raws[2], raws[3]]


def test_stored_messages_decode_the_same() -> None:
    contents = [
        HI,
        {"role": "model", "parts": [{"text": "a"}]},
        {"role": "model", "parts": [call("f"), call("f")]},
        {"role": "user", "parts": [result({"result": 1}), result({"result": 2})]},
    ]
    call_ = decode(contents=contents, systemInstruction={"parts": [{"text": "s"}]})
    stored = b"[" + b",".join(call_.history.raws) + b"]"
    said = [m for n in range(len(call_.history.raws)) for m in call_.history.decode(n)]
    assert decode_stored_messages("gemini", stored) == said
    # A context is stored without the turn before it.
    alone = decode_stored_messages("gemini", b"[" + call_.history.raws[-1] + b"]")
    assert [m.content for m in alone] == ["1", "2"]


@pytest.mark.parametrize(
    "spelling", ['{"parts":%s,"role":%s}', '{"role":%s,"parts":%s}', '{ "parts" : %s, "role": %s }']
)
def test_role_is_found_at_any_position(spelling: str) -> None:
    """Text that looks like a role does not confuse the scan."""
    misleading_parts = json.dumps([{"text": 'x","role":"user"}'}, {"text": ',"role":"model"}'}])
    for role, ours in (("model", "assistant"), ("user", "user")):
        pair = (
            (misleading_parts, json.dumps(role))
            if spelling.index("parts") < spelling.index("role")
            else (json.dumps(role), misleading_parts)
        )
        body = '{"contents":[' + spelling % pair + "]}"
        assert gemini.decode(WireRequest(body.encode())).history.decode(0)[0].role == ours


def test_turns_are_decoded_lazily() -> None:
    """Known turns are matched by their bytes, so a long history is not decoded again."""
    got = decode(contents=[{"parts": [{"unheardOf": {}}], "role": "user"}, {"parts": [], "role": "model"}, HI])
    assert len(got.history.raws) == 3 and got.history.decode(2) == (Message("user", "Hi"),)
    with pytest.raises(BadRequest):
        got.history.decode(0)


def test_long_history_decodes_quickly() -> None:
    turns = []
    for n in range(100):
        turns += [
            {"parts": [{"text": "x" * 300}, call("f", id=f"c{n}", args={"path": "/a/b"})], "role": "model"},
            {"parts": [result({"output": "line of code\n" * 130}, id=f"c{n}")], "role": "user"},
        ]
    body = json.dumps({"contents": [HI, *turns], "tools": TOOLS}, separators=(",", ":")).encode()
    best = float("inf")
    for _ in range(30):
        started = time.process_time()
        history = gemini.decode(WireRequest(body)).history
        best = min(best, time.process_time() - started)
    assert len(history.raws) == 201 and len(body) > 230_000
    assert best < scaled(0.001), f"{best * 1e3:.2f} ms"  # it takes 0.4 ms on an idle core


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ({"output": "text"}, "text"),
        ({"result": "text"}, "text"),
        ({"result": {"a": [1, "ü"]}}, '{"a": [1, "ü"]}'),
        ({"result": None}, "null"),
        ({"result": True}, "true"),
        ({"output": ""}, ""),
        ({"error": "no such file"}, "Error: no such file"),
        ({"error": "Error: no such file"}, "Error: no such file"),
        ({"error": {"code": 5}}, 'Error: {"code": 5}'),
        ({"output": "half", "error": "cancelled"}, "half\nError: cancelled"),
        ({"output": "whole", "error": None}, "whole"),
        ({"output": "x", "exit_code": 1}, '{"output": "x", "exit_code": 1}'),
        ({"output": 1, "result": 2}, '{"output": 1, "result": 2}'),
        ({"temperature": 21.5}, '{"temperature": 21.5}'),
        ({}, ""),
        (None, ""),
    ],
)
def test_function_response_forms(response: Json, expected: str) -> None:
    [got] = user(result(response, id="c1"))
    assert (got.role, got.content, got.tool_call_id, got.name) == ("tool", expected, "c1", "f")


def answered_call_ids(calls: list[Json], answers: list[Json]) -> list[str]:
    """Return the ids of the calls that the answers belong to."""
    said = messages(HI, {"role": "model", "parts": calls}, {"role": "user", "parts": answers})
    return [m.tool_call_id for m in said[2]]


def test_function_responses_match_their_calls() -> None:
    three = [call("f", id="a"), call("g", id="b"), call("f", id="c")]
    by_id = [result({}, "f", id="c"), result({}, "f", id="a"), result({}, "g", id="b")]
    assert answered_call_ids(three, by_id) == ["c", "a", "b"]
    # The Python SDK omits ids: match by name, in order.
    assert answered_call_ids(three, [result({}, "f"), result({}, "f"), result({}, "g")]) == ["a", "c", "b"]
    assert answered_call_ids(three, [result({}, "g"), result({}, "f"), result({}, "f", id="a")]) == ["b", "a", "c"]
    # Ids renamed consistently, or missing in the calls.
    assert answered_call_ids([call("f"), call("g")], [result({}, "g", id="x"), result({}, "f", id="y")]) == [
        "call_1",
        "call_0",
    ]
    # No matching call: the id stays as given.
    assert answered_call_ids([call("f", id="a")], [result({}, "h", id="z"), result({}, "h")]) == ["z", "h"]
    assert user(result({}, "h"))[0].tool_call_id == "h"


def test_call_ids_do_not_change_meaning() -> None:
    def digests(calls: list[Json], answers: list[Json]) -> list[bytes]:
        contents = [HI, {"role": "model", "parts": calls}, {"role": "user", "parts": answers}]
        reading = RequestMessages(decode(contents=contents).history, b"")
        return [reading.meaning(n) for n in range(3)]

    named = digests([call("f", id="a"), call("f", id="b")], [result({}, "f", id="a"), result({}, "f", id="b")])
    assert named == digests([call("f"), call("f")], [result({}, "f"), result({}, "f")])
    assert named == digests([call("f", id="a"), call("f", id="b")], [result({}, "f"), result({}, "f")])
    crossed = digests([call("f", id="a"), call("f", id="b")], [result({}, "f", id="b"), result({}, "f", id="a")])
    assert crossed[2] != named[2]


def to_snake_case(value: Json, *, data: bool = False) -> Json:
    """Convert field names to snake_case, but not inside the agent's own data."""
    match value:
        case dict() if not data:
            return {
                "".join(f"_{c.lower()}" if c.isupper() else c for c in name): to_snake_case(
                    part, data=name in ("args", "response", "parametersJsonSchema", "responseJsonSchema")
                )
                for name, part in value.items()
            }
        case list() if not data:
            return [to_snake_case(part) for part in value]
        case _:
            return value


def test_camel_case_and_snake_case_are_equal() -> None:
    body = {
        "contents": [
            HI,
            {"role": "model", "parts": [{**call("f", id="c", args={"some_key": 1}), "thoughtSignature": "c2ln"}]},
            {"role": "user", "parts": [result({"some_key": 2, "someKey": 3}, id="c")]},
        ],
        "systemInstruction": {"parts": [{"text": "s"}]},
        "tools": [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": {"my_key": {}, "myKey": {}}}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "VALIDATED", "allowedFunctionNames": ["f"]}},
        "generationConfig": {
            "maxOutputTokens": 5,
            "topP": 0.5,
            "stopSequences": ["x"],
            "responseMimeType": "application/json",
            "responseJsonSchema": {"my_key": 1},
            "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 0},
        },
    }
    camel_case, snake_case = decode(body), decode(to_snake_case(body))
    assert [camel_case.history.decode(n) for n in range(4)] == [snake_case.history.decode(n) for n in range(4)]
    assert (
        camel_case.tools is not None
        and snake_case.tools is not None
        and camel_case.tools.decode() == snake_case.tools.decode()
    )
    for name in ("sampling", "max_tokens", "stop", "constraint", "template_hints", "reply_options"):
        assert getattr(camel_case, name) == getattr(snake_case, name), name
    assert camel_case.max_tokens == 5 and camel_case.constraint == Constraint("json_schema", {"my_key": 1})
    assert (to_camel("x"), to_camel("a_b_c"), to_camel("$defs"), to_camel("_x"), to_camel("aB")) == (
        "x",
        "aBC",
        "$defs",
        "_x",
        "aB",
    )


# ── signatures ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_own_signature_carries_thought() -> None:
    for thought in ("plain", "Größe 汉字 👩‍👩‍👧", "?" * 50, "\x00\x01"):
        mark = encode_signature(thought)
        assert decode_signature(mark) == thought
        # The Python SDK re-encodes it in another base64 alphabet.
        assert decode_signature(base64.b64encode(base64.urlsafe_b64decode(mark)).decode()) == thought
        assert model({**call("f"), "thoughtSignature": mark}) == Message(
            "assistant", reasoning=thought, tool_calls=(ToolCall("call_0", "f", "{}"),)
        )


@pytest.mark.parametrize("mark", ["c2lnbmF0dXJl", "skip_thought_signature_validator", "", "é", "====", "dGcxLv8="])
def test_foreign_signature_is_kept_but_not_decoded(mark: str) -> None:
    assert decode_signature(mark) is None
    got = model({**call("f"), "thoughtSignature": mark})
    assert got.reasoning == "" and got.tool_calls[0].signature == mark and got.signature == ""
    assert model({"text": "x", "thoughtSignature": mark}) == Message("assistant", "x", signature=mark)
    assert model({"text": "x"}, {"thoughtSignature": mark}) == Message("assistant", "x", signature=mark)


def test_visible_thought_wins_over_signature() -> None:
    got = model({"text": "shown", "thought": True}, {**call("f"), "thoughtSignature": encode_signature("sealed")})
    assert got.reasoning == "shown"


# ── invalid contents ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ({"parts": [{"text": "a"}, {"inlineData": {"mimeType": "image/png", "data": ""}}]}, "parts[1].inlineData"),
        ({"parts": [{"inline_data": {}}]}, "parts[0].inlineData"),
        ({"parts": [{"fileData": {"fileUri": "x"}}]}, "parts[0].fileData"),
        ({"role": "model", "parts": [{"executableCode": {"code": "1"}}]}, "parts[0].executableCode"),
        ({"role": "model", "parts": [{"codeExecutionResult": {}}]}, "parts[0].codeExecutionResult"),
        ({"parts": [{"unheardOf": 1}]}, "parts[0].unheardOf"),
        ({"role": "user", "parts": [call("f")]}, "parts[0].functionCall"),
        ({"role": "model", "parts": [result({})]}, "parts[0].functionResponse"),
        ({"parts": [result({}, parts=[{"inlineData": {}}])]}, "parts[0].functionResponse.parts"),
        ({"parts": [{"functionResponse": {"name": "f", "response": "text"}}]}, "parts[0].functionResponse.response"),
        ({"role": "model", "parts": [call("f", args=[1])]}, "parts[0].functionCall.args"),
        ({"role": "model", "parts": [call("f", args="{}")]}, "parts[0].functionCall.args"),
        ({"parts": [{"text": 5}]}, "parts[0].text"),
        ({"parts": ["text"]}, "parts[0]"),
        ({"parts": "text"}, "parts"),
        ({"parts": []}, "parts"),
        ({}, "parts"),
        ({"role": "assistant", "parts": [{"text": "x"}]}, "role"),
        ({"role": "system", "parts": [{"text": "x"}]}, "role"),
        ({"role": 5, "parts": [{"text": "x"}]}, "role"),
    ],
)
def test_invalid_content_names_its_position(content: Json, param: str) -> None:
    assert decode_error(contents=[content]).param == f"contents[0].{param}"


def test_error_positions_refer_to_request() -> None:
    image = {"parts": [{"text": "x"}, {"inlineData": {}}]}
    assert (
        decode_error(contents=[HI, HI, {"role": "model", "parts": []}, HI, image]).param
        == "contents[4].parts[1].inlineData"
    )
    error = decode_error(systemInstruction={"parts": [{"text": "s"}, {"fileData": {}}]})
    assert error.param == "systemInstruction.parts[1].fileData"
    assert decode_error(contents=["Hi"]).param == "contents[0]" and decode_error(contents="Hi").param == "contents"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"contents": [' + b"[" * 5000])
def test_invalid_bodies(body: bytes) -> None:
    with pytest.raises(BadRequest):
        gemini.decode(WireRequest(body))


@pytest.mark.parametrize("body", [{}, {"contents": []}, {"contents": None}])
def test_missing_contents(body: Json) -> None:
    with pytest.raises(BadRequest, match="contents must not be empty"):
        decode(body)


def test_random_bodies_are_decoded_or_refused() -> None:
    """Random bodies are either decoded or refused."""
    draw = random.Random(7)
    names = [
        "contents",
        "parts",
        "role",
        "text",
        "functionCall",
        "functionResponse",
        "args",
        "name",
        "response",
        "tools",
    ]
    names += [
        "functionDeclarations",
        "parameters",
        "type",
        "properties",
        "generationConfig",
        "thinkingConfig",
        "toolConfig",
    ]
    names += ["topK", "stopSequences", "systemInstruction", "mode", "functionCallingConfig", "anyOf", "nullable"]

    def value(depth: int) -> Json:
        kind = draw.randrange(9 if depth < 6 else 6)
        if kind < 6:
            return draw.choice([None, True, -1, 1.5, "user", "model", "\ud83d", "", "ANY", 10**30])
        if kind == 6:
            return [value(depth + 1) for _ in range(draw.randrange(3))]
        return {draw.choice(names): value(depth + 1) for _ in range(draw.randrange(4))}

    for _ in range(5000):
        body = {"contents": draw.choice([[HI], value(1), [value(2)]]), **{n: value(1) for n in draw.sample(names, 4)}}
        try:
            got = decode(body)
            for n in range(len(got.history.raws)):
                assert got.history.decode(n)
            if got.tools is not None:
                got.tools.decode()
        except BadRequest:
            pass


# ── other request fields ────────────────────────────────────────────────────────────────────────────────────────────


def test_minimal_request() -> None:
    got = decode()
    assert (got.model, got.dialect, got.tools, got.sampling, got.max_tokens, got.stop) == (
        "m",
        "gemini",
        None,
        {},
        None,
        (),
    )
    assert (got.constraint, got.stream, got.retried, got.template_hints) == (None, False, False, {})
    assert got.body.startswith(b'{"contents"')


_UNSET = """maxOutputTokens temperature topP topK seed stopSequences candidateCount responseMimeType responseSchema
responseJsonSchema thinkingConfig responseLogprobs logprobs speechConfig imageConfig responseModalities"""
NULLS: Json = {
    "generationConfig": dict.fromkeys(_UNSET.split()),
    **dict.fromkeys(("systemInstruction", "tools", "toolConfig", "safetySettings", "cachedContent", "labels")),
}


def test_null_fields_equal_missing_fields() -> None:
    for got in (
        decode(**NULLS),
        decode(generationConfig=None),
        decode(generationConfig={}, tools=[], toolConfig={}),
    ):
        for field in Call.__struct_fields__:
            if field not in ("body", "history"):
                assert getattr(got, field) == getattr(decode(), field), field
        assert len(got.history.raws) == 1


def test_irrelevant_fields_are_ignored() -> None:
    got = decode(
        safetySettings=[{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
        labels={"a": "b"},
        store=True,
        serviceTier="flex",
        unheardOf={"deep": [1]},
        generationConfig={"mediaResolution": "LOW", "audioTimestamp": True, "unheardOf": 1},
    )
    assert got.sampling == {} and got.history.decode(0) == (Message("user", "Hi"),)


def test_sampling_parameters() -> None:
    config = {"temperature": 0, "topP": 0.5, "topK": 40.0, "seed": -3, "presencePenalty": -2, "frequencyPenalty": 2}
    assert decode(generationConfig=config).sampling == {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 40,
        "seed": -3,
        "presence_penalty": -2,
        "frequency_penalty": 2,
    }
    got = decode(generationConfig={"maxOutputTokens": "7", "stopSequences": ["x", "y"], "candidateCount": 1})
    assert got.max_tokens == 7 and got.stop == ("x", "y")


@pytest.mark.parametrize(
    ("config", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"topP": -1}, "topP"),
        ({"topK": 1.5}, "topK"),
        ({"top_k": "many"}, "topK"),
        ({"maxOutputTokens": 0}, "maxOutputTokens"),
        ({"stopSequences": [""]}, "stopSequences"),
        ({"stopSequences": "x"}, "stopSequences"),
        ({"stopSequences": list("abcdefghijklmnopq")}, "stopSequences"),
        ({"candidateCount": 2}, "candidateCount"),
        ({"responseLogprobs": True}, "responseLogprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"responseModalities": ["TEXT", "IMAGE"]}, "responseModalities"),
        ({"speechConfig": {}}, "speechConfig"),
        ({"imageConfig": {}}, "imageConfig"),
        ({"continuationToken": "x"}, "continuationToken"),
        ({"responseMimeType": "text/x.enum", "responseSchema": {"type": "STRING", "enum": ["a"]}}, "responseMimeType"),
        ({"responseSchema": {"type": "OBJECT"}}, "responseMimeType"),
        ({"thinkingConfig": {"thinkingBudget": "much"}}, "thinkingConfig.thinkingBudget"),
        ({"thinkingConfig": 5}, "thinkingConfig"),
    ],
)
def test_invalid_generation_config_names_its_field(config: Json, param: str) -> None:
    assert decode_error(generationConfig=config).param == f"generationConfig.{param}"


def test_other_unsupported_fields() -> None:
    assert decode_error(cachedContent="cachedContents/x").param == "cachedContent"
    assert decode_error(generationConfig=5).param == "generationConfig"
    assert decode_error(toolConfig=5).param == "toolConfig"


def test_thinking_config_becomes_template_hints() -> None:
    def hints(**thinking: Json) -> Json:
        return decode(generationConfig={"thinkingConfig": thinking}).template_hints

    assert hints(includeThoughts=True) == {} == hints(thinkingLevel="THINKING_LEVEL_UNSPECIFIED")
    assert hints(thinkingBudget=0) == {"enable_thinking": False, "thinking": False}
    assert hints(thinkingBudget=-1) == {"enable_thinking": True, "thinking": True}
    assert hints(thinkingBudget=512) == {"enable_thinking": True, "thinking": True, "thinking_budget": 512}
    assert hints(thinkingLevel="HIGH") == {"reasoning_effort": "high"}
    assert hints(thinkingLevel="MINIMAL") == {"reasoning_effort": "low"}


def test_count_request_forms() -> None:
    inner = {"model": "models/m", "contents": [HI], "systemInstruction": {"parts": [{"text": "s"}]}, "tools": TOOLS}
    for name in ("generateContentRequest", "generate_content_request"):
        got = decode({name: inner}, verb="count")
        assert len(got.history.raws) == 2 and got.tools is not None
    assert len(decode(verb="count").history.raws) == 1
    assert json.loads(gemini.encode_count(7)) == {
        "totalTokens": 7,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 7}],
    }


def test_api_key_headers_and_query() -> None:
    assert gemini.read_key({"x-goog-api-key": " abc "}, {}) == "abc"
    assert gemini.read_key({}, {"key": "abc", "alt": "sse"}) == "abc"
    assert gemini.read_key({"authorization": "Bearer abc"}, {}) == "abc"
    assert gemini.read_key({"x-goog-api-key": "a", "authorization": "Bearer b"}, {"key": "c"}) == "a"
    assert gemini.read_key({}, {}) == ""


def test_retry_and_client_headers() -> None:
    got = decode(headers={"x-turngate-attempt": "2", "x-goog-api-client": "sdk/1", "x-goog-api-key": "secret"})
    assert got.retried and not decode().retried
    assert got.forwarded_headers == {"x-goog-api-client": "sdk/1"}  # but never the key


# ── tools and constraints ───────────────────────────────────────────────────────────────────────────────────────────


def test_function_declarations_become_tools() -> None:
    got = decode(tools=[*TOOLS, {"functionDeclarations": {"name": "h", "parameters": {"type": "OBJECT"}}}])
    assert got.tools is not None
    f, g, h = got.tools.decode()
    assert f.wire == {
        "type": "function",
        "function": {"name": "f", "description": "Does f.", "parameters": {"type": "object"}},
    }
    assert g.wire["function"] == {"name": "g", "parameters": {"type": "object", "properties": {}}}
    assert h.wire["function"]["parameters"] == {"type": "object"}
    assert decode(tools=[]).tools is None
    returns = decode(tools=[{"functionDeclarations": [{"name": "f", "response": {"type": "STRING"}}]}])
    assert returns.tools is not None and returns.tools.decode()[0].wire["function"]["return"] == {"type": "string"}


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("f", "tools"),
        ([5], "tools[0]"),
        ([{"googleSearch": {}}], "tools[0].googleSearch"),
        ([*TOOLS, {"code_execution": {}}], "tools[1].codeExecution"),
        ([{"urlContext": {}}], "tools[0].urlContext"),
        ([{"functionDeclarations": [{"description": "x"}]}], "tools[0].functionDeclarations[0].name"),
        ([{"functionDeclarations": [F, F]}], "tools[0].functionDeclarations[1].name"),
        ([{"functionDeclarations": ["f"]}], "tools[0].functionDeclarations[0]"),
    ],
)
def test_invalid_tool_names_its_position(tools: Json, param: str) -> None:
    assert decode_error(tools=tools).param == param


def test_gemini_schemas_become_json_schemas() -> None:
    schema = {
        "type": "OBJECT",
        "description": "d",
        "properties": {
            "b": {"type": "STRING", "enum": ["x", "y"], "format": "enum"},
            "a": {"type": "ARRAY", "items": {"type": "INTEGER", "format": "int32"}, "minItems": "1", "max_items": "3"},
            "c": {"type": "STRING", "nullable": True},
            "type": {"type": "NUMBER", "minimum": 0, "nullable": False},
            "d": {"any_of": [{"type": "STRING"}, {"type": "BOOLEAN"}], "nullable": True},
            "e": {"type": "STRING", "enum": ["x"], "nullable": True},
            "f": {"type": "TYPE_UNSPECIFIED"},
        },
        "required": ["a"],
        "propertyOrdering": ["a", "b", "gone"],
    }
    got = to_json_schema(schema, "s")
    assert got == {
        "type": "object",
        "description": "d",
        "properties": {
            "a": {"type": "array", "items": {"type": "integer", "format": "int32"}, "minItems": 1, "maxItems": 3},
            "b": {"type": "string", "enum": ["x", "y"]},
            "c": {"type": ["string", "null"]},
            "type": {"type": "number", "minimum": 0},
            "d": {"anyOf": [{"type": "string"}, {"type": "boolean"}, {"type": "null"}]},
            "e": {"type": ["string", "null"], "enum": ["x", None]},
            "f": {},
        },
        "required": ["a"],
    }
    assert list(got["properties"]) == ["a", "b", "c", "type", "d", "e", "f"]
    # A JSON schema stays unchanged.
    plain = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": ["string", "null"]}}}
    assert to_json_schema({**plain, "additionalProperties": False}, "s") == {**plain, "additionalProperties": False}
    assert to_json_schema({"ref": "#/$defs/X", "defs": {"X": {"type": "STRING"}}}, "s") == {
        "$ref": "#/$defs/X",
        "$defs": {"X": {"type": "string"}},
    }


def calling(mode: str, *names: str, **fields: Json) -> Json:
    config: Json = {"mode": mode, **({"allowedFunctionNames": list(names)} if names else {})}
    return {"tools": TOOLS, "toolConfig": {"functionCallingConfig": config}, **fields}


def forced_names(got: Call) -> list[str]:
    assert got.constraint is not None and got.constraint.kind == "tools"
    return [item["properties"]["name"]["const"] for item in got.constraint.schema["items"]["anyOf"]]


def test_function_calling_modes() -> None:
    for mode in ("AUTO", "auto", "MODE_UNSPECIFIED", "VALIDATED"):
        got = decode(**calling(mode))
        assert got.constraint is None and got.tools is not None and len(got.tools.decode()) == 2
    assert decode(**calling("NONE")).tools is None
    assert forced_names(decode(**calling("ANY"))) == ["f", "g"]
    only = decode(**calling("ANY", "g"))
    assert (
        forced_names(only) == ["g"] and only.tools is not None and len(only.tools.decode()) == 2
    )  # both tools are still shown
    # A forced call leaves no text for the format to apply to.
    assert forced_names(decode(**calling("ANY", generationConfig={"responseMimeType": "application/json"}))) == [
        "f",
        "g",
    ]
    narrowed = decode(**calling("VALIDATED", "g"))
    assert narrowed.constraint is None and narrowed.tools is not None
    assert [t.name for t in narrowed.tools.decode()] == ["g"] and json.loads(narrowed.tools.raw)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (calling("SOMETIMES"), "mode"),
        (calling("AUTO", "f"), "allowedFunctionNames"),
        (calling("ANY", "h"), "allowedFunctionNames"),
        (calling("VALIDATED", "h"), "allowedFunctionNames"),
        ({**calling("VALIDATED", "f"), "tools": []}, "allowedFunctionNames"),
        ({**calling("ANY"), "tools": []}, "mode"),
    ],
)
def test_invalid_function_calling_config(fields: Json, param: str) -> None:
    assert decode_error(**fields).param == f"toolConfig.functionCallingConfig.{param}"


def test_response_formats() -> None:
    def shape(**config: Json) -> Constraint | None:
        return decode(generationConfig=config).constraint

    assert shape(responseMimeType="text/plain") is None
    assert shape(responseMimeType="application/json") == Constraint("json_object")
    gemini_schema = {"type": "OBJECT", "properties": {"n": {"type": "INTEGER"}}}
    plain = {"type": "object", "properties": {"n": {"type": "integer"}}}
    assert shape(responseMimeType="application/json", responseSchema=gemini_schema) == Constraint("json_schema", plain)
    assert shape(responseMimeType="application/json", responseJsonSchema=plain) == Constraint("json_schema", plain)


# ── replies ─────────────────────────────────────────────────────────────────────────────────────────────────────────

USAGE = Usage(10, 5, 4, 2)
THOUGHTS = {"thinkingConfig": {"includeThoughts": True}}


def encode_reply(message: Message, finish: Any = "stop", usage: Usage | None = USAGE, **fields: Json) -> Json:
    return json.loads(gemini.encode_reply(decode(**fields), Done(finish, message, usage, 1)))


def parts(message: Message, **fields: Json) -> Json:
    return encode_reply(message, **fields)["candidates"][0]["content"]["parts"]


def test_whole_reply() -> None:
    got, other = encode_reply(Message("assistant", "Hello.")), encode_reply(Message("assistant", "Hello."))
    assert len(got["responseId"]) >= 16 and got.pop("responseId") != other["responseId"]
    assert got == {
        "candidates": [
            {"content": {"parts": [{"text": "Hello."}], "role": "model"}, "index": 0, "finishReason": "STOP"}
        ],
        "usageMetadata": {
            "promptTokenCount": 10,
            "candidatesTokenCount": 3,
            "totalTokenCount": 15,
            "cachedContentTokenCount": 4,
            "thoughtsTokenCount": 2,
        },
        "modelVersion": "m",
    }
    assert set(encode_reply(Message("assistant"), usage=Usage(1, 2))["usageMetadata"]) == {
        "promptTokenCount",
        "candidatesTokenCount",
        "totalTokenCount",
    }
    assert "usageMetadata" not in encode_reply(Message("assistant"), usage=None)


@pytest.mark.parametrize(
    ("finish", "reason"), [("stop", "STOP"), ("tool_calls", "STOP"), ("length", "MAX_TOKENS"), ("abort", "OTHER")]
)
def test_finish_reasons(finish: str, reason: str) -> None:
    assert encode_reply(Message("assistant", "x"), finish)["candidates"][0]["finishReason"] == reason


def test_reply_parts() -> None:
    assert parts(Message("assistant")) == [{"text": ""}]
    c1, c2 = ToolCall("c1", "f", '{"a": 1}'), ToolCall("c2", "g", "")
    w1 = {"functionCall": {"id": "c1", "name": "f", "args": {"a": 1}}}
    w2 = {"functionCall": {"id": "c2", "name": "g", "args": {}}}
    assert parts(Message("assistant", tool_calls=(c1, c2))) == [w1, w2]
    thinking = Message("assistant", "x", "r", (c1, c2))
    signed = {**w1, "thoughtSignature": encode_signature("r")}
    assert parts(thinking) == [{"text": "x"}, signed, w2]
    assert parts(thinking, generationConfig=THOUGHTS) == [{"text": "r", "thought": True}, {"text": "x"}, signed, w2]


def test_provider_signatures_are_returned() -> None:
    by_provider = ToolCall("c1", "f", "{}", "c2ln")
    [got] = parts(Message("assistant", "", "r", (by_provider,)))
    assert got["thoughtSignature"] == "c2ln"
    assert parts(Message("assistant", "x", "r", signature="c2ln")) == [{"text": "x", "thoughtSignature": "c2ln"}]
    assert parts(Message("assistant", "", "r", signature="c2ln")) == [{"text": "", "thoughtSignature": "c2ln"}]


@pytest.mark.parametrize(
    "arguments",
    [
        "[1, 2]",
        '"text"',
        "null",
        "5",
        "not json",
        '{"a": ',
        '{"a": NaN}',
        '{"a": "\\ud800"}',
        "[" * 300 + "]" * 300,
        '{"a": ' + "[" * 300 + "]" * 300 + "}",
        "\n",
    ],
)
def test_non_object_arguments_round_trip(arguments: str) -> None:
    [got] = parts(Message("assistant", tool_calls=(ToolCall("c1", "f", arguments),)))
    assert got["functionCall"]["args"] == {RAW_ARGUMENTS: arguments}
    assert model(got).tool_calls == (ToolCall("c1", "f", arguments),)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": 1}',
        '{\n  "a": [1,\r\n 2]\n}',
        '{"a":1.0,"b":1e3,"n":123456789012345678901234567890}',
        '{"é": "\\u00e9\\n"}',
    ],
)
def test_arguments_are_sent_as_sampled(arguments: str) -> None:
    sampled = ToolCall("c1", "f", arguments)
    data = gemini.encode_reply(decode(), Done("tool_calls", Message("assistant", tool_calls=(sampled,)), None))
    assert b"\n" not in data and arguments.replace("\n", " ").replace("\r", " ").encode() in data
    [returned] = model(json.loads(data)["candidates"][0]["content"]["parts"][0]).tool_calls
    assert meaning_digest((Message("assistant", tool_calls=(returned,)),), {}) == meaning_digest(
        (Message("assistant", tool_calls=(sampled,)),), {}
    )


def encode_stream(*events: Any, sse: bool = True, **fields: Json) -> Json:
    encoder = gemini.open_stream(decode(verb="stream", query={"alt": "sse"} if sse else {}, **fields))
    data = (encoder.begin() + b"".join(encoder.event(event) for event in events)).decode()
    if not sse:
        assert encoder.media == "application/json; charset=UTF-8"
        return json.loads(data)
    assert encoder.media == "text/event-stream"
    *events_, rest = data.split("\r\n\r\n")
    assert rest == "" and all("\n" not in e.lstrip("\n") and e.lstrip("\n").startswith("data: ") for e in events_)
    return [json.loads(e.lstrip("\n").removeprefix("data: ")) for e in events_]


C1, C2 = ToolCall("c1", "f", '{"a": "line\\n"}'), ToolCall("c2", "g", "{\n}")
MESSAGE = Message("assistant", "Hi\n\nyou", "some thought", (C1, C2))
EVENTS = (
    Delta("reasoning", "some "),
    KeepAlive(),
    Delta("reasoning", "thought"),
    Delta("content", "Hi\n\n"),
    Delta("content", "you"),
    KeepAlive(),
    CallDelta(0, C1),
    CallDelta(1, C2),
    Done("tool_calls", MESSAGE, USAGE, 1),
)


@pytest.mark.parametrize("sse", [True, False])
def test_streamed_reply(sse: bool) -> None:
    chunks = encode_stream(*EVENTS, sse=sse, generationConfig=THOUGHTS)
    parts_ = [c["candidates"][0]["content"]["parts"] for c in chunks]
    assert parts_ == [
        [{"text": "some ", "thought": True}],
        [{"text": "thought", "thought": True}],
        [{"text": "Hi\n\n"}],
        [{"text": "you"}],
        [
            {
                "functionCall": {"id": "c1", "name": "f", "args": {"a": "line\n"}},
                "thoughtSignature": encode_signature("some thought"),
            }
        ],
        [{"functionCall": {"id": "c2", "name": "g", "args": {}}}],
        [{"text": ""}],
    ]
    assert {(c["responseId"], c["modelVersion"]) for c in chunks} == {(chunks[0]["responseId"], "m")}
    assert ["finishReason" in c["candidates"][0] for c in chunks] == [False] * 6 + [True]
    assert ["usageMetadata" in c for c in chunks] == [False] * 6 + [True]
    assert all(c["candidates"][0]["content"]["role"] == "model" for c in chunks)


def test_thoughts_are_hidden_by_default() -> None:
    chunks = encode_stream(*EVENTS)
    assert not any(p.get("thought") for c in chunks for p in c["candidates"][0]["content"]["parts"])
    encoder = gemini.open_stream(decode(verb="stream", query={"alt": "sse"}))
    assert encoder.event(Delta("reasoning", "x")) == b"" and encoder.begin() == b""


@pytest.mark.parametrize("thoughts", [True, False])
@pytest.mark.parametrize("sse", [True, False])
def test_streamed_reply_equals_whole_reply(sse: bool, thoughts: bool) -> None:
    fields: Json = {"generationConfig": THOUGHTS} if thoughts else {}
    streamed_parts = [
        p for c in encode_stream(*EVENTS, sse=sse, **fields) for p in c["candidates"][0]["content"]["parts"]
    ]
    assert model(*streamed_parts) == model(*parts(MESSAGE, **fields))
    assert model(*streamed_parts).reasoning == "some thought"  # if hidden, it is in the signature


def test_provider_signatures_in_stream() -> None:
    done = Done("tool_calls", Message("assistant"), None)
    chunks = encode_stream(Delta("reasoning", "r"), CallDelta(0, ToolCall("c1", "f", "{}", "c2ln")), done)
    assert chunks[0]["candidates"][0]["content"]["parts"][0]["thoughtSignature"] == "c2ln"
    chunks = encode_stream(
        Delta("reasoning", "r"), Delta("signature", "c2ln"), CallDelta(0, ToolCall("c1", "f", "{}")), done
    )
    first, second, _ = (c["candidates"][0]["content"]["parts"][0] for c in chunks)
    assert first == {"text": "", "thoughtSignature": "c2ln"} and "thoughtSignature" not in second


def test_keep_alives_are_white_space() -> None:
    """The Python SDK fails on SSE comments and drops replies with a chunk without parts."""
    for query in ({"alt": "sse"}, {}):
        encoder = gemini.open_stream(decode(verb="stream", query=query))
        assert encoder.event(KeepAlive()).strip() == b"" != encoder.event(KeepAlive())
    silent = encode_stream(KeepAlive(), KeepAlive(), Done("stop", Message("assistant"), None), sse=False)
    assert len(silent) == 1


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (BadRequest("x", param="n"), 400, "INVALID_ARGUMENT"),
        (ContextOverflow("x"), 400, "INVALID_ARGUMENT"),
        (Unauthorized("x"), 400, "INVALID_ARGUMENT"),
        (NotFound("x"), 404, "NOT_FOUND"),
        (Conflict("x"), 400, "FAILED_PRECONDITION"),
        (TooLarge("x"), 400, "INVALID_ARGUMENT"),
        (Unprocessable("x"), 400, "INVALID_ARGUMENT"),
        (EngineRejected("x"), 400, "INVALID_ARGUMENT"),
        (EngineBusy("x"), 429, "RESOURCE_EXHAUSTED"),
        (EngineError("x"), 500, "INTERNAL"),
        (TurngateError("x"), 500, "INTERNAL"),
        (EngineUnavailable("x"), 503, "UNAVAILABLE"),
        (Stopping("x"), 503, "UNAVAILABLE"),
        (StoreError("x"), 503, "UNAVAILABLE"),
        (EngineTimeout("x"), 504, "DEADLINE_EXCEEDED"),
    ],
)
def test_error_bodies_and_statuses(error: TurngateError, code: int, status: str) -> None:
    body = json.loads(gemini.encode_error(error))
    assert (body["error"]["code"], body["error"]["status"], gemini.error_status(error)) == (code, status, code)
    if not isinstance(error, ContextOverflow):
        assert "x" in body["error"]["message"]
    assert not gemini.sends_in_stream(error)
    # In an SSE stream it is a bare object, as the SDKs expect.
    in_stream = gemini.open_stream(decode(verb="stream", query={"alt": "sse"})).error(error)
    assert in_stream.startswith(b'{"error":') and in_stream.endswith(b"}\n\n") and json.loads(in_stream) == body
    listed = gemini.open_stream(decode(verb="stream"))
    assert json.loads(listed.begin() + listed.error(error)) == [body]
    listed = gemini.open_stream(decode(verb="stream"))
    data = listed.begin() + listed.event(Delta("content", "x")) + listed.event(KeepAlive()) + listed.error(error)
    assert json.loads(data)[1] == body


def details(error: TurngateError) -> Json:
    return json.loads(gemini.encode_error(error))["error"].get("details")


def test_error_details() -> None:
    [violation] = details(BadRequest("x: is wrong", param="generationConfig.x"))
    assert violation == {
        "@type": "type.googleapis.com/google.rpc.BadRequest",
        "fieldViolations": [{"field": "generationConfig.x", "description": "x: is wrong"}],
    }
    assert details(Unauthorized("x"))[0]["reason"] == "API_KEY_INVALID"
    assert (
        "API key not valid. Please pass a valid API key."
        in json.loads(gemini.encode_error(Unauthorized("x")))["error"]["message"]
    )
    assert details(EngineBusy("x"))[0]["retryDelay"] == details(Stopping("x"))[0]["retryDelay"] == "1s"
    for error in (StoreError("x"), Conflict("x"), NotFound("x", param="model"), BadRequest("x"), EngineTimeout("x")):
        assert details(error) is None


def test_context_overflow_message() -> None:
    def message(**sizes: int) -> Json:
        return json.loads(gemini.encode_error(ContextOverflow("x", param="messages", **sizes)))["error"]["message"]

    assert message(limit=8192, size=9000) == (
        "The input token count (9000) exceeds the maximum number of tokens allowed (8192)."
    )
    assert message() == "The input token count exceeds the maximum number of tokens allowed."
    assert details(ContextOverflow("x", param="messages")) is None


def test_list_models() -> None:
    got = json.loads(gemini.encode_models(["a", "b"], 5))["models"]
    assert [m["name"] for m in got] == ["models/a", "models/b"]
    assert got[0] == json.loads(gemini.encode_model("a", 5))
    assert set(got[0]["supportedGenerationMethods"]) == {"generateContent", "countTokens"}


def test_routes_of_every_version() -> None:
    found = {route.path: route.verb for route in gemini.routes}
    for version in ("v1beta", "v1", "v1alpha"):
        assert found[f"/{version}/models/{{model}}:generateContent"] == "generate"
        assert found[f"/{version}/models/{{model}}:streamGenerateContent"] == "stream"
        assert found[f"/{version}/models/{{model}}:countTokens"] == "count"
    assert decode(verb="stream").stream and not decode().stream
