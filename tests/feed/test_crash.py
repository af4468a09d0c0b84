"""Test that every group is trained exactly once while gateway, trainer and runner are killed at random."""

from __future__ import annotations

import pytest

from tests.feed.storm import storm

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.full]


@pytest.mark.real
@pytest.mark.parametrize(("workers", "kills"), [(1, 90), (2, 80)])
async def test_kills_train_each_group_once(workers: int, kills: int, storm_scale: float) -> None:
    print(await storm(round(kills * storm_scale), seed=workers, workers=workers))
