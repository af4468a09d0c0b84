"""How models write reasoning and tool calls: the known syntaxes, and the parsers of the text between call markers.

To support another model's notation, add a `Syntax` to `SYNTAXES`, its parser to `_BODY_PARSERS`, and its marker to `detect_syntax`, which
detects the syntax of a chat template. `parse.py` parses whole replies with these syntaxes and parsers.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Sequence

import msgspec
import orjson

from turngate.types import Json, Tool

BodyParser = Callable[[str, Sequence[Tool]], list[tuple[str, str]]]
_JSON_NAMES: dict[str, Json] = {"true": True, "false": False, "null": None}
GEMMA_QUOTE = '<|"|>'  # a special token that Gemma uses as a quotation mark
_MAX_DEPTH = 50


class MalformedCall(ValueError):
    """The text between the call markers is not a valid call."""


class Syntax(msgspec.Struct, frozen=True):
    """How a model marks reasoning and tool calls in its text."""

    name: str
    reasoning_open: str = "<think>"
    reasoning_close: str = "</think>"
    call_open: str = "<tool_call>"
    call_close: str = "</tool_call>"  # if empty, the calls extend to the end of the reply
    noise: tuple[str, ...] = ()  # markers around groups of calls; they are ignored
    bare: bool = False  # whether a reply that starts with a brace is a call
    inner: tuple[str, ...] = ()  # further tokens, inside calls or in the markers above

    def markers(self) -> tuple[str, ...]:
        outer = self.reasoning_open, self.reasoning_close, self.call_open, self.call_close
        return tuple(m for m in (*outer, *self.noise, *self.inner) if m)


class _HermesCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")
    parameters: msgspec.Raw = msgspec.Raw(b"")


_hermes = msgspec.json.Decoder(_HermesCall)


def _parse_json_call(text: str, tools: Sequence[Tool]) -> tuple[str, str]:
    """Parse one `{"name": …, "arguments": …}` object. Return the name, and the JSON of the arguments as sampled.

    Arguments that are a JSON string are decoded once, and null becomes `{}`.
    """
    try:
        call = _hermes.decode(text.encode("utf-8", "surrogatepass"))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise MalformedCall(str(error)) from None
    raw = bytes(call.parameters or call.arguments).decode()
    if raw.startswith('"'):  # the model wrote the arguments as a JSON string, which contains the JSON
        raw = orjson.loads(raw)
    if not call.name:
        raise MalformedCall("the tool call has no name")
    arguments = "{}" if raw in ("null", "") else raw
    require_object(arguments)
    return call.name, arguments


def _parse_tagged_call(text: str, tools: Sequence[Tool]) -> tuple[str, str]:
    """Parse `<function=name><parameter=key>value</parameter></function>`.

    A value is parsed as JSON if possible, unless the tool's schema declares it as a string. Regular expressions are avoided, because they
    can take a minute if a model repeats itself endlessly.
    """
    name, body = _parse_tag(text, "<function=", "</function>")[:2]
    types = _parameter_types(name, tools)
    values: dict[str, Json] = {}
    while "<parameter=" in body:
        key, value, body = _parse_tag(body, "<parameter=", "</parameter>")
        values[key] = _convert_value(value.removeprefix("\n").removesuffix("\n"), types.get(key))
    return name, orjson.dumps(values).decode()


def _parse_tag(text: str, opening: str, closing: str) -> tuple[str, str, str]:
    """Find the first element with these tags. Return its name, its body and the text after the element."""
    start = text.find(opening) + len(opening)
    named = text.find(">", start)
    end = text.find(closing, named)
    name = text[start:named].strip()
    if start < len(opening) or named < 0 or end < 0 or not name or any(c.isspace() for c in name):
        raise MalformedCall(f"no complete {opening}…> element with a valid name")
    return name, text[named + 1 : end], text[end + len(closing) :]


def _parameter_types(name: str, tools: Sequence[Tool]) -> dict[str, Json]:
    """Return the type of each parameter that the schema of the named tool declares. Ignore invalid parts of the schema."""
    for tool in tools:
        if tool.name == name:
            schema = tool.wire["function"].get("parameters")
            properties = schema.get("properties") if isinstance(schema, dict) else None
            known = properties.items() if isinstance(properties, dict) else ()
            return {key: value.get("type") for key, value in known if isinstance(value, dict)}
    return {}


def _convert_value(value: str, declared: Json) -> Json:
    if declared == "string":
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return value


def _parse_hermes_body(text: str, tools: Sequence[Tool]) -> list[tuple[str, str]]:
    text = text.strip()
    return [_parse_tagged_call(text, tools) if text.startswith("<function=") else _parse_json_call(text, tools)]


def _parse_glm_body(text: str, tools: Sequence[Tool]) -> list[tuple[str, str]]:
    """Parse a GLM call: its name, then `<arg_key>key</arg_key>` and `<arg_value>value</arg_value>` for each argument."""
    name, *pairs = text.split("<arg_key>")
    name = name.strip()
    if not name or any(c.isspace() for c in name):
        raise MalformedCall("the tool call has no valid name")
    types, values = _parameter_types(name, tools), {}
    for pair in pairs:
        key, closed, rest = pair.partition("</arg_key>")
        before, opened, rest = rest.partition("<arg_value>")
        value, ended, after = rest.partition("</arg_value>")
        if not (closed and opened and ended) or before.strip() or after.strip():
            raise MalformedCall("an argument is incomplete, or has extra text before or after its value")
        values[key.strip()] = _convert_value(value, types.get(key.strip()))
    return [(name, orjson.dumps(values).decode())]


def _parse_deepseek_body(text: str, tools: Sequence[Tool]) -> list[tuple[str, str]]:
    _, separator, rest = text.partition("<｜tool▁sep｜>")
    name, newline, rest = rest.partition("\n")
    fenced = rest.strip()
    if not (separator and newline and name.strip() and fenced.startswith("```json") and fenced.endswith("```")):
        raise MalformedCall("not a DeepSeek call")
    arguments = fenced.removeprefix("```json").removesuffix("```").strip()
    require_object(arguments)
    return [(name.strip(), arguments)]


def parse_list_body(text: str, tools: Sequence[Tool]) -> list[tuple[str, str]]:
    """Parse text that is one call in JSON, a JSON list of calls, several calls joined by `;`, or Mistral's `name[ARGS]{…}`."""
    text = text.strip()
    try:
        if text.startswith("["):
            return [
                _parse_json_call(bytes(raw).decode(), tools)
                for raw in msgspec.json.decode(text.encode(), type=list[msgspec.Raw])
            ]
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedCall(str(error)) from None
    if found := re.match(r"([\w.-]+)\[ARGS\](\{.*\})$", text, re.S):
        require_object(found[2])
        return [(found[1], found[2])]
    try:
        return [_parse_json_call(text, tools)]
    except MalformedCall:
        parts = re.split(r"(?<=\})\s*;\s*(?=\{)", text)
        if len(parts) == 1:
            raise
        return [_parse_json_call(part, tools) for part in parts]


