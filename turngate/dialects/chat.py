"""OpenAI Chat Completions: `POST /v1/chat/completions`.

`Chat.decode` validates a request, but keeps its messages and tools as raw JSON until they are needed. A message that the gateway has
already seen is usually not decoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

import msgspec
import orjson

from turngate.dialects.base import Route, WireRequest
from turngate.dialects.chat_reply import (
    ChatReplyOptions,
    ChatStream,
    call_id_from_wire,
    call_to_wire,
    custom_call_from_wire,
    encode_reply,
)
from turngate.dialects.chat_tools import ChatTools, decode_function_call, decode_tool_choice
from turngate.dialects.openai import FORWARDED_HEADERS, OpenAIErrorBody, encode_model, encode_model_list, error_body
from turngate.dialects.wire import (
    ABSENT,
    DECODE_ERRORS,
    bearer_token,
    body_error,
    call_fields_from_headers,
    decode_arguments,
    describe_error,
    field_error,
    is_given,
    placeholder,
    require_shallow,
    validate_sampling,
    validate_stops,
)
from turngate.errors import BadRequest, TurngateError
from turngate.types import Call, Constraint, Done, History, Json, Message, ToolCall


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b'"{}"')


class _CustomCall(msgspec.Struct):
    name: str
    input: str = ""


class _WireCall(msgspec.Struct):
    function: _Function | None = None
    custom: _CustomCall | None = None
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
    function_call: _Function | None = None


class ChatRequest(msgspec.Struct):
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


_request = msgspec.json.Decoder(ChatRequest)
_message = msgspec.json.Decoder(_WireMessage)

_MAX_TOP_LOGPROBS = 20
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
    """The messages of a conversation. Each is decoded on demand."""

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


class Chat:
    """The chat dialect: OpenAI's Chat Completions API."""

    name = "chat"
    routes = (Route("/v1/chat/completions"), Route("/chat/completions"))
    path_prefix = "/"
    list_field = "messages"
    request_type = ChatRequest
    error_type = OpenAIErrorBody
    key_header = ""
    request_id_header = "x-request-id"

    def read_key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str:
        return bearer_token(headers)

    def decode(self, wire: WireRequest) -> Call:
        try:
            request = _request.decode(wire.body)
        except DECODE_ERRORS as error:
            raise body_error(error) from None
        _refuse_unsupported(request)
        if not request.messages:
            raise BadRequest("messages must contain at least one message", param="messages")
        kwargs = require_shallow(request.chat_template_kwargs or {}, "chat_template_kwargs")
        forced, tools = _decode_tools(request)
        shape = _decode_response_format(request)
        legacy = is_given(request.functions)
        return Call(
            model=request.model,
            history=ChatHistory([*wire.known_items, *map(bytes, request.messages)]),
            tools=tools,
            sampling=validate_sampling(
                {name: value for name in _SAMPLING if (value := getattr(request, name)) is not None}
            ),
            max_tokens=_max_tokens(request),
            stop=validate_stops("stop", request.stop),
            # If a tool call is forced, there is no text to which `response_format` could apply.
            constraint=forced or shape,
            parallel_tool_calls=request.parallel_tool_calls is not False and not legacy,
            top_logprobs=_decode_top_logprobs(request),
            template_kwargs=kwargs,
            template_hints={} if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort},
            stream=bool(request.stream),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            body=wire.received_body,
            reply_options=ChatReplyOptions(frozenset() if tools is None else tools.custom_names(), legacy),
            **call_fields_from_headers(wire.headers, FORWARDED_HEADERS),
        )

    def extend_call(self, call: Call, history: History, wire: WireRequest) -> Call:
        return msgspec.structs.replace(
            call, history=history, body=wire.received_body, **call_fields_from_headers(wire.headers, FORWARDED_HEADERS)
        )

    def read_stored_history(self, raws: Sequence[bytes]) -> ChatHistory:
        return ChatHistory(raws)

    def read_stored_tools(self, raw: bytes) -> ChatTools:
        return ChatTools.from_stored(raw)

    def open_stream(self, call: Call) -> ChatStream:
        return ChatStream(call)

    def encode_reply(self, call: Call, done: Done) -> bytes:
        return encode_reply(call, done)

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


def message_to_wire(message: Message) -> dict[str, Json]:
    """Encode a message in the Chat Completions format."""
    wire: dict[str, Json] = {"role": message.role, "content": message.content}
    if message.reasoning:
        wire["reasoning_content"] = message.reasoning
    if message.tool_calls:
        wire["tool_calls"] = [call_to_wire(call) for call in message.tool_calls]
    if message.role == "tool":
        wire["tool_call_id"] = message.tool_call_id
    if message.name:
        wire["name"] = message.name
    return wire


