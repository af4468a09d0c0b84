"""Anthropic Messages."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gauntlet.voices.base import MAX_TOKENS, Broken, Called, Conversation, Event, Json, Request, Said, Voice


class Messages(Voice):
    name = "messages"

    def request(self, conversation: Conversation, *, model: str, key: str, stream: bool) -> Request:
        body: Json = {
            "model": model,
            "system": [{"type": "text", "text": conversation.system}],
            "messages": _merged(conversation.said),
            "max_tokens": MAX_TOKENS,
            "thinking": {"type": "enabled", "budget_tokens": 2048},
            "temperature": 1.0,
            "stream": stream,
        }
        if conversation.tools:
            body["tools"] = [
                {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
                for tool in conversation.tools
            ]
        headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
        return Request("/v1/messages", body, headers)

    def whole(self, reply: Json) -> Said:
        return _said(reply["content"])

    def streamed(self, events: Sequence[Event]) -> Said:
        blocks: dict[int, Json] = {}
        for event in events:
            kind = event.data.get("type") or event.name
            if kind == "error":
                raise Broken(str(event.data.get("error")))
            if kind == "content_block_start":
                blocks[event.data["index"]] = {**event.data["content_block"], "partial": ""}
            elif kind == "content_block_delta":
                _add(blocks[event.data["index"]], event.data["delta"])
            elif kind == "message_stop":
                return _said([_closed(blocks[index]) for index in sorted(blocks)])
        raise Broken("the stream ended without message_stop")

    def ended(self, event: Event) -> bool:
        return event.data.get("type") == "message_stop"


def _merged(conversation: Sequence[Said]) -> list[Json]:
    """Neighbours of one role are one message, as the API has it."""
    messages: list[Json] = []
    for said in conversation:
        role = "assistant" if said.role == "assistant" else "user"
        if messages and messages[-1]["role"] == role == "user":
            messages[-1]["content"] += _blocks(said)
        else:
            messages.append({"role": role, "content": _blocks(said)})
    return messages


def _blocks(said: Said) -> list[Json]:
    if said.role == "tool" and said.answers is not None:
        return [{"type": "tool_result", "tool_use_id": said.answers.id, "content": said.text}]
    blocks: list[Json] = []
    if said.reasoning:
        blocks.append({"type": "thinking", "thinking": said.reasoning, **said.opaque})
    if said.text:
        blocks.append({"type": "text", "text": said.text})
    for call in said.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)})
    return blocks


def _said(blocks: Sequence[Json]) -> Said:
    said = Said("assistant")
    for block in blocks:
        if block["type"] == "thinking":
            said.reasoning += block["thinking"]
            said.opaque["signature"] = block.get("signature", "")
        elif block["type"] == "text":
            said.text += block["text"]
        elif block["type"] == "tool_use":
            said.calls.append(Called(block["id"], block["name"], json.dumps(block["input"], ensure_ascii=False)))
    return said


def _add(block: Json, delta: Json) -> None:
    if delta["type"] == "text_delta":
        block["text"] = block.get("text", "") + delta["text"]
    elif delta["type"] == "thinking_delta":
        block["thinking"] = block.get("thinking", "") + delta["thinking"]
    elif delta["type"] == "signature_delta":
        block["signature"] = delta["signature"]
    elif delta["type"] == "input_json_delta":
        block["partial"] += delta["partial_json"]


def _closed(block: Json) -> Json:
    if block["type"] == "tool_use" and block["partial"]:
        return {**block, "input": json.loads(block["partial"])}
    return block
