"""Conversion of OpenAI Responses tools to functions that a chat template can render.

The model sees only functions. A custom tool becomes a function with a single string argument, `input`. A tool in a namespace is named
`namespace__name`, except in the default namespace `functions`, where it keeps its name. A `tool_search` that the agent runs itself also
becomes a function. When the model calls a function, `index_tools` finds the tool that the function represents, which
determines the kind of item to send.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Literal

import msgspec

from turngate.dialects.openai import custom_tool, decode_allowed_tools, encode_allowed_tools
from turngate.dialects.wire import DECODE_ERRORS, describe_error, function_tool, require_shallow
from turngate.errors import BadRequest
from turngate.types import Json, Tool

DEFAULT_NAMESPACES = ("", "functions")  # namespaces that are omitted from function names
SEARCH = "tool_search"

_HOSTED = {
    "file_search": "is not supported, because only the provider can run it; declare your own search function",
    "code_interpreter": "is not supported, because only the provider can run it; declare a function that runs code",
    "mcp": "is not supported, because only the provider can run it; connect to the MCP server yourself and declare its functions",
    "programmatic_tool_calling": "is not supported, because only the provider can run it; remove this tool",
    "local_shell": "is not supported; declare a function that runs commands instead",
    "shell": "is not supported; declare a function that runs commands instead",
    "apply_patch": "is not supported; declare a custom tool that accepts a patch instead",
}


class _Format(msgspec.Struct):
    type: str = "text"
    syntax: str = ""
    definition: str = ""


class _WireTool(msgspec.Struct):
    type: str = ""
    name: str = ""
    description: str | None = None
    parameters: Json = None
    format: _Format | None = None
    tools: list[_WireTool] | None = None
    execution: str | None = None


class _Name(msgspec.Struct):
    """A tool, decoded only for its type and name. If it is a namespace, `tools` contains its tools."""

    type: str = ""
    name: str = ""
    tools: list[_Name] | None = None


class AgentTool(msgspec.Struct, frozen=True):
    """The agent's tool that a function in the prompt represents."""

    kind: Literal["function", "custom", "tool_search"]
    name: str
    namespace: str = ""


_tools = msgspec.json.Decoder(list[_WireTool])
_names = msgspec.json.Decoder(list[_Name])


class ResponsesTools:
    """The tools of one request.

    `allowed` contains the names of the tools that the model sees; None means all of them. If `replaceable` is set, a tool may replace an
    earlier tool with the same name, because an agent may declare a tool again during the conversation.
    """

    def __init__(self, raw: bytes, allowed: Collection[str] | None = None, *, replaceable: bool = False) -> None:
        self._tools = raw
        self._allowed = None if allowed is None else frozenset(allowed)
        self.replaceable = replaceable
        self.raw = encode_allowed_tools(raw, allowed)

    def decode(self) -> tuple[Tool, ...]:
        by_name: dict[str, Tool] = {}
        for tool in decode_tools(self._tools, "tools"):
            if tool.name in by_name and not self.replaceable:
                raise BadRequest(f"tools contains two tools named {tool.name!r}; rename one", param="tools")
            by_name[tool.name] = tool
        return tuple(tool for name, tool in by_name.items() if self._allowed is None or name in self._allowed)

    def restrict_to(self, names: Collection[str]) -> ResponsesTools:
        return ResponsesTools(self._tools, names, replaceable=self.replaceable)

    @classmethod
    def from_stored(cls, raw: bytes) -> ResponsesTools:
        """Create the tools from a trace. `raw` is the result of `encode_allowed_tools`."""
        return cls(*decode_allowed_tools(raw), replaceable=True)


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model sees a tool: `namespace__name`, or only the name in a default namespace."""
    return name if (namespace or "") in DEFAULT_NAMESPACES else f"{namespace}__{name}"


def decode_tools(raw: bytes, where: str) -> list[Tool]:
    try:
        wires = _tools.decode(raw)
    except DECODE_ERRORS as error:
        raise BadRequest(f"{where}: {describe_error(error)}", param=where) from None
    return [tool for n, wire in enumerate(wires) for tool in _decode_tool(wire, f"{where}[{n}]")]


def index_tools(raws: Sequence[bytes]) -> dict[str, AgentTool]:
    """Return the agent's tools by the names that the model sees. Skip invalid lists, because it is too late to reject the request."""
    found: dict[str, AgentTool] = {}
    for raw in raws:
        try:
            wires = _names.decode(raw)
        except DECODE_ERRORS:
            continue
        for wire in wires:
            for inner in wire.tools or () if wire.type == "namespace" else (wire,):
                namespace = wire.name if wire.type == "namespace" else ""
                if inner.type == SEARCH:
                    found[SEARCH] = AgentTool("tool_search", SEARCH)
                elif inner.type in ("function", "custom"):
                    kind: Literal["function", "custom"] = "custom" if inner.type == "custom" else "function"
                    found[flat_name(namespace, inner.name)] = AgentTool(kind, inner.name, namespace)
    return found


def is_ignored(kind: str) -> bool:
    """Return whether tools of this type are hidden from the model. Agents offer such tools by default, but only a provider can run them."""
    return kind.startswith("web_search") or kind == "image_generation"


def _decode_tool(wire: _WireTool, where: str) -> Iterator[Tool]:
    if is_ignored(wire.type):
        return
    match wire.type:
        case "function" | "custom":
            yield _decode_function(wire, "", where)
        case "namespace":
            yield from _decode_namespace(wire, where)
        case "tool_search":
            # Ignore a search that the provider runs: it would only find tools in this list, and the model sees all of those.
            if wire.execution == "client":
                parameters = require_shallow(wire.parameters, f"{where}.parameters")
                yield function_tool(SEARCH, wire.description, parameters)
        case kind:
            why = _HOSTED.get(kind, "is not supported; use 'function', 'custom' or 'namespace'")
            raise BadRequest(f"{where}.type {kind!r} {why}", param=f"{where}.type")


def _decode_namespace(wire: _WireTool, where: str) -> Iterator[Tool]:
    if not wire.name:
        raise BadRequest(f"{where}.name is missing or empty", param=f"{where}.name")
    about = f"\n\nAbout the {wire.name} tools: {wire.description}" if wire.description else ""
    for n, inner in enumerate(wire.tools or ()):
        place = f"{where}.tools[{n}]"
        if inner.type not in ("function", "custom"):
            raise BadRequest(
                f"{place}.type must be 'function' or 'custom' in a namespace, not {inner.type!r}", param=f"{place}.type"
            )
        yield _decode_function(inner, wire.name, place, about if n == 0 else "")


def _decode_function(wire: _WireTool, namespace: str, where: str, about: str = "") -> Tool:
    if not wire.name:
        raise BadRequest(f"{where}.name is missing or empty", param=f"{where}.name")
    name = flat_name(namespace, wire.name)
    if wire.type == "custom":
        form = wire.format or _Format()
        return custom_tool(name, wire.description, form.syntax, form.definition, about)
    parameters = require_shallow(wire.parameters, f"{where}.parameters")
    return function_tool(name, (wire.description or "") + about if about else wire.description, parameters)
