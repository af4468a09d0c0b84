"""Decode OpenAI Responses conversations: convert items to messages, on demand.

The format splits one turn of the model into several items: reasoning, text and calls. They are grouped here, so that a turn is compared and
decoded as one message. Consecutive items of the model belong to the same turn, unless the ids that the gateway assigned show that they come
from different replies. The ids also show which calls belong to the same turn if an agent has placed results between them.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from hashlib import blake2b

import msgspec
import orjson

from turngate.dialects.base import EarlierReplies
from turngate.dialects.openai import custom_input_to_arguments
from turngate.dialects.responses_tools import SEARCH, decode_tools, flat_name
from turngate.dialects.wire import ABSENT, DECODE_ERRORS, decode_arguments, describe_error, is_given, placeholder
from turngate.errors import BadRequest
from turngate.types import History, Message, Role, ToolCall

REASONING_PREFIX = "tg1."  # prefix of `encrypted_content` that this gateway created
WHOLE_INPUT_PREFIX = "ctcw"  # id prefix of custom-tool calls whose `input` is the model's complete arguments

_CALLS = frozenset({"function_call", "custom_tool_call", "tool_search_call"})
_RESULTS = frozenset({"function_call_output", "custom_tool_call_output", "tool_search_output"})
# Items of tools that the provider runs. The gateway cannot read them.
_HOSTED = frozenset(
    {
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "computer_call",
        "local_shell_call",
        "shell_call",
        "apply_patch_call",
        "mcp_call",
        "mcp_list_tools",
        "mcp_approval_request",
        "program",
    }
)
_HOSTED_RESULTS = frozenset(
    {
        "computer_call_output",
        "local_shell_call_output",
        "shell_call_output",
        "apply_patch_call_output",
        "mcp_approval_response",
        "program_output",
    }
)
# Items that are part of a model's turn, in addition to its messages.
_TURN = frozenset({"reasoning"}) | _CALLS | _HOSTED
_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class InvalidEncryptedContent(BadRequest):
    kind = "invalid_encrypted_content"


class ItemNotFound(BadRequest):
    """An item reference in the request has no id, or no item with its id is stored in the session."""

    status = 404
    kind = "item_not_found"


class _Head(msgspec.Struct):
    type: str | None = None
    role: str | None = None
    id: str | None = None


class _Part(msgspec.Struct, omit_defaults=True):
    type: str = ""
    text: str | None = None
    refusal: str | None = None
    encrypted_content: str | None = None
    image_url: msgspec.Raw = ABSENT
    file_id: msgspec.Raw = ABSENT
    file_url: msgspec.Raw = ABSENT
    file_data: msgspec.Raw = ABSENT
    input_audio: msgspec.Raw = ABSENT


class _Item(msgspec.Struct):
    type: str | None = None
    role: str | None = None
    id: str | None = None
    content: str | list[_Part] | None = None
    summary: list[_Part] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: msgspec.Raw = ABSENT
    input: str | None = None
    output: str | list[_Part] | None = None
    tools: msgspec.Raw = ABSENT

    @property
    def kind(self) -> str:
        return self.type or _default_type(self.role)


class _ToolsItem(msgspec.Struct):
    """An item, decoded only for its tools."""

    tools: list[msgspec.Raw] = []


_head = msgspec.json.Decoder(_Head)
_items = msgspec.json.Decoder(list[_Item])
_tools_item = msgspec.json.Decoder(_ToolsItem)


class ResponsesHistory:
    """The items of one request, grouped into messages. Each message is decoded on demand.

    `instructions` is a system message that precedes the items. `before` is the history of an earlier request whose items are a prefix of
    `items`. `earlier` finds stored items, to which the request may refer by id. The first `offset` items are not in the request itself but
    come from the earlier conversation that the request continues.
    """

    def __init__(
        self,
        items: Sequence[bytes],
        instructions: bytes = b"",
        before: History | None = None,
        *,
        earlier: EarlierReplies | None = None,
        offset: int = 0,
    ) -> None:
        self.items = items
        self._instructions = instructions
        self._earlier = earlier
        self._offset = offset
        self.offered: list[bytes] = []  # tools that were declared in items instead of the request's `tools` field
        self.search_outputs: list[bytes] = []  # items with results of the agent's own tool searches
        self._groups: list[tuple[int, ...]] = []  # item indexes of each group; the instructions have index -1
        self.raws: list[bytes] = []
        self._turn: int | None = None  # index of the open turn's group, to which items can still be added
        self._mark = ""  # reply mark of the open turn
        self._adjacent = False  # whether the previous item was part of a model turn
        if isinstance(before, ResponsesHistory) and before._instructions == instructions:
            self.offered, self.search_outputs = before.offered.copy(), before.search_outputs.copy()
            self._groups, self.raws = before._groups.copy(), before.raws.copy()
            self._turn, self._mark, self._adjacent = before._turn, before._mark, before._adjacent
            self._add(len(before.items))
            return
        if instructions:
            self._begin(-1, instructions)
        self._add(0)

    def extend(self, items: Sequence[bytes]) -> ResponsesHistory:
        return ResponsesHistory(items, self._instructions, self)

    def _add(self, start: int) -> None:
        """Add items to the groups, starting with the item at index `start`."""
        grown: dict[int, list[int]] = {}  # indexes of the items to add to each existing group
        resolved: dict[int, bytes] = {}  # the items that references stand for, by the index of the reference
        named: set[str] = set()  # the ids of the resolved references
        for n in range(start, len(self.items)):
            item = self.items[n]
            head = self._read(item, n)
            kind = head.type or _default_type(head.role)
            if kind == "item_reference":
                item = resolved[n] = self._resolve(n, head.id or "", named)
                head = self._read(item, n)
                kind = head.type or _default_type(head.role)
            if kind in _TURN or (kind == "message" and head.role == "assistant"):
                if self._belongs_to_turn(reply_mark(head.id) if head.id else ""):
                    assert self._turn is not None
                    grown.setdefault(self._turn, []).append(n)
                else:
                    self._turn = len(self._groups)
                    self._begin(n, item)
            elif kind == "additional_tools":
                self.offered += _read_tools(item, self._place(n))
            else:
                self._adjacent = False
                if kind not in _RESULTS:
                    self._turn = None  # a different speaker ends the turn
                elif kind == "tool_search_output":
                    self.search_outputs.append(item)
                self._begin(n, item)
        if resolved:
            self.items = [resolved.get(n, item) for n, item in enumerate(self.items)]
        for group, more in grown.items():
            self._groups[group] = (*self._groups[group], *more)
            self.raws[group] = b",".join([self.raws[group], *(self.items[n] for n in more)])

    def _resolve(self, n: int, item_id: str, named: set[str]) -> bytes:
        """Return the stored item with this id, and add the id to `named`, the ids that the request has already referenced."""
        if item_id in named:
            where = self._place(n)
            raise BadRequest(f"{where}: item {item_id!r} is referenced twice; leave this reference out", param=where)
        item = self._earlier.find_item(item_id) if self._earlier is not None else None
        if item is None:
            where = self._place(n)
            problem = (
                f"no item with id {item_id!r} is stored in this session (items of responses with store=false are not stored)"
                if item_id
                else "an item reference needs an id"
            )
            raise ItemNotFound(f"{where}: {problem}; send the item itself, with its type or role", param=where)
        named.add(item_id)
        return item

    def _belongs_to_turn(self, own: str) -> bool:
        """Return whether an item of the model belongs to the open turn, and update the state for the next item.

        `own` is the `reply_mark` of the item's id.
        """
        mark = self._mark
        same = own == mark or not (own and mark) if self._adjacent else own != "" and own == mark
        self._adjacent = True
        belongs = self._turn is not None and same
        self._mark = (mark or own) if belongs else own
        return belongs

    def _begin(self, n: int, item: bytes) -> None:
        self._groups.append((n,))
        self.raws.append(item)

    def decode(self, index: int) -> tuple[Message, ...]:
        places = [self._place(n) for n in self._groups[index]]
        try:
            items = _items.decode(b"[" + self.raws[index] + b"]")
        except DECODE_ERRORS as error:
            raise _item_error(error, places) from None
        if items[0].kind in _TURN or (items[0].kind == "message" and items[0].role == "assistant"):
            return (_decode_turn(items, places),)
        return (_decode_other(items[0], places[0]),)

    def list_searched_tools(self) -> list[bytes]:
        """Return the tools that the agent's tool searches found: one JSON list for each search."""
        return [b"[" + b",".join(_read_tools(item, "input")) + b"]" for item in self.search_outputs]

    def _read(self, item: bytes, n: int) -> _Head:
        try:
            return _head.decode(item)
        except DECODE_ERRORS as error:
            raise _item_error(error, [self._place(n)]) from None

    def _place(self, n: int) -> str:
        return f"input[{n - self._offset}]" if n >= self._offset else "previous_response_id"


