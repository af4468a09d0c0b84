"""A Responses reply, event by event. One that is not streamed is the last event's response.

    created, in_progress → per item: added, its parts and deltas, done → completed, incomplete or failed

An item is open while text of its kind comes; a call comes whole. Ids of items carry the mark of their reply, by which the turn is
known again when the agent sends it back (`responses_items`).
"""

from __future__ import annotations

import os
import time
from typing import Literal

import msgspec
import orjson

from turngate.dialects.responses_items import WHOLE_INPUT, sealed
from turngate.dialects.responses_tools import Named, named
from turngate.dialects.wire import one_line
from turngate.errors import ContextOverflow, TurngateError
from turngate.types import Alive, Call, CallDelta, Delta, Done, Json, ReplyEvent, ToolCall, Usage


class Asked(msgspec.Struct, frozen=True):
    """What of the request its reply needs."""

    echo: dict[str, Json]  # fields of the response that repeat the request
    tools: tuple[bytes, ...] = ()  # lists of tools, by which calls are told apart
    summary: bool = False  # reasoning is given as a summary
    seal: bool = False  # reasoning is given in a form that the agent keeps for us


class _Open(msgspec.Struct):
    """The item that is being written."""

    kind: Literal["reasoning", "message"]
    id: str
    text: list[str] = []
    seal: str = ""


class ResponsesStream:
    media = "text/event-stream; charset=utf-8"

    def __init__(self, call: Call) -> None:
        assert isinstance(call.wire, Asked), "a call of this dialect"
        self._asked = call.wire
        self._mark = os.urandom(12).hex()
        self._sequence = 2  # the beginning is written last, when there is something to follow it
        self._output: list[Json] = []  # items that are whole
        self._item: _Open | None = None
        self._named: dict[str, Named] | None = None
        self._head: dict[str, Json] = {
            "id": f"resp_tg{self._mark}",
            "object": "response",
            "created_at": int(time.time()),
            "model": call.model,
            **self._asked.echo,
        }

    def begin(self) -> bytes:
        response = {**self._response("in_progress"), "output": []}
        return _event("created", 0, response=response) + _event("in_progress", 1, response=response)

    def event(self, event: ReplyEvent) -> bytes:
        match event:
            case Delta(kind="seal", text=seal):
                return self._sealed(seal)
            case Delta(kind=kind, text=text):
                return self._text("reasoning" if kind == "reasoning" else "message", text) if text else b""
            case CallDelta(call=call):
                return self._close() + self._call(call)
            case Alive():
                return self._event("in_progress", response=self._response("in_progress"))
            case Done() as done:
                data, response = self._finish(done)
                return data + self._event(response["status"], response=response)

    def error(self, error: TurngateError) -> bytes:
        failed = self._response("failed", error={"code": _code(error), "message": told(error)})
        return self._event("failed", response=failed)

    def whole(self, done: Done) -> bytes:
        """The reply at once."""
        message = done.message
        for event in (
            Delta("reasoning", message.reasoning),
            *((Delta("seal", message.seal),) if message.seal else ()),
            Delta("content", message.content),
            *(CallDelta(n, call) for n, call in enumerate(message.tool_calls)),
        ):
            self.event(event)
        return orjson.dumps(self._finish(done)[1])

    # ── items ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _text(self, kind: Literal["reasoning", "message"], text: str) -> bytes:
        opening = b"" if self._item is not None and self._item.kind == kind else self._close() + self._open(kind)
        assert self._item is not None
        self._item.text.append(text)
        if kind == "message":
            return opening + self._in_item("output_text.delta", content_index=0, delta=text, logprobs=[])
        if self._asked.summary:
            return opening + self._in_item("reasoning_summary_text.delta", summary_index=0, delta=text)
        return opening + self._in_item("reasoning_text.delta", content_index=0, delta=text)

    def _sealed(self, seal: str) -> bytes:
        opening = b""
        if self._item is None or self._item.kind != "reasoning":  # sealed reasoning of which nothing was shown
            opening = self._close() + self._open("reasoning")
        assert self._item is not None
        self._item.seal = seal
        return opening + self._close()  # what follows is sealed apart

    def _open(self, kind: Literal["reasoning", "message"]) -> bytes:
        self._item = _Open(kind, self._id("rs" if kind == "reasoning" else "msg"))
        data = self._event(
            "output_item.added", output_index=len(self._output), item=self._written(self._item, "in_progress", [])
        )
        if kind == "reasoning" and self._asked.summary:
            return data + self._in_item("reasoning_summary_part.added", summary_index=0, part=self._part(""))
        return data + self._in_item("content_part.added", content_index=0, part=self._part(""))

    def _close(self, status: str = "completed") -> bytes:
        if self._item is None:
            return b""
        text = "".join(self._item.text)
        part = self._part(text)
        if self._item.kind == "message":
            data = self._in_item("output_text.done", content_index=0, text=text, logprobs=[])
            data += self._in_item("content_part.done", content_index=0, part=part)
        elif self._asked.summary:
            data = self._in_item("reasoning_summary_text.done", summary_index=0, text=text)
            data += self._in_item("reasoning_summary_part.done", summary_index=0, part=part)
        else:
            data = self._in_item("reasoning_text.done", content_index=0, text=text)
            data += self._in_item("content_part.done", content_index=0, part=part)
        item = self._written(self._item, status, [part] if text or self._item.kind == "message" else [])
        self._item = None
        return data + self._done(item)

    def _written(self, item: _Open, status: str, parts: list[Json]) -> dict[str, Json]:
        """An item as the agent reads it."""
        if item.kind == "message":
            return {"id": item.id, "type": "message", "role": "assistant", "status": status, "content": parts}
        wire: dict[str, Json] = {"id": item.id, "type": "reasoning", "summary": parts if self._asked.summary else []}
        if not self._asked.summary:
            wire["content"] = parts
        if item.seal or (parts and self._asked.seal):
            wire["encrypted_content"] = item.seal or sealed("".join(item.text))
        return wire

    def _part(self, text: str) -> dict[str, Json]:
        assert self._item is not None
        if self._item.kind == "message":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "summary_text" if self._asked.summary else "reasoning_text", "text": text}

    def _call(self, call: ToolCall) -> bytes:
        """A call as the kind of item that its tool asks for."""
        if self._named is None:
            self._named = named(self._asked.tools)
        known = self._named.get(call.name, Named("function", call.name))
        named_as: dict[str, Json] = {"call_id": call.id, "name": known.name}
        if known.namespace:
            named_as["namespace"] = known.namespace
        if known.kind == "custom":
            text = _free_text(call.arguments)
            item_id = self._id("ctc" if text is not None else WHOLE_INPUT)
            head = {"id": item_id, "type": "custom_tool_call", "status": "completed", **named_as}
            return self._called(head, "custom_tool_call_input", "input", call.arguments if text is None else text)
        if known.kind == "function":
            head = {"id": self._id("fc"), "type": "function_call", "status": "completed", **named_as}
            return self._called(head, "function_call_arguments", "arguments", call.arguments)
        item = {
            "id": self._id("tsc"),
            "type": "tool_search_call",
            "status": "completed",
            "call_id": call.id,
            "execution": "client",
            "arguments": _value(call.arguments),
        }
        return self._event("output_item.added", output_index=len(self._output), item=item) + self._done(item)

    def _called(self, head: dict[str, Json], event: str, field: str, text: str) -> bytes:
        place: dict[str, Json] = {"item_id": head["id"], "output_index": len(self._output)}
        begun = {**head, "status": "in_progress", field: ""}
        data = self._event("output_item.added", output_index=len(self._output), item=begun)
        if text:
            data += self._event(f"{event}.delta", **place, delta=text)
        data += self._event(f"{event}.done", **place, **{field: text})
        return data + self._done({**head, field: text})

    def _done(self, item: Json) -> bytes:
        self._output.append(item)
        return self._event("output_item.done", output_index=len(self._output) - 1, item=item)

    def _id(self, kind: str) -> str:
        return f"{kind}_tg{self._mark}{len(self._output):02x}"

    # ── the response ────────────────────────────────────────────────────────────────────────────────────────────────

    def _finish(self, done: Done) -> tuple[bytes, dict[str, Json]]:
        cut = done.finish == "length"
        data = b""
        if self._item is None and not self._output:
            data = self._open(
                "message"
            )  # an answer of nothing is one too: the agent has to have something to send back
        data += self._close("incomplete" if cut else "completed")
        if cut:
            return data, self._response("incomplete", usage=done.usage, incomplete={"reason": "max_output_tokens"})
        return data, self._response("completed", usage=done.usage)

    def _response(
        self, status: str, *, usage: Usage | None = None, error: Json = None, incomplete: Json = None
    ) -> dict[str, Json]:
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": incomplete,
            "output": list(self._output),
            "usage": _usage(usage),
        }

    def _in_item(self, event: str, **fields: Json) -> bytes:
        assert self._item is not None
        return self._event(event, item_id=self._item.id, output_index=len(self._output), **fields)

    def _event(self, event: str, **fields: Json) -> bytes:
        self._sequence += 1
        return _event(event, self._sequence - 1, **fields)


