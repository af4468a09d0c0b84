"""Placeholders in an agent's description: `{model}`, `{home}`, `{context_tokens*8//10}`.

A placeholder is a lower-case name in single braces. A numeric one may be followed by multiplications and divisions by whole numbers. Other
text in braces is left alone: JSON, `{env:NAME}`, Jinja's `{{task}}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

Value = str | int
_PLACEHOLDER = re.compile(r"\{([a-z][a-z0-9_]*)((?:(?:\*|//|/)[0-9]+)*)\}")
_STEP = re.compile(r"(\*|//|/)([0-9]+)")
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")  # YAML or TOML require these to be escaped


class UnknownPlaceholder(Exception):
    """A placeholder that has no value, or whose value cannot be calculated with."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


def find_names(text: str) -> list[str]:
    """Return the names of the placeholders in a text."""
    return [found[1] for found in _PLACEHOLDER.finditer(text) if not _is_doubled(text, found)]


def fill(text: str, values: Mapping[str, Value], escape: Callable[[str], str] = str) -> str:
    """Replace every placeholder with its value, passed through `escape`."""

    def value(found: re.Match[str]) -> str:
        if _is_doubled(text, found):
            return found[0]
        if found[1] not in values:
            raise UnknownPlaceholder(found[1], "is not a placeholder")
        return escape(_calculate(found[1], values[found[1]], found[2]))

    return _PLACEHOLDER.sub(value, text)


def escape_quoted(text: str) -> str:
    """Escape a text for the double quotes of a JSON, TOML or YAML string."""
    plain = json.dumps(text, ensure_ascii=False)[1:-1]
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", plain)


def _is_doubled(text: str, found: re.Match[str]) -> bool:
    """Tell whether it is `{{name}}`, which belongs to another template language."""
    return text[found.start() - 1 : found.start()] == "{" and text[found.end() : found.end() + 1] == "}"


def _calculate(name: str, value: Value, steps: str) -> str:
    if not steps:
        return str(value)
    if isinstance(value, str):
        raise UnknownPlaceholder(name, "is text, and only numbers can be calculated with")
    number: float = value
    for sign, operand in _STEP.findall(steps):
        if sign != "*" and int(operand) == 0:
            raise UnknownPlaceholder(name, "is divided by 0")
        number = (
            number * int(operand) if sign == "*" else number // int(operand) if sign == "//" else number / int(operand)
        )
    return str(number) if isinstance(number, int) else f"{number:.6f}"
