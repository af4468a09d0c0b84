"""Tests for the blocking feed: reading from a thread, interrupts and errors."""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
import signal
import threading
import time
import traceback
from typing import Any

import numpy as np
import pytest

from tests.feed.kit import TrainingGateway, training
from tests.speed import scaled
from turngate.client import feed as module
from turngate.client.feed import BlockingFeed, Feed, TakenOver
from turngate.client.gateway import GatewayClient, GatewayUnreachable
from turngate.client.protocol import FeedConfig
from turngate.errors import BadRequest

PLAIN = FeedConfig(n=1, advantage="none")


def blocking(t: TrainingGateway) -> BlockingFeed:
    return BlockingFeed(t.g.root, t.g.app.admin_key, "f", PLAIN)


async def test_thread_iterates_and_commits() -> None:
    def train(t: TrainingGateway) -> list[int]:
        seen = []
        with blocking(t) as feed:
            for delivery in feed:
                assert delivery.rows()[0].ids.size
                seen.append(delivery.number)
                feed.commit(delivery.number)
                if len(seen) == 3:
                    break
            assert feed.committed == 3 and feed.next(0.1) is None
        return seen

    async with training() as t:
        training_thread = asyncio.create_task(asyncio.to_thread(train, t))
        for reward in range(3):
            await t.rollout(float(reward))
        assert await training_thread == [1, 2, 3]
        assert (await t.client.show_feed("f")).committed == 3
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("turngate-feed")]


def test_ctrl_c_loses_no_delivery() -> None:
    """A read that is interrupted and repeated gets the same delivery. Signals arrive in the main thread, so that one reads."""
    ready, over = threading.Event(), threading.Event()
    serving: list[tuple[TrainingGateway, asyncio.AbstractEventLoop]] = []

    async def serve() -> None:
        async with training() as t:
            serving.append((t, asyncio.get_running_loop()))
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert ready.wait(scaled(60))
        _read_with_interrupt(*serving[0])
    finally:
        signal.signal(signal.SIGINT, before)
        over.set()
        thread.join()


def _read_with_interrupt(t: TrainingGateway, loop: asyncio.AbstractEventLoop) -> None:
    def rollout(reward: float) -> None:
        asyncio.run_coroutine_threadsafe(t.rollout(reward), loop).result(scaled(60))

    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        while not t.g.app.events._followers:  # until the request is at the gateway
            time.sleep(0.01)
        time.sleep(0.1)
        signal.pthread_kill(main, signal.SIGINT)

    with blocking(t) as feed:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            feed.next(scaled(20))
        pending = feed._pending
        assert pending is not None and not pending.done()  # interrupted while waiting
        rollout(1.0)
        concurrent.futures.wait([pending], scaled(20))  # the delivery arrives while no reader waits
        rollout(2.0)
        assert [found.number for found in (feed.next(scaled(5)), feed.next(scaled(5))) if found is not None] == [1, 2]


async def test_errors_are_raised_in_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken_over(t: TrainingGateway) -> None:
        with blocking(t) as older, blocking(t):
            with pytest.raises(TakenOver):
                older.next(scaled(5))
            with pytest.raises(TakenOver):  # repeated, instead of hanging
                older.next(scaled(5))

    async with training() as t:
        await asyncio.to_thread(taken_over, t)
        gone = blocking(t)
    monkeypatch.setattr(module, "_RESTART_S", 0.2)
    with pytest.raises(GatewayUnreachable):
        await asyncio.to_thread(gone.__enter__)
    with pytest.raises(RuntimeError, match="`with` block"):
        gone.commit(1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("turngate-feed")]


async def test_retries_are_logged_and_invalid_name_is_bad_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_RESTART_S", scaled(0.1))

    def read(url: str, name: str) -> None:
        with BlockingFeed(url, "k", name, PLAIN):
            pass

    with pytest.raises(GatewayUnreachable) as raised:
        await asyncio.to_thread(read, "http://127.0.0.1:9", "f")
    here = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert here[here.index("read") :] == ["read", "__enter__", "_run"]  # no frames of the feed's own thread
    assert "retrying for up to" in caplog.text
    async with training() as t:
        for name in ("no/name", "", "no name"):
            with pytest.raises(BadRequest, match=r"invalid feed name: .*; use 1 to 128 letters"):
                await asyncio.to_thread(read, t.g.root, name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"form": "trees"}, "'form' must be one of 'rows', 'tree', not 'trees'"),
        ({"limit": 0}, "'limit' must be a whole number, 1 or greater, not 0"),
        ({"limit": 1.5}, "'limit' must be a whole number, 1 or greater, not 1.5"),
        ({"after": -1}, "'after' must be a whole number, 0 or greater, not -1"),
        ({"after": "3"}, "'after' must be a whole number, 0 or greater, not '3'"),
        ({"after": True}, "'after' must be a whole number, 0 or greater, not True"),
    ],
)
async def test_invalid_arguments_are_rejected_before_any_request(arguments: dict[str, Any], message: str) -> None:
    nowhere = "http://127.0.0.1:1"
    with pytest.raises(ValueError, match=re.escape(message)):
        BlockingFeed(nowhere, "key", "f", FeedConfig(n=1), **arguments)
    with pytest.raises(ValueError, match=re.escape(message)):
        await Feed.open(GatewayClient(nowhere, "key"), "f", FeedConfig(n=1), **arguments)


async def test_position_may_be_a_numpy_integer() -> None:
    async with training() as t:
        for reward in (0.5, 1.0):
            await t.rollout(reward)
        config = FeedConfig(n=1, advantage="none", from_start=True)
        async with await Feed.open(t.client, "f", config, after=np.int64(1), limit=np.int32(2)) as feed:
            delivery = await feed.next(10)
            assert delivery is not None and delivery.number == 2


def test_invalid_name_is_rejected_before_any_request() -> None:
    with pytest.raises(BadRequest, match="invalid feed name"):
        BlockingFeed("http://127.0.0.1:1", "key", "a/b", FeedConfig(n=1))
