"""Observe mode: the agent's own chat body, relayed to any OpenAI-compatible `/v1/chat/completions`.

The endpoint renders and parses; what it can tell about tokens is recorded along. How much that is depends on the
endpoint, so the relay asks for as much as it gives (`capture`): token ids and log-probabilities from a vLLM,
log-probabilities from many, text from all. The provider's key is in the `Authorization` header of this file's client,
and nowhere else.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from turngate.engines.base import Health, RelayChunk, RelayRequest
from turngate.engines.http import Client, Reply, happened, known, paired
from turngate.errors import BadRequest, EngineError, EngineRejected, EngineUnavailable, NotFound, TurngateError
from turngate.types import CallDelta, Capture, Delta, Finish, Sampling, ToolCall, Usage

# What each level adds to the body. `tokens` is vLLM's; there, its own sampling fields are understood too.
_ASKS: dict[Capture, dict[str, bool]] = {
    "tokens": {"return_token_ids": True, "logprobs": True},
    "logprobs": {"logprobs": True},
    "text": {},
}
_LEVELS: tuple[Capture, ...] = ("text", "logprobs", "tokens")
_STANDARD = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed")
_EXTENSIONS = ("top_k", "min_p", "repetition_penalty", "min_tokens")
_BEYOND_OPENAI = re.compile(r"return_token_ids|" + "|".join(_EXTENSIONS))
_FINISH: dict[str, Finish] = {"length": "length", "tool_calls": "tool_calls", "abort": "abort"}


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    """A call, or a fragment of one. Fragments of the same call share an index; some providers leave it out."""

    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Message(msgspec.Struct):
    """A message, or what a stream event adds to it."""

    content: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Position(msgspec.Struct):
    logprob: float | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Position] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    message: _Message | None = None
    delta: _Message | None = None
    finish_reason: str | None = None
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
    """A response or a stream event."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None
    error: msgspec.Raw = msgspec.Raw()


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card] = []


_decode = msgspec.json.Decoder(_Event).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw] | None).decode


class OpenAIRelay:
    """One OpenAI-compatible endpoint. `url` is its base: one with a path (`https://host/v1`) is taken as it is.

    `capture="auto"` starts by asking for everything, and asks for less from then on when the endpoint refuses it by
    name. A fixed level is insisted on.
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
        self._asks = _Asks("tokens" if capture == "auto" else capture)
        root = url.rstrip("/")
        base = root if urlsplit(root).path else f"{root}/v1"
        self._client = Client(name, base, key=key, connect_s=connect_s, silence_s=silence_s)

    def __repr__(self) -> str:
        return f"OpenAIRelay({self._client.url!r}, capture={self.capture!r})"

    @property
    def capture(self) -> Capture:
        """What is asked for at present. What came is seen in the chunks."""
        return self._asks.capture

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
        if len(models.data) != 1:  # a provider of many models has no context length of its own
            return [seen]
        return [msgspec.structs.replace(seen, model=models.data[0].id, max_context=models.data[0].max_model_len)]

    async def count(self, request: RelayRequest) -> int:
        raise NotFound("an OpenAI-compatible endpoint does not count tokens; estimate them")

    @asynccontextmanager
    async def relay(self, request: RelayRequest) -> AsyncIterator[AsyncIterator[RelayChunk]]:
        headers = {"X-Request-Id": request.request_id, "X-Session-ID": request.session}
        headers = {name: value for name, value in headers.items() if value}
        async with self._client.post("/chat/completions", b"", headers) as reply:
            yield self._chunks(reply, request)

    async def _chunks(self, reply: Reply, request: RelayRequest) -> AsyncIterator[RelayChunk]:
        answer = _Answer(self._client)
        streamed = await self._open(reply, request)
        batches = reply.events() if streamed else reply.whole()
        async for batch in batches:
            chunk = answer.add(batch)
            reply.finished = answer.finish is not None
            if chunk is not None:
                yield chunk
        if answer.finish is None:
            raise EngineUnavailable(f"{self.name} ended its reply without finishing")
        yield answer.end()

    async def _open(self, reply: Reply, request: RelayRequest) -> bool:
        """Send, and again with less where the endpoint refuses what the relay added. Whether the answer is a stream."""
        body = _fields("the body", request.call.body)
        streamed = bytes(body.get("stream", msgspec.Raw())) == b"true"
        while True:
            asked = self._asks
            reply.body = msgspec.json.encode(_laid_over(body, request, asked, streamed))
            try:
                await reply.open()
                return streamed
            except EngineRejected as error:
                less = asked.without(error.message, self._adapts)
                if less is None:
                    raise
                self._asks = self._asks.at_most(less)  # another call may have learned more meanwhile


class _Asks(msgspec.Struct, frozen=True):
    """What the relay adds to a body."""

    capture: Capture
    usage: bool = True  # of a stream: `stream_options.include_usage`

    def without(self, refusal: str, adapts: bool) -> _Asks | None:
        """Less than this, if the refusal names some of it."""
        if self.usage and "stream_options" in refusal:
            return _Asks(self.capture, usage=False)
        if adapts and self.capture == "tokens" and _BEYOND_OPENAI.search(refusal):
            return _Asks("logprobs", self.usage)
        if adapts and self.capture != "text" and "logprobs" in refusal:
            return _Asks("text", self.usage)
        return None

    def at_most(self, other: _Asks) -> _Asks:
        return _Asks(min(self.capture, other.capture, key=_LEVELS.index), self.usage and other.usage)


def _fields(name: str, json: bytes) -> dict[str, msgspec.Raw]:
    """The fields of an object in the agent's body, each as the agent wrote it."""
    try:
        return _decode_fields(json) or {}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"{name} is not a JSON object: {error}") from error


