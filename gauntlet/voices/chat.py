"""OpenAI chat completions."""

from __future__ import annotations

from collections.abc import Sequence

from gauntlet.voices.base import MAX_TOKENS, Broken, Called, Conversation, Event, Json, Request, Said, Voice

_REASONING = ("reasoning_content", "reasoning")


class Chat(Voice):
    name = "chat"

    def request(self, conversation: Conversation, *, model: str, key: str, stream: bool) -> Request:
        messages: list[Json] = [{"role": "system", "content": conversation.system}]
        messages += [_message(said) for said in conversation.said]
        body: Json = {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 1.0}
        if conversation.tools:
            body["tools"] = [{"type": "function", "function": tool} for tool in conversation.tools]
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return Request("/v1/chat/completions", body, {"authorization": f"Bearer {key}"})

    def whole(self, reply: Json) -> Said:
        choice = reply["choices"][0]
        return _said(choice["message"])

    def streamed(self, events: Sequence[Event]) -> Said:
        message: Json = {"content": "", "tool_calls": []}
        finished = False
        for event in events:
            if event.data.get("error"):
                raise Broken(str(event.data["error"]))
            for choice in event.data.get("choices") or []:
                _add(message, choice.get("delta") or {})
                finished = finished or choice.get("finish_reason") is not None
        if not finished:
            raise Broken("the stream ended without a finish reason")
        return _said(message)


def _message(said: Said) -> Json:
    if said.role == "tool" and said.answers is not None:
        return {"role": "tool", "tool_call_id": said.answers.id, "content": said.text}
    if said.role == "user":
        return {"role": "user", "content": said.text}
    message: Json = {"role": "assistant", "content": said.text or None}
    if said.reasoning:
        message[said.opaque.get("reasoning", "reasoning_content")] = said.reasoning
    if said.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in said.calls
        ]
    return message


def _said(message: Json) -> Said:
    field = next((name for name in _REASONING if message.get(name)), "")
    calls = [
        Called(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or []
    ]
    reasoning = message[field] if field else ""
    return Said(
        "assistant", message.get("content") or "", reasoning, calls, opaque={"reasoning": field} if field else {}
    )


def _add(message: Json, delta: Json) -> None:
    message["content"] += delta.get("content") or ""
    for name in _REASONING:
        if delta.get(name):
            message[name] = message.get(name, "") + delta[name]
    for part in delta.get("tool_calls") or []:
        calls = message["tool_calls"]
        while len(calls) <= part["index"]:
            calls.append({"id": "", "function": {"name": "", "arguments": ""}})
        call, function = calls[part["index"]], part.get("function") or {}
        call["id"] = call["id"] or part.get("id") or ""
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""
