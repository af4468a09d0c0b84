"""Signals in the headers and bodies of real agents' requests."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from turngate.agents import spec
from turngate.agents.launch import resolve_signals
from turngate.dialects.chat import ChatHistory
from turngate.dialects.chat_tools import ChatTools
from turngate.trace.signals import read_signals
from turngate.types import Call, CallSignals


class Request(NamedTuple):
    """The parts of a request that signals are read from."""

    headers: dict[str, str]
    body: Any = {}
    model: str = "m"
    tools: tuple[str, ...] = ()
    last: str = ""
    system: str = ""

    def call(self) -> Call:
        tools = json.dumps([{"type": "function", "function": {"name": name}} for name in self.tools]).encode()
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": self.last})
        return Call(
            model=self.model,
            history=ChatHistory([json.dumps(message).encode() for message in messages]),
            tools=ChatTools(tools) if self.tools else None,
            body=json.dumps(self.body).encode(),
        )


GEMINI_SUMMARY = "You are a specialized system component responsible for distilling chat history"
COMPACTION = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\n- Do NOT use Read"


def codex(kind: str, **headers: str) -> Request:
    metadata = json.dumps({"thread_id": "t1", "request_kind": kind})
    return Request(headers={"thread-id": "t1", "x-codex-turn-metadata": metadata, **headers}, model="m")


@pytest.mark.parametrize(
    ("agent", "request_", "expected"),
    [
        ("claude-code", Request(headers={"x-claude-code-session-id": "s"}, model="m"), CallSignals("s")),
        (
            "claude-code",
            Request(headers={"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}, model="m"),
            CallSignals("a", "", "subagent", "Agent tool", "header:x-claude-code-agent-id"),
        ),
        ("claude-code", Request(headers={}, body={"metadata": {"user_id": '{"session_id": "s"}'}}), CallSignals("s")),
        (
            "claude-code",
            Request(headers={}, last=COMPACTION, model="m"),
            CallSignals("", "", "summary", "compaction", "last"),
        ),
        ("claude-code", Request(headers={}, model="m-small"), CallSignals("", "", "side", "model m-small", "model")),
        ("codex", codex("turn"), CallSignals("t1")),
        (
            "codex",
            codex("compaction"),
            CallSignals("t1", "", "summary", "compaction", "header:x-codex-turn-metadata.request_kind"),
        ),
        (
            "codex",
            codex("turn", **{"x-openai-subagent": "collab_spawn", "x-codex-parent-thread-id": "t0"}),
            CallSignals("t1", "t0", "subagent", "spawn_agent", "header:x-openai-subagent"),
        ),
        ("opencode", Request(headers={"x-session-id": "s"}, model="m"), CallSignals("s")),
        (
            "opencode",
            Request(headers={"x-session-id": "s2", "x-parent-session-id": "s"}, model="m"),
            CallSignals("s2", "s", "subagent", "task tool", "header:x-parent-session-id"),
        ),
        (
            "opencode",
            Request(headers={"x-session-id": "s"}, model="m-small"),
            CallSignals("s", "", "side", "model m-small", "model"),
        ),
        ("gemini-cli", Request(headers={}, model="m", tools=("read_file",)), CallSignals()),
        (
            "gemini-cli",
            Request(headers={}, model="m", tools=("complete_task",)),
            CallSignals("", "", "subagent", "invoke_agent", "tool:complete_task"),
        ),
        (
            "gemini-cli",
            Request(headers={}, model="m-small", system=f"{GEMINI_SUMMARY} into a structured XML <state_snapshot>."),
            CallSignals("", "", "summary", "compaction", "system"),
        ),
        (
            "opencode",
            Request(headers={"x-session-id": "s"}, system="You are a context summarization agent. …"),
            CallSignals("s", "", "summary", "compaction", "system"),
        ),
        (
            "pi",
            Request(headers={}, system="You are a context summarization assistant. …"),
            CallSignals("", "", "summary", "compaction", "system"),
        ),
        (
            "qwen-code",
            Request(headers={}, system="You code.", last="You are the component that summarizes a conversation …"),
            CallSignals("", "", "summary", "compaction", "last"),
        ),
        ("shell", Request(headers={}, body="not an object", model="m"), CallSignals()),
    ],
)
def test_signals_of_requests(agent: str, request_: Request, expected: CallSignals) -> None:
    assert (
        read_signals(resolve_signals(spec.find_agent(agent).spec.signals, "m"), request_.headers, request_.call())
        == expected
    )


def test_invalid_json_has_no_signals() -> None:
    signals = spec.find_agent("codex").spec.signals
    request = Request(headers={"x-codex-turn-metadata": "{"}, body={"client_metadata": [1]})
    assert read_signals(signals, request.headers, request.call()) == CallSignals()
