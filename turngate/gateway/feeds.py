"""Feeds: named, durable, ordered logs of what trainers are to train on. The verbs of feeds, and what a delivery is.

    a rollout's outcome is recorded ──► its group is complete ──► the delivery has its number, for good        (store/feeds.py)
    a trainer asks past a number    ──► rows from the stored traces, advantages over the group, staleness now  (here)
    the trainer commits a number    ──► what a trainer that is started again goes on from

A delivery is one group: all its rollouts, those that are not trained with the reason. What was recorded never changes under a number;
whether a rollout is still fresh enough is judged each time that it is handed out. Rows are made in a thread of their own, over a
connection of its own, since a group of long traces takes a while; a feed that begins with what was recorded before is filled step by step.
`Control` owns the one instance, `server/feeds.py` serves it, `client/feed.py` reads it.
"""

from __future__ import annotations

import asyncio
import sqlite3
from functools import partial

import msgspec
import numpy as np

from turngate.client.protocol import (
    MAX_WAIT_S,
    DeliveryPage,
    FeedConfig,
    FeedView,
    WireDelivery,
    WireRollout,
    WireRow,
    check_feed_name,
)
from turngate.errors import Conflict, NotFound, StoreError
from turngate.gateway.events import Events
from turngate.gateway.fence import Fence
from turngate.store.feeds import DeliveryMember, FeedRow, IncompleteGroup
from turngate.store.reader import StoreReader
from turngate.store.sqlite import Store
from turngate.trace.advantage import compute_advantages, is_too_large, row_weight
from turngate.trace.sample import Sample, build_samples
from turngate.trace.session import Session

MOST = 64  # deliveries in one answer
PAGE_BYTES = 32_000_000  # an answer that has so many gets no further delivery; a single one may be larger
_STEP = 100  # outcomes that are entered at once when a feed is filled
_SHOWN = 1000  # groups that wait, of which a feed tells
_WOKEN = ":feeds"  # whom `Events` wakes for us; no session is called so
_ROOMS = (
    "turns",
    "sampled_tokens",
    "context_tokens",
    "context_length_exceeded",
    "limit",
)  # stops by a limit, but for time
_TIMES = ("seconds", "timed out")


