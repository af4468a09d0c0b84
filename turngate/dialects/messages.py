"""Anthropic Messages: `POST /v1/messages` and `POST /v1/messages/count_tokens`.

`Messages.decode` validates a request, but keeps its messages and tools as raw JSON until they are needed. A message that the gateway has
already seen is usually not decoded again. `messages_history.py` decodes messages and tools, and `messages_reply.py` encodes replies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import orjson

from turngate.dialects import messages_reply as reply
from turngate.dialects.base import Route, WireRequest
from turngate.dialects.messages_history import MessagesHistory, MessagesTools
from turngate.dialects.wire import (
    ABSENT,
    DECODE_ERRORS,
    bearer_token,
    body_error,
    call_fields_from_headers,
    field_error,
    is_given,
    require_any_tool,
    require_shallow,
    require_tool,
    validate_sampling,
    validate_stops,
)
from turngate.errors import BadRequest, TurngateError
from turngate.types import Call, Constraint, Done, History, Json

# A billing header that Claude Code writes into the system prompt. It changes with every call, so it is removed.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
_FORWARDED_HEADERS = ("anthropic-version", "anthropic-beta")
# Efforts that chat templates do not support, and their replacements.
_EFFORTS = {"xhigh": "high", "max": "high"}


class _SystemPart(msgspec.Struct):
    type: str
    text: str | None = None


class _Thinking(msgspec.Struct):
    type: str
    budget_tokens: int | None = None
    display: str | None = None


class _Format(msgspec.Struct):
    type: str
    schema: dict[str, Any] | None = None


class _OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: _Format | None = None


class _ToolChoice(msgspec.Struct):
    type: str
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class MessagesRequest(msgspec.Struct):
    messages: list[msgspec.Raw]
    model: str = ""
    system: str | list[_SystemPart] | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    tools: msgspec.Raw = ABSENT
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: _Format | None = None  # older name of output_config.format
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    context_management: msgspec.Raw = ABSENT
    mcp_servers: msgspec.Raw = ABSENT
    container: msgspec.Raw = ABSENT
    compaction: msgspec.Raw = ABSENT
    thread: msgspec.Raw = ABSENT


_request = msgspec.json.Decoder(MessagesRequest)


class Messages:
    """The messages dialect: Anthropic's Messages API."""

    name = "messages"
    routes = (
        Route("/v1/messages"),
        Route("/v1/messages/count_tokens", "count"),
        Route("/messages"),
        Route("/messages/count_tokens", "count"),
    )
    path_prefix = "/v1/messages"
    list_field = "messages"
    request_type = MessagesRequest
    error_type = reply.MessagesErrorBody
    key_header = "x-api-key"
    request_id_header = "request-id"

    def read_key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str:
        return headers.get(self.key_header, "").strip() or bearer_token(headers)

    def decode(self, wire: WireRequest) -> Call:
        try:
            request = _request.decode(wire.body)
        except DECODE_ERRORS as error:
            raise body_error(error) from None
        _refuse_unsupported(request)
        tools = (
            MessagesTools(bytes(request.tools)) if is_given(request.tools) and bytes(request.tools) != b"[]" else None
        )
        items = [*wire.known_items, *map(bytes, request.messages)]
        history = MessagesHistory(items, tools, _decode_system_prompt(request.system), wire.history)
        if not history.raws:
            raise field_error("messages", "must contain at least one non-empty message")
        if history.last == "assistant" and wire.verb != "count":
            raise BadRequest(
                "messages: This model does not support assistant message prefill. The conversation must end with a user "
                "message. To shape the reply, use output_config.format or tool_choice.",
                param="messages",
            )
        parallel = not (request.tool_choice and request.tool_choice.disable_parallel_tool_use)
        sampling = {n: v for n in ("temperature", "top_p", "top_k") if (v := getattr(request, n)) is not None}
        return Call(
            model=request.model,
            history=history,
            tools=None if request.tool_choice and request.tool_choice.type == "none" else tools,
            sampling=validate_sampling(sampling),
            max_tokens=request.max_tokens,
            stop=validate_stops("stop_sequences", request.stop_sequences),
            constraint=_decode_constraint(request, tools, parallel=parallel),
            parallel_tool_calls=parallel,
            template_hints=_template_hints(request),
            stream=bool(request.stream),
            include_usage=True,
            dialect=self.name,
            body=wire.received_body,
            reply_options=reply.MessagesReplyOptions(
                _decode_thinking_display(request.thinking), is_given(request.context_management)
            ),
            **call_fields_from_headers(wire.headers, _FORWARDED_HEADERS),
        )

    def extend_call(self, call: Call, history: History, wire: WireRequest) -> Call | None:
        if not isinstance(history, MessagesHistory) or history.last == "assistant":
            return None  # `decode` decides whether to reject a conversation that ends with the assistant
        return msgspec.structs.replace(
            call, history=history, body=wire.received_body, **call_fields_from_headers(wire.headers, _FORWARDED_HEADERS)
        )

    def read_stored_history(self, raws: Sequence[bytes]) -> MessagesHistory:
        return MessagesHistory(raws)

    def read_stored_tools(self, raw: bytes) -> MessagesTools:
        return MessagesTools(raw)

    def open_stream(self, call: Call) -> reply.MessagesStream:
        return reply.MessagesStream(call)

    def encode_reply(self, call: Call, done: Done) -> bytes:
        return reply.encode_reply(call, done)

    def encode_count(self, tokens: int) -> bytes:
        return orjson.dumps({"input_tokens": tokens})

    def encode_models(self, names: Sequence[str], created: int) -> bytes:
        return reply.encode_models(names, created)

    def encode_model(self, name: str, created: int) -> bytes:
        return reply.encode_model(name, created)

    def error_status(self, error: TurngateError) -> int:
        return reply.status_and_type(error)[0]

    def encode_error(self, error: TurngateError) -> bytes:
        return reply.error_body(error)

    def sends_in_stream(self, error: TurngateError) -> bool:
        return False


