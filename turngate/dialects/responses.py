"""OpenAI Responses: `POST /v1/responses` (or a WebSocket at this path) and `POST /v1/responses/input_tokens`, which counts tokens.

The fields of a request are validated here. `responses_history.py` decodes the conversation, `responses_tools.py` decodes the tools, and
`responses_reply.py` encodes the replies. Unless a request sets `store` to false, later requests of the session may refer to its
response, and to the response's items, by id. On a WebSocket, a request may also continue the latest response of any lane
(`stream_id`) of the connection, even if that response is not stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import orjson

from turngate.dialects.base import EarlierReply, Route, WireRequest
from turngate.dialects.openai import FORWARDED_HEADERS, OpenAIErrorBody, encode_model, encode_model_list, error_body
from turngate.dialects.responses_history import ResponsesHistory
from turngate.dialects.responses_reply import OfferedTools, ResponsesReplyOptions, ResponsesStream, error_message
from turngate.dialects.responses_tools import SEARCH, ResponsesTools, flat_name, is_ignored
from turngate.dialects.wire import (
    ABSENT,
    DECODE_ERRORS,
    bearer_token,
    body_error,
    call_fields_from_headers,
    decode_text,
    describe_error,
    field_error,
    is_given,
    one_line,
    require_any_tool,
    require_shallow,
    require_tool,
    validate_sampling,
)
from turngate.errors import BadRequest, ContextOverflow, NotFound, TurngateError
from turngate.types import Call, Constraint, Done, History, Json, Tool

_ENCRYPTED = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"
# Efforts that chat templates do not support, and their replacements.
_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high", "ultra": "high"}


class PreviousResponseNotFound(BadRequest):
    """The request continues a response that is not stored in the session."""

    kind = "previous_response_not_found"


class _Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None  # older name of summary


class _Format(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: dict[str, Any] | None = None


class _Text(msgspec.Struct):
    format: _Format | None = None
    verbosity: str | None = None


class ResponsesRequest(msgspec.Struct):
    model: str | None = None
    input: str | list[msgspec.Raw] | None = None
    instructions: str | None = None
    tools: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    parallel_tool_calls: bool | None = None
    reasoning: _Reasoning | None = None
    text: msgspec.Raw = ABSENT
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None
    stream: bool | None = None
    top_logprobs: int | None = None
    metadata: msgspec.Raw = ABSENT
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: bool | None = None
    generate: bool | None = None
    previous_response_id: str | None = None
    conversation: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT
    background: bool | None = None
    context_management: msgspec.Raw = ABSENT
    moderation: msgspec.Raw = ABSENT


_request = msgspec.json.Decoder(ResponsesRequest)
_list = msgspec.json.Decoder(list[msgspec.Raw])


class Responses:
    """The responses dialect: OpenAI's Responses API."""

    name = "responses"
    routes = (
        Route("/v1/responses", socket=True),
        Route("/responses", socket=True),
        Route("/v1/responses/input_tokens", "count"),
        Route("/responses/input_tokens", "count"),
    )
    path_prefix = "/v1/responses"
    list_field = "input"
    request_type = ResponsesRequest
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
        if request.generate is False and not wire.over_socket:
            raise field_error("generate", "can be false only over a WebSocket; leave it out")
        items = _decode_history(request, wire, _find_previous(request, wire))
        offered = _collect_tools(request, items)
        text = _decode_text(request)
        constraint, tools = _decode_constraint(request, text, offered, replaceable=bool(items.offered))
        reasoning = request.reasoning or _Reasoning()
        sampling = {"temperature": request.temperature, "top_p": request.top_p}
        return Call(
            model=request.model or "",
            history=items,
            tools=tools,
            sampling=validate_sampling({name: value for name, value in sampling.items() if value is not None}),
            max_tokens=_max_tokens(request),
            constraint=constraint,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            template_kwargs=require_shallow(request.chat_template_kwargs or {}, "chat_template_kwargs"),
            template_hints=_template_hints(reasoning.effort, text.verbosity),
            stream=bool(request.stream),
            include_usage=True,
            store=request.store is not False,
            dialect=self.name,
            body=wire.received_body,
            reply_options=ResponsesReplyOptions(
                echo=_echo_request(request, reasoning),
                tools=OfferedTools((*((offered,) if offered is not None else ()), *items.list_searched_tools())),
                summary=bool(reasoning.summary or reasoning.generate_summary),
                encrypt_reasoning=_ENCRYPTED in (request.include or ()),
                previous=request.previous_response_id or "",
            ),
            **call_fields_from_headers(wire.headers, FORWARDED_HEADERS),
        )

    def extend_call(self, call: Call, history: History, wire: WireRequest) -> Call | None:
        if not isinstance(history, ResponsesHistory) or history.offered or history.search_outputs:
            return None  # some items contain tools, so the call's tools must be decoded again
        return msgspec.structs.replace(
            call, history=history, body=wire.received_body, **call_fields_from_headers(wire.headers, FORWARDED_HEADERS)
        )

    def read_stored_history(self, raws: Sequence[bytes]) -> ResponsesHistory:
        return ResponsesHistory(raws)

    def read_stored_tools(self, raw: bytes) -> ResponsesTools:
        return ResponsesTools.from_stored(raw)

    def open_stream(self, call: Call) -> ResponsesStream:
        return ResponsesStream(call)

    def encode_reply(self, call: Call, done: Done) -> bytes:
        return ResponsesStream(call).whole(done)

    def encode_count(self, tokens: int) -> bytes:
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens})

    def encode_models(self, names: Sequence[str], created: int) -> bytes:
        return encode_model_list(names, created)

    def encode_model(self, name: str, created: int) -> bytes:
        return encode_model(name, created)

    def error_status(self, error: TurngateError) -> int:
        return error.status

    def encode_error(self, error: TurngateError) -> bytes:
        if isinstance(error, ContextOverflow):
            return orjson.dumps(error_body(error, message=error_message(error), param="input"))
        missing = isinstance(error, NotFound) and error.param == "model"
        return orjson.dumps(error_body(error, code="model_not_found" if missing else None))

    def sends_in_stream(self, error: TurngateError) -> bool:
        # Agents look for a context overflow in the stream, and then compact. They recognize every other error by its HTTP status.
        return isinstance(error, ContextOverflow)


