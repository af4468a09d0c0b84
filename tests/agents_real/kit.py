"""Shared helpers for tests with real agents: installed agents, scripted model steps, recorded traces and live processes."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Container
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.needs import require
from tests.speed import scaled
from turngate.agents.install import ensure_installed
from turngate.agents.installation import Installation
from turngate.agents.spec import AgentSpec, CheckCall, CheckStep, find_agent
from turngate.client.protocol import TraceTurn
from turngate.rollout.agent_check import AgentCheck, CheckReport

Check = Callable[..., Awaitable[CheckReport]]
Prepare = Callable[..., AbstractAsyncContextManager[AgentCheck]]


def agent(name: str) -> tuple[AgentSpec, Installation]:
    """Return an agent of the catalogue and its installation."""
    require(f"agent:{name}")
    spec = find_agent(name).spec
    return spec, ensure_installed(spec, lambda line: None)


def agents(*names: str, only: Container[str] = ()) -> list[Any]:
    """Return agent names for `parametrize`, each with the mark for its part. With `only`, the other agents run in `make soak` only."""
    found = []
    for name in names:
        marks = [pytest.mark.needs(f"agent:{name}"), *([pytest.mark.repeat] if only and name not in only else [])]
        found.append(pytest.param(name, marks=marks))
    return found


# ---- scripted model steps ----


def model_step(text: str, *calls: CheckCall, think: str = "") -> CheckStep:
    return CheckStep(say=text, think=think, calls=calls)


def call(tool: str, **arguments: Any) -> CheckCall:
    return CheckCall(tool=tool, arguments=arguments)


def shell(name: str, command: str) -> CheckCall:
    """Make a call of the agent's own shell tool."""
    match name:
        case "codex":
            return call("exec_command", cmd=command)
        case "claude-code":
            return call("Bash", command=command, description="Run it")
        case "kimi-code" | "continue":
            return call("Bash", command=command)
        case "gemini-cli":
            return call("run_shell_command", command=command, description="Run it")
        case "qwen-code":
            return call("run_shell_command", command=command, description="Run it", is_background=False)
        case "opencode" | "copilot-cli":
            return call("bash", command=command, description="Run it")
        case _:
            return call("bash", command=command)


# ---- recorded traces ----


class Branch(NamedTuple):
    """A branch of the conversation: why it was started, and the roles of its turns."""

    cause: str | None
    roles: tuple[str, ...]


def branches(report: CheckReport) -> list[Branch]:
    """Split the trace at its forks, in order."""
    assert report.trace is not None
    nodes = {node.id: node for node in report.trace.nodes}
    found: dict[int, Branch] = {}
    for node in report.trace.nodes:
        if isinstance(node, TraceTurn):
            first = nodes[node.parent]
            while first.cause is None and first.parent is not None:
                first = nodes[nodes[first.parent].parent]  # type: ignore[index]  # the parent of a context is a turn
            before = found.get(first.id, Branch(first.cause, ()))
            found[first.id] = Branch(before.cause, (*before.roles, node.role))
    return [found[key] for key in sorted(found)]


def turns(report: CheckReport, role: str) -> list[TraceTurn]:
    assert report.trace is not None
    return [node for node in report.trace.nodes if isinstance(node, TraceTurn) and node.role == role]


def rows(report: CheckReport, role: str) -> int:
    """Count the rows that train turns of a role."""
    return sum(any(span.role == role and span.trained for span in row.spans) for row in report.samples)


def trained_once(report: CheckReport) -> bool:
    """Whether each turn of the agent and its sub-agents is trained in exactly one row, and nothing else is."""
    counted = Counter(span.node for row in report.samples for span in row.spans if span.trained)
    return counted == Counter(node.id for role in ("main", "subagent") for node in turns(report, role))


def findings(report: CheckReport) -> str:
    """Format the report for a failure message."""
    outcome = report.outcome
    lines = [f"{'yes' if f.ok else 'NO '} {f.name}: {f.detail}" for f in report.results]
    lines += [f"branch {branch}" for branch in branches(report)]
    lines += [f"note: {note}" for note in outcome.notes]
    lines += [f"output: {(outcome.collected.stderr or outcome.collected.stdout)[-500:]}"]
    return "\n".join(["", f"{outcome.status}, exit code {outcome.exit_code}", *lines])


# ---- processes ----


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    limit = scaled(within_s)
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not hold within {limit:.0f} s"
        await asyncio.sleep(0.05)


def children() -> dict[int, str]:
    """Child processes of this one, with their command lines."""
    pids: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            pids += map(int, (task / "children").read_text().split())
    return {pid: _read(pid, "cmdline") for pid in pids}


def processes_of(folder: Path) -> dict[int, str]:
    """Live processes with the folder in their command line or environment, with their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            command, env = _read(int(entry.name), "cmdline"), _read(int(entry.name), "environ")
            if str(folder) in command or str(folder) in env:
                found[int(entry.name)] = command
    return found


def _read(pid: int, name: str) -> str:
    try:
        return Path("/proc", str(pid), name).read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
