"""Encoding of Anthropic Messages replies (streamed or not), models and errors.

Even a short reply has about ten stream events. For speed, they are encoded with templates.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal, NotRequired, TypedDict

import msgspec
import orjson

from turngate.dialects.messages_roundtrip import call_id_to_wire, encode_signature, wrap_arguments
from turngate.errors import (
    BadRequest,
    Conflict,
    ContextOverflow,
    EngineBusy,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    Forbidden,
    NotFound,
    QuotaExceeded,
    Stopping,
    TooLarge,
    TurngateError,
    Unauthorized,
    Unprocessable,
)
from turngate.types import Call, CallDelta, Delta, Done, Json, KeepAlive, Message, ReplyEvent, ToolCall, Usage


class ThreadsUnsupported(BadRequest):
    """The request continues a stored conversation, which is not supported.

    After this error, Anthropic's tool runner sends the whole conversation instead.
    """

    kind = "thread_unsupported_request"


class MessagesReplyOptions(msgspec.Struct, frozen=True):
    """The fields of a request that affect how its reply is encoded."""

    # none: no thinking blocks; hidden: thinking blocks without text; shown: thinking blocks with text
    thinking: Literal["none", "hidden", "shown"] = "none"
    edits: bool = False  # the request sets `context_management`, so the reply reports context edits

    @property
    def hides_text(self) -> bool:
        return self.thinking == "hidden"


# ── replies ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def encode_reply(call: Call, done: Done) -> bytes:
    options = _options_of(call)
    message = {
        **_reply_head(call),
        **_stop_fields(done),
        "content": _build_content(done.message, options),
        "usage": _usage_to_wire(done.usage),
    }
    return orjson.dumps({**message, **_context_management(options)})


def _event(name: str, fields: bytes = b"") -> bytes:
    """Build the template of an event. In `fields`, `%b` is a placeholder for JSON and `%d` for a number."""
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
_TOOL_USE = (  # all events of a call; one delta contains the complete arguments
    _event("content_block_start", b',"index":%d,"content_block":{"type":"tool_use","id":%b,"name":%b,"input":{}}')
    + _event("content_block_delta", b',"index":%d,"delta":{"type":"input_json_delta","partial_json":%b}')
)
_BLOCK_STOP = _event("content_block_stop", b',"index":%d')
_MESSAGE_STOP = _event("message_delta", b",%b") + _event("message_stop")


class MessagesStream:
    """Encoder for one reply, streamed as server-sent events."""

    media = "text/event-stream; charset=utf-8"

    def __init__(self, call: Call) -> None:
        self._call = call
        self._options = _options_of(call)
        self._index = 0
        self._open: Literal["", "text", "thinking"] = ""
        self._thinking: list[str] = []  # the text of the open thinking block

    def begin(self, usage: Usage | None = None) -> bytes:
        return _MESSAGE_START % orjson.dumps({**_reply_head(self._call), "usage": _usage_to_wire(usage)})

    def event(self, event: ReplyEvent) -> bytes:
        match event:
            case Delta(kind="content", text=text):
                return self._open_block("text") + _TEXT_DELTA % (self._index, orjson.dumps(text))
            case Delta() if self._options.thinking == "none":  # thinking, or its signature
                return b""
            case Delta(kind="reasoning", text=text):
                opened = self._open_block("thinking")
                self._thinking.append(text)
                shown = b"" if self._options.hides_text else _THINKING_DELTA % (self._index, orjson.dumps(text))
                return opened + shown
            case Delta(text=text):  # a signature of the thinking
                return self._open_block("thinking") + self._close_block(text)
            case CallDelta(call=call):
                return self._close_block() + self._tool_use(call)
            case KeepAlive():
                return _PING
            case Done() as done:
                return self._close_block() + self._finish(done)

    def error(self, error: TurngateError) -> bytes:
        return b"event: error\ndata: " + error_body(error) + b"\n\n"

    def _open_block(self, kind: Literal["text", "thinking"]) -> bytes:
        if self._open == kind:
            return b""
        closed = self._close_block()
        self._open = kind
        return closed + (_TEXT_START if kind == "text" else _THINKING_START) % self._index

    def _close_block(self, signature: str = "") -> bytes:
        if not self._open:
            return b""
        signed = b""
        if self._open == "thinking":
            signature = signature or encode_signature("".join(self._thinking), hidden=self._options.hides_text)
            signed = _SIGNATURE % (self._index, orjson.dumps(signature))
        self._open, self._thinking = "", []
        return signed + self._stop()

    def _tool_use(self, call: ToolCall) -> bytes:
        name, arguments = orjson.dumps(call.name), orjson.dumps(wrap_arguments(call.arguments))
        used = _TOOL_USE % (self._index, orjson.dumps(call_id_to_wire(call.id)), name, self._index, arguments)
        return used + self._stop()

    def _stop(self) -> bytes:
        self._index += 1
        return _BLOCK_STOP % (self._index - 1)

    def _finish(self, done: Done) -> bytes:
        end = {"delta": _stop_fields(done), "usage": _usage_to_wire(done.usage), **_context_management(self._options)}
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


def _build_content(message: Message, options: MessagesReplyOptions) -> list[Json]:
    blocks: list[Json] = []
    if options.thinking != "none" and (message.reasoning or message.signature):
        shown = "" if options.hides_text else message.reasoning
        signature = message.signature or encode_signature(message.reasoning, hidden=options.hides_text)
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
    """Encode token counts. Encode unknown counts as 0, because clients require numbers."""
    usage = usage or Usage(0, 0)
    details = {"output_tokens_details": {"thinking_tokens": usage.reasoning_tokens}} if usage.reasoning_tokens else {}
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        **details,
    }


def _context_management(options: MessagesReplyOptions) -> dict[str, Json]:
    """Return the field `context_management` if the request asked for it. The field always reports that no edits were applied."""
    return {"context_management": {"applied_edits": []}} if options.edits else {}


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
            # In Anthropic's API, a 409 means a temporary lock, so clients retry. Here, a conflict is permanent: for example, the session
            # has ended.
            return 403, "permission_error"
        case Forbidden():
            return 403, "permission_error"
        case NotFound():
            return 404, "not_found_error"
        case TooLarge():
            return 413, "request_too_large"
        case EngineBusy() | QuotaExceeded():
            return 429, "rate_limit_error"
        case EngineTimeout():
            return 504, "timeout_error"
        case EngineUnavailable() | Stopping():
            return 529, "overloaded_error"
        case _:
            return 500, "api_error"


class MessagesError(TypedDict):
    type: str
    message: str
    details: NotRequired[dict[str, Json]]


class MessagesErrorBody(TypedDict):
    type: Literal["error"]
    error: MessagesError
    request_id: None


def error_body(error: TurngateError) -> bytes:
    body: MessagesError = {"type": status_and_type(error)[1], "message": _error_message(error)}
    if isinstance(error, ThreadsUnsupported):
        body["details"] = {"error_code": error.kind, "unsupported": ["thread"]}
    whole: MessagesErrorBody = {"type": "error", "error": body, "request_id": None}
    return orjson.dumps(whole)


def _error_message(error: TurngateError) -> str:
    """Return the error's message. For a context overflow, it has a wording that agents recognize, so that they compact their history."""
    match error:
        case ContextOverflow(limit=int(limit), size=int(size)):
            return f"prompt is too long: {size} tokens > {limit} maximum"
        case ContextOverflow():
            return f"prompt is too long: {error.message}"
        case _:
            return error.message
