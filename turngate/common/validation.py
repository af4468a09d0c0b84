"""Explain errors in settings and in requests to the admin API and the service: name the invalid field and its valid values."""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from turngate.errors import ConfigError

_FIELD_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN_FIELD = re.compile(r"unknown field `([^`]*)`")
_WRONG_TYPE = re.compile(r"Expected `(?P<expected>[\w |]+)`, got `(?P<got>\w+)`")
_WRONG_NUMBER = re.compile(r"Expected `(?P<type>int|float)` (?P<operator>[<>]=?) (?P<bound>\S+)")
_WRONG_LENGTH = re.compile(
    r"Expected `(?P<type>str|array|object)` of length (?P<operator>[<>]=)? ?(?P<length>\d+)(, got \d+)?"
)
_WRONG_TEXT = re.compile(r"Expected `str` matching regex (?P<pattern>'.*')")
_TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_GIVEN_TYPES = {**_TYPES, "float": "a decimal number", "bool": "a boolean", "null": "null"}
_BOUNDS = {">=": "of at least", "<=": "of at most", ">": "greater than", "<": "less than"}
_LENGTHS = {">=": "at least", "<=": "at most", None: "exactly"}
_PARTS = {"str": "character", "array": "item", "object": "entry"}


def explain_error(error: Exception, kind: type, noun: str = "field") -> tuple[str, str | None]:
    """Explain an error that msgspec raised while decoding a value of type `kind`. Return a message and the path of the invalid field.

    If the path is known, the message starts with it. Otherwise, the path is None. `noun` is the word for a field in the message.
    """
    text = str(error)
    match = _FIELD_PATH.search(text)
    path = match[1] if match else ""
    reason = text[: match.start()] if match else text
    field_type = _field_type(kind, path)
    if unknown := _UNKNOWN_FIELD.search(reason):
        field = ".".join(part for part in (path, unknown[1]) if part)
        return f"{field} is not a known {noun}{suggestion(unknown[1], _field_names(field_type))}", field
    if values := _literal_values(field_type):
        wrong_type = _WRONG_TYPE.fullmatch(reason)
        wrong = (
            _GIVEN_TYPES.get(wrong_type["got"], wrong_type["got"])
            if wrong_type
            else reason.removeprefix("Invalid enum value ")
        )
        return f"{path} must be one of {', '.join(map(str, values))}, not {wrong}", path
    if missing := re.search(r"missing required field `([^`]*)`", reason):
        field = ".".join(part for part in (path, missing[1]) if part)
        return f"{field} is missing", field
    if not path:
        return reason, None
    expected = _describe_expected(reason)
    return f"{path} {expected}" if expected else f"{path}: {reason}", path


def _describe_expected(reason: str) -> str:
    """Translate msgspec's reason into plain English, such as "must be a number, not a string". Return "" if it is not recognized."""
    if found := _WRONG_TYPE.fullmatch(reason):
        names = [name for name in found["expected"].split(" | ") if name != "null"]
        if "float" in names:
            names = [name for name in names if name != "int"]
        if all(name in _TYPES for name in names) and found["got"] in _GIVEN_TYPES:
            return f"must be {' or '.join(_TYPES[name] for name in names)}, not {_GIVEN_TYPES[found['got']]}"
    if found := _WRONG_NUMBER.fullmatch(reason):
        return f"must be {_TYPES[found['type']]} {_BOUNDS[found['operator']]} {found['bound'].removesuffix('.0')}"
    if found := _WRONG_LENGTH.fullmatch(reason):
        part = _PARTS[found["type"]]
        parts = part if found["length"] == "1" else f"{part}s".replace("ys", "ies")
        return f"must have {_LENGTHS[found['operator']]} {found['length']} {parts}"
    if found := _WRONG_TEXT.fullmatch(reason):
        return f"must match the regular expression {found['pattern']}"
    return ""


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raise `ValueError` if it is invalid or nested too deeply for the parser."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("a value is nested too deeply") from None


def parse_json(text: str) -> Any:
    """Parse JSON. Raise `ValueError` if it is invalid or nested too deeply for the parser."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("a value is nested too deeply") from None


def path_exists(path: str | os.PathLike[str]) -> bool:
    """Return whether a path exists. Unlike `Path.exists`, return False if the path is too long for the file system."""
    return os.path.exists(path)  # noqa: PTH110


def suggestion(name: str, known: list[str]) -> str:
    """Return "; did you mean …?" with the closest known name, or else "; available: …" with all known names.

    Return "" if `known` is empty.
    """
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; available: {', '.join(known)}" if known else ""


def reject_credentials(url: str, field: str, instead: str) -> None:
    """Raise `ConfigError` if a URL contains a user name or password. The message does not repeat the URL."""
    if "@" in url:  # in any part: a password may contain a slash, and a path would contain %40
        raise ConfigError(
            f"{field}: the URL contains a user name or password, which would appear in logs and process lists; {instead}",
            param=field,
        )


def _field_type(kind: Any, path: str) -> Any:
    """Return the type at a path such as `limits.turns` or `policy.roles[0]`, or None if unknown."""
    for part in re.findall(r"[^.\[\]]+|\[[^\]]*\]", path):
        kind = _unwrap(kind)
        if part.startswith("["):
            arguments = get_args(kind) or (None,)
            kind = arguments[-1] if get_origin(kind) in (dict, Mapping) else arguments[0]
        elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            kind = get_type_hints(kind, include_extras=True).get(part)
        else:
            return None
    return _unwrap(kind)


def _unwrap(kind: Any) -> Any:
    """Strip `Annotated` and `| None` from a type."""
    if get_origin(kind) is Annotated:
        return _unwrap(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        others = [k for k in get_args(kind) if k is not type(None)]
        return _unwrap(others[0]) if len(others) == 1 else kind
    return kind


def _literal_values(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _field_names(kind: Any) -> list[str]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [field.name for field in msgspec.structs.fields(kind)]
    return []
