"""Anthropic Messages, the way back: replies, streamed and whole, models and errors. Called by `messages.py` alone.

What is handed out here comes back with the next request: call ids, signatures of thinking, and arguments that are no JSON object
have one place each that writes them and reads them again. Events of a stream are templates with holes, since a reply has ten of them
besides its text.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import zlib
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Literal

import msgspec
import orjson

from turngate.errors import (
    BadRequest,
    Conflict,
    ContextOverflow,
    EngineBusy,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    NotFound,
    Stopping,
    TooLarge,
    TurngateError,
    Unauthorized,
    Unprocessable,
)
from turngate.types import Call, CallDelta, Delta, Done, Json, KeepAlive, Message, ReplyEvent, ToolCall, Usage

_OWN_CALL_ID = re.compile(r"toolu_([0-9a-f]{24})")
_INVALID_JSON = "INVALID_JSON"  # Anthropic's own advice for what is no JSON object but has to travel as one
_TEXT, _DIGEST = "tg1.p", "tg1.d"  # signatures: the thinking itself, where it is not shown; else a digest of it
_PACKED = "tg1.t"  # the thinking itself as it was once written, compressed
_MAX_UNPACK_RATIO = 16  # times that such a one may swell: a small request must not unpack into a large one
_MAX_DEPTH = 100  # levels of arguments that clients can be trusted to read


class ThreadsUnsupported(BadRequest):
    """By this code Anthropic's own tool runner knows to send the whole conversation instead."""

    kind = "thread_unsupported_request"


class MessagesReplyOptions(msgspec.Struct, frozen=True):
    """What a reply has to know of its request."""

    hidden: bool = False  # thinking is not to be shown
    edits: bool = False  # the request spoke of context edits


# ── what comes back ─────────────────────────────────────────────────────────────────────────────────────────────────


def call_id_to_wire(call: str) -> str:
    """A call's id as Anthropic's clients know ids. Those of other providers stay as they are."""
    return "toolu_" + call.removeprefix("call_") if call.startswith("call_") else call


def call_id_from_wire(wire: str) -> str:
    """The id again that the call had with us."""
    ours = _OWN_CALL_ID.fullmatch(wire)
    return f"call_{ours[1]}" if ours else wire


def wrap_arguments(arguments: str) -> str:
    """Arguments as the JSON object that clients insist on, in the model's own spelling."""
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        value = None
    if isinstance(value, dict) and set(value) != {_INVALID_JSON} and not _is_too_deep(value, arguments):
        return arguments or "{}"
    return orjson.dumps({_INVALID_JSON: arguments}).decode()


def _is_too_deep(value: Json, text: str) -> bool:
    """Whether it is nested deeper than clients can read."""
    level = [value] if text.count("[") + text.count("{") > _MAX_DEPTH else []
    depth = 0
    while level and depth <= _MAX_DEPTH:
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level, depth = [child for children in inner for child in children], depth + 1
    return depth > _MAX_DEPTH


def unwrap_arguments(arguments: str) -> str:
    if _INVALID_JSON not in arguments:
        return arguments
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    text = value.get(_INVALID_JSON) if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else arguments


def encode_signature(thinking: str, *, hidden: bool) -> str:
    """Our signature under some thinking. It proves nothing: what an agent gives back is only ever context."""
    if hidden:
        return _TEXT + base64.urlsafe_b64encode(thinking.encode()).decode()
    return _DIGEST + base64.urlsafe_b64encode(blake2b(thinking.encode(), digest_size=24).digest()).decode()


def decode_signature(signature: str) -> str:
    """The thinking that was not shown, if this signature holds it."""
    if not signature.startswith((_TEXT, _PACKED)):
        return ""
    try:
        raw = base64.urlsafe_b64decode(signature[len(_TEXT) :])
        if signature.startswith(_TEXT):
            return raw.decode()
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(raw, _MAX_UNPACK_RATIO * len(raw) or 1).decode()
    except (binascii.Error, zlib.error, ValueError):
        return ""  # somebody else's, or damaged: it says nothing
    return text if unpacking.eof else ""


