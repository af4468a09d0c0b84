"""Observe mode: relay calls to any OpenAI-compatible `/v1/chat/completions` endpoint.

A `chat` call is forwarded as the agent sent it, with two exceptions: the session may override settings (model, token limits, sampling), and
fields that request token data and usage are added. Calls of other dialects are translated. The endpoint renders the prompt and parses the
reply, and the token data that it returns is recorded. By default, the relay requests as much token data as the endpoint supports
(`capture`): token ids and log-probabilities from vLLM, log-probabilities from many other endpoints, and only text from the rest. The
provider's key is sent only in the `Authorization` header.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from turngate.engines.base import Health, RelayChunk, RelayRequest
from turngate.engines.http import EngineClient, Reply
from turngate.engines.observe.openai_answer import OpenAIAnswer, encode_turn
from turngate.engines.observe.relay import stream_answer
from turngate.engines.observe.translate import (
    SHRINKS,
    RejectedFields,
    RelayBody,
    RelayMessage,
    list_allowed_tools,
    list_tools,
    list_unsupported,
    parse_fields,
    read_messages,
    reasoning_effort,
    select_headers,
    shrink_to_fit,
    split_system_prompt,
    translate_sampling,
    wants_thinking,
)
from turngate.errors import ContextOverflow, EngineRejected, NotFound, TurngateError
from turngate.types import (
    Capture,
    Constraint,
    Json,
    Sampling,
    Tool,
)

_DIALECT = "chat"

# Fields that each capture level adds. `tokens` is for vLLM, which also supports the sampling fields in `_EXTENSIONS`.
_CAPTURE_FIELDS: dict[Capture, dict[str, bool]] = {
    "tokens": {"return_token_ids": True, "logprobs": True},
    "logprobs": {"logprobs": True},
    "text": {},
}
_LEVELS: tuple[Capture, ...] = ("text", "logprobs", "tokens")
_STANDARD = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed")
_EXTENSIONS = ("top_k", "min_p", "repetition_penalty", "min_tokens")
_BEYOND_OPENAI = re.compile(r"return_token_ids|" + "|".join(_EXTENSIONS))
# Fields of an agent's body that do not affect sampling, or whose effect is recorded (sampling and constraint). Any other field may bias
# sampling. Servers have many such fields (`allowed_token_ids`, `structured_outputs`, `use_beam_search` …) and keep adding more.
_HARMLESS = frozenset((*_STANDARD, *_EXTENSIONS)) - {"min_tokens"} | {
    *("model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "stop", "n"),
    *(
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "functions",
        "function_call",
        "response_format",
        "modalities",
        "logprobs",
        "top_logprobs",
    ),
    *("return_token_ids", "chat_template_kwargs", "reasoning_effort", "enable_thinking", "verbosity"),
    *("include_reasoning", "user", "metadata", "store", "service_tier", "safety_identifier", "usage"),
    *("prompt_cache_key", "prompt_cache_retention", "cache_salt", "priority", "request_id", "session_id"),
}
_EMPTY_VALUES = (b"null", b"{}", b"[]")


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card] = []


class OpenAIRelay:
    """A relay to one OpenAI-compatible endpoint. `url` is the base URL; `/v1` is added if the URL has no path.

    `capture="auto"` first requests all token data, and requests less each time the endpoint rejects one of the requested fields by name. If
    `capture` is a level, exactly that level is requested.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        capture: Capture | Literal["auto"] = "auto",
        name: str = "openai",
        connect_s: float = 10.0,
        silence_s: float | None = None,
    ) -> None:
        self.name = name
        self._adapts = capture == "auto"
        self._capture_request = _CaptureRequest("tokens" if capture == "auto" else capture)
        self._rejected = RejectedFields()
        root = url.rstrip("/")
        base = root if urlsplit(root).path else f"{root}/v1"
        self._client = EngineClient(name, base, key=key, connect_s=connect_s, silence_s=silence_s)

    def __repr__(self) -> str:
        return f"OpenAIRelay({self._client.url!r}, capture={self.capture!r})"

    @property
    def capture(self) -> Capture:
        """The capture level that is currently requested. The endpoint may return less."""
        return self._capture_request.level

    async def start(self) -> None:
        await self._client.start()

    async def close(self) -> None:
        await self._client.close()

    async def health(self) -> list[Health]:
        seen = Health(url=self._client.url, ok=True, in_flight=self._client.in_flight)
        try:
            models = await self._client.get("/models", _Models)
        except TurngateError as error:
            return [msgspec.structs.replace(seen, ok=False, detail=error.message)]
        if len(models.data) != 1:  # a provider of many models has no single context length
            return [seen]
        return [msgspec.structs.replace(seen, model=models.data[0].id, max_context=models.data[0].max_model_len)]

    async def count(self, request: RelayRequest) -> int:
        raise NotFound("the observed endpoint cannot count tokens; estimate the count instead")

    @asynccontextmanager
    async def relay(self, request: RelayRequest) -> AsyncIterator[AsyncIterator[RelayChunk]]:
        headers = {"X-Request-Id": request.request_id, "X-Session-ID": request.session}
        headers = {name: value for name, value in headers.items() if value}
        async with self._client.post(
            "/chat/completions", b"", {**select_headers(request, _DIALECT), **headers}
        ) as reply:
            yield self._chunks(reply, request)

    async def _chunks(self, reply: Reply, request: RelayRequest) -> AsyncIterator[RelayChunk]:
        written = await self._open(reply, request)
        if written.lost or written.biases:
            yield RelayChunk(lost=written.lost, biases=written.biases)
        batches = reply.events() if written.body.get("stream") is True else reply.whole()
        answer = OpenAIAnswer(self._client, keep_verbatim=request.call.dialect != _DIALECT)
        async with aclosing(stream_answer(self.name, answer, reply, batches)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _open(self, reply: Reply, request: RelayRequest) -> RelayBody:
        """Send the call. If it is rejected, send it again without the rejected optional fields, or with a lower token limit."""
        model = request.model or request.call.model
        shrinks = 0 if request.call.dialect == _DIALECT else SHRINKS
        while True:
            capture, without = self._capture_request, self._rejected.for_model(model)
            written = self._write(request, capture, without)
            reply.body = msgspec.json.encode(written.body)
            try:
                await reply.open()
                return written
            except EngineRejected as error:
                less = capture.without(error.message, self._adapts)
                rejected = written.find_rejected(error.message) - without
                if less is not None:
                    # Another call may already have lowered the level.
                    self._capture_request = self._capture_request.at_most(less)
                elif rejected:
                    self._rejected.add(model, rejected)
                else:
                    raise
            except ContextOverflow as error:
                smaller = shrink_to_fit(request, written, error) if shrinks else None
                if smaller is None:
                    raise
                request, shrinks = smaller, shrinks - 1

    def _write(self, request: RelayRequest, capture: _CaptureRequest, without: frozenset[str]) -> RelayBody:
        if request.call.dialect == _DIALECT:
            body = _override_body(parse_fields("the body", request.call.body), request, capture)
            return RelayBody(body, biases=_biases(body))
        return _translate(request, capture, without)


class _CaptureRequest(msgspec.Struct, frozen=True):
    """The data that the relay requests from the endpoint in addition to what the agent requested."""

    level: Capture
    usage: bool = True  # whether a stream requests `stream_options.include_usage`

    def without(self, refusal: str, adapts: bool) -> _CaptureRequest | None:
        """Return a request without the data that the endpoint's `refusal` names, or None if the refusal names no requested data.

        The level changes only if `adapts` is true. A refusal that names a field in `_EXTENSIONS` counts as a refusal of token ids.
        """
        if self.usage and "stream_options" in refusal:
            return _CaptureRequest(self.level, usage=False)
        if adapts and self.level == "tokens" and _BEYOND_OPENAI.search(refusal):
            return _CaptureRequest("logprobs", self.usage)
        if adapts and self.level != "text" and "logprobs" in refusal:
            return _CaptureRequest("text", self.usage)
        return None

    def at_most(self, other: _CaptureRequest) -> _CaptureRequest:
        return _CaptureRequest(min(self.level, other.level, key=_LEVELS.index), self.usage and other.usage)


def _override_body(body: dict[str, msgspec.Raw], request: RelayRequest, capture: _CaptureRequest) -> dict[str, Any]:
    """Override the model, token limits, sampling and capture fields in the agent's body, and request token usage in streams."""
    overridden: dict[str, Any] = {**body, **_CAPTURE_FIELDS[capture.level]}
    if "stream" in body:
        overridden["stream"] = bytes(body["stream"]) == b"true"
    if request.model:
        overridden["model"] = request.model
    if request.max_tokens is not None:
        names = [name for name in ("max_tokens", "max_completion_tokens") if name in body]
        overridden.update(dict.fromkeys(names or ["max_tokens"], request.max_tokens))
    if request.sampling is not None:
        _override_sampling(overridden, request.sampling, everything=capture.level == "tokens")
    if overridden.get("stream") and capture.usage:
        options = parse_fields("stream_options", bytes(body.get("stream_options", b"null")))
        overridden["stream_options"] = {**options, "include_usage": True}
    return overridden


def _biases(body: dict[str, Any]) -> tuple[str, ...]:
    """List the agent's fields that may bias the endpoint's sampling."""
    set_fields = [
        name for name, value in body.items() if isinstance(value, msgspec.Raw) and bytes(value) not in _EMPTY_VALUES
    ]
    return tuple(f"field {name}" for name in set_fields if name not in _HARMLESS)


def _override_sampling(body: dict[str, Any], sampling: Sampling, *, everything: bool) -> None:
    """Set the session's sampling. With `everything`, also set the non-standard fields whose value is neutral."""
    values, neutral = msgspec.structs.asdict(sampling), msgspec.structs.asdict(Sampling())
    for name in _STANDARD:
        if values[name] is not None:
            body[name] = values[name]
    for name in _EXTENSIONS:
        body.pop(name, None)
        if everything or values[name] != neutral[name]:
            body[name] = values[name] if name != "top_k" else values[name] or -1


# ── translation from other dialects ────────────────────────────────────────────────────────────────────────────────────


def _translate(request: RelayRequest, capture: _CaptureRequest, without: frozenset[str]) -> RelayBody:
    call = request.call
    system, rest = split_system_prompt(read_messages(request))
    tools = list_tools(call)
    lost: list[str] = []
    optional: dict[str, tuple[str, ...]] = {}
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    messages += [_message(entry, without, optional, lost) for entry in rest]
    body: dict[str, Any] = {"model": request.model or call.model, "messages": messages, "stream": True}
    body |= _CAPTURE_FIELDS[capture.level]
    if capture.usage:
        body["stream_options"] = {"include_usage": True}
    if request.max_tokens is not None:  # newer OpenAI models use a different name for this field
        optional["max_tokens"] = ("max_completion_tokens",)
        body["max_completion_tokens" if "max_tokens" in without else "max_tokens"] = request.max_tokens
    if call.stop:
        body["stop"] = list(call.stop)
    if tools:
        body["tools"] = [tool.wire for tool in tools]
        if not call.parallel_tool_calls:
            body["parallel_tool_calls"] = False
    body |= _constraint_fields(call.constraint, tools)
    body |= _thinking(request, without, optional, lost)
    _add_sampling(body, request, capture, without, optional, lost)
    return RelayBody(body, optional, tuple(dict.fromkeys(lost)))


def _message(
    entry: RelayMessage, without: frozenset[str], optional: dict[str, tuple[str, ...]], lost: list[str]
) -> Json:
    message = entry.message
    if message.role != "assistant":
        wire: dict[str, Json] = {"role": message.role, "content": message.content}
        if message.role == "tool":
            return {**wire, "tool_call_id": message.tool_call_id}
        if message.role == "system":  # many chat templates accept a system message only at the start
            optional["system"] = ("system message", "system role")
            if "system" in without:
                lost.append("the role of later system messages")
                return {**wire, "role": "user"}
        return {**wire, "name": message.name} if message.name else wire
    wire = msgspec.json.decode(entry.turn) if entry.turn is not None else encode_turn(message)
    if "reasoning_content" in wire:
        optional["reasoning_content"] = ("reasoning_content",)
        if "reasoning_content" in without:
            del wire["reasoning_content"]
            lost.append("reasoning of earlier turns")
    return wire


def _constraint_fields(constraint: Constraint | None, tools: Sequence[Tool]) -> dict[str, Json]:
    match constraint:
        case Constraint(kind="tool", tool=name):
            return {"tool_choice": {"type": "function", "function": {"name": name}}}
        case Constraint(kind="tools"):
            some = [{"type": "function", "function": {"name": name}} for name in list_allowed_tools(constraint, tools)]
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": some}}
            return {"tool_choice": choice if some else "required"}
        case Constraint(kind="json_schema", schema=schema):
            return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}
        case Constraint(kind="json_object"):
            return {"response_format": {"type": "json_object"}}
        case _:
            return {}