def _event(event: str, sequence: int, **fields: Json) -> bytes:
    body = orjson.dumps({"type": f"response.{event}", "sequence_number": sequence, **fields})
    return b"event: response.%b\ndata: %b\n\n" % (event.encode(), body)


def told(error: TurngateError) -> str:
    """The message, in the words that agents look for."""
    if isinstance(error, ContextOverflow):
        known = error.most is not None and error.size is not None
        sizes = f" (The maximum context length is {error.most} tokens; your input has {error.size}.)" if known else ""
        return f"Your input exceeds the context window of this model. Please adjust your input and try again.{sizes}"
    if error.status == 429:
        return f"{error.message.rstrip('.')}. Please try again in 1s."
    return error.message


def _code(error: TurngateError) -> str:
    """Why a response failed. Agents repeat a call after a `server_error`, but not after what is wrong with it."""
    if isinstance(error, ContextOverflow):
        return error.kind
    if error.status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.status < 500 else "server_error"


def _free_text(arguments: str) -> str | None:
    """The input of a custom tool, if the arguments are that and nothing else."""
    try:
        match orjson.loads(arguments):
            case {"input": str(text), **rest} if not rest:
                return text
    except orjson.JSONDecodeError:
        pass
    return None


def _value(arguments: str) -> Json:
    """Arguments as the object that they spell; what spells none stays text."""
    try:
        return orjson.Fragment(one_line(arguments)) if isinstance(orjson.loads(arguments), dict) else arguments
    except orjson.JSONDecodeError:
        return arguments


def _usage(usage: Usage | None) -> Json:
    if usage is None:
        return None
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