def _decode_message(wire: _WireMessage, where: str) -> Message:
    text, unsupported = _decode_content(wire.content, where)
    match wire.role:
        case "system" | "developer":
            return Message("system", text, unsupported=unsupported)
        case "user":
            return Message("user", text, name=wire.name or "", unsupported=unsupported)
        case "assistant":
            calls = tuple(
                _decode_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(wire.tool_calls or ())
            )
            if wire.function_call is not None and not calls:
                calls = (_decode_function_call(wire.function_call, f"{where}.function_call"),)
            reasoning = wire.reasoning_content or wire.reasoning or ""
            return Message("assistant", text or wire.refusal or "", reasoning, calls, unsupported=unsupported)
        case "tool":
            if wire.tool_call_id is None:
                raise BadRequest(
                    f"{where}.tool_call_id is missing; a tool message needs the id of the call it answers",
                    param=f"{where}.tool_call_id",
                )
            call_id = call_id_from_wire(wire.tool_call_id)
            return Message("tool", text, tool_call_id=call_id, name=wire.name or "", unsupported=unsupported)
        case "function":
            if not wire.name:
                raise BadRequest(
                    f"{where}.name is missing; a function message needs the name of the function whose result it contains",
                    param=f"{where}.name",
                )
            call_id = _function_call_id(wire.name)
            return Message("tool", text, tool_call_id=call_id, name=wire.name, unsupported=unsupported)
        case _:
            raise BadRequest(
                f"{where}.role must be one of system, developer, user, assistant, tool, function, not {wire.role!r}",
                param=f"{where}.role",
            )


def _decode_call(wire: _WireCall, where: str) -> ToolCall:
    if wire.custom is not None:
        return custom_call_from_wire(wire.id, wire.custom.name, wire.custom.input)
    if wire.function is None:
        raise BadRequest(
            f"{where}.function is missing; a tool call needs 'function' or 'custom'", param=f"{where}.function"
        )
    return ToolCall(
        call_id_from_wire(wire.id),
        wire.function.name,
        decode_arguments(bytes(wire.function.arguments), f"{where}.function.arguments"),
    )


def _decode_function_call(wire: _Function, where: str) -> ToolCall:
    """Decode a call in the deprecated field `function_call`."""
    return ToolCall(
        _function_call_id(wire.name), wire.name, decode_arguments(bytes(wire.arguments), f"{where}.arguments")
    )


def _function_call_id(name: str) -> str:
    """Derive an id from a function's name, for calls and results in the deprecated format, which has no ids."""
    return f"call_{blake2b(name.encode('utf-8', 'surrogatepass'), digest_size=12).hexdigest()}"


def _decode_content(content: str | list[_Part] | None, where: str) -> tuple[str, str]:
    """Return the text of a message's content, and an error message, which is empty if all of the content is supported."""
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
            unsupported = unsupported or f"{at}: {part.type!r} parts are not supported here; send text instead"
    return "\n".join(texts), unsupported


def _refuse_unsupported(request: ChatRequest) -> None:
    if request.n is not None and request.n != 1:
        raise field_error("n", f"must be 1, not {request.n}; send the call several times instead")
    if request.logit_bias:
        raise field_error(
            "logit_bias", "is not supported, because it would bias the recorded log-probabilities; leave it out"
        )
    if request.stream_options is not None and not request.stream:
        raise field_error(
            "stream_options", "can only be set if stream is true; set stream to true, or leave stream_options out"
        )
    if is_given(request.audio):
        raise field_error("audio", "is not supported, because the gateway returns only text; leave it out")
    if request.modalities and request.modalities != ["text"]:
        raise field_error("modalities", "must be ['text']; no other modality is supported")
    if is_given(request.web_search_options):
        raise field_error("web_search_options", "is not supported; declare your own search tool instead")


def _decode_top_logprobs(request: ChatRequest) -> int | None:
    """Return how many alternatives to report per token, or None if the request does not ask for log-probabilities."""
    count = request.top_logprobs
    if count is not None and not 0 <= count <= _MAX_TOP_LOGPROBS:
        raise field_error("top_logprobs", f"must be between 0 and {_MAX_TOP_LOGPROBS}, not {count}")
    if request.logprobs:
        return count or 0
    if count:
        raise field_error(
            "top_logprobs", "can only be set if logprobs is true; set logprobs to true, or leave top_logprobs out"
        )
    return None


def _max_tokens(request: ChatRequest) -> int | None:
    name = "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
    value = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    if value is not None and value < 1:
        raise BadRequest(f"{name} must be at least 1, not {value}", param=name)
    return value


def _decode_tools(request: ChatRequest) -> tuple[Constraint | None, ChatTools | None]:
    """Return the constraint that forces a tool call, if any, and the tools that the model sees."""
    tools = ChatTools(bytes(request.tools)) if _is_list_given(request.tools) else None
    if not is_given(request.functions):
        if is_given(request.function_call):
            raise field_error("function_call", "can only be set together with 'functions'; use tool_choice for tools")
        choice = _decode_choice("tool_choice", request.tool_choice)
        return decode_tool_choice(choice, tools, parallel=request.parallel_tool_calls is not False)
    if tools is not None or is_given(request.tool_choice):
        raise field_error(
            "functions", "cannot be combined with 'tools' or 'tool_choice'; declare the functions in 'tools' instead"
        )
    functions = ChatTools.from_functions(bytes(request.functions)) if _is_list_given(request.functions) else None
    choice = _decode_choice("function_call", request.function_call)
    return decode_function_call(choice, functions)


def _is_list_given(raw: msgspec.Raw) -> bool:
    return is_given(raw) and bytes(raw) != b"[]"


def _decode_choice(field: str, raw: msgspec.Raw) -> Json:
    try:
        return msgspec.json.decode(raw)
    except DECODE_ERRORS as error:
        raise BadRequest(f"{field}: {describe_error(error)}", param=field) from None


class _JsonSchema(msgspec.Struct):
    name: str = ""
    schema: dict[str, Any] | None = None


class _ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


def _decode_response_format(request: ChatRequest) -> Constraint | None:
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
