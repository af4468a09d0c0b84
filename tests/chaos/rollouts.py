"""Faults of real rollouts on one machine: of the runner, the supervisors of the sandboxes, their relays and agents, and of Docker.

python -m tests.chaos.rollouts URL OUT ROOT TASKS SANDBOX      runs the batch; the gateway's key comes from TURNGATE_ADMIN_KEY
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tests import needs
from tests.batch.kit import plan, run_plan, sandbox_processes, task
from tests.chaos import docker_daemon
from tests.chaos.batch_runs import AGENT, BatchFault, BatchRun, N, run_batch_fault
from tests.chaos.control import detect_batch_plants
from tests.chaos.docker_daemon import DockerDaemon, start_docker
from tests.chaos.engine import MODEL
from tests.chaos.sites import Site, open_single
from tests.chaos.suite import Pace, Row, verify_store
from tests.crash.storm import ADMIN
from tests.speed import SLOWNESS, slowness
from turngate.client.keys import ADMIN_KEY
from turngate.rollout.concurrency import Bounds
from turngate.rollout.plan import BatchPlan
from turngate.sandboxes import supervisor
from turngate.sandboxes.bubblewrap import BubblewrapBackend
from turngate.sandboxes.docker import DockerBackend
from turngate.sandboxes.local import LocalBackend

BACKENDS: dict[str, type[LocalBackend] | type[BubblewrapBackend] | type[DockerBackend]] = {
    "local": LocalBackend,
    "bubblewrap": BubblewrapBackend,
    "docker": DockerBackend,
}
PAUSES_S = {"local": 0.05, "bubblewrap": 0.05, "docker": 0.7}  # of agents, after each answer
TRIES = 3  # an agent gives up a call after this many


def build_plan(out: Path, root: Path, tasks: int, sandbox: str) -> BatchPlan:
    names = [f"well-{n}" for n in range(tasks)]
    files = root / "files"  # an isolated sandbox sees no files of the host, so the agent is one of the task's
    files.mkdir(exist_ok=True)
    shutil.copy(AGENT, files / "agent.py")
    python, agent = (sys.executable, files / "agent.py") if sandbox == "local" else ("python3", Path("agent.py"))
    fields: dict[str, Any] = {"n": N, "bounds": Bounds(running=2), "model": MODEL, "backend": BACKENDS[sandbox](root)}
    fields["options"] = {"command": f"exec {python} -I -S {agent} {PAUSES_S[sandbox]} {TRIES}"}
    if sandbox != "local":
        fields["tasks"] = tuple(msgspec.structs.replace(task(name), files=files) for name in names)
    return plan(out, root, names, **fields)


class SandboxRun(BatchRun):
    """A batch on this machine. With a `daemon`, its agents run in Docker containers."""

    def __init__(self, site: Site, root: Path, tasks: int, sandbox: str, daemon: DockerDaemon | None) -> None:
        super().__init__(site, root, tasks)
        self.sandbox, self.daemon = sandbox, daemon

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.chaos.rollouts", self.site.server.url, str(self.out), str(self.root)]
        env = {**(self.daemon.environment if self.daemon else os.environ), ADMIN_KEY: ADMIN, SLOWNESS: str(slowness())}
        self.launch([*command, str(len(self.names)), self.sandbox], env)

    async def wait_for_start(self) -> None:
        """Wait until a rollout runs in its sandbox. In a container, wait for its agent."""
        program = "agent.py" if self.daemon else ""
        await self.wait_until_running(lambda: self.out.exists() and self._find(program), "a rollout ran")

    def find_logs(self) -> dict[str, Path]:
        return {path.parent.name: path for path in self.out.glob("rollouts/*/stdout")}

    def check_attempts(self, row: Row) -> None:
        """Do nothing: only a shared store has attempts."""

    async def list_leftovers(self) -> list[str]:
        left = [*sandbox_processes(self.root).values()]
        if self.daemon is not None:
            left += await asyncio.to_thread(self.daemon.list_containers)
            left += [str(folder) for folder in self.root.glob("docker-*")]
            left += self.daemon.processes().values()
        return left

    async def signal_in_sandbox(self, program: str, number: int) -> int:
        """Send a signal to a random process of a sandbox whose command line contains a program's name. Return its id."""
        while True:
            await self.wait_until_running(lambda: self._find(program), f"{program} got its signal")
            for pid in self._find(program):
                with suppress(ProcessLookupError):  # it has ended
                    os.kill(pid, number)
                    return pid

    def _find(self, program: str) -> list[int]:
        """Return the processes that run a program, in random order. Those in a namespace descend from a process outside it."""
        outer = self.daemon.processes() if self.daemon else sandbox_processes(self.root)
        found = []
        for pid in {*outer, *supervisor.descendants(*outer)}:
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if any(word.endswith(program.encode()) for word in command[:6]) and b"bwrap" not in command[0]:
                    found.append(pid)
        return self.site.rng.sample(found, len(found))