def _decode_system_prompt(system: str | list[_SystemPart] | None) -> str:
    if isinstance(system, str):
        return _BILLING.sub("", system)
    texts = []
    for n, part in enumerate(system or ()):
        if part.type != "text":
            raise field_error(f"system.{n}.type", f"must be 'text', not {part.type!r}")
        texts.append(_BILLING.sub("", part.text or ""))
    return "\n".join(text for text in texts if text)


def _refuse_unsupported(request: MessagesRequest) -> None:
    if not request.messages:
        raise field_error("messages", "must contain at least one message")
    if request.max_tokens is not None and request.max_tokens < 1:
        raise field_error("max_tokens", f"must be at least 1, not {request.max_tokens}")
    if is_given(request.mcp_servers) and bytes(request.mcp_servers) != b"[]":
        raise field_error(
            "mcp_servers", "is not supported; connect to the servers from the agent and declare their tools"
        )
    if is_given(request.container):
        raise field_error("container", "is not supported (nor are skills); leave it out")
    if is_given(request.compaction):
        raise field_error("compaction", "is not supported; send a message that asks the model for a summary instead")
    if is_given(request.thread):
        raise reply.ThreadsUnsupported(
            "thread is not supported; send all messages of the conversation instead", param="thread"
        )


def _decode_thinking_display(thinking: _Thinking | None) -> Literal["none", "hidden", "shown"]:
    """Return how the reply shows thinking. If the request does not ask for thinking, return "none", even if the model thinks."""
    if thinking is None or thinking.type == "disabled":
        return "none"
    return "hidden" if thinking.display == "omitted" else "shown"


def _template_hints(request: MessagesRequest) -> dict[str, Json]:
    """Translate the request's thinking and effort settings into chat template arguments."""
    hints: dict[str, Json] = {}
    thinking, output = request.thinking, request.output_config
    if thinking is not None:
        if thinking.type not in ("enabled", "adaptive", "disabled", "between_tools"):
            raise field_error(
                "thinking.type", f"must be one of enabled, adaptive, disabled, between_tools, not {thinking.type!r}"
            )
        if thinking.type != "between_tools":
            hints["enable_thinking"] = hints["thinking"] = thinking.type != "disabled"
        if thinking.type == "enabled" and thinking.budget_tokens is not None:
            hints["thinking_budget"] = thinking.budget_tokens
    if output is not None and output.effort is not None:
        hints["reasoning_effort"] = _EFFORTS.get(output.effort, output.effort)
    return hints


def _decode_constraint(request: MessagesRequest, tools: MessagesTools | None, *, parallel: bool) -> Constraint | None:
    """Return the constraint on the reply, or None if any reply is valid."""
    forced = _decode_tool_choice(request.tool_choice, tools, parallel=parallel)
    form, field = request.output_format, "output_format"
    if request.output_config is not None and request.output_config.format is not None:
        form, field = request.output_config.format, "output_config.format"
    if form is None:
        return forced
    if form.type != "json_schema":
        raise field_error(f"{field}.type", f"must be 'json_schema', not {form.type!r}")
    if form.schema is None:
        raise field_error(f"{field}.schema", "is missing")
    shape = Constraint("json_schema", require_shallow(form.schema, f"{field}.schema"))
    return forced or shape  # if a tool call is forced, there is no text to which the format could apply


def _decode_tool_choice(
    choice: _ToolChoice | None, tools: MessagesTools | None, *, parallel: bool
) -> Constraint | None:
    if choice is None or choice.type in ("auto", "none"):
        return None
    if choice.type not in ("any", "tool"):
        raise field_error("tool_choice.type", f"must be one of auto, any, tool, none, not {choice.type!r}")
    if tools is None:
        raise field_error(
            "tool_choice", "forces a tool call, but the request has no tools; declare tools, or leave tool_choice out"
        )
    if choice.type == "any":
        return require_any_tool(tools.decode(), parallel=parallel)
    return require_tool(tools.decode(), choice.name, "tool_choice.name")
