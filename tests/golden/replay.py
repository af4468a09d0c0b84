"""Replay a recording against the current gateway, with the recorded requests and model answers.

The gateway generates new ids each time, so the ids in later requests are replaced.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import msgspec

from tests import kit
from tests.golden import recording
from tests.golden.recording import IDS, Json
from turngate.agents.launch import resolve_signals
from turngate.agents.spec import CheckCall, CheckStep, find_agent
from turngate.dialects.messages_roundtrip import decode_signature
from turngate.engines.scripted import Scripted
from turngate.rollout.agent_check import MODEL
from turngate.rollout.playbook import format_step
from turngate.trace.signals import Signals


class Replay(msgspec.Struct):
    """The recorded trace and replies of a replay."""

    turns: list[Json]
    contexts: list[Json]
    rows: list[Json]
    replies: list[Json]


async def play(record: Json, *, with_signals: bool = True) -> Replay:
    """Replay a recording. Without the agent's signals, roles and causes come from structure alone."""
    exchanges = record["exchanges"]
    script = [kit.say(format_step(decode_reply(record["dialect"], e["reply"])), chunk=8) for e in exchanges]
    async with kit.gateway(engine=Scripted(script, model=MODEL), model=MODEL) as g:
        spec = find_agent(record["agent"]).spec
        signals = resolve_signals(spec.signals, MODEL) if with_signals else Signals()
        session = await g.open(model=MODEL, signals=msgspec.to_builtins(signals), sampling=spec.sampling)
        client, new_ids = g.http(), dict[str, str]()
        replies = []
        for exchange in exchanges:
            request = exchange["request"]
            body, path = _replace_ids(json.dumps(request["body"]), new_ids), request["path"]
            if not with_signals:  # the small model's name is one of them
                body, path = (part.replace(f"{MODEL}-small", MODEL) for part in (body, path))
            headers = {name: value.replace("REDACTED", session.key) for name, value in request["headers"].items()}
            answer = await client.request(request["method"], path, headers=headers, content=body)
            payload = recording.decode_payload(answer.headers["content-type"], answer.content)
            new_ids |= dict(zip(_ids(_payload(exchange["reply"])), _ids(payload), strict=True))
            kept = {name: value for name, value in answer.headers.items() if name in exchange["reply"]["headers"]}
            replies.append({"status": answer.status_code, "headers": kept, **payload})
        await g.seal(session.id)
        nodes = (await g.trace(session.id))["nodes"]
        rows = await g.samples(session.id, keep_empty=True)
    return Replay(
        [node for node in nodes if node["kind"] == "sampled"],
        [node for node in nodes if node["kind"] == "context"],
        rows,
        replies,
    )


def _replace_ids(text: str, names: Mapping[str, str]) -> str:
    return IDS.sub(lambda found: names.get(found[0], found[0]), text)


def _payload(reply: Json) -> Json:
    return {name: reply[name] for name in ("events", "body") if name in reply}


def _ids(value: Json) -> list[str]:
    return list(dict.fromkeys(IDS.findall(json.dumps(value))))


# ── model answers ───────────────────────────────────────────────────────────────────────────────────────────────────


def decode_reply(dialect: str, reply: Json) -> CheckStep:
    """Decode a recorded reply as its agent does."""
    return _READERS[dialect](reply)


def _chat(reply: Json) -> CheckStep:
    if "body" in reply:
        pieces = [choice["message"] for choice in reply["body"]["choices"]]
    else:
        chunks = [event["data"] for event in reply["events"] if event["data"] != "[DONE]"]
        pieces = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    calls = [call["function"] for piece in pieces for call in piece.get("tool_calls") or ()]
    return CheckStep(
        think="".join(piece.get("reasoning_content") or "" for piece in pieces),
        say="".join(piece.get("content") or "" for piece in pieces),
        calls=tuple(CheckCall(tool=call["name"], arguments=json.loads(call["arguments"])) for call in calls),
    )


def _responses(reply: Json) -> CheckStep:
    output = reply["events"][-1]["data"]["response"]["output"]
    return CheckStep(
        think="".join(part["text"] for item in output if item["type"] == "reasoning" for part in item["summary"]),
        say="".join(part["text"] for item in output if item["type"] == "message" for part in item["content"]),
        calls=tuple(
            CheckCall(tool=item["name"], arguments=json.loads(item["arguments"]))
            for item in output
            if item["type"] == "function_call"
        ),
    )


def _messages(reply: Json) -> CheckStep:
    events = [event["data"] for event in reply["events"]]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    names = [e["content_block"]["name"] for e in events if e.get("content_block", {}).get("type") == "tool_use"]
    inputs = [json.loads(delta["partial_json"]) for delta in deltas if delta["type"] == "input_json_delta"]
    shown = "".join(delta["thinking"] for delta in deltas if delta["type"] == "thinking_delta")
    hidden = "".join(decode_signature(delta["signature"]) for delta in deltas if delta["type"] == "signature_delta")
    return CheckStep(
        think=shown or hidden,
        say="".join(delta["text"] for delta in deltas if delta["type"] == "text_delta"),
        calls=tuple(CheckCall(tool=n, arguments=given) for n, given in zip(names, inputs, strict=True)),
    )


def _gemini(reply: Json) -> CheckStep:
    parts = [part for event in reply["events"] for part in event["data"]["candidates"][0]["content"]["parts"]]
    calls = [part["functionCall"] for part in parts if "functionCall" in part]
    return CheckStep(
        think="".join(part["text"] for part in parts if part.get("thought")),
        say="".join(part["text"] for part in parts if "text" in part and not part.get("thought")),
        calls=tuple(CheckCall(tool=call["name"], arguments=call["args"]) for call in calls),
    )


_READERS: dict[str, Callable[[Json], CheckStep]] = {
    "chat": _chat,
    "responses": _responses,
    "messages": _messages,
    "gemini": _gemini,
}


# ── reply shapes ────────────────────────────────────────────────────────────────────────────────────────────────────

# Fields whose exact values matter to agents.
_EXACT_FIELDS = {"event", "type", "object", "role", "status", "finish_reason", "stop_reason", "finishReason", "name"}


def shape(value: Json, name: str = "") -> Json:
    """Reduce a reply to its fields, the types of their values and the order of its events.

    Consecutive items of the same shape count once, since text may be split anywhere.
    """
    match value:
        case dict():
            return {key: shape(item, key) for key, item in value.items()}
        case list():
            return _deduplicate([shape(item, name) for item in value])
        case bool() | None:
            return value
        case str() if name in _EXACT_FIELDS or value == "[DONE]":
            return value
        case _:
            return type(value).__name__


def _deduplicate(shapes: Sequence[Json]) -> list[Json]:
    return [kind for kind, _ in groupby(shapes)]
