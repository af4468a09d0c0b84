"""Tests for feeds: group completion, numbering, single reader, commits, long polling and restarts."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

import turngate.gateway.deliveries
import turngate.gateway.feeds
from tests.feed.kit import TrainingGateway, poll_without_end, reader_waits, training
from tests.kit import gateway, say, until
from tests.speed import scaled
from turngate.client.feed import Delivery, Feed, OtherFeed, TakenOver
from turngate.client.gateway import GatewayClient, RequestRejected
from turngate.client.protocol import FeedConfig
from turngate.store.events import new_event
from turngate.store.outcomes import RecordedOutcome
from turngate.trace.session import SessionConfig

PLAIN = FeedConfig(n=2, advantage="none")


async def all_deliveries(t: TrainingGateway, name: str = "f", after: int = 0) -> list[Delivery]:
    """All deliveries of a feed after a number."""
    view = await t.client.show_feed(name)
    async with await Feed.open(t.client, name, view.config, after=after) as feed:
        found = [await feed.next(scaled(5)) for _ in range(view.newest - after)]
    return [delivery for delivery in found if delivery is not None]


def summarize(deliveries: list[Delivery]) -> list[tuple[int, str, list[float | None]]]:
    return [(d.number, d.group, [r.reward for r in d.rollouts]) for d in deliveries]


# ── groups and numbers ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_groups_are_numbered_in_completion_order() -> None:
    async with training() as t:
        await t.client.open_feed("f", PLAIN)
        await t.rollout(1.0, "a")
        await t.rollout(2.0, "b")
        view = await t.client.show_feed("f")
        assert view.newest == 0 and [(w.group, w.rollouts) for w in view.waiting] == [("a", 1), ("b", 1)]
        await t.rollout(3.0, "b")
        await t.rollout(4.0, "a")
        await t.rollout(5.0, "a")  # the next two rollouts of the group form another delivery
        await t.rollout(6.0, "a")
        assert summarize(await all_deliveries(t)) == [(1, "b", [2.0, 3.0]), (2, "a", [1.0, 4.0]), (3, "a", [5.0, 6.0])]
        events = [event.data for event in t.g.app.events.page() if event.kind == "delivery"]
        assert events == [
            {"feed": "f", "number": number, "group": group, "rollouts": 2}
            for number, group in ((1, "b"), (2, "a"), (3, "a"))
        ]


async def test_infrastructure_faults_do_not_count() -> None:
    async with training() as t:
        await t.client.open_feed("f", PLAIN)
        await t.rollout(1.0)
        await t.rollout(None, kind="infrastructure fault")
        assert (await t.client.show_feed("f")).newest == 0
        await t.rollout(None, kind="invalid task")  # a final outcome, so it counts
        assert summarize(await all_deliveries(t)) == [(1, "g", [1.0, None])]


async def test_closed_group_is_delivered() -> None:
    async with training() as t:
        await t.client.open_feed("f", FeedConfig(n=8, advantage="none"))
        await t.rollout(1.0, "batch/task.1")
        await t.rollout(2.0, "batch/task.2")
        await t.client.close_group("batch/task.1")
        await t.client.close_group("batch/task.1")
        await t.client.close_group("of nobody")
        assert summarize(await all_deliveries(t)) == [(1, "batch/task.1", [1.0])]
        response = await t.g.admin.post("/admin/groups/batch%2Ftask.2/close")
        assert response.json() == {"group": "batch/task.2", "deliveries": {"f": 2}}
        assert summarize(await all_deliveries(t, after=1)) == [(2, "batch/task.2", [2.0])]


async def test_rollout_without_group_is_delivered_alone() -> None:
    async with training() as t:
        await t.client.open_feed("f", FeedConfig(n=8, advantage="none"))
        await t.rollout(1.0, "")
        await t.rollout(2.0, "")
        assert summarize(await all_deliveries(t)) == [(1, "", [1.0]), (2, "", [2.0])]


async def test_feed_filters_groups_by_prefix() -> None:
    async with training() as t:
        for name, groups in (("all", ""), ("train", "train."), ("test", "test.")):
            await t.client.open_feed(name, FeedConfig(n=1, advantage="none", groups=groups))
        for reward, group in enumerate(("train.a", "test.a", "train.b")):
            await t.rollout(float(reward), group)
        assert [d.group for d in await all_deliveries(t, "all")] == ["train.a", "test.a", "train.b"]
        assert [(d.number, d.group) for d in await all_deliveries(t, "train")] == [(1, "train.a"), (2, "train.b")]
        assert [d.group for d in await all_deliveries(t, "test")] == ["test.a"]
        assert [feed.name for feed in await t.client.feeds()] == ["all", "train", "test"]


async def test_feed_starts_now_or_from_start() -> None:
    async with training() as t:
        await t.rollout(1.0, "old")
        await t.rollout(2.0, "half")
        await t.client.open_feed("now", FeedConfig(n=1, advantage="none"))
        await t.client.open_feed("all", FeedConfig(n=2, advantage="none", from_start=True))
        await t.rollout(3.0, "half")
        assert [d.group for d in await all_deliveries(t, "now")] == ["half"]
        assert summarize(await all_deliveries(t, "all")) == [(1, "half", [2.0, 3.0])]
        assert [w.group for w in (await t.client.show_feed("all")).waiting] == ["old"]


async def test_reader_is_warned_of_groups_of_other_size(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The small feed splits groups of four. The large one waits, unless the group was closed before the feed was opened."""
    monkeypatch.setattr("turngate.client.group_sizes._FIRST_LOOK_S", 0.02)
    monkeypatch.setattr("turngate.client.group_sizes._REPORT_S", 0.01)
    async with training() as t:
        for _ in range(4):
            await t.rollout(1.0, "batch.task")
        await t.client.close_group("batch.task")
        small = await Feed.open(t.client, "small", FeedConfig(n=2, from_start=True))
        assert [d is not None and len(d.rollouts) for d in (await small.next(5), await small.next(5))] == [2, 2]
        assert caplog.messages == [
            "feed small: group batch.task is split into several deliveries; if the batch's groups are larger than 2, "
            "open a feed with another name and set its n to the batch's --n"
        ]
        for _ in range(4):
            await t.rollout(1.0, "batch.open")
        large = await Feed.open(t.client, "large", FeedConfig(n=8, from_start=True))
        closed = await large.next(5)
        assert closed is not None and (closed.group, len(closed.rollouts)) == ("batch.task", 4)
        assert "feed large: group batch.task was closed with 4 of 8 rollouts; " in caplog.messages[-1]
        caplog.clear()
        while len(caplog.messages) < 2:  # the test's timeout ends it
            assert await large.next(0.03) is None
        wait, stuck, *_ = caplog.messages
        assert "a group is delivered when" not in wait and "a group is delivered when" in stuck
        for message in (wait, stuck):
            assert message.startswith("feed large: still waiting for a group after ")
            assert "s: group batch.open has 4 of 8 rollouts" in message


