"""Fair shares of the engines: by weight, without idle engines, and fair to the groups of a project."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

import pytest

from tests.kit import Gated, gateway, say, until
from tests.projects.kit import create_project, project_client
from turngate.gateway.fair_shares import FairQueue, FairShares

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
