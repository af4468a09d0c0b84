"""Test observe mode end to end: an SDK agent, the gateway, and an endpoint of the same or another dialect.

The endpoints (`tests/engines/providers.py`) are strict: they answer only calls that the real provider would accept.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest

from tests.engines.providers import KEY, PROVIDERS, ChatProvider, ModelTurn, Provider
from tests.engines.standins import serving
from tests.kit import OpenSession, Running, gateway
from tests.sdk_agents import DIALECTS, SYSTEM, Agent, agent

OWN = {"openai": "chat", "anthropic": "messages", "gemini": "gemini", "responses": "responses"}
RESULTS = {"read_file": "the text", "list_files": "a b"}
SCRIPT = (
    ModelTurn(
        "Let me look.", "I should look around.", (("read_file", {"path": "a.py"}), ("list_files", {"path": "."}))
    ),
    ModelTurn("", "One more.", (("read_file", {"path": "b.py"}),)),
    ModelTurn("All is well: grüße 🙂.", "Now I know."),
)
every_endpoint = pytest.mark.parametrize("endpoint", PROVIDERS, ids=lambda kind: kind.name)
every_dialect = pytest.mark.parametrize("dialect", DIALECTS)
streamed_or_not = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


class Scene(NamedTuple):
    provider: Provider
    gateway: Running
    session: OpenSession
    agent: Agent


@asynccontextmanager
async def scene(
    provider: Provider, dialect: str, monkeypatch: pytest.MonkeyPatch, *, stream: bool = True, **session: object
) -> AsyncIterator[Scene]:
    monkeypatch.setenv("PROVIDER_KEY", KEY)
    async with (
        serving(provider),
        gateway(observe=provider.name, engine_url=[provider.url], engine_key_env="PROVIDER_KEY") as g,
    ):
        opened = await g.open(mode="observe", **session)
        async with agent(dialect, g.root, opened.key, stream=stream) as a:
            yield Scene(provider, g, opened, a)


async def converse(a: Agent) -> list[object]:
    return [await a.ask("Look around."), await a.answer(RESULTS), await a.answer(RESULTS)]


@pytest.mark.sample(8)
@every_endpoint
@every_dialect
@streamed_or_not
async def test_conversation_with_tools_and_thinking(
    dialect: str, endpoint: type[Provider], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(endpoint(*SCRIPT), dialect, monkeypatch, stream=stream) as s:
        first = await s.agent.ask("Look around.")
        assert (first.text, first.thought, first.finish) == (SCRIPT[0].text, SCRIPT[0].thought, "calls")
        assert [(call.name, call.arguments) for call in first.calls] == list(SCRIPT[0].calls)
        assert len({call.id for call in first.calls}) == 2 and all(call.id for call in first.calls)
        assert first.usage == (SCRIPT[0].prompt, SCRIPT[0].sampled, 7)
        second = await s.agent.answer(RESULTS)
        assert (second.text, second.thought, second.finish) == ("", SCRIPT[1].thought, "calls")
        last = await s.agent.answer(RESULTS)
        assert (last.text, last.thought, last.calls, last.finish) == (SCRIPT[2].text, SCRIPT[2].thought, [], "stop")
        await assert_recorded(s)
        assert_private(s)


async def assert_recorded(s: Scene) -> None:
    """Check that the conversation is one main line with the model's text, captured as text."""
    turns = await s.gateway.turns(s.session.id)
    assert [turn["message"].get("content", "") for turn in turns] == [scripted.text for scripted in SCRIPT]
    assert [turn["message"]["reasoning"] for turn in turns] == [scripted.thought for scripted in SCRIPT]
    assert [turn["finish"] for turn in turns] == ["tool_calls", "tool_calls", "stop"]
    assert {(turn["role"], turn["cause"], turn["capture"], turn["engine"]) for turn in turns} == {
        ("main", None, "text", s.provider.name)
    }
    assert [turn["lost"] for turn in turns] == [[], [], []]
    assert await s.gateway.samples(s.session.id) == []


def assert_private(s: Scene) -> None:
    """Check that the provider got three valid calls and never the agent's key."""
    assert s.provider.refusals == [] and len(s.provider.seen) == 3
    for headers, body in zip(s.provider.headers, s.provider.bodies, strict=True):
        assert s.session.key not in str(dict(headers)) and s.session.key.encode() not in body
    assert SYSTEM in s.provider.bodies[-1].decode() and "the text" in s.provider.bodies[-1].decode()


@pytest.mark.sample(4)
@every_dialect
@streamed_or_not
async def test_vllm_token_ids_make_one_row_in_every_dialect(
    dialect: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in's template renders everything, so a lost thought or argument would start a new row."""
    provider = ChatProvider(*SCRIPT, returns_ids=True)
    async with scene(provider, dialect, monkeypatch, stream=stream, sampling={"temperature": 1.0}) as s:
        await converse(s.agent)
        [row] = await s.gateway.samples(s.session.id)
        assert [span["trained"] for span in row["spans"]] == [True] * 3
        assert row["ids"][: row["spans"][-1]["start"]] == provider.prompt_ids()
        assert bytes(row["ids"]).decode().endswith(provider.render(SCRIPT[2].thought, SCRIPT[2].text, []))
        assert {turn["capture"] for turn in await s.gateway.turns(s.session.id)} == {"tokens"}
