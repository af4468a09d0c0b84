"""Observe mode: relay calls to Google's Gemini API, `/v1beta/models/{model}:streamGenerateContent`.

A `gemini` call is forwarded as the agent sent it, except for the settings that the session overrides (model, token limit, sampling).
Calls of other dialects are translated. Text is recorded. With `capture="logprobs"`, log-probabilities are also requested and recorded,
but few models return them. The key is sent only in the `x-goog-api-key` header.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import quote, urlsplit

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
    parse_arguments,
    parse_fields,
    read_messages,
    reasoning_effort,
    split_system_prompt,
    translate_pinned,
    translate_sampling,
    wants_thinking,
)
from turngate.errors import EngineError, EngineRejected, EngineUnavailable
from turngate.types import CallDelta, Capture, Constraint, Delta, Finish, Json, Sampling, Tool, ToolCall, Usage

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "topP",
    "top_k": "topK",
    "presence_penalty": "presencePenalty",
    "frequency_penalty": "frequencyPenalty",
    "seed": "seed",
}
_LEVELS = {"minimal": "MINIMAL", "low": "LOW", "medium": "MEDIUM", "high": "HIGH", "xhigh": "HIGH", "max": "HIGH"}
_FINISH: dict[str, Finish] = {"STOP": "stop", "MAX_TOKENS": "length", "CONTINUATION": "length"}
# Finish reasons for answers that the provider withholds. A reason that is in neither table means that the model failed.
_FILTERS = ("SAFETY", "RECITATION", "LANGUAGE", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII")
# The signature that this API accepts for tool calls from a different provider.
_UNSIGNED = "skip_thought_signature_validator"
_SNAKE = re.compile(r"(?<!^)(?=[A-Z])")


class _Call(msgspec.Struct, rename="camel"):
    name: str = ""
    id: str | None = None
    args: msgspec.Raw = msgspec.Raw(b"{}")
    will_continue: bool = False


class _Part(msgspec.Struct, rename="camel"):
    text: str | None = None
    thought: bool = False
    thought_signature: str | None = None
    function_call: _Call | None = None
    inline_data: msgspec.Raw = msgspec.Raw()
    executable_code: msgspec.Raw = msgspec.Raw()
    code_execution_result: msgspec.Raw = msgspec.Raw()
    tool_call: msgspec.Raw = msgspec.Raw()


class _Content(msgspec.Struct):
    parts: list[_Part] | None = None


class _Chosen(msgspec.Struct, rename="camel"):
    log_probability: float | None = None


class _Logprobs(msgspec.Struct, rename="camel"):
    chosen_candidates: list[_Chosen] = []


class _Candidate(msgspec.Struct, rename="camel"):
    content: _Content | None = None
    finish_reason: str | None = None
    finish_message: str | None = None
    index: int = 0
    logprobs_result: _Logprobs | None = None


class _Feedback(msgspec.Struct, rename="camel"):
    block_reason: str | None = None
    block_reason_message: str | None = None


class _Usage(msgspec.Struct, rename="camel"):
    prompt_token_count: int | None = None
    tool_use_prompt_token_count: int | None = None
    candidates_token_count: int | None = None
    thoughts_token_count: int | None = None
    cached_content_token_count: int | None = None


class _Event(msgspec.Struct, rename="camel"):
    candidates: list[_Candidate] | None = None
    prompt_feedback: _Feedback | None = None
    usage_metadata: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


class _Count(msgspec.Struct, rename="camel"):
    total_tokens: int = 0


_decode = msgspec.json.Decoder(_Event).decode


class GeminiRelay(StreamingRelay):
    """A relay to one Gemini endpoint. `url` is the base URL, with or without the API version."""

    dialect = "gemini"

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        capture: Capture | Literal["auto"] = "auto",
        name: str = "gemini",
        connect_s: float = 10.0,
        silence_s: float | None = None,
    ) -> None:
        self.name = name
        self._logprobs = capture == "logprobs"
        headers = {"x-goog-api-key": key} if key else {}
        root = url.rstrip("/")
        base = root if re.search(r"/v1(alpha|beta)?$", urlsplit(root).path) else f"{root}/v1beta"
        super().__init__(EngineClient(name, base, key=key, headers=headers, connect_s=connect_s, silence_s=silence_s))

    def __repr__(self) -> str:
        return f"GeminiRelay({self._client.url!r})"

    async def health(self) -> list[Health]:
        return await self._probe("/models?pageSize=1")

    async def count(self, request: RelayRequest) -> int:
        model = f"models/{_model(request)}"
        body: dict[str, Any]
        if request.call.dialect == self.dialect:
            body = {**parse_fields("the body", request.call.body)}
            name = _find_spelling(body, "generateContentRequest")
            if name in body:
                body[name] = {**parse_fields(name, body[name]), "model": model}
        else:
            written = _translate(request, frozenset(), logprobs=False).body
            fields = {name: written[name] for name in ("systemInstruction", "contents", "tools") if name in written}
            body = {"generateContentRequest": {"model": model, **fields}}
        return (await self._request_count(f"/models/{_model(request)}:countTokens", body, _Count, request)).total_tokens

    def _path(self, request: RelayRequest) -> str:
        return f"/models/{_model(request)}:streamGenerateContent?alt=sse"

    def _write(self, request: RelayRequest, without: frozenset[str]) -> RelayBody:
        if request.call.dialect == self.dialect:
            return RelayBody(_override_body(request, logprobs=self._logprobs))
        return _translate(request, without, logprobs=self._logprobs)

    def _answer(self, request: RelayRequest) -> _Answer:
        return _Answer(self._client, keep_verbatim=request.call.dialect != self.dialect)


def _model(request: RelayRequest) -> str:
    """Return the model's name, percent-encoded so that the agent cannot use it to reach a different path."""
    return quote((request.model or request.call.model).removeprefix("models/"), safe="")


