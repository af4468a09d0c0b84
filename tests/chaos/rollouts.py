"""Faults of real rollouts: a batch of agents in sandboxes, its runner, the supervisors of the sandboxes and their relays.

python -m tests.chaos.rollouts URL OUT ROOT TASKS SANDBOX      runs the batch; the gateway's key comes from TURNGATE_ADMIN_KEY
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tests import needs
from tests.batch.kit import AGENT, plan, run_plan, sandbox_processes, task
from tests.chaos.engine import MODEL
from tests.chaos.invariants import check_recorded
from tests.chaos.sites import Site, open_single
from tests.chaos.suite import Pace, Row
from tests.crash.storm import ADMIN
from tests.speed import SLOWNESS, scaled, slowness
from turngate.client.keys import ADMIN_KEY
from turngate.rollout.concurrency import Bounds
from turngate.rollout.ledger import LedgerState, read_ledger
from turngate.rollout.plan import BatchPlan
from turngate.sandboxes import supervisor
from turngate.sandboxes.bubblewrap import BubblewrapBackend
from turngate.sandboxes.local import LocalBackend

N = 2  # rollouts of each task
FINISH_S = 60.0


def build_plan(out: Path, root: Path, tasks: int, sandbox: str) -> BatchPlan:
    names = [f"well-{n}" for n in range(tasks)]
    fields: dict[str, Any] = {"n": N, "bounds": Bounds(running=2), "model": MODEL}
    if sandbox == "local":
        return plan(out, root, names, backend=LocalBackend(root), **fields)
    files = root / "files"  # an isolated sandbox sees no files of the host, so the agent is one of the task's
    files.mkdir(exist_ok=True)
    (files / "agent.py").write_text(AGENT)
    fields["tasks"] = tuple(msgspec.structs.replace(task(name), files=files) for name in names)
    fields["options"] = {"command": "exec python3 -I -S agent.py"}
    return plan(out, root, names, backend=BubblewrapBackend(root), **fields)


class BatchRun:
    """A batch of real rollouts, as a process that can be killed and started again."""

    def __init__(self, site: Site, folder: Path, tasks: int, sandbox: str) -> None:
        self.site, self.out, self.root, self.tasks, self.sandbox = site, folder / "out", folder, tasks, sandbox
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.chaos.rollouts", self.site.server.url, str(self.out), str(self.root)]
        env = {**os.environ, ADMIN_KEY: ADMIN, SLOWNESS: str(slowness())}
        with (self.root / "runner.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, str(self.tasks), self.sandbox],
                stdout=log,
                stderr=log,
                env=env,
                cwd=Path(__file__).parents[2],
            )

    def state(self) -> LedgerState:
        return read_ledger(self.out)

    async def wait_until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(scaled(FINISH_S)):
            while not condition():
                await asyncio.sleep(0.05)

    async def wait_for_start(self) -> None:
        """Wait until a rollout runs in its sandbox."""
        await self.wait_until(lambda: self.out.exists() and sandbox_processes(self.root))

    async def signal_in_sandbox(self, program: str, number: int) -> int:
        """Send a signal to a random process of a sandbox whose command line contains a program's name. Return its id."""
        while True:
            await self.wait_until(lambda: self._find_in_sandbox(program) or self.process.poll() is not None)
            if self.process.poll() is not None:
                raise TimeoutError(f"the batch ended before {program} got its signal")
            for pid in self._find_in_sandbox(program):
                with suppress(ProcessLookupError):  # it has ended
                    os.kill(pid, number)
                    return pid

    def _find_in_sandbox(self, program: str) -> list[int]:
        """Return the processes that run a program, in random order. Those in a namespace are descendants of one that is not."""
        outer = sandbox_processes(self.root)
        found = []
        for pid in {*outer, *supervisor.descendants(*outer)}:
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if any(word.endswith(program.encode()) for word in command[:6]) and b"bwrap" not in command[0]:
                    found.append(pid)
        return self.site.rng.sample(found, len(found))


Inject = Callable[[BatchRun, float], Awaitable[None]]  # returns when the fault has ended


async def _kill_runner(run: BatchRun, seconds: float) -> None:
    run.process.kill()
    run.process.wait()
    run.start()