class Feeds:
    """The verbs. `close` when the gateway stops."""

    def __init__(self, store: Store, events: Events, fence: Fence) -> None:
        self._log = store.feeds
        self._events = events
        self._fence = fence
        self._reader = StoreReader(store, "feeds")

    def close(self) -> None:
        self._reader.close()

    def wake(self) -> None:
        """There may be a new delivery."""
        self._events.wake(_WOKEN)

    # ── feeds ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def open(self, name: str, config: FeedConfig) -> FeedView:
        """The feed of that name, which is made if there is none. When it is told, it has all that it begins with."""
        check_feed_name(name)
        written = msgspec.json.encode(config)
        row = self._log.open(name, written, config.n, config.groups, from_start=config.from_start)
        if (known := _config(row)) != config:
            raise Conflict(
                f"feed {name!r} is there with other choices ({_differs(known, config)}); choose another name, or open it as it is"
            )
        await self._filled(row.key)
        self.wake()
        return self.show(name)

    async def _filled(self, feed: int) -> None:
        """Whoever opens a feed or reads it goes on with filling it, should whoever began that be gone. Numbers are given in order, so
        what has one may be handed out meanwhile."""
        while self._log.is_filling(feed) and self._log.fill(feed, _STEP):
            self.wake()
            await asyncio.sleep(0)  # turns go on in between

    def listing(self) -> list[FeedView]:
        return [_view(row) for row in self._log.listing()]

    def waiting(self) -> dict[str, tuple[int, int]]:
        """By name, how many groups are not complete, and how many rollouts those have; none where nothing waits."""
        names = {row.key: row.name for row in self._log.listing()}
        return {names[feed]: counts for feed, counts in self._log.waiting_counts().items() if feed in names}

    def show(self, name: str) -> FeedView:
        row = self._find(name)
        return _view(row, tuple(self._log.waiting(row.key, _SHOWN)))

    def delete(self, name: str) -> None:
        """Of the traces nothing is deleted, only which of them were to be trained."""
        self._log.delete(self._find(name).key)
        self.wake()

    def close_group(self, group: str) -> dict[str, int]:
        """No more rollouts of it will come. By feed, the number of the delivery that this made; none where nothing waited."""
        closed = dict(self._log.close_group(group))
        self.wake()
        self._events.wake("")
        return closed

    # ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────

    def take_over(self, name: str) -> tuple[FeedView, str]:
        """Become its reader; whoever was before is told so at its next call. The token that reads and commits."""
        row = self._log.take_over(name)
        if row is None:
            raise _missing(name)
        self.wake()
        return _view(row), row.reader

    def commit(self, name: str, reader: str, number: int) -> FeedView:
        """Everything up to a number is in the trainer's own checkpoint. An older number changes nothing."""
        row = self._log.commit(self._find(name).key, reader, number)
        if row is None:
            raise self._taken(name)
        if number > row.handed:
            raise Conflict(
                f"number: {number} was never handed out; the highest of feed {name!r} that was is {row.handed}",
                param="number",
            )
        return _view(row)

    async def page(self, name: str, reader: str, *, after: int | None = None, wait: float = 0, limit: int = 1) -> bytes:
        """Deliveries past a number (None: the committed one), in order; none if there are none within `wait` seconds."""

        def more() -> FeedRow | None:
            row = self._find(name)
            if row.reader != reader:
                raise self._taken(name)
            if after is not None and after > row.newest:
                raise Conflict(
                    f"after: feed {name!r} has given out no number {after}, the newest is {row.newest}; is this the gateway's data folder?",
                    param="after",
                )
            return row if row.newest > (row.committed if after is None else after) else None

        await self._filled(self._find(name).key)
        found = await self._events.wait_for(more, min(wait, MAX_WAIT_S), woken_by=_WOKEN)
        row = found or self._find(name)
        version = self._fence.version
        deliveries: list[msgspec.Raw] = []
        size = 0
        number = row.committed if after is None else after
        while number < row.newest and len(deliveries) < min(limit, MOST) and size < PAGE_BYTES:
            number += 1
            made = await self._reader.run(partial(_delivery, row, number, version))
            deliveries.append(msgspec.Raw(made))
            size += len(made)
        # Asked last: what takes time must not be a way to read past one's successor.
        if deliveries and not self._log.hand_out(row.key, reader, number):
            raise self._taken(name)
        told = DeliveryPage(
            feed=name, newest=row.newest, committed=row.committed, version=version, deliveries=tuple(deliveries)
        )
        return msgspec.msgpack.encode(told)

    def _find(self, name: str) -> FeedRow:
        row = self._log.find(name)
        if row is None:
            raise _missing(name)
        return row

    def _taken(self, name: str) -> Conflict:
        """Why a reader is none: it never was, or no longer is."""
        self._find(name)
        return Conflict(
            f"reader: another reader has taken over feed {name!r} since; only one may train on it", param="reader"
        )

    # ── staleness ───────────────────────────────────────────────────────────────────────────────────────────────

    def staleness_bounds(self) -> list[tuple[str, int | None]]:
        """Of each feed, the groups that it takes and how old a rollout may be."""
        configs = [_config(row) for row in self._log.listing()]
        return [(config.groups, config.max_staleness) for config in configs]