def _find_spelling(body: dict[str, Any], name: str) -> str:
    """Return the spelling of a field in `body`: snake case if the body contains that, otherwise `name`, which is in camel case."""
    snake = _SNAKE.sub("_", name).lower()
    return snake if snake in body else name


def _override_body(request: RelayRequest, *, logprobs: bool) -> dict[str, Any]:
    """Return the agent's body with the overrides of the session, and with log-probabilities requested if `logprobs` is set."""
    body: dict[str, Any] = {**parse_fields("the body", request.call.body)}
    config_name = _find_spelling(body, "generationConfig")
    config: dict[str, Any] = {**parse_fields(config_name, bytes(body.get(config_name, b"null")))}
    ours: dict[str, Json] = {}
    if request.max_tokens is not None:
        ours["maxOutputTokens"] = request.max_tokens
    if request.sampling is not None:
        for name in _SAMPLING.values():
            config.pop(_find_spelling(config, name), None)
        ours |= _translate_pinned(request.sampling)
    if logprobs:
        ours["responseLogprobs"] = True
    if ours:
        body[config_name] = config | {_find_spelling(config, name): value for name, value in ours.items()}
    return body


def _translate_pinned(sampling: Sampling) -> dict[str, Json]:
    """Translate the session's sampling. Temperature and top-p are always included, because the models' defaults are not neutral."""
    return {
        "temperature": sampling.temperature,
        "topP": sampling.top_p,
        **translate_pinned("gemini", sampling, _SAMPLING),
    }


# ── translation from other dialects ────────────────────────────────────────────────────────────────────────────────────


def _translate(request: RelayRequest, without: frozenset[str], *, logprobs: bool) -> RelayBody:
    call = request.call
    system, rest = split_system_prompt(read_messages(request))
    tools = list_tools(call)
    optional: dict[str, tuple[str, ...]] = {
        "signatures": ("thought_signature", "thought signature", "thoughtsignature")
    }
    lost: list[str] = []
    body: dict[str, Any] = {"contents": _contents(rest, "signatures" in without, lost)}
    if system:
        body["systemInstruction"] = {"parts": [{"text": system}]}
    if tools:
        body["tools"] = [{"functionDeclarations": [_declaration(tool) for tool in tools]}]
        body |= _calling(call.constraint, tools)
        if not call.parallel_tool_calls:
            lost.append("parallel_tool_calls")
    config: dict[str, Json] = {**_thinking(request, without, optional, lost), **_shape(call.constraint)}
    if call.stop:
        config["stopSequences"] = list(call.stop)
    if request.max_tokens is not None:
        config["maxOutputTokens"] = request.max_tokens
    if request.sampling is not None:
        config |= _translate_pinned(request.sampling)
    else:
        sampling, unsupported = translate_sampling(call, _SAMPLING, without)
        optional |= {name: (name, _SNAKE.sub("_", name).lower()) for name in sampling}
        lost += unsupported
        config |= sampling
    if logprobs:
        config["responseLogprobs"] = True
    lost += list_unsupported(call, "thinking_budget")
    return RelayBody({**body, "generationConfig": config}, optional, tuple(dict.fromkeys(lost)))


