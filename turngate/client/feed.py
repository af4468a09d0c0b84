"""Feed client for trainers: delivers complete groups, one after another, as numpy rows or as trees.

    async with GatewayClient(url, key) as gateway, await Feed.open(gateway, "math", FeedConfig(n=8)) as feed:
        async for delivery in feed:
            train(delivery.rows())
            save_checkpoint(delivery.number)
            await feed.commit(delivery.number)

    with BlockingFeed(url, key, "math", FeedConfig(n=8)) as feed:      # for synchronous code
        for delivery in feed: …

A restarted trainer continues after the last delivery number it committed, or after the number in its own checkpoint (`after=`). With that
number, also pass the feed's mark from the checkpoint (`mark=`): if a different feed now has the same name, opening the feed raises
`OtherFeed`. The client waits while the gateway restarts. If a second trainer opens the same feed, it takes over the feed, and the first
trainer gets `TakenOver`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import operator
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from types import TracebackType
from typing import Any, Protocol, SupportsIndex, TypeVar, get_args

import numpy as np

from turngate.client.delivery import DamagedDelivery, DeliveredRollout, DeliveredTree, Delivery, Row, decode_delivery
from turngate.client.gateway import GatewayClient, GatewayUnreachable, RequestRejected
from turngate.client.group_sizes import GroupSizeWatch
from turngate.client.protocol import MAX_WAIT_S, FeedConfig, FeedForm, MismatchReport, check_feed_name, remove_history
from turngate.client.retry import Backoff, retry_while_unreachable
from turngate.errors import BadRequest, TurngateError
from turngate.trace.mismatch import LagMismatch, MismatchAlarm, MismatchMeter
from turngate.trace.sample import RowSpan

__all__ = [
    "BlockingFeed",
    "DamagedDelivery",
    "DeliveredRollout",
    "DeliveredTree",
    "Delivery",
    "DeliveryTeacher",
    "Feed",
    "FeedConfig",
    "FeedForm",
    "OtherFeed",
    "Row",
    "RowSpan",
    "TakenOver",
]

T = TypeVar("T")
log = logging.getLogger("turngate")
_WAIT_S = 30  # the longest that one request waits at the gateway
_RESTART_S = 60.0  # how long to wait for a gateway to restart


class TakenOver(TurngateError):
    """This trainer no longer reads the feed: another one has taken it over, it was deleted, or its store was restored from a backup.

    After a takeover, no delivery is lost: by default, the new reader continues after the last committed one. After a restore, open the feed
    again with the number in your checkpoint.
    """

    status = 409
    kind = "feed_taken_over"


class OtherFeed(TurngateError):
    """No feed has both this name and the mark in the checkpoint, so the checkpoint's delivery numbers do not apply."""

    status = 409
    kind = "feed_is_another"


class DeliveryTeacher(Protocol):
    """Adds the scores of a teacher to deliveries, as `turngate.trainers.teacher.FeedTeacher` does."""

    async def score(self, delivery: Delivery) -> Delivery:
        """Return the delivery with scores. Raise an error if the teacher fails; the call can be repeated."""


