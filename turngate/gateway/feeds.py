"""Feeds: named, durable, ordered logs of complete groups for trainers. A new feed can include rollouts recorded earlier.

    a rollout's outcome is recorded ──► its group is complete ──► the delivery is numbered permanently      (store/feeds.py)
    a trainer reads past a number   ──► rows from the stored traces, group advantages, current staleness    (deliveries.py)
    the trainer commits a number    ──► a restarted trainer continues from there

Deliveries are built in a thread with its own database connection, since reading the long traces of a group takes a while. A feed that
starts with earlier outcomes is filled in steps, so that turns can run in between.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from functools import partial

import msgspec

from turngate.client.protocol import (
    MAX_WAIT_S,
    DeliveryPage,
    FeedConfig,
    FeedForm,
    FeedView,
    MismatchReport,
    check_feed_name,
    parse_history,
)
from turngate.config import MismatchLimits
from turngate.errors import Conflict
from turngate.gateway.deliveries import build_delivery, missing_feed, read_config
from turngate.gateway.events import Events
from turngate.gateway.fence import Fence
from turngate.store.events import new_event
from turngate.store.feeds import FeedRow, IncompleteGroup
from turngate.store.reader import StoreReader
from turngate.store.store import Store
from turngate.telemetry.metrics import Metrics
from turngate.trace.mismatch import MismatchAlarm, check_lags, find_alarms
from turngate.types import Json

log = logging.getLogger("turngate")
MAX_DELIVERIES = 64  # per page
PAGE_BYTES = 32_000_000  # no delivery is added to a page that has reached this size; a single delivery may be larger
_FILL_STEP = 100  # outcomes added per step when a feed is filled
_MAX_SHOWN = 1000  # incomplete groups in the view of a feed
_RESTORED_HINT = (
    "; if the store was restored from an older backup, run `turngate mark-restored` once, and open the feed again"
)
_TOPIC = ":feeds"  # a topic in `Events` that cannot be a session id


class _ReportResult(msgspec.Struct, frozen=True):
    """The stored result of a mismatch report. A repeated report gets the same result. Older versions of Turngate stored only the alarms."""

    digest: str  # of the report's content
    alarms: tuple[MismatchAlarm, ...]


_report_result: msgspec.json.Decoder[_ReportResult | tuple[MismatchAlarm, ...]] = msgspec.json.Decoder(
    _ReportResult | tuple[MismatchAlarm, ...]
)


class Feeds:
    """The gateway's feeds. Call `close` when the gateway stops."""

    def __init__(self, store: Store, events: Events, fence: Fence, metrics: Metrics, limits: MismatchLimits) -> None:
        self._log = store.feeds
        self._restores = store.restores
        self._events = events
        self._fence = fence
        self._metrics = metrics
        self._limits = limits  # above which a trainer's report causes an alarm
        self._reader = StoreReader(store, "feeds")

    def close(self) -> None:
        self._reader.close()

    def wake(self) -> None:
        """Wake readers that are waiting for a delivery."""
        self._events.wake(_TOPIC)

    # ── feeds ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def open(self, name: str, config: FeedConfig) -> FeedView:
        """Open a feed, and create it if it does not exist. With `from_start`, a new feed is filled with earlier outcomes.

        Raise `Conflict` if the feed exists with different settings.
        """
        check_feed_name(name)
        written = msgspec.json.encode(config)
        row = self._log.open(name, written, config.n, config.groups, from_start=config.from_start)
        if (known := read_config(row)) != config:
            raise Conflict(
                f"feed {name!r} already exists with different settings ({_describe_difference(known, config)}); "
                "use the existing settings or choose a different name"
            )
        await self._fill(row.key)
        self.wake()
        return self.show(name)

    async def _fill(self, feed: int) -> None:
        """Add earlier outcomes to a feed, continuing where another process may have stopped. Turns can run in between."""
        while self._log.is_filling(feed) and self._log.fill(feed, _FILL_STEP):
            self.wake()
            await asyncio.sleep(0)  # let turns run in between

    def list_feeds(self) -> list[FeedView]:
        history = self._restores.history()
        return [_view(row, history) for row in self._log.listing()]

    def count_incomplete(self) -> dict[str, tuple[int, int]]:
        """Return, for each feed with incomplete groups, the number of these groups and the number of rollouts in them."""
        names = {row.key: row.name for row in self._log.listing()}
        return {names[feed]: counts for feed, counts in self._log.waiting_counts().items() if feed in names}

    def show(self, name: str) -> FeedView:
        row = self._find(name)
        return _view(row, self._restores.history(), tuple(self._log.waiting(row.key, _MAX_SHOWN)))

    def delete(self, name: str) -> None:
        """Delete a feed. The traces of its rollouts are kept."""
        self._log.delete(self._find(name).key)
        self.wake()

    def close_group(self, group: str) -> dict[str, int]:
        """Complete a group that will receive no more rollouts. Return the numbers of the resulting deliveries, by feed."""
        closed = dict(self._log.close_group(group))
        self.wake()
        self._events.wake("")
        return closed

    # ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────

    def take_over(self, name: str, after: int | None = None, mark: str = "") -> tuple[FeedView, str]:
        """Make the caller the reader of a feed. Return the feed, and the token with which the caller reads and commits.

        The previous reader's next call fails. `after` and `mark` come from the trainer's checkpoint, if it has one. If the store was
        restored from a backup, they are checked, and `Conflict` is raised if they may no longer refer to the same deliveries.
        """
        history = self._restores.history()
        self._check_position(self._find(name), history, after, mark)
        row = self._log.take_over(name)
        if row is None:
            raise missing_feed(name)
        self.wake()
        return _view(row, history), row.reader

    def _check_position(self, row: FeedRow, history: str, after: int | None, mark: str) -> None:
        """Raise `Conflict` if the store was restored from a backup and the trainer's position may be lost or refer to other deliveries."""
        if not history:
            return
        restored = f"feed {row.name!r}: the store was restored from a backup"
        if after is None:
            if self._restores.is_unconfirmed(row.key):
                raise Conflict(
                    f"{restored}. The feed's newest delivery is now {row.newest}, and the last committed one is {row.committed}; commits "
                    "made after the backup may have been lost. Open the feed with 'after' set to the delivery number in your checkpoint, "
                    f"or to {row.committed} if no later delivery was trained on",
                    param="after",
                )
            return
        marked = parse_history(mark)
        last = row.newest if not mark or marked == history else self._restores.last_number(row.key, marked)
        if last is None or after > last:
            problem = (
                "the checkpoint's mark is unknown to this store, so numbers may now refer to other deliveries"
                if last is None
                else f"only numbers up to {last} still refer to the same deliveries"
            )
            start = row.committed if last is None else last
            raise Conflict(
                f"{restored}. The checkpoint is at delivery {after}, but {problem}. Continue with after={start} and the mark "
                f"{_view(row, history).mark!r}; rollouts that may already have been trained on are then delivered without rows",
                param="after",
            )
        self._restores.confirm(row.key)

    def commit(self, name: str, reader: str, number: int) -> FeedView:
        """Record that the trainer's checkpoint includes all deliveries up to `number`. Committing a number again changes nothing.

        Raise `Conflict` if `reader` is not the token of the feed's reader, or if `number` was never handed out.
        """
        row = self._log.commit(self._find(name).key, reader, number)
        if row is None:
            raise self._not_the_reader(name)
        if number > row.handed:
            raise Conflict(
                f"number {number} was never handed out; the highest number that feed {name!r} handed out is {row.handed}{_RESTORED_HINT}",
                param="number",
            )
        return _view(row, self._restores.history())

    async def page(
        self,
        name: str,
        reader: str,
        *,
        after: int | None = None,
        wait: float = 0,
        limit: int = 1,
        form: FeedForm = "rows",
    ) -> bytes:
        """Return up to `limit` deliveries after number `after`, as msgpack. If there are none yet, wait up to `wait` seconds for one.

        If `after` is None, start after the committed number.
        """

        def find_more() -> FeedRow | None:
            row = self._find(name)
            if row.reader != reader:
                raise self._not_the_reader(name)
            if after is not None and after > row.newest:
                raise Conflict(
                    f"'after' is {after}, but the newest delivery of feed {name!r} is {row.newest}; "
                    f"check that the gateway uses the same store as before{_RESTORED_HINT}",
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
            delivery = await self._reader.run(partial(build_delivery, row, number, version, form=form))
            deliveries.append(msgspec.Raw(delivery))
            size += len(delivery)
        # Checked last: a new reader may have taken over while the deliveries were built.
        if deliveries and not self._log.hand_out(row.key, reader, number):
            raise self._not_the_reader(name)
        page = DeliveryPage(
            feed=name, newest=row.newest, committed=row.committed, version=version, deliveries=tuple(deliveries)
        )
        return msgspec.msgpack.encode(page)

    def report_mismatch(self, name: str, report: MismatchReport) -> tuple[MismatchAlarm, ...]:
        """Store a trainer's mismatch report as an event, count it in the metrics, and return the alarms that it causes.

        A repeated report with the same id is neither stored nor counted again. A different report with that id is rejected.
        """
        check_lags(report.lags)
        row = self._find(name)
        if row.reader != report.reader:
            raise self._not_the_reader(name)
        if report.number > row.handed:
            raise Conflict(
                f"number {report.number} was never handed out; the highest number that feed {name!r} handed out is "
                f"{row.handed}{_RESTORED_HINT}",
                param="number",
            )
        alarms = find_alarms(report.lags, self._limits)
        data: dict[str, Json] = {
            "feed": name,
            "number": report.number,
            "version": report.version,
            "lags": msgspec.to_builtins(report.lags),
            "alarms": msgspec.to_builtins(alarms),
        }
        if not report.id:
            self._events.add("", "mismatch", data)
        else:
            result = msgspec.json.encode(_ReportResult(_digest_report(report), alarms)).decode()
            earlier = self._log.add_report(row.key, report.id, result, new_event("", "mismatch", data))
            if earlier is not None:
                return _read_earlier_alarms(name, report, earlier)
            self._events.wake("")
        self._count_report(name, report, alarms)
        return alarms

    def _count_report(self, name: str, report: MismatchReport, alarms: tuple[MismatchAlarm, ...]) -> None:
        for one in report.lags:
            label = "unknown" if one.lag is None else "same" if one.lag == 0 else "older"
            self._metrics.count("turngate_mismatch_tokens_total", label, by=one.tokens)
            over = one.count_over(self._limits.difference)
            self._metrics.count("turngate_mismatch_over_total", label, by=over)
        for alarm in alarms:
            self._metrics.count("turngate_mismatch_alarms_total", alarm.kind)
        if alarms:
            kinds = ", ".join(alarm.kind for alarm in alarms)
            log.warning(
                "feed %s, delivery %d: the trainer's log-probabilities differ too much from the recorded ones (alarms: %s); the "
                "gateway's web page and the event `mismatch` say what to change",
                name,
                report.number,
                kinds,
            )

    def _find(self, name: str) -> FeedRow:
        row = self._log.find(name)
        if row is None:
            raise missing_feed(name)
        return row

    def _not_the_reader(self, name: str) -> Conflict:
        """Return the error for a caller that is not (or is no longer) the reader of a feed."""
        row = self._find(name)
        if not row.reader and self._restores.history():
            return Conflict(
                f"feed {name!r}: the store was restored from a backup; open the feed again, with 'after' set to the number in "
                "your checkpoint",
                param="reader",
            )
        return Conflict(
            f"the reader token is wrong, or another reader has taken over feed {name!r}; a feed has only one reader at a time. Open "
            "the feed again to take it over",
            param="reader",
        )

    # ── staleness ───────────────────────────────────────────────────────────────────────────────────────────────

    def staleness_bounds(self) -> list[tuple[str, int | None]]:
        """Return the group prefix and the staleness limit of each feed. The limit is a number of versions, or None for no limit."""
        configs = [read_config(row) for row in self._log.listing()]
        return [(config.groups, config.max_staleness) for config in configs]


def _view(row: FeedRow, history: str, waiting: tuple[IncompleteGroup, ...] = ()) -> FeedView:
    return FeedView(
        name=row.name,
        mark=f"{row.key}-{int(row.opened * 1e6):x}" + (f"-{history}" if history else ""),
        config=read_config(row),
        opened=row.opened,
        newest=row.newest,
        handed=row.handed,
        committed=row.committed,
        read=bool(row.reader),
        waiting=waiting,
    )


def _digest_report(report: MismatchReport) -> str:
    """Return a digest of a report's content, without the reader's token."""
    return hashlib.sha256(msgspec.json.encode((report.number, report.version, report.lags))).hexdigest()


def _read_earlier_alarms(name: str, report: MismatchReport, earlier: str) -> tuple[MismatchAlarm, ...]:
    """Return the stored alarms of an earlier report with the same id. Raise `Conflict` if the earlier report was different."""
    result = _report_result.decode(earlier)
    if not isinstance(result, _ReportResult):
        return result
    if result.digest != _digest_report(report):
        raise Conflict(
            f"feed {name!r} already has a different report with the id {report.id!r}; give each report its own 'id', and use an id "
            "again only to repeat the same report",
            param="id",
        )
    return result.alarms


def _describe_difference(known: FeedConfig, wanted: FeedConfig) -> str:
    before, after = msgspec.structs.asdict(known), msgspec.structs.asdict(wanted)
    changed = [name for name in before if before[name] != after[name]]
    return "; ".join(f"{name} is {before[name]!r}, not {after[name]!r}" for name in changed)