# ── replies ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def encode_reply(call: Call, done: Done) -> bytes:
    asked = _options_of(call)
    message = {
        **_reply_head(call),
        **_stop_fields(done),
        "content": _build_content(done.message, asked),
        "usage": _usage_to_wire(done.usage),
    }
    return orjson.dumps({**message, **_context_management(asked)})


def _event(name: str, fields: bytes = b"") -> bytes:
    """A template. `%b` is JSON that is put in as it is, `%d` a number."""
    event = name.encode()
    return b'event: %b\ndata: {"type":"%b"%b}\n\n' % (event, event, fields)


_MESSAGE_START = _event("message_start", b',"message":%b')
_PING = _event("ping")
_TEXT_START = _event("content_block_start", b',"index":%d,"content_block":{"type":"text","text":""}')
_TEXT_DELTA = _event("content_block_delta", b',"index":%d,"delta":{"type":"text_delta","text":%b}')
_THINKING_START = _event(
    "content_block_start", b',"index":%d,"content_block":{"type":"thinking","thinking":"","signature":""}'
)
_THINKING_DELTA = _event("content_block_delta", b',"index":%d,"delta":{"type":"thinking_delta","thinking":%b}')
_SIGNATURE = _event("content_block_delta", b',"index":%d,"delta":{"type":"signature_delta","signature":%b}')
_TOOL_USE = (  # all of it, with its arguments in one piece
    _event("content_block_start", b',"index":%d,"content_block":{"type":"tool_use","id":%b,"name":%b,"input":{}}')
    + _event("content_block_delta", b',"index":%d,"delta":{"type":"input_json_delta","partial_json":%b}')
)
_BLOCK_STOP = _event("content_block_stop", b',"index":%d')
_MESSAGE_STOP = _event("message_delta", b",%b") + _event("message_stop")


class MessagesStream:
    """One streamed reply as server-sent events."""

    media = "text/event-stream; charset=utf-8"

    def __init__(self, call: Call) -> None:
        self._call = call
        self._asked = _options_of(call)
        self._index = 0
        self._open: Literal["", "text", "thinking"] = ""
        self._thought: list[str] = []  # of the block that is open

    def begin(self) -> bytes:
        # How long the prompt is turns out when it is rendered; the last event but one tells it.
        return _MESSAGE_START % orjson.dumps({**_reply_head(self._call), "usage": _usage_to_wire(None)})

    def event(self, event: ReplyEvent) -> bytes:
        match event:
            case Delta(kind="content", text=text):
                return self._opened("text") + _TEXT_DELTA % (self._index, orjson.dumps(text))
            case Delta(kind="reasoning", text=text):
                opened = self._opened("thinking")
                self._thought.append(text)
                return opened if self._asked.hidden else opened + _THINKING_DELTA % (self._index, orjson.dumps(text))
            case Delta(text=text):  # a signature
                return self._opened("thinking") + self._closed(text)
            case CallDelta(call=call):
                return self._closed() + self._tool_use(call)
            case KeepAlive():
                return _PING
            case Done() as done:
                return self._closed() + self._over(done)

    def error(self, error: TurngateError) -> bytes:
        return b"event: error\ndata: " + error_body(error) + b"\n\n"

    def _opened(self, kind: Literal["text", "thinking"]) -> bytes:
        if self._open == kind:
            return b""
        closed = self._closed()
        self._open = kind
        return closed + (_TEXT_START if kind == "text" else _THINKING_START) % self._index

    def _closed(self, signature: str = "") -> bytes:
        if not self._open:
            return b""
        signed = b""
        if self._open == "thinking":
            signature = signature or encode_signature("".join(self._thought), hidden=self._asked.hidden)
            signed = _SIGNATURE % (self._index, orjson.dumps(signature))
        self._open, self._thought = "", []
        return signed + self._stop()

    def _tool_use(self, call: ToolCall) -> bytes:
        name, arguments = orjson.dumps(call.name), orjson.dumps(wrap_arguments(call.arguments))
        used = _TOOL_USE % (self._index, orjson.dumps(call_id_to_wire(call.id)), name, self._index, arguments)
        return used + self._stop()

    def _stop(self) -> bytes:
        self._index += 1
        return _BLOCK_STOP % (self._index - 1)

    def _over(self, done: Done) -> bytes:
        end = {"delta": _stop_fields(done), "usage": _usage_to_wire(done.usage), **_context_management(self._asked)}
        return _MESSAGE_STOP % orjson.dumps(end)[1:-1]