class Feed(AbstractAsyncContextManager["Feed"]):
    """An async iterable of deliveries. It waits for new ones until it is closed.

    Create it with `Feed.open`, and use it from one task at a time.
    """

    def __init__(
        self,
        gateway: GatewayClient,
        name: str,
        config: FeedConfig,
        mark: str,
        reader: str,
        committed: int,
        after: int,
        limit: int,
        teacher: DeliveryTeacher | None = None,
        form: FeedForm = "rows",
    ) -> None:
        self.name = name
        self.config = config
        # Identifies this feed in checkpoints. A recreated feed with the same name has a different mark.
        self.mark = mark
        self.committed = committed
        self._gateway = gateway
        self._reader = reader
        self._after = after
        self._limit = limit
        self._teacher = teacher
        self._form: FeedForm = form
        self._ready: deque[Delivery] = deque()
        self._closed = False
        self._sizes = GroupSizeWatch(name, config.n)
        self._waited_s = 0.0  # time spent waiting since the last delivery

    @classmethod
    async def open(
        cls,
        gateway: GatewayClient,
        name: str,
        config: FeedConfig,
        *,
        after: int | None = None,
        mark: str = "",
        limit: int = 1,
        teacher: DeliveryTeacher | None = None,
        form: FeedForm = "rows",
    ) -> Feed:
        """Open the feed and become its reader. Without `mark`, create the feed if necessary.

        `after` is the delivery number in the trainer's own checkpoint; None means the last committed number. `mark` is the feed's mark in
        that checkpoint: `OtherFeed` is raised if no feed has both this name and this mark. If `mark` is empty, any feed with this name is
        accepted. `limit` is the maximum number of deliveries per request. Staleness is checked when a delivery is fetched, so with a higher
        `limit`, a delivery may be staler than the feed allows by the time it is used. `teacher` scores the rows of each delivery before it
        is returned. With `form="tree"`, a delivery has trees (`Delivery.trees`) instead of rows. In a tree, a prefix that several rows
        share occurs once.
        """
        after, limit = _check_arguments(name, after, limit, teacher, form)
        if mark:  # check the mark first: if the feed is gone, open_feed would create a new one
            try:
                current = (await _retry_as_reader(lambda: gateway.show_feed(name))).mark
            except TakenOver:
                current = ""
            _check_mark(name, mark, current)
        opened = (await _retry(lambda: gateway.open_feed(name, config))).mark
        if mark:
            _check_mark(name, mark, opened)
        reader = await _retry_as_reader(lambda: gateway.take_over_feed(name, after, mark))
        view = await _retry_as_reader(lambda: gateway.show_feed(name))
        if mark:
            _check_mark(name, mark, view.mark)
        elif remove_history(opened) != remove_history(view.mark):
            raise TakenOver(f"feed {name} was deleted and recreated while it was being opened; open it again")
        after = view.committed if after is None else after
        return cls(gateway, name, config, view.mark, reader, view.committed, after, limit, teacher, form)

    async def __aenter__(self) -> Feed:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True

    def __aiter__(self) -> AsyncIterator[Delivery]:
        return self._forever()

    async def _forever(self) -> AsyncIterator[Delivery]:
        while not self._closed:
            if (delivery := await self.next(_WAIT_S)) is not None:
                yield delivery

    async def next(self, timeout_s: float) -> Delivery | None:
        """Return the next delivery, or None if none arrives within `timeout_s` seconds. Cancelling the call loses no delivery.

        `timeout_s` does not include the time that a teacher takes to score the delivery.
        """
        end = time.monotonic() + timeout_s
        backoff = Backoff()
        while not self._ready:
            start = time.monotonic()
            left = max(0.0, end - start)
            try:
                await self._fetch(min(left, _WAIT_S, MAX_WAIT_S, self._until_look_s))
                backoff.reset()
                if not self._ready:
                    self._waited_s += time.monotonic() - start
                    await self._check_incomplete_groups()
            except GatewayUnreachable:
                await backoff.pause(left)
            if not self._ready and time.monotonic() >= end:
                return None
        if self._teacher is None:
            return self._ready.popleft()
        scored = await self._teacher.score(self._ready[0])  # if this fails or is cancelled, the next call repeats it
        self._ready.popleft()
        return scored

    async def commit(self, number: int) -> None:
        """Commit all deliveries up to `number`. Save a checkpoint first: a restarted trainer continues after `number`. Safe to repeat."""
        committed = await _retry_as_reader(lambda: self._gateway.commit_feed(self.name, self._reader, number))
        self.committed = max(self.committed, committed)

    async def report_mismatch(
        self, number: int, version: int, rows: Sequence[Row], logprobs: Sequence[np.ndarray]
    ) -> tuple[MismatchAlarm, ...]:
        """Compare the trainer's log-probabilities with the recorded ones, report statistics of the differences, and return any alarms.

        Call this once per update, before the weights change. `logprobs` contains one array for each row, with one value for each
        trained token (where `row.mask` is set), computed with the weights of policy version `version`. `number` is the number of the
        last delivery that the update trains on.
        """
        if len(rows) != len(logprobs):
            raise BadRequest(
                f"logprobs must have one array for each row (arrays: {len(logprobs)}, rows: {len(rows)})",
                param="logprobs",
            )
        meter = MismatchMeter()
        for row, computed in zip(rows, logprobs, strict=True):
            meter.add(np.asarray(computed), row.logprobs[row.mask], row.token_versions()[row.mask], version)
        return await self.report_lags(number, version, meter.summarize())

    async def report_lags(self, number: int, version: int, lags: tuple[LagMismatch, ...]) -> tuple[MismatchAlarm, ...]:
        """Report statistics that the caller has already computed. If `lags` is empty, send nothing. See `report_mismatch`."""
        if not lags:
            return ()
        report = MismatchReport(reader=self._reader, number=number, version=version, lags=lags, id=uuid.uuid4().hex)
        return await _retry_as_reader(lambda: self._gateway.report_mismatch(self.name, report))

    async def _fetch(self, wait_s: float) -> None:
        page = await _as_reader(
            self._gateway.fetch_deliveries(
                self.name, self._reader, after=self._after, wait=wait_s, limit=self._limit, form=self._form
            )
        )
        self.committed = max(self.committed, page.committed)
        deliveries = [decode_delivery(raw) for raw in page.deliveries]
        for expected, delivery in enumerate(deliveries, self._after + 1):
            if delivery.number != expected:
                raise DamagedDelivery(f"feed {self.name}: received delivery {delivery.number} instead of {expected}")
            if self._form == "tree" and any(rolled.rows for rolled in delivery.rollouts):
                raise DamagedDelivery(
                    f'feed {self.name}: the gateway is too old to deliver trees; upgrade it, or open the feed with form="rows"'
                )
        self._ready.extend(deliveries)
        self._after += len(deliveries)
        for delivery in deliveries:
            self._sizes.add_delivery(delivery.group, len(delivery.rollouts), self._waited_s)
            self._waited_s = 0.0

    @property
    def _until_look_s(self) -> float:
        """Seconds of waiting until the incomplete groups are checked again.

        The value is at least 1, so that requests are not sent in rapid succession.
        """
        return max(1.0, self._sizes.next_look_s - self._waited_s)

    async def _check_incomplete_groups(self) -> None:
        if self._sizes.is_look_due(self._waited_s):
            view = await _as_reader(self._gateway.show_feed(self.name))
            self._sizes.add_incomplete(view.waiting, self._waited_s)


