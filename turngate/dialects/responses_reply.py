"""Encoding of OpenAI Responses replies, event by event. A reply that is not streamed consists of the response in the last event.

    created, in_progress → per item: added, its parts and deltas, done → completed, incomplete or failed

An item stays open while text of its kind arrives. A call arrives complete. Each item id contains a mark that all ids of the reply share, so
that `responses_history.py` recognizes the items of one turn when the agent sends them back.

Even a short reply has about a dozen events, three of which repeat fields of the request. For speed, events are encoded with templates. The
constant parts are encoded once, the fields of the request once for all calls that share them, and a text or an item once for all events
that contain it.
"""

from __future__ import annotations

import os
import time
from functools import cached_property

import msgspec
import orjson

from turngate.dialects.base import ReplyRecord
from turngate.dialects.openai import read_custom_input
from turngate.dialects.responses_history import WHOLE_INPUT_PREFIX, ResponsesHistory, encode_reasoning
from turngate.dialects.responses_tools import AgentTool, index_tools
from turngate.dialects.wire import one_line
from turngate.errors import ContextOverflow, TurngateError
from turngate.types import Call, CallDelta, Delta, Done, Json, KeepAlive, ReplyEvent, ToolCall, Usage


class OfferedTools:
    """The tools that the agent offered, which determine how each call is encoded. They are decoded when the model first calls a tool."""

    def __init__(self, lists: tuple[bytes, ...] = ()) -> None:
        self._lists = lists

    @cached_property
    def by_name(self) -> dict[str, AgentTool]:
        return index_tools(self._lists)


class ResponsesReplyOptions(msgspec.Struct, frozen=True):
    """The fields of a request that affect how its reply is encoded."""

    echo: bytes  # response fields that repeat the request, as a JSON object without its braces
    tools: OfferedTools
    summary: bool = False  # send reasoning as a summary
    encrypt_reasoning: bool = False  # also send reasoning as `encrypted_content`, which the agent sends back
    previous: str = ""  # id of the response that this one continues


# ── templates ───────────────────────────────────────────────────────────────────────────────────────────────────────
# `%b` is a placeholder for JSON (or, between quotes, for an id or a status) and `%d` for a number. The first placeholder of an event is its
# sequence number.


def _event(name: str, fields: bytes) -> bytes:
    event = name.encode()
    return b'event: response.%b\ndata: {"type":"response.%b","sequence_number":%%d,%b}\n\n' % (event, event, fields)


_HEAD = b'{"id":"resp_tg%b","object":"response","created_at":%d,"model":%b,"previous_response_id":%b,'
_RESPONSE = b'%b,"status":"%b","completed_at":%b,"error":%b,"incomplete_details":%b,"output":[%b],"usage":%b}'
_USAGE = (
    b'{"input_tokens":%d,"input_tokens_details":{"cached_tokens":%d,"cache_write_tokens":0},'
    b'"output_tokens":%d,"output_tokens_details":{"reasoning_tokens":%d},"total_tokens":%d}'
)
_MAX_TOKENS_REACHED = b'{"reason":"max_output_tokens"}'
_CREATED = _event("created", b'"response":%b')
_STATUS_EVENTS = {
    status: _event(status, b'"response":%b') for status in ("in_progress", "completed", "incomplete", "failed")
}

_ADDED = _event("output_item.added", b'"output_index":%d,"item":%b')
_DONE = _event("output_item.done", b'"output_index":%d,"item":%b')
_PLACE = b'"item_id":"%b","output_index":%d,'  # the position of an event inside an item


class _TextForm(msgspec.Struct, frozen=True):
    """The templates for the items and events of one kind of text: message, reasoning or summary."""

    prefix: bytes  # prefix of the item's id
    item: bytes  # placeholders: id, status and parts of a message; id, parts and signature of reasoning
    part: bytes
    part_added: bytes
    delta: bytes
    done: bytes
    part_done: bytes


