"""Random requests for the operations of the OpenAPI document: valid ones, nearly valid ones, and nonsense."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from hypothesis import strategies as st

from tests.fuzz.json_values import VALUES, bodies, damaged, of_schema
from tests.golden import recording

Json = Any
GOLDEN = Path(__file__).parents[1] / "golden"
MSGPACK = "application/msgpack"
_WEIRD = ("x", "a/b", "..", "%", "é", "\0", "0", "-1", "x" * 300, "tg-", "tgp-00000000", "\udcff", " ")
# Names that the world replaces with those of things that exist.
_KNOWN = {
    "id": ("$open", "$open", "$open", "$sealed"),
    "name": ("$feed", "$project", "$tool", "index.html"),
    "prefix": ("$prefix",),
    "group": ("$group", "a/b"),
    "response_id": ("$response", "resp_x"),
    "model": ("m", "models/m"),
    "call": ("1", "999999999999999999", "99999999999999999999"),
}
_HEADERS = st.dictionaries(
    st.sampled_from(
        [
            "last-event-id",
            "idempotency-key",
            "content-encoding",
            "content-type",
            "traceparent",
            "x-turngate-project",
            "anthropic-version",
            "anthropic-beta",
            "accept",
            "x-stainless-retry-count",
            "origin",
            "cookie",
        ]
    ),
    st.sampled_from(["", "1", "12.7", "gzip", "deflate", "br", "text/html", "default", "$project", "é", "x" * 3000]),
    max_size=2,
)
_QUERY_TEXTS = st.sampled_from(
    ["", "0", "1", "-1", "true", "x", "1e9", "nan", "٣", "9" * 18, "9" * 30, "\0", "é", "a" * 500]
)


class FuzzRequest(msgspec.Struct, frozen=True):
    """One request. Words that start with `$` stand for the names and keys of things that exist in the world."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...]
    headers: tuple[tuple[str, str], ...]
    body: bytes
    operation: str  # its path in the document


def list_operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


@st.composite
def requests(draw: Callable[..., Any], document: Json, method: str, path: str) -> FuzzRequest:
    operation = document["paths"][path][method.lower()]
    address, query, headers = path, [], dict(draw(_HEADERS))
    for parameter in operation["parameters"]:
        name, place = parameter["name"], parameter["in"]
        if place == "path":
            text = draw(st.sampled_from([*_KNOWN.get(name, ("x",)) * 10, *_WEIRD]))
            quoted = text if text.startswith("$") else quote(text.encode("utf-8", "surrogateescape"), safe="")
            address = address.replace(f"{{{name}}}", quoted)
        elif place == "query" and (parameter["required"] or draw(st.booleans())):
            values = of_schema(parameter["schema"], document["components"]["schemas"])
            query.append((name, draw(values.map(_to_text) | _QUERY_TEXTS)))
        elif place == "header" and draw(st.integers(0, 9)):
            headers[name] = "1"
    headers |= draw(_keys(operation["security"]))
    body = draw(_body(document, operation, path)) if "requestBody" in operation else b""
    return FuzzRequest(method, address, tuple(query), tuple(headers.items()), body, path)


def _to_text(value: Json) -> str:
    if isinstance(value, list):
        return str(value[0]) if value else ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _keys(security: Json) -> st.SearchStrategy[dict[str, str]]:
    """Return headers with a right key most of the time."""
    right = []
    for alternative in security:
        for scheme in alternative:
            match scheme:
                case "adminKey":
                    right.append({"authorization": "Bearer $admin"})
                case "sessionSecret":
                    right.append({"authorization": "Bearer $secret"})
                case "messagesSecret":
                    right.append({"x-api-key": "$secret"})
                case "geminiSecret":
                    right.append({"x-goog-api-key": "$secret"})
                case "pageLogin":
                    right.append({"cookie": "turngate_page=$login"})
    wrong = [{}, {"authorization": "Bearer "}, {"authorization": "é"}, {"authorization": "Bearer tg-0000" + "x" * 43}]
    return st.sampled_from([*(right or [{}]) * 20, *wrong])


def _body(document: Json, operation: Json, path: str) -> st.SearchStrategy[bytes]:
    ((media, content),) = operation["requestBody"]["content"].items()
    values = of_schema(content["schema"], document["components"]["schemas"])
    if media == MSGPACK:
        return damaged(values, most=2).map(_to_msgpack) | st.binary(max_size=20)
    calls = read_calls(operation["tags"][0])
    if calls and operation["summary"].startswith(("Call the model", "Count")):
        return bodies(damaged(st.sampled_from(calls)) | damaged(values))
    return bodies(damaged(values) | VALUES)


