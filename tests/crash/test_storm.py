"""Twenty kills; `make soak` does two hundred."""

from __future__ import annotations

import pytest

from tests.crash.storm import storm


@pytest.mark.parametrize(("durability", "kills"), [("process", 15), ("disk", 5)])
async def test_nothing_that_an_agent_received_is_lost(durability: str, kills: int) -> None:
    print(await storm(kills, durability=durability, seed=kills))