def _build_text_form(
    prefix: bytes, item: bytes, part: bytes, events: tuple[str, str], index: bytes, more: bytes = b""
) -> _TextForm:
    """Build the templates for one kind of text.

    `events` is a pair of prefixes for the names of events: one for text (such as `output_text`), one for parts (such as `content_part`).
    `index` is the name of the field with the part's index, which is always 0.
    """
    place = _PLACE + b'"%b":0,' % index
    text_event, part_event = events
    return _TextForm(
        prefix,
        item,
        part,
        part_added=_event(f"{part_event}.added", place + b'"part":%b'),
        delta=_event(f"{text_event}.delta", place + b'"delta":%b' + more),
        done=_event(f"{text_event}.done", place + b'"text":%b' + more),
        part_done=_event(f"{part_event}.done", place + b'"part":%b'),
    )


_MESSAGE = _build_text_form(
    b"msg",
    b'{"id":"%b","type":"message","role":"assistant","status":"%b","content":[%b]}',
    b'{"type":"output_text","text":%b,"annotations":[],"logprobs":[]}',
    ("output_text", "content_part"),
    b"content_index",
    b',"logprobs":[]',
)
_REASONING = _build_text_form(
    b"rs",
    b'{"id":"%b","type":"reasoning","summary":[],"content":[%b]%b}',
    b'{"type":"reasoning_text","text":%b}',
    ("reasoning_text", "content_part"),
    b"content_index",
)
_SUMMARY = _build_text_form(
    b"rs",
    b'{"id":"%b","type":"reasoning","summary":[%b]%b}',
    b'{"type":"summary_text","text":%b}',
    ("reasoning_summary_text", "reasoning_summary_part"),
    b"summary_index",
)


class _CallForm(msgspec.Struct, frozen=True):
    """The templates for the items and events of one kind of call: function or custom."""

    item: bytes  # placeholders: id, status, call fields, arguments
    delta: bytes
    done: bytes  # placeholders: arguments, further fields


def _build_call_form(kind: bytes, event: str, field: bytes) -> _CallForm:
    return _CallForm(
        b'{"id":"%%b","type":"%b","status":"%%b",%%b,"%b":%%b}' % (kind, field),
        delta=_event(f"{event}.delta", _PLACE + b'"delta":%b'),
        done=_event(f"{event}.done", _PLACE + b'"%b":%%b%%b' % field),
    )


_FUNCTION = _build_call_form(b"function_call", "function_call_arguments", b"arguments")
_CUSTOM = _build_call_form(b"custom_tool_call", "custom_tool_call_input", b"input")
_CALL_FIELDS = b'"call_id":%b,"name":%b'
_SEARCH = b'{"id":"%b","type":"tool_search_call","status":"completed","call_id":%b,"execution":"client","arguments":%b}'


class _OpenItem(msgspec.Struct):
    """The item to which text is being added."""

    form: _TextForm
    id: bytes
    text: list[str] = []
    signature: str = ""


