"""OpenAI Responses."""

from __future__ import annotations

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


class ResponsesClient(Client):
    name = "responses"

    def build_request(
        self, conversation: Conversation, *, model: str, key: str, stream: bool, temperature: float = 1.0
    ) -> Request:
        items = [item for message in conversation.messages for item in _items(message)]
        body: Json = {
            "model": model,
            "instructions": conversation.system,
            "input": items,
            "max_output_tokens": MAX_TOKENS,
            "temperature": temperature,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "stream": stream,
        }
        if conversation.tools:
            body["tools"] = [{"type": "function", "strict": False, **tool} for tool in conversation.tools]
        return Request("/v1/responses", body, {"authorization": f"Bearer {key}"})

    def read_reply(self, reply: Json) -> Message:
        if reply.get("status") == "failed":
            raise ReplyError(str(reply.get("error")))
        return _to_message(reply["output"])

    def read_events(self, events: Sequence[Event]) -> Message:
        items: list[Json] = []
        for event in events:
            kind = event.data.get("type") or event.name
            if kind in ("error", "response.failed"):
                raise ReplyError(str(event.data))
            if kind == "response.output_item.done":
                items.append(event.data["item"])
            if kind in ("response.completed", "response.incomplete"):
                return _to_message(items or event.data["response"]["output"])
        raise ReplyError("the stream ended without response.completed")

    def is_last_event(self, event: Event) -> bool:
        return event.data.get("type") in ("response.completed", "response.incomplete")


def _items(message: Message) -> list[Json]:
    if message.role == "tool" and message.answers is not None:
        return [{"type": "function_call_output", "call_id": message.answers.id, "output": message.text}]
    if message.role == "user":
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": message.text}]}]
    items: list[Json] = []
    if message.reasoning:
        items.append(message.opaque["reasoning"])
    if message.text:
        content = [{"type": "output_text", "text": message.text, "annotations": []}]
        items.append({"type": "message", "role": "assistant", **message.opaque.get("message", {}), "content": content})
    for call in message.calls:
        items.append(
            {"type": "function_call", **call.opaque, "call_id": call.id, "name": call.name, "arguments": call.arguments}
        )
    return items


def _to_message(items: Sequence[Json]) -> Message:
    message = Message("assistant")
    for item in items:
        if item["type"] == "reasoning":
            parts = [*(item.get("content") or []), *(item.get("summary") or [])]
            message.reasoning = "".join(part.get("text", "") for part in parts) or "(encrypted)"
            message.opaque["reasoning"] = item
        elif item["type"] == "message":
            message.text += "".join(part.get("text", "") for part in item["content"])
            message.opaque["message"] = {name: item[name] for name in ("id", "status") if name in item}
        elif item["type"] == "function_call":
            opaque = {name: item[name] for name in ("id", "status") if item.get(name)}
            message.calls.append(ReceivedCall(item["call_id"], item["name"], item["arguments"], opaque))
    return message
