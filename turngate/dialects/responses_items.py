"""Items of stored OpenAI responses: rebuild them from a trace, assign ids to them, and list them page by page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import orjson

from turngate.dialects.base import EarlierReply
from turngate.dialects.responses_history import ResponsesHistory, encode_reasoning, reply_mark
from turngate.dialects.wire import field_error
from turngate.errors import BadRequest
from turngate.types import Json, Message

RESPONSE_PREFIX = "resp_tg"
_INPUT_MARK = "_in"  # in the id of an input item that was sent without an id
PAGE_SIZE, _MAX_PAGE = 20, 100


class _Output(msgspec.Struct):
    output: list[msgspec.Raw]


class _Echo(msgspec.Struct):
    instructions: str | None = None


class _ItemId(msgspec.Struct):
    id: str | None = None
    type: str | None = None


_output = msgspec.json.Decoder(_Output)
_echo = msgspec.json.Decoder(_Echo)
_item_id = msgspec.json.Decoder(_ItemId)
_raws = msgspec.json.Decoder(list[msgspec.Raw])


class ItemPage(msgspec.Struct, frozen=True):
    """A client's request for one page of a list: up to `limit` items after the item with the id `after`."""

    after: str = ""
    limit: int = PAGE_SIZE
    order: Literal["asc", "desc"] = "desc"


def response_of_item(item_id: str) -> str:
    """Return the id of the response that an item belongs to, or an empty string if the gateway did not assign the item's id."""
    mark = reply_mark(item_id) or item_id.partition(_INPUT_MARK)[2][:24]
    return RESPONSE_PREFIX + mark if len(mark) == 24 else ""


def split_items(raw: bytes) -> list[bytes]:
    """Split a JSON list into its items, each as raw JSON."""
    return [bytes(item) for item in _raws.decode(raw)]


def read_output(tail: bytes) -> list[bytes]:
    """Return the output items of a stored response. `tail`, the last part of its JSON (see `ReplyRecord`), starts with a comma."""
    return [bytes(item) for item in _output.decode(b'{"":0' + tail).output]


def rebuild_reply(echo: bytes, tools: bytes, path: Sequence[bytes], output: Sequence[bytes]) -> EarlierReply:
    """Rebuild a stored response. `echo` and `tools` come from its `ReplyRecord`.

    `path` contains the recorded input items. If the request had instructions, they are the first item.
    """
    own = _echo.decode(b"{" + echo + b"}").instructions
    items = list(path[1:] if own else path)
    if tools != b"[]":
        items.insert(0, b'{"type":"additional_tools","role":"developer","tools":' + tools + b"}")
    instructions = path[0] if own else b""
    return EarlierReply(ResponsesHistory(items, instructions), output)


def list_input(reply: EarlierReply, response_id: str) -> list[bytes]:
    """Return the input items of a stored response, oldest first. An item without an id gets one."""
    mark = response_id.removeprefix(RESPONSE_PREFIX)
    return [_add_id(item, f"{mark}{n:02x}") for n, item in enumerate(reply.history.items)]


def index_items(items: Sequence[bytes]) -> dict[str, bytes]:
    """Return the items by id. If several items have the same id, keep the first one."""
    return {item_id: item for item in reversed(items) if (item_id := _item_id.decode(item).id)}


def encode_message(message: Message) -> list[bytes]:
    """Encode a message as items, for messages that arrived in another dialect or whose own items are not stored."""
    if message.role == "tool":
        return [
            orjson.dumps({"type": "function_call_output", "call_id": message.tool_call_id, "output": message.content})
        ]
    if message.role != "assistant":
        part = {"type": "input_text", "text": message.content}
        return [orjson.dumps({"type": "message", "role": message.role, "content": [part]})]
    items: list[Json] = []
    if message.reasoning or message.signature:
        items.append(
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": message.reasoning}] if message.reasoning else [],
                "encrypted_content": message.signature or encode_reasoning(message.reasoning),
            }
        )
    if message.content or not message.tool_calls:
        text: Json = {"type": "output_text", "text": message.content, "annotations": []}
        items.append({"type": "message", "role": "assistant", "status": "completed", "content": [text]})
    items += [
        {
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        for call in message.tool_calls
    ]
    return [orjson.dumps(item) for item in items]


def read_page(after: str = "", limit: int = PAGE_SIZE, order: Literal["asc", "desc"] = "desc") -> ItemPage:
    if not 1 <= limit <= _MAX_PAGE:
        raise field_error("limit", f"must be an integer from 1 to {_MAX_PAGE}, not {limit}")
    return ItemPage(after, limit, order)


def encode_page(items: Sequence[bytes], page: ItemPage) -> bytes:
    """Encode one page of a list of items. `items` are ordered oldest first."""
    ordered = list(items if page.order == "asc" else reversed(items))
    ids = [_item_id.decode(item).id or "" for item in ordered]
    start = 0
    if page.after:
        if page.after not in ids:
            raise BadRequest(
                f"after: no input item has the id {page.after[:200]!r}; use the last_id of the previous page",
                param="after",
            )
        start = ids.index(page.after) + 1
    end = start + page.limit
    chosen = ids[start:end]
    return orjson.dumps(
        {
            "object": "list",
            "data": [orjson.Fragment(item) for item in ordered[start:end]],
            "first_id": chosen[0] if chosen else None,
            "last_id": chosen[-1] if chosen else None,
            "has_more": end < len(ordered),
        }
    )


def encode_deleted(response_id: str) -> bytes:
    return orjson.dumps({"id": response_id, "object": "response", "deleted": True})


def _add_id(item: bytes, suffix: str) -> bytes:
    """Complete an item for a list: add a missing type or id, and convert string content to a list of parts."""
    fields: dict[str, Json] = msgspec.json.decode(item)
    if not fields.get("type"):
        fields = {"type": "message", **fields}
    if isinstance(text := fields.get("content"), str):
        kind = "output_text" if fields.get("role") == "assistant" else "input_text"
        fields["content"] = [{"type": kind, "text": text}]
    if not fields.get("id"):
        prefix = "msg" if fields["type"] == "message" else "item"
        fields = {"id": f"{prefix}{_INPUT_MARK}{suffix}", **fields}
    return msgspec.json.encode(fields)