class ResponsesStream:
    """Encoder for one reply, streamed or not."""

    media = "text/event-stream; charset=utf-8"

    def __init__(self, call: Call) -> None:
        assert isinstance(call.reply_options, ResponsesReplyOptions), "the call must be in the responses dialect"
        self._options = call.reply_options
        self._mark = os.urandom(12).hex().encode()
        self._sequence = 2  # `begin` uses 0 and 1
        self._output: list[bytes] = []  # complete items
        self._item: _OpenItem | None = None
        self._history = call.history
        previous = orjson.dumps(self._options.previous or None)
        self._opening = _HEAD % (self._mark, int(time.time()), orjson.dumps(call.model), previous)
        self._head = self._opening + self._options.echo
        self._whole = b""  # the response, once it is complete

    def begin(self, usage: Usage | None = None) -> bytes:
        response = _RESPONSE % (self._head, b"in_progress", b"null", b"null", b"null", b"", b"null")
        return _CREATED % (0, response) + _STATUS_EVENTS["in_progress"] % (1, response)

    def event(self, event: ReplyEvent) -> bytes:
        match event:
            case Delta(kind="signature", text=signature):
                return self._sign(signature)
            case Delta(kind=kind, text=text):
                return self._text(_MESSAGE if kind == "content" else self._reasoning_form(), text) if text else b""
            case CallDelta(call=call):
                return self._close() + self._call(call)
            case KeepAlive():
                return self._encode_status("in_progress")
            case Done() as done:
                data, status, response = self._finish(done)
                return data + _STATUS_EVENTS[status] % (self._next(), response)

    def error(self, error: TurngateError) -> bytes:
        return self._encode_status(
            "failed", error=orjson.dumps({"code": _error_code(error), "message": error_message(error)})
        )

    def whole(self, done: Done) -> bytes:
        """Encode the whole reply as one JSON object, for a call that is not streamed."""
        message = done.message
        for event in (
            Delta("reasoning", message.reasoning),
            *((Delta("signature", message.signature),) if message.signature else ()),
            Delta("content", message.content),
            *(CallDelta(n, call) for n, call in enumerate(message.tool_calls)),
        ):
            self.event(event)
        return self._finish(done)[2]

    def empty(self) -> bytes:
        """Encode all events of an empty response, for a request that turns generation off."""
        begin = self.begin()
        self._whole = self._response("completed", usage=Usage(0, 0))
        return begin + _STATUS_EVENTS["completed"] % (self._next(), self._whole)

    def record(self) -> ReplyRecord:
        """Return the record of the response. The response must be complete."""
        assert self._whole, "the response is not complete"
        tools = self._history.offered if isinstance(self._history, ResponsesHistory) else ()
        return ReplyRecord(
            id=f"resp_tg{self._mark.decode()}",
            head=self._opening,
            echo=self._options.echo,
            tail=self._whole[len(self._head) :],
            output=tuple(self._output),
            tools=b"[" + b",".join(tools) + b"]",
        )

    # ── items ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _reasoning_form(self) -> _TextForm:
        return _SUMMARY if self._options.summary else _REASONING

    def _text(self, form: _TextForm, text: str) -> bytes:
        item, opening = self._item, b""
        if item is None or item.form is not form:
            opening = self._close()
            item, added = self._open(form)
            opening += added
        item.text.append(text)
        return opening + form.delta % (self._next(), item.id, len(self._output), orjson.dumps(text))

    def _sign(self, signature: str) -> bytes:
        item, opening = self._item, b""
        if item is None or item.form is _MESSAGE:  # the signature belongs to reasoning without any text
            opening = self._close()
            item, added = self._open(self._reasoning_form())
            opening += added
        item.signature = signature
        return opening + self._close()  # close the item, because later reasoning has another signature

    def _open(self, form: _TextForm) -> tuple[_OpenItem, bytes]:
        self._item = item = _OpenItem(form, self._id(form.prefix))
        place = len(self._output)
        added = _ADDED % (self._next(), place, form.item % (item.id, b"in_progress" if form is _MESSAGE else b"", b""))
        return item, added + form.part_added % (self._next(), item.id, place, form.part % b'""')

    def _close(self, status: bytes = b"completed") -> bytes:
        item = self._item
        if item is None:
            return b""
        self._item = None
        form, place = item.form, len(self._output)
        plain = "".join(item.text)
        text = orjson.dumps(plain)
        part = form.part % text
        data = form.done % (self._next(), item.id, place, text)
        data += form.part_done % (self._next(), item.id, place, part)
        if form is _MESSAGE:
            return data + self._add_item(form.item % (item.id, status, part))
        return data + self._add_item(form.item % (item.id, part if plain else b"", self._encode_encrypted(item, plain)))

    def _encode_encrypted(self, item: _OpenItem, reasoning: str) -> bytes:
        """Encode the field `encrypted_content`: the provider's signature, or else the reasoning if the request asks for this field."""
        signature = item.signature or (
            encode_reasoning(reasoning) if reasoning and self._options.encrypt_reasoning else ""
        )
        return b',"encrypted_content":' + orjson.dumps(signature) if signature else b""

    def _call(self, call: ToolCall) -> bytes:
        """Encode a call as the kind of item that fits its tool: function, custom or tool search."""
        tool = self._options.tools.by_name.get(call.name) or AgentTool("function", call.name)
        fields = _CALL_FIELDS % (orjson.dumps(call.id), orjson.dumps(tool.name))
        if tool.namespace:
            fields += b',"namespace":' + orjson.dumps(tool.namespace)
        if tool.kind == "custom":
            text = read_custom_input(call.arguments)
            item_id = self._id(b"ctc" if text is not None else WHOLE_INPUT_PREFIX.encode())
            return self._encode_call(_CUSTOM, item_id, fields, call.arguments if text is None else text)
        if tool.kind == "function":
            name = b',"name":' + orjson.dumps(tool.name)
            return self._encode_call(_FUNCTION, self._id(b"fc"), fields, call.arguments, name)
        item = _SEARCH % (self._id(b"tsc"), orjson.dumps(call.id), _encode_arguments(call.arguments))
        return _ADDED % (self._next(), len(self._output), item) + self._add_item(item)

    def _encode_call(self, form: _CallForm, item_id: bytes, fields: bytes, text: str, more: bytes = b"") -> bytes:
        place, encoded = len(self._output), orjson.dumps(text)
        data = _ADDED % (self._next(), place, form.item % (item_id, b"in_progress", fields, b'""'))
        if text:
            data += form.delta % (self._next(), item_id, place, encoded)
        data += form.done % (self._next(), item_id, place, encoded, more)
        return data + self._add_item(form.item % (item_id, b"completed", fields, encoded))

    def _add_item(self, item: bytes) -> bytes:
        self._output.append(item)
        return _DONE % (self._next(), len(self._output) - 1, item)

    def _id(self, kind: bytes) -> bytes:
        return b"%b_tg%b%02x" % (kind, self._mark, len(self._output))

    def _next(self) -> int:
        """Return the next event's sequence number, and increment the counter."""
        self._sequence += 1
        return self._sequence - 1

    # ── the response ────────────────────────────────────────────────────────────────────────────────────────────────

    def _finish(self, done: Done) -> tuple[bytes, str, bytes]:
        """Finish the reply. Return the remaining item events, the final status and the whole response."""
        cut = done.finish == "length"
        data = b""
        if self._item is None and not self._output:
            # Add an empty message to an empty reply. Otherwise the agent could not send the turn back.
            data = self._open(_MESSAGE)[1]
        data += self._close(b"incomplete" if cut else b"completed")
        status, reason = ("incomplete", _MAX_TOKENS_REACHED) if cut else ("completed", b"null")
        self._whole = self._response(status, usage=done.usage, incomplete=reason)
        return data, status, self._whole

    def _response(
        self, status: str, *, usage: Usage | None = None, error: bytes = b"null", incomplete: bytes = b"null"
    ) -> bytes:
        ended = b"%d" % time.time() if status == "completed" else b"null"
        output = b",".join(self._output)
        return _RESPONSE % (self._head, status.encode(), ended, error, incomplete, output, _usage_to_wire(usage))

    def _encode_status(self, status: str, *, error: bytes = b"null") -> bytes:
        return _STATUS_EVENTS[status] % (self._next(), self._response(status, error=error))