def _check_arguments(
    name: str, after: int | None, limit: int, teacher: DeliveryTeacher | None, form: FeedForm
) -> tuple[int | None, int]:
    """Raise an error if an argument is invalid, before anything is sent to the gateway. Return `after` and `limit` as Python integers."""
    check_feed_name(name)
    if form not in get_args(FeedForm):
        raise ValueError(f"'form' must be one of {', '.join(map(repr, get_args(FeedForm)))}, not {form!r}")
    if form != "rows" and teacher is not None:
        raise ValueError("with a teacher, 'form' must be 'rows', because teachers score rows")
    return None if after is None else _as_integer("after", after, 0), _as_integer("limit", limit, 1)


def _as_integer(name: str, value: SupportsIndex, least: int) -> int:
    """Return an integer of any type, such as numpy's, as a Python integer.

    Raise `ValueError` if the value is not an integer, or if it is less than `least`.
    """
    with suppress(TypeError):
        if not isinstance(value, bool) and (number := operator.index(value)) >= least:
            return number
    raise ValueError(f"'{name}' must be a whole number, {least} or greater, not {value!r}")


def _check_mark(name: str, expected: str, current: str) -> None:
    """Raise `OtherFeed` if the two marks belong to different feeds. `current` is empty if the feed does not exist."""
    if remove_history(expected) != remove_history(current):  # the gateway checks the history
        why, alternative = "it was deleted, or the gateway uses a different store", ""
        if current:
            why = "it was deleted and recreated, or the gateway uses a different store"
            alternative = ", or pass the current feed's mark and one of its delivery numbers"
        raise OtherFeed(
            f"feed {name}: the feed in the checkpoint (mark {expected}) was not found: {why}; check that the gateway uses the same "
            f"store as before; if it does, open the feed without 'after' and 'mark'{alternative}"
        )