async def test_numbered_delivery_never_changes() -> None:
    async with training() as t:
        await t.client.open_feed("f", PLAIN)
        first = await t.rollout(1.0)
        replaced = {"kind": "graded", "reward": 7.0, "group": "g", "task": "t"}
        path = f"/admin/sessions/{first}/outcome?replace=1"
        assert (await t.g.admin.put(path, json=replaced)).is_success  # before delivery, the newer outcome wins
        await t.rollout(2.0)
        assert summarize(await all_deliveries(t)) == [(1, "g", [7.0, 2.0])]
        assert (await t.g.admin.put(path, json={**replaced, "reward": 9.0})).is_success
        assert summarize(await all_deliveries(t)) == [(1, "g", [7.0, 2.0])]
        assert (await t.g.show(first))["outcome"]["reward"] == 9.0
        assert (await t.client.show_feed("f")).newest == 1


async def test_replaced_outcome_updates_waiting_group() -> None:
    async with training() as t:
        await t.client.open_feed("f", PLAIN)
        first, second = await t.rollout(1.0), await t.rollout(None, kind="infrastructure fault")
        replace = "/admin/sessions/{}/outcome?replace=1"
        assert (
            await t.g.admin.put(replace.format(first), json={"kind": "infrastructure fault", "group": "g"})
        ).is_success
        assert (await t.client.show_feed("f")).waiting == ()
        for session in (second, first):
            regraded = {"kind": "graded", "reward": 1, "group": "other", "task": "t"}
            assert (await t.g.admin.put(replace.format(session), json=regraded)).is_success
        assert [(d.group, [r.session for r in d.rollouts]) for d in await all_deliveries(t)] == [
            ("other", [second, first])
        ]


