"""Tests that every turn of each real agent is captured, in a task with at least four tool calls."""

from __future__ import annotations

from typing import Any

import pytest

from tests.agents_real.kit import Check, findings
from tools.agent_names import AGENTS, MORE_AGENTS
from turngate.client.protocol import TraceContext
from turngate.rollout.agent_check import CheckOptions

ISOLATED = ("pi", "opencode", "codex", "claude-code", "mini-swe-agent")  # also run in sandboxes without a network
# `make test-real` runs each agent once and uses every sandbox.
REAL = {
    ("pi", "bubblewrap"),
    ("opencode", "docker"),
    ("codex", "bubblewrap"),
    ("claude-code", "docker"),
    ("gemini-cli", "local"),
    ("qwen-code", "local"),
    ("mini-swe-agent", "docker"),
}
LIGHT = ("mini-swe-agent", "local")  # in `make test`
SIDE_CALLS = {"opencode": 1}  # to write a title
TURNS = {"aider": 1}  # its reply contains all edits


def agents_in_sandboxes() -> list[Any]:
    """Return every agent in every sandbox that it supports, with the marks of both. `make test` runs one of them.

    `make test-all` runs each agent in one sandbox, and `make soak` runs the others.
    """
    pairs = [(agent, "local") for agent in (*AGENTS, *MORE_AGENTS)]
    pairs += [(agent, sandbox) for sandbox in ("bubblewrap", "docker") for agent in ISOLATED]
    found = []
    for agent, sandbox in pairs:
        marks = [pytest.mark.needs(f"agent:{agent}", *([] if sandbox == "local" else [sandbox]))]
        if (agent, sandbox) in REAL:
            marks += [pytest.mark.real, pytest.mark.promise(4)]
        elif agent in MORE_AGENTS:
            marks.append(pytest.mark.full)
        elif (agent, sandbox) != LIGHT:
            marks.append(pytest.mark.repeat)
        found.append(pytest.param(agent, sandbox, marks=marks, id=f"{agent}-{sandbox}"))
    return found


@pytest.mark.parametrize(("agent", "sandbox"), agents_in_sandboxes())
async def test_real_agent_is_fully_captured(run: Check, agent: str, sandbox: str) -> None:
    report = await run(agent, sandbox)
    assert report.passed, findings(report)
    sides = SIDE_CALLS.get(agent, 0)
    assert report.outcome.roles == {"main": TURNS.get(agent, 5), **({"side": sides} if sides else {})}
    assert not report.outcome.notes


@pytest.mark.repeat
@pytest.mark.needs("agent:copilot-cli")
@pytest.mark.parametrize(
    ("dialect", "settings"),
    [("responses", {"wire": "responses"}), ("messages", {"provider": "anthropic", "path": "/"})],
    ids=["responses", "messages"],
)
async def test_copilot_is_captured_in_other_dialects(run: Check, dialect: str, settings: dict[str, str]) -> None:
    report = await run("copilot-cli", options=CheckOptions(options=settings))
    assert report.passed, findings(report)
    assert report.trace is not None
    assert {node.dialect for node in report.trace.nodes if isinstance(node, TraceContext)} == {dialect}
    assert report.outcome.roles == {"main": 5}
