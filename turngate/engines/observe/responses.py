"""Observe mode: relay calls to OpenAI's Responses API, `/v1/responses`.

A `responses` call is forwarded as the agent sent it, with these exceptions: the session may override settings (model, token limit,
sampling), a stream is always requested, and items, tools and `include` are changed as described below. Calls of other dialects are
translated, and the provider is asked not to store them. Text is recorded, and with `capture="logprobs"` also its log-probabilities. The
key is sent only in the `Authorization` header.

Items that a `responses` call refers to by id are sent in full, because the provider does not know the gateway's ids. Item ids and
encrypted content that the gateway created are removed, and encrypted items get back the id that the provider gave them. Fields that occur
only in calls over a WebSocket are removed. Tools for web search and image generation are removed, because they run at the provider, and the
gateway cannot forward their items. Encrypted reasoning is requested unless the endpoint has rejected such a request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from turngate.engines.base import Health, RelayChunk, RelayRequest
from turngate.engines.http import EngineClient, clean_logprobs, is_present
from turngate.engines.observe.relay import StreamingRelay
from turngate.engines.observe.translate import (
    RelayBody,
    RelayMessage,
    encode_verbatim,
    list_allowed_tools,
    list_tools,
    list_unsupported,
    parse_fields,
    read_messages,
    reasoning_effort,
    split_system_prompt,
    translate_pinned,
    translate_sampling,
    wants_thinking,
)
from turngate.errors import BadRequest, EngineError, EngineRejected, TurngateError
from turngate.types import CallDelta, Capture, Constraint, Delta, Finish, Json, Tool, ToolCall, Usage

_SAMPLING = {"temperature": "temperature", "top_p": "top_p"}
_ENCRYPTED_REASONING = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"
_GATEWAY_ITEM_ID = re.compile(r"[a-z]+_tg[0-9a-f]{24}")  # item ids that the gateway created
# The endpoint's id of an item and the item's encrypted content, which agents receive as one string.
_ID_AND_ENCRYPTED = re.compile(r"(?s)([a-z]+_[0-9A-Za-z_-]+):(.+)")
_PLACEHOLDER_PREFIX = "tg1."  # prefix of encrypted content that the gateway created because the endpoint sent none
_HOSTED = ("web_search", "image_generation")
_PLAIN = (None, "", "functions")  # namespaces that are not part of a function's name
_COUNTED = ("model", "instructions", "input", "tools", "tool_choice", "parallel_tool_calls", "reasoning", "text")
_SOCKET_FIELDS = ("type", "stream_id", "generate")  # fields that occur only in calls over a WebSocket
_INCOMPLETE: dict[str, Finish] = {"max_output_tokens": "length", "content_filter": "stop"}


class _Logprob(msgspec.Struct):
    logprob: float | None = None


class _Item(msgspec.Struct):
    """A complete item of the answer."""

    type: str
    id: str | None = None
    encrypted_content: str | None = None
    content: list[Any] | None = None
    phase: str | None = None
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: msgspec.Raw = msgspec.Raw(b'"{}"')
    input: str = ""


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _PromptDetails | None = None
    output_tokens_details: _OutputDetails | None = None


class _Incomplete(msgspec.Struct):
    reason: str | None = None


class _Response(msgspec.Struct):
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()
    incomplete_details: _Incomplete | None = None


class _Event(msgspec.Struct):
    type: str = ""
    delta: str = ""
    summary_index: int = 0
    logprobs: list[_Logprob] | None = None
    item: msgspec.Raw = msgspec.Raw()
    response: _Response | None = None
    error: msgspec.Raw = msgspec.Raw()
    code: str | None = None
    message: str | None = None


class _Count(msgspec.Struct):
    input_tokens: int


_decode = msgspec.json.Decoder(_Event).decode
_item = msgspec.json.Decoder(_Item).decode
_raws = msgspec.json.Decoder(list[msgspec.Raw]).decode


class ResponsesRelay(StreamingRelay):
    """A relay to one Responses endpoint. `url` is the base URL; `/v1` is added if the URL has no path."""

    dialect = "responses"

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        capture: Capture | Literal["auto"] = "auto",
        name: str = "responses",
        connect_s: float = 10.0,
        silence_s: float | None = None,
    ) -> None:
        self.name = name
        self._logprobs = capture == "logprobs"
        root = url.rstrip("/")
        base = root if urlsplit(root).path else f"{root}/v1"
        super().__init__(EngineClient(name, base, key=key, connect_s=connect_s, silence_s=silence_s))

    def __repr__(self) -> str:
        return f"ResponsesRelay({self._client.url!r})"

    async def health(self) -> list[Health]:
        return await self._probe("/models")

    async def count(self, request: RelayRequest) -> int:
        if request.call.dialect == self.dialect:
            body = _override_body(request, frozenset(), logprobs=False).body
        else:
            body = _translate(request, frozenset(), logprobs=False).body
        body = {name: body[name] for name in _COUNTED if name in body}
        return (await self._request_count("/responses/input_tokens", body, _Count, request)).input_tokens

    def _path(self, request: RelayRequest) -> str:
        return "/responses"

    def _write(self, request: RelayRequest, without: frozenset[str]) -> RelayBody:
        if request.call.dialect == self.dialect:
            return _override_body(request, without, logprobs=self._logprobs)
        return _translate(request, without, logprobs=self._logprobs)

    def _answer(self, request: RelayRequest) -> _Answer:
        return _Answer(self._client, keep_verbatim=request.call.dialect != self.dialect)


def _override_body(request: RelayRequest, without: frozenset[str], *, logprobs: bool) -> RelayBody:
    """Apply the session's settings, request a stream, extend `include`, restore items, and remove tools that run at the provider."""
    body: dict[str, Any] = {**parse_fields("the body", request.call.body), "stream": True}
    for name in _SOCKET_FIELDS:
        body.pop(name, None)
    lost: list[str] = []
    if request.model:
        body["model"] = request.model
    if request.max_tokens is not None:
        body["max_output_tokens"] = request.max_tokens
    if request.sampling is not None:
        for name in _SAMPLING:
            body.pop(name, None)
        # This API treats absent fields as neutral.
        body.update(translate_pinned("responses", request.sampling, _SAMPLING))
    needed = {_ENCRYPTED_REASONING, _LOGPROBS} if logprobs else {_ENCRYPTED_REASONING}
    requested = [str(msgspec.json.decode(name)) for name in _list(body.get("include"))]
    added = [name for name in sorted(needed - set(requested)) if name not in without]
    if requested or added:
        body["include"] = requested + added
    previous = body.pop("previous_response_id", None)
    if (previous is not None and bytes(previous) != b"null") or _list(body.get("input")):
        body["input"] = [_restore_item(msgspec.Raw(item)) for item in request.call.history.items]
    if tools := _list(body.get("tools")):
        types = [_type(tool) for tool in tools]
        lost += [f"the tool {kind}" for kind in types if kind.startswith(_HOSTED)]
        body["tools"] = [tool for tool, kind in zip(tools, types, strict=True) if not kind.startswith(_HOSTED)]
    return RelayBody(body, _optional_includes(added), tuple(lost))