# ── the runner, the gateway and sandboxes ───────────────────────────────────────────────────────────────────────────


async def _kill_runner(run: SandboxRun, seconds: float) -> None:
    run.process.kill()
    run.process.wait()
    run.start()


async def _pause_process(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        with suppress(ProcessLookupError):  # a sandbox has ended with its rollout
            os.kill(pid, signal.SIGCONT)


async def _pause_runner(run: SandboxRun, seconds: float) -> None:
    await _pause_process(run.process.pid, seconds)


def _kill(program: str) -> Callable[[SandboxRun, float], Awaitable[None]]:
    async def inject(run: SandboxRun, seconds: float) -> None:
        await run.signal_in_sandbox(program, signal.SIGKILL)

    return inject


def _pause(program: str) -> Callable[[SandboxRun, float], Awaitable[None]]:
    async def inject(run: SandboxRun, seconds: float) -> None:
        await _pause_process(await run.signal_in_sandbox(program, signal.SIGSTOP), seconds)

    return inject


async def _restart_gateway(run: SandboxRun, seconds: float) -> None:
    await run.site.restart()


# ── Docker ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _restart_dockerd(number: int) -> Callable[[SandboxRun, float], Awaitable[None]]:
    """End the daemon, and start it again after a while, as systemd would. It ends its containers."""

    async def inject(run: SandboxRun, seconds: float) -> None:
        daemon = _get_daemon(run)
        await asyncio.sleep(run.site.rng.random())
        await asyncio.to_thread(daemon.end_dockerd, number)
        await asyncio.sleep(seconds)
        daemon.start()

    return inject


async def _restart_dockerd_alone(run: SandboxRun, seconds: float) -> None:
    """Kill the daemon while `live-restore` is set, so that its containers keep running."""
    daemon = _get_daemon(run)
    await asyncio.to_thread(daemon.set_live_restore, True)
    run.at_end.push_async_callback(asyncio.to_thread, daemon.set_live_restore, False)
    await _restart_dockerd(signal.SIGKILL)(run, seconds)


async def _pause_dockerd(run: SandboxRun, seconds: float) -> None:
    await asyncio.sleep(run.site.rng.random())
    await _pause_process(_get_daemon(run).pid, seconds)


async def _restart_containerd(run: SandboxRun, seconds: float) -> None:
    daemon = _get_daemon(run)
    await asyncio.sleep(run.site.rng.random())
    await asyncio.to_thread(daemon.kill_containerd)
    await asyncio.sleep(seconds)
    daemon.start()


def _get_daemon(run: SandboxRun) -> DockerDaemon:
    assert run.daemon is not None
    return run.daemon


@dataclass(frozen=True)
class RolloutFault(BatchFault):
    """A fault, and the sandboxes in which the agents of its batch run."""

    sandbox: str = "local"


ROLLOUT_FAULTS: dict[str, RolloutFault] = {
    "batch: kill -9 of the runner": RolloutFault(_kill_runner),
    "batch: SIGSTOP of the runner": RolloutFault(_pause_runner),
    "batch: kill -9 of the gateway": RolloutFault(_restart_gateway, may_fail=True),
    "sandbox: kill -9 of a supervisor": RolloutFault(_kill("supervisor.py"), may_fail=True),
    "sandbox: kill -9 of a relay": RolloutFault(_kill("relay.py"), may_fail=True),
    "sandbox: kill -9 of an agent": RolloutFault(_kill("agent.py"), may_fail=True),
    "sandbox: SIGSTOP of a supervisor": RolloutFault(_pause("supervisor.py")),
    "sandbox: SIGSTOP of a relay": RolloutFault(_pause("relay.py")),
    "sandbox: SIGSTOP of an agent": RolloutFault(_pause("agent.py")),
    "bubblewrap: kill -9 of a supervisor": RolloutFault(_kill("supervisor.py"), may_fail=True, sandbox="bubblewrap"),
    "bubblewrap: kill -9 of a relay": RolloutFault(_kill("relay.py"), may_fail=True, sandbox="bubblewrap"),
    "bubblewrap: kill -9 of an agent": RolloutFault(_kill("agent.py"), may_fail=True, sandbox="bubblewrap"),
    "bubblewrap: SIGSTOP of a supervisor": RolloutFault(_pause("supervisor.py"), sandbox="bubblewrap"),
    "bubblewrap: SIGSTOP of a relay": RolloutFault(_pause("relay.py"), sandbox="bubblewrap"),
    "bubblewrap: SIGSTOP of an agent": RolloutFault(_pause("agent.py"), sandbox="bubblewrap"),
    "docker: kill -9 of a relay": RolloutFault(_kill("relay.py"), may_fail=True, sandbox="docker"),
    "docker: kill -9 of an agent": RolloutFault(_kill("agent.py"), may_fail=True, sandbox="docker"),
    "dockerd: kill -9": RolloutFault(_restart_dockerd(signal.SIGKILL), sandbox="docker"),
    "dockerd: kill -9 while its containers go on": RolloutFault(_restart_dockerd_alone, sandbox="docker"),
    "dockerd: SIGTERM": RolloutFault(_restart_dockerd(signal.SIGTERM), sandbox="docker"),
    "dockerd: SIGSTOP": RolloutFault(_pause_dockerd, sandbox="docker"),
    "dockerd: kill -9 of containerd": RolloutFault(_restart_containerd, sandbox="docker"),
}


def explain_missing(name: str) -> str | None:
    """Return why a fault cannot be injected here, or None if it can."""
    match ROLLOUT_FAULTS[name].sandbox:
        case "local":
            return None
        case "docker":
            return docker_daemon.explain_missing()
        case sandbox:
            return needs.missing(sandbox)


async def run_rollout_faults(
    names: list[str], pace: Pace, seed: int, report: Callable[[Row], None]
) -> tuple[list[Row], dict[str, bool]]:
    """Inject faults, one batch for each. Return the results, and whether damage to the last batch was detected."""
    rng = random.Random(f"{seed} rollouts")
    rows = []
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(open_single(rng))
        daemon: DockerDaemon | None = None
        if any(ROLLOUT_FAULTS[name].sandbox == "docker" for name in names):
            daemon = await asyncio.to_thread(stack.enter_context, start_docker())
        for name in [name for _ in range(pace.rounds) for name in rng.sample(names, len(names))]:
            fault = ROLLOUT_FAULTS[name]
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tg-"))
            run = SandboxRun(
                site, Path(folder), pace.tasks, fault.sandbox, daemon if fault.sandbox == "docker" else None
            )
            rows.append(await run_batch_fault(run, name, fault, pace))
            report(rows[-1])
        rows.append(await verify_store(site))
        report(rows[-1])
        detected = await detect_batch_plants(run)
    return rows, {f"a batch in {run.sandbox} sandboxes: {plant}": found for plant, found in detected.items()}


def main(url: str, out: str, root: str, tasks: str, sandbox: str) -> int:
    logging.basicConfig(level=logging.WARNING)
    tempfile.tempdir = root
    return asyncio.run(run_plan(url, build_plan(Path(out), Path(root), int(tasks), sandbox)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
