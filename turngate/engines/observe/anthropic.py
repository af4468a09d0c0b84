"""Observe mode: relay calls to Anthropic's Messages API, `/v1/messages`.

A `messages` call is forwarded as the agent sent it, with three exceptions: the session may override settings (model, token limit,
sampling), a stream is always requested, and redacted thinking is restored. Calls of other dialects are translated. The endpoint returns
no token ids, so only text is recorded. The key is sent only in the `x-api-key` header.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from turngate.engines.base import Health, RelayChunk, RelayRequest
from turngate.engines.http import EngineClient
from turngate.engines.observe.relay import StreamingRelay
from turngate.engines.observe.translate import (
    RelayBody,
    RelayMessage,
    encode_verbatim,
    list_allowed_tools,
    list_tools,
    list_unsupported,
    parse_arguments,
    parse_fields,
    read_messages,
    reasoning_effort,
    split_system_prompt,
    translate_pinned,
    translate_sampling,
    wants_thinking,
)
from turngate.errors import BadRequest, EngineError, EngineRejected
from turngate.types import CallDelta, Constraint, Delta, Finish, Json, Tool, ToolCall, Usage

VERSION = "2023-06-01"
# The API requires a limit on the answer, but agents of other dialects may set none. `MAX_TOKENS` is then sent, or `FEWER_TOKENS`
# if the model rejects `MAX_TOKENS` as too high.
MAX_TOKENS = 32_000
FEWER_TOKENS = 4096
_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
_EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "max"}
_FINISH: dict[str, Finish] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "stop",
}
# The agent receives redacted thinking as the signature of a `thinking` block. This prefix distinguishes it from a real signature.
_REDACTED = "redacted_thinking:"


class _Block(msgspec.Struct):
    """A content block, as described by the event that starts it."""

    type: str
    text: str = ""
    thinking: str = ""
    signature: str = ""
    data: str = ""
    id: str = ""
    name: str = ""
    input: msgspec.Raw = msgspec.Raw(b"{}")


class _StopDetails(msgspec.Struct):
    explanation: str | None = None


class _Delta(msgspec.Struct):
    """New content of a block, or new fields of the message."""

    type: str = ""
    text: str = ""
    thinking: str = ""
    signature: str = ""
    partial_json: str = ""
    stop_reason: str | None = None
    stop_sequence: str | None = None
    stop_details: _StopDetails | None = None


class _OutputDetails(msgspec.Struct):
    thinking_tokens: int | None = None


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    output_tokens_details: _OutputDetails | None = None


class _Message(msgspec.Struct):
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    type: str
    message: _Message | None = None
    index: int = 0
    content_block: _Block | None = None
    delta: _Delta | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


class _Count(msgspec.Struct):
    input_tokens: int


_decode = msgspec.json.Decoder(_Event).decode


class AnthropicRelay(StreamingRelay):
    """A relay to one Anthropic endpoint. `url` is the base URL as in Anthropic's SDKs, with or without `/v1`."""

    dialect = "messages"

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        name: str = "anthropic",
        connect_s: float = 10.0,
        silence_s: float | None = None,
    ) -> None:
        self.name = name
        headers = {"anthropic-version": VERSION, **({"x-api-key": key} if key else {})}
        root = url.rstrip("/").removesuffix("/v1")
        super().__init__(EngineClient(name, root, key=key, headers=headers, connect_s=connect_s, silence_s=silence_s))

    def __repr__(self) -> str:
        return f"AnthropicRelay({self._client.url!r})"

    async def health(self) -> list[Health]:
        return await self._probe("/v1/models")

    async def count(self, request: RelayRequest) -> int:
        if request.call.dialect == self.dialect:
            body: dict[str, Any] = {**parse_fields("the body", request.call.body)}
            if request.model:
                body["model"] = request.model
        else:
            written = _translate(request, frozenset()).body
            body = {name: written[name] for name in ("model", "system", "messages", "tools") if name in written}
        return (await self._request_count("/v1/messages/count_tokens", body, _Count, request)).input_tokens

    def _path(self, request: RelayRequest) -> str:
        return "/v1/messages"

    def _write(self, request: RelayRequest, without: frozenset[str]) -> RelayBody:
        if request.call.dialect == self.dialect:
            return RelayBody(_override_body(request))
        return _translate(request, without)

    def _answer(self, request: RelayRequest) -> _Answer:
        return _Answer(self._client, keep_verbatim=request.call.dialect != self.dialect)