def _list(raw: msgspec.Raw | None) -> list[msgspec.Raw]:
    """Return the raw items of a JSON list, or an empty list if `raw` is not a list."""
    return _raws(raw) if raw is not None and bytes(raw).startswith(b"[") else []


def _type(tool: msgspec.Raw) -> str:
    decoded = msgspec.json.decode(tool)
    return str(decoded.get("type")) if isinstance(decoded, dict) else ""


def _optional_includes(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    words = {_ENCRYPTED_REASONING: ("encrypted content", "encrypted_content"), _LOGPROBS: ("logprobs",)}
    return {name: words[name] for name in names}


def _restore_item(raw: msgspec.Raw) -> Json:
    """Remove an item's id and encrypted content if the gateway created them, or restore those that the endpoint sent."""
    if b"_tg" not in bytes(raw) and b'"encrypted_content"' not in bytes(raw):
        return raw
    item = msgspec.json.decode(raw)
    if not isinstance(item, dict):
        return raw
    if _GATEWAY_ITEM_ID.match(str(item.get("id"))):
        del item["id"]
    seal = item.get("encrypted_content")
    if isinstance(seal, str) and seal.startswith(_PLACEHOLDER_PREFIX):
        del item["encrypted_content"]
    elif isinstance(seal, str) and (match := _ID_AND_ENCRYPTED.fullmatch(seal)):
        item["id"], item["encrypted_content"] = match.groups()
    return item


# ── translation from other dialects ────────────────────────────────────────────────────────────────────────────────────


def _translate(request: RelayRequest, without: frozenset[str], *, logprobs: bool) -> RelayBody:
    call = request.call
    if call.stop:
        raise BadRequest("stop: the observed endpoint does not support stop strings; remove them", param="stop")
    system, rest = split_system_prompt(read_messages(request))
    tools = list_tools(call)
    lost: list[str] = []
    body: dict[str, Any] = {"model": request.model or call.model, "stream": True, "store": False}
    if system:
        body["instructions"] = system
    body["input"] = [item for entry in rest for item in _items(entry, lost)]
    include = [name for name in (_ENCRYPTED_REASONING, *([_LOGPROBS] if logprobs else [])) if name not in without]
    optional = _optional_includes(include)
    if include:
        body["include"] = include
    if request.max_tokens is not None:
        body["max_output_tokens"] = request.max_tokens
    if tools:
        body["tools"] = [_tool(tool) for tool in tools]
        if not call.parallel_tool_calls:
            body["parallel_tool_calls"] = False
    body |= _constraint_fields(call.constraint, tools)
    body |= _thinking(request, without, optional, lost)
    if request.sampling is not None:
        body |= translate_pinned("responses", request.sampling, _SAMPLING)
    else:
        sampling, unsupported = translate_sampling(call, _SAMPLING, without)
        optional |= {name: (name,) for name in sampling}
        lost += unsupported
        body |= sampling
    lost += list_unsupported(call)
    return RelayBody(body, optional, tuple(dict.fromkeys(lost)))


def _items(entry: RelayMessage, lost: list[str]) -> list[Json]:
    message = entry.message
    match message.role:
        case "tool":
            return [{"type": "function_call_output", "call_id": message.tool_call_id, "output": message.content}]
        case "assistant" if entry.turn is not None:
            items: list[Json] = msgspec.json.decode(entry.turn)
            return items
        case "assistant":
            if message.reasoning:
                lost.append("reasoning of earlier turns")  # the API accepts only encrypted reasoning
            content = [{"type": "output_text", "text": message.content}] if message.content else []
            texts = [{"type": "message", "role": "assistant", "content": content}] if content else []
            calls = [
                {"type": "function_call", "call_id": c.id, "name": c.name, "arguments": c.arguments}
                for c in message.tool_calls
            ]
            return [*texts, *calls]
        case role:
            if message.name:
                lost.append("names of users")
            content = [{"type": "input_text", "text": message.content}]
            return [{"type": "message", "role": "developer" if role == "system" else role, "content": content}]


def _tool(tool: Tool) -> Json:
    function = tool.wire["function"]
    return {
        "type": "function",
        "name": tool.name,
        "description": function.get("description"),
        "parameters": function.get("parameters") or {"type": "object", "properties": {}},
        "strict": bool(function.get("strict")),
    }


def _constraint_fields(constraint: Constraint | None, tools: Sequence[Tool]) -> dict[str, Json]:
    match constraint:
        case Constraint(kind="tool", tool=name):
            return {"tool_choice": {"type": "function", "name": name}}
        case Constraint(kind="tools"):
            some = [{"type": "function", "name": name} for name in list_allowed_tools(constraint, tools)]
            return {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": some} if some else "required"}
        case Constraint(kind="json_schema", schema=schema):
            form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": False}
            return {"text": {"format": form}}
        case Constraint(kind="json_object"):
            return {"text": {"format": {"type": "json_object"}}}
        case _:
            return {}


def _thinking(
    request: RelayRequest, without: frozenset[str], optional: dict[str, tuple[str, ...]], lost: list[str]
) -> dict[str, Json]:
    """Build the reasoning settings. Summaries are requested and recorded unless thinking is off or the endpoint has rejected them."""
    effort = reasoning_effort(request.call) or ("none" if wants_thinking(request.call) is False else "")
    optional["summary"] = ("summar",)
    optional["effort"] = ("effort",)
    optional["reasoning"] = ("'reasoning'", "reasoning is not", "reasoning_summary")
    if "reasoning" in without:
        lost += ["reasoning_effort"] if effort else []
        return {}
    config: dict[str, Json] = {} if "summary" in without or effort == "none" else {"summary": "auto"}
    if effort and "effort" not in without:
        config["effort"] = "xhigh" if effort == "max" else effort
    elif effort:
        lost.append("reasoning_effort")
    return {"reasoning": config} if config else {}


# ── the answer ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Answer:
    """A collector that turns the events of one reply into chunks.

    With `keep_verbatim`, a turn that must be sent back unchanged is also kept in the endpoint's format, because an agent of a different
    dialect may not send all of it back.
    """

    def __init__(self, client: EngineClient, *, keep_verbatim: bool) -> None:
        self.finish: Finish | None = None
        self._client = client
        self._keep_verbatim = keep_verbatim
        self._usage: Usage | None = None
        self._items: list[msgspec.Raw] = []  # the turn in the endpoint's format
        self._must_return = False  # whether the items must be sent back unchanged
        self._calls: list[ToolCall] = []
        self._has_output = False
        self._fault = ""

    def add(self, data: bytes) -> RelayChunk | None:
        event = self._client.decode(_decode, data)
        events: list[Delta | CallDelta] = []
        logprobs: list[float | None] = []
        match event.type:
            case "response.output_text.delta":
                events = [Delta("content", event.delta)]
                logprobs = clean_logprobs([token.logprob for token in event.logprobs or ()])
            case "response.refusal.delta":
                events = [Delta("content", event.delta)]
            case "response.reasoning_summary_text.delta" | "response.reasoning_text.delta":
                events = [Delta("reasoning", event.delta)]
            case "response.reasoning_summary_part.added" if event.summary_index > 0:
                events = [Delta("reasoning", "\n\n")]
            case "response.output_item.done":
                events = self._add_item(event.item)
            case "response.completed" | "response.incomplete":
                self._end(event.response or _Response())
            case "response.failed" | "error":
                raise self._failure(event)
        self._has_output = self._has_output or bool(events)
        return RelayChunk(tuple(events), logprobs=logprobs or None) if events else None

    def end(self) -> RelayChunk:
        if self._fault and not self._has_output:
            raise EngineRejected(self._fault)
        return RelayChunk(
            finish="tool_calls" if self._calls and self.finish == "stop" else self.finish,
            usage=self._usage,
            fault=self._fault,
            verbatim=encode_verbatim(self._items, [call.id for call in self._calls])
            if self._keep_verbatim and self._must_return
            else b"",
        )

    def _add_item(self, raw: msgspec.Raw) -> list[Delta | CallDelta]:
        item = self._client.decode(_item, bytes(raw))
        self._items.append(msgspec.Raw(bytes(raw)))
        match item.type:
            case "message":
                self._must_return = self._must_return or item.phase is not None
                return []
            case "reasoning":
                self._must_return = self._must_return or bool(item.encrypted_content or item.content)
                if item.encrypted_content and not self._keep_verbatim:
                    return [
                        Delta("signature", f"{item.id}:{item.encrypted_content}" if item.id else item.encrypted_content)
                    ]
                return []
            case "function_call" | "custom_tool_call" | "tool_search_call":
                call = _call(item)
                self._calls.append(call)
                return [CallDelta(len(self._calls) - 1, call)]
            case kind:
                raise EngineError(f"{self._client.engine} sent an item of type {kind!r}, which is not supported")

    def _end(self, response: _Response) -> None:
        self.finish = "stop"
        self._usage = _usage(response.usage)
        if response.incomplete_details is not None and (reason := response.incomplete_details.reason):
            if reason not in _INCOMPLETE:
                raise EngineError(f"{self._client.engine} stopped with the reason {reason!r}, which is not supported")
            self.finish = _INCOMPLETE[reason]
            if reason == "content_filter":
                self._fault = f"{self._client.engine} withheld the answer ({reason})"

    def _failure(self, event: _Event) -> TurngateError:
        """Build the error for a failure event, which may hold the details in any of three places."""
        inside = event.response.error if event.response is not None else msgspec.Raw()
        bare = msgspec.json.encode({"code": event.code, "message": event.message or "unknown error"})
        error = next((raw for raw in (event.error, inside) if is_present(raw)), msgspec.Raw(bare))
        return self._client.failure_in_stream(error, default_status=500)


def _call(item: _Item) -> ToolCall:
    """Build a tool call as in the `responses` dialect: the namespace is part of the name, and free text is the argument `input`."""
    name = item.name if item.namespace in _PLAIN else f"{item.namespace}__{item.name}"
    if item.type == "custom_tool_call":
        return ToolCall(item.call_id, name, msgspec.json.encode({"input": item.input}).decode())
    raw = bytes(item.arguments)
    text = msgspec.json.decode(raw, type=str) if raw.startswith(b'"') else raw.decode()
    return ToolCall(item.call_id, name or "tool_search", text or "{}")


def _usage(usage: _Usage | None) -> Usage | None:
    if usage is None:
        return None
    cached = usage.input_tokens_details.cached_tokens if usage.input_tokens_details else None
    reasoning = usage.output_tokens_details.reasoning_tokens if usage.output_tokens_details else None
    return Usage(usage.input_tokens or 0, usage.output_tokens or 0, cached or 0, reasoning or 0)
