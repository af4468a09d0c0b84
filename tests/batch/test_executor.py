"""The executors of a batch: attempts on another machine, and failures before an attempt starts."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from tests.batch.test_batch import open_harness
from turngate.client.gateway import GatewayClient
from turngate.rollout.concurrency import Bounds
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.executor import Attempt, AttemptExecutor, LocalExecutor
from turngate.rollout.order import RolloutOrder, decode_order, encode_order
from turngate.rollout.outcome import PhaseGate, ProgressCallback
from turngate.rollout.resolve import MachineResolver, PlanResolver
from turngate.tasks.archive_cache import ArchiveCache
from turngate.tasks.task import Script, Task

pytestmark = [pytest.mark.process, pytest.mark.full]


class OtherMachine:
    """Runs attempts with nothing but the bytes of their orders and archives."""

    def __init__(self, root: Path, gateway: GatewayClient, connector: GatewayConnector, own: ArchiveCache) -> None:
        async def fetch(digest: str) -> bytes:
            self.fetched[digest] += 1
            return own.read(digest)

        self.fetched: Counter[str] = Counter()
        self.orders: list[RolloutOrder] = []
        self.resolver = MachineResolver(root / "rollouts", ArchiveCache(root / "archives"), fetch, environment={})
        self._local = LocalExecutor(self.resolver, gateway, connector)

    async def check(self) -> None:
        await self._local.check()

    async def sweep(self) -> None:
        await self._local.sweep()

    def prepare(self, order: RolloutOrder, watch: ProgressCallback, gate: PhaseGate) -> Attempt:
        self.orders.append(order)
        return self._local.prepare(decode_order(encode_order(order)), watch, gate)


def write_task(task: Task, root: Path) -> Task:
    """Give a task files and a grader that passes only if they are in the sandbox."""
    for name, text in {
        "files/hint": "",
        "tests/test.sh": 'test -f hint; echo $((1 - $?)) > "$1/verifier/reward.txt"',
    }.items():
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text)
    grader = Script(files=root / "tests", command=("sh", "-c", 'sh "$TURNGATE_TESTS/test.sh" "$TURNGATE_LOGS"'))
    return msgspec.structs.replace(task, files=root / "files", grader=grader)


async def test_batch_on_another_machine_ends_as_on_one() -> None:
    async with open_harness() as harness:
        plan = harness.plan("well-0", "hang-0", "setup-0")
        first = write_task(plan.tasks[0], harness.root / "task")
        plan = msgspec.structs.replace(plan, tasks=(first, *plan.tasks[1:]))
        own = ArchiveCache(harness.root / "own")
        archive = own.store(first).archive
        machine = OtherMachine(harness.root / "machine", harness.client, harness.connector, own)
        executor: AttemptExecutor = machine
        result = await harness.batch(plan, executor=executor).run()
        assert result.complete and not result.stopped
        assert {(one.task, one.kind, one.reward) for one in result.finished} == {
            ("well-0", "graded", 1.0),
            ("hang-0", "agent failed", None),
            ("setup-0", "invalid task", None),
        }
        assert machine.fetched == {archive: 1}
        assert {order.session_id for order in machine.orders} >= {one.session for one in result.finished if one.session}
        assert len(list((harness.root / "machine" / "rollouts").iterdir())) == 4, "of the agents that ran"


class BrokenExecutor:
    """Fails in a way that its interface does not allow, then runs attempts."""

    def __init__(self, local: LocalExecutor, failures: int) -> None:
        self._local, self._failures = local, failures

    async def check(self) -> None: ...

    async def sweep(self) -> None: ...

    def prepare(self, order: RolloutOrder, watch: ProgressCallback, gate: PhaseGate) -> Attempt:
        self._failures -= 1
        if self._failures >= 0:
            raise RuntimeError("a bug")
        return self._local.prepare(order, watch, gate)


async def test_bug_in_an_executor_fails_one_attempt() -> None:
    async with open_harness() as harness:
        plan = harness.plan("well-0", n=1, retries=2, bounds=Bounds(running=1))
        local = LocalExecutor(PlanResolver(plan), harness.client, harness.connector)
        result = await harness.batch(plan, executor=BrokenExecutor(local, failures=2)).run()
        [finished] = result.finished
        assert (finished.kind, finished.attempt) == ("graded", 3)


async def test_task_whose_files_vanish_is_invalid() -> None:
    async with open_harness() as harness:
        plan = harness.plan("well-0", "well-1", n=1)
        first = write_task(plan.tasks[0], harness.root / "task")
        plan = msgspec.structs.replace(plan, tasks=(first, plan.tasks[1]))

        async def remove_files(number: int) -> None:  # after the batch has read them to identify itself
            shutil.rmtree(harness.root / "task", ignore_errors=True)

        result = await harness.batch(plan, throttle=remove_files).run()
        finished = {one.task: one for one in result.finished}
        assert finished["well-1"].kind == "graded" and finished["well-0"].kind == "invalid task"
        assert finished["well-0"].stage == "files" and "cannot be read" in finished["well-0"].message
