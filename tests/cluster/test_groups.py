"""Complete groups for trainers on Ray."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.cluster.ray_kit import ROOT, ray_python, start_ray
from tests.feed.kit import training
from tests.speed import scaled
from turngate.client.feed import Feed, FeedConfig
from turngate.trainers.ray.groups import FeedActor


@pytest.mark.real
@pytest.mark.needs("ray")
async def test_actors_of_a_trainer_share_the_groups_of_a_feed() -> None:
    with start_ray() as cluster:
        async with training() as t:
            environment = cluster.environment(TURNGATE_ADMIN_KEY=t.g.app.admin_key)
            trainer = await asyncio.create_subprocess_exec(
                str(ray_python()),
                str(ROOT / "tests" / "cluster" / "group_trainer.py"),
                cluster.address,
                t.g.root,
                env=environment,
                stdout=asyncio.subprocess.PIPE,
            )
            assert trainer.stdout is not None
            async with asyncio.timeout(scaled(120)):
                opened = json.loads(await trainer.stdout.readline())
                for group in range(4):
                    await t.rollout(1.0, f"g{group}")
                    await t.rollout(0.0, f"g{group}")
                done = json.loads(await trainer.stdout.readline())
                assert await trainer.wait() == 0
            numbers = sorted(number for part in done["trained"] for number, _ in part)
            assert numbers == [1, 2, 3, 4], "each group is handed out once"
            assert all(tokens > 0 for part in done["trained"] for _, tokens in part)
            feed = await t.client.show_feed("f")
            assert (feed.mark, feed.committed) == (opened["mark"], 4)


async def test_reader_of_an_idle_feed_makes_no_other_call_wait() -> None:
    """Neither a commit nor a reader with a shorter time limit waits until the first reader has a group."""
    async with training() as t:
        config = FeedConfig(n=1, advantage="none")
        actor = FeedActor(t.g.root, t.g.app.admin_key, "f", config)
        actor._feed = await Feed.open(t.client, "f", config)
        await t.rollout(1.0)
        first = await actor.next(scaled(5))
        assert first is not None
        patient = asyncio.create_task(actor.next(scaled(20)))
        await asyncio.sleep(0)
        async with asyncio.timeout(scaled(10)):
            await actor.commit(first.number)
            assert await actor.next(0.1) is None
        assert not patient.done()
        assert (await t.client.show_feed("f")).committed == first.number
        await t.rollout(1.0)
        second = await patient
        assert second is not None and second.number == first.number + 1
