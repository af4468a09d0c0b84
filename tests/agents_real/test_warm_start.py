"""A real Python agent that is forked from a fork server behaves like one that was started."""

from __future__ import annotations

import pytest

from tests.agents_real.kit import Check, findings
from turngate.sandboxes import warm_start

SANDBOXES = [
    pytest.param("local", marks=pytest.mark.real),
    pytest.param("bubblewrap", marks=[pytest.mark.needs("bubblewrap"), pytest.mark.repeat]),
]


@pytest.mark.needs("agent:mini-swe-agent")
@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_warm_agent_is_fully_captured(run: Check, sandbox: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its imports pass all checks of the fork server, and its own transcript equals the trace."""
    monkeypatch.setattr(warm_start, "PLAIN_STARTS", 0)
    warm_start.counts.clear()
    report = await run("mini-swe-agent", sandbox)
    assert report.passed, findings(report)
    assert report.outcome.roles == {"main": 5}
    assert warm_start.counts == {"warm": 1}
