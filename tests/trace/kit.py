"""Helpers that build traces from small hand-written conversations, without HTTP, store or tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from turngate.dialects import Chat, WireRequest
from turngate.trace.fork_cause import find_fork_cause
from turngate.trace.message_equality import (
    RequestMessages,
    argument_sizes,
    exact_digest,
    meaning_digest,
    reasoning_digest,
)
from turngate.trace.quotes import find_quotes, take_excerpts
from turngate.trace.tree import Cause, Context, ContextInfo, Location, Sampled, SampledInfo, Trace
from turngate.types import ID_DTYPE, LOGPROB_DTYPE, NO_SIGNALS, CallSignals, Capture, Finish

Wire = dict[str, Any]
_LETTER = {"system": "s", "user": "u", "assistant": "a", "tool": "t"}


def system(text: str) -> Wire:
    return {"role": "system", "content": text}


def user(text: Any) -> Wire:
    return {"role": "user", "content": text}


def assistant(text: Any = "", *calls: tuple[str, str, str], thinking: str = "") -> Wire:
    """Build an assistant message. Each call is (id, tool, arguments)."""
    message: Wire = {"role": "assistant", "content": text}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in calls
        ]
    return message


def result(call_id: str, text: Any) -> Wire:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def read(messages: list[Wire], preamble: str = "tools") -> RequestMessages:
    body = json.dumps({"messages": messages}).encode()
    return RequestMessages(Chat().decode(WireRequest(body)).history, preamble.encode())


@dataclass(frozen=True)
class Call:
    """A model call and its answer. `preamble` stands for its tools; an empty one means no tools."""

    messages: list[Wire]
    answer: Wire | None = None
    preamble: str = "tools"
    signals: CallSignals = NO_SIGNALS
    retried: bool = False
    key: str = ""
    finish: Finish = "stop"
    delivered: bool = True
    started: float | None = None  # None: after all earlier calls
    ended: float | None = None
    cause: Cause | Literal["find"] | None = "find"
    size: int = 2  # sampled tokens
    logprobs: list[float] | Literal["all"] | None = "all"
    biases: tuple[str, ...] = ()
    texts: bool = True  # whether excerpts and quotations are recorded; old stores do not have them
    capture: Capture = "tokens"
    fault: str = ""
    sampling: bytes = b""


class Recorder:
    """Record calls in a trace the way the gateway does. `turns` are the sampled nodes, one per call."""

    def __init__(self, calls: list[Call] | tuple[Call, ...] = ()) -> None:
        self.trace = Trace()
        self.turns: list[Sampled] = []
        self._clock = 0.0
        for call in calls:
            self.add(call)

    def locate(self, call: Call) -> Location:
        return self.trace.locate(read(call.messages, call.preamble))

    def find_quotes(self, location: Location) -> tuple[int, ...]:
        return find_quotes(self.trace, location.node, location.request, location.start)

    def find_cause(self, call: Call) -> Cause | None:
        location = self.locate(call)
        return find_fork_cause(
            self.trace,
            location,
            context=location.context,
            has_tools=bool(call.preamble),
            retried=call.retried,
            idempotency_key=call.key,
            signals=call.signals,
            started=self._clock + 1 if call.started is None else call.started,
            quotes=() if location.context is not None else self.find_quotes(location),
        )

    def add(self, call: Call) -> Sampled:
        location = self.locate(call)
        cause = self.find_cause(call) if call.cause == "find" else call.cause
        started = self._clock + 1 if call.started is None else call.started
        ended = started + 1 if call.ended is None else call.ended
        self._clock = max(self._clock, ended)
        context = location.context
        if context is None:
            context = self._new_context(call, location, cause)
            self.trace.add_context(context)
        answer = call.answer or assistant(f"answer {len(self.turns)}")
        message = read([answer]).messages(0)[0]
        info = SampledInfo(
            meaning=meaning_digest((message,), {}),
            reasoning=reasoning_digest(message.reasoning),
            exact=exact_digest(message),
            finish=call.finish,
            version_start=0,
            version_end=0,
            started=started,
            ended=ended,
            biases=call.biases,
            cause=cause,
            idempotency_key=call.key,
            capture=call.capture,
            fault=call.fault,
            sampling=call.sampling,
            arguments=argument_sizes(message),
            excerpts=take_excerpts(message) if call.texts else (),
            text_size=len(message.content) if call.texts else -1,
        )
        number = self.trace.reserve_id()
        ids = np.arange(100 * number, 100 * number + call.size, dtype=ID_DTYPE)
        scores = [-0.5] * call.size if call.logprobs == "all" else call.logprobs
        logprobs = None if scores is None else np.array(scores, LOGPROB_DTYPE)
        turn = Sampled(number, context, ids, logprobs, info)
        turn.delivered = call.delivered
        self.trace.add_sampled(turn)
        self.trace.remember_request(context, location.request)
        self.turns.append(turn)
        return turn

    def _new_context(self, call: Call, location: Location, cause: Cause | None) -> Context:
        request = location.request
        new = range(location.start, len(request))
        info = ContextInfo(
            preamble=request.preamble,
            meanings=request.meanings(location.start, len(request)),
            roles="".join(_LETTER[request.messages(index)[-1].role] for index in new),
            has_tools=bool(call.preamble),
            cause=cause,
            signals=call.signals,
            quotes=self.find_quotes(location) if call.texts else None,
        )
        number = self.trace.reserve_id()
        return Context(number, location.node, np.array([number], ID_DTYPE), info)
