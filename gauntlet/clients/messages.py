"""Anthropic Messages."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gauntlet.clients.base import (
    MAX_TOKENS,
    Client,
    Conversation,
    Event,
    Json,
    Message,
    ReceivedCall,
    ReplyError,
    Request,
)


class MessagesClient(Client):
    name = "messages"

    def build_request(
        self, conversation: Conversation, *, model: str, key: str, stream: bool, temperature: float = 1.0
    ) -> Request:
        body: Json = {
            "model": model,
            "system": [{"type": "text", "text": conversation.system}],
            "messages": _encode_messages(conversation.messages),
            "max_tokens": MAX_TOKENS,
            "thinking": {"type": "enabled", "budget_tokens": 2048},
            "temperature": temperature,
            "stream": stream,
        }
        if conversation.tools:
            body["tools"] = [
                {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
                for tool in conversation.tools
            ]
        headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
        return Request("/v1/messages", body, headers)

    def read_reply(self, reply: Json) -> Message:
        return _to_message(reply["content"])

    def read_events(self, events: Sequence[Event]) -> Message:
        blocks: dict[int, Json] = {}
        for event in events:
            kind = event.data.get("type") or event.name
            if kind == "error":
                raise ReplyError(str(event.data.get("error")))
            if kind == "content_block_start":
                blocks[event.data["index"]] = {**event.data["content_block"], "partial": ""}
            elif kind == "content_block_delta":
                _apply_delta(blocks[event.data["index"]], event.data["delta"])
            elif kind == "message_stop":
                return _to_message([_finish_block(blocks[index]) for index in sorted(blocks)])
        raise ReplyError("the stream ended without message_stop")

    def is_last_event(self, event: Event) -> bool:
        return event.data.get("type") == "message_stop"


def _encode_messages(conversation: Sequence[Message]) -> list[Json]:
    """Encode messages, merging neighbors with the same role as the API requires."""
    messages: list[Json] = []
    for message in conversation:
        role = "assistant" if message.role == "assistant" else "user"
        if messages and messages[-1]["role"] == role == "user":
            messages[-1]["content"] += _blocks(message)
        else:
            messages.append({"role": role, "content": _blocks(message)})
    return messages


def _blocks(message: Message) -> list[Json]:
    if message.role == "tool" and message.answers is not None:
        return [{"type": "tool_result", "tool_use_id": message.answers.id, "content": message.text}]
    blocks: list[Json] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, **message.opaque})
    if message.text:
        blocks.append({"type": "text", "text": message.text})
    for call in message.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)})
    return blocks


def _to_message(blocks: Sequence[Json]) -> Message:
    message = Message("assistant")
    for block in blocks:
        if block["type"] == "thinking":
            message.reasoning += block["thinking"]
            message.opaque["signature"] = block.get("signature", "")
        elif block["type"] == "text":
            message.text += block["text"]
        elif block["type"] == "tool_use":
            message.calls.append(
                ReceivedCall(block["id"], block["name"], json.dumps(block["input"], ensure_ascii=False))
            )
    return message


def _apply_delta(block: Json, delta: Json) -> None:
    if delta["type"] == "text_delta":
        block["text"] = block.get("text", "") + delta["text"]
    elif delta["type"] == "thinking_delta":
        block["thinking"] = block.get("thinking", "") + delta["thinking"]
    elif delta["type"] == "signature_delta":
        block["signature"] = delta["signature"]
    elif delta["type"] == "input_json_delta":
        block["partial"] += delta["partial_json"]


def _finish_block(block: Json) -> Json:
    if block["type"] == "tool_use" and block["partial"]:
        return {**block, "input": json.loads(block["partial"])}
    return block