def encode_reasoning(reasoning: str) -> str:
    """Encode reasoning for `encrypted_content`. The reasoning is not encrypted, because the agent may read it."""
    raw = reasoning.encode("utf-8", "surrogatepass")
    return REASONING_PREFIX + base64.urlsafe_b64encode(_checksum(raw) + raw).decode()


def decode_reasoning(value: str, where: str) -> str:
    try:
        raw = base64.urlsafe_b64decode(value.removeprefix(REASONING_PREFIX).encode())
        text = raw[8:].decode("utf-8", "surrogatepass")
    except (binascii.Error, ValueError):
        raw, text = b"", ""
    if raw[:8] != _checksum(raw[8:]):
        raise InvalidEncryptedContent(
            f"{where}.encrypted_content could not be verified; send it back unchanged, or leave the item out",
            param=f"{where}.encrypted_content",
        )
    return text


def _checksum(raw: bytes) -> bytes:
    return blake2b(raw, digest_size=8, person=b"tg1").digest()


def _default_type(role: str | None) -> str:
    """Return the type of an item without a `type` field, given its role."""
    return "message" if role else "item_reference"


def reply_mark(item_id: str) -> str:
    """Return the part of an item's id that all items of one reply have in common, or "" if the gateway did not assign the id."""
    return item_id.partition("_tg")[2][:24]


