"""Feeds: named, durable, ordered logs of complete groups for trainers.

    a rollout's outcome is recorded ──► its group is complete ──► the delivery gets its number, for good       (store/feeds.py)
    a trainer asks past a number    ──► rows from the stored traces, advantages over the group, staleness now  (deliveries.py)
    the trainer commits a number    ──► where a restarted trainer continues

Deliveries are built in a thread with its own database connection, since a group of long traces takes a while. A feed that starts with
earlier outcomes is filled in steps.
"""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec

from turngate.client.protocol import MAX_WAIT_S, DeliveryPage, FeedConfig, FeedView, check_feed_name
from turngate.errors import Conflict
from turngate.gateway.deliveries import build_delivery, missing_feed, read_config
from turngate.gateway.events import Events
from turngate.gateway.fence import Fence
from turngate.store.feeds import FeedRow, IncompleteGroup
from turngate.store.reader import StoreReader
from turngate.store.sqlite import Store

MAX_DELIVERIES = 64  # in one answer
PAGE_BYTES = 32_000_000  # an answer of this size gets no further delivery; a single one may be larger
_FILL_STEP = 100  # outcomes that are added at once when a feed is filled
_MAX_SHOWN = 1000  # incomplete groups in the view of a feed
_TOPIC = ":feeds"  # woken in `Events`; no session can have this id


class Feeds:
    """Opens, fills, reads and commits feeds. Call `close` when the gateway stops."""

    def __init__(self, store: Store, events: Events, fence: Fence) -> None:
        self._log = store.feeds
        self._events = events
        self._fence = fence
        self._reader = StoreReader(store, "feeds")

    def close(self) -> None:
        self._reader.close()

    def wake(self) -> None:
        """Wake readers that wait for a delivery."""
        self._events.wake(_TOPIC)

    # ── feeds ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def open(self, name: str, config: FeedConfig) -> FeedView:
        """Open a feed, or create it. When this returns, it has everything that it starts with."""
        check_feed_name(name)
        written = msgspec.json.encode(config)
        row = self._log.open(name, written, config.n, config.groups, from_start=config.from_start)
        if (known := read_config(row)) != config:
            raise Conflict(
                f"feed {name!r} exists with other settings ({_describe_difference(known, config)}); choose another name, or use those"
            )
        await self._fill(row.key)
        self.wake()
        return self.show(name)

    async def _fill(self, feed: int) -> None:
        """Continue to fill a feed that another process may have begun to fill. Numbered deliveries can be read meanwhile."""
        while self._log.is_filling(feed) and self._log.fill(feed, _FILL_STEP):
            self.wake()
            await asyncio.sleep(0)  # let turns run in between

    def list_feeds(self) -> list[FeedView]:
        return [_view(row) for row in self._log.listing()]

    def count_incomplete(self) -> dict[str, tuple[int, int]]:
        """By feed, the number of incomplete groups and of their rollouts. Feeds without any are left out."""
        names = {row.key: row.name for row in self._log.listing()}
        return {names[feed]: counts for feed, counts in self._log.waiting_counts().items() if feed in names}

    def show(self, name: str) -> FeedView:
        row = self._find(name)
        return _view(row, tuple(self._log.waiting(row.key, _MAX_SHOWN)))

    def delete(self, name: str) -> None:
        """Delete a feed. The traces stay."""
        self._log.delete(self._find(name).key)
        self.wake()

    def close_group(self, group: str) -> dict[str, int]:
        """Complete a group that gets no more rollouts. By feed, the number of the delivery that this makes."""
        closed = dict(self._log.close_group(group))
        self.wake()
        self._events.wake("")
        return closed

    # ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────

    def take_over(self, name: str) -> tuple[FeedView, str]:
        """Become the reader of a feed. Returns the token to read and commit with; the next call of the previous reader fails."""
        row = self._log.take_over(name)
        if row is None:
            raise missing_feed(name)
        self.wake()
        return _view(row), row.reader

    def commit(self, name: str, reader: str, number: int) -> FeedView:
        """Record that the trainer's checkpoint has everything up to a number. An older number changes nothing."""
        row = self._log.commit(self._find(name).key, reader, number)
        if row is None:
            raise self._not_the_reader(name)
        if number > row.handed:
            raise Conflict(
                f"number: {number} was never handed out; the highest of feed {name!r} that was is {row.handed}",
                param="number",
            )
        return _view(row)

    async def page(self, name: str, reader: str, *, after: int | None = None, wait: float = 0, limit: int = 1) -> bytes:
        """Read the deliveries past a number (None: the committed one), after at most `wait` seconds, as msgpack."""

        def find_more() -> FeedRow | None:
            row = self._find(name)
            if row.reader != reader:
                raise self._not_the_reader(name)
            if after is not None and after > row.newest:
                raise Conflict(
                    f"after: feed {name!r} has given out no number {after}, the newest is {row.newest}; is this the gateway's data folder?",
                    param="after",
                )
            return row if row.newest > (row.committed if after is None else after) else None

        await self._fill(self._find(name).key)
        found = await self._events.wait_for(find_more, min(wait, MAX_WAIT_S), woken_by=_TOPIC)
        row = found or self._find(name)
        version = self._fence.version
        deliveries: list[msgspec.Raw] = []
        size = 0
        number = row.committed if after is None else after
        while number < row.newest and len(deliveries) < min(limit, MAX_DELIVERIES) and size < PAGE_BYTES:
            number += 1
            delivery = await self._reader.run(partial(build_delivery, row, number, version))
            deliveries.append(msgspec.Raw(delivery))
            size += len(delivery)
        # Checked last: a new reader may have taken over while the deliveries were built.
        if deliveries and not self._log.hand_out(row.key, reader, number):
            raise self._not_the_reader(name)
        page = DeliveryPage(
            feed=name, newest=row.newest, committed=row.committed, version=version, deliveries=tuple(deliveries)
        )
        return msgspec.msgpack.encode(page)

    def _find(self, name: str) -> FeedRow:
        row = self._log.find(name)
        if row is None:
            raise missing_feed(name)
        return row

    def _not_the_reader(self, name: str) -> Conflict:
        """The error for a caller that is not, or no longer, the reader."""
        self._find(name)
        return Conflict(
            f"reader: another reader has taken over feed {name!r} since; only one may train on it", param="reader"
        )

    # ── staleness ───────────────────────────────────────────────────────────────────────────────────────────────

    def staleness_bounds(self) -> list[tuple[str, int | None]]:
        """The prefix of the groups that each feed takes, and how many versions old their rollouts may be."""
        configs = [read_config(row) for row in self._log.listing()]
        return [(config.groups, config.max_staleness) for config in configs]


def _view(row: FeedRow, waiting: tuple[IncompleteGroup, ...] = ()) -> FeedView:
    return FeedView(
        name=row.name,
        mark=f"{row.key}-{int(row.opened * 1e6):x}",
        config=read_config(row),
        opened=row.opened,
        newest=row.newest,
        handed=row.handed,
        committed=row.committed,
        read=bool(row.reader),
        waiting=waiting,
    )


def _describe_difference(known: FeedConfig, wanted: FeedConfig) -> str:
    before, after = msgspec.structs.asdict(known), msgspec.structs.asdict(wanted)
    changed = [name for name in before if before[name] != after[name]]
    return "; ".join(f"{name}: is {before[name]!r}, not {after[name]!r}" for name in changed)