def _to_msgpack(value: Json) -> bytes:
    """Encode a value as msgpack. Texts in binary fields become bytes."""
    if isinstance(value, dict):
        value = {
            name: one.encode("utf-8", "replace") * 4 if name in ("ids", "logprobs") and isinstance(one, str) else one
            for name, one in value.items()
        }
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, RecursionError, ValueError):
        return b"\xc1"


@cache
def read_calls(dialect: str) -> list[Json]:
    """Return bodies of model calls in a dialect: small ones, and those that real agents sent."""
    small = _SMALL.get(dialect, [])
    return [
        *small[:1] * 4,
        *small,
        *_read_golden().get(dialect, ()),
    ]  # the first one more often, since it mostly succeeds


@cache
def _read_golden() -> dict[str, list[Json]]:
    """Return the recorded requests of agents, shortened: long texts tell the decoders nothing new."""
    calls: dict[str, list[Json]] = {}
    for file in sorted(GOLDEN.glob("*.json")):
        record = recording.read(file.stem)
        exchanges = [one["request"]["body"] for one in record["exchanges"] if one["request"]["body"]]
        calls.setdefault(record["dialect"], []).extend(map(_shorten, exchanges[1:3]))
    return calls


def _shorten(value: Json) -> Json:
    if isinstance(value, str):
        return value[:80]
    if isinstance(value, list):
        return [_shorten(one) for one in value[:6]]
    return {name: _shorten(one) for name, one in value.items()} if isinstance(value, dict) else value


_SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
_FUNCTION = {"name": "read", "description": "Read a file.", "parameters": _SCHEMA}
_CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
_SMALL: dict[str, list[Json]] = {
    "chat": [
        {"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
        {
            "model": "m",
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.5,
            "stop": ["x"],
            "max_tokens": 5,
            "tools": [{"type": "function", "function": _FUNCTION}],
            "tool_choice": "required",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "found"},
            ],
        },
        {
            "model": "m",
            "messages": [{"role": "user", "content": "Hi"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}},
            "logprobs": True,
            "top_logprobs": 2,
            "reasoning_effort": "low",
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ],
    "responses": [
        {"model": "m", "input": "Hi"},
        {
            "model": "m",
            "stream": True,
            "store": True,
            "previous_response_id": "$response",
            "instructions": "Be brief.",
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": {"type": "json_schema", "name": "x", "schema": _SCHEMA}},
            "tools": [{"type": "function", **_FUNCTION}, {"type": "custom", "name": "sh"}],
            "tool_choice": {"type": "function", "name": "read"},
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"path": "a"}'},
                {"type": "function_call_output", "call_id": "c1", "output": "found"},
                {"type": "reasoning", "summary": [], "encrypted_content": "x"},
            ],
        },
    ],
    "messages": [
        {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]},
        {
            "model": "m",
            "max_tokens": 5,
            "stream": True,
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "tools": [{"name": "read", "description": "Read.", "input_schema": _SCHEMA}],
            "tool_choice": {"type": "tool", "name": "read"},
            "stop_sequences": ["x"],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "x"},
                        {"type": "tool_use", "id": "c1", "name": "read", "input": {"path": "a"}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "found"}]},
            ],
        },
    ],
    "gemini": [
        {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]},
        {
            "systemInstruction": {"parts": [{"text": "Be brief."}]},
            "tools": [{"functionDeclarations": [_FUNCTION]}],
            "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["read"]}},
            "generationConfig": {
                "temperature": 0.5,
                "maxOutputTokens": 5,
                "stopSequences": ["x"],
                "responseMimeType": "application/json",
                "responseSchema": {"type": "OBJECT", "properties": {"path": {"type": "STRING"}}},
                "thinkingConfig": {"includeThoughts": True},
            },
            "contents": [
                {"role": "user", "parts": [{"text": "Hi"}]},
                {"role": "model", "parts": [{"functionCall": {"name": "read", "args": {"path": "a"}}}]},
                {"role": "user", "parts": [{"functionResponse": {"name": "read", "response": {"output": "found"}}}]},
            ],
        },
    ],
}
