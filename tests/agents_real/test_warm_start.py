"""Real agents with warm starts: a Python agent that is forked from a fork server, and a Node agent with a code cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.agents_real.kit import Check, agent, findings
from tests.speed import scaled
from turngate.rollout.agent_check import CheckOptions, prepare_check
from turngate.sandboxes import warm_start
from turngate.sandboxes.base import Backend

SANDBOXES = [
    pytest.param("local", marks=pytest.mark.real),
    pytest.param("bubblewrap", marks=[pytest.mark.needs("bubblewrap"), pytest.mark.repeat]),
]


@pytest.mark.needs("agent:mini-swe-agent")
@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_warm_agent_is_fully_captured(run: Check, sandbox: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its imports pass all checks of the fork server, and its own transcript equals the trace."""
    monkeypatch.setattr(warm_start, "PLAIN_STARTS", 0)
    monkeypatch.setattr(warm_start, "IMPORT_S", scaled(warm_start.IMPORT_S))
    monkeypatch.setattr(warm_start, "ANSWER_S", scaled(warm_start.ANSWER_S))
    warm_start.counts.clear()
    report = await run("mini-swe-agent", sandbox)
    assert report.passed, findings(report)
    assert report.outcome.roles == {"main": 5}
    assert warm_start.counts == {"warm": 1}


@pytest.mark.parametrize(
    ("name", "sandbox"),
    [
        pytest.param("continue", "local", marks=[pytest.mark.needs("agent:continue"), pytest.mark.full]),
        pytest.param(
            "gemini-cli", "bubblewrap", marks=[pytest.mark.needs("agent:gemini-cli", "bubblewrap"), pytest.mark.real]
        ),
        pytest.param("continue", "docker", marks=[pytest.mark.needs("agent:continue", "docker"), pytest.mark.full]),
    ],
)
async def test_node_agent_runs_cached_code(
    backend: Callable[[str], Backend], name: str, sandbox: str, tmp_path: Path
) -> None:
    """Each sandbox uses the cache that was built on this machine, although paths, user and Node differ in some of them."""
    spec, installed = agent(name)
    stored = [file.stat().st_size for file in Path(installed.code_cache).parent.glob("modules/*/*")]
    assert max(stored) > 5_000_000  # the executed functions are included; without them, Continue's would have 1.4 MB
    loud = msgspec.structs.replace(spec, env={**spec.env, "NODE_DEBUG_NATIVE": "COMPILE_CACHE"})
    options = CheckOptions(timeout_s=scaled(CheckOptions().timeout_s))
    async with prepare_check(loud, installed, backend(sandbox), tmp_path, options) as ready:
        report = await ready.run()
    assert report.passed, findings(report)
    output = report.outcome.collected.stderr
    assert "because cache was the same" in output  # Node found the code of a module in the cache
    assert "rejected" not in output
    assert "writing cache" not in output  # for a module that was not in the cache
    if name == "continue":  # Gemini CLI prints more than the check keeps
        assert output.count("dist/index.js was accepted") == 1  # the program itself, in one file
        assert "of file:///" not in output
