"""Rollouts that are too old are not trained, and those that cannot be fresh enough any more are cancelled while they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.feed.kit import Trained, training
from tests.kit import Gated, gateway, say, until
from tests.speed import scaled
from turngate.client.feed import Feed
from turngate.client.gateway import GatewayClient
from turngate.client.protocol import FeedConfig
from turngate.trace.advantage import EPSILON


async def ended(t: Trained, session: str) -> str:
    """Why a session was ended by itself; empty: it is open."""
    shown = await t.g.show(session)
    return str(shown["stop"]) if shown["status"] == "cancelled" else ""


async def looked(t: Trained) -> None:
    """Stale sessions have been looked for."""
    await until(lambda: not t.g.app.stale.is_busy)


# ── when it is handed out ───────────────────────────────────────────────────────────────────────────────────────────


async def test_what_is_too_old_is_marked_and_has_no_say() -> None:
    """Rewards 4 (at version 0), 4, 1, 1 (at version 2). Read at version 2 with a bound of 1, the first is dropped."""
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


async def test_it_is_judged_anew_each_time() -> None:
    async with training() as t, await Feed.open(t.client, "f", FeedConfig(n=1, max_staleness=0)) as feed:
        await t.rollout(1.0)
        found = await feed.next(scaled(5))
        assert found is not None and found.rollouts[0].excluded == "" and found.version == 0
        await t.g.resume(1)
        async with await Feed.open(t.client, "f", FeedConfig(n=1, max_staleness=0)) as again:
            later = await again.next(scaled(5))
            assert later is not None and later.number == found.number and later.version == 1
            assert later.rollouts[0].excluded.startswith("stale") and later.rollouts[0].reward == 1.0


async def test_the_oldest_turn_counts() -> None:
    async with training() as t:
        session = await t.g.open()
        begun = await t.talk(session)
        await t.g.resume(5)
        await t.talk(session, 2, begun)
        await t.g.seal(session.id)
        await t.record(session.id, 1.0)
        config = FeedConfig(n=1, max_staleness=4, from_start=True)
        async with await Feed.open(t.client, "f", config) as feed:
            found = await feed.next(scaled(5))
            assert found is not None and "sampled at version 0" in found.rollouts[0].excluded


# ── while it runs ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_open_sessions_that_cannot_make_it_are_cancelled() -> None:
    async with training() as t:
        await t.client.open_feed("f", FeedConfig(n=4, max_staleness=1, groups="train."))
        old = await t.opened("train.a", turns=2)
        fresh = await t.opened("train.a", turns=0)  # no turn yet
        other = await t.opened("test.a", turns=2)  # of a group that nobody takes
        loose = await t.opened(turns=2, metadata={"mine": 1})  # of no group
        odd = await t.opened(turns=2, metadata={"group": 3})
        await t.g.resume(1)
        await looked(t)
        assert await ended(t, old.id) == ""  # one version is allowed
        await t.talk(fresh, 2)
        await t.g.resume(2)
        await looked(t)
        assert await ended(t, old.id) == "stale"
        assert [await ended(t, s.id) for s in (fresh, other, loose, odd)] == [""] * 4
        [event] = [e for e in t.g.app.events.page(old.id) if e.kind == "cancelled"]
        assert event.data == {"stop": "stale", "turns": 2}
        await t.record(old.id, 1.0, "train.a")  # whoever ran it may still say how it ended
        assert [w.rollouts for w in (await t.client.show_feed("f")).waiting] == [1]


async def test_not_while_another_feed_could_use_it() -> None:
    async with training() as t:
        await t.client.open_feed("strict", FeedConfig(n=4, max_staleness=0))
        await t.client.open_feed("mild", FeedConfig(n=4, max_staleness=2))
        session = await t.opened(turns=2)
        for version, stop in ((1, ""), (2, ""), (3, "stale")):
            await t.g.resume(version)
            await looked(t)
            assert await ended(t, session.id) == stop
        await t.client.open_feed("any", FeedConfig(n=4))
        session = await t.opened(turns=2)
        await t.g.resume(100)
        await looked(t)
        assert await ended(t, session.id) == ""


async def test_what_is_not_trained_makes_nothing_stale() -> None:
    """A title at version 0, the work at version 1: with a bound of 0 the rollout is fresh at version 1."""
    async with training() as t:
        await t.client.open_feed("f", FeedConfig(n=1, max_staleness=0, advantage="none"))
        session = await t.g.open(metadata={"group": "g"}, policy={"roles": ["main"]})
        tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        await t.g.ask(session.key, "Title?")
        await t.g.pause()
        asked = t.g.start(t.g.ask(session.key, "Hi", tools=tools))
        await t.g.resume(1)
        await asked
        await looked(t)
        assert await ended(t, session.id) == ""
        await t.g.seal(session.id)
        await t.record(session.id, 1.0)
        async with await Feed.open(t.client, "f", FeedConfig(n=1, max_staleness=0, advantage="none")) as feed:
            found = await feed.next(scaled(5))
            assert found is not None and found.rollouts[0].excluded == ""


async def test_sessions_that_nobody_used_since_a_restart_are_looked_at_too(tmp_path: Path) -> None:
    async with training(tmp_path) as t:
        await t.client.open_feed("f", FeedConfig(n=4, max_staleness=0))
        session = await t.opened(turns=2)
    async with training(tmp_path) as t:
        await t.g.resume(1)
        await looked(t)
        assert await ended(t, session.id) == "stale"


async def test_a_call_in_flight_is_aborted_with_its_session() -> None:
    engine = Gated(lambda request, index: say("Some answer."), tokens=100)
    async with gateway(engine=engine) as g, GatewayClient(g.root, g.app.admin_key) as client:
        t = Trained(g, client)
        await client.open_feed("f", FeedConfig(n=4, max_staleness=0))
        session = await t.opened(turns=2)
        g.gated.tokens = 0
        asked = g.start(g.ask(session.key, "And now?"))
        await until(lambda: g.gated.waiting)
        await g.resume(1)
        await until(lambda: asked.done())
        assert asked.exception() is not None
        await looked(t)
        assert await ended(t, session.id) == "stale"