def _refuse_unsupported(request: ResponsesRequest) -> None:
    if is_given(request.conversation):
        raise field_error(
            "conversation", "is not supported; continue with previous_response_id, or send all items as input"
        )
    if is_given(request.prompt):
        raise field_error(
            "prompt", "is not supported, because no prompts are stored here; send the text of the prompt as input"
        )
    if request.background:
        raise field_error("background", "is not supported; stream the response or wait for it")
    if request.top_logprobs or _LOGPROBS in (request.include or ()):
        field = "top_logprobs" if request.top_logprobs else "include"
        raise field_error(
            field, "requests log-probabilities, which the gateway returns only in the chat dialect; do not request them"
        )
    if is_given(request.context_management) and bytes(request.context_management) != b"[]":
        raise field_error(
            "context_management",
            "is not supported, because the gateway does not compact conversations; compact them in the agent",
        )
    if is_given(request.moderation):
        raise field_error("moderation", "is not supported; leave it out")


def _find_previous(request: ResponsesRequest, wire: WireRequest) -> EarlierReply | None:
    """Find the earlier response that the request continues. Return None if the request does not continue one."""
    response_id = request.previous_response_id
    if not response_id:
        return None
    previous = wire.earlier.find(response_id) if wire.earlier is not None else None
    if previous is None:
        raise PreviousResponseNotFound(
            f"Previous response with id {response_id!r} not found: this session has no stored response with this id. Responses "
            "with store=false are not stored. Send the whole conversation as input.",
            param="previous_response_id",
        )
    return previous