def _override_body(request: RelayRequest) -> dict[str, Any]:
    """Override the model, token limit and sampling in the agent's body, request a stream, and restore redacted thinking."""
    body: dict[str, Any] = {**parse_fields("the body", request.call.body), "stream": True}
    if request.model:
        body["model"] = request.model
    if request.max_tokens is not None:
        body["max_tokens"] = request.max_tokens
    if request.sampling is not None:
        for name in _SAMPLING:
            body.pop(name, None)
        # This API treats absent fields as neutral.
        body.update(translate_pinned("anthropic", request.sampling, _SAMPLING))
    if _REDACTED.encode() in request.call.body:
        body["messages"] = [_restore_redacted(message) for message in msgspec.json.decode(body["messages"])]
    return body


def _restore_redacted(message: Json) -> Json:
    """Restore the redacted thinking blocks of a message. The agent received them as signatures."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    return {**message, "content": [_restore_block(block) for block in message["content"]]}


def _restore_block(block: Json) -> Json:
    match block:
        case {"type": "thinking", "signature": str(seal)} if seal.startswith(_REDACTED):
            return {"type": "redacted_thinking", "data": seal.removeprefix(_REDACTED)}
        case _:
            return block


# ── translation from other dialects ────────────────────────────────────────────────────────────────────────────────────


def _translate(request: RelayRequest, without: frozenset[str]) -> RelayBody:
    call = request.call
    system, rest = split_system_prompt(read_messages(request, _clean_id))
    tools = list_tools(call)
    body: dict[str, Any] = {"model": request.model or call.model, "stream": True}
    optional: dict[str, tuple[str, ...]] = {}
    lost: list[str] = []
    body["max_tokens"] = request.max_tokens
    if request.max_tokens is None:
        optional["max_tokens"] = ("max_tokens",)
        body["max_tokens"] = FEWER_TOKENS if "max_tokens" in without else MAX_TOKENS
    if "cache_control" not in without:  # agents of other dialects rely on automatic caching
        optional["cache_control"] = ("cache_control",)
        body["cache_control"] = {"type": "ephemeral"}
    if system:
        body["system"] = system
    body["messages"] = _messages(rest, "system" in without, lost)
    if any(entry.message.role == "system" for entry in rest):
        optional["system"] = ("role",)
    if call.stop:
        body["stop_sequences"] = list(call.stop)
    if tools:
        body["tools"] = [_tool(tool) for tool in tools]
        body |= _choice(call.constraint, tools, parallel=call.parallel_tool_calls)
    body |= _thinking(request, without, optional, lost)
    if request.sampling is not None:
        body |= translate_pinned("anthropic", request.sampling, _SAMPLING)
    else:
        sampling, unsupported = translate_sampling(call, _SAMPLING, without)
        optional |= {name: (name,) for name in sampling}
        lost += unsupported
        body |= sampling
    lost += list_unsupported(call)
    return RelayBody(body, optional, tuple(dict.fromkeys(lost)))


def _messages(history: Sequence[RelayMessage], as_user: bool, lost: list[str]) -> list[Json]:
    """Translate the messages. Consecutive user messages and tool results are merged.

    With `as_user`, system messages in the middle of the conversation become user messages.
    """
    messages: list[dict[str, Any]] = []
    for entry in history:
        message = entry.message
        role, blocks = "user", []
        match message.role:
            case "assistant":
                role, blocks = "assistant", _turn(entry, lost)
            case "tool":
                result = {"type": "tool_result", "tool_use_id": message.tool_call_id}
                blocks = [{**result, "content": message.content} if message.content else result]
            case "system" if not as_user:
                role, blocks = "system", _text(message.content)
            case "system":
                lost.append("the role of later system messages")
                blocks = _text(message.content)
            case "user":
                if message.name:
                    lost.append("names of users")
                blocks = _text(message.content)
        if messages and messages[-1]["role"] == role == "user":
            messages[-1]["content"] += blocks
        elif blocks:
            messages.append({"role": role, "content": blocks})
    return messages


def _turn(entry: RelayMessage, lost: list[str]) -> list[Json]:
    if entry.turn is not None:
        blocks: list[Json] = msgspec.json.decode(entry.turn)
        return blocks
    if entry.message.reasoning:
        lost.append("reasoning of earlier turns")  # the API accepts only signed reasoning
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": parse_arguments(call.arguments)}
        for call in entry.message.tool_calls
    ]
    return [*_text(entry.message.content), *calls]


def _text(text: str) -> list[Json]:
    """Build a list with one text block, or an empty list for blank text, which the API rejects."""
    return [{"type": "text", "text": text}] if text.strip() else []


def _clean_id(call_id: str) -> str:
    """Replace characters that the API does not allow in an id."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", call_id)


