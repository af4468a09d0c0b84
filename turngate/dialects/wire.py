"""Helpers shared by the dialects: decode and validate fields, and describe invalid ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from turngate.errors import BadRequest
from turngate.types import Constraint, Json, Sampling, Tool

# The default of raw fields: an absent field is treated like null.
ABSENT = msgspec.Raw(b"null")
# The exceptions that a decoder may raise: for a wrong type or syntax, for invalid UTF-8, and for excessive nesting.
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_MAX_DEPTH = 200  # nesting levels; JSON encoders fail at 254


_SHORT_BODY = 4_000  # bytes; a regex search is faster for bodies shorter than this
_SURROGATE_START = re.compile(rb"\\u[dD]")
_ESCAPE = int.from_bytes(b"\\u", "little")
_HIGH, _LOW = rb"[89abAB][0-9a-fA-F]{2}", rb"[c-fC-F][0-9a-fA-F]{2}"
_LONE_SURROGATE = re.compile(
    rb"\\u[dD](?:%b(?!\\u[dD]%b)|%b(?<!\\u[dD]%b\\u[dD]%b))" % (_HIGH, _LOW, _LOW, _HIGH, _LOW)
)
_BACKSLASH = b"\xff\xfe"  # replaces an escaped backslash; not UTF-8


def without_lone_surrogates(body: bytes) -> bytes:
    """Replace lone surrogates in JSON with U+FFFD. A JavaScript program sends one when it cuts a string in the middle of a character."""
    if not _has_surrogates(body) or _BACKSLASH in body:  # a body with `_BACKSLASH` is not UTF-8
        return body
    # Hide escaped backslashes, so that every remaining backslash starts an escape. A pattern that also matched escaped backslashes and
    # surrogate pairs would need a replacement function, which would be called thousands of times for a long text.
    escapes = body.replace(rb"\\", _BACKSLASH)
    return _LONE_SURROGATE.sub(rb"\\ufffd", escapes).replace(_BACKSLASH, rb"\\")


def _has_surrogates(body: bytes) -> bool:
    r"""Return whether the body contains `\ud` or `\uD`. Every escaped surrogate starts with one of these.

    A long body is searched two bytes at a time with NumPy, which is far faster than a regex.
    """
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
    """Describe a decoding error. If the field is known, its name comes first: "max_tokens: Expected `int | null`, got `str`"."""
    if isinstance(error, RecursionError):
        return f"nested too deeply; use fewer than {_MAX_DEPTH} levels"
    text = str(error)
    found = re.search(r" - at `\$?\.?(.*)`$", text)
    return f"{found[1]}: {text[: found.start()]}" if found else text


def error_field(error: msgspec.DecodeError) -> str | None:
    found = re.search(r" - at `\$?\.?([^`]*)`$", str(error)) or re.search(r"required field `(\w+)`", str(error))
    return found[1] if found else None


def body_error(error: Exception, subject: str = "The body") -> BadRequest:
    """Build the error for a body that is not a JSON object, has a missing or invalid field, or is nested too deeply."""
    problem = describe_error(error)
    if isinstance(error, RecursionError):
        return BadRequest(f"{subject} is {problem}")
    if not isinstance(error, msgspec.ValidationError):
        return BadRequest(f"{subject} is not valid JSON: {problem}")
    field = error_field(error)
    return BadRequest(problem if field else f"{subject} must be a JSON object: {problem}", param=field)


def field_error(field: str, problem: str) -> BadRequest:
    """Build the error for an invalid field. The message is the field's name followed by `problem`, such as "n must be 1"."""
    return BadRequest(f"{field} {problem}", param=field)