def _thinking(
    request: RelayRequest, without: frozenset[str], optional: dict[str, tuple[str, ...]], lost: list[str]
) -> dict[str, Json]:
    """Build the fields for thinking, verbosity and chat-template arguments.

    Thinking is disabled with a chat-template argument, which only servers for open models accept.
    """
    effort = reasoning_effort(request.call)
    fields: dict[str, Json] = {}
    if effort:
        optional["reasoning_effort"] = ("reasoning_effort", "reasoning effort")
        if "reasoning_effort" in without:
            lost.append("reasoning_effort")
        else:
            fields["reasoning_effort"] = effort
    if "verbosity" in request.call.template_hints:
        optional["verbosity"] = ("verbosity",)
        if "verbosity" in without:
            lost.append("verbosity")
        else:
            fields["verbosity"] = request.call.template_hints["verbosity"]
    lost += list_unsupported(request.call, "verbosity", "chat_template_kwargs")
    kwargs = {**request.call.template_kwargs}
    if wants_thinking(request.call) is False:
        kwargs["enable_thinking"] = False
    if kwargs:
        optional["chat_template_kwargs"] = ("chat_template_kwargs",)
        if "chat_template_kwargs" in without:
            lost.append("chat_template_kwargs")
        else:
            fields["chat_template_kwargs"] = kwargs
    return fields


def _add_sampling(
    body: dict[str, Any],
    request: RelayRequest,
    capture: _CaptureRequest,
    without: frozenset[str],
    optional: dict[str, tuple[str, ...]],
    lost: list[str],
) -> None:
    """Add the sampling that the session pins. If it pins none, add the agent's sampling settings that the endpoint supports."""
    if request.sampling is not None:
        _override_sampling(body, request.sampling, everything=capture.level == "tokens")
        return
    supported = (*_STANDARD, *_EXTENSIONS) if capture.level == "tokens" else _STANDARD
    sampling, unsupported = translate_sampling(request.call, {name: name for name in supported}, without)
    optional |= {name: (name,) for name in sampling if name in _STANDARD}
    lost += unsupported
    body |= sampling