def _read_tools(item: bytes, where: str) -> list[bytes]:
    try:
        return [bytes(tool) for tool in _tools_item.decode(item).tools]
    except DECODE_ERRORS as error:
        raise _item_error(error, [where]) from None


def _item_error(error: Exception, places: list[str]) -> BadRequest:
    """Convert a decoding error to a `BadRequest`. `places` contains each decoded item's position in the request."""
    found = re.fullmatch(r"(?s)(?:\[(\d+)\])?\.?([\w.\[\]]*): (Expected .*)", describe_error(error))
    if found is None:
        return BadRequest(f"{places[0]}: {describe_error(error)}", param=places[0])
    where = places[int(found[1] or 0)] + (f".{found[2]}" if found[2] else "")
    return BadRequest(f"{where}: {found[3]}", param=where)


# ── the model's turns ──────────────────────────────────────────────────────────────────────────────────────────────


def _decode_turn(items: list[_Item], places: list[str]) -> Message:
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    signature = unsupported = ""
    for item, where in zip(items, places, strict=True):
        match item.kind:
            case "reasoning":
                text, kept = _read_reasoning(item, where)
                reasoning.append(text)
                signature = kept or signature
            case "message":
                texts, more = _read_texts(item.content, f"{where}.content")
                content += texts
                unsupported = unsupported or more
            case "function_call" | "custom_tool_call" | "tool_search_call":
                calls.append(_decode_call(item, where))
            case kind:
                unsupported = (
                    unsupported
                    or f"{where}.type: {kind!r} items are not supported, because they belong to the provider's own tools; leave them out"
                )
    # Text that was split by streaming is joined without a separator.
    return Message(
        "assistant", "".join(content), "".join(reasoning), tuple(calls), signature=signature, unsupported=unsupported
    )


def _read_reasoning(item: _Item, where: str) -> tuple[str, str]:
    """Return an item's reasoning, and the provider's signature for it (empty if it has none, or if the gateway encoded the reasoning)."""
    kept = item.encrypted_content or ""
    if kept.startswith(REASONING_PREFIX):
        return decode_reasoning(kept, where), ""
    if isinstance(item.content, str):
        return item.content, kept
    if item.content:
        return "".join(part.text or "" for part in item.content), kept
    return "\n\n".join(part.text or "" for part in item.summary or ()), kept


