"""Each real agent does a task of four tool calls and more through the gateway, and is captured whole."""

from __future__ import annotations

import pytest

from tests.agents_real.kit import AGENTS, Check, findings

pytestmark = pytest.mark.real
WALLED = ("pi", "opencode", "codex", "claude-code", "mini-swe-agent")  # also run where there is no network at all
RUNS = [(agent, "local") for agent in AGENTS]
RUNS += [(agent, sandbox) for sandbox in ("bubblewrap", "docker") for agent in WALLED]
SIDE_CALLS = {"opencode": 1}  # a title


@pytest.mark.parametrize(("agent", "sandbox"), RUNS, ids=[f"{agent}-{sandbox}" for agent, sandbox in RUNS])
async def test_a_real_agent_is_captured_whole(run: Check, agent: str, sandbox: str) -> None:
    report = await run(agent, sandbox)
    assert report.whole, findings(report)
    sides = SIDE_CALLS.get(agent, 0)
    assert report.outcome.roles == {"main": 5, **({"side": sides} if sides else {})}
    assert not report.outcome.notes
