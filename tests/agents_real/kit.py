"""What the tests with real agents are written with: the agents of this machine, and what of them is alive."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path

import pytest

from turngate.agents.install import Installed, ensure, missing
from turngate.agents.spec import AgentSpec, find
from turngate.rollout.check import Report

Check = Callable[..., Awaitable[Report]]
AGENTS = ("pi", "opencode", "codex", "claude-code", "gemini-cli", "qwen-code", "mini-swe-agent")


@cache
def agent(name: str) -> tuple[AgentSpec, Installed]:
    """An agent of the catalogue and its installation. Skips the test where it was not installed; in CI it is then."""
    spec = find(name).spec
    if os.environ.get("CI") != "true" and (reason := missing(spec)):
        pytest.skip(f"{reason}; install it with: turngate agents install {name}")
    return spec, ensure(spec, lambda line: None)


def findings(report: Report) -> str:
    """What was found, for a test that fails."""
    lines = [f"{'yes' if f.ok else 'NO '} {f.what}: {f.detail}" for f in report.findings]
    return "\n".join(["", *lines, *(f"note: {note}" for note in report.outcome.notes)])


# ---- what is alive ----


def children() -> dict[int, str]:
    """The processes that this one has started, with their command lines."""
    pids = [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    return {pid: _command(pid) for pid in pids}


def processes_of(folder: Path) -> list[str]:
    """The live processes of this machine that have the folder in their command line or environment."""
    mark = os.fsencode(folder)
    found = []
    for place in Path("/proc").iterdir():
        if not place.name.isdigit() or int(place.name) == os.getpid():
            continue
        try:
            if mark in (place / "cmdline").read_bytes() or mark in (place / "environ").read_bytes():
                found.append(_command(int(place.name)))
        except OSError:
            pass
    return found


def _command(pid: int) -> str:
    try:
        return f"{pid}: " + Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return f"{pid}: gone"
