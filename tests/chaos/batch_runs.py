"""Faults of a batch of real rollouts: run a batch as a process, inject a fault, let the batch finish, and check the invariants."""

from __future__ import annotations

import asyncio
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.invariants import BatchEvidence, check_batch, parse_agent_log
from tests.chaos.sites import Site
from tests.chaos.suite import Pace, Row, find_rejected
from tests.speed import scaled
from tests.verify.kit import Tampering, tampering
from turngate.rollout.ledger import LedgerState, read_ledger

N = 2  # rollouts of each task
FINISH_S = 60.0
AGENT = Path(__file__).with_name("batch_agent.py")


class BatchRun(ABC):
    """A batch of real rollouts, as a process that can be killed and started again."""

    def __init__(self, site: Site, root: Path, tasks: int) -> None:
        self.site, self.root, self.out = site, root, root / "out"
        self.names = [f"well-{n}" for n in range(tasks)]
        self.process: subprocess.Popen[bytes]
        self.at_end = AsyncExitStack()  # callbacks to run when the batch has finished

    def launch(self, command: list[str], env: dict[str, str]) -> None:
        with (self.root / "runner.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd=Path(__file__).parents[2]
            )

    def read_output(self) -> str:
        return (self.root / "runner.log").read_text(errors="replace")

    def state(self) -> LedgerState:
        return read_ledger(self.out)

    async def wait_until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(scaled(FINISH_S)):
            while not condition():
                await asyncio.sleep(0.05)

    async def wait_until_running(self, condition: Callable[[], object], what: str) -> None:
        """Wait for something that happens while the batch runs."""
        await self.wait_until(lambda: condition() or self.process.poll() is not None)
        if self.process.poll() is not None:
            raise TimeoutError(f"the batch ended before {what}")

    @abstractmethod
    def start(self) -> None:
        """Start the process, or start it again."""

    @abstractmethod
    async def wait_for_start(self) -> None:
        """Wait until a rollout runs where the fault will hit."""

    @abstractmethod
    def find_logs(self) -> dict[str, Path]:
        """Return the files with the output of the agents, by session."""

    @abstractmethod
    async def list_leftovers(self) -> list[str]:
        """Return the processes, sandboxes and the like that the batch has left behind."""

    @abstractmethod
    def check_attempts(self, row: Row) -> None:
        """Check the attempts of the batch, where the store has them."""

    def tamper(self, session: str) -> AbstractContextManager[Tampering]:
        """Open a stored session, to damage it. The gateway must not be running."""
        return tampering(Path(self.site.server.data), session)


@dataclass(frozen=True)
class BatchFault:
    """A fault of a batch. `inject` returns when it has ended."""

    inject: Callable[[Any, float], Awaitable[None]]
    may_fail: bool = False  # agents may fail, because a process of their sandbox is killed


async def run_batch_fault(run: BatchRun, name: str, fault: BatchFault, pace: Pace) -> Row:
    """Run a batch, inject a fault, and check everything when the batch has finished."""
    row = Row(name)
    before = len(run.site.engine.generations)
    run.start()
    try:
        await run.wait_for_start()
        await fault.inject(run, pace.seconds)
        ended, finished = time.monotonic(), len(run.state().finished)
        await run.wait_until(lambda: len(run.state().finished) > finished or run.process.poll() is not None)
        row.recovery_s = time.monotonic() - ended
        await run.wait_until(lambda: run.process.poll() is not None)
    except TimeoutError as error:
        row.recovery_s = None
        row.notes.append(f"the batch did not continue: {error}\n{run.read_output()[-2000:]}")
    finally:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
        await run.at_end.aclose()
    row.counts.calls = len(run.site.engine.generations) - before
    await _check(run, row, may_fail=fault.may_fail)
    return row


async def read_evidence(run: BatchRun, *, may_fail: bool = False) -> BatchEvidence:
    """Collect what the runner, the agents, the gateway and the engine recorded of a batch."""
    state = run.state()
    assert state.head is not None
    await run.site.server.ready()
    sessions = [done.session for done in state.finished.values() if done.session]
    return BatchEvidence(
        expected={f"{state.head.batch}.{task}.{n}" for task in run.names for n in range(N)},
        finished=dict(state.finished),
        logs={session: parse_agent_log(path.read_text()) for session, path in run.find_logs().items()},
        recorded=await run.site.read_rollouts(sessions),
        generations=run.site.engine.generations,
        may_fail=may_fail,
    )


async def _check(run: BatchRun, row: Row, *, may_fail: bool) -> None:
    """Check that every rollout finished once, with what its agent received and the right reward, and left nothing behind."""
    evidence = await read_evidence(run, may_fail=may_fail)
    row.rollouts = len(evidence.finished)
    row.breaches = check_batch(evidence)
    rejected = await asyncio.to_thread(find_rejected, run.site.reader.data, [*evidence.recorded])
    row.breaches.inexact += len(rejected)
    row.notes += [*row.breaches.notes, *rejected]
    run.check_attempts(row)
    deadline = time.monotonic() + scaled(FINISH_S)
    while left := await run.list_leftovers():
        if time.monotonic() > deadline:
            row.untold += 1
            row.notes.append(f"left behind: {left}")
            return
        await asyncio.sleep(0.2)
