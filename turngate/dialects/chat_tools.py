"""Decoding of Chat Completions tools and of the fields that select which tools the model may or must call."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from turngate.dialects.openai import custom_tool, decode_allowed_tools, encode_allowed_tools
from turngate.dialects.wire import (
    DECODE_ERRORS,
    describe_error,
    field_error,
    require_any_tool,
    require_shallow,
    require_tool,
)
from turngate.errors import BadRequest
from turngate.types import Constraint, Json, Tool


class _Named(msgspec.Struct):
    name: str = ""


_wires = msgspec.json.Decoder(list[dict[str, Any]])
_raws = msgspec.json.Decoder(list[msgspec.Raw])
_names = msgspec.json.Decoder(list[_Named])


class ChatTools:
    """The tools of one request. `allowed` contains the names of the tools that the model sees; None means all of them.

    `field` is the name of the request field that contains the tools. Error messages refer to it.
    """

    replaceable = False

    def __init__(self, raw: bytes, allowed: Collection[str] | None = None, field: str = "tools") -> None:
        self._tools = raw
        self._field = field
        self._allowed = None if allowed is None else frozenset(allowed)
        self.raw = encode_allowed_tools(raw, allowed)

    @classmethod
    def from_functions(cls, raw: bytes) -> ChatTools:
        """Convert the value of the deprecated field `functions` to tools."""
        try:
            functions, names = _raws.decode(raw), _names.decode(raw)
        except DECODE_ERRORS as error:
            raise BadRequest(f"functions: {describe_error(error)}", param="functions") from None
        for n, named in enumerate(names):
            if not named.name:
                raise BadRequest(f"functions[{n}].name must be a non-empty string", param=f"functions[{n}].name")
        tools = b",".join(b'{"type":"function","function":%b}' % bytes(f) for f in functions)
        return cls(b"[" + tools + b"]", field="functions")

    @classmethod
    def from_stored(cls, raw: bytes) -> ChatTools:
        return cls(*decode_allowed_tools(raw))

    def decode(self) -> tuple[Tool, ...]:
        tools = [_decode_tool(wire, f"{self._field}[{n}]") for n, wire in enumerate(self._read())]
        return tuple(tool for tool in tools if self._allowed is None or tool.name in self._allowed)

    def custom_names(self) -> frozenset[str]:
        """Return the names of the custom tools."""
        if b'"custom"' not in self._tools:  # the usual case
            return frozenset()
        return frozenset(
            _decode_tool(wire, f"{self._field}[{n}]").name
            for n, wire in enumerate(self._read())
            if wire.get("type") == "custom"
        )

    def restrict_to(self, names: Collection[str]) -> ChatTools:
        return ChatTools(self._tools, names, self._field)

    def _read(self) -> list[dict[str, Any]]:
        try:
            return _wires.decode(self._tools)
        except DECODE_ERRORS as error:
            raise BadRequest(f"{self._field}: {describe_error(error)}", param=self._field) from None


def _decode_tool(wire: dict[str, Any], where: str) -> Tool:
    kind = wire.get("type")
    if kind not in ("function", "custom"):
        raise BadRequest(f"{where}.type must be 'function' or 'custom', not {kind!r}", param=f"{where}.type")
    definition = wire.get(kind)
    name = definition.get("name") if isinstance(definition, dict) else None
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where}.{kind}.name must be a non-empty string", param=f"{where}.{kind}.name")
    if kind == "custom":
        return _decode_custom_tool(wire["custom"], name, f"{where}.custom")
    return Tool(name, require_shallow(wire, where))


def _decode_custom_tool(wire: dict[str, Any], name: str, where: str) -> Tool:
    description = wire.get("description")
    if not isinstance(description, str | None):
        raise BadRequest(f"{where}.description must be a string", param=f"{where}.description")
    match wire.get("format"):
        case None | {"type": "text"}:
            return custom_tool(name, description)
        case {"type": "grammar", "grammar": {"definition": str(grammar), **rest}}:
            return custom_tool(name, description, str(rest.get("syntax") or ""), grammar)
        case _:
            raise BadRequest(
                f"{where}.format must be {{'type': 'text'}} or "
                "{'type': 'grammar', 'grammar': {'syntax': …, 'definition': …}}",
                param=f"{where}.format",
            )


# ── the tools that the model may or must call ────────────────────────────────────────────────────────────────────────


def decode_tool_choice(
    choice: Json, tools: ChatTools | None, *, parallel: bool
) -> tuple[Constraint | None, ChatTools | None]:
    """Return the constraint that forces a tool call, if any, and the tools that the model sees."""
    match choice:
        case None | "auto":
            return None, tools
        case "none":
            return None, None
        case "required":
            return require_any_tool(_require_tools(tools), parallel=parallel), tools
        case {"type": "function", "function": {"name": str(name)}} | {"type": "custom", "custom": {"name": str(name)}}:
            return require_tool(_require_tools(tools), name, "tool_choice"), tools
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(entries)}}:
            return _decode_allowed_tools(mode, entries, tools, parallel=parallel)
        case _:
            raise field_error(
                "tool_choice",
                "must be 'none', 'auto', 'required', {'type': 'function', 'function': {'name': …}}, "
                "{'type': 'custom', 'custom': {'name': …}} or "
                "{'type': 'allowed_tools', 'allowed_tools': {'mode': 'auto' or 'required', 'tools': […]}}",
            )


def decode_function_call(choice: Json, functions: ChatTools | None) -> tuple[Constraint | None, ChatTools | None]:
    """Return the same as `decode_tool_choice`, but for the deprecated field `function_call`."""
    match choice:
        case None | "auto":
            return None, functions
        case "none":
            return None, None
        case {"name": str(name)}:
            return require_tool(() if functions is None else functions.decode(), name, "function_call"), functions
        case _:
            raise field_error("function_call", "must be 'none', 'auto' or {'name': …}")


def _decode_allowed_tools(
    mode: str, entries: Sequence[Json], tools: ChatTools | None, *, parallel: bool
) -> tuple[Constraint | None, ChatTools | None]:
    offered = {tool.name: tool for tool in _require_tools(tools)}
    names: list[str] = []
    for n, entry in enumerate(entries):
        match entry:
            case {"type": "function", "function": {"name": str(name)}} if name in offered:
                names.append(name)
            case {"type": "custom", "custom": {"name": str(name)}} if name in offered:
                names.append(name)
            case _:
                raise field_error(
                    f"tool_choice.allowed_tools.tools[{n}]",
                    "must name one of the request's tools, as {'type': 'function', 'function': {'name': …}} or "
                    "{'type': 'custom', 'custom': {'name': …}}",
                )
    if mode == "required":
        if not names:
            raise field_error(
                "tool_choice",
                "forces a tool call, but tool_choice.allowed_tools.tools is empty; list at least one tool",
            )
        return require_any_tool([offered[name] for name in dict.fromkeys(names)], parallel=parallel), tools
    # Hiding a tool is the only way to keep the model from calling it.
    return None, tools.restrict_to(names) if tools is not None and names else None


def _require_tools(tools: ChatTools | None) -> tuple[Tool, ...]:
    if tools is None:
        raise field_error(
            "tool_choice", "needs tools, but the request has no tools; declare tools, or leave tool_choice out"
        )
    return tools.decode()
