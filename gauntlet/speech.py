"""How the mock model spells thinking and tool calls, and how an inference server reads them back.

The spelling is Qwen3's; the reading is what vLLM does with `--reasoning-parser qwen3 --tool-call-parser hermes`, for gateways that
leave reading to the engine.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_TAGS = ("<think>", "</think>", "<tool_call>")


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Heard:
    """Sampled text, taken apart."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = field(default=())  # names and arguments as JSON


def spell(think: str, text: str, calls: tuple[ToolCall, ...]) -> str:
    """The text that the model samples, but for the token that ends it."""
    out = f"<think>\n{think}\n</think>\n\n" if think else ""
    out += text
    for n, call in enumerate(calls):
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        out += "\n" if text or n else ""
        out += f'<tool_call>\n{{"name": "{call.name}", "arguments": {arguments}}}\n</tool_call>'
    return out


def hear(sampled: str, *, tools: bool, over: bool = True) -> Heard:
    """What an inference server makes of it. Before it is `over`, only what can no longer change is told."""
    reasoning, body = "", sampled
    if sampled.startswith("<think>"):
        reasoning, closed, body = sampled.removeprefix("<think>").partition("</think>")
        if not closed:
            return Heard(reasoning=_settled(reasoning, over).removeprefix("\n"))
        reasoning, body = reasoning.strip("\n"), body.lstrip("\n")
    elif not over and "<think>".startswith(sampled):
        return Heard()
    if not tools:
        return Heard(reasoning, _settled(body, over))
    head, found, _ = body.partition("<tool_call>")
    if not found:
        return Heard(reasoning, _settled(body, over))
    calls = _calls(body)
    if calls is None:  # one that cannot be read makes all of it text
        return Heard(reasoning, body if over else head)
    return Heard(reasoning, head if not calls and over else head.rstrip("\n"), calls)


def _calls(body: str) -> tuple[tuple[str, str], ...] | None:
    calls = []
    for spelled in _CALL.findall(body):
        try:
            call = json.loads(spelled)
            calls.append((str(call["name"]), json.dumps(call["arguments"], ensure_ascii=False)))
        except (ValueError, KeyError, TypeError):
            return None
    return tuple(calls)


def _settled(text: str, over: bool) -> str:
    """Without an end that may still become a tag, a stripped newline, or the rest of a character."""
    if over:
        return text
    text = text.rstrip("\n\ufffd")
    for tag in _TAGS:
        for size in range(len(tag) - 1, 0, -1):
            if text.endswith(tag[:size]):
                return text[:-size].rstrip("\n")
    return text