def require_object(text: str) -> None:
    try:
        arguments = json.loads(text)  # orjson rejects objects that agents can read, such as {"n": 1e400}
    except (ValueError, RecursionError) as error:
        raise MalformedCall(str(error)) from None
    if not isinstance(arguments, dict):
        raise MalformedCall("the arguments are not a JSON object")


# ── calls that are not JSON: Python calls (LFM2) and Gemma 4 ─────────────────────────────────────────────────────────


def _parse_python_calls(text: str) -> list[tuple[str, str]]:
    """Parse Python calls: `[name(key="value"), …]`, or a single call without brackets."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the model's text, such as "\d" in a string
            tree = _parse_expression(text.strip())
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_read_python_call(call) for call in calls]
    except (SyntaxError, RecursionError, MemoryError, TypeError, orjson.JSONEncodeError) as error:
        raise ValueError(f"not valid Python calls: {error}") from None


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


def _parse_gemma_call(text: str) -> list[tuple[str, str]]:
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
        raise ValueError(f"expected ',' or {closing!r}")
    return at


# ── the syntaxes ─────────────────────────────────────────────────────────────────────────────────────────────────────

HERMES = Syntax("hermes")
DEEPSEEK = Syntax(
    "deepseek",
    call_open="<｜tool▁call▁begin｜>",
    call_close="<｜tool▁call▁end｜>",
    noise=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
GLM = Syntax("glm", inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"))
LFM = Syntax("lfm", call_open="<|tool_call_start|>", call_close="<|tool_call_end|>")
GEMMA = Syntax(
    "gemma",
    reasoning_open="<|channel>thought",
    reasoning_close="<channel|>",
    call_open="<|tool_call>call:",
    call_close="<tool_call|>",
    inner=("<|channel>", "<|tool_call>", GEMMA_QUOTE),
)
MISTRAL = Syntax("mistral", call_open="[TOOL_CALLS]", call_close="")
LLAMA = Syntax("llama", call_open="<|python_tag|>", call_close="", bare=True)
SYNTAXES = (HERMES, GLM, DEEPSEEK, LFM, GEMMA, MISTRAL, LLAMA)
_BODY_PARSERS: dict[str, BodyParser] = {
    "hermes": _parse_hermes_body,
    "glm": _parse_glm_body,
    "deepseek": _parse_deepseek_body,
    "lfm": lambda text, tools: _parse_python_calls(text),
    "gemma": lambda text, tools: _parse_gemma_call(text),
    "mistral": parse_list_body,
    "llama": parse_list_body,
}


def parse_calls(syntax: Syntax, text: str, tools: Sequence[Tool]) -> list[tuple[str, str]]:
    """Parse the text between call markers. Return the name of each call, and its arguments as JSON.

    Raise `ValueError` if the text is not a call.
    """
    return _BODY_PARSERS[syntax.name](text, tools)


def detect_syntax(rendered_call: str) -> Syntax | None:
    """Detect the syntax of a template from the text that it renders for one call. Return None if the syntax is unknown."""
    if "<arg_key>" in rendered_call:
        return GLM
    for syntax in (HERMES, DEEPSEEK, LFM, GEMMA, MISTRAL):
        if syntax.call_open in rendered_call:
            return syntax
    return LLAMA if '"name":' in rendered_call and '"parameters":' in rendered_call else None
