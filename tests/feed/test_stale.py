"""Tests for staleness: stale rollouts are excluded, and hopeless ones are cancelled while running."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.feed.kit import TrainingGateway, training
from tests.kit import Gated, gateway, say, until
from tests.speed import scaled
from turngate.client.feed import Feed
from turngate.client.gateway import GatewayClient
from turngate.client.protocol import FeedConfig
from turngate.trace.advantage import EPSILON


async def stop_reason(t: TrainingGateway, session: str) -> str:
    """The stop reason of a cancelled session, or an empty string."""
    shown = await t.g.show(session)
    return str(shown["stop"]) if shown["status"] == "cancelled" else ""


async def stale_check_done(t: TrainingGateway) -> None:
    """Wait until the search for stale sessions is done."""
    await until(lambda: not t.g.app.stale.is_busy)


# ── at delivery ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_stale_rollout_is_excluded() -> None:
    """Rewards 4 (version 0) and 4, 1, 1 (version 2): read at version 2 with a bound of 1, the first is excluded."""
    async with training() as t:
        for name, bound in (("one", 1), ("two", 2), ("none", None)):
            await t.client.open_feed(name, FeedConfig(n=4, max_staleness=bound))
        old = await t.rollout(4.0)
        await t.g.resume(2)
        for reward in (4.0, 1.0, 1.0):
            await t.rollout(reward)
        root = 2**0.5 + EPSILON
        async with await Feed.open(t.client, "one", FeedConfig(n=4, max_staleness=1)) as feed:
            found = await feed.next(scaled(5))
            assert found is not None and found.version == 2 and found.rollouts[0].session == old
            assert (
                found.rollouts[0].excluded
                == "stale: sampled at version 0; the current version is 2 and max_staleness is 1"
            )
            assert found.rollouts[0].advantage is None and not found.rollouts[0].rows
            assert [r.advantage for r in found.rollouts[1:]] == pytest.approx([2 / root, -1 / root, -1 / root])
        for name, bound in (("two", 2), ("none", None)):
            async with await Feed.open(t.client, name, FeedConfig(n=4, max_staleness=bound)) as feed:
                found = await feed.next(scaled(5))
                assert found is not None and [r.excluded for r in found.rollouts] == [""] * 4


async def test_staleness_is_checked_at_each_read() -> None:
    async with training() as t, await Feed.open(t.client, "f", FeedConfig(n=1, max_staleness=0)) as feed:
        await t.rollout(1.0)
        found = await feed.next(scaled(5))
        assert found is not None and found.rollouts[0].excluded == "" and found.version == 0
        await t.g.resume(1)
        async with await Feed.open(t.client, "f", FeedConfig(n=1, max_staleness=0)) as again:
            later = await again.next(scaled(5))
            assert later is not None and later.number == found.number and later.version == 1
            assert later.rollouts[0].excluded.startswith("stale") and later.rollouts[0].reward == 1.0


async def test_oldest_turn_decides_staleness() -> None:
    async with training() as t:
        session = await t.g.open()
        messages = await t.talk(session)
        await t.g.resume(5)
        await t.talk(session, 2, messages)
        await t.g.seal(session.id)
        await t.record(session.id, 1.0)
        config = FeedConfig(n=1, max_staleness=4, from_start=True)
        async with await Feed.open(t.client, "f", config) as feed:
            found = await feed.next(scaled(5))
            assert found is not None and "sampled at version 0" in found.rollouts[0].excluded


# ── while running ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_open_stale_sessions_are_cancelled() -> None:
    async with training() as t:
        await t.client.open_feed("f", FeedConfig(n=4, max_staleness=1, groups="train."))
        old = await t.open_session("train.a", turns=2)
        fresh = await t.open_session("train.a", turns=0)  # no turn yet
        other = await t.open_session("test.a", turns=2)  # in a group without a feed
        loose = await t.open_session(turns=2, metadata={"mine": 1})  # without a group
        odd = await t.open_session(turns=2, metadata={"group": 3})
        await t.g.resume(1)
        await stale_check_done(t)
        assert await stop_reason(t, old.id) == ""  # one version is allowed
        await t.talk(fresh, 2)
        await t.g.resume(2)
        await stale_check_done(t)
        assert await stop_reason(t, old.id) == "stale"
        assert [await stop_reason(t, s.id) for s in (fresh, other, loose, odd)] == [""] * 4
        [event] = [e for e in t.g.app.events.page(old.id) if e.kind == "cancelled"]
        assert event.data == {"stop": "stale", "turns": 2}
        await t.record(old.id, 1.0, "train.a")  # its outcome can still be recorded, but does not count
        shown = await t.client.show(old.id)
        assert shown.outcome is not None and "its session was cancelled" in shown.excluded
        assert (await t.client.show_feed("f")).waiting == ()


async def test_session_is_kept_while_another_feed_accepts_it() -> None:
    async with training() as t:
        await t.client.open_feed("strict", FeedConfig(n=4, max_staleness=0))
        await t.client.open_feed("mild", FeedConfig(n=4, max_staleness=2))
        session = await t.open_session(turns=2)
        for version, stop in ((1, ""), (2, ""), (3, "stale")):
            await t.g.resume(version)
            await stale_check_done(t)
            assert await stop_reason(t, session.id) == stop
        await t.client.open_feed("any", FeedConfig(n=4))
        session = await t.open_session(turns=2)
        await t.g.resume(100)
        await stale_check_done(t)
        assert await stop_reason(t, session.id) == ""


async def test_untrained_turns_do_not_make_session_stale() -> None:
    """An untrained title at version 0 does not make the work at version 1 stale."""
    async with training() as t:
        await t.client.open_feed("f", FeedConfig(n=1, max_staleness=0, advantage="none"))
        session = await t.g.open(metadata={"group": "g"}, policy={"roles": ["main"]})
        tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        await t.g.ask(session.key, "Title?")
        await t.g.pause()
        call = t.g.start(t.g.ask(session.key, "Hi", tools=tools))
        await t.g.resume(1)
        await call
        await stale_check_done(t)
        assert await stop_reason(t, session.id) == ""
        await t.g.seal(session.id)
        await t.record(session.id, 1.0)
        async with await Feed.open(t.client, "f", FeedConfig(n=1, max_staleness=0, advantage="none")) as feed:
            found = await feed.next(scaled(5))
            assert found is not None and found.rollouts[0].excluded == ""


async def test_stale_sessions_are_cancelled_after_restart(tmp_path: Path) -> None:
    async with training(tmp_path) as t:
        await t.client.open_feed("f", FeedConfig(n=4, max_staleness=0))
        session = await t.open_session(turns=2)
    async with training(tmp_path) as t:
        await t.g.resume(1)
        await stale_check_done(t)
        assert await stop_reason(t, session.id) == "stale"


async def test_call_in_flight_is_aborted_with_stale_session() -> None:
    engine = Gated(lambda request, index: say("Some answer."), tokens=100)
    async with gateway(engine=engine) as g, GatewayClient(g.root, g.app.admin_key) as client:
        t = TrainingGateway(g, client)
        await client.open_feed("f", FeedConfig(n=4, max_staleness=0))
        session = await t.open_session(turns=2)
        g.gated.tokens = 0
        call = g.start(g.ask(session.key, "And now?"))
        await until(lambda: g.gated.waiting)
        await g.resume(1)
        await until(lambda: call.done())
        assert call.exception() is not None
        await stale_check_done(t)
        assert await stop_reason(t, session.id) == "stale"