def _contents(history: Sequence[RelayMessage], unsigned: bool, lost: list[str]) -> list[Json]:
    """Translate the messages. Consecutive tool results are merged, because the API requires all results of a turn in one `Content`."""
    contents: list[dict[str, Any]] = []
    answering = False
    for entry in history:
        message = entry.message
        role, parts = "user", [{"text": message.content}] if message.content else []
        match message.role:
            case "assistant":
                role, parts = "model", _turn(entry, unsigned, lost)
            case "tool":
                parts = [_result(message.name, message.tool_call_id, message.content)]
            case "system":
                lost.append("the role of later system messages")
            case "user" if message.name:
                lost.append("names of users")
        if message.role == "tool" and answering:
            contents[-1]["parts"] += parts
        elif parts:
            contents.append({"role": role, "parts": parts})
        answering = message.role == "tool"
    return contents


def _turn(entry: RelayMessage, unsigned: bool, lost: list[str]) -> list[Json]:
    if entry.turn is not None:
        own: list[Json] = msgspec.json.decode(entry.turn)
        return own
    message = entry.message
    if message.reasoning:
        lost.append("reasoning of earlier turns")  # the API accepts only signed reasoning
    parts: list[Json] = [{"text": message.content}] if message.content else []
    for n, call in enumerate(message.tool_calls):
        part: Json = {"functionCall": {"id": call.id, "name": call.name, "args": parse_arguments(call.arguments)}}
        parts.append({**part, "thoughtSignature": _UNSIGNED} if unsigned and n == 0 else part)
    return parts


def _result(name: str, call_id: str, text: str) -> Json:
    answer: dict[str, Json] = {"name": name, "response": {"output": text}}
    return {"functionResponse": {**answer, "id": call_id} if call_id else answer}


def _declaration(tool: Tool) -> Json:
    function = tool.wire["function"]
    wire: dict[str, Json] = {"name": tool.name, "description": function.get("description") or ""}
    parameters = function.get("parameters")
    return wire if not parameters else {**wire, "parametersJsonSchema": parameters}


def _calling(constraint: Constraint | None, tools: Sequence[Tool]) -> dict[str, Json]:
    if constraint is None or constraint.kind not in ("tool", "tools"):
        return {}
    names = (constraint.tool,) if constraint.kind == "tool" else list_allowed_tools(constraint, tools)
    calling: dict[str, Json] = {"mode": "ANY", **({"allowedFunctionNames": list(names)} if names else {})}
    return {"toolConfig": {"functionCallingConfig": calling}}


def _shape(constraint: Constraint | None) -> dict[str, Json]:
    if constraint is None or constraint.kind not in ("json_object", "json_schema"):
        return {}
    shape: dict[str, Json] = {"responseMimeType": "application/json"}
    return shape if constraint.schema is None else {**shape, "responseJsonSchema": constraint.schema}


def _thinking(
    request: RelayRequest, without: frozenset[str], optional: dict[str, tuple[str, ...]], lost: list[str]
) -> dict[str, Json]:
    """Build the thinking settings. They request thoughts unless thinking is off. Return {} if the endpoint has rejected such settings."""
    thinks, effort = wants_thinking(request.call), reasoning_effort(request.call)
    optional["thinkingLevel"] = ("thinkinglevel", "thinking_level", "thinking level")
    optional["thinking"] = ("thinkingconfig", "thinking_config", "thinking is not", "thinkingbudget", "thinking_budget")
    budget = 0 if thinks is False else request.call.template_hints.get("thinking_budget")
    if "thinking" in without:
        lost += ["reasoning_effort"] if effort else ["thinking_budget"] if budget is not None else []
        return {}
    config: dict[str, Json] = {"includeThoughts": True}
    if budget is not None and not (effort and thinks):
        return {"thinkingConfig": {"thinkingBudget": budget, **(config if budget else {})}}
    if effort in _LEVELS and "thinkingLevel" not in without:
        config["thinkingLevel"] = _LEVELS[effort]
    elif effort:
        lost.append("reasoning_effort")
    return {"thinkingConfig": config}


