"""Fair shares of the engines: by weight, without idle engines, and fair to the groups of a project."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

import pytest

from tests.kit import Gated, gateway, say, until
from tests.projects.kit import create_project, project_client
from turngate.gateway.fair_shares import (
    YIELD_S,
    FairQueue,
    FairShares,
    ProjectCalls,
    divide_fairly,
    limit_calls,
)

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
    ("total", "demands", "weights", "expected"),
    [
        (10, {}, {}, {}),
        (10, {"a": 99}, {}, {"a": 10}),
        (10, {"a": 99, "b": 99}, {}, {"a": 5, "b": 5}),
        (12, {"a": 99, "b": 99}, {"a": 3.0}, {"a": 9, "b": 3}),
        (12, {"a": 99, "b": 2}, {}, {"a": 10, "b": 2}),  # the others divide what one does not use
        (12, {"a": 99, "b": 2, "c": 99}, {"c": 4.0}, {"a": 2, "b": 2, "c": 8}),
        (12, {"a": 4, "b": 2}, {}, {"a": 4, "b": 2}),
        (0, {"a": 4, "b": 2}, {}, {"a": 0, "b": 0}),
    ],
)
def test_divide_fairly(
    total: int, demands: Mapping[str, int], weights: Mapping[str, float], expected: Mapping[str, float]
) -> None:
    assert divide_fairly(total, demands, lambda project: weights.get(project, 1.0)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("own", "others", "weights", "expected"),
    [
        # A project with all the calls gives up half of them to one that waits in another cell.
        (ProjectCalls({"a": 20}, {"a": 9}), ProjectCalls({}, {"b": 50}), {}, {"a": 10}),
        # Each cell gives up its part, however many cells there are.
        (ProjectCalls({"a": 20}, {"a": 9}), ProjectCalls({"a": 60}, {"b": 50}), {}, {"a": 10}),
        # The waiting project gets no more than it asks for.
        (ProjectCalls({"a": 20}, {"a": 9}), ProjectCalls({"a": 20}, {"b": 4}), {}, {"a": 18}),
        (ProjectCalls({"a": 20}, {"a": 9}), ProjectCalls({"b": 20}, {"b": 50}), {"b": 3.0}, {"a": 10}),
        # Only projects that exceed their share give up calls.
        (ProjectCalls({"a": 20, "c": 2}, {"a": 9}), ProjectCalls({"b": 2}, {"b": 50}), {}, {"a": 11}),
        # Shares that are fair: nothing to give up, although calls wait.
        (ProjectCalls({"a": 20}, {"a": 9}), ProjectCalls({"b": 20}, {"b": 50}), {}, {}),
        # Calls that wait only in this cell get the next turns here.
        (ProjectCalls({"a": 20}, {"a": 9, "b": 50}), ProjectCalls({"a": 20}, {"a": 9}), {}, {}),
        (ProjectCalls({"a": 20}, {"b": 50}), ProjectCalls(), {}, {}),
        # The last call of a project in a cell is never given up.
        (ProjectCalls({"a": 1}, {}), ProjectCalls({"a": 9}, {"b": 50}), {"b": 99.0}, {"a": 1}),
    ],
)
def test_project_that_exceeds_its_share_gives_up_calls_to_other_cells(
    own: ProjectCalls, others: ProjectCalls, weights: Mapping[str, float], expected: Mapping[str, int]
) -> None:
    assert limit_calls(own, others, lambda project: weights.get(project, 1.0)) == expected


@pytest.mark.parametrize(
    ("running", "others", "expected"),
    [
        ({"a": 1, "b": 2}, {}, "a"),
        ({"a": 1, "b": 2}, {"a": 1}, "a"),
        ({"a": 1, "b": 2}, {"a": 2}, "b"),
        ({"b": 9}, {"a": 30}, "b"),
        ({}, {"a": 1}, "b"),
        ({}, {"a": 1, "b": 2}, "a"),
        ({}, {"c": 50}, "a"),
    ],
)
def test_choice_counts_calls_in_other_cells(
    running: Mapping[str, int], others: Mapping[str, int], expected: str
) -> None:
    queue: FairQueue[str] = FairQueue(lambda project: 1.0)
    for project, calls in running.items():
        for _ in range(calls):
            queue.begin(project, "")
    for project in ("a", "b"):
        queue.add(project, "", project)
    queue.count_others(ProjectCalls(others), until=10, is_saturated=True)
    assert queue.choose() == expected


def limited_queue(*, is_saturated: bool = True) -> FairQueue[str]:
    """Return a queue in which project `a` exceeds its share, until time 100: 4 of its calls run, and 4 wait."""
    queue: FairQueue[str] = FairQueue(lambda project: 1.0)
    for _ in range(4):
        queue.begin("a", "")
        queue.add("a", "", "a")
    queue.count_others(ProjectCalls({}, {"b": 50}), until=100, is_saturated=is_saturated)
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
    shares.count_others(ProjectCalls({}, {"b": 50}), fresh_s=0.2)
    shares.leave("a", "")
    assert shares.queue.is_limited("a") and not call.done()
    await until(lambda: not shares.queue.is_limited("a"))
    shares.leave("a", "")
    await call
    await shares.close()


async def test_call_waits_only_if_its_project_exceeds_its_share() -> None:
    shares = FairShares(lambda: False, lambda project: 1.0)
    for project in ("a", "a", "c"):
        await shares.enter(project, "")
    shares.count_others(ProjectCalls({}, {"b": 50}), fresh_s=60)
    assert not shares.is_contended
    assert [shares.must_wait(project) for project in ("a", "b", "c")] == [True, False, False]


def test_calls_of_one_group_keep_their_order() -> None:
    queue: FairQueue[int] = FairQueue(lambda project: 1.0)
    for number in range(5):
        queue.add("a", "g", number)
    assert queue.remove("a", "g", 2) and not queue.remove("a", "g", 2) and not queue.remove("b", "g", 0)
    assert [queue.choose() for _ in range(5)] == [0, 1, 3, 4, None]
    assert (queue.running, queue.waiting) == (4, 0)


async def test_cancelled_calls_give_up_their_place() -> None:
    shares = FairShares(lambda: True, lambda project: 1.0)
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
    shares.is_saturated = lambda: False
    await until(lambda: calls[2].done())  # the engines have room again
    assert (shares.queue.running, shares.queue.waiting) == (2, 0)
    await shares.close()


async def test_small_project_is_served_beside_a_greedy_one() -> None:
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
        g.app.shares.is_saturated = lambda: True
        queued = await start("greedy", 6)
        await until(lambda: g.app.shares.queue.waiting == 6)
        late = await start("small", 2)
        await until(lambda: g.app.shares.queue.waiting == 8)
        assert engine.waiting == 4
        engine.gate.set()
        await asyncio.gather(*first, *queued, *late)
        order = [request.session.partition("/")[0] for request in engine.received]
        # The small project came last, and is served first when calls end.
        assert order[:4] == ["greedy"] * 4 and order[4:6] == ["small"] * 2
        assert (g.app.shares.queue.running, g.app.shares.queue.waiting) == (0, 0)