async def test_repeated_record_is_delivered_once() -> None:
    async with training() as t:
        await t.client.open_feed("f", FeedConfig(n=1, advantage="none"))
        session = await t.rollout(1.0)
        await t.record(session, 1.0)
        assert (await t.client.show_feed("f")).newest == 1


# ── reading and committing ──────────────────────────────────────────────────────────────────────────────────────────


async def test_waiting_reader_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    poll_without_end(monkeypatch)
    async with training() as t, await Feed.open(t.client, "f", FeedConfig(n=1, advantage="none")) as feed:
        assert await feed.next(0) is None
        began = time.monotonic()
        assert await asyncio.wait_for(feed.next(0.3), scaled(5)) is None
        assert time.monotonic() - began > 0.2
        waiting = asyncio.create_task(feed.next(3600))
        await reader_waits(t.g)
        await t.rollout(1.0)
        found = await asyncio.wait_for(waiting, scaled(5))
        assert found is not None and found.number == 1


async def test_cancelled_wait_loses_no_delivery() -> None:
    async with training() as t, await Feed.open(t.client, "f", FeedConfig(n=1, advantage="none")) as feed:
        waiting = asyncio.create_task(feed.next(scaled(10)))
        await reader_waits(t.g)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        for reward in range(3):
            await t.rollout(float(reward))
        seen = []
        async for delivery in feed:
            seen.append(delivery.number)
            await feed.commit(delivery.number)
            if len(seen) == 3:
                break
        assert seen == [1, 2, 3] and feed.committed == 3


async def test_reader_resumes_from_commit_or_checkpoint() -> None:
    async with training() as t:
        config = FeedConfig(n=1, advantage="none")
        async with await Feed.open(t.client, "f", config) as feed:
            for reward in range(4):
                await t.rollout(float(reward))
            for _ in range(3):
                assert await feed.next(scaled(5))
            await feed.commit(2)
        async with await Feed.open(t.client, "f", config) as feed:
            assert feed.committed == 2 and [(await _number(feed)) for _ in range(2)] == [3, 4]
            await feed.commit(3)
            await feed.commit(1)  # older and repeated commits change nothing
            await feed.commit(3)
            assert feed.committed == 3
        async with await Feed.open(t.client, "f", config, after=1) as feed:
            assert [(await _number(feed)) for _ in range(3)] == [2, 3, 4]
        assert summarize(await all_deliveries(t, after=3)) == [(4, "g", [3.0])]


async def _number(feed: Feed) -> int | None:
    found = await feed.next(scaled(5))
    return None if found is None else found.number


async def test_commit_of_unread_delivery_is_rejected() -> None:
    async with training() as t, await Feed.open(t.client, "f", FeedConfig(n=1)) as feed:
        for _ in range(2):
            await t.rollout(1.0)
        with pytest.raises(
            RequestRejected, match="number 1 was never handed out; the highest number that feed 'f' handed out is 0"
        ):
            await feed.commit(1)
        assert await feed.next(scaled(5))
        with pytest.raises(RequestRejected, match="number 2 was never handed out"):
            await feed.commit(2)
        await feed.commit(1)
        view = await t.client.show_feed("f")
        assert (view.newest, view.handed, view.committed) == (2, 1, 1)


