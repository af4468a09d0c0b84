"""Complete groups for trainers on Ray."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.cluster.ray_kit import ROOT, ray_python, start_ray
from tests.feed.kit import training
from tests.speed import scaled


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