def _decode_history(request: ResponsesRequest, wire: WireRequest, previous: EarlierReply | None) -> ResponsesHistory:
    conversation = request.input
    items = (
        [bytes(item) for item in conversation]
        if isinstance(conversation, list)
        else [_build_message_item("user", conversation)]
        if conversation
        else []
    )
    instructions = _build_message_item("system", request.instructions) if request.instructions else b""
    own = [*wire.known_items, *items]
    if previous is None:
        history = ResponsesHistory(own, instructions, wire.history, earlier=wire.earlier)
    else:
        before = [*previous.history.items, *previous.output]
        history = ResponsesHistory(
            [*before, *own], instructions, previous.history, earlier=wire.earlier, offset=len(before)
        )
    if not history.raws and request.generate is not False:
        other = " that is not of type 'additional_tools'; add a message" if history.items else ""
        raise field_error("input", f"must contain at least one item{other}")
    return history


def _build_message_item(role: str, text: str) -> bytes:
    """Build a message item with this text, for instructions and for an `input` that is a string."""
    return msgspec.json.encode({"role": role, "content": text})


def _collect_tools(request: ResponsesRequest, items: ResponsesHistory) -> bytes | None:
    """Return the tools of the request and of its items as one JSON list, or None if there are none."""
    raw = bytes(request.tools) if is_given(request.tools) else b"[]"
    if items.offered:
        try:
            raw = b"[" + b",".join([*map(bytes, _list.decode(raw)), *items.offered]) + b"]"
        except DECODE_ERRORS as error:
            raise BadRequest(f"tools: {describe_error(error)}", param="tools") from None
    return None if raw == b"[]" else raw


def _template_hints(effort: str | None, verbosity: str | None) -> dict[str, Json]:
    hints: dict[str, Json] = {}
    if effort is not None:
        hints["reasoning_effort"] = _EFFORTS.get(effort, effort)
    if effort == "none":
        hints |= {"enable_thinking": False, "thinking": False}
    if verbosity is not None:
        hints["verbosity"] = verbosity
    return hints


def _max_tokens(request: ResponsesRequest) -> int | None:
    value = request.max_output_tokens
    if value is not None and value < 1:
        raise field_error("max_output_tokens", f"must be at least 1, not {value}")
    return value


def _decode_text(request: ResponsesRequest) -> _Text:
    if not is_given(request.text):
        return _Text()
    try:
        return msgspec.json.decode(request.text, type=_Text)
    except DECODE_ERRORS as error:
        raise BadRequest(f"text: {describe_error(error)}", param="text") from None


def _decode_constraint(
    request: ResponsesRequest, text: _Text, offered: bytes | None, *, replaceable: bool
) -> tuple[Constraint | None, ResponsesTools | None]:
    """Return the constraint on the reply, if any, and the tools that the model sees."""
    try:
        choice: Json = msgspec.json.decode(request.tool_choice)
    except DECODE_ERRORS as error:
        raise BadRequest(f"tool_choice: {describe_error(error)}", param="tool_choice") from None
    tools = None if offered is None else ResponsesTools(offered, replaceable=replaceable)
    forced, shown = _decode_tool_choice(choice, tools, parallel=request.parallel_tool_calls is not False)
    shape = _decode_text_format(text)
    if forced is not None and shape is not None:
        raise field_error("tool_choice", "cannot force a tool together with text.format; leave one of them out")
    return forced or shape, shown


