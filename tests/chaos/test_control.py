"""The suite detects what it looks for: a planted loss, duplicate, wrong id and wrong reward."""

from __future__ import annotations

import pytest

from tests.chaos.control import PLANTS, run_control


async def test_undamaged_store_is_clean() -> None:
    found = await run_control(None)
    assert found.total == 0, found.notes


@pytest.mark.parametrize("name", PLANTS)
async def test_planted_damage_is_found(name: str) -> None:
    plant, column = PLANTS[name]
    assert getattr(await run_control(plant), column) == 1
