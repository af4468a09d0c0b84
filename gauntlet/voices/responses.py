"""OpenAI Responses."""

from __future__ import annotations

from collections.abc import Sequence

from gauntlet.voices.base import MAX_TOKENS, Broken, Called, Conversation, Event, Json, Request, Said, Voice


class Responses(Voice):
    name = "responses"

    def request(self, conversation: Conversation, *, model: str, key: str, stream: bool) -> Request:
        items = [item for said in conversation.said for item in _items(said)]
        body: Json = {
            "model": model,
            "instructions": conversation.system,
            "input": items,
            "max_output_tokens": MAX_TOKENS,
            "temperature": 1.0,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "stream": stream,
        }
        if conversation.tools:
            body["tools"] = [{"type": "function", "strict": False, **tool} for tool in conversation.tools]
        return Request("/v1/responses", body, {"authorization": f"Bearer {key}"})

    def whole(self, reply: Json) -> Said:
        if reply.get("status") == "failed":
            raise Broken(str(reply.get("error")))
        return _said(reply["output"])

    def streamed(self, events: Sequence[Event]) -> Said:
        items: list[Json] = []
        for event in events:
            kind = event.data.get("type") or event.name
            if kind in ("error", "response.failed"):
                raise Broken(str(event.data))
            if kind == "response.output_item.done":
                items.append(event.data["item"])
            if kind in ("response.completed", "response.incomplete"):
                return _said(items or event.data["response"]["output"])
        raise Broken("the stream ended without response.completed")

    def ended(self, event: Event) -> bool:
        return event.data.get("type") in ("response.completed", "response.incomplete")


def _items(said: Said) -> list[Json]:
    if said.role == "tool" and said.answers is not None:
        return [{"type": "function_call_output", "call_id": said.answers.id, "output": said.text}]
    if said.role == "user":
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": said.text}]}]
    items: list[Json] = []
    if said.reasoning:
        items.append(said.opaque["reasoning"])
    if said.text:
        content = [{"type": "output_text", "text": said.text, "annotations": []}]
        items.append({"type": "message", "role": "assistant", **said.opaque.get("message", {}), "content": content})
    for call in said.calls:
        items.append(
            {"type": "function_call", **call.opaque, "call_id": call.id, "name": call.name, "arguments": call.arguments}
        )
    return items


def _said(items: Sequence[Json]) -> Said:
    said = Said("assistant")
    for item in items:
        if item["type"] == "reasoning":
            parts = [*(item.get("content") or []), *(item.get("summary") or [])]
            said.reasoning = "".join(part.get("text", "") for part in parts) or "(encrypted)"
            said.opaque["reasoning"] = item
        elif item["type"] == "message":
            said.text += "".join(part.get("text", "") for part in item["content"])
            said.opaque["message"] = {name: item[name] for name in ("id", "status") if name in item}
        elif item["type"] == "function_call":
            opaque = {name: item[name] for name in ("id", "status") if item.get(name)}
            said.calls.append(Called(item["call_id"], item["name"], item["arguments"], opaque))
    return said