def _decode_call(item: _Item, where: str) -> ToolCall:
    if item.call_id is None:
        raise BadRequest(f"{where}.call_id is missing", param=f"{where}.call_id")
    if item.kind == "tool_search_call":
        return ToolCall(item.call_id, SEARCH, decode_arguments(bytes(item.arguments), f"{where}.arguments"))
    if not item.name:
        raise BadRequest(f"{where}.name is missing or empty", param=f"{where}.name")
    name = flat_name(item.namespace, item.name)
    if item.kind == "function_call":
        return ToolCall(item.call_id, name, decode_arguments(bytes(item.arguments), f"{where}.arguments"))
    if item.input is None:
        raise BadRequest(f"{where}.input is missing", param=f"{where}.input")
    if (item.id or "").startswith(WHOLE_INPUT_PREFIX):
        return ToolCall(item.call_id, name, item.input)
    return ToolCall(item.call_id, name, custom_input_to_arguments(item.input))


# ── other messages ──────────────────────────────────────────────────────────────────────────────────────────────────


def _decode_other(item: _Item, where: str) -> Message:
    match item.kind:
        case "message":
            role = _ROLES.get(item.role or "")
            if role is None:
                given = "" if item.role is None else f", not {item.role!r}"
                raise BadRequest(
                    f"{where}.role must be one of system, developer, user, assistant{given}",
                    param=f"{where}.role",
                )
            texts, unsupported = _read_texts(item.content, f"{where}.content")
            return Message(role, _join_texts(texts), unsupported=unsupported)
        case "agent_message":
            texts, unsupported = _read_texts(item.content, f"{where}.content")
            return Message("user", _join_texts(texts), unsupported=unsupported)
        case "function_call_output" | "custom_tool_call_output":
            texts, unsupported = _read_texts(item.output, f"{where}.output")
            return Message(
                "tool", _join_texts(texts), tool_call_id=_require_call_id(item, where), unsupported=unsupported
            )
        case "tool_search_output":
            tools = decode_tools(bytes(item.tools), f"{where}.tools") if is_given(item.tools) else []
            try:
                text = orjson.dumps([tool.wire for tool in tools]).decode()
            except orjson.JSONEncodeError as error:  # a number with more than 64 bits
                raise BadRequest(f"{where}.tools: {error}", param=f"{where}.tools") from None
            return Message("tool", text, tool_call_id=_require_call_id(item, where))
        case kind if kind in _HOSTED_RESULTS:
            unsupported = (
                f"{where}.type: {kind!r} items are not supported, because they belong to the provider's own tools; "
                "leave them out"
            )
            return Message("tool", tool_call_id=item.call_id or "", unsupported=unsupported)
        case kind:
            raise BadRequest(
                f"{where}.type {kind!r} is not supported; send only messages, reasoning, and calls of function, custom or tool-search "
                "tools with their outputs",
                param=f"{where}.type",
            )


def _require_call_id(item: _Item, where: str) -> str:
    if item.call_id is None:
        raise BadRequest(
            f"{where}.call_id is missing; a result needs the id of the call it answers", param=f"{where}.call_id"
        )
    return item.call_id


def _read_texts(content: str | list[_Part] | None, where: str) -> tuple[list[str], str]:
    """Return the texts of an item's content, and an error message, which is empty if all of the content is supported."""
    if content is None or isinstance(content, str):
        return [content or ""], ""
    texts = []
    unsupported = ""
    for n, part in enumerate(content):
        match part.type:
            case "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text":
                texts.append(part.text or "")
            case "refusal":
                texts.append(part.refusal or "")
            case "encrypted_content":  # in a message between agents: plain text that the model wrote as an argument
                texts.append(part.encrypted_content or "")
            case "input_image" | "input_file" | "input_audio":
                texts.append(placeholder(part.type, msgspec.json.encode(part)))
                why = f"{part.type!r} parts are not supported here; send text instead"
                unsupported = unsupported or f"{where}[{n}].type: {why}"
            case kind:
                raise BadRequest(f"{where}[{n}].type {kind!r} is not supported; send text", param=f"{where}[{n}].type")
    return texts, unsupported


def _join_texts(texts: list[str]) -> str:
    """Join texts so that each starts on a new line."""
    text = ""
    for more in texts:
        text += ("\n" if text and not text.endswith("\n") else "") + more
    return text