class _Made(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of a delivery, before it is compared with the others."""

    member: DeliveryMember
    reward: float | None  # that enters the baseline
    excluded: str = ""
    truncated: bool = False
    timed_out: bool = False
    turns: int = 0
    sampled_tokens: int = 0
    rows: list[Sample] = []

    def wire(self, advantage: float | None) -> WireRollout:
        outcome = self.member.outcome
        excluded = self.excluded
        if not excluded and advantage is None:
            excluded = "there is no other rollout in its group to compare it with"
        return WireRollout(
            session=self.member.id,
            task=outcome.task,
            attempt=outcome.attempt,
            kind=outcome.kind,
            reward=outcome.reward,
            resolved=outcome.resolved,
            advantage=None if excluded else advantage,
            excluded=excluded,
            truncated=self.truncated,
            timed_out=self.timed_out,
            turns=self.turns,
            sampled_tokens=self.sampled_tokens,
            data=msgspec.json.encode(outcome.data),
            rows=() if excluded else tuple(_wire_row(row, row_weight(len(self.rows))) for row in self.rows),
        )


def _delivery(row: FeedRow, number: int, version: int, store: Store) -> bytes:
    """Runs in the thread."""
    config = _config(row)
    members = store.feeds.members(row.key, number)
    if not members:
        raise _missing(row.name)  # it was deleted meanwhile
    made = [_rolled(store, member, config, version) for member in members]
    found = compute_advantages([one.reward for one in made], config.advantage)
    delivery = WireDelivery(
        number=number,
        group=members[0].group,
        task=members[0].outcome.task,
        version=version,
        rollouts=tuple(one.wire(advantage) for one, advantage in zip(made, found, strict=True)),
    )
    return msgspec.msgpack.encode(delivery)


def _rolled(store: Store, member: DeliveryMember, config: FeedConfig, version: int) -> _Made:
    try:
        row = store.find_key(member.session)
        session = None if row is None else store.load(row)
    except StoreError as error:
        if isinstance(error.__cause__, sqlite3.Error):
            raise  # the disk, or a lock: it may be read in a moment
        return _Made(member=member, reward=None, excluded=error.message)  # damaged, and will be so tomorrow
    if session is None:
        return _Made(member=member, reward=None, excluded="its session was deleted")
    rows = build_samples(session.trace, session.config.policy)
    timed_out = _timed_out(session, member)
    truncated = not timed_out and _truncated(session, member, rows)
    baseline, why = _judged(member, rows, config, version, truncated=truncated, timed_out=timed_out)
    return _Made(
        member=member,
        reward=member.outcome.reward if baseline else None,
        excluded=why,
        truncated=truncated or timed_out,
        timed_out=timed_out,
        turns=session.turns,
        sampled_tokens=session.sampled_tokens,
        rows=rows,
    )


def _judged(
    member: DeliveryMember, rows: list[Sample], config: FeedConfig, version: int, *, truncated: bool, timed_out: bool
) -> tuple[bool, str]:
    """Whether a rollout counts in its group's baseline, and why it is not trained; empty if it is."""
    outcome = member.outcome
    if outcome.reward is None:
        return False, f"no reward: {outcome.kind}" + (f" ({outcome.message})" if outcome.message else "")
    if is_too_large(outcome.reward):
        return False, f"its reward of {outcome.reward:g} is too large to reckon with"
    if not rows:
        return False, "nothing of it can be trained"
    oldest = min(span.version_start for row in rows for span in row.spans if span.trained)
    if config.max_staleness is not None and version - oldest > config.max_staleness:
        return (
            False,
            f"stale: sampled at version {oldest}, which is more than {config.max_staleness} before the present {version}",
        )
    cut = config.on_timeout if timed_out else config.on_truncated if truncated else "train"
    how = "timed out" if timed_out else "truncated"
    match cut:
        case "exclude":
            return False, f"{how}: left out by the feed's policy"
        case "mask":
            return True, f"{how}: masked by the feed's policy; its reward counts in the baseline"
        case _:
            return True, ""


def _timed_out(session: Session, member: DeliveryMember) -> bool:
    return session.stop in _TIMES or _status(member) == "timed out"


def _truncated(session: Session, member: DeliveryMember, rows: list[Sample]) -> bool:
    """A limit ended it, or a turn that is trained was cut short."""
    if session.stop in _ROOMS or _status(member) == "limit":
        return True
    trained = {span.node for row in rows for span in row.spans if span.trained}
    return any(turn.id in trained and turn.info.finish == "length" for turn in session.trace.turns())


def _status(member: DeliveryMember) -> str:
    """How its agent ended, where it was run by our own runner (`rollout/judge.py`)."""
    data = member.outcome.data
    status = data.get("status") if isinstance(data, dict) else None
    return status if isinstance(status, str) else ""


def _wire_row(row: Sample, share: float) -> WireRow:
    sampled = [row.logprobs[span.start : span.end] for span in row.spans]
    return WireRow(
        branch=row.branch,
        ids=row.ids.astype("<i4", copy=False).tobytes(),
        mask=np.packbits(row.mask).tobytes(),
        logprobs=np.concatenate(sampled).astype("<f4", copy=False).tobytes(),
        spans=row.spans,
        weight=share,
    )


def _config(row: FeedRow) -> FeedConfig:
    try:
        return msgspec.json.decode(row.config, type=FeedConfig)
    except msgspec.DecodeError as error:
        raise StoreError(f"feed {row.name}: its settings are damaged on disk ({error})") from None


def _view(row: FeedRow, waiting: tuple[IncompleteGroup, ...] = ()) -> FeedView:
    return FeedView(
        name=row.name,
        mark=f"{row.key}-{int(row.opened * 1e6):x}",
        config=_config(row),
        opened=row.opened,
        newest=row.newest,
        handed=row.handed,
        committed=row.committed,
        read=bool(row.reader),
        waiting=waiting,
    )


def _differs(known: FeedConfig, wanted: FeedConfig) -> str:
    before, after = msgspec.structs.asdict(known), msgspec.structs.asdict(wanted)
    changed = [name for name in before if before[name] != after[name]]
    return "; ".join(f"{name}: is {before[name]!r}, not {after[name]!r}" for name in changed)


def _missing(name: str) -> NotFound:
    return NotFound(f"there is no feed {name!r}; open it with PUT /admin/feeds/{name}")