def _laid_over(body: dict[str, msgspec.Raw], request: RelayRequest, asks: _Asks, streamed: bool) -> dict[str, Any]:
    """The agent's body with the gateway's model, limits, sampling and questions over it. All else stays as it is."""
    laid: dict[str, Any] = {**body, **_ASKS[asks.capture]}
    if request.model:
        laid["model"] = request.model
    if request.max_tokens is not None:
        names = [name for name in ("max_tokens", "max_completion_tokens") if name in body]
        laid.update(dict.fromkeys(names or ["max_tokens"], request.max_tokens))
    if request.sampling is not None:
        _lay_sampling(laid, request.sampling, everything=asks.capture == "tokens")
    if streamed and asks.usage:
        options = _fields("stream_options", bytes(body.get("stream_options", b"null")))
        laid["stream_options"] = {**options, "include_usage": True}
    return laid


def _lay_sampling(laid: dict[str, Any], sampling: Sampling, *, everything: bool) -> None:
    """Fields that only some servers know are sent where they matter, or where the server is known to know them."""
    values, neutral = msgspec.structs.asdict(sampling), msgspec.structs.asdict(Sampling())
    for name in _STANDARD:
        if values[name] is not None:
            laid[name] = values[name]
    for name in _EXTENSIONS:
        laid.pop(name, None)
        if everything or values[name] != neutral[name]:
            laid[name] = values[name] if name != "top_k" else values[name] or -1


class _Answer:
    """Collects one reply, event by event."""

    def __init__(self, client: Client) -> None:
        self.finish: Finish | None = None
        self._client = client
        self._usage: Usage | None = None
        self._calls = _Calls(client.engine)

    def add(self, batch: Sequence[bytes]) -> RelayChunk | None:
        """Everything that arrived in one read, as one chunk. The end is held back for `end`: usage comes after it."""
        events: list[Delta | CallDelta] = []
        ids: list[int] | None = None
        logprobs: list[float | None] | None = None
        prompt: list[int] | None = None
        for data in batch:
            event = self._client.decode(_decode, data)
            if happened(event.error):
                raise self._client.failure_in_stream(event.error, default_status=500)
            self._usage = _usage(event.usage) or self._usage
            prompt = prompt or event.prompt_token_ids
            for choice in event.choices or ():
                if choice.index != 0:
                    continue
                events += self._said(choice.delta or choice.message or _Message())
                new_ids, new_logprobs = self._tokens(choice)
                ids = _joined(ids, new_ids)
                logprobs = _joined(logprobs, new_logprobs)
                self.finish = _finish(choice.finish_reason) or self.finish
        if not events and not ids and not logprobs and prompt is None:
            return None
        return RelayChunk(tuple(events), ids, logprobs, prompt)

    def end(self) -> RelayChunk:
        return RelayChunk(tuple(self._calls.close()), finish=self.finish, usage=self._usage)

    def _said(self, message: _Message) -> list[Delta | CallDelta]:
        said: list[Delta | CallDelta] = []
        reasoning = message.reasoning or message.reasoning_content  # two names of one thing; some send both
        if reasoning:
            said.append(Delta("reasoning", reasoning))
        content = message.content or message.refusal
        if content:
            said.append(Delta("content", content))
        for fragment in message.tool_calls or ():
            said += self._calls.add(fragment)
        return said

    def _tokens(self, choice: _Choice) -> tuple[list[int] | None, list[float | None] | None]:
        positions = choice.logprobs.content if choice.logprobs else None
        values = None if positions is None else [position.logprob for position in positions]
        if choice.token_ids is not None:
            return choice.token_ids, paired(self._client.engine, choice.token_ids, values)
        return None, None if values is None else known(values)


class _Calls:
    """Puts tool calls together from their fragments. A call is whole when the next one begins, or at the end."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._count = 0
        self._index: int | None = None
        self._id = ""
        self._name = ""
        self._arguments: list[str] = []
        self._open = False

    def add(self, fragment: _ToolCall) -> list[CallDelta]:
        whole = self.close() if self._begins(fragment) else []
        self._open = True
        self._index = self._index if fragment.index is None else fragment.index
        self._id = fragment.id or self._id
        if fragment.function is not None:
            self._name += fragment.function.name or ""
            self._arguments.append(fragment.function.arguments or "")
        return whole

    def close(self) -> list[CallDelta]:
        if not self._open:
            return []
        # An agent answers a call by its id, so one that came without gets one.
        call = ToolCall(self._id or f"call_{uuid.uuid4().hex[:24]}", self._name, "".join(self._arguments))
        self._open, self._id, self._name, self._arguments = False, "", "", []
        self._count += 1
        return [CallDelta(self._count - 1, call)]

    def _begins(self, fragment: _ToolCall) -> bool:
        if not self._open:
            return False
        if fragment.index is not None and self._index is not None and fragment.index < self._index:
            raise EngineError(f"{self._engine} went back to a tool call that it had left")
        if fragment.index is not None and fragment.index != self._index:
            return True
        return bool(fragment.id and self._id and fragment.id != self._id)  # those who send no index, or always 0


def _joined(old: list[Any] | None, new: list[Any] | None) -> list[Any] | None:
    return new if old is None else old + (new or [])


def _finish(reason: str | None) -> Finish | None:
    """Words that only some providers have (`content_filter`, `eos`) all mean that the model has stopped."""
    return None if reason is None else _FINISH.get(reason, "stop")


def _usage(usage: _Usage | None) -> Usage | None:
    if usage is None:
        return None
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
    reasoning = usage.completion_tokens_details.reasoning_tokens if usage.completion_tokens_details else None
    return Usage(usage.prompt_tokens or 0, usage.completion_tokens or 0, cached or 0, reasoning or 0)
