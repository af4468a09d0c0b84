"""Tests that the official SDKs accept the stand-in providers."""

from __future__ import annotations

import pytest

from tests.engines.providers import KEY, PROVIDERS, ModelTurn, Provider
from tests.engines.standins import serving
from tests.sdk_agents import Reply, agent

SCRIPT = (
    ModelTurn("Let me look.", "I should look around.", (("read_file", {"path": "a"}), ("list_files", {"path": "."}))),
    ModelTurn("Done.", "That was easy."),
)
DIALECT = {"openai": "chat", "anthropic": "messages", "gemini": "gemini", "responses": "responses"}


@pytest.mark.parametrize("kind", PROVIDERS, ids=lambda kind: kind.name)
async def test_sdk_accepts_stand_in(kind: type[Provider]) -> None:
    async with serving(kind(*SCRIPT)) as server, agent(DIALECT[kind.name], server.url, KEY) as a:
        first = await a.ask("Look around.")
        assert (first.text, first.thought, first.finish) == (SCRIPT[0].text, SCRIPT[0].thought, "calls")
        assert [(call.name, call.arguments) for call in first.calls] == list(SCRIPT[0].calls)
        assert first.usage == (SCRIPT[0].prompt, SCRIPT[0].sampled, 7)
        last: Reply = await a.answer({"read_file": "text", "list_files": "a b"})
        assert (last.text, last.thought, last.calls, last.finish) == (SCRIPT[1].text, SCRIPT[1].thought, [], "stop")
        assert server.refusals == []
