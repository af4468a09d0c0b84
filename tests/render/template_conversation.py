"""A conversation of twelve turns with tools, parallel calls, thinking and reminders, for any chat template.

`play` runs it through the real gateway with a scripted model that writes its turns as the template does, and verifies what was recorded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.exact.agent import Agent, World
from tests.exact.invariants import check_invariants
from tests.verify.kit import verify_all
from turngate.engines.scripted import ScriptedTurn
from turngate.errors import BadRequest
from turngate.render import BUILTIN_TOKENIZER, TemplateRenderer, Tokenizer
from turngate.render.certify import Certificate, certify
from turngate.trace.sample import build_samples
from turngate.types import Message, Tool, ToolCall

# What a template's own vocabulary would have as tokens
_MARKERS = re.compile(
    r"<[|｜][^\s<>]+?[|｜]>|<[|]\w+>|<\w+[|]>|<(?:start|end)_of_\w+>|<(?:bos|eos|s|pad|unk|sop)>|</s>|\[/?[A-Z_]{3,}\]|\[gMASK\]"
)
TOOL_WIRE = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
TOOL = Tool("read_file", TOOL_WIRE)


@dataclass(frozen=True)
class Step:
    """One turn: what the model writes, and what the agent says next beside the results of its calls."""

    calls: int = 0
    text: str = ""
    thinking: str = ""
    then: str = ""


STEPS = (
    Step(calls=1, thinking="I should read main.py."),
    Step(calls=2),
    Step(calls=1, text="Let me look further.", then="<reminder>Keep it short.</reminder>"),
    Step(calls=1),
    Step(text="It prints a line.", thinking="That was all.", then="And util.py?"),
    Step(calls=2, then="<reminder>Two files are open.</reminder>"),
    Step(calls=1),
    Step(calls=1, thinking="One more.", then="<reminder>No tests yet.</reminder>"),
    Step(calls=1),
    Step(text="It adds numbers.", then="Is there a bug?"),
    Step(calls=1, thinking="Look again.", then="<reminder>Answer soon.</reminder>"),
    Step(text="Yes, in line 3."),
)


@dataclass(frozen=True)
class Outcome:
    """What a template made of the conversation."""

    rows: int
    reasons: tuple[str, ...]


def build_tokenizer(source: str, folder: Path) -> Tokenizer:
    """Write a tokenizer folder with this template and the built-in vocabulary, extended by the template's markers."""
    spec = json.loads((BUILTIN_TOKENIZER / "tokenizer.json").read_text())
    known = {token["content"] for token in spec["added_tokens"]}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    missing = sorted({"<s>", "</s>", "<end_of_utterance>", *_MARKERS.findall(source)} - known)
    size = max(spec["model"]["vocab"].values(), default=0) + 1
    size = max(size, *(token["id"] + 1 for token in spec["added_tokens"]))
    spec["added_tokens"] += [{**flags, "id": size + n, "content": token} for n, token in enumerate(missing)]
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "chat_template.jinja").write_text(source)
    return Tokenizer(folder, fast=False)


def certify_tokenizer(tokenizer: Tokenizer) -> tuple[TemplateRenderer, Certificate]:
    """Certify without the cache and without the fast encoder, whose probe takes longer than the conversation."""
    renderer = TemplateRenderer(tokenizer)
    certificate = certify(renderer)
    renderer.uncertified = certificate.uncertified
    return renderer, certificate


async def play(renderer: TemplateRenderer, certificate: Certificate, folder: Path) -> Outcome:
    """Have the conversation, verify the recording, and return the number of rows and why there is more than one."""
    async with World.of(folder, renderer) as world:
        agent = world.agent()
        agent.tools = [TOOL_WIRE]
        agent.messages = [
            {"role": "system", "content": "You are a careful engineer."},
            {"role": "user", "content": "What does main.py do?"},
        ]
        for n, step in enumerate(STEPS):
            reply = await agent.call(_write_turn(renderer, agent, step, n))
            assert reply.status == 200, reply.error
            _answer(agent, reply.message, step)
        check_invariants(agent.session, [request.prompt for request in world.engine.received])
        rows = build_samples(agent.session.trace)
        assert sum(span.trained for row in rows for span in row.spans) == len(STEPS)
        events = world.gateway.events.page(agent.session_id)
        reasons = dict.fromkeys(event.data["reason"] for event in events if "reason" in event.data)
    verify_all(folder, renderer=renderer, replay=False)
    return Outcome(len(rows), tuple(reasons))


def _answer(agent: Agent, message: dict[str, Any], step: Step) -> None:
    """Append the reply, the results of its calls, and what the agent says next."""
    agent.messages.append(message)
    calls = message.get("tool_calls") or []
    agent.messages += [
        {"role": "tool", "tool_call_id": call["id"], "content": f"result {n}"} for n, call in enumerate(calls)
    ]
    if step.then or not calls:
        agent.messages.append({"role": "user", "content": step.then or "Go on."})


def _write_turn(renderer: TemplateRenderer, agent: Agent, step: Step, n: int) -> ScriptedTurn:
    """Write a turn as the template writes it, so that the model samples what it would have been trained on."""
    calls = tuple(
        ToolCall(f"call_{n:020}{k:04}", "read_file", f'{{"path": "file{n}{k}.py"}}')
        for k in range(min(step.calls, 2 if renderer.template.traits.parallel_calls else 1))
    )
    message = Message("assistant", step.text, step.thinking, calls)
    history = _read_history(agent.messages)
    prompt = renderer.text(history, [TOOL], {})
    try:
        whole = renderer.text([*history, message], [TOOL], {}, generate=False)
    except BadRequest:
        whole = prompt + step.text
    before, after = renderer.tokenizer.encode(prompt), renderer.tokenizer.encode(whole)
    size = next((k for k, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    text = renderer.tokenizer.decode(after[size:])
    closing = renderer.syntax.reasoning_close
    if prompt.rstrip().endswith(renderer.syntax.reasoning_open) and closing not in text:
        text = f"{step.thinking}\n{closing}\n\n{text}"
    ids = renderer.tokenizer.encode(text)
    end = next((k for k, i in enumerate(ids) if i in renderer.stop_ids), None)
    stop = renderer.stop_ids[1 if calls and len(renderer.stop_ids) > 2 else 0]
    return ScriptedTurn([*ids, stop] if end is None else ids[: end + 1])


def _read_history(messages: Sequence[dict[str, Any]]) -> list[Message]:
    out = []
    for message in messages:
        calls = tuple(
            ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or []
        )
        out.append(
            Message(
                message["role"],
                message.get("content") or "",
                tool_calls=calls,
                tool_call_id=message.get("tool_call_id", ""),
            )
        )
    return out