# ── the answer ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Answer:
    """A collector that turns the events of one reply into chunks.

    With `keep_verbatim`, a turn that contains thought signatures is also kept in the endpoint's format, because an agent of a different
    dialect may not send all of it back.
    """

    def __init__(self, client: EngineClient, *, keep_verbatim: bool) -> None:
        self.finish: Finish | None = None
        self._client = client
        self._keep_verbatim = keep_verbatim
        self._usage: Usage | None = None
        self._parts: list[dict[str, Any]] = []  # the turn in the endpoint's format
        self._ids: list[str] = []  # ids of the tool calls; an empty string if the endpoint sent no id
        self._has_output = False
        self._fault = ""

    def add(self, data: bytes) -> RelayChunk | None:
        event = self._client.decode(_decode, data)
        if is_present(event.error):
            raise self._client.failure_in_stream(event.error, default_status=500)
        if event.usage_metadata is not None:
            self._usage = _usage(event.usage_metadata)
        if event.prompt_feedback is not None and event.prompt_feedback.block_reason:
            self._block(event.prompt_feedback)
        candidate = next((candidate for candidate in event.candidates or () if candidate.index == 0), _Candidate())
        content = candidate.content or _Content()
        events = [delta for part in content.parts or () for delta in self._add(part)]
        self._has_output = self._has_output or bool(events)
        if candidate.finish_reason:
            self._end(candidate)
        tokens = candidate.logprobs_result.chosen_candidates if candidate.logprobs_result is not None else []
        logprobs = clean_logprobs([token.log_probability for token in tokens])
        return RelayChunk(tuple(events), logprobs=logprobs or None) if events or logprobs else None

    def end(self) -> RelayChunk:
        if self._fault and not self._has_output:
            raise EngineRejected(self._fault)
        sealed = any("thoughtSignature" in part for part in self._parts)
        return RelayChunk(
            finish="tool_calls" if self._ids and self.finish == "stop" else self.finish,
            usage=self._usage,
            fault=self._fault,
            verbatim=encode_verbatim(self._parts, self._ids) if self._keep_verbatim and sealed else b"",
        )

    def _add(self, part: _Part) -> list[Delta | CallDelta]:
        foreign = (part.inline_data, part.executable_code, part.code_execution_result, part.tool_call)
        if any(is_present(value) for value in foreign) or (part.function_call and part.function_call.will_continue):
            raise EngineError(
                f"{self._client.engine} sent unsupported content: only text and complete tool calls are supported"
            )
        if part.function_call is not None:
            return self._call(part.function_call, part.thought_signature or "")
        events: list[Delta | CallDelta] = []
        if part.text:
            events.append(Delta("reasoning" if part.thought else "content", part.text))
        if part.thought_signature and not self._keep_verbatim:
            events.append(Delta("signature", part.thought_signature))
        self._keep(part)
        return events

    def _keep(self, part: _Part) -> None:
        """Store a part for the next request: text and signatures, but no thoughts. Merge consecutive texts until one has a signature."""
        if part.thought and not part.thought_signature:
            return
        text = "" if part.thought else part.text or ""
        last = self._parts[-1] if self._parts else {}
        if set(last) == {"text"}:
            last["text"] += text
        elif text or part.thought_signature:
            self._parts.append({"text": text})
        if part.thought_signature:
            self._parts[-1]["thoughtSignature"] = part.thought_signature

    def _call(self, call: _Call, signature: str) -> list[Delta | CallDelta]:
        args = bytes(call.args).decode()
        wire: dict[str, Any] = {"name": call.name, "args": msgspec.json.decode(call.args) or {}}
        part: dict[str, Any] = {"functionCall": {**wire, "id": call.id} if call.id else wire}
        self._parts.append({**part, "thoughtSignature": signature} if signature else part)
        self._ids.append(call.id or "")
        # An agent refers to a call by its id, so every call needs one.
        name = call.id or f"call_{uuid.uuid4().hex[:24]}"
        seal = "" if self._keep_verbatim else signature
        return [CallDelta(len(self._ids) - 1, ToolCall(name, call.name, "{}" if args == "null" else args, seal))]

    def _block(self, feedback: _Feedback) -> None:
        why = f": {feedback.block_reason_message}" if feedback.block_reason_message else ""
        self.finish = "stop"
        self._fault = f"{self._client.engine} blocked the prompt ({feedback.block_reason}){why}"

    def _end(self, candidate: _Candidate) -> None:
        reason = candidate.finish_reason or ""
        why = f": {candidate.finish_message}" if candidate.finish_message else ""
        if reason in _FINISH:
            self.finish = _FINISH[reason]
        elif reason in _FILTERS:
            self.finish = "stop"
            self._fault = f"{self._client.engine} withheld the answer ({reason}){why}"
        else:
            raise EngineUnavailable(f"{self._client.engine} failed to finish the turn ({reason}){why}")


def _usage(usage: _Usage) -> Usage:
    thoughts = usage.thoughts_token_count or 0
    return Usage(
        (usage.prompt_token_count or 0) + (usage.tool_use_prompt_token_count or 0),
        (usage.candidates_token_count or 0) + thoughts,
        usage.cached_content_token_count or 0,
        thoughts,
    )
