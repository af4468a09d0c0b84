"""Kill the gateway while agents work: 20 times, or 200 times in `make soak`."""

from __future__ import annotations

import pytest

from tests.crash.storm import storm

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.full]


@pytest.mark.real
@pytest.mark.promise(5)
@pytest.mark.parametrize(("durability", "kills"), [("process", 150), ("disk", 50)])
async def test_no_received_answer_is_lost(durability: str, kills: int, storm_scale: float) -> None:
    print(await storm(round(kills * storm_scale), durability=durability, seed=kills))
