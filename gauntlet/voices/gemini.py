"""Gemini `generateContent`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gauntlet.voices.base import MAX_TOKENS, Broken, Called, Conversation, Event, Json, Request, Said, Voice


class Gemini(Voice):
    name = "gemini"

    def request(self, conversation: Conversation, *, model: str, key: str, stream: bool) -> Request:
        body: Json = {
            "systemInstruction": {"parts": [{"text": conversation.system}]},
            "contents": _merged(conversation.said),
            "generationConfig": {
                "maxOutputTokens": MAX_TOKENS,
                "temperature": 1.0,
                "thinkingConfig": {"includeThoughts": True},
            },
        }
        if conversation.tools:
            body["tools"] = [{"functionDeclarations": list(conversation.tools)}]
        verb = "streamGenerateContent?alt=sse" if stream else "generateContent"
        return Request(f"/v1beta/models/{model}:{verb}", body, {"x-goog-api-key": key})

    def whole(self, reply: Json) -> Said:
        return _said(reply["candidates"][0]["content"].get("parts") or [])

    def streamed(self, events: Sequence[Event]) -> Said:
        parts: list[Json] = []
        finished = False
        for event in events:
            if event.data.get("error"):
                raise Broken(str(event.data["error"]))
            for candidate in event.data.get("candidates") or []:
                parts += (candidate.get("content") or {}).get("parts") or []
                finished = finished or bool(candidate.get("finishReason"))
        if not finished:
            raise Broken("the stream ended without a finish reason")
        return _said(parts)


def _merged(conversation: Sequence[Said]) -> list[Json]:
    contents: list[Json] = []
    for said in conversation:
        role = "model" if said.role == "assistant" else "user"
        if contents and contents[-1]["role"] == role == "user":
            contents[-1]["parts"] += _parts(said)
        else:
            contents.append({"role": role, "parts": _parts(said)})
    return contents


def _parts(said: Said) -> list[Json]:
    if said.role == "tool" and said.answers is not None:
        response: Json = {"name": said.answers.name, "response": {"output": said.text}}
        return [{"functionResponse": {**response, **_id(said.answers)}}]
    parts: list[Json] = []
    if said.reasoning:
        parts.append({"text": said.reasoning, "thought": True})
    if said.text:
        parts.append({"text": said.text, **said.opaque})
    for call in said.calls:
        function = {"name": call.name, "args": json.loads(call.arguments), **_id(call)}
        parts.append({"functionCall": function, **call.opaque})
    return parts


def _id(call: Called) -> Json:
    return {"id": call.id} if call.id else {}


def _said(parts: Sequence[Json]) -> Said:
    said = Said("assistant")
    for part in parts:
        signature = {"thoughtSignature": part["thoughtSignature"]} if part.get("thoughtSignature") else {}
        if part.get("thought"):
            said.reasoning += part.get("text", "")
        elif "functionCall" in part:
            function = part["functionCall"]
            arguments = json.dumps(function.get("args") or {}, ensure_ascii=False)
            said.calls.append(Called(function.get("id") or "", function["name"], arguments, signature))
        elif "text" in part:
            said.text += part["text"]
            said.opaque |= signature
    return said