def decode_text(raw: bytes, field: str) -> str:
    """Decode raw JSON as UTF-8, or raise BadRequest. msgspec does not check the encoding of values that it keeps raw."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise field_error(field, f"is not valid UTF-8: {error}") from None


def decode_arguments(raw: bytes, field: str) -> str:
    """Return the arguments of a call as JSON text, which is `{}` for empty or null arguments.

    Clients send the arguments either as a string of JSON text or as a JSON value.
    """
    if not raw.startswith(b'"'):
        text = decode_text(raw, field)
    else:
        try:
            text = msgspec.json.decode(raw, type=str)
        except DECODE_ERRORS as error:
            raise field_error(field, f"is not a valid string: {error}") from None
    return "{}" if text in ("", "null") else text


def require_shallow(value: Json, field: str) -> Json:
    """Return the value, or raise BadRequest if it has more than `_MAX_DEPTH` nesting levels."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [child for children in inner for child in children]
        if not level:
            return value
    raise field_error(field, f"is nested too deeply; use fewer than {_MAX_DEPTH} levels")


def one_line(json: str) -> str:
    """Replace line breaks in JSON with spaces, because a stream event must be on one line. JSON strings never contain raw line breaks."""
    return json.translate(_ONE_LINE)


_ONE_LINE = str.maketrans("\r\n", "  ")


def bearer_token(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def is_retry(headers: Mapping[str, str]) -> bool:
    """Return whether the client is retrying a call, according to the headers that the providers' SDKs and the sandbox relay send."""
    return headers.get("x-stainless-retry-count", "0") not in ("", "0") or headers.get(
        "x-turngate-attempt", "1"
    ) not in ("", "1")


def call_fields_from_headers(headers: Mapping[str, str], forwarded: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a `Call` that are derived from request headers.

    `forwarded` contains the names of the headers to forward to a provider of the same dialect.
    """
    return {
        "retried": is_retry(headers),
        "idempotency_key": headers.get("idempotency-key", ""),
        "forwarded_headers": {name: value for name in forwarded if (value := headers.get(name))},
    }


def validate_sampling(values: dict[str, Any], names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the sampling values, or raise BadRequest if one is invalid.

    `names` maps each field of `Sampling` whose name differs in the dialect to the dialect's name for it.
    """
    if values.get("top_k") == -1:
        values = {**values, "top_k": 0}  # both -1 and 0 disable top_k
    try:
        msgspec.convert(values, Sampling)
    except msgspec.ValidationError as error:
        field = error_field(error) or ""
        wire_name = (names or {}).get(field, field)
        raise BadRequest(describe_error(error).replace(field, wire_name, 1), param=wire_name) from None
    return values


def validate_stops(field: str, stop: str | Sequence[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if any(not s for s in stops):
        raise field_error(field, "must not contain an empty string, which would stop generation immediately")
    if len(stops) > 16:
        raise field_error(field, f"must contain at most 16 strings, not {len(stops)}")
    return stops


def placeholder(kind: str, data: bytes) -> str:
    """Return the text that replaces an image or other non-text content. It contains a hash of `data`."""
    return f"[{kind} {blake2b(data, digest_size=8).hexdigest()}]"


def function_tool(name: str, description: str | None, parameters: Json) -> Tool:
    """Build a tool in the form that chat templates expect."""
    function: dict[str, Json] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters if parameters is not None else {"type": "object", "properties": {}}
    return Tool(name, {"type": "function", "function": function})


def require_any_tool(tools: Sequence[Tool], *, parallel: bool) -> Constraint:
    """Build the constraint that the reply must consist of calls to these tools: exactly one call, or at least one if `parallel` is set."""
    calls = [_build_call_schema(tool) for tool in tools]
    most = {} if parallel else {"maxItems": 1}
    return Constraint("tools", {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}})


def require_tool(tools: Sequence[Tool], name: str, field: str) -> Constraint:
    """Build the constraint that the reply must be a call to the named tool.

    If there is no such tool, raise `BadRequest`, which names `field` as the invalid request field.
    """
    tool = next((t for t in tools if t.name == name), None)
    if tool is None:
        raise field_error(field, f"refers to {name!r}, which is not one of the tools")
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
