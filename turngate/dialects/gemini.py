"""Gemini, Google's Generative Language API: `POST /v1beta/models/{model}:generateContent` and related routes.

`Gemini.decode` validates a request, but keeps its contents and tools as raw JSON until they are needed. Contents that the gateway has
already seen are usually not decoded again. As in Google's API, field names may be in `camelCase` or `snake_case`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, TypedDict, TypeVar, cast

import msgspec
import orjson

from turngate.dialects.base import Route, WireRequest
from turngate.dialects.gemini_history import (
    GeminiHistory,
    build_system_content,
    read_field,
    read_fields,
    read_items,
    read_json,
    to_camel,
)
from turngate.dialects.gemini_reply import (
    GeminiErrorBody,
    GeminiReplyOptions,
    GeminiStream,
    encode_reply,
    error_body,
    error_status,
)
from turngate.dialects.gemini_tools import GeminiTools, to_json_schema
from turngate.dialects.wire import (
    bearer_token,
    call_fields_from_headers,
    describe_error,
    error_field,
    field_error,
    require_any_tool,
    require_shallow,
    validate_sampling,
    validate_stops,
)
from turngate.errors import BadRequest, TurngateError
from turngate.types import Call, Constraint, Done, History, Json

T = TypeVar("T")


class _Thinking(msgspec.Struct, rename="camel"):
    include_thoughts: bool = False
    thinking_budget: int | None = None
    thinking_level: str = ""


class _Config(msgspec.Struct, rename="camel"):
    """The fields of `generationConfig` that the gateway uses or rejects. Other fields are ignored."""

    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop_sequences: list[str] = []
    candidate_count: int = 1
    response_mime_type: str = "text/plain"
    response_schema: Json = None
    response_json_schema: Json = None
    response_modalities: list[str] = []
    response_logprobs: bool = False
    logprobs: int | None = None
    speech_config: Json = None
    image_config: Json = None
    continuation_token: str = ""
    thinking_config: Json = msgspec.field(default_factory=dict)


class GeminiRequest(TypedDict, total=False):
    """The fields of a request. A request that counts tokens can wrap the other fields in `generateContentRequest`."""

    contents: msgspec.Raw
    systemInstruction: msgspec.Raw
    tools: msgspec.Raw
    toolConfig: msgspec.Raw
    generationConfig: msgspec.Raw
    cachedContent: msgspec.Raw
    generateContentRequest: msgspec.Raw


_CONFIG_FIELD: Literal["generationConfig"] = "generationConfig"
_SAMPLING = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")
_NAMES = {name: f"{_CONFIG_FIELD}.{to_camel(name)}" for name in _SAMPLING}
_VERSIONS = ("v1beta", "v1", "v1alpha")
_FORWARDED_HEADERS = ("x-goog-api-client",)


class Gemini:
    """The gemini dialect: Google's Gemini API."""

    name = "gemini"
    routes = tuple(
        route
        for version in _VERSIONS
        for route in (
            Route(f"/{version}/models/{{model}}:generateContent"),
            Route(f"/{version}/models/{{model}}:streamGenerateContent", "stream"),
            Route(f"/{version}/models/{{model}}:countTokens", "count"),
        )
    )
    path_prefix = "/v1beta"
    list_field = "contents"
    request_type = GeminiRequest
    error_type = GeminiErrorBody
    key_header = "x-goog-api-key"
    request_id_header = ""

    def read_key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str:
        return headers.get(self.key_header, "").strip() or query.get("key", "").strip() or bearer_token(headers)

    def decode(self, wire: WireRequest) -> Call:
        request = _decode_request(wire)
        config = _decode_config(request)
        thinking = _decode_thinking(config)
        tools, constraint = _decode_tools(request, config)
        return Call(
            model=wire.model,
            history=_decode_history(request, wire),
            tools=tools,
            sampling=validate_sampling(
                {name: value for name in _SAMPLING if (value := getattr(config, name)) is not None}, _NAMES
            ),
            max_tokens=config.max_output_tokens,
            stop=validate_stops(f"{_CONFIG_FIELD}.stopSequences", config.stop_sequences),
            constraint=constraint,
            template_hints=_template_hints(thinking),
            stream=wire.verb == "stream",
            dialect=self.name,
            body=wire.received_body,
            reply_options=GeminiReplyOptions(
                thinking.include_thoughts, wire.query.get("alt", wire.query.get("$alt")) == "sse"
            ),
            **call_fields_from_headers(wire.headers, _FORWARDED_HEADERS),
        )

    def extend_call(self, call: Call, history: History, wire: WireRequest) -> Call:
        return msgspec.structs.replace(
            call, history=history, body=wire.received_body, **call_fields_from_headers(wire.headers, _FORWARDED_HEADERS)
        )

    def read_stored_history(self, raws: Sequence[bytes]) -> GeminiHistory:
        return GeminiHistory(raws, stored=True)

    def read_stored_tools(self, raw: bytes) -> GeminiTools:
        return GeminiTools(raw)

    def open_stream(self, call: Call) -> GeminiStream:
        return GeminiStream(call)

    def encode_reply(self, call: Call, done: Done) -> bytes:
        return encode_reply(call, done)

    def encode_count(self, tokens: int) -> bytes:
        details = [{"modality": "TEXT", "tokenCount": tokens}]
        return orjson.dumps({"totalTokens": tokens, "promptTokensDetails": details})

    def encode_models(self, names: Sequence[str], created: int) -> bytes:
        return orjson.dumps({"models": [_model_to_wire(name) for name in names]})

    def encode_model(self, name: str, created: int) -> bytes:
        return orjson.dumps(_model_to_wire(name))

    def error_status(self, error: TurngateError) -> int:
        return error_status(error)[0]

    def encode_error(self, error: TurngateError) -> bytes:
        return orjson.dumps(error_body(error))

    def sends_in_stream(self, error: TurngateError) -> bool:
        return False


