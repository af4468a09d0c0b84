"""OpenAI Chat Completions: `POST /v1/chat/completions`.

Decoding splits the body into raw messages and decodes only the new ones. Every other field is checked here, so an invalid one is
rejected by name in OpenAI's own error format.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import orjson

from turngate.dialects.base import Route, WireRequest
from turngate.dialects.openai import FORWARDED_HEADERS, encode_model, encode_model_list, error_body
from turngate.dialects.wire import (
    ABSENT,
    DECODE_ERRORS,
    bearer_token,
    call_fields_from_headers,
    describe_error,
    error_field,
    field_error,
    is_given,
    placeholder,
    require_any_tool,
    require_shallow,
    require_tool,
    validate_sampling,
    validate_stops,
)
from turngate.errors import BadRequest, TurngateError
from turngate.types import (
    Call,
    CallDelta,
    Constraint,
    Delta,
    Done,
    History,
    Json,
    KeepAlive,
    Message,
    ReplyEvent,
    Tool,
    ToolCall,
    Usage,
)


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b'"{}"')


class _WireCall(msgspec.Struct):
    function: _Function
    id: str = ""


class _Part(msgspec.Struct):
    type: str
    text: str = ""
    refusal: str = ""
    image_url: msgspec.Raw = ABSENT
    input_audio: msgspec.Raw = ABSENT
    file: msgspec.Raw = ABSENT


class _WireMessage(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_WireCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    refusal: str | None = None
    function_call: msgspec.Raw = ABSENT


class _Request(msgspec.Struct):
    messages: list[msgspec.Raw]
    model: str = ""
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    tools: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    parallel_tool_calls: bool | None = None
    response_format: msgspec.Raw = ABSENT
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    functions: msgspec.Raw = ABSENT
    function_call: msgspec.Raw = ABSENT
    modalities: list[str] | None = None
    audio: msgspec.Raw = ABSENT
    web_search_options: msgspec.Raw = ABSENT
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


_request = msgspec.json.Decoder(_Request)
_message = msgspec.json.Decoder(_WireMessage)

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)


class ChatHistory:
    """The messages of one request, decoded one at a time."""

    def __init__(self, raws: Sequence[bytes]) -> None:
        self.raws = list(raws)

    @property
    def items(self) -> Sequence[bytes]:
        return self.raws

    def extend(self, items: Sequence[bytes]) -> ChatHistory:
        return ChatHistory(items)

    def decode(self, index: int) -> tuple[Message, ...]:
        where = f"messages[{index}]"
        try:
            wire = _message.decode(self.raws[index])
        except DECODE_ERRORS as error:
            raise BadRequest(f"{where}: {describe_error(error)}", param=where) from None
        return (_decode_message(wire, where),)


class ChatTools:
    """The tools of one request."""

    replaceable = False

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def decode(self) -> tuple[Tool, ...]:
        try:
            wires = msgspec.json.decode(self.raw, type=list[dict[str, Any]])
        except DECODE_ERRORS as error:
            raise BadRequest(f"tools: {describe_error(error)}", param="tools") from None
        return tuple(_decode_tool(wire, f"tools[{n}]") for n, wire in enumerate(wires))


class Chat:
    """The chat dialect."""

    name = "chat"
    routes = (Route("/v1/chat/completions"), Route("/chat/completions"))
    path_prefix = "/"
    list_field = "messages"
    request_id_header = "x-request-id"

    def read_key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str:
        return bearer_token(headers)

    def decode(self, wire: WireRequest) -> Call:
        try:
            request = _request.decode(wire.body)
        except msgspec.ValidationError as error:
            raise BadRequest(describe_error(error), param=error_field(error)) from None
        except DECODE_ERRORS as error:
            raise BadRequest(f"The body is not valid JSON: {error}") from None
        _refuse_unsupported(request)
        if not request.messages:
            raise BadRequest("messages must contain at least one message", param="messages")
        tools = ChatTools(bytes(request.tools)) if is_given(request.tools) and bytes(request.tools) != b"[]" else None
        kwargs = require_shallow(request.chat_template_kwargs or {}, "chat_template_kwargs")
        constraint, offered = _decode_constraint(request, tools)
        return Call(
            model=request.model,
            history=ChatHistory([*wire.known_items, *map(bytes, request.messages)]),
            tools=tools if offered else None,
            sampling=validate_sampling(
                {name: value for name in _SAMPLING if (value := getattr(request, name)) is not None}
            ),
            max_tokens=_max_tokens(request),
            stop=validate_stops("stop", request.stop),
            constraint=constraint,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            template_kwargs=kwargs,
            template_hints={} if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort},
            stream=bool(request.stream),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            body=wire.received_body,
            **call_fields_from_headers(wire.headers, FORWARDED_HEADERS),
        )

    def extend_call(self, call: Call, history: History, wire: WireRequest) -> Call:
        return msgspec.structs.replace(
            call, history=history, body=wire.received_body, **call_fields_from_headers(wire.headers, FORWARDED_HEADERS)
        )

    def read_stored_history(self, raws: Sequence[bytes]) -> ChatHistory:
        return ChatHistory(raws)

    def read_stored_tools(self, raw: bytes) -> ChatTools:
        return ChatTools(raw)

    def open_stream(self, call: Call) -> ChatStream:
        return ChatStream(call)

    def encode_reply(self, call: Call, done: Done) -> bytes:
        message: dict[str, Json] = {"role": "assistant", "content": done.message.content or None, "refusal": None}
        if done.message.reasoning:
            message["reasoning"] = message["reasoning_content"] = done.message.reasoning
        if done.message.tool_calls:
            message["tool_calls"] = [_call_to_wire(c) for c in done.message.tool_calls]
        elif message["content"] is None:
            message["content"] = ""
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(done)}
        return orjson.dumps(
            {**_reply_head(call, "chat.completion"), "choices": [choice], "usage": _usage_to_wire(done.usage)}
        )

    def encode_count(self, tokens: int) -> bytes:
        raise AssertionError("the chat dialect has no route for counting tokens")

    def encode_models(self, names: Sequence[str], created: int) -> bytes:
        return encode_model_list(names, created)

    def encode_model(self, name: str, created: int) -> bytes:
        return encode_model(name, created)

    def error_status(self, error: TurngateError) -> int:
        return error.status

    def encode_error(self, error: TurngateError) -> bytes:
        return orjson.dumps(error_body(error))

    def sends_in_stream(self, error: TurngateError) -> bool:
        return False


class ChatStream:
    """One streamed reply as server-sent events."""

    media = "text/event-stream; charset=utf-8"

    def __init__(self, call: Call) -> None:
        self._head = _reply_head(call, "chat.completion.chunk")
        self._include_usage = call.include_usage

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def event(self, event: ReplyEvent) -> bytes:
        match event:
            case Delta(kind="content", text=text):
                return self._chunk({"content": text})
            case Delta(kind="reasoning", text=text):
                return self._chunk({"reasoning": text, "reasoning_content": text})
            case Delta():
                return b""  # this format has no field for a signature
            case CallDelta(index=index, call=call):
                return self._chunk({"tool_calls": [{"index": index, **_call_to_wire(call)}]})
            case KeepAlive():
                return self._chunk({})
            case Done() as done:
                return self._chunk({}, _finish_reason(done)) + self._final_usage(done) + b"data: [DONE]\n\n"

    def error(self, error: TurngateError) -> bytes:
        return b"data: " + orjson.dumps(error_body(error)) + b"\n\n"

    def _chunk(self, delta: dict[str, Json], finish: str | None = None) -> bytes:
        body: dict[str, Json] = {
            **self._head,
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}],
        }
        if self._include_usage:
            body["usage"] = None
        return b"data: " + orjson.dumps(body) + b"\n\n"

    def _final_usage(self, done: Done) -> bytes:
        if not self._include_usage:
            return b""
        return b"data: " + orjson.dumps({**self._head, "choices": [], "usage": _usage_to_wire(done.usage)}) + b"\n\n"


def message_to_wire(message: Message) -> dict[str, Json]:
    """Encode a message in the Chat Completions format."""
    wire: dict[str, Json] = {"role": message.role, "content": message.content}
    if message.reasoning:
        wire["reasoning_content"] = message.reasoning
    if message.tool_calls:
        wire["tool_calls"] = [_call_to_wire(call) for call in message.tool_calls]
    if message.role == "tool":
        wire["tool_call_id"] = message.tool_call_id
    if message.name:
        wire["name"] = message.name
    return wire


def _decode_message(wire: _WireMessage, where: str) -> Message:
    if is_given(wire.function_call):
        raise BadRequest(
            f"{where}.function_call is deprecated and not supported; use tool_calls", param=f"{where}.function_call"
        )
    text, unsupported = _decode_content(wire.content, where)
    match wire.role:
        case "system" | "developer":
            return Message("system", text, unsupported=unsupported)
        case "user":
            return Message("user", text, name=wire.name or "", unsupported=unsupported)
        case "assistant":
            calls = tuple(_decode_call(call) for call in wire.tool_calls or ())
            reasoning = wire.reasoning_content or wire.reasoning or ""
            return Message("assistant", text or wire.refusal or "", reasoning, calls, unsupported=unsupported)
        case "tool":
            if wire.tool_call_id is None:
                raise BadRequest(
                    f"{where}.tool_call_id is missing; a tool message needs the id of the call it answers",
                    param=f"{where}.tool_call_id",
                )
            return Message("tool", text, tool_call_id=wire.tool_call_id, name=wire.name or "", unsupported=unsupported)
        case _:
            raise BadRequest(
                f"{where}.role must be one of system, developer, user, assistant, tool, not {wire.role!r}",
                param=f"{where}.role",
            )


def _decode_call(wire: _WireCall) -> ToolCall:
    raw = bytes(wire.function.arguments)
    # Arguments are JSON text in a string; some clients send the object itself.
    text = msgspec.json.decode(raw, type=str) if raw.startswith(b'"') else raw.decode()
    return ToolCall(wire.id, wire.function.name, "{}" if text in ("", "null") else text)


def _decode_content(content: str | list[_Part] | None, where: str) -> tuple[str, str]:
    """Return the text of the content and, if a text-only model cannot read all of it, the reason."""
    if isinstance(content, str):
        return content, ""
    texts = []
    unsupported = ""
    for n, part in enumerate(content or ()):
        if part.type in ("text", "input_text", "output_text"):
            texts.append(part.text)
        elif part.type == "refusal":
            texts.append(part.refusal)
        else:
            at = f"{where}.content[{n}]"
            data = b"".join(bytes(raw) for raw in (part.image_url, part.input_audio, part.file))
            texts.append(placeholder(part.type, data))
            unsupported = unsupported or f"{at}: {part.type!r} parts are not supported; this gateway accepts text only"
    return "\n".join(texts), unsupported


def _decode_tool(wire: dict[str, Any], where: str) -> Tool:
    if wire.get("type") != "function":
        raise BadRequest(f"{where}.type must be 'function', not {wire.get('type')!r}", param=f"{where}.type")
    function = wire.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where}.function.name is missing", param=f"{where}.function.name")
    return Tool(name, require_shallow(wire, where))


def _refuse_unsupported(request: _Request) -> None:
    if request.n is not None and request.n != 1:
        raise field_error("n", f"must be 1, not {request.n}; send the call several times instead")
    if request.logprobs or request.top_logprobs:
        raise field_error(
            "logprobs",
            "is not supported: the gateway records log-probabilities but does not return them to agents; leave it out",
        )
    if request.logit_bias:
        raise field_error(
            "logit_bias", "is not supported, because it would bias the recorded log-probabilities; leave it out"
        )
    for name, value in (("functions", request.functions), ("function_call", request.function_call)):
        if is_given(value):
            raise field_error(name, "is deprecated and not supported; use tools and tool_choice")
    if is_given(request.audio):
        raise field_error("audio", "is not supported; this gateway returns text only")
    if request.modalities and request.modalities != ["text"]:
        raise field_error("modalities", "must be ['text']; no other modality is supported")
    if is_given(request.web_search_options):
        raise field_error("web_search_options", "is not supported; declare your own search tool instead")


def _max_tokens(request: _Request) -> int | None:
    name = "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
    value = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    if value is not None and value < 1:
        raise BadRequest(f"{name} must be at least 1, not {value}", param=name)
    return value


def _decode_constraint(request: _Request, tools: ChatTools | None) -> tuple[Constraint | None, bool]:
    """Decode the required shape of the output, and whether tools are offered at all."""
    try:
        choice: Json = msgspec.json.decode(request.tool_choice)
    except DECODE_ERRORS as error:
        raise BadRequest(f"tool_choice: {describe_error(error)}", param="tool_choice") from None
    forced = _decode_tool_choice(choice, tools, parallel=request.parallel_tool_calls is not False)
    shape = _decode_response_format(request)
    if forced is not None and shape is not None:
        raise BadRequest(
            "tool_choice cannot force a tool together with response_format; leave one out", param="tool_choice"
        )
    return forced or shape, choice != "none"


def _decode_tool_choice(choice: Json, tools: ChatTools | None, *, parallel: bool) -> Constraint | None:
    match choice:
        case None | "auto" | "none":
            return None
        case "required":
            return require_any_tool(_require_tools(tools), parallel=parallel)
        case {"type": "function", "function": {"name": str(name)}}:
            return require_tool(_require_tools(tools), name, "tool_choice")
        case _:
            raise BadRequest(
                "tool_choice must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': …}}",
                param="tool_choice",
            )


def _require_tools(tools: ChatTools | None) -> tuple[Tool, ...]:
    if tools is None:
        raise BadRequest("tool_choice forces a tool, but the request has no tools", param="tool_choice")
    return tools.decode()


class _JsonSchema(msgspec.Struct):
    name: str = ""
    schema: dict[str, Any] | None = None


class _ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


def _decode_response_format(request: _Request) -> Constraint | None:
    if not is_given(request.response_format):
        return None
    try:
        form = msgspec.json.decode(request.response_format, type=_ResponseFormat)
    except DECODE_ERRORS as error:
        raise BadRequest(f"response_format: {describe_error(error)}", param="response_format") from None
    if form.type == "text":
        return None
    if form.type == "json_object":
        return Constraint("json_object")
    if form.json_schema is None or form.json_schema.schema is None:
        raise BadRequest("response_format.json_schema.schema is missing", param="response_format")
    return Constraint("json_schema", require_shallow(form.json_schema.schema, "response_format.json_schema.schema"))


def _call_to_wire(call: ToolCall) -> dict[str, Json]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish_reason(done: Done) -> str:
    return "stop" if done.finish == "abort" else done.finish


def _usage_to_wire(usage: Usage | None) -> Json:
    if usage is None:
        return None
    wire: dict[str, Json] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.cached_tokens:
        wire["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if usage.reasoning_tokens:
        wire["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return wire


def _reply_head(call: Call, kind: str) -> dict[str, Json]:
    return {"id": f"chatcmpl-{os.urandom(16).hex()}", "object": kind, "created": int(time.time()), "model": call.model}
