"""Encoding of Gemini replies (streamed or not) and errors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NotRequired, TypedDict

import msgspec
import orjson

from turngate.dialects.gemini_history import RAW_ARGUMENTS, encode_signature
from turngate.dialects.wire import one_line
from turngate.errors import ContextOverflow, TurngateError
from turngate.types import Call, CallDelta, Delta, Done, Json, KeepAlive, Message, ReplyEvent, ToolCall, Usage

_RPC = "type.googleapis.com/google.rpc."
_MAX_DEPTH = 64  # the deepest nesting of arguments that every client can read


class GeminiReplyOptions(msgspec.Struct, frozen=True):
    """The options of a request that affect how its reply is encoded."""

    thoughts: bool = False  # include the model's reasoning in the reply
    sse: bool = True  # stream server-sent events; otherwise stream a JSON list


class GeminiStream:
    """Encoder for one streamed reply. Every chunk contains a part, because SDKs discard a reply that has a chunk without parts."""

    def __init__(self, call: Call) -> None:
        options = call.reply_options if isinstance(call.reply_options, GeminiReplyOptions) else GeminiReplyOptions()
        self.media = "text/event-stream" if options.sse else "application/json; charset=UTF-8"
        self._options = options
        self._head = _reply_head(call)
        self._reasoning: list[str] = []
        self._signed = False  # whether a signature or the first call was sent; no signature is needed after that
        self._started = False

    def begin(self, usage: Usage | None = None) -> bytes:
        return b"" if self._options.sse else b"["

    def event(self, event: ReplyEvent) -> bytes:
        match event:
            case Delta(kind="content", text=text):
                return self._chunk([{"text": text}])
            case Delta(kind="reasoning", text=text):
                self._reasoning.append(text)
                return self._chunk([{"text": text, "thought": True}]) if self._options.thoughts else b""
            case Delta(text=signature):
                self._signed = True
                return self._chunk([{"text": "", "thoughtSignature": signature}])
            case CallDelta(call=call):
                signature = call.signature or ("" if self._signed else _signature("".join(self._reasoning)))
                self._signed = True
                return self._chunk([_build_call_part(call, signature)])
            case KeepAlive():
                # Every client accepts whitespace. Some clients fail on a comment or on a chunk without a part.
                return b"\n"
            case Done() as done:
                return self._chunk([{"text": ""}], done) + (b"" if self._options.sse else b"]")

    def error(self, error: TurngateError) -> bytes:
        """Encode an error. In a stream of server-sent events, SDKs expect an error as a JSON object without `data:`."""
        body = orjson.dumps(error_body(error))
        return body + b"\n\n" if self._options.sse else self._comma() + body + b"]"

    def _chunk(self, parts: Sequence[Json], done: Done | None = None) -> bytes:
        body = orjson.dumps({**_build_reply(parts, done), **self._head})
        return b"data: " + body + b"\r\n\r\n" if self._options.sse else self._comma() + body

    def _comma(self) -> bytes:
        started, self._started = self._started, True
        return b",\r\n" if started else b""


def encode_reply(call: Call, done: Done) -> bytes:
    thoughts = isinstance(call.reply_options, GeminiReplyOptions) and call.reply_options.thoughts
    return orjson.dumps({**_build_reply(_build_parts(done.message, thoughts), done), **_reply_head(call)})


def _build_parts(message: Message, thoughts: bool) -> list[Json]:
    parts: list[Json] = []
    if thoughts and message.reasoning:
        parts.append({"text": message.reasoning, "thought": True})
    if message.content or message.signature:
        parts.append({"text": message.content})
    if message.signature:
        parts[-1]["thoughtSignature"] = message.signature
    for n, call in enumerate(message.tool_calls):
        ours = _signature(message.reasoning) if n == 0 and not message.signature else ""
        parts.append(_build_call_part(call, call.signature or ours))
    return parts or [{"text": ""}]


def _signature(reasoning: str) -> str:
    return encode_signature(reasoning) if reasoning else ""


def _build_call_part(call: ToolCall, signature: str) -> Json:
    part: Json = {"functionCall": {"id": call.id, "name": call.name, "args": _encode_arguments(call.arguments)}}
    return {**part, "thoughtSignature": signature} if signature else part


def _encode_arguments(arguments: str) -> Json:
    """Return a call's arguments as the model wrote them, but on one line.

    If they are not an object or are nested too deeply, return an object that contains their text. Empty arguments become an empty object.
    """
    if not arguments:
        return {}
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict) or _is_too_deep(value):
        return {RAW_ARGUMENTS: arguments}
    return orjson.Fragment(one_line(arguments))


def _is_too_deep(value: Json) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _build_reply(parts: Sequence[Json], done: Done | None) -> dict[str, Json]:
    candidate: dict[str, Json] = {"content": {"parts": parts, "role": "model"}, "index": 0}
    if done is None:
        return {"candidates": [candidate]}
    candidate["finishReason"] = _FINISH.get(done.finish, "STOP")
    reply: dict[str, Json] = {"candidates": [candidate]}
    if done.usage is not None:
        reply["usageMetadata"] = _usage_to_wire(done.usage)
    return reply


_FINISH = {"length": "MAX_TOKENS", "abort": "OTHER"}


def _usage_to_wire(usage: Usage) -> dict[str, Json]:
    wire = {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.completion_tokens - usage.reasoning_tokens,
        "totalTokenCount": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.cached_tokens:
        wire["cachedContentTokenCount"] = usage.cached_tokens
    if usage.reasoning_tokens:
        wire["thoughtsTokenCount"] = usage.reasoning_tokens
    return wire


def _reply_head(call: Call) -> dict[str, Json]:
    return {"modelVersion": call.model, "responseId": os.urandom(16).hex()}


# Maps our HTTP statuses to Google's codes and status names.
_STATUS = {
    400: (400, "INVALID_ARGUMENT"),
    401: (400, "INVALID_ARGUMENT"),
    404: (404, "NOT_FOUND"),
    409: (400, "FAILED_PRECONDITION"),
    413: (400, "INVALID_ARGUMENT"),
    422: (400, "INVALID_ARGUMENT"),
    429: (429, "RESOURCE_EXHAUSTED"),
    503: (503, "UNAVAILABLE"),
    504: (504, "DEADLINE_EXCEEDED"),
}


def error_status(error: TurngateError) -> tuple[int, str]:
    return _STATUS.get(error.status, (500, "INTERNAL"))


class GeminiError(TypedDict):
    code: int
    message: str
    status: str
    details: NotRequired[list[Json]]


class GeminiErrorBody(TypedDict):
    error: GeminiError


def error_body(error: TurngateError) -> GeminiErrorBody:
    code, status = error_status(error)
    body: GeminiError = {"code": code, "message": _error_message(error), "status": status}
    details = _error_details(error)
    return {"error": {**body, "details": details} if details else body}


def _error_message(error: TurngateError) -> str:
    if isinstance(error, ContextOverflow):
        size = "" if error.size is None else f" ({error.size})"
        limit = "" if error.limit is None else f" ({error.limit})"
        return f"The input token count{size} exceeds the maximum number of tokens allowed{limit}."
    if error.status == 401:
        return f"API key not valid. Please pass a valid API key. ({error.message})"
    return error.message


def _error_details(error: TurngateError) -> list[Json]:
    if error.status == 401:
        metadata = {"service": "generativelanguage.googleapis.com"}
        return [
            {"@type": _RPC + "ErrorInfo", "reason": "API_KEY_INVALID", "domain": "googleapis.com", "metadata": metadata}
        ]
    if error.status in (429, 503) and error.retry_safe:
        return [{"@type": _RPC + "RetryInfo", "retryDelay": "1s"}]
    if error.status == 400 and error.param and not isinstance(error, ContextOverflow):
        return [
            {
                "@type": _RPC + "BadRequest",
                "fieldViolations": [{"field": error.param, "description": error.message}],
            }
        ]
    return []