def _tool(tool: Tool) -> Json:
    function = tool.wire["function"]
    wire = {"name": tool.name, "input_schema": function.get("parameters") or {"type": "object", "properties": {}}}
    return wire if function.get("description") is None else {**wire, "description": function["description"]}


def _choice(constraint: Constraint | None, tools: Sequence[Tool], *, parallel: bool) -> dict[str, Json]:
    choice: dict[str, Json] = {}
    if constraint is not None and constraint.kind == "tool":
        choice = {"type": "tool", "name": constraint.tool}
    elif constraint is not None and constraint.kind == "tools":
        if list_allowed_tools(constraint, tools):
            raise BadRequest(
                "tool choice: the observed endpoint cannot restrict the choice to some of the tools; "
                "allow all tools, or require a specific one"
            )
        choice = {"type": "any"}
    if not parallel:
        choice = {"type": "auto", **choice, "disable_parallel_tool_use": True}
    return {"tool_choice": choice} if choice else {}


def _thinking(
    request: RelayRequest, without: frozenset[str], optional: dict[str, tuple[str, ...]], lost: list[str]
) -> dict[str, Json]:
    """Build the fields for thinking and for structured output."""
    fields: dict[str, Json] = {}
    config: dict[str, Json] = {}
    constraint = request.call.constraint
    if constraint is not None and constraint.kind == "json_schema":
        config["format"] = {"type": "json_schema", "schema": constraint.schema}
    elif constraint is not None and constraint.kind == "json_object":
        raise BadRequest("output format: the observed endpoint supports JSON output only with a schema; set one")
    thinks, effort = wants_thinking(request.call), reasoning_effort(request.call)
    if thinks is not None:
        optional["thinking"] = ("thinking", "adaptive")
        if "thinking" not in without:
            fields["thinking"] = {"type": "adaptive", "display": "summarized"} if thinks else {"type": "disabled"}
        elif not thinks:
            lost.append("disabling thinking")
    if effort and thinks:
        optional["effort"] = ("effort",)
        if "effort" not in without and effort in _EFFORTS:
            config["effort"] = _EFFORTS[effort]
        else:
            lost.append("reasoning_effort")
    return {**fields, "output_config": config} if config else fields


