"""Read the answers of an OpenAI-compatible endpoint, streamed or not, and map their finish reasons to ours."""

from __future__ import annotations

import uuid

import msgspec

from turngate.dialects.openai import custom_input_to_arguments
from turngate.engines.base import RelayChunk
from turngate.engines.http import EngineClient, align_logprobs, clean_logprobs, is_present
from turngate.engines.observe.translate import encode_verbatim
from turngate.errors import EngineError
from turngate.types import CallDelta, Delta, Finish, Json, Message, ToolCall, Usage

_FINISH: dict[str, Finish] = {
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "abort": "abort",
    "error": "abort",  # OpenRouter: the upstream provider failed
    "insufficient_system_resource": "abort",  # DeepSeek
}


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CustomCall(msgspec.Struct):
    name: str | None = None
    input: str | None = None


class _ToolCall(msgspec.Struct):
    """A tool call, or a fragment of one. Fragments of the same call share an index, which some providers leave out."""

    index: int | None = None
    id: str | None = None
    function: _Function | None = None
    custom: _CustomCall | None = None


class _Message(msgspec.Struct):
    """A whole message, or the part of a message in one stream event."""

    content: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    function_call: _Function | None = None  # the deprecated form of a call


class _Position(msgspec.Struct):
    logprob: float | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Position] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    message: _Message | None = None
    delta: _Message | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # vLLM: the stop string that ended the answer
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None


class _Event(msgspec.Struct):
    """A whole response, or one event of a stream."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Event).decode


class OpenAIAnswer:
    """A collector that turns the events of one reply into chunks.

    With `keep_verbatim`, a turn that contains reasoning is also kept in the endpoint's format, because an agent of a different dialect may
    not send the reasoning back.
    """

    def __init__(self, client: EngineClient, *, keep_verbatim: bool) -> None:
        self.finish: Finish | None = None
        self._client = client
        self._keep_verbatim = keep_verbatim
        self._usage: Usage | None = None
        self._calls = _Calls(client.engine)
        self._has_ids = True  # whether every event with a fragment of a tool call had token ids
        self._text: dict[str, list[str]] = {"content": [], "reasoning": []}
        self._stopped_by = ""
        self._fault = ""

    def add(self, data: bytes) -> RelayChunk | None:
        """Return the chunk for an event, or None if it adds nothing. `end` returns the finish reason and the usage, which arrives last."""
        event = self._client.decode(_decode, data)
        if is_present(event.error):
            raise self._client.failure_in_stream(event.error, default_status=500)
        self._usage = _usage(event.usage) or self._usage
        choice = next((choice for choice in event.choices or () if choice.index == 0), _Choice())
        message = choice.delta or choice.message or _Message()
        events = self._read_message(message)
        ids, logprobs = self._tokens(choice)
        has_calls = bool(message.tool_calls or message.function_call)
        self._has_ids = self._has_ids and (ids is not None or not has_calls)
        self._end(choice)
        if not events and not ids and not logprobs and event.prompt_token_ids is None:
            return None
        return RelayChunk(tuple(events), ids, logprobs, event.prompt_token_ids)

    def end(self) -> RelayChunk:
        """Return the last chunk, which contains the last tool call, if any. The call's token ids, if known, were in earlier chunks."""
        calls = tuple(self._calls.close())
        finish = self.finish
        if self._keep_verbatim and self._calls.whole and finish == "stop":
            finish = "tool_calls"  # some providers report `stop` for a call that was forced
        return RelayChunk(
            calls,
            ids=[] if calls and self._has_ids else None,
            finish=finish,
            usage=self._usage,
            stopped_by=self._stopped_by,
            fault=self._fault,
            verbatim=self._verbatim() if self._keep_verbatim and self._text["reasoning"] else b"",
        )

    def _verbatim(self) -> bytes:
        calls = tuple(self._calls.whole)
        content, reasoning = "".join(self._text["content"]), "".join(self._text["reasoning"])
        return encode_verbatim(
            encode_turn(Message("assistant", content, reasoning, calls)), [call.id for call in calls]
        )

    def _end(self, choice: _Choice) -> None:
        self.finish = _finish(choice.finish_reason) or self.finish
        if isinstance(choice.stop_reason, str):
            self._stopped_by = choice.stop_reason
        if choice.finish_reason == "content_filter":
            self._fault = f"{self._client.engine} withheld the answer (content_filter)"

    def _read_message(self, message: _Message) -> list[Delta | CallDelta]:
        events: list[Delta | CallDelta] = []
        # Two names of the same field. Some servers send both.
        reasoning = message.reasoning or message.reasoning_content
        if reasoning:
            events.append(Delta("reasoning", reasoning))
            self._text["reasoning"].append(reasoning)
        content = message.content or message.refusal
        if content:
            events.append(Delta("content", content))
            self._text["content"].append(content)
        for fragment in message.tool_calls or ():
            events += self._calls.add(fragment)
        if message.function_call is not None:
            events += self._calls.add(_ToolCall(function=message.function_call))
        return events

    def _tokens(self, choice: _Choice) -> tuple[list[int] | None, list[float | None] | None]:
        positions = choice.logprobs.content if choice.logprobs else None
        values = None if positions is None else [position.logprob for position in positions]
        if choice.token_ids is not None:
            return choice.token_ids, align_logprobs(self._client.engine, choice.token_ids, values)
        return None, None if values is None else clean_logprobs(values)


