"""Fair shares of the engines: by weight, without idle engines, and fair to the groups of a project."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping

import pytest

from tests.kit import Gated, gateway, say, until
from tests.projects.kit import create_project, project_client
from tests.speed import scaled
from turngate.gateway import fair_shares
from turngate.gateway.cell_parts import OtherCells, ProjectCalls
from turngate.gateway.fair_shares import YIELD_S, FairQueue, FairShares

Owner = tuple[str, str]  # project, group


def simulate(
    waiting: Mapping[Owner, int], slots: int, weights: Mapping[str, float], rounds: int
) -> tuple[Counter[Owner], int]:
    """Let calls of equal length use `slots`, one after the other. Return how many of each ended, and the idle slots."""
    queue: FairQueue[Owner] = FairQueue(lambda project: weights.get(project, 1.0))
    for owner, calls in waiting.items():
        for _ in range(calls):
            queue.add(*owner, owner)
    running: list[Owner] = []
    ended: Counter[Owner] = Counter()
    idle = 0
    for _ in range(rounds):
        while len(running) < slots and (chosen := queue.choose()) is not None:
            running.append(chosen)
        if queue.waiting:
            idle += slots - len(running)
        done = running.pop(0)  # the oldest call ends
        queue.end(*done)
        ended[done] += 1
    return ended, idle


@pytest.mark.parametrize(
    ("waiting", "weights", "expected"),
    [
        # A large project does not delay a small one: each gets half while both have calls.
        ({("greedy", ""): 900, ("small", ""): 40}, {}, {("greedy", ""): 60, ("small", ""): 40}),
        ({("a", ""): 500, ("b", ""): 500}, {}, {("a", ""): 50, ("b", ""): 50}),
        ({("a", ""): 500, ("b", ""): 500}, {"a": 3.0}, {("a", ""): 75, ("b", ""): 25}),
        # What one project does not use goes to the other.
        ({("a", ""): 500, ("b", ""): 10}, {"b": 9.0}, {("a", ""): 90, ("b", ""): 10}),
        # The groups of a project share what the project gets. A project does not get more by having more groups.
        (
            {("a", "g1"): 500, ("a", "g2"): 500, ("b", "g1"): 500},
            {},
            {("a", "g1"): 25, ("a", "g2"): 25, ("b", "g1"): 50},
        ),
    ],
)
def test_shares(waiting: Mapping[Owner, int], weights: Mapping[str, float], expected: Mapping[Owner, int]) -> None:
    ended, idle = simulate(waiting, 8, weights, 100)
    assert idle == 0  # no slot is idle while calls wait
    for owner, calls in expected.items():
        assert abs(ended[owner] - calls) <= 8, (owner, ended)


@pytest.mark.parametrize(
    ("waiting", "weights"),
    [
        ({(project, ""): 500 for project in "abcde"}, {}),  # more projects than slots
        ({("a", group): 500 for group in "abcde"}, {}),
        ({("a", ""): 500, ("b", ""): 500, ("c", ""): 500}, {"a": 1000.0, "b": 1000.0}),
    ],
)
def test_every_project_and_group_gets_calls(waiting: Mapping[Owner, int], weights: Mapping[str, float]) -> None:
    ended, _ = simulate(waiting, 3, weights, 100)
    assert min(ended[owner] for owner in waiting) >= (1 if weights else 15), ended


def test_project_without_running_call_does_not_wait_for_room() -> None:
    queue: FairQueue[str] = FairQueue({"a": 1000.0, "b": 1000.0, "c": 1.0}.__getitem__)
    for project in "ab":
        queue.begin(project, "")
        queue.add(project, "", project)
    queue.add("c", "", "c")
    queue.add("c", "", "c")
    assert queue.choose_for_room(0, is_saturated=True) == ["c"]
    assert queue.choose_for_room(0, is_saturated=True) == []
    assert queue.is_idle("d") and not queue.is_idle("c")


@pytest.mark.parametrize(
    ("running", "others", "expected"),
    [
        # Without calls elsewhere: the fewest running calls.
        ({"a": 1, "b": 2}, {}, "a"),
        # Project `a` has most of its calls elsewhere, so its part here is small.
        ({"a": 1, "b": 2}, {"a": 20}, "b"),
        ({"a": 3, "b": 20}, {"a": 20}, "a"),
        # A project without a running call here comes first, however small its part is.
        ({"b": 2}, {"a": 900}, "a"),
        ({"a": 2}, {"b": 900}, "b"),
        # Calls of other projects elsewhere change nothing here.
        ({"a": 1, "b": 2}, {"c": 50}, "a"),
    ],
)
def test_choice_compares_parts_of_this_cell(
    running: Mapping[str, int], others: Mapping[str, int], expected: str
) -> None:
    queue: FairQueue[str] = FairQueue(lambda project: 1.0)
    for project, calls in running.items():
        for _ in range(calls):
            queue.begin(project, "")
    for project in ("a", "b"):
        for _ in range(20):
            queue.add(project, "", project)
    queue.count_others(OtherCells([ProjectCalls(others)]), 0, 10, is_saturated=True)
    assert queue.choose() == expected


@pytest.mark.parametrize("seed", range(5))
def test_choice_without_other_cells(seed: int) -> None:
    """A project without running calls comes first, then the one with the fewest for its weight. Cells without calls change nothing."""
    rng = random.Random(seed)
    weights = {"a": 1.0, "b": 3.0, "c": 0.5}
    queue: FairQueue[str] = FairQueue(weights.__getitem__)
    running: Counter[str] = Counter()
    waiting: Counter[str] = Counter()  # in the order in which the projects were last chosen or began to wait
    for step in range(2000):
        project = rng.choice("abc")
        match rng.choice(["add", "end", "report", "poll"]):
            case "add":
                queue.add(project, "", project)
                waiting[project] += 1
            case "end" if running[project]:
                queue.end(project, "")
                running[project] -= 1
                assert queue.choose() == choose(waiting, running, weights)
            case "report":
                queue.count_others(OtherCells([ProjectCalls()]), step, 10, is_saturated=rng.random() < 0.5)
            case "poll":
                has_room = rng.random() < 0.1
                calls = waiting.total() if has_room else sum(not running[project] for project in waiting)
                chosen = [choose(waiting, running, weights) for _ in range(calls)]
                assert queue.choose_for_room(step, is_saturated=not has_room) == chosen
        assert not any(map(queue.is_limited, "abc"))
        assert [queue.is_idle(name) for name in "abc"] == [not running[name] and name not in waiting for name in "abc"]
        assert (queue.running, queue.waiting) == (running.total(), waiting.total())


def choose(waiting: Counter[str], running: Counter[str], weights: Mapping[str, float]) -> str | None:
    """Choose the next call as one gateway without other cells does."""
    if not waiting:
        return None
    project = min(waiting, key=lambda name: (running[name] > 0, (running[name] + 1) / weights[name]))
    running[project] += 1
    if left := waiting.pop(project) - 1:
        waiting[project] = left
    return project


def limited_queue(*, is_saturated: bool = True) -> FairQueue[str]:
    """Return a queue in which project `a` exceeds its part, until time 100: 4 of its calls run, and 4 wait."""
    queue: FairQueue[str] = FairQueue(lambda project: 1.0)
    for _ in range(4):
        queue.begin("a", "")
        queue.add("a", "", "a")
    queue.count_others(OtherCells([ProjectCalls({}, {"b": 50})]), 0, 100, is_saturated=is_saturated)
    return queue


def test_calls_that_end_leave_room_for_other_cells() -> None:
    queue = limited_queue()
    admitted = []
    for _ in range(4):
        queue.end("a", "")
        admitted.append(queue.choose())
    assert admitted == [None, None, "a", "a"]  # two of four are given up
    assert queue.is_limited("a") and not queue.is_limited("b")


def test_a_project_keeps_its_calls_while_the_engines_have_room() -> None:
    queue = limited_queue(is_saturated=False)
    assert queue.is_limited("a") and queue.choose_for_room(1, is_saturated=False) == []
    queue.end("a", "")
    assert queue.choose() == "a" and queue.choose() is None


def test_room_that_other_cells_do_not_use_is_used() -> None:
    queue = limited_queue()
    for now, is_saturated, admitted in [
        (0.0, False, []),
        (YIELD_S - 0.5, False, []),
        (YIELD_S, True, []),  # the other cell used it
        (YIELD_S + 0.5, False, []),
        (2 * YIELD_S, False, []),
        (2 * YIELD_S + 0.5, False, ["a"]),
        (2 * YIELD_S + 1, True, []),
    ]:
        assert queue.choose_for_room(now, is_saturated=is_saturated) == admitted, now


def test_old_numbers_of_other_cells_do_not_count() -> None:
    queue = limited_queue()
    assert queue.choose_for_room(99.9, is_saturated=True) == [] and queue.is_limited("a")
    assert queue.choose_for_room(100, is_saturated=True) == [] and not queue.is_limited("a")
    queue.end("a", "")
    assert queue.choose() == "a"
    assert queue.choose_for_room(100.1, is_saturated=False) == ["a"] * 3  # as without other cells


async def test_gateway_that_no_longer_reads_other_cells_serves_its_calls() -> None:
    shares = FairShares(lambda: True, lambda project: 1.0)
    for _ in range(3):
        shares.queue.begin("a", "")
    call = asyncio.create_task(shares.enter("a", ""))
    await asyncio.sleep(0)
    shares.count_others(OtherCells([ProjectCalls({}, {"b": 50})]), fresh_s=0.2)
    shares.leave("a", "")
    assert shares.queue.is_limited("a") and not call.done()
    await until(lambda: not shares.queue.is_limited("a"))
    shares.leave("a", "")
    await call
    await shares.close()


async def test_new_call_waits_if_its_project_has_its_part() -> None:
    shares = FairShares(lambda: False, lambda project: 1.0)
    for project in ("a", "a", "c"):
        await shares.enter(project, "")
    shares.count_others(OtherCells([ProjectCalls({"a": 2}, {"b": 50})]), fresh_s=60)
    assert not shares.is_contended
    assert [shares.must_wait(project) for project in ("a", "b", "c")] == [True, False, True]
    shares.count_others(OtherCells([ProjectCalls({"a": 2}, {})]), fresh_s=60)  # no call waits any more
    assert [shares.must_wait(project) for project in ("a", "b", "c")] == [False, False, False]


@pytest.mark.parametrize("others", [[], [ProjectCalls({"b": 9}, {"b": 9})]])
async def test_first_call_of_a_project_does_not_wait(others: list[ProjectCalls]) -> None:
    shares = FairShares(lambda: True, lambda project: 1.0)
    shares.queue.begin("a", "")
    shares.count_others(OtherCells(others), fresh_s=0.0)
    assert not shares.must_wait("b") and shares.must_wait("a")
    await shares.enter("b", "")
    assert shares.must_wait("b")
    assert shares.queue.choose_for_room(float("inf"), is_saturated=True) == []  # the reports are too old now
    shares.leave("b", "")
    assert not shares.must_wait("b")


def test_no_more_calls_are_let_in_than_engines_have_room_for() -> None:
    queue: FairQueue[str] = FairQueue(lambda project: 1.0)
    for project in ("a", "b"):
        queue.begin(project, "")
        for _ in range(20):
            queue.add(project, "", project)
    assert queue.choose_for_room(0, is_saturated=False, room=5) == ["a", "b", "a", "b", "a"]
    assert queue.choose_for_room(0, is_saturated=False, room=0) == []
    assert len(queue.choose_for_room(0, is_saturated=False)) == 35


def test_calls_of_one_group_keep_their_order() -> None:
    queue: FairQueue[int] = FairQueue(lambda project: 1.0)
    for number in range(5):
        queue.add("a", "g", number)
    assert queue.remove("a", "g", 2) and not queue.remove("a", "g", 2) and not queue.remove("b", "g", 0)
    assert [queue.choose() for _ in range(5)] == [0, 1, 3, 4, None]
    assert (queue.running, queue.waiting) == (4, 0)


async def test_cancelled_calls_give_up_their_place() -> None:
    saturated = True
    shares = FairShares(lambda: saturated, lambda project: 1.0)
    await shares.enter("a", "")  # the first one never waits
    calls = [asyncio.create_task(shares.enter("a", str(n))) for n in range(3)]
    await asyncio.sleep(0)
    assert shares.queue.waiting == 3
    calls[0].cancel()
    shares.leave("a", "")
    await asyncio.gather(calls[0], return_exceptions=True)
    await until(lambda: calls[1].done())
    assert (shares.queue.running, shares.queue.waiting) == (1, 1)
    calls[1].result()
    saturated = False
    await until(lambda: calls[2].done())  # the engines have room again
    assert (shares.queue.running, shares.queue.waiting) == (2, 0)
    await shares.close()


async def test_small_project_is_served_beside_a_greedy_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Gated(lambda request, n: say("Hello."))
    async with gateway(engine=engine) as g:
        for project in ("greedy", "small"):
            await create_project(g, project)
        clients = {project: await project_client(g, project) for project in ("greedy", "small")}

        async def start(project: str, calls: int) -> list[asyncio.Task[object]]:
            opened = [(await clients[project].post("/admin/sessions", json={})).json() for _ in range(calls)]
            return [g.start(g.ask(session["api_key"], "Hi")) for session in opened]

        first = await start("greedy", 4)
        await until(lambda: engine.waiting == 4)  # they run, since the engines have room
        monkeypatch.setattr(g.app.shares, "is_saturated", lambda: True)
        queued = await start("greedy", 6)
        await until(lambda: g.app.shares.queue.waiting == 6)
        late = await start("small", 2)
        await until(lambda: g.app.shares.queue.waiting == 7 and engine.waiting == 5)  # its first call does not wait
        engine.gate.set()
        await asyncio.gather(*first, *queued, *late)
        order = [request.session.partition("/")[0] for request in engine.received]
        # The small project came last, and its second call is served first when calls end.
        assert order[:4] == ["greedy"] * 4 and order[4:6] == ["small"] * 2
        assert (g.app.shares.queue.running, g.app.shares.queue.waiting) == (0, 0)


async def test_hold_does_not_let_all_calls_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """During a weight update the engines run empty. Calls must not gather at the fence and flood the engines after it."""
    saturated, held = True, False
    shares = FairShares(lambda: saturated, lambda project: 1.0, lambda: held)
    monkeypatch.setattr(fair_shares, "_SETTLE_S", scaled(0.5))
    await shares.enter("a", "")
    calls = [asyncio.create_task(shares.enter(project, "")) for project in ("a", "a", "b", "b")]
    try:
        await until(lambda: shares.queue.running == 2)  # the first call of b does not wait
        held, saturated = True, False
        await asyncio.sleep(3 * fair_shares.POLL_S)
        assert (shares.queue.running, shares.queue.waiting) == (2, 3), (
            "an engine without calls is no room during a hold"
        )
        shares.leave("a", "")
        assert shares.queue.running == 2, "a call that ends lets another one in"
        held = False
        await until(lambda: shares.queue.waiting == 0)  # the readings count again
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await shares.close()
