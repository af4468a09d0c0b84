"""Write thinking and tool calls as text, as the mock model samples them, and parse that text as an inference server does.

The format is Qwen3's. The parser behaves like vLLM with `--reasoning-parser qwen3 --tool-call-parser hermes`, for gateways that leave
parsing to the engine.
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
class ParsedReply:
    """Parsed text of a reply."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = field(default=())  # names and arguments as JSON


def format_reply(think: str, text: str, calls: tuple[ToolCall, ...]) -> str:
    """Return the text that the model samples, without the end-of-turn token."""
    out = f"<think>\n{think}\n</think>\n\n" if think else ""
    out += text
    for n, call in enumerate(calls):
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        out += "\n" if text or n else ""
        out += f'<tool_call>\n{{"name": "{call.name}", "arguments": {arguments}}}\n</tool_call>'
    return out


def parse_reply(sampled: str, *, tools: bool, complete: bool = True) -> ParsedReply:
    """Parse sampled text as an inference server does. If it is not `complete`, return only what can no longer change."""
    reasoning, body = "", sampled
    if sampled.startswith("<think>"):
        reasoning, closed, body = sampled.removeprefix("<think>").partition("</think>")
        if not closed:
            return ParsedReply(reasoning=_stable_prefix(reasoning, complete).removeprefix("\n"))
        reasoning, body = reasoning.strip("\n"), body.lstrip("\n")
    elif not complete and "<think>".startswith(sampled):
        return ParsedReply()
    if not tools:
        return ParsedReply(reasoning, _stable_prefix(body, complete))
    head, found, _ = body.partition("<tool_call>")
    if not found:
        return ParsedReply(reasoning, _stable_prefix(body, complete))
    calls = _parse_calls(body)
    if calls is None:  # if a call is malformed, everything is text
        return ParsedReply(reasoning, body if complete else head)
    return ParsedReply(reasoning, head if not calls and complete else head.rstrip("\n"), calls)


def _parse_calls(body: str) -> tuple[tuple[str, str], ...] | None:
    calls = []
    for text in _CALL.findall(body):
        try:
            call = json.loads(text)
            calls.append((str(call["name"]), json.dumps(call["arguments"], ensure_ascii=False)))
        except (ValueError, KeyError, TypeError):
            return None
    return tuple(calls)


def _stable_prefix(text: str, complete: bool) -> str:
    """Return the text without an end that may still become a tag, a stripped newline, or part of a character."""
    if complete:
        return text
    text = text.rstrip("\n\ufffd")
    for tag in _TAGS:
        for size in range(len(tag) - 1, 0, -1):
            if text.endswith(tag[:size]):
                return text[:-size].rstrip("\n")
    return text