def _options_of(call: Call) -> MessagesReplyOptions:
    return call.reply_options if isinstance(call.reply_options, MessagesReplyOptions) else MessagesReplyOptions()


def _reply_head(call: Call) -> dict[str, Json]:
    return {
        "id": f"msg_{os.urandom(12).hex()}",
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _build_content(message: Message, asked: MessagesReplyOptions) -> list[Json]:
    blocks: list[Json] = []
    if message.reasoning or message.signature:
        shown = "" if asked.hidden else message.reasoning
        signature = message.signature or encode_signature(message.reasoning, hidden=asked.hidden)
        blocks.append({"type": "thinking", "thinking": shown, "signature": signature})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        arguments = orjson.Fragment(wrap_arguments(call.arguments))
        blocks.append({"type": "tool_use", "id": call_id_to_wire(call.id), "name": call.name, "input": arguments})
    return blocks


def _stop_fields(done: Done) -> dict[str, Json]:
    match done:
        case Done(finish="tool_calls"):
            return {"stop_reason": "tool_use", "stop_sequence": None}
        case Done(finish="length"):
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        case Done(stopped_by=stop) if stop:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        case _:
            return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage_to_wire(usage: Usage | None) -> dict[str, Json]:
    """Numbers that are not known are 0, since clients insist on numbers."""
    usage = usage or Usage(0, 0)
    details = {"output_tokens_details": {"thinking_tokens": usage.reasoning_tokens}} if usage.reasoning_tokens else {}
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        **details,
    }


def _context_management(asked: MessagesReplyOptions) -> dict[str, Json]:
    """The conversation is never edited behind the agent's back, and it is told so where it allowed it."""
    return {"context_management": {"applied_edits": []}} if asked.edits else {}


def encode_models(names: Sequence[str], created: int) -> bytes:
    data = [_model_to_wire(name, created) for name in names]
    first, last = (names[0], names[-1]) if names else (None, None)
    return orjson.dumps({"data": data, "has_more": False, "first_id": first, "last_id": last})


def encode_model(name: str, created: int) -> bytes:
    return orjson.dumps(_model_to_wire(name, created))


def _model_to_wire(name: str, created: int) -> dict[str, Json]:
    day = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": day, "lifecycle": "active"}


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def status_and_type(error: TurngateError) -> tuple[int, str]:
    match error:
        case BadRequest() | Unprocessable() | EngineRejected():
            return 400, "invalid_request_error"
        case Unauthorized():
            return 401, "authentication_error"
        case Conflict():
            # Anthropic's clients take 409 for a lock that will be free in a moment; a session that is over stays so.
            return 403, "permission_error"
        case NotFound():
            return 404, "not_found_error"
        case TooLarge():
            return 413, "request_too_large"
        case EngineBusy():
            return 429, "rate_limit_error"
        case EngineTimeout():
            return 504, "timeout_error"
        case EngineUnavailable() | Stopping():
            return 529, "overloaded_error"
        case _:
            return 500, "api_error"


def error_body(error: TurngateError) -> bytes:
    body: dict[str, Json] = {"type": status_and_type(error)[1], "message": _error_message(error)}
    if isinstance(error, ThreadsUnsupported):
        body["details"] = {"error_code": error.kind, "unsupported": ["thread"]}
    return orjson.dumps({"type": "error", "error": body, "request_id": None})


def _error_message(error: TurngateError) -> str:
    """An overflow has to be told in these very words, or agents do not know that they should compact."""
    match error:
        case ContextOverflow(limit=int(limit), size=int(size)):
            return f"prompt is too long: {size} tokens > {limit} maximum"
        case ContextOverflow():
            return f"prompt is too long: {error.message}"
        case _:
            return error.message
