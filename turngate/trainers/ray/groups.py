"""Complete groups for trainers on Ray: one actor reads a feed, and any task or actor of the cluster can iterate over its groups.

    groups = open_groups("http://gateway:8700", "math", FeedConfig(n=8))     # on the driver, after ray.init()

    async for delivery in groups:                                            # in any actor that has `groups`
        train(delivery.rows())
        await groups.commit(delivery.number)                                 # after saving a checkpoint

Actors that iterate at the same time get different groups. After a crash of the trainer or of the reading actor, the next reader starts
after the last committed delivery, or after the position in your own checkpoint (`after=`, `mark=`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from turngate.client.feed import Delivery, Feed, FeedConfig
from turngate.client.gateway import GatewayClient
from turngate.client.keys import read_admin_key
from turngate.errors import ConfigError

_WAIT_S = 30.0  # how long one call to the actor waits for a group
_MAX_CALLS = 10_000  # concurrent calls to the actor; Ray's default is 1,000


class FeedActor:
    """The Ray actor that reads one feed. `GroupIterator` calls its methods."""

    def __init__(
        self, url: str, admin_key: str, name: str, config: FeedConfig, after: int | None = None, mark: str = ""
    ) -> None:
        self._url, self._key = url, admin_key
        self._name, self._config, self._after, self._mark = name, config, after, mark
        self._feed: Feed | None = None
        self._opening = asyncio.Lock()
        self._reading = asyncio.Lock()  # a feed is read by one task at a time

    async def open(self) -> str:
        """Open the feed and become its reader. Return the feed's mark, which identifies it in checkpoints."""
        return (await self._open_once()).mark

    async def next(self, timeout_s: float) -> Delivery | None:
        """Return the next group, or None if none arrives within `timeout_s`."""
        feed = await self._open_once()
        end = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._reading.acquire()
        except TimeoutError:
            return None
        try:
            return await feed.next(max(0.0, end - time.monotonic()))
        finally:
            self._reading.release()

    async def commit(self, number: int) -> None:
        feed = await self._open_once()
        await feed.commit(number)

    async def _open_once(self) -> Feed:
        async with self._opening:
            if self._feed is None:
                gateway = await GatewayClient(self._url, self._key).__aenter__()
                self._feed = await Feed.open(gateway, self._name, self._config, after=self._after, mark=self._mark)
            return self._feed


class GroupIterator:
    """An endless async iterator over complete groups. It can be passed to other tasks and actors of the cluster."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def mark(self) -> str:
        """Return the feed's mark, which identifies the feed in checkpoints."""
        return str(await self._actor.open.remote())

    def __aiter__(self) -> AsyncIterator[Delivery]:
        return self._forever()

    async def _forever(self) -> AsyncIterator[Delivery]:
        while True:
            if (delivery := await self.next(_WAIT_S)) is not None:
                yield delivery

    async def next(self, timeout_s: float) -> Delivery | None:
        """Return the next group, or None if none arrives within `timeout_s`."""
        delivery: Delivery | None = await self._actor.next.remote(timeout_s)
        return delivery

    async def commit(self, number: int) -> None:
        """Commit all deliveries up to `number`. Before calling this, save a checkpoint that covers them."""
        await self._actor.commit.remote(number)


def open_groups(
    url: str,
    name: str,
    config: FeedConfig,
    *,
    admin_key: str = "",
    after: int | None = None,
    mark: str = "",
    **options: Any,
) -> GroupIterator:
    """Start the actor that reads a feed of the gateway at `url`, and return an iterator over its groups.

    If `admin_key` is empty, the gateway's admin key is read from TURNGATE_ADMIN_KEY, or from the file that TURNGATE_ADMIN_KEY_FILE names.
    `options`, such as `num_cpus` or `resources`, are passed to the Ray actor.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConfigError(f"open_groups needs {error.name}; run `pip install 'turngate[ray]'`", param="ray") from None
    actor = ray.remote(FeedActor).options(**{"num_cpus": 0, "max_concurrency": _MAX_CALLS, **options})
    return GroupIterator(actor.remote(url, admin_key or read_admin_key(), name, config, after, mark))