def _model_to_wire(name: str) -> Json:
    return {
        "name": f"models/{name}",
        "baseModelId": name,
        "version": "1",
        "displayName": name,
        "description": "Served by Turngate",
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }


def _decode_request(wire: WireRequest) -> GeminiRequest:
    try:
        request = read_fields(wire.body, "The body")
    except BadRequest as error:
        raise BadRequest(
            f"The body cannot be decoded as a JSON object: {error.message.removeprefix('The body: ')}"
        ) from None
    if wire.verb == "count" and "generateContentRequest" in request:
        request = read_fields(request["generateContentRequest"], "generateContentRequest")
    if "cachedContent" in request:
        raise field_error("cachedContent", "is not supported; send all contents instead")
    return cast(GeminiRequest, request)


def _decode_history(request: GeminiRequest, wire: WireRequest) -> GeminiHistory:
    new = map(bytes, read_items(request["contents"], "contents")) if "contents" in request else ()
    contents = [*wire.known_items, *new]
    if not contents:
        raise field_error("contents", "must not be empty")
    system = request.get("systemInstruction")
    return GeminiHistory(contents, b"" if system is None else build_system_content(system), before=wire.history)


def _decode_config(request: GeminiRequest) -> _Config:
    config = _convert_fields(
        read_json(request[_CONFIG_FIELD], _CONFIG_FIELD) if _CONFIG_FIELD in request else {}, _Config, _CONFIG_FIELD
    )
    _refuse_unsupported(config)
    return config


def _convert_fields(value: Json, kind: type[T], where: str) -> T:
    if not isinstance(value, dict):
        raise field_error(where, "must be an object")
    fields = {to_camel(name): field for name, field in value.items() if field is not None}
    try:
        # Not strict, because clients may send numbers as strings and integers with a decimal point.
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(
            f"{where}.{describe_error(error)}", param=f"{where}.{error_field(error) or ''}".rstrip(".")
        ) from None


def _refuse_unsupported(config: _Config) -> None:
    if config.candidate_count != 1:
        raise field_error(
            f"{_CONFIG_FIELD}.candidateCount",
            f"must be 1, not {config.candidate_count}; send the call several times instead",
        )
    if config.response_logprobs or config.logprobs:
        name = "responseLogprobs" if config.response_logprobs else "logprobs"
        raise field_error(
            f"{_CONFIG_FIELD}.{name}",
            "is not supported, because the gateway returns log-probabilities only in the chat dialect; leave it out",
        )
    if any(modality.upper() not in ("TEXT", "MODALITY_UNSPECIFIED") for modality in config.response_modalities):
        raise field_error(f"{_CONFIG_FIELD}.responseModalities", "must contain only TEXT")
    for name, value in (("speechConfig", config.speech_config), ("imageConfig", config.image_config)):
        if value is not None:
            raise field_error(
                f"{_CONFIG_FIELD}.{name}", "is not supported, because the gateway returns only text; leave it out"
            )
    if config.continuation_token:
        raise field_error(f"{_CONFIG_FIELD}.continuationToken", "is not supported; leave it out")
    if config.max_output_tokens is not None and config.max_output_tokens < 1:
        raise field_error(f"{_CONFIG_FIELD}.maxOutputTokens", f"must be at least 1, not {config.max_output_tokens}")