async def _retry(call: Callable[[], Awaitable[T]]) -> T:
    return await retry_while_unreachable(call, limit_s=_RESTART_S, warn=True)


async def _retry_as_reader(call: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return await _retry(lambda: _as_reader(call()))


async def _as_reader(request: Coroutine[Any, Any, T]) -> T:
    """Await a request. Raise `TakenOver` if it is rejected because this trainer no longer reads the feed."""
    try:
        return await request
    except RequestRejected as error:
        if error.answered == 404 or (error.answered == 409 and error.param == "reader"):
            raise TakenOver(error.message) from None
        raise


class BlockingFeed(AbstractContextManager["BlockingFeed"]):
    """A `Feed` for synchronous code. The connection runs in a separate thread. Ctrl-C during a wait loses no delivery."""

    def __init__(
        self,
        url: str,
        admin_key: str,
        name: str,
        config: FeedConfig,
        *,
        after: int | None = None,
        mark: str = "",
        limit: int = 1,
        teacher: DeliveryTeacher | None = None,
        form: FeedForm = "rows",
    ) -> None:
        after, limit = _check_arguments(name, after, limit, teacher, form)
        self._url, self._key, self._teacher = url, admin_key, teacher
        self._form: FeedForm = form
        self._name, self._config, self._from, self._known, self._limit = name, config, after, mark, limit
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"turngate-feed-{name}", daemon=True)
        self._gateway: GatewayClient | None = None
        self._feed: Feed | None = None
        # The pending request. After an interrupted wait, the next call resumes it, so its delivery is not lost.
        self._pending: concurrent.futures.Future[Delivery | None] | None = None

    @property
    def committed(self) -> int:
        return self._opened.committed

    @property
    def mark(self) -> str:
        return self._opened.mark

    def __enter__(self) -> BlockingFeed:
        self._thread.start()
        try:
            self._feed = self._run(self._open())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Delivery]:
        """Iterate over deliveries for as long as the feed is open."""
        while not self._loop.is_closed():
            if (delivery := self.next(_WAIT_S)) is not None:
                yield delivery

    def next(self, timeout_s: float) -> Delivery | None:
        """Return the next delivery, or None if none arrives within `timeout_s` seconds.

        After an interrupted wait, the next call continues that wait, with the time limit of the interrupted call.
        """
        if self._pending is None:
            self._pending = asyncio.run_coroutine_threadsafe(self._opened.next(timeout_s), self._loop)
        try:
            delivery = self._pending.result()
        except KeyboardInterrupt:
            raise  # the request continues; the next call picks it up
        except TurngateError as error:
            self._pending = None
            raise _shorten_traceback(error) from None
        except BaseException:
            self._pending = None
            raise
        self._pending = None
        return delivery

    def commit(self, number: int) -> None:
        self._run(self._opened.commit(number))

    def report_mismatch(
        self, number: int, version: int, rows: Sequence[Row], logprobs: Sequence[np.ndarray]
    ) -> tuple[MismatchAlarm, ...]:
        return self._run(self._opened.report_mismatch(number, version, rows, logprobs))

    def close(self) -> None:
        if self._loop.is_closed():
            return
        try:
            if self._thread.is_alive():
                self._run(self._end())
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
        finally:
            if not self._thread.is_alive():
                self._loop.close()

    @property
    def _opened(self) -> Feed:
        if self._feed is None or self._loop.is_closed():
            raise RuntimeError("the feed is not open; use it only inside its `with` block")
        return self._feed

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except TurngateError as error:
            raise _shorten_traceback(error) from None

    async def _open(self) -> Feed:
        self._gateway = await GatewayClient(self._url, self._key).__aenter__()
        return await Feed.open(
            self._gateway,
            self._name,
            self._config,
            after=self._from,
            mark=self._known,
            limit=self._limit,
            teacher=self._teacher,
            form=self._form,
        )

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._gateway is not None:
            await self._gateway.__aexit__(None, None, None)


def _shorten_traceback(error: TurngateError) -> TurngateError:
    """Remove the frames of the feed's thread from an error, so that the traceback shows mainly the caller's own code."""
    return error.with_traceback(None)
