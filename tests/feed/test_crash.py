"""Gateway, trainer and runner are killed at random moments; every group is trained once all the same."""

from __future__ import annotations

import pytest

from tests.feed.storm import storm


@pytest.mark.parametrize(("workers", "kills"), [(1, 9), (2, 8)])
async def test_each_group_is_trained_once_whoever_is_killed(workers: int, kills: int) -> None:
    print(await storm(kills, seed=workers, workers=workers))
