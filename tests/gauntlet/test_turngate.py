"""Turngate goes through the Gauntlet in every dialect, with full marks."""

from __future__ import annotations

import aiohttp
import pytest

from gauntlet.gateways.turngate import Turngate
from gauntlet.run import put_through
from gauntlet.scenarios import SCENARIOS
from gauntlet.trial import engine
from gauntlet.voices import VOICES
from tests.kit import real_tokenizer


@pytest.mark.real
async def test_turngate_has_full_marks_in_every_scenario_and_dialect() -> None:
    real_tokenizer("qwen3")  # or this is skipped
    async with aiohttp.ClientSession() as http, engine(http) as mock:
        result = await put_through(Turngate(), http, mock, SCENARIOS, list(VOICES))
    assert not result.trouble
    assert [rollout for rollout in result.rollouts if rollout.trouble] == []
    score = result.score
    assert score.captured == score.turns
    assert score.exact == score.trained == score.learned == score.wanted
    assert score.rows == score.best_rows
    assert (score.twice, score.side, score.lost, score.unseen) == (0, 0, 0, 0)
    assert score.faults_told == score.faults