def error_message(error: TurngateError) -> str:
    """Return the error's message. For a context overflow or a retryable 429 error, it has a wording that agents recognize."""
    if isinstance(error, ContextOverflow):
        known = error.limit is not None and error.size is not None
        sizes = f" (The maximum context length is {error.limit} tokens; your input has {error.size}.)" if known else ""
        return f"Your input exceeds the context window of this model. Please adjust your input and try again.{sizes}"
    if error.status == 429 and error.retry_safe:
        return f"{error.message.rstrip('.')}. Please try again in 1s."
    return error.message


def _error_code(error: TurngateError) -> str:
    """Return the error code of a failed response. Agents retry after `server_error`, but not after `invalid_prompt`."""
    if isinstance(error, ContextOverflow):
        return error.kind
    if error.status == 429:
        return "rate_limit_exceeded" if error.retry_safe else error.kind
    return "invalid_prompt" if error.status < 500 else "server_error"


def _encode_arguments(arguments: str) -> bytes:
    """Encode a call's arguments as a JSON object, or as a JSON string if they are not an object."""
    try:
        value: Json = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        value = None
    return one_line(arguments).encode() if isinstance(value, dict) else orjson.dumps(arguments)


def _usage_to_wire(usage: Usage | None) -> bytes:
    if usage is None:
        return b"null"
    sent, sampled = usage.prompt_tokens, usage.completion_tokens
    return _USAGE % (sent, usage.cached_tokens, sampled, usage.reasoning_tokens, sent + sampled)
