"""Helpers for the batch tests: a small agent, tasks that succeed or fail in a known way, and a runner process to kill.

    python -m tests.batch.kit URL OUT ROOT SCALE      runs `storm(…)` against a gateway; its key comes from TURNGATE_ADMIN_KEY

The agent calls the model once and writes a guess, which is right half the time. A task's name decides what happens to its rollouts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.speed import scaled
from turngate.agents.installation import Installation
from turngate.agents.spec import find_agent
from turngate.client.gateway import GatewayClient
from turngate.client.keys import ADMIN_KEY
from turngate.errors import SandboxError
from turngate.rollout.batch import BatchResult, run_batch
from turngate.rollout.concurrency import Bounds
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.plan import BatchPlan
from turngate.rollout.progress import BatchProgress
from turngate.rollout.spec import EndPolicy
from turngate.sandboxes import folders
from turngate.sandboxes.base import SandboxSpec
from turngate.sandboxes.local import LocalBackend
from turngate.sandboxes.supervised_sandbox import SupervisedSandbox
from turngate.tasks.task import Script, Task

# Uses a bare socket: importing an HTTP client would take three times as long as everything else.
AGENT = """
import json, os, socket, sys, time
text = sys.stdin.read()
body = json.dumps({"model": os.environ["TURNGATE_MODEL"], "messages": [{"role": "user", "content": text}]})
host, _, port = os.environ["TURNGATE_BASE_URL"].rpartition("/")[2].partition(":")
with socket.create_connection((host, int(port))) as line:
    head = ["POST /v1/chat/completions HTTP/1.1", "host: x", "connection: close", "content-type: application/json"]
    head += [f"authorization: Bearer {os.environ['TURNGATE_API_KEY']}", f"content-length: {len(body)}", "", body]
    line.sendall("\\r\\n".join(head).encode())
    reply = b"".join(iter(lambda: line.recv(65536), b""))
if b" 200 " not in reply.partition(b"\\r\\n")[0]:
    sys.exit(1)
if "hang" in text:
    time.sleep(10**6)
open("guess", "w").write("right" if os.urandom(1)[0] % 2 else "wrong")
"""
DECIDE = 'read -r guess < guess; [ "$guess" = right ]; echo $((1 - $?)) > "$TURNGATE_LOGS/verifier/reward.txt"'
CRASH = "kill -9 $$"

# The class that the rollouts of a task end in, by the first word of the task's name.
ENDS = {
    "well": "graded",
    "sandbox": "infrastructure fault",  # no sandbox can be created
    "engine": "infrastructure fault",  # the engine drops the connection
    "hang": "agent failed",  # the agent times out, which the policy excludes
    "grader": "invalid task",  # the grader always crashes
    "setup": "invalid task",
}


def task(name: str) -> Task:
    kind = name.partition("-")[0]
    return Task(
        id=name,
        instruction=f"Guess. This is {name}.",
        setup="exit 3" if kind == "setup" else "",
        timeout_s=scaled(0.75 if kind == "hang" else 120.0),
        grader=Script(command=("sh", "-c", CRASH if kind == "grader" else DECIDE)),
    )


class FlakyBackend(LocalBackend):
    """Local sandboxes that fail to start: always for `sandbox` tasks, and every `every`-th time for others."""

    def __init__(self, root: Path, every: int = 0) -> None:
        super().__init__(root)
        self._every = every
        self._count = 0

    async def create(self, spec: SandboxSpec) -> SupervisedSandbox:
        self._count += 1
        if spec.labels["task"].startswith("sandbox") or (self._every and self._count % self._every == 0):
            raise SandboxError("no sandbox today")
        return await super().create(spec)


def plan(folder: Path, root: Path, names: Sequence[str], **fields: Any) -> BatchPlan:
    defaults = {
        "tasks": tuple(map(task, names)),
        "agent": find_agent("shell").spec,
        "installed": Installation(),
        "backend": FlakyBackend(root),
        "model": "m",
        "folder": folder,
        "n": 4,
        "options": {"command": f"exec {sys.executable} -I -S {root / 'agent.py'}"},
        "policy": EndPolicy(timed_out="exclude"),
        "bounds": Bounds(running=8),
        "back_off_s": 0.2,
        "min_free_bytes": 4_000_000,
        **fields,
    }
    root.mkdir(mode=0o700, exist_ok=True)
    (root / "agent.py").write_text(AGENT)
    return BatchPlan(**defaults)


FAULTS = {"sandbox": 3, "engine": 3, "hang": 3, "grader": 2, "setup": 2}  # tasks of each kind in a storm at full size


def storm_tasks(scale: float) -> list[str]:
    """Return the names of the tasks: 125 at full size, at least one of each fault."""
    well = [f"well-{n}" for n in range(round(112 * scale))]
    faults = [f"{kind}-{n}" for kind, count in FAULTS.items() for n in range(max(1, round(count * scale)))]
    half = len(well) // 2
    return [*well[:half], *faults[::2], *well[half:], *faults[1::2]]


def rollouts_of_task(scale: float) -> int:
    return 4 if scale == 1.0 else 2


def running_at_once(scale: float) -> int:
    return max(8, round(64 * scale))


def storm(folder: Path, root: Path, scale: float) -> BatchPlan:
    """Plan a batch in which at least one task in ten has a fault and every fiftieth sandbox fails to start."""
    return plan(
        folder,
        root,
        storm_tasks(scale),
        n=rollouts_of_task(scale),
        backend=FlakyBackend(root, every=50),
        bounds=Bounds(running=running_at_once(scale), starting=8, grading=8),
        seed=7,
        min_free_bytes=8_000_000,
    )


async def run_plan(url: str, planned: BatchPlan) -> int:
    """Run a batch. Print the number of finished rollouts as it grows, then the reason if the batch stopped early."""
    printed = 0

    def watch(tally: BatchProgress) -> None:
        nonlocal printed
        if tally.done > printed:
            printed = tally.done
            print(printed, flush=True)

    async with GatewayClient(url, os.environ[ADMIN_KEY]) as client, GatewayConnector(url) as connector:
        result: BatchResult = await run_batch(planned, client, connector, watch)
    print(result.stopped, file=sys.stderr)
    return 0 if result.complete else 3


def sandbox_processes(root: Path) -> dict[int, str]:
    """Return the processes of all sandboxes below a folder, with their command lines."""
    found = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                environment = (process / "environ").read_bytes()
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if (
                f"{folders.SANDBOX_ENV}=".encode() in environment
                and str(root) in environment.decode("latin-1") + command
            ):
                found[int(process.name)] = command
    return found


def main(url: str, out: str, root: str, scale: str) -> int:
    """Run a storm."""
    logging.basicConfig(level=logging.WARNING)
    tempfile.tempdir = root
    return asyncio.run(run_plan(url, storm(Path(out), Path(root), float(scale))))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
