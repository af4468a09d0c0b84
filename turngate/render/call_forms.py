"""Parse calls that models do not write as JSON: Python calls (LFM2), and Gemma 4's own notation.

Each public function takes the text between the call markers. It returns the name of each call and its arguments as JSON text, or raises
`ValueError` if the text is not a call.
"""

from __future__ import annotations

import ast
import warnings

import orjson

from turngate.types import Json

_JSON_NAMES: dict[str, Json] = {"true": True, "false": False, "null": None}
GEMMA_QUOTE = '<|"|>'  # a special token that Gemma uses as a quotation mark
_MAX_DEPTH = 50


def parse_python_calls(text: str) -> list[tuple[str, str]]:
    """Parse Python calls: `[name(key="value"), …]`, or a single call without brackets."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the model's text, such as "\d" in a string
            tree = _parse_expression(text.strip())
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_read_python_call(call) for call in calls]
    except (SyntaxError, RecursionError, MemoryError, TypeError, orjson.JSONEncodeError) as error:
        raise ValueError(f"not a list of calls: {error}") from None


def _parse_expression(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        # Some templates do not escape line breaks in strings.
        return ast.parse(text.replace("\n", "\\n"), mode="eval").body


def _read_python_call(call: ast.expr) -> tuple[str, str]:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("not a call with named arguments")
    arguments = {}
    for argument in call.keywords:
        if argument.arg is None:
            raise ValueError("an argument has no name")
        arguments[argument.arg] = _read_python_value(argument.value)
    return ast.unparse(call.func), orjson.dumps(arguments).decode()


def _read_python_value(value: ast.expr) -> Json:
    if isinstance(value, ast.Name) and value.id in _JSON_NAMES:
        return _JSON_NAMES[value.id]
    if isinstance(value, ast.List | ast.Tuple):
        return [_read_python_value(item) for item in value.elts]
    if isinstance(value, ast.Dict):
        pairs = zip(value.keys, value.values, strict=True)
        return {str(ast.literal_eval(key)): _read_python_value(item) for key, item in pairs if key is not None}
    return ast.literal_eval(value)


def parse_gemma_call(text: str) -> list[tuple[str, str]]:
    """Parse a call in Gemma's notation: `name{key:<|"|>text<|"|>,other:3}`."""
    name, brace, _ = text.strip().partition("{")
    if not brace or not name or any(c.isspace() for c in name):
        raise ValueError("not a call with arguments in braces")
    value, end = _read_gemma_value(text.strip(), len(name), 0)
    if end != len(text.strip()):
        raise ValueError("text follows the arguments")
    return [(name, orjson.dumps(value).decode())]


def _read_gemma_value(text: str, at: int, depth: int) -> tuple[Json, int]:
    """Read the value that starts at index `at`. Return the value and the index after its end."""
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    if text.startswith(GEMMA_QUOTE, at):
        end = text.find(GEMMA_QUOTE, at + len(GEMMA_QUOTE))
        if end < 0:
            raise ValueError("a string has no closing quote")
        return text[at + len(GEMMA_QUOTE) : end], end + len(GEMMA_QUOTE)
    if text[at : at + 1] == "{":
        return _read_gemma_object(text, at + 1, depth)
    if text[at : at + 1] == "[":
        items: list[Json] = []
        at += 1
        while text[at : at + 1] != "]":
            item, at = _read_gemma_value(text, at, depth + 1)
            items.append(item)
            at = _skip_comma(text, at, "]")
        return items, at + 1
    end = min((found for c in ",]}" if (found := text.find(c, at)) >= 0), default=len(text))
    word = text[at:end].strip()
    return None if word == "None" else orjson.loads(word), end


def _read_gemma_object(text: str, at: int, depth: int) -> tuple[Json, int]:
    values: dict[str, Json] = {}
    while text[at : at + 1] != "}":
        colon = text.find(":", at)
        if colon < 0:
            raise ValueError("a key has no value")
        key = text[at:colon].strip().removeprefix(GEMMA_QUOTE).removesuffix(GEMMA_QUOTE)
        values[key], at = _read_gemma_value(text, colon + 1, depth + 1)
        at = _skip_comma(text, at, "}")
    return values, at + 1


def _skip_comma(text: str, at: int, closing: str) -> int:
    if text[at : at + 1] == ",":
        return at + 1
    if text[at : at + 1] != closing:
        raise ValueError(f"{closing} is missing")
    return at
