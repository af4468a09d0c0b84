"""What a batch is: its order, its names, and by what it is known again. And the gates that bound its phases."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.kit import until
from tests.speed import scaled
from turngate.agents.install import Installation
from turngate.agents.spec import find_agent
from turngate.errors import ConfigError
from turngate.rollout.concurrency import Bounds, Concurrency
from turngate.rollout.ledger import LedgerHeader
from turngate.rollout.plan import BatchPlan, describe_changes
from turngate.sandboxes.local import LocalBackend
from turngate.tasks.task import Script, Task


def plan(folder: Path, **fields: Any) -> BatchPlan:
    given = {
        "tasks": tuple(Task(id=f"t{n}", instruction="x") for n in range(20)),
        "agent": find_agent("shell").spec,
        "installed": Installation(),
        "backend": LocalBackend(),
        "model": "m",
        "folder": folder,
        "n": 4,
        **fields,
    }
    return BatchPlan(**given)


def list_changes(before: BatchPlan, after: BatchPlan) -> list[str]:
    head = LedgerHeader(batch="b", terms=before.terms(), tasks=before.digests(), made=0.0)
    return describe_changes(head, after.terms(), after.digests())


def test_groups_stay_together_and_a_seed_orders_them_anew(tmp_path: Path) -> None:
    given = plan(tmp_path)
    assert given.order_tasks() == given.tasks
    shuffled = plan(tmp_path, seed=1).order_tasks()
    assert shuffled != given.tasks and {t.id for t in shuffled} == {t.id for t in given.tasks}
    assert shuffled == plan(tmp_path, seed=1).order_tasks() != plan(tmp_path, seed=2).order_tasks()


def test_with_a_seed_each_rollout_samples_by_one_of_its_own_that_stays(tmp_path: Path) -> None:
    given = plan(tmp_path, seed=3, session={"limits": {"turns": 5}})
    seeds = [
        given.rollout_spec(task, index, "b", attempt).session["sampling"]["seed"]
        for task in given.tasks
        for index in range(4)
        for attempt in (1, 2)
    ]
    assert len(set(seeds)) == 80 and seeds[::2] == seeds[1::2]
    assert given.rollout_spec(given.tasks[0], 0, "b", 1).session["limits"] == {"turns": 5}
    assert "sampling" not in plan(tmp_path).rollout_spec(given.tasks[0], 0, "b", 1).session


def test_each_round_has_an_order_names_and_seeds_of_its_own(tmp_path: Path) -> None:
    given = plan(tmp_path, seed=1, rounds=3)
    assert given.total == 240 and plan(tmp_path, rounds=3).order_tasks(2) == given.tasks
    orders = [given.order_tasks(number) for number in range(3)]
    assert orders[0] == plan(tmp_path, seed=1).order_tasks() and len({tuple(t.id for t in one) for one in orders}) == 3
    first, later = (given.rollout_spec(given.tasks[0], 3, "b", 1, number) for number in (0, 2))
    assert (first.group, later.group, later.rollout) == ("b.t0", "b.t0@2", "b.t0@2.3")
    assert first.session["sampling"]["seed"] != later.session["sampling"]["seed"]
    assert list_changes(plan(tmp_path, rounds=1), plan(tmp_path, rounds=5)) == [], "more may be asked for later"


def test_names_are_made_of_batch_task_and_index(tmp_path: Path) -> None:
    given = plan(tmp_path, timeout_s=None, tasks=(Task(id="t", instruction="x", timeout_s=7.0),))
    order = given.rollout_spec(given.tasks[0], 3, "b", 2)
    assert (order.rollout, order.group, order.attempt, order.timeout_s) == ("b.t.3", "b.t", 2, 7.0)


def test_how_fast_it_runs_is_not_what_it_is(tmp_path: Path) -> None:
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
def test_what_differs_is_named(fields: dict[str, Any], line: str, tmp_path: Path) -> None:
    found = list_changes(plan(tmp_path), plan(tmp_path, **fields))
    assert any(one.startswith(line) for one in found), found


def test_a_task_is_what_lies_in_its_folders_wherever_those_are(tmp_path: Path) -> None:
    def made(name: str, text: str, link: str = "a") -> BatchPlan:
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "test.sh").write_text(text)
        (tmp_path / name / "link").symlink_to(link)
        task = Task(id="t", instruction="x", grader=Script(files=tmp_path / name), source=name)
        return plan(tmp_path, tasks=(task,))

    assert list_changes(made("one", "exit 0"), made("two", "exit 0")) == []
    assert list_changes(made("three", "exit 0"), made("four", "exit 1")) == ["tasks: t has changed"]
    assert list_changes(made("five", "exit 0"), made("six", "exit 0", "b")) == ["tasks: t has changed"]


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"n": 0}, "n must be at least 1, not 0"),
        ({"rounds": 0}, "rounds must be at least 1, not 0"),
        ({"retries": -1}, "retries must be at least 0, not -1"),
        ({"stale_retries": -1}, "stale_retries must be at least 0, not -1"),
        ({"tasks": ()}, "tasks is empty"),
        ({"tasks": (Task(id="t", instruction="x"),) * 2}, "tasks: task id 't' appears more than once"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(fields: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=line):
        plan(tmp_path, **fields)


@pytest.mark.parametrize(
    ("bound", "name"), [("running", "concurrency"), ("starting", "starting"), ("grading", "grading")]
)
def test_bounds_of_nothing_are_refused(bound: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be at least 1, not 0$"):
        msgspec.structs.replace(Bounds(), **{bound: 0})
    assert Bounds(warm=0).sandboxes == 8


# ── gates ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_no_phase_has_more_in_it_than_it_may_and_no_more_sandboxes_are_there() -> None:
    bounds = Bounds(running=3, starting=2, grading=1, warm=2)
    gates = Concurrency(bounds)
    most: Counter[str] = Counter()
    here: Counter[str] = Counter()

    def enter(what: str) -> None:
        here[what] += 1
        most[what] = max(most[what], here[what])

    async def rollout(n: int) -> None:
        slot = gates.new_slot()
        try:
            async with slot("start"):
                enter("start")
                enter("sandbox")
                await asyncio.sleep(0.001)
                here["start"] -= 1
            if n % 5 == 0:  # it failed
                here["sandbox"] -= 1
                return
            async with slot("run"):
                enter("run")
                await asyncio.sleep(0.002)
                here["run"] -= 1
            here["sandbox"] -= 1
            async with slot("grade"):
                enter("grade")
                await asyncio.sleep(0.001)
                here["grade"] -= 1
        finally:
            slot.leave()

    await asyncio.wait_for(asyncio.gather(*(rollout(n) for n in range(60))), scaled(20))
    assert most == {"start": 2, "run": 3, "grade": 1, "sandbox": 5}
    assert +gates.states == Counter()


async def test_sandboxes_are_made_ahead_while_agents_run() -> None:
    gates = Concurrency(Bounds(running=1, starting=4, grading=1, warm=2))
    go = asyncio.Event()

    async def rollout() -> None:
        slot = gates.new_slot()
        try:
            async with slot("start"):
                pass
            async with slot("run"):
                await go.wait()
        finally:
            slot.leave()

    running = [asyncio.create_task(rollout()) for _ in range(6)]
    await until(lambda: +gates.states == Counter(run=1, ready=2, waiting=3))
    await asyncio.sleep(0.05)
    assert +gates.states == Counter(run=1, ready=2, waiting=3)
    go.set()
    await asyncio.wait_for(asyncio.gather(*running), scaled(5))


async def test_whoever_is_cancelled_at_a_gate_holds_nothing() -> None:
    gates = Concurrency(Bounds(running=1, starting=1, grading=1, warm=0))

    async def rollout() -> None:
        slot = gates.new_slot()
        try:
            async with slot("start"), slot("run"):
                await asyncio.sleep(60)
        finally:
            slot.leave()

    running = [asyncio.create_task(rollout()) for _ in range(3)]
    await until(lambda: gates.states["run"] == 1)
    for one in (running[1], running[0]):
        one.cancel()
    await until(lambda: +gates.states == Counter(run=1))
    running[2].cancel()
    await asyncio.wait(running)
    assert +gates.states == Counter()
