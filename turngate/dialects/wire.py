"""Decode and validate the wire JSON of model calls, for all dialects, and explain what is wrong with a field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from turngate.errors import BadRequest
from turngate.types import Constraint, Json, Sampling, Tool

# An absent raw field reads like one that is null.
ABSENT = msgspec.Raw(b"null")
# What decoding raises: wrong types or syntax, invalid UTF-8, too deep nesting.
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_MAX_DEPTH = 200  # levels of a schema; encoders fail at 254


_SHORT_BODY = 4_000  # bytes; below it, a plain search is faster
_SURROGATE_START = re.compile(rb"\\u[dD]")
_ESCAPE = int.from_bytes(b"\\u", "little")
_SURROGATES = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)


def without_lone_surrogates(body: bytes) -> bytes:
    """Replace lone surrogates in JSON by the replacement character. JavaScript programs may cut a string inside a character."""
    if not _has_surrogates(body):
        return body
    return _SURROGATES.sub(lambda found: b"\\ufffd" if len(found[0]) == 6 else found[0], body)


def _has_surrogates(body: bytes) -> bool:
    r"""Whether the body holds `\ud`, in either case. A long body is searched two bytes at a time, far faster than Python's own search."""
    if len(body) < _SHORT_BODY:
        return _SURROGATE_START.search(body) is not None
    for start in (0, 1):
        if len(body) < start + 2:
            return False
        pairs = np.frombuffer(body, "<u2", (len(body) - start) // 2, start)
        marks = (pairs == _ESCAPE).tobytes()
        at = marks.find(1)
        while at >= 0:
            after = start + 2 * at + 2
            if body[after : after + 1] in (b"d", b"D"):
                return True
            at = marks.find(1, at + 1)
    return False


def is_given(raw: msgspec.Raw) -> bool:
    return bytes(raw) != b"null"


def describe_error(error: Exception) -> str:
    """msgspec's message with the field's name first: `max_tokens: Expected `int | null`, got `str``."""
    text = str(error)
    found = re.search(r" - at `\$?\.?(.*)`$", text)
    return f"{found[1]}: {text[: found.start()]}" if found else text


def error_field(error: msgspec.DecodeError) -> str | None:
    found = re.search(r" - at `\$?\.?([^`]*)`$", str(error)) or re.search(r"required field `(\w+)`", str(error))
    return found[1] if found else None


def field_error(field: str, why: str) -> BadRequest:
    return BadRequest(f"{field}: {why}", param=field)


def require_shallow(value: Json, field: str) -> Json:
    """Return the value, or raise if it is nested too deeply for the code that later reads and writes it."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [child for children in inner for child in children]
        if not level:
            return value
    raise field_error(field, f"is nested more than {_MAX_DEPTH} deep")


def one_line(json: str) -> str:
    """Put JSON on one line, for an event of a stream. Line breaks are never part of a JSON string."""
    return json.translate(_ONE_LINE)


_ONE_LINE = str.maketrans("\r\n", "  ")


def bearer_token(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def is_retry(headers: Mapping[str, str]) -> bool:
    """Whether the client repeats a call, according to the header of the providers' SDKs or of our relay."""
    return headers.get("x-stainless-retry-count", "0") not in ("", "0") or headers.get(
        "x-turngate-attempt", "1"
    ) not in ("", "1")


def call_fields_from_headers(headers: Mapping[str, str], forwarded: Sequence[str]) -> dict[str, Any]:
    """Build the fields of a call that come from its headers. `forwarded`: the headers that a provider of the same dialect receives."""
    return {
        "retried": is_retry(headers),
        "idempotency_key": headers.get("idempotency-key", ""),
        "forwarded_headers": {name: value for name in forwarded if (value := headers.get(name))},
    }


def validate_sampling(found: dict[str, Any], names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Check that `Sampling` fields are in range. `names`: the dialect's names for them, where they differ."""
    if found.get("top_k") == -1:
        found = {**found, "top_k": 0}  # another way to turn it off
    try:
        msgspec.convert(found, Sampling)
    except msgspec.ValidationError as error:
        field = error_field(error) or ""
        called = (names or {}).get(field, field)
        raise BadRequest(describe_error(error).replace(field, called, 1), param=called) from None
    return found


def validate_stops(field: str, stop: str | Sequence[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if any(not s for s in stops):
        raise field_error(field, "an empty string would stop at once; leave it out")
    if len(stops) > 16:
        raise field_error(field, f"{len(stops)} strings are too many; give at most 16")
    return stops


def placeholder(kind: str, data: bytes) -> str:
    """Text that stands for something that is not text. It differs for different data."""
    return f"[{kind} {blake2b(data, digest_size=8).hexdigest()}]"


def function_tool(name: str, description: str | None, parameters: Json) -> Tool:
    """Build a tool in the form that chat templates expect."""
    function: dict[str, Json] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters if parameters is not None else {"type": "object", "properties": {}}
    return Tool(name, {"type": "function", "function": function})


def require_any_tool(tools: Sequence[Tool], *, parallel: bool) -> Constraint:
    """Require the reply to be one or more calls of these tools."""
    calls = [_build_call_schema(tool) for tool in tools]
    most = {} if parallel else {"maxItems": 1}
    return Constraint("tools", {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}})


def require_tool(tools: Sequence[Tool], name: str, field: str) -> Constraint:
    """Require the reply to be a call of this tool."""
    tool = next((t for t in tools if t.name == name), None)
    if tool is None:
        raise field_error(field, f"{name!r} is not among the tools")
    return Constraint("tool", _parameters(tool), name)


def _parameters(tool: Tool) -> Json:
    return tool.wire["function"].get("parameters") or {"type": "object"}


def _build_call_schema(tool: Tool) -> Json:
    properties = {"name": {"const": tool.name}, "arguments": _parameters(tool)}
    return {
        "type": "object",
        "properties": properties,
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