async def test_new_reader_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    poll_without_end(monkeypatch)
    async with training() as t:
        config = FeedConfig(n=1, advantage="none")
        async with await Feed.open(t.client, "f", config) as older:
            await t.rollout(1.0)
            assert await older.next(scaled(5))
            waiting = asyncio.create_task(older.next(3600))
            await reader_waits(t.g)
            async with await Feed.open(t.client, "f", config) as newer:
                with pytest.raises(TakenOver, match="another reader has taken over feed 'f'"):
                    await asyncio.wait_for(waiting, scaled(5))  # fails without waiting
                with pytest.raises(TakenOver):
                    await older.next(1)
                with pytest.raises(TakenOver):
                    await older.commit(1)
                assert newer.committed == 0 and await _number(newer) == 1
                await newer.commit(1)


async def test_deleting_feed_ends_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    poll_without_end(monkeypatch)
    async with training() as t:
        async with await Feed.open(t.client, "f", PLAIN) as feed:
            waiting = asyncio.create_task(feed.next(3600))
            await reader_waits(t.g)
            await t.client.delete_feed("f")
            with pytest.raises(TakenOver, match="unknown feed"):
                await asyncio.wait_for(waiting, scaled(5))
        assert await t.client.feeds() == [] and t.g.rows("SELECT count(*) FROM rolled") == [(0,)]
        with pytest.raises(RequestRejected) as refused:
            await t.client.delete_feed("f")
        assert refused.value.answered == 404


async def test_number_beyond_newest_is_rejected() -> None:
    async with training() as t, await Feed.open(t.client, "f", PLAIN, after=7) as feed:
        with pytest.raises(RequestRejected, match="'after' is 7, but the newest delivery of feed 'f' is 0; check"):
            await feed.next(1)


async def test_mark_of_deleted_feed_is_rejected(tmp_path: Path) -> None:
    """The recreated feed restarts at 1, so its numbers mean other rollouts."""
    config = FeedConfig(n=1, advantage="none")
    async with training(tmp_path) as t:
        async with await Feed.open(t.client, "f", config) as feed:
            mark = feed.mark
            await t.rollout(1.0)
            assert await feed.next(scaled(5))
        async with await Feed.open(t.client, "f", config, after=1, mark=mark) as feed:
            assert feed.mark == mark
        await t.client.delete_feed("f")
        words = (
            r"it was deleted, or the gateway uses a different store; check that the gateway uses the same store as "
            r"before; if it does, open the feed without 'after' and 'mark'$"
        )
        with pytest.raises(OtherFeed, match=words):
            await Feed.open(t.client, "f", config, after=1, mark=mark)
        assert await t.client.feeds() == []  # no feed was created
        async with await Feed.open(t.client, "f", config) as feed:
            assert feed.mark != mark
            await t.rollout(2.0)
            assert await _number(feed) == 1
        with pytest.raises(OtherFeed, match="it was deleted and recreated"):
            await Feed.open(t.client, "f", config, after=1, mark=mark)
    async with training(tmp_path) as t, await Feed.open(t.client, "f", config, after=1, mark=feed.mark) as again:
        assert again.mark == feed.mark  # survives a gateway restart
    async with training() as t:
        async with await Feed.open(t.client, "f", config) as elsewhere:
            assert elsewhere.mark != feed.mark
        with pytest.raises(OtherFeed, match="recreated, or the gateway uses a different store"):
            await Feed.open(t.client, "f", config, after=1, mark=feed.mark)


async def test_feed_recreated_while_it_is_opened_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    async with training() as t:
        take_over = t.client.take_over_feed

        async def recreate(*arguments: Any) -> str:
            await t.client.delete_feed("f")
            await t.client.open_feed("f", PLAIN)
            return await take_over(*arguments)

        monkeypatch.setattr(t.client, "take_over_feed", recreate)
        with pytest.raises(TakenOver, match="deleted and recreated while it was being opened"):
            await Feed.open(t.client, "f", PLAIN)


