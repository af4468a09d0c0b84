"""Encoding of Chat Completions replies, streamed or not."""

from __future__ import annotations

import os
import time

import msgspec
import orjson

from turngate.dialects.openai import custom_input_to_arguments, error_body, read_custom_input
from turngate.errors import TurngateError
from turngate.types import Call, CallDelta, Delta, Done, Json, KeepAlive, ReplyEvent, TokenScore, ToolCall, Usage

_CALL_ID = "call_"
_WHOLE_INPUT_ID = "call_args_"  # id prefix of custom-tool calls whose `input` is the model's complete arguments


class ChatReplyOptions(msgspec.Struct, frozen=True):
    """The fields of a request that affect how its reply is encoded."""

    custom_tools: frozenset[str] = frozenset()  # names of tools that take free text
    legacy: bool = False  # the request declares `functions`, so the reply sends a call as `function_call`


def encode_reply(call: Call, done: Done) -> bytes:
    options = _options_of(call)
    message: dict[str, Json] = {"role": "assistant", "content": done.message.content or None, "refusal": None}
    if done.message.reasoning:
        message["reasoning"] = message["reasoning_content"] = done.message.reasoning
    if done.message.tool_calls and options.legacy:
        message["function_call"] = _function_to_wire(done.message.tool_calls[0])
    elif done.message.tool_calls:
        message["tool_calls"] = [call_to_wire(c, options.custom_tools) for c in done.message.tool_calls]
    elif message["content"] is None:
        message["content"] = ""
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _scores_to_wire(done.scores),
        "finish_reason": _finish_reason(done, options),
    }
    return orjson.dumps(
        {**_reply_head(call, "chat.completion"), "choices": [choice], "usage": _usage_to_wire(done.usage)}
    )


class ChatStream:
    """Encoder for one reply, streamed as server-sent events."""

    media = "text/event-stream; charset=utf-8"

    def __init__(self, call: Call) -> None:
        self._head = _reply_head(call, "chat.completion.chunk")
        self._include_usage = call.include_usage
        self._options = _options_of(call)

    def begin(self, usage: Usage | None = None) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def event(self, event: ReplyEvent) -> bytes:
        match event:
            case Delta(kind="content", text=text, scores=scores):
                return self._chunk({"content": text}, scores=scores)
            case Delta(kind="reasoning", text=text):
                return self._chunk({"reasoning": text, "reasoning_content": text})
            case Delta():
                return b""  # this format has no field for a signature
            case CallDelta(call=call) if self._options.legacy:
                return self._chunk({"function_call": _function_to_wire(call)})
            case CallDelta(index=index, call=call):
                return self._chunk({"tool_calls": [{"index": index, **call_to_wire(call, self._options.custom_tools)}]})
            case KeepAlive():
                return self._chunk({})
            case Done() as done:
                end = self._chunk({}, _finish_reason(done, self._options))
                return end + self._final_usage(done) + b"data: [DONE]\n\n"

    def error(self, error: TurngateError) -> bytes:
        return b"data: " + orjson.dumps(error_body(error)) + b"\n\n"

    def _chunk(self, delta: dict[str, Json], finish: str | None = None, scores: tuple[TokenScore, ...] = ()) -> bytes:
        logprobs = _scores_to_wire(scores)
        body: dict[str, Json] = {
            **self._head,
            "choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}],
        }
        if self._include_usage:
            body["usage"] = None
        return b"data: " + orjson.dumps(body) + b"\n\n"

    def _final_usage(self, done: Done) -> bytes:
        if not self._include_usage:
            return b""
        return b"data: " + orjson.dumps({**self._head, "choices": [], "usage": _usage_to_wire(done.usage)}) + b"\n\n"


# ── tool calls, which agents send back ────────────────────────────────────────────────────────────────────────────────────


def call_to_wire(call: ToolCall, custom_tools: frozenset[str] = frozenset()) -> dict[str, Json]:
    if call.name not in custom_tools:
        return {"id": call.id, "type": "function", "function": _function_to_wire(call)}
    text = read_custom_input(call.arguments)
    if text is not None:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text}}
    # The arguments are not valid for a custom tool, so the whole argument text is sent as the input. The id prefix marks the call, so that
    # the input is decoded correctly when the agent sends the call back.
    whole_id = _WHOLE_INPUT_ID + call.id.removeprefix(_CALL_ID)
    return {"id": whole_id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}


def custom_call_from_wire(call_id: str, name: str, text: str) -> ToolCall:
    """Decode a call to a custom tool. `text` is the call's input."""
    whole = call_id.startswith(_WHOLE_INPUT_ID)
    return ToolCall(call_id_from_wire(call_id), name, text if whole else custom_input_to_arguments(text))


def call_id_from_wire(call_id: str) -> str:
    """Return the id under which a call was recorded, given the id that the agent sent back."""
    return _CALL_ID + call_id.removeprefix(_WHOLE_INPUT_ID) if call_id.startswith(_WHOLE_INPUT_ID) else call_id


def _function_to_wire(call: ToolCall) -> dict[str, Json]:
    return {"name": call.name, "arguments": call.arguments}


# ── other fields ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _options_of(call: Call) -> ChatReplyOptions:
    return call.reply_options if isinstance(call.reply_options, ChatReplyOptions) else _DEFAULT_OPTIONS


_DEFAULT_OPTIONS = ChatReplyOptions()


def _finish_reason(done: Done, options: ChatReplyOptions) -> str:
    if options.legacy and done.finish == "tool_calls":
        return "function_call"
    return "stop" if done.finish == "abort" else done.finish


def _scores_to_wire(scores: tuple[TokenScore, ...]) -> Json:
    if not scores:
        return None
    content = [
        {**_score_to_wire(score), "top_logprobs": [_score_to_wire(other) for other in score.alternatives]}
        for score in scores
    ]
    return {"content": content, "refusal": None}


def _score_to_wire(score: TokenScore) -> dict[str, Json]:
    return {"token": score.text, "logprob": score.logprob, "bytes": None if score.data is None else list(score.data)}


def _usage_to_wire(usage: Usage | None) -> Json:
    if usage is None:
        return None
    wire: dict[str, Json] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.cached_tokens:
        wire["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if usage.reasoning_tokens:
        wire["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return wire


def _reply_head(call: Call, kind: str) -> dict[str, Json]:
    return {"id": f"chatcmpl-{os.urandom(16).hex()}", "object": kind, "created": int(time.time()), "model": call.model}
