"""Tests for feeds with several workers: shared numbering, readers and stale sessions."""

from __future__ import annotations

import asyncio

import pytest

from tests.feed.kit import TrainingGateway, poll_without_end, reader_waits
from tests.kit import until
from tests.server.test_forwarding import Crew, crew
from tests.speed import scaled
from turngate.client.feed import Feed
from turngate.client.gateway import GatewayClient
from turngate.client.protocol import FeedConfig
from turngate.store.outcomes import RecordedOutcome

N = 4


async def rollout(workers: Crew, owner: int, group: str) -> None:
    """Record a rollout at one worker, through its own port."""
    g = workers[owner]
    session = await workers.open_at(owner)
    await g.ask(session.key, "Hi")
    await g.seal(session.id)
    async with GatewayClient(g.root, g.app.admin_key) as client:
        await client.record(session.id, RecordedOutcome(kind="graded", reward=float(owner), group=group, task="t"))


async def test_groups_completed_by_several_workers_are_numbered_once() -> None:
    async with crew() as workers:
        g = workers[1]
        async with (
            GatewayClient(g.root, g.app.admin_key) as client,
            await Feed.open(client, "f", FeedConfig(n=N, advantage="none")) as feed,
        ):
            # The reader waits at worker 1, while worker 0 also writes.
            waiting = asyncio.create_task(feed.next(scaled(20)))
            work = [rollout(workers, n % 2, f"g{n // N}") for n in range(3 * N)]
            await asyncio.gather(*work)
            found = [await waiting, await feed.next(scaled(5)), await feed.next(scaled(5))]
            assert [delivery.number for delivery in found if delivery is not None] == [1, 2, 3]
            assert sorted(delivery.group for delivery in found if delivery is not None) == ["g0", "g1", "g2"]
            sessions = [member.session for delivery in found if delivery is not None for member in delivery.rollouts]
            assert len(sessions) == len(set(sessions)) == 3 * N
            assert await feed.next(0) is None


async def test_reader_is_woken_by_another_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    poll_without_end(monkeypatch)
    async with crew() as workers:
        g = workers[1]
        async with (
            GatewayClient(g.root, g.app.admin_key) as client,
            await Feed.open(client, "f", FeedConfig(n=1, advantage="none")) as feed,
        ):
            waiting = asyncio.create_task(feed.next(3600))
            await reader_waits(g)
            await rollout(workers, 0, "g")
            found = await asyncio.wait_for(waiting, scaled(5))
            assert found is not None and found.rollouts[0].reward == 0.0


async def test_stale_sessions_are_cancelled_on_every_worker() -> None:
    async with crew() as workers:
        g = workers[0]
        async with GatewayClient(g.root, g.app.admin_key) as client:
            await client.open_feed("f", FeedConfig(n=N, max_staleness=0))
            opened = [await workers.open_at(owner, metadata={"group": "g"}) for owner in (0, 1)]
            for worker, session in zip(workers.workers, opened, strict=True):
                await TrainingGateway(worker, client).talk(session, 2)
            await workers[1].resume(1)
            await until(lambda: not any(worker.app.stale.is_busy for worker in workers.workers))
            for session in opened:
                shown = await g.show(session.id)
                assert (shown["status"], shown["stop"]) == ("cancelled", "stale")
