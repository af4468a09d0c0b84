"""Shared helpers for feed tests: rollouts without agents."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import turngate.client.feed
import turngate.gateway.feeds
from tests.kit import Json, OpenSession, Running, gateway, say, until, user
from turngate.client.gateway import GatewayClient
from turngate.store.outcomes import OutcomeClass, RecordedOutcome


def poll_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the poll limit, so that a reader that is not woken fails the test."""
    monkeypatch.setattr(turngate.gateway.feeds, "MAX_WAIT_S", 3600)
    monkeypatch.setattr(turngate.client.feed, "MAX_WAIT_S", 3600)
    monkeypatch.setattr(turngate.client.feed, "_WAIT_S", 3600)


async def reader_waits(g: Running) -> None:
    """Wait until a reader is waiting at this gateway."""
    await until(lambda: g.app.events._followers)


class TrainingGateway(NamedTuple):
    """A gateway with a trainer's client."""

    g: Running
    client: GatewayClient

    async def open_session(self, group: str = "g", turns: int = 1, **config: Any) -> OpenSession:
        """Open a session and run `turns` turns in it."""
        config.setdefault("metadata", {"group": group})
        session = await self.g.open(**config)
        await self.talk(session, turns)
        return session

    async def talk(self, session: OpenSession, turns: int = 1, messages: Json = None) -> Json:
        """Run more turns and return the conversation."""
        messages = [user("Hi")] if messages is None else messages
        for turn in range(turns):
            said = await self.g.ask(session.key, messages)
            messages = [*messages, said.message(), user(f"Go on {turn}")]
        return messages

    async def branch(self, session: OpenSession, branches: int) -> None:
        """Run one turn and `branches` turns that each continue it, one row per branch."""
        said = await self.g.ask(session.key, "Hi")
        for branch in range(branches):
            await self.g.ask(session.key, [user("Hi"), said.message(), user(f"Way {branch}")])

    async def record(
        self, session: str, reward: float | None, group: str = "g", kind: OutcomeClass = "graded", **more: Any
    ) -> None:
        await self.client.record(session, RecordedOutcome(kind=kind, reward=reward, group=group, task="t", **more))

    async def rollout(self, reward: float | None, group: str = "g", *, turns: int = 1, **more: Any) -> str:
        """Record a complete rollout and return its session id."""
        session = await self.open_session(group, turns)
        await self.g.seal(session.id)
        await self.record(session.id, reward, group, **more)
        return session.id


@asynccontextmanager
async def training(data: Path | None = None, **config: Any) -> AsyncIterator[TrainingGateway]:
    async with (
        gateway(lambda request, index: say(f"Answer {index}."), data=data, **config) as g,
        GatewayClient(g.root, g.app.admin_key) as client,
    ):
        yield TrainingGateway(g, client)