def _decode_tool_choice(
    choice: Json, tools: ResponsesTools | None, *, parallel: bool
) -> tuple[Constraint | None, ResponsesTools | None]:
    match choice:
        case None | "auto":
            return None, tools
        case "none":
            return None, None
        case "required":
            return require_any_tool(_require_tools(tools), parallel=parallel), tools
        case {"type": "function" | "custom", "name": str(name)}:
            return require_tool(_require_tools(tools), flat_name(choice.get("namespace"), name), "tool_choice"), tools
        case {"type": "tool_search"}:
            declared = _require_tools(tools)
            if not any(tool.name == SEARCH for tool in declared):
                raise field_error(
                    "tool_choice",
                    "needs a tool_search tool with execution 'client' (other tool_search tools are ignored, because the model already "
                    "sees all tools); declare one, choose another tool, or leave tool_choice out",
                )
            return require_tool(declared, SEARCH, "tool_choice"), tools
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(entries)}:
            names = _read_allowed_names(entries)
            allowed = [tool for tool in _require_tools(tools) if tool.name in names]
            if mode == "required":
                if not allowed:
                    raise field_error(
                        "tool_choice.tools",
                        "must name at least one of the tools that the request declares and the gateway supports, "
                        "because mode is 'required'",
                    )
                return require_any_tool(allowed, parallel=parallel), tools
            # Hiding a tool is the only way to keep the model from calling it.
            return None, tools.restrict_to(names) if tools is not None and allowed else None
        case {"type": str(kind)} if kind not in ("function", "custom", "allowed_tools"):
            raise field_error(
                "tool_choice",
                f"has type {kind!r}, which is not supported; choose a function, a custom tool or tool_search",
            )
        case _:
            raise field_error(
                "tool_choice",
                "must be 'none', 'auto', 'required', {'type': 'function', 'name': …}, {'type': 'custom', 'name': …}, "
                "{'type': 'tool_search'} or {'type': 'allowed_tools', 'mode': 'auto' or 'required', 'tools': […]}",
            )


def _read_allowed_names(entries: list[Json]) -> set[str]:
    names: set[str] = set()
    for n, tool in enumerate(entries):
        match tool:
            case {"type": "function" | "custom", "name": str(name)}:
                names.add(flat_name(tool.get("namespace"), name))
            case {"type": "tool_search"}:
                names.add("tool_search")
            case {"type": str(kind)} if is_ignored(kind):
                pass
            case _:
                raise field_error(
                    f"tool_choice.tools[{n}]",
                    "must be {'type': 'function', 'name': …}, {'type': 'custom', 'name': …} or {'type': 'tool_search'}",
                )
    return names


def _require_tools(tools: ResponsesTools | None) -> tuple[Tool, ...]:
    decoded = () if tools is None else tools.decode()
    if not decoded:
        raise field_error(
            "tool_choice",
            "needs tools, but the request has no tools that the gateway supports; declare a function or a custom tool, or leave "
            "tool_choice out",
        )
    return decoded


def _decode_text_format(text: _Text) -> Constraint | None:
    form = text.format or _Format()
    if form.type == "text":
        return None
    if form.type == "json_object":
        return Constraint("json_object")
    if form.schema is None:
        raise field_error("text.format.schema", "is missing")
    return Constraint("json_schema", require_shallow(form.schema, "text.format.schema"))


def _echo_request(request: ResponsesRequest, reasoning: _Reasoning) -> bytes:
    """Encode the response fields that repeat the request.

    For settings that the gateway does not support, such as `truncation`, encode the values that are in effect.

    The result is a JSON object without its braces. It must not depend on the request's items, because requests that differ only in their
    items share it.
    """

    def as_sent(field: str, default: Json) -> Json:
        raw: msgspec.Raw = getattr(request, field)
        if not is_given(raw):
            return default
        return orjson.Fragment(one_line(decode_text(bytes(raw), field)))

    echo = {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": as_sent("metadata", {}),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
        "safety_identifier": None,
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": request.temperature,
        "text": as_sent("text", {"format": {"type": "text"}}),
        "tool_choice": as_sent("tool_choice", "auto"),
        "tools": as_sent("tools", []),
        "top_logprobs": 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        "user": None,
    }
    return orjson.dumps(echo)[1:-1]
