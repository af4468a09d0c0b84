"""Batch plans: the order and names of rollouts, the terms that identify a batch, and the limits on its phases."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.kit import until
from tests.speed import scaled
from turngate.agents.installation import Installation
from turngate.agents.spec import find_agent
from turngate.errors import ConfigError
from turngate.rollout.concurrency import Bounds, Concurrency
from turngate.rollout.ledger import LedgerHeader
from turngate.rollout.plan import BatchPlan, describe_changes
from turngate.sandboxes.local import LocalBackend
from turngate.tasks.archive import PackedTask
from turngate.tasks.task import HostVariable, Script, Solution, Task


def plan(folder: Path, **fields: Any) -> BatchPlan:
    defaults = {
        "tasks": tuple(Task(id=f"t{n}", instruction="x") for n in range(20)),
        "agent": find_agent("shell").spec,
        "installed": Installation(),
        "backend": LocalBackend(),
        "model": "m",
        "folder": folder,
        "n": 4,
        **fields,
    }
    return BatchPlan(**defaults)


def list_changes(before: BatchPlan, after: BatchPlan) -> list[str]:
    head = LedgerHeader(batch="b", terms=before.terms(), tasks=before.digests(), made=0.0)
    return describe_changes(head, after.terms(), after.digests())


def test_seed_shuffles_tasks(tmp_path: Path) -> None:
    batch_plan = plan(tmp_path)
    assert batch_plan.order_tasks() == batch_plan.tasks
    shuffled = plan(tmp_path, seed=1).order_tasks()
    assert shuffled != batch_plan.tasks and {t.id for t in shuffled} == {t.id for t in batch_plan.tasks}
    assert shuffled == plan(tmp_path, seed=1).order_tasks() != plan(tmp_path, seed=2).order_tasks()


def test_each_rollout_has_stable_sampling_seed(tmp_path: Path) -> None:
    batch_plan = plan(tmp_path, seed=3, session={"limits": {"turns": 5}})
    seeds = [
        batch_plan.rollout_order(PackedTask(task=task), index, "b", attempt).session["sampling"]["seed"]
        for task in batch_plan.tasks
        for index in range(4)
        for attempt in (1, 2)
    ]
    assert len(set(seeds)) == 80 and seeds[::2] == seeds[1::2]
    assert batch_plan.rollout_order(PackedTask(task=batch_plan.tasks[0]), 0, "b", 1).session["limits"] == {"turns": 5}
    assert "sampling" not in plan(tmp_path).rollout_order(PackedTask(task=batch_plan.tasks[0]), 0, "b", 1).session


def test_each_round_has_own_order_names_and_seeds(tmp_path: Path) -> None:
    batch_plan = plan(tmp_path, seed=1, rounds=3)
    assert batch_plan.total == 240 and plan(tmp_path, rounds=3).order_tasks(2) == batch_plan.tasks
    orders = [batch_plan.order_tasks(number) for number in range(3)]
    assert (
        orders[0] == plan(tmp_path, seed=1).order_tasks() and len({tuple(t.id for t in order) for order in orders}) == 3
    )
    first, later = (
        batch_plan.rollout_order(PackedTask(task=batch_plan.tasks[0]), 3, "b", 1, number) for number in (0, 2)
    )
    assert (first.group, later.group, later.rollout) == ("b.t0", "b.t0@2", "b.t0@2.3")
    assert first.session["sampling"]["seed"] != later.session["sampling"]["seed"]
    assert list_changes(plan(tmp_path, rounds=1), plan(tmp_path, rounds=5)) == [], "rounds may be added later"


def test_rollout_names_consist_of_batch_task_and_index(tmp_path: Path) -> None:
    batch_plan = plan(tmp_path, timeout_s=None, tasks=(Task(id="t", instruction="x", timeout_s=7.0),))
    order = batch_plan.rollout_order(PackedTask(task=batch_plan.tasks[0]), 3, "b", 2)
    assert (order.rollout, order.group, order.attempt, order.timeout_s) == ("b.t.3", "b.t", 2, 7.0)


def test_concurrency_does_not_change_plan_identity(tmp_path: Path) -> None:
    faster = plan(tmp_path / "x", bounds=Bounds(running=99, warm=3), retries=7, keep_work=True)
    assert list_changes(plan(tmp_path), faster) == []


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"n": 8}, "n: was 4, is now 8"),
        ({"model": "other"}, "model: was m, is now other"),
        ({"seed": 1}, "seed: was None, is now 1"),
        ({"agent": find_agent("pi").spec}, "agent: was shell, is now pi"),
        ({"network": "open"}, "network: was none, is now open"),
        ({"session": {"limits": {"turns": 1}}}, 'session: was {}, is now {"limits":{"turns":1}}'),
        ({"timeout_s": 5.0}, "timeout: was None, is now 5.0"),
        ({"image": "x"}, "image: was not set, is now x"),
        ({"tasks": (Task(id="t0", instruction="x"),)}, "tasks: t1 was removed (and 18 more)"),
        ({"tasks": tuple(Task(id=f"t{n}", instruction="x") for n in range(21))}, "tasks: t20 was added"),
        ({"tasks": tuple(Task(id=f"t{n}", instruction="xy"[n == 3]) for n in range(20))}, "tasks: t3 has changed"),
    ],
)
def test_changed_field_is_named(fields: dict[str, Any], line: str, tmp_path: Path) -> None:
    found = list_changes(plan(tmp_path), plan(tmp_path, **fields))
    assert any(change.startswith(line) for change in found), found


def test_task_is_identified_by_content_not_location(tmp_path: Path) -> None:
    def plan_with_task(name: str, text: str, link: str = "a") -> BatchPlan:
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "test.sh").write_text(text)
        (tmp_path / name / "link").symlink_to(link)
        task = Task(id="t", instruction="x", grader=Script(files=tmp_path / name), source=name)
        return plan(tmp_path, tasks=(task,))

    assert list_changes(plan_with_task("one", "exit 0"), plan_with_task("two", "exit 0")) == []
    assert list_changes(plan_with_task("three", "exit 0"), plan_with_task("four", "exit 1")) == ["tasks: t has changed"]
    assert list_changes(plan_with_task("five", "exit 0"), plan_with_task("six", "exit 0", "b")) == [
        "tasks: t has changed"
    ]


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"n": 0}, "n must be at least 1, not 0"),
        ({"rounds": 0}, "rounds must be at least 1, not 0"),
        ({"retries": -1}, "retries must be at least 0, not -1"),
        ({"stale_retries": -1}, "stale_retries must be at least 0, not -1"),
        ({"tasks": ()}, "the list of tasks is empty"),
        ({"tasks": (Task(id="t", instruction="x"),) * 2}, "tasks: task id 't' appears more than once"),
    ],
)
def test_invalid_plan_is_refused(fields: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=line):
        plan(tmp_path, **fields)


@pytest.mark.parametrize(
    ("bound", "name"), [("running", "concurrency"), ("starting", "starting"), ("grading", "grading")]
)
def test_zero_bounds_are_refused(bound: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"^'{name}' must be at least 1, not 0$"):
        msgspec.structs.replace(Bounds(), **{bound: 0})
    assert Bounds(warm=0).sandboxes == 8


# ── concurrency ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_phases_and_sandboxes_stay_within_bounds() -> None:
    bounds = Bounds(running=3, starting=2, grading=1, warm=2)
    concurrency = Concurrency(bounds)
    most: Counter[str] = Counter()
    current: Counter[str] = Counter()

    def enter(phase: str) -> None:
        current[phase] += 1
        most[phase] = max(most[phase], current[phase])

    async def rollout(n: int) -> None:
        slot = concurrency.new_slot()
        try:
            async with slot("start"):
                enter("start")
                enter("sandbox")
                await asyncio.sleep(0.001)
                current["start"] -= 1
            if n % 5 == 0:  # as if the sandbox failed to start
                current["sandbox"] -= 1
                return
            async with slot("run"):
                enter("run")
                await asyncio.sleep(0.002)
                current["run"] -= 1
            current["sandbox"] -= 1
            async with slot("grade"):
                enter("grade")
                await asyncio.sleep(0.001)
                current["grade"] -= 1
        finally:
            slot.leave()

    await asyncio.wait_for(asyncio.gather(*(rollout(n) for n in range(60))), scaled(20))
    assert most == {"start": 2, "run": 3, "grade": 1, "sandbox": 5}
    assert +concurrency.states == Counter()


async def test_warm_sandboxes_are_created_while_agents_run() -> None:
    concurrency = Concurrency(Bounds(running=1, starting=4, grading=1, warm=2))
    go = asyncio.Event()

    async def rollout() -> None:
        slot = concurrency.new_slot()
        try:
            async with slot("start"):
                pass
            async with slot("run"):
                await go.wait()
        finally:
            slot.leave()

    running = [asyncio.create_task(rollout()) for _ in range(6)]
    await until(lambda: +concurrency.states == Counter(run=1, ready=2, waiting=3))
    await asyncio.sleep(0.05)
    assert +concurrency.states == Counter(run=1, ready=2, waiting=3)
    go.set()
    await asyncio.wait_for(asyncio.gather(*running), scaled(5))


async def test_cancelled_rollout_releases_its_slot() -> None:
    concurrency = Concurrency(Bounds(running=1, starting=1, grading=1, warm=0))

    async def rollout() -> None:
        slot = concurrency.new_slot()
        try:
            async with slot("start"), slot("run"):
                await asyncio.sleep(60)
        finally:
            slot.leave()

    running = [asyncio.create_task(rollout()) for _ in range(3)]
    await until(lambda: concurrency.states["run"] == 1)
    for task in (running[1], running[0]):
        task.cancel()
    await until(lambda: +concurrency.states == Counter(run=1))
    running[2].cancel()
    await asyncio.wait(running)
    assert +concurrency.states == Counter()


def test_documentation_of_agent_does_not_change_batch(tmp_path: Path) -> None:
    before = plan(tmp_path)
    documented = msgspec.structs.replace(before.agent, title="New", limits=("It is slow.",), off={"x": "y"})
    assert list_changes(before, plan(tmp_path, agent=documented)) == []
    changed = msgspec.structs.replace(before.agent, env={**before.agent.env, "NEW": "1"})
    [change] = list_changes(before, plan(tmp_path, agent=changed))
    assert change.startswith("agent's description: was run:")


def test_ledger_that_hashed_documentation_can_be_resumed(tmp_path: Path) -> None:
    now = plan(tmp_path)
    terms = {**now.terms(), "agent's description": "14962ab9b489eba9"}
    head = LedgerHeader(batch="b", terms=terms, tasks=now.digests(), made=0.0)
    assert describe_changes(head, now.terms(), now.digests()) == []
    other = {**terms, "agent": "pi 0.1"}
    head = LedgerHeader(batch="b", terms=other, tasks=now.digests(), made=0.0)
    assert [change.partition(":")[0] for change in describe_changes(head, now.terms(), now.digests())] == ["agent"]


def test_tasks_of_earlier_batches_have_not_changed(tmp_path: Path) -> None:
    """Ledgers of earlier versions contain these digests. New fields of a task must not change them."""
    variable = HostVariable(place="environment", name="A", variable="B")
    tasks = (
        Task(id="plain", instruction="x"),
        Task(
            id="full",
            instruction="x",
            env={"A": "b"},
            host_env=(variable,),
            grader=Script(env={"C": "d"}),
            solution=Solution(patch="p"),
            source="/somewhere",
        ),
    )
    assert plan(tmp_path, tasks=tasks).digests() == {"plain": "00c10611750f1dcd", "full": "b6c5d9a5637c3d66"}
