"""Decoding of Anthropic Messages conversations and tools. Messages are decoded on demand."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec
import orjson

from turngate.dialects.messages_roundtrip import call_id_from_wire, decode_signature, unwrap_arguments
from turngate.dialects.wire import (
    ABSENT,
    DECODE_ERRORS,
    decode_text,
    describe_error,
    function_tool,
    is_given,
    placeholder,
    require_shallow,
)
from turngate.errors import BadRequest
from turngate.types import History, Message, Tool, ToolCall

_ROLES = ("user", "assistant", "system")
# Nearly every client starts a message in one of these forms, so most roles can be read without decoding the message.
_ROLE_BEGINNINGS = tuple((f'{{"role":{space}"{role}"'.encode(), role) for space in ("", " ") for role in _ROLES)
_ERROR_PREFIXES = ("error", "<error", "<tool_use_error")


class _Block(msgspec.Struct):
    """A content block of any type, with the fields of all types."""

    type: str = ""
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = ABSENT
    tool_use_id: str | None = None
    content: str | list[_Block] | None = None
    is_error: bool | None = None
    tool_name: str | None = None  # in a tool_reference
    tool: _ToolChange | None = None  # in a tool_addition or tool_removal
    source: msgspec.Raw = ABSENT  # in an image or document


class _ToolChange(msgspec.Struct):
    type: str = ""
    name: str = ""
    definition: msgspec.Raw = ABSENT


class _WireMessage(msgspec.Struct):
    role: str
    content: str | list[_Block] | None = None


class _RoleOnly(msgspec.Struct):
    """A message, decoded only for its role."""

    role: str


class _WireTool(msgspec.Struct):
    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    input_examples: list[Any] | None = None
    defer_loading: bool | None = None


_messages = msgspec.json.Decoder(list[_WireMessage])
_role_only = msgspec.json.Decoder(_RoleOnly)
_tools = msgspec.json.Decoder(list[_WireTool])
_tool = msgspec.json.Decoder(_WireTool)


class MessagesHistory:
    """The messages of one request, grouped into turns. Each turn is decoded on demand.

    As in Anthropic's API, consecutive user messages form one turn, and so do consecutive assistant messages. `before` is the history of
    an earlier request whose messages are a prefix of `items`.
    """

    def __init__(
        self,
        items: Sequence[bytes],
        tools: MessagesTools | None = None,
        system: str = "",
        before: History | None = None,
    ) -> None:
        self.items = items
        self._tools = tools
        self._system = system
        # The indexes of each turn's messages in the request. The system prompt has none.
        self._indexes: list[tuple[int, ...]] = []
        self._roles: list[str] = []
        self.raws: list[bytes] = []
        self.last = ""  # role of the last message
        if isinstance(before, MessagesHistory) and before._system == system:
            self._indexes, self._roles, self.raws = before._indexes.copy(), before._roles.copy(), before.raws.copy()
            self.last = before.last
            self._add(len(before.items))
            return
        if system:
            self.raws.append(orjson.dumps({"role": "system", "content": system}))
            self._indexes.append(())
            self._roles.append("system")
        self._add(0)

    def extend(self, items: Sequence[bytes]) -> MessagesHistory:
        return MessagesHistory(items, self._tools, self._system, self)

    def _add(self, start: int) -> None:
        """Add messages to the turns, starting with the message at index `start`."""
        turn = self.raws[-1:]  # the messages of the last turn
        added: list[int] = []  # the indexes of the messages that were added to this turn
        for index in range(start, len(self.items)):
            raw = self.items[index]
            role = _read_role(raw, index)
            if role == "system" and _is_option_only(raw):
                continue
            if role == self.last and role != "system":
                turn.append(raw)
                added.append(index)
            else:
                self._end(turn, added)
                turn, added = [raw], []
                self.raws.append(raw)
                self._indexes.append((index,))
                self._roles.append(role)
            self.last = role
        self._end(turn, added)

    def _end(self, turn: list[bytes], added: list[int]) -> None:
        if added:
            self.raws[-1] = b",".join(turn)
            self._indexes[-1] += tuple(added)

    def decode(self, index: int) -> tuple[Message, ...]:
        places = [f"messages.{n}" for n in self._indexes[index]] or ["system"]
        try:
            wires = _messages.decode(b"[" + self.raws[index] + b"]")
        except DECODE_ERRORS as error:
            where = places[_find_item(error) or 0]
            raise BadRequest(f"{where}: {_describe_item_error(error)}", param=where) from None
        blocks = [
            (block, f"{where}.content.{m}")
            for wire, where in zip(wires, places, strict=True)
            for m, block in enumerate(_blocks_of(wire))
        ]
        role = self._roles[index]
        # If a message has two `role` fields, `_read_role` reads the first and the decoder reads the last.
        for wire, where in zip(wires, places, strict=True):
            if wire.role != role:
                raise BadRequest(f"{where}.role is set twice; send it once", param=f"{where}.role")
        if role == "assistant":
            return (_decode_assistant(blocks),)
        return tuple(_decode_user(blocks, self._tools)) if role == "user" else (_decode_system(blocks, self._tools),)


class MessagesTools:
    """The tools of one request."""

    replaceable = False

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._known: dict[str, tuple[Tool, bool]] | None = None

    def decode(self) -> tuple[Tool, ...]:
        """Return the tools to declare at the start of the prompt. A deferred tool is declared later, where a message refers to it."""
        return tuple(tool for tool, deferred in self._all().values() if not deferred)

    def find(self, name: str, where: str) -> Tool:
        """Return the tool with this name. Raise BadRequest if there is no such tool."""
        found = self._all().get(name)
        if found is None:
            raise BadRequest(f"{where} refers to {name!r}, which is not one of the tools", param=where)
        return found[0]

    def _all(self) -> dict[str, tuple[Tool, bool]]:
        """Return all tools by name, and whether each is deferred. Cache them, because messages may refer to tools thousands of times."""
        if self._known is None:
            try:
                wires = _tools.decode(self.raw)
            except DECODE_ERRORS as error:
                item = _find_item(error)
                where = "tools" if item is None else f"tools.{item}"
                raise BadRequest(f"{where}: {_describe_item_error(error)}", param=where) from None
            known: dict[str, tuple[Tool, bool]] = {}
            for n, wire in enumerate(wires):
                if wire.name in known:
                    raise BadRequest(f"tools contains two tools named {wire.name!r}; rename one", param="tools")
                known[wire.name] = _decode_tool(wire, f"tools.{n}"), bool(wire.defer_loading)
            self._known = known
        return self._known


def _find_item(error: Exception) -> int | None:
    """Return the index of the item that a decoding error is about, or None if the error does not name an item."""
    found = re.match(r"\[(\d+)\]", describe_error(error))
    return int(found[1]) if found else None


def _describe_item_error(error: Exception) -> str:
    """Describe a decoding error. Remove the leading list index, because it may differ from the index in the request."""
    return re.sub(r"^\[(\.\.\.|\d+)\]\.?(?=\w|:)", "", describe_error(error))


def _read_role(raw: bytes, index: int) -> str:
    for beginning, role in _ROLE_BEGINNINGS:
        if raw.startswith(beginning):
            return role
    where = f"messages.{index}"
    try:
        role = _role_only.decode(raw).role
    except DECODE_ERRORS as error:
        raise BadRequest(f"{where}: {describe_error(error)}", param=where) from None
    if role not in _ROLES:
        fix = "; send tool results as tool_result blocks in a user message" if role == "tool" else ""
        raise BadRequest(
            f"{where}.role must be one of user, assistant, system, not {role!r}{fix}", param=f"{where}.role"
        )
    return role


def _is_option_only(raw: bytes) -> bool:
    """Return whether a system message sets `output_config` but has no content. Such a message is ignored."""
    if b'"output_config"' not in raw:
        return False
    try:
        [wire] = _messages.decode(b"[" + raw + b"]")
    except DECODE_ERRORS:
        return False  # the error is raised when the message is decoded
    return not wire.content


def _blocks_of(wire: _WireMessage) -> list[_Block]:
    return [_Block("text", text=wire.content)] if isinstance(wire.content, str) else wire.content or []


def _why_unsupported(block: _Block, where: str) -> str:
    """Return the error message for an unsupported block, with a suggested fix."""
    match block.type:
        case "image":
            fix = "describe the image in a text block"
        case "document" | "search_result":
            fix = "send the text in a text block"
        case "":
            return f"{where}.type is missing; set the block's type"
        case _:
            return (
                f"{where}: {block.type!r} blocks are not supported here; use text, thinking or tool_use blocks in an assistant message, "
                "text or tool_result blocks in a user message, or leave the block out"
            )
    return f"{where}: {block.type!r} blocks are not supported here; {fix}"


def _decode_assistant(blocks: Sequence[tuple[_Block, str]]) -> Message:
    texts, thoughts, calls, signature, unsupported = [], [], [], "", ""
    for block, where in blocks:
        match block.type:
            case "text":
                texts.append(block.text or "")
            case "thinking":
                thoughts.append(block.thinking or decode_signature(block.signature or ""))
                signature = signature or block.signature or ""
            case "redacted_thinking":
                pass  # encrypted by a provider, so its text is unknown
            case "tool_use":
                calls.append(_decode_call(block, where))
            case _:
                unsupported = unsupported or _why_unsupported(block, where)
    # A text that other blocks interrupt continues in the next text block, so texts are joined without a separator.
    reasoning = "\n\n".join(thought for thought in thoughts if thought)
    return Message("assistant", "".join(texts), reasoning, tuple(calls), signature=signature, unsupported=unsupported)


def _decode_call(block: _Block, where: str) -> ToolCall:
    if not block.name:
        raise BadRequest(f"{where}.name is missing or empty", param=f"{where}.name")
    arguments = decode_text(bytes(block.input), f"{where}.input") if is_given(block.input) else "{}"
    return ToolCall(call_id_from_wire(block.id or ""), block.name, unwrap_arguments(arguments))


def _decode_user(blocks: Sequence[tuple[_Block, str]], tools: MessagesTools | None) -> list[Message]:
    """Decode the blocks of a user turn, keeping their order. Each tool result and each sequence of other blocks becomes a message.

    A sequence without text is left out, unless the turn contains nothing else.
    """
    messages: list[Message] = []
    for is_result, run in groupby(blocks, lambda placed: placed[0].type == "tool_result"):
        if is_result:
            messages += [_decode_result(block, where, tools) for block, where in run]
            continue
        text, unsupported = _decode_text(list(run), tools)
        if text or unsupported:
            messages.append(Message("user", text, unsupported=unsupported))
    return messages or [Message("user")]


def _decode_result(block: _Block, where: str, tools: MessagesTools | None) -> Message:
    if block.tool_use_id is None:
        raise BadRequest(f"{where}.tool_use_id is missing", param=f"{where}.tool_use_id")
    parts = [_Block("text", text=block.content)] if isinstance(block.content, str) else block.content or ()
    text, unsupported = _decode_text([(part, f"{where}.content.{n}") for n, part in enumerate(parts)], tools)
    if block.is_error and not text.lower().startswith(_ERROR_PREFIXES):
        text = f"Error: {text}" if text else "Error"  # chat templates have no other way to mark a result as an error
    return Message("tool", text, tool_call_id=call_id_from_wire(block.tool_use_id), unsupported=unsupported)


def _decode_system(blocks: Sequence[tuple[_Block, str]], tools: MessagesTools | None) -> Message:
    text, unsupported = _decode_text(blocks, tools)
    return Message("system", text, unsupported=unsupported)


def _decode_text(blocks: Sequence[tuple[_Block, str]], tools: MessagesTools | None) -> tuple[str, str]:
    """Return the text of the blocks, and an error message, which is empty if all blocks are supported."""
    texts, unsupported = [], ""
    for block, where in blocks:
        match block:
            case _Block(type="text"):
                texts.append(block.text or "")
            case _Block(type="tool_reference"):
                name = _require_name(block.tool_name, f"{where}.tool_name", tools)
                texts.append(_announce_tool(name, tools, where))
            case _Block(type="tool_addition", tool=_ToolChange(type="tool_reference", name=added)):
                name = _require_name(added, f"{where}.tool.name", tools)
                texts.append(_announce_tool(name, tools, where))
            case _Block(type="tool_addition", tool=_ToolChange(type="tool_definition", definition=raw)):
                texts.append(_describe_tool(_decode_definition(raw, f"{where}.tool.definition")))
            case _Block(type="tool_removal", tool=_ToolChange(type="tool_reference", name=removed)):
                name = _require_name(removed, f"{where}.tool.name", tools)
                texts.append(f"The tool {name} is no longer available.")
            case _:
                texts.append(placeholder(block.type, bytes(block.source)))
                unsupported = unsupported or _why_unsupported(block, where)
    return "\n".join(text for text in texts if text), unsupported


def _require_name(name: str | None, where: str, tools: MessagesTools | None) -> str:
    if not name and tools is not None:  # stored messages of earlier versions may lack it
        raise BadRequest(f"{where} is missing or empty", param=where)
    return name or ""


def _announce_tool(name: str, tools: MessagesTools | None, where: str) -> str:
    """Return the text that announces a tool to the model: its definition, or only its name if `tools` is None.

    `tools` is None for stored messages and for requests without tools.
    """
    return f"The tool {name} is available now." if tools is None else _describe_tool(tools.find(name, where))


def _describe_tool(tool: Tool) -> str:
    """Return the text that declares a tool in the middle of a conversation."""
    return f"<function>{json.dumps(tool.wire['function'], ensure_ascii=False)}</function>"


def _decode_definition(raw: bytes | msgspec.Raw, where: str) -> Tool:
    """Decode a tool that a message defines."""
    try:
        wire = _tool.decode(raw)
    except DECODE_ERRORS as error:
        raise BadRequest(f"{where}: {describe_error(error)}", param=where) from None
    return _decode_tool(wire, where)


def _decode_tool(wire: _WireTool, where: str) -> Tool:
    if wire.type not in (None, "custom"):
        raise BadRequest(
            f"{where}.type: tools of type {wire.type!r} are not supported (Anthropic's built-in tools need Anthropic's own models or "
            "servers); remove the tool, or declare a tool of type 'custom' with a name and an input_schema",
            param=f"{where}.type",
        )
    if not wire.name:
        raise BadRequest(f"{where}.name is missing or empty", param=f"{where}.name")
    if wire.input_schema is None:
        raise BadRequest(f"{where}.input_schema is missing", param=f"{where}.input_schema")
    schema = {**wire.input_schema, "examples": wire.input_examples} if wire.input_examples else wire.input_schema
    return function_tool(wire.name, wire.description, require_shallow(schema, f"{where}.input_schema"))
