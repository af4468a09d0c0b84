"""Placeholders in an agent's description: `{model}`, `{home}`, `{context_tokens*8//10}`.

A placeholder is a lower-case name in single braces. If its value is a number, it may be multiplied and divided by whole numbers. Other text
in braces, such as JSON, `{env:NAME}` or Jinja's `{{task}}`, is left unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

Value = str | int
_PLACEHOLDER = re.compile(r"\{([a-z][a-z0-9_]*)((?:(?:\*|//|/)[0-9]+)*)\}")
_STEP = re.compile(r"(\*|//|/)([0-9]+)")
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")  # these must be escaped in YAML or TOML


class UnknownPlaceholder(Exception):
    """A placeholder is unknown, or is used in an invalid calculation.

    The message continues a sentence that starts with the placeholder's name.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


def find_names(text: str) -> list[str]:
    """Return the names of the placeholders in a text."""
    return [match[1] for match in _PLACEHOLDER.finditer(text) if not _is_doubled(text, match)]


def fill(text: str, values: Mapping[str, Value], escape: Callable[[str], str] = str) -> str:
    """Replace every placeholder, except in `{{name}}`, with its value. `escape` is applied to each value.

    Raise `UnknownPlaceholder` if a placeholder has no value, or is used in an invalid calculation.
    """

    def value(match: re.Match[str]) -> str:
        if _is_doubled(text, match):
            return match[0]
        if match[1] not in values:
            raise UnknownPlaceholder(match[1], "is not a known placeholder")
        return escape(_calculate(match[1], values[match[1]], match[2]))

    return _PLACEHOLDER.sub(value, text)


def escape_quoted(text: str) -> str:
    """Escape text for use inside a double-quoted string in JSON, TOML or YAML."""
    plain = json.dumps(text, ensure_ascii=False)[1:-1]
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", plain)


def _is_doubled(text: str, match: re.Match[str]) -> bool:
    """Return whether the match is part of `{{name}}`, which belongs to a different template language."""
    return text[match.start() - 1 : match.start()] == "{" and text[match.end() : match.end() + 1] == "}"


def _calculate(name: str, value: Value, steps: str) -> str:
    if not steps:
        return str(value)
    if isinstance(value, str):
        raise UnknownPlaceholder(name, "is text, but only numbers can be multiplied or divided")
    number: float = value
    for sign, operand in _STEP.findall(steps):
        if sign != "*" and int(operand) == 0:
            raise UnknownPlaceholder(name, "is divided by 0")
        number = (
            number * int(operand) if sign == "*" else number // int(operand) if sign == "//" else number / int(operand)
        )
    return str(number) if isinstance(number, int) else f"{number:.6f}"
