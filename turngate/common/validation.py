"""Turns a decoder's complaint into a sentence that names the field and what it may be. For settings and request bodies.

And refuses the one mistake whose value cannot be named: a URL with a secret in it.
"""

from __future__ import annotations

import difflib
import re
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from turngate.errors import ConfigError

_AT = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")


def explain(error: Exception, kind: type, noun: str = "field") -> tuple[str, str | None]:
    """The sentence, and the path of the field it is about, for an error from decoding `kind`."""
    text = str(error)
    found = _AT.search(text)
    path = found[1] if found else ""
    reason = text[: found.start()] if found else text
    where = _field_type(kind, path)
    if unknown := _UNKNOWN.search(reason):
        field = ".".join(part for part in (path, unknown[1]) if part)
        return f"{field}: there is no such {noun}{suggestion(unknown[1], _fields(where))}", field
    if reason.startswith("Invalid enum value") and (values := _literals(where)):
        wrong = reason.removeprefix("Invalid enum value ")
        return f"{path}: {wrong} is not one of {', '.join(map(str, values))}", path
    if missing := re.search(r"missing required field `([^`]*)`", reason):
        field = ".".join(part for part in (path, missing[1]) if part)
        return f"{field}: is missing", field
    return (f"{path}: {reason}", path) if path else (reason, None)


def suggestion(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there are {', '.join(known)}" if known else ""


def refuse_credentials(url: str, field: str, instead: str) -> None:
    """A URL with a user or a password in it is refused, and not repeated: URLs are in logs, process lists and errors."""
    if "@" in url:  # anywhere: a password may hold a slash, and a path has %40
        raise ConfigError(
            f"{field}: the URL holds a user or a password, which others would see; {instead}", param=field
        )


def _field_type(kind: Any, path: str) -> Any:
    """The type at a path such as `limits.turns` or `policy.roles[0]`; None where it cannot be told."""
    for part in re.findall(r"[^.\[\]]+|\[[^\]]*\]", path):
        kind = _plain(kind)
        if part.startswith("["):
            arguments = get_args(kind)
            kind = arguments[0] if arguments else None
        elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            kind = get_type_hints(kind, include_extras=True).get(part)
        else:
            return None
    return _plain(kind)


def _plain(kind: Any) -> Any:
    """Without annotations and without `| None`."""
    if get_origin(kind) is Annotated:
        return _plain(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        rest = [k for k in get_args(kind) if k is not type(None)]
        return _plain(rest[0]) if len(rest) == 1 else kind
    return kind


def _literals(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _fields(kind: Any) -> list[str]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [field.name for field in msgspec.structs.fields(kind)]
    return []