async def _pause_runner(run: BatchRun, seconds: float) -> None:
    os.kill(run.process.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(run.process.pid, signal.SIGCONT)


def _kill(program: str) -> Inject:
    async def inject(run: BatchRun, seconds: float) -> None:
        await run.signal_in_sandbox(program, signal.SIGKILL)

    return inject


def _pause(program: str) -> Inject:
    async def inject(run: BatchRun, seconds: float) -> None:
        pid = await run.signal_in_sandbox(program, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        with suppress(ProcessLookupError):  # its rollout has ended
            os.kill(pid, signal.SIGCONT)

    return inject


async def _restart_gateway(run: BatchRun, seconds: float) -> None:
    await run.site.restart()


@dataclass(frozen=True)
class RolloutFault:
    """A fault, and the sandboxes in which the agents of its batch run."""

    inject: Inject
    sandbox: str = "local"


ROLLOUT_FAULTS: dict[str, RolloutFault] = {
    "batch: kill -9 of the runner": RolloutFault(_kill_runner),
    "batch: SIGSTOP of the runner": RolloutFault(_pause_runner),
    "batch: kill -9 of the gateway": RolloutFault(_restart_gateway),
    "sandbox: kill -9 of a supervisor": RolloutFault(_kill("supervisor.py")),
    "sandbox: kill -9 of a relay": RolloutFault(_kill("relay.py")),
    "sandbox: kill -9 of an agent": RolloutFault(_kill("agent.py")),
    "bubblewrap: kill -9 of a supervisor": RolloutFault(_kill("supervisor.py"), "bubblewrap"),
    "bubblewrap: kill -9 of a relay": RolloutFault(_kill("relay.py"), "bubblewrap"),
    "bubblewrap: kill -9 of an agent": RolloutFault(_kill("agent.py"), "bubblewrap"),
    "bubblewrap: SIGSTOP of a relay": RolloutFault(_pause("relay.py"), "bubblewrap"),
    "bubblewrap: SIGSTOP of an agent": RolloutFault(_pause("agent.py"), "bubblewrap"),
}


def explain_missing(name: str) -> str | None:
    """Return why a fault cannot be injected here."""
    sandbox = ROLLOUT_FAULTS[name].sandbox
    return None if sandbox == "local" else needs.missing(sandbox)


async def run_rollout_faults(names: list[str], pace: Pace, seed: int, report: Callable[[Row], None]) -> list[Row]:
    rng = random.Random(f"{seed} rollouts")
    rows = []
    async with open_single(rng) as site:
        for _ in range(pace.rounds):
            for name in rng.sample(names, len(names)):
                with tempfile.TemporaryDirectory(prefix="tg-") as folder:
                    run = BatchRun(site, Path(folder), pace.tasks, ROLLOUT_FAULTS[name].sandbox)
                    rows.append(await _run_fault(run, name, pace))
                report(rows[-1])
    return rows


async def _run_fault(run: BatchRun, name: str, pace: Pace) -> Row:
    row = Row(name)
    before = len(run.site.engine.generations)
    run.start()
    try:
        await run.wait_for_start()
        await ROLLOUT_FAULTS[name].inject(run, pace.seconds)
        ended, finished = time.monotonic(), len(run.state().finished)
        await run.wait_until(lambda: len(run.state().finished) > finished or run.process.poll() is not None)
        row.recovery_s = time.monotonic() - ended
        await run.wait_until(lambda: run.process.poll() is not None)
    except TimeoutError as error:
        row.recovery_s = None
        row.notes.append(f"the batch did not go on: {error}\n{(run.root / 'runner.log').read_text()[-2000:]}")
    finally:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
    row.counts.calls = len(run.site.engine.generations) - before
    await _check(run, row)
    return row


async def _check(run: BatchRun, row: Row) -> None:
    """Check that every rollout finished once, with the same reward in the ledger and at the gateway, and left nothing behind."""
    state = run.state()
    assert state.head is not None
    expected = {f"{state.head.batch}.well-{task}.{n}" for task in range(run.tasks) for n in range(N)}
    row.rollouts = len(state.finished)
    row.breaches.lost += len(expected - state.finished.keys())
    row.breaches.duplicated += len(state.finished.keys() - expected)
    await run.site.server.ready()
    recorded = await run.site.read_rollouts([done.session for done in state.finished.values() if done.session])
    for done in state.finished.values():
        shown = recorded.get(done.session)
        outcome = None if shown is None else shown.outcome
        if (done.kind == "graded") != (done.reward is not None) or outcome is None or outcome["reward"] != done.reward:
            row.breaches.wrong_rewards += 1
            row.notes.append(f"{done.rollout}: {done.kind} with reward {done.reward}, but the gateway has {outcome}")
        if shown is not None:
            row.breaches.add(check_recorded(done.session, shown, run.site.engine.generations))
    sessions = Counter(done.session for done in state.finished.values() if done.session)
    row.breaches.duplicated += sum(count - 1 for count in sessions.values())
    row.notes += row.breaches.notes
    try:
        await run.wait_until(lambda: not sandbox_processes(run.root))
    except TimeoutError:
        row.untold += 1
        row.notes.append(f"processes of sandboxes are left: {sandbox_processes(run.root)}")


def main(url: str, out: str, root: str, tasks: str, sandbox: str) -> int:
    logging.basicConfig(level=logging.WARNING)
    tempfile.tempdir = root
    return asyncio.run(run_plan(url, build_plan(Path(out), Path(root), int(tasks), sandbox)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