# ── the answer ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Answer:
    """A collector that turns the events of one reply into chunks.

    With `keep_verbatim`, a turn that contains thinking is also kept in the endpoint's format, because an agent of a different dialect may
    not send all of it back.
    """

    def __init__(self, client: EngineClient, *, keep_verbatim: bool) -> None:
        self.finish: Finish | None = None
        self._client = client
        self._keep_verbatim = keep_verbatim
        self._usage = _Usage()
        self._blocks: list[dict[str, Any]] = []  # the turn in the endpoint's format
        self._open: _Block | None = None
        self._input: list[str] = []
        self._calls: list[ToolCall] = []
        self._has_output = False
        self._stopped_by = ""
        self._fault = ""

    def add(self, data: bytes) -> RelayChunk | None:
        event = self._client.decode(_decode, data)
        events: list[Delta | CallDelta] = []
        match event.type:
            case "message_start" if event.message is not None:
                self._count(event.message.usage)
                return RelayChunk(usage=self._build_usage())
            case "content_block_start" if event.content_block is not None:
                events = self._begin(event.content_block)
            case "content_block_delta" if event.delta is not None:
                events = self._add(event.delta)
            case "content_block_stop":
                events = self._close()
            case "message_delta":
                self._count(event.usage)
                self._end(event.delta or _Delta())
            case "error":
                raise self._client.failure_in_stream(event.error, default_status=500)
        self._has_output = self._has_output or bool(events)
        return RelayChunk(tuple(events)) if events else None

    def end(self) -> RelayChunk:
        if self._fault and not self._has_output:
            raise EngineRejected(self._fault)
        sealed = any(block["type"] in ("thinking", "redacted_thinking") for block in self._blocks)
        return RelayChunk(
            finish=self.finish,
            usage=self._build_usage(),
            stopped_by=self._stopped_by,
            fault=self._fault,
            verbatim=encode_verbatim(self._blocks, [call.id for call in self._calls])
            if self._keep_verbatim and sealed
            else b"",
        )

    def _begin(self, block: _Block) -> list[Delta | CallDelta]:
        self._open, self._input = block, []
        match block.type:
            case "text":
                self._blocks.append({"type": "text", "text": ""})
                return self._more("text", "content", block.text)
            case "thinking":
                self._blocks.append({"type": "thinking", "thinking": "", "signature": ""})
                return self._more("thinking", "reasoning", block.thinking) + self._add_signature(block.signature)
            case "redacted_thinking":
                self._blocks.append({"type": "redacted_thinking", "data": block.data})
                return [] if self._keep_verbatim else [Delta("signature", _REDACTED + block.data)]
            case "tool_use":
                self._blocks.append({"type": "tool_use", "id": block.id, "name": block.name, "input": {}})
                return []
            case _:
                raise EngineError(f"{self._client.engine} sent a block of type {block.type!r}, which is not supported")

    def _add(self, delta: _Delta) -> list[Delta | CallDelta]:
        match delta.type:
            case "text_delta":
                return self._more("text", "content", delta.text)
            case "thinking_delta":
                return self._more("thinking", "reasoning", delta.thinking)
            case "signature_delta":
                return self._add_signature(delta.signature)
            case "input_json_delta":
                self._input.append(delta.partial_json)
        return []  # citations are dropped

    def _more(self, field: str, kind: Any, text: str) -> list[Delta | CallDelta]:
        if not text:
            return []
        self._blocks[-1][field] += text
        return [Delta(kind, text)]

    def _add_signature(self, signature: str) -> list[Delta | CallDelta]:
        if not signature:
            return []
        self._blocks[-1]["signature"] += signature
        return [] if self._keep_verbatim else [Delta("signature", signature)]

    def _close(self) -> list[Delta | CallDelta]:
        block, self._open = self._open, None
        if block is None or block.type != "tool_use":
            return []
        text = "".join(self._input) or bytes(block.input).decode()
        call = ToolCall(block.id or f"toolu_{uuid.uuid4().hex[:24]}", block.name, text)
        self._blocks[-1] |= {"id": call.id, "input": parse_arguments(text)}
        self._calls.append(call)
        return [CallDelta(len(self._calls) - 1, call)]

    def _end(self, delta: _Delta) -> None:
        if delta.stop_reason is None:
            return
        if delta.stop_reason not in _FINISH:
            raise EngineError(
                f"{self._client.engine} sent the stop reason {delta.stop_reason!r}, which is not supported"
            )
        self.finish = _FINISH[delta.stop_reason]
        self._stopped_by = delta.stop_sequence or ""
        if delta.stop_reason == "refusal":
            why = delta.stop_details.explanation if delta.stop_details is not None else None
            self._fault = f"{self._client.engine} refused to answer" + (f": {why}" if why else "")

    def _count(self, usage: _Usage | None) -> None:
        """Update the usage. The numbers in an event are totals, so they replace earlier ones."""
        for name in _Usage.__struct_fields__ if usage is not None else ():
            if (value := getattr(usage, name)) is not None:
                setattr(self._usage, name, value)

    def _build_usage(self) -> Usage | None:
        seen = self._usage
        if seen.input_tokens is None and seen.output_tokens is None:
            return None
        cached = seen.cache_read_input_tokens or 0
        prompt = (seen.input_tokens or 0) + (seen.cache_creation_input_tokens or 0) + cached
        details = seen.output_tokens_details
        return Usage(prompt, seen.output_tokens or 0, cached, (details.thinking_tokens if details else None) or 0)