async def test_feed_waits_for_gateway_restart(tmp_path: Path) -> None:
    config = FeedConfig(n=2, advantage="none")
    async with training(tmp_path) as t:
        key, port = t.g.app.admin_key, int(t.g.root.rpartition(":")[2])
        await t.client.open_feed("f", config)
        await t.rollout(1.0)
    async with GatewayClient(f"http://127.0.0.1:{port}", key) as client:
        opening = asyncio.create_task(Feed.open(client, "f", config))
        await asyncio.sleep(0.3)
        assert not opening.done()
        async with training(tmp_path) as t:
            # The test gateway cannot keep its port, so the client gets the new URL.
            client.url = t.g.root
            feed = await asyncio.wait_for(opening, scaled(10))
            await t.rollout(2.0)
            found = await feed.next(scaled(5))
            assert found is not None and [r.reward for r in found.rollouts] == [1.0, 2.0]
        waiting = asyncio.create_task(feed.next(scaled(20)))
        committing = asyncio.create_task(feed.commit(1))
        await asyncio.sleep(0.3)
        assert not waiting.done() and not committing.done()
        async with training(tmp_path) as t:
            client.url = t.g.root
            await t.rollout(3.0)
            await t.rollout(4.0)
            found = await asyncio.wait_for(waiting, scaled(10))
            assert found is not None and found.number == 2
            await asyncio.wait_for(committing, scaled(10))
            assert (await t.client.show_feed("f")).committed == 1


async def test_stopping_gateway_releases_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    poll_without_end(monkeypatch)
    async with training() as t, await Feed.open(t.client, "f", PLAIN) as feed:
        waiting = asyncio.create_task(feed._fetch(3600))
        await reader_waits(t.g)
        t.g.app.events.close()
        await asyncio.wait_for(waiting, scaled(5))


async def test_page_limits_count_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with training() as t:
        config = FeedConfig(n=1, advantage="none")
        await t.client.open_feed("f", config)
        for reward in range(5):
            await t.rollout(float(reward))
        reader = await t.client.take_over_feed("f")
        page = await t.client.fetch_deliveries("f", reader, limit=4)
        assert (len(page.deliveries), page.newest, page.committed, page.version) == (4, 5, 0, 0)
        page = await t.client.fetch_deliveries("f", reader, after=3, limit=1000)
        assert len(page.deliveries) == 2
        monkeypatch.setattr("turngate.gateway.feeds.PAGE_BYTES", 1)  # an oversized delivery is still sent
        assert len((await t.client.fetch_deliveries("f", reader, limit=4)).deliveries) == 1
        async with await Feed.open(t.client, "f", config, limit=8) as feed:
            assert [await _number(feed) for _ in range(5)] == [1, 2, 3, 4, 5]


async def test_building_rows_does_not_block_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are built in a thread, so that turns do not wait for them."""
    build, threads = turngate.gateway.feeds.build_delivery, set[int]()

    def record_thread(*what: Any, **how: Any) -> Any:
        threads.add(threading.get_ident())
        return build(*what, **how)

    monkeypatch.setattr(turngate.gateway.feeds, "build_delivery", record_thread)
    long = say("word " * 4000)
    async with gateway(lambda request, index: long) as g, GatewayClient(g.root, g.app.admin_key) as client:
        t = TrainingGateway(g, client)
        for _ in range(2):
            await t.rollout(1.0, turns=2)
        late = 0.0  # CPU time of this thread, unaffected by other load

        async def ticking() -> None:
            nonlocal late
            while True:
                began = time.thread_time()
                await asyncio.sleep(0.002)
                late = max(late, time.thread_time() - began)

        async with await Feed.open(client, "f", FeedConfig(n=2, advantage="none", from_start=True)) as feed:
            ticker = asyncio.create_task(ticking())
            for _ in range(5):
                feed._after = 0
                found = await feed.next(scaled(10))
                assert found is not None and len(found.rows()[0].ids) > 8000
            ticker.cancel()
        assert threads and threading.get_ident() not in threads
        assert late < scaled(0.1)  # 10 ms on a quiet machine


async def test_slow_deliveries_do_not_block_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow deliveries do not use up the threads that render and write turns."""
    build, began, released = turngate.gateway.deliveries._build_rollout, threading.Event(), threading.Event()

    def slow(*what: Any) -> Any:
        began.set()
        released.wait(scaled(60))
        return build(*what)

    monkeypatch.setattr(turngate.gateway.deliveries, "_build_rollout", slow)
    config = FeedConfig(n=1, advantage="none")
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    async with training(durability="disk") as t:  # turns are written in a thread
        feeds = [await Feed.open(t.client, f"f{number}", config) for number in range(5)]
        await t.rollout(1.0)
        reading = [asyncio.create_task(feed.next(scaled(20))) for feed in feeds]
        await until(began.is_set)
        await asyncio.sleep(0.3)
        try:
            async with asyncio.timeout(scaled(5)):
                await t.open_session()
        finally:
            released.set()
        assert all(await asyncio.gather(*reading))