def _decode_thinking(config: _Config) -> _Thinking:
    return _convert_fields(config.thinking_config, _Thinking, f"{_CONFIG_FIELD}.thinkingConfig")


def _template_hints(thinking: _Thinking) -> dict[str, Json]:
    """Translate `thinkingConfig` into chat template arguments."""
    hints: dict[str, Json] = {}
    if thinking.thinking_budget is not None:
        hints["enable_thinking"] = hints["thinking"] = thinking.thinking_budget != 0
        if thinking.thinking_budget > 0:
            hints["thinking_budget"] = thinking.thinking_budget
    level = thinking.thinking_level.lower()
    if level and not level.endswith("unspecified"):
        hints["reasoning_effort"] = "low" if level == "minimal" else level
    return hints


def _decode_tools(request: GeminiRequest, config: _Config) -> tuple[GeminiTools | None, Constraint | None]:
    """Return the tools that the model sees, and the constraint on the reply, if any."""
    raw = bytes(request.get("tools", b"[]"))
    tools = GeminiTools(raw) if raw not in (b"[]", b"{}") else None
    mode, allowed = _decode_calling_config(request)
    shape = _decode_response_shape(config)
    if mode == "NONE":
        return None, shape
    if mode == "ANY":
        return tools, _require_call(tools, allowed)  # there is no text to which the schema could apply
    if mode == "VALIDATED" and allowed:
        _require_declared(tools, allowed)
        tools = GeminiTools(raw, allowed)
    return tools, shape


_CALLING = "toolConfig.functionCallingConfig"
_MODE = f"{_CALLING}.mode"
_ALLOWED = f"{_CALLING}.allowedFunctionNames"


def _decode_calling_config(request: GeminiRequest) -> tuple[str, dict[str, None]]:
    """Return the function calling mode and the names of the allowed functions (empty if all are allowed)."""
    tool_config = read_fields(request["toolConfig"], "toolConfig") if "toolConfig" in request else {}
    if "functionCallingConfig" not in tool_config:
        return "AUTO", {}
    calling = read_fields(tool_config["functionCallingConfig"], _CALLING)
    mode = read_field(calling, "mode", str, "AUTO", _CALLING).upper()
    allowed = dict.fromkeys(read_field(calling, "allowedFunctionNames", list[str], [], _CALLING))
    if mode not in ("AUTO", "MODE_UNSPECIFIED", "ANY", "NONE", "VALIDATED"):
        raise field_error(_MODE, f"must be AUTO, ANY, NONE or VALIDATED, not {mode!r}")
    if allowed and mode not in ("ANY", "VALIDATED"):
        raise field_error(_ALLOWED, "can only be set when the mode is ANY or VALIDATED")
    return mode, allowed


def _require_call(tools: GeminiTools | None, allowed: Collection[str]) -> Constraint:
    offered = tools.decode() if tools is not None else ()
    if tools is None or not offered:
        raise field_error(
            _MODE, "is ANY, which forces a call, but the request declares no functions; declare functions, or use AUTO"
        )
    _require_declared(tools, allowed)
    return require_any_tool([tool for tool in offered if not allowed or tool.name in allowed], parallel=True)


def _require_declared(tools: GeminiTools | None, allowed: Collection[str]) -> None:
    names = {tool.name for tool in tools.decode()} if tools is not None else set()
    for name in allowed:
        if name not in names:
            raise field_error(_ALLOWED, f"contains {name!r}, which is not a declared function")


def _decode_response_shape(config: _Config) -> Constraint | None:
    """Return the constraint on a reply that is not a tool call, or None if any text is valid."""
    schema = require_shallow(config.response_json_schema, f"{_CONFIG_FIELD}.responseJsonSchema")
    if config.response_schema is not None:
        schema = to_json_schema(config.response_schema, f"{_CONFIG_FIELD}.responseSchema")
    match config.response_mime_type:
        case "application/json":
            return Constraint("json_object") if schema is None else Constraint("json_schema", schema)
        case "text/plain" | "":
            if schema is not None:
                raise field_error(
                    f"{_CONFIG_FIELD}.responseMimeType", "must be 'application/json' if a response schema is set"
                )
            return None
        case other:
            raise field_error(
                f"{_CONFIG_FIELD}.responseMimeType",
                f"must be 'text/plain' or 'application/json', not {other!r}",
            )
