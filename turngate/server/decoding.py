"""Decode a request's body and query into typed objects. Errors name the invalid field."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request

from turngate.common.validation import explain_error
from turngate.errors import BadRequest, TooLarge, TurngateError

T = TypeVar("T")
MSGPACK = "application/msgpack"
MAX_BODY = 1_000_000
MAX_MSGPACK_BODY = 32_000_000  # enough for four million tokens
MAX_DEPTH = 200  # maximum nesting of lists and objects in a body
_MAX_DIGITS = 18  # maximum number of digits in a query's integer, so that the integer fits into the store
_MAX_SHOWN = 100  # how many characters of a wrong value an error quotes
Whole = Annotated[int, msgspec.Meta(ge=0, lt=10**_MAX_DIGITS)]  # an integer in a query
Seconds = Annotated[float, msgspec.Meta(ge=0)]
_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "": False, "0": False, "false": False} | {
    "no": False,
    "off": False,
}
# The quantifiers are possessive, because backtracking would need 140 bytes of memory per byte of a string. An unterminated string also
# matches. Otherwise, the search would restart at each escaped quote in that string, which would take hours for a body of 1 MB.
_JSON_TOKENS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
_NAME_END = re.compile(rb"\s*:")


async def decode_body(request: Request, kind: type[T], *, wrong: type[TurngateError] = BadRequest) -> T:
    """Decode a request's JSON body as `kind`, and raise `wrong` if it is invalid. An empty body is treated as `{}`."""
    raw = await _read_body(request, MAX_BODY)
    if (field := find_too_deep(raw)) is not None:
        raise wrong(f"{field or 'the body'} is nested too deeply; the limit is {MAX_DEPTH} levels", param=field or None)
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except msgspec.ValidationError as error:
        message, field = explain_error(error, kind)
        raise wrong(message if field else f"the body: {message}", param=field) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise wrong(f"the body is not valid JSON: {error}") from None


async def decode_msgpack(request: Request, kind: type[T]) -> T:
    """Decode a request's msgpack body as `kind`, and raise `BadRequest` if it is invalid. An empty body is treated as an empty map."""
    raw = await _read_body(request, MAX_MSGPACK_BODY)
    try:
        return msgspec.msgpack.decode(raw or b"\x80", type=kind)
    except msgspec.ValidationError as error:
        message, field = explain_error(error, kind)
        raise BadRequest(message if field else f"the body: {message}", param=field) from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not valid msgpack: {error}") from None
    except (UnicodeDecodeError, RecursionError) as error:
        field = _find_undecodable(raw, kind)
        reason = "is nested too deeply" if isinstance(error, RecursionError) else "contains text that is not UTF-8"
        raise BadRequest(f"{field or 'the body'} {reason}", param=field) from None


async def _read_body(request: Request, limit: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > limit:
            raise TooLarge(f"the request body is larger than the limit of {limit} bytes")
    return b"".join(parts)


def decode_query(params: QueryParams, kind: type[T]) -> T:
    """Decode a URL's query parameters as `kind`, and raise `BadRequest` if one is missing or invalid. Unknown parameters are ignored."""
    values: dict[str, Any] = {}
    fields: tuple[msgspec.inspect.Field, ...] = _list_fields(kind)  # type: ignore[arg-type]  # a type is hashable
    for field in fields:
        texts = params.getlist(field.encode_name)
        if texts:
            values[field.name] = _read_values(field.encode_name, texts, field.type)
        elif field.required:
            name = field.encode_name
            raise BadRequest(f"{name} is missing; add it to the URL as ?{name}=…", param=name)
    return kind(**values)


@cache
def _list_fields(kind: type) -> tuple[msgspec.inspect.Field, ...]:
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType), "a query is a struct"
    return info.fields


def _read_values(name: str, texts: Sequence[str], kind: msgspec.inspect.Type) -> object:
    if isinstance(kind, msgspec.inspect.VarTupleType):
        return tuple(_read_value(name, text, kind.item_type) for text in texts if text)
    return _read_value(name, texts[-1], kind)


def _read_value(name: str, text: str, kind: msgspec.inspect.Type) -> object:
    match kind:
        case msgspec.inspect.UnionType(types=kinds):
            (other,) = (one for one in kinds if not isinstance(one, msgspec.inspect.NoneType))
            return _read_value(name, text, other)
        case msgspec.inspect.LiteralType(values=known):
            if text not in known:
                *most, last = [repr(value) for value in known if value]  # an empty value means the default
                raise _wrong(name, f"{', '.join(most)} or {last}" if most else last, text)
            return text
        case msgspec.inspect.IntType():
            if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
                raise _wrong(name, f"a non-negative integer of at most {_MAX_DIGITS} digits", text)
            return int(text)
        case msgspec.inspect.FloatType():
            return _read_seconds(name, text)
        case msgspec.inspect.BoolType():
            if (flag := _FLAGS.get(text.lower())) is None:
                raise _wrong(name, "1 or 0", text)
            return flag
        case _:
            return text


def _read_seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise _wrong(name, "a finite number of seconds, 0 or more", text)
    return seconds


def _wrong(name: str, expected: str, text: str) -> BadRequest:
    return BadRequest(f"{name} must be {expected}, not {text[:_MAX_SHOWN]!r}", param=name)


def find_too_deep(raw: bytes) -> str | None:
    """Check whether a JSON body is nested deeper than `MAX_DEPTH`, and return the name of the top-level field that is nested too deeply.

    Return "" if the nesting is not inside a named field, and None if no value is nested too deeply. The check runs before decoding, because
    the depth that a decoder can handle depends on the call stack.
    """
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return None
    depth, name = 0, b""
    for part in _JSON_TOKENS.finditer(raw):
        match part[0]:
            case b"[" | b"{":
                depth += 1
                if depth > MAX_DEPTH:
                    return name[1:-1][:100].decode("utf-8", "replace")
            case b"]" | b"}":
                depth -= 1
            case text if depth == 1 and _NAME_END.match(raw, part.end()):
                name = text
    return None


def _find_undecodable(raw: bytes, kind: type) -> str | None:
    """Return the field that the decoder failed on, or None if it cannot be determined."""
    try:
        parts = msgspec.msgpack.decode(raw, type=dict[str, msgspec.Raw])
        known = {field.name: field.type for field in msgspec.structs.fields(kind)}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    for name, part in parts.items():
        try:
            msgspec.msgpack.decode(part, type=known.get(name, msgspec.Raw))
        except (UnicodeDecodeError, RecursionError):
            return name
        except msgspec.DecodeError:
            continue
    return None