async def test_filling_feed_does_not_block_loop_and_keeps_order() -> None:
    async with training() as t:
        outcome = RecordedOutcome(kind="graded", reward=1.0, task="t")
        assert t.g.app.renderer is not None
        vocabulary = t.g.app.renderer.tokenizer.digest
        for number in range(3000):
            key = t.g.app.store.add_session(f"s{number}", f"{number}".encode(), SessionConfig(), 0.0, vocabulary)
            written = msgspec.structs.replace(outcome, group=f"g{number // 4}").encode()
            t.g.app.store.outcomes.put(key, written, new_event(f"s{number}", "outcome", {}), replace=False)
        opening = asyncio.create_task(Feed.open(t.client, "f", FeedConfig(n=4, from_start=True)))
        await until(lambda: t.g.rows("SELECT count(*) FROM rolled") > [(200,)])
        assert t.g.rows("SELECT count(*) FROM rolled") < [(3000,)]  # the loop runs while the feed is filled
        last = await t.rollout(1.0, "g0")  # recorded during the fill, but placed last
        async with await opening as feed:
            view = await t.client.show_feed("f")
            assert (view.newest, view.waiting[0].rollouts) == (750, 1)
            assert t.g.rows("SELECT id FROM rolled ORDER BY place DESC LIMIT 1") == [(last,)]
            numbers = t.g.rows("SELECT DISTINCT number, team FROM rolled WHERE number IS NOT NULL ORDER BY number")
            assert numbers == [(number + 1, f"g{number}") for number in range(750)]
            assert await feed.next(scaled(5))


async def test_interrupted_fill_is_completed_on_read(tmp_path: Path) -> None:
    async with training(tmp_path) as t:
        for number in range(3):
            await t.rollout(1.0, f"g{number}")
        config = FeedConfig(n=1, advantage="none", from_start=True)
        t.g.app.store.feeds.open("f", msgspec.json.encode(config), 1, "", from_start=True)
    async with training(tmp_path) as t:  # as if killed before the first fill step
        await t.rollout(1.0, "g3")
        reader = await t.client.take_over_feed("f")
        page = await t.client.fetch_deliveries("f", reader, after=0, wait=0, limit=10)
        assert page.newest == 4 and len(page.deliveries) == 4


