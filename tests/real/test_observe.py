"""Tests for observe mode with real vLLM: agents of every dialect are captured with token ids."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kit import gateway
from tests.real.test_vllm import MAX_TOKENS
from tests.sdk_agents import DIALECTS, agent
from tests.vllm import Model

pytestmark = pytest.mark.full


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_token_ids_are_captured_in_every_dialect(model: Model, dialect: str) -> None:
    most = MAX_TOKENS[model.name]
    async with gateway(observe="openai", engine_url=[model.url], model=model.name) as g:
        session = await g.open(mode="observe", model=model.name, sampling={"temperature": 1.0}, max_tokens=most)
        async with agent(dialect, g.root, session.key, model=model.name, tools=()) as a:  # vLLM needs a tool parser
            first = await a.ask("Say something.")
            await a.ask("Go on.")
        turns = await g.turns(session.id)
        assert len(turns) == 2 and turns[0]["message"].get("content", "") == first.text
        for turn in turns:
            assert (turn["capture"], turn["fault"]) == ("tokens", "")
            assert 0 < len(turn["ids"]) <= most and len(turn["logprobs"]) == len(turn["ids"])
            assert np.isfinite(turn["logprobs"]).all()
        rows = await g.samples(session.id)
        assert sum(span["trained"] for row in rows for span in row["spans"]) == 2
        assert first.usage[0] == rows[0]["spans"][0]["start"] or len(rows) == 2
