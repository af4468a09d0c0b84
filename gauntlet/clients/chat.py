"""OpenAI chat completions."""

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

_REASONING = ("reasoning_content", "reasoning")


class ChatClient(Client):
    name = "chat"

    def build_request(
        self, conversation: Conversation, *, model: str, key: str, stream: bool, temperature: float = 1.0
    ) -> Request:
        messages: list[Json] = [{"role": "system", "content": conversation.system}]
        messages += [_encode_message(message) for message in conversation.messages]
        body: Json = {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": temperature}
        if conversation.tools:
            body["tools"] = [{"type": "function", "function": tool} for tool in conversation.tools]
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return Request("/v1/chat/completions", body, {"authorization": f"Bearer {key}"})

    def read_reply(self, reply: Json) -> Message:
        choice = reply["choices"][0]
        return _to_message(choice["message"])

    def read_events(self, events: Sequence[Event]) -> Message:
        body: Json = {"content": "", "tool_calls": []}
        finished = False
        for event in events:
            if event.data.get("error"):
                raise ReplyError(str(event.data["error"]))
            for choice in event.data.get("choices") or []:
                _apply_delta(body, choice.get("delta") or {})
                finished = finished or choice.get("finish_reason") is not None
        if not finished:
            raise ReplyError("the stream ended without a finish reason")
        return _to_message(body)


def _encode_message(message: Message) -> Json:
    if message.role == "tool" and message.answers is not None:
        return {"role": "tool", "tool_call_id": message.answers.id, "content": message.text}
    if message.role == "user":
        return {"role": "user", "content": message.text}
    body: Json = {"role": "assistant", "content": message.text or None}
    if message.reasoning:
        body[message.opaque.get("reasoning", "reasoning_content")] = message.reasoning
    if message.calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    return body


def _to_message(body: Json) -> Message:
    field = next((name for name in _REASONING if body.get(name)), "")
    calls = [
        ReceivedCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in body.get("tool_calls") or []
    ]
    reasoning = body[field] if field else ""
    return Message(
        "assistant", body.get("content") or "", reasoning, calls, opaque={"reasoning": field} if field else {}
    )


def _apply_delta(body: Json, delta: Json) -> None:
    body["content"] += delta.get("content") or ""
    for name in _REASONING:
        if delta.get(name):
            body[name] = body.get(name, "") + delta[name]
    for part in delta.get("tool_calls") or []:
        calls = body["tool_calls"]
        while len(calls) <= part["index"]:
            calls.append({"id": "", "function": {"name": "", "arguments": ""}})
        call, function = calls[part["index"]], part.get("function") or {}
        call["id"] = call["id"] or part.get("id") or ""
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""