# ── rejections ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_invalid_feed_config_is_rejected() -> None:
    async with training() as t:
        for name, body, param in (
            ("f", {}, "n"),
            ("f", {"n": 0}, "n"),
            ("f", {"n": "2"}, "n"),
            ("f", {"n": 2, "advantage": "gae"}, "advantage"),
            ("f", {"n": 2, "max_staleness": -1}, "max_staleness"),
            ("f", {"n": 2, "on_truncated": "drop"}, "on_truncated"),
            ("f", {"n": 2, "staleness": 1}, "staleness"),
            ("-f", {"n": 2}, "name"),
            ("f f", {"n": 2}, "name"),
        ):
            response = await t.g.admin.put(f"/admin/feeds/{name}", json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
        assert (await t.g.admin.get("/admin/feeds")).json() == {"feeds": []}


async def test_reopening_with_other_config_conflicts() -> None:
    async with training() as t:
        await t.client.open_feed("f", PLAIN)
        await t.client.open_feed("f", PLAIN)
        with pytest.raises(RequestRejected, match=r"n is 2, not 3; advantage is 'none', not 'normalised'") as no:
            await t.client.open_feed("f", FeedConfig(n=3))
        assert no.value.answered == 409


async def test_invalid_delivery_queries_are_rejected() -> None:
    async with training() as t:
        await t.client.open_feed("f", PLAIN)
        reader = await t.client.take_over_feed("f")
        for query, status, param in (
            ("", 400, "reader"),
            ("?reader=wrong", 409, "reader"),
            ("?reader={}&after=x", 400, "after"),
            ("?reader={}&after=-1", 400, "after"),
            ("?reader={}&after=1", 409, "after"),
            ("?reader={}&wait=soon", 400, "wait"),
            ("?reader={}&wait=-1", 400, "wait"),
            ("?reader={}&wait=inf", 400, "wait"),
            ("?reader={}&limit=all", 400, "limit"),
        ):
            response = await t.g.admin.get(f"/admin/feeds/f/deliveries{query.format(reader)}")
            assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text


async def test_invalid_commits_are_rejected() -> None:
    async with training() as t:
        await t.client.open_feed("f", PLAIN)
        reader = await t.client.take_over_feed("f")
        for body, status, param in (
            ({"reader": reader}, 400, "number"),
            ({"reader": reader, "number": -1}, 400, "number"),
            ({"number": 1}, 400, "reader"),
            ({"reader": "", "number": 0}, 409, "reader"),
            ({"reader": reader, "number": 1}, 409, "number"),
        ):
            response = await t.g.admin.post("/admin/feeds/f/commit", json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text


async def test_feeds_require_admin_key() -> None:
    async with training() as t:
        await t.client.open_feed("f", PLAIN)
        session = await t.g.open()
        for key in ("", session.key):
            http = t.g.http(key)
            for method, path in (
                ("GET", "/admin/feeds"),
                ("PUT", "/admin/feeds/f"),
                ("GET", "/admin/feeds/f"),
                ("DELETE", "/admin/feeds/f"),
                ("POST", "/admin/feeds/f/reader"),
                ("GET", "/admin/feeds/f/deliveries"),
                ("POST", "/admin/feeds/f/commit"),
                ("POST", "/admin/groups/g/close"),
            ):
                assert (await http.request(method, path)).status_code == 401
        view = (await t.g.admin.get("/admin/feeds/f")).json()
        reader = await t.client.take_over_feed("f")
        assert reader not in (await t.g.admin.get("/admin/feeds/f")).text and view["read"] is False


async def test_deliveries_are_msgpack_with_raw_arrays() -> None:
    """The wire format for trainers in other languages."""
    async with training() as t:
        await t.client.open_feed("f", FeedConfig(n=1, advantage="none"))
        await t.rollout(1.0)
        reader = await t.client.take_over_feed("f")
        response = await t.g.admin.get(f"/admin/feeds/f/deliveries?reader={reader}")
        assert response.headers["content-type"] == "application/msgpack"
        page = msgspec.msgpack.decode(response.content)
        [delivery] = page["deliveries"]
        [row] = delivery["rollouts"][0]["rows"]
        tokens = len(row["ids"]) // 4
        assert len(row["mask"]) == -(-tokens // 8) and tokens
        [span] = row["spans"]
        assert len(row["logprobs"]) == 4 * (span["end"] - span["start"]) and span["end"] == tokens


async def test_feed_on_migrated_database(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "store/samples/schema-3.db", tmp_path / "turngate.db")
    async with training(tmp_path) as t:
        await t.client.open_feed("f", FeedConfig(n=2, advantage="none", from_start=True))
        [found] = await all_deliveries(t)
        assert [(r.session, r.reward, len(r.rows)) for r in found.rollouts] == [
            ("ended-0", 0.0, 1),
            ("ended-1", 1.0, 1),
        ]