class _Calls:
    """Tool calls, assembled from fragments. A call is complete when the next one starts, or at the end of the reply."""

    def __init__(self, engine: str) -> None:
        self.whole: list[ToolCall] = []
        self._engine = engine
        self._index: int | None = None
        self._id = ""
        self._name = ""
        self._arguments: list[str] = []
        self._is_custom = False
        self._open = False

    def add(self, fragment: _ToolCall) -> list[CallDelta]:
        whole = self.close() if self._begins(fragment) else []
        self._open = True
        self._index = self._index if fragment.index is None else fragment.index
        self._id = fragment.id or self._id
        if fragment.function is not None:
            self._name += fragment.function.name or ""
            self._arguments.append(fragment.function.arguments or "")
        if fragment.custom is not None:
            self._is_custom = True
            self._name += fragment.custom.name or ""
            self._arguments.append(fragment.custom.input or "")
        return whole

    def close(self) -> list[CallDelta]:
        if not self._open:
            return []
        text = "".join(self._arguments)
        # An agent refers to a call by its id, so every call needs one.
        call = ToolCall(
            self._id or f"call_{uuid.uuid4().hex[:24]}",
            self._name,
            custom_input_to_arguments(text) if self._is_custom else text,
        )
        self._open, self._is_custom, self._id, self._name, self._arguments = False, False, "", "", []
        self.whole.append(call)
        return [CallDelta(len(self.whole) - 1, call)]

    def _begins(self, fragment: _ToolCall) -> bool:
        if not self._open:
            return False
        if fragment.index is not None and self._index is not None and fragment.index < self._index:
            raise EngineError(f"{self._engine} sent a fragment of a tool call that was already complete")
        if fragment.index is not None and fragment.index != self._index:
            return True
        # Some providers send no index, or always 0, so a new id also starts a call.
        return bool(fragment.id and self._id and fragment.id != self._id)


def _finish(reason: str | None) -> Finish | None:
    """Map a finish reason. Any unknown, provider-specific reason (such as `eos`) means that the model has stopped."""
    return None if reason is None else _FINISH.get(reason, "stop")


def _usage(usage: _Usage | None) -> Usage | None:
    if usage is None:
        return None
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
    reasoning = usage.completion_tokens_details.reasoning_tokens if usage.completion_tokens_details else None
    return Usage(usage.prompt_tokens or 0, usage.completion_tokens or 0, cached or 0, reasoning or 0)


def encode_turn(message: Message) -> dict[str, Json]:
    """Encode one of the model's turns as a message in the endpoint's format."""
    wire: dict[str, Json] = {"role": "assistant", "content": message.content}
    if message.reasoning:
        wire["reasoning_content"] = message.reasoning
    if message.tool_calls:
        wire["content"] = message.content or None
        wire["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments or "{}"}}
            for call in message.tool_calls
        ]
    return wire
