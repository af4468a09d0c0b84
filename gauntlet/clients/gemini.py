"""Gemini `generateContent`."""

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


class GeminiClient(Client):
    name = "gemini"

    def build_request(
        self, conversation: Conversation, *, model: str, key: str, stream: bool, temperature: float = 1.0
    ) -> Request:
        body: Json = {
            "systemInstruction": {"parts": [{"text": conversation.system}]},
            "contents": _encode_messages(conversation.messages),
            "generationConfig": {
                "maxOutputTokens": MAX_TOKENS,
                "temperature": temperature,
                "thinkingConfig": {"includeThoughts": True},
            },
        }
        if conversation.tools:
            body["tools"] = [{"functionDeclarations": list(conversation.tools)}]
        verb = "streamGenerateContent?alt=sse" if stream else "generateContent"
        return Request(f"/v1beta/models/{model}:{verb}", body, {"x-goog-api-key": key})

    def read_reply(self, reply: Json) -> Message:
        return _to_message(reply["candidates"][0]["content"].get("parts") or [])

    def read_events(self, events: Sequence[Event]) -> Message:
        parts: list[Json] = []
        finished = False
        for event in events:
            if event.data.get("error"):
                raise ReplyError(str(event.data["error"]))
            for candidate in event.data.get("candidates") or []:
                parts += (candidate.get("content") or {}).get("parts") or []
                finished = finished or bool(candidate.get("finishReason"))
        if not finished:
            raise ReplyError("the stream ended without a finish reason")
        return _to_message(parts)


def _encode_messages(conversation: Sequence[Message]) -> list[Json]:
    contents: list[Json] = []
    for message in conversation:
        role = "model" if message.role == "assistant" else "user"
        if contents and contents[-1]["role"] == role == "user":
            contents[-1]["parts"] += _parts(message)
        else:
            contents.append({"role": role, "parts": _parts(message)})
    return contents


def _parts(message: Message) -> list[Json]:
    if message.role == "tool" and message.answers is not None:
        response: Json = {"name": message.answers.name, "response": {"output": message.text}}
        return [{"functionResponse": {**response, **_id(message.answers)}}]
    parts: list[Json] = []
    if message.reasoning:
        parts.append({"text": message.reasoning, "thought": True})
    if message.text:
        parts.append({"text": message.text, **message.opaque})
    for call in message.calls:
        function = {"name": call.name, "args": json.loads(call.arguments), **_id(call)}
        parts.append({"functionCall": function, **call.opaque})
    return parts


def _id(call: ReceivedCall) -> Json:
    return {"id": call.id} if call.id else {}


def _to_message(parts: Sequence[Json]) -> Message:
    message = Message("assistant")
    for part in parts:
        signature = {"thoughtSignature": part["thoughtSignature"]} if part.get("thoughtSignature") else {}
        if part.get("thought"):
            message.reasoning += part.get("text", "")
        elif "functionCall" in part:
            function = part["functionCall"]
            arguments = json.dumps(function.get("args") or {}, ensure_ascii=False)
            message.calls.append(ReceivedCall(function.get("id") or "", function["name"], arguments, signature))
        elif "text" in part:
            message.text += part["text"]
            message.opaque |= signature
    return message
