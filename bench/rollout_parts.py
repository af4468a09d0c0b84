"""Measure the CPU time of a rollout's processes, by part. Used by `rollouts.py --parts`.

A thread inspects the descendants of this process every 20 ms. The long-lived ones, the agent and the relay, are measured by their clocks.
The total of all ended processes is known exactly, so the rest belongs to the sandbox: supervisors, shells, bwrap. The CPU time of an
agent up to its first model call is its start-up.
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
from processes import cpu_s

from turngate.agents.installation import Installation
from turngate.agents.launch import plan_launch
from turngate.agents.spec import AgentSpec
from turngate.client.gateway import GatewayClient
from turngate.sandboxes import supervisor, warm_start
from turngate.views.trace import parse_trace

PERIOD_S = 0.02
CORE_HOUR_MS = 3_600_000


class Parts(msgspec.Struct):
    """CPU ms per rollout, without the fork server's imports, which happen once per runner."""

    agent: str
    sandbox: str
    starts: str  # "plain", "code cache", or how many rollouts were forked from a fork server
    startup_ms: float
    agent_ms: float  # after its first call
    sandbox_ms: float
    relay_ms: float
    grading_ms: float
    runner_ms: float
    gateway_ms: float
    alone_ms: float  # the agent without Turngate

    @property
    def total_ms(self) -> float:
        ours = self.sandbox_ms + self.relay_ms + self.grading_ms + self.runner_ms + self.gateway_ms
        return self.startup_ms + self.agent_ms + ours

    @property
    def per_core_hour(self) -> float:
        return CORE_HOUR_MS / self.total_ms


class ProcessWatch(threading.Thread):
    """Records the CPU time of the agents and relays that this process has started."""

    def __init__(self, agent: Sequence[str], ignored: int) -> None:
        super().__init__(daemon=True)
        self.agent = [word.encode() for word in agent]  # in the command line of an agent's process
        self.ignored = ignored
        self.points: dict[tuple[str, int], list[tuple[float, float]]] = {}  # by part and process: time and CPU seconds
        self.own_s = 0.0  # CPU seconds of this thread
        self._parts: dict[int, str] = {}  # known ones: a program may change its command line later
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(PERIOD_S):
            now = time.time()
            for pid in supervisor.descendants(os.getpid()):
                part = self._parts.get(pid) or (self._find_part(pid) if pid != self.ignored else "")
                if part:
                    self._parts[pid] = part
                    try:
                        self.points.setdefault((part, pid), []).append((now, cpu_s(pid)))
                    except OSError:  # it has ended
                        continue
            self.own_s = time.thread_time()

    def _find_part(self, pid: int) -> str:
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return ""
        words = line.split(b"\0")
        if any(b"relay" in word and b"/" in word for word in words[:6]):
            return "relay"
        is_shell = words[0].endswith(b"/sh")
        return (
            "agent" if not is_shell and any(word in line for word in self.agent) and b"fork_server" not in line else ""
        )

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def sum_cpu(self, part: str, until: float | None = None) -> float:
        """Return the CPU seconds of a part, in total or up to the time `until`."""
        total = 0.0
        for (found, _), points in self.points.items():
            is_alive = until is None or points[0][0] <= until <= points[-1][0] + PERIOD_S
            if found == part and is_alive:
                total += max(cpu for at, cpu in points if until is None or at <= until)
        return total


async def measure_parts(
    client: GatewayClient,
    installed: Installation,
    run: Callable[[str, bool], Awaitable[Sequence[str]]],
    gateway: Callable[[], float],
    ignored: int,
) -> dict[str, float]:
    """Run batches without and with a grader. `run` returns the sessions of a batch, and `gateway` its CPU seconds."""
    await run("first", False)  # one-time setup
    warm_start.close_servers()
    warm_start.PLAIN_STARTS = 0
    watch = ProcessWatch([mark for mark in (installed.folder, "/opt/turngate/agent") if mark], ignored)
    watch.start()
    warm_start.counts.clear()
    before, own, serving = _children_s(), time.process_time(), gateway()
    sessions = await run("plain", False)
    own_s, serving_s = time.process_time() - own - watch.own_s, gateway() - serving
    watch.stop()
    startup = 0.0
    for session in sessions:
        calls = [turn.started for turn in parse_trace(await client.trace(session)).turns]
        startup += watch.sum_cpu("agent", min(calls))
    total = _end_servers(before)
    before = _children_s()
    await run("graded", True)
    graded = _end_servers(before)
    agent, relay, per = watch.sum_cpu("agent"), watch.sum_cpu("relay"), 1000 / len(sessions)
    return {
        "startup_ms": startup * per,
        "agent_ms": (agent - startup) * per,
        "relay_ms": relay * per,
        "sandbox_ms": (total - agent - relay) * per,
        "grading_ms": (graded - total) * per,
        "runner_ms": own_s * per,
        "gateway_ms": serving_s * per,
    }


def _end_servers(before: float) -> float:
    """End the fork servers. Return the CPU seconds of ended processes minus `before`, without those of the servers."""
    servers = sum(cpu_s(server.pid) for server in warm_start._servers.values() if server.is_ready)
    warm_start.close_servers()
    return _children_s() - before - servers


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def measure_alone(
    client: GatewayClient, root: str, spec: AgentSpec, installed: Installation, count: int
) -> float:
    """Return the CPU ms of the agent's own command, run in a plain folder against the gateway, without a code cache."""
    installed = msgspec.structs.replace(installed, code_cache="")
    before = _children_s()
    for _ in range(count):
        opened = await client.open({"model": "bench"})
        with tempfile.TemporaryDirectory(prefix="turngate-bench-") as folder:
            work = Path(folder, "work")
            work.mkdir()
            launch = plan_launch(
                spec,
                installed,
                base_url=root,
                api_key=opened.key,
                model="bench",
                prompt="Do nothing.",
                home=folder,
                workdir=str(work),
            )
            for file in launch.files:
                target = Path(file.path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.data)
            env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": folder, **launch.env}
            await asyncio.to_thread(
                subprocess.run,
                launch.command,
                env=env,
                cwd=work,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
            )
        await client.seal(opened.id)
    return (_children_s() - before) * 1000 / count


def show_parts(results: Sequence[Parts]) -> None:
    names = (
        "agent",
        "sandbox",
        "starts",
        "start-up",
        "agent",
        "sandbox",
        "relay",
        "grading",
        "runner",
        "gateway",
        "all",
    )
    names += ("rollouts per core-hour", "agent alone", "at most")
    print("CPU ms per rollout, one at a time\n\n| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for r in results:
        numbers = (
            r.startup_ms,
            r.agent_ms,
            r.sandbox_ms,
            r.relay_ms,
            r.grading_ms,
            r.runner_ms,
            r.gateway_ms,
            r.total_ms,
        )
        cells = [r.agent, r.sandbox, r.starts, *(f"{number:.0f}" for number in numbers), f"{r.per_core_hour:.0f}"]
        cells += [f"{r.alone_ms:.0f}", f"{CORE_HOUR_MS / r.alone_ms:.0f}"]
        print("| " + " | ".join(cells) + " |")
