"""The mock engine's OpenAI Responses and Anthropic Messages APIs, which vLLM also has, for gateways that relay them unchanged.

Neither returns token ids. Requests are converted to chat messages and rendered like those.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gauntlet.replies import ChatReply
from gauntlet.sampler import MODEL, Engine, Sample
from gauntlet.tokens import Json

_FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def responses_to_chat(body: Json) -> Json:
    messages: list[Json] = [{"role": "system", "content": body.get("instructions") or ""}]
    for item in body["input"]:
        if item["type"] == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        elif item["type"] == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": item["content"]})
        else:
            _extend_answer(messages, _item_to_chat(item))
    tools = [{"type": "function", "function": _function(tool, "parameters")} for tool in body.get("tools") or []]
    return {"messages": messages, "tools": tools}


def _item_to_chat(item: Json) -> Json:
    if item["type"] == "reasoning":
        parts = [*(item.get("content") or []), *(item.get("summary") or [])]
        return {"reasoning_content": "".join(part["text"] for part in parts)}
    if item["type"] == "message":
        return {"content": "".join(part["text"] for part in item["content"])}
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"tool_calls": [{"id": item["call_id"], "type": "function", "function": function}]}


def messages_to_chat(body: Json) -> Json:
    messages: list[Json] = [{"role": "system", "content": body.get("system") or ""}]
    for message in body["messages"]:
        blocks = message["content"]
        for block in [{"type": "text", "text": blocks}] if isinstance(blocks, str) else blocks:
            if block["type"] == "tool_result":
                messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": block["content"]})
            elif message["role"] == "assistant":
                _extend_answer(messages, _block_to_chat(block))
            else:
                messages.append({"role": "user", "content": block["text"]})
    tools = [{"type": "function", "function": _function(tool, "input_schema")} for tool in body.get("tools") or []]
    return {"messages": messages, "tools": tools}


def _block_to_chat(block: Json) -> Json:
    if block["type"] == "thinking":
        return {"reasoning_content": block["thinking"]}
    if block["type"] == "text":
        return {"content": block["text"]}
    function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
    return {"tool_calls": [{"id": block["id"], "type": "function", "function": function}]}


def _extend_answer(messages: list[Json], answer: Json) -> None:
    """Add a part of an answer to the assistant message at the end, or start one."""
    if messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    last = messages[-1]
    for name, value in answer.items():
        last[name] = last[name] + value if last.get(name) else value


def _function(tool: Json, schema: str) -> Json:
    return {"name": tool["name"], "description": tool.get("description"), "parameters": tool[schema]}


class ResponsesReply(ChatReply):
    """`/v1/responses`."""

    named = True

    def full(self) -> Json:
        items = self._items()
        ended = self.sample.finish == "length"
        prompt, sampled = len(self.sample.prompt), len(self.sample.ids)
        return {
            **self._head("incomplete" if ended else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if ended else None,
            "output": items,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + sampled,
            },
        }

    def event(self, start: int, end: int, last: bool) -> list[Json]:
        events: list[Json] = []
        if start == 0:
            events.append({"type": "response.created", "response": self._head("in_progress")})
        parsed = self.parse(end, last)
        content = parsed.content[len(self.sent.content) :]
        if content:
            events.append({"type": "response.output_text.delta", "delta": content, "output_index": 0})
        self.sent = parsed
        if last:
            full = self.full()
            for index, item in enumerate(full["output"]):
                events.append({"type": "response.output_item.done", "output_index": index, "item": item})
            events.append({"type": f"response.{full['status']}", "response": full})
        return [{**event, "sequence_number": 1000 * end + n} for n, event in enumerate(events)]

    def _head(self, status: str) -> Json:
        return {
            "id": self.head["id"],
            "object": "response",
            "created_at": self.head["created"],
            "model": MODEL,
            "status": status,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": None,
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
            "usage": None,
        }

    def _items(self) -> list[Json]:
        parsed = self.parse(len(self.sample.ids), True)
        name = self.head["id"]
        items: list[Json] = []
        if parsed.reasoning:
            content = [{"type": "reasoning_text", "text": parsed.reasoning}]
            items.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content})
        if parsed.content:
            content = [{"type": "output_text", "text": parsed.content, "annotations": []}]
            more = {"id": f"msg_{name}", "role": "assistant", "status": "completed"}
            items.append({"type": "message", **more, "content": content})
        for n in range(len(parsed.calls)):
            call = self.call(n, parsed)
            more = {"id": f"fc_{call['id']}", "call_id": call["id"], "status": "completed"}
            items.append({"type": "function_call", **more, **call["function"]})
        return items


class MessagesReply(ChatReply):
    """`/v1/messages`."""

    named = True

    def __init__(self, engine: Engine, sample: Sample, body: Json) -> None:
        super().__init__(engine, sample, body)
        self._open = ""  # the type of the current block
        self._blocks = 0

    def full(self) -> Json:
        parsed = self.parse(len(self.sample.ids), True)
        blocks: list[Json] = []
        if parsed.reasoning:
            blocks.append({"type": "thinking", "thinking": parsed.reasoning, "signature": "mock"})
        if parsed.content:
            blocks.append({"type": "text", "text": parsed.content})
        for n in range(len(parsed.calls)):
            call = self.call(n, parsed)
            arguments = json.loads(call["function"]["arguments"])
            blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
        return {**self._head(blocks), "stop_reason": _FINISH[self.finish(parsed)], "usage": self._usage()}

    def event(self, start: int, end: int, last: bool) -> list[Json]:
        events: list[Json] = []
        if start == 0:
            message = {**self._head([]), "stop_reason": None, "usage": self._usage()}
            events.append({"type": "message_start", "message": message})
        parsed = self.parse(end, last)
        for kind, new in (
            ("thinking", parsed.reasoning[len(self.sent.reasoning) :]),
            ("text", parsed.content[len(self.sent.content) :]),
        ):
            if new:
                events += self._block(kind, {kind: ""})
                events.append(self._delta({"type": f"{kind}_delta", kind: new}))
        for n in range(len(self.sent.calls), len(parsed.calls)):
            call = self.call(n, parsed)
            events += self._block("tool_use", {"id": call["id"], "name": call["function"]["name"], "input": {}})
            events.append(self._delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]}))
        self.sent = parsed
        if last:
            events += self._close_block()
            stop = {"stop_reason": _FINISH[self.finish(parsed)], "stop_sequence": None}
            events += [{"type": "message_delta", "delta": stop, "usage": self._usage()}, {"type": "message_stop"}]
        return events

    def _block(self, kind: str, begun: Json) -> Sequence[Json]:
        if self._open == kind != "tool_use":
            return ()
        closed = self._close_block()
        self._open = kind
        self._blocks += 1
        index = self._blocks - 1
        return (*closed, {"type": "content_block_start", "index": index, "content_block": {"type": kind, **begun}})

    def _close_block(self) -> Sequence[Json]:
        if not self._open:
            return ()
        stop: Json = {"type": "content_block_stop", "index": self._blocks - 1}
        signed = [self._delta({"type": "signature_delta", "signature": "mock"})] if self._open == "thinking" else []
        self._open = ""
        return (*signed, stop)

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def _head(self, blocks: list[Json]) -> Json:
        head = {"id": self.head["id"], "type": "message", "role": "assistant", "model": MODEL}
        return {**head, "content": blocks, "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        return {"input_tokens": len(self.sample.prompt), "output_tokens": len(self.sample.ids)}
