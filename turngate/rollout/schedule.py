"""Decide which rollout of a batch runs next: a retry that is due, or the next rollout of a group that the throttle allows."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import suppress

import msgspec

from turngate.common.aio import run_to_completion, wait_for_tasks
from turngate.rollout.group_closer import GroupCloser
from turngate.rollout.plan import BatchPlan, group_name
from turngate.rollout.progress import BatchProgress
from turngate.rollout.stop_signal import StopSignal
from turngate.rollout.throttle import Throttle
from turngate.tasks.task import Task


class RolloutItem(msgspec.Struct, frozen=True):
    """A rollout of a batch that still needs to run."""

    id: str
    task: Task
    round: int
    index: int


class Schedule:
    """Assigns rollouts to workers.

    Workers keep waiting while an attempt is running or a retry request is undecided, since either may add a rollout.
    """

    def __init__(
        self,
        plan: BatchPlan,
        progress: BatchProgress,
        report: Callable[[], None],
        closer: GroupCloser,
        throttle: Throttle,
        stop: StopSignal,
    ) -> None:
        self._plan = plan
        self._progress = progress
        self._report = report
        self._closer = closer
        self._throttle = throttle
        self._stop = stop
        self._changed = asyncio.Condition()
        self._fresh: deque[RolloutItem] = deque()  # rollouts of the current group that no worker has taken yet
        self._all_supplied = False  # all groups have started
        self._retries: list[tuple[float, int, RolloutItem]] = []  # a heap, ordered by due time
        self._order = itertools.count()
        self._pending = 0  # number of running attempts and undecided retry requests
        self._workers = 0  # number of workers that will call `next` again
        self._attempts: dict[str, int] = {}  # rollout → number of its unsettled attempt
        self._requested: set[str] = set()  # rollouts that run again on request

    # ── groups and retries ──────────────────────────────────────────────────────────────────────────────────────

    async def supply(self, batch: str, finished: Container[str]) -> None:
        """Add the groups one by one.

        A group is added once workers have taken all rollouts of the previous group and the throttle allows it.
        """
        for number, group in enumerate(self._iter_groups(batch)):
            items = [item for item in group if item.id not in finished and item.id not in self._requested]
            if not items:
                continue
            self._progress.held = True
            await self._wait_for_throttle(number)
            self._progress.held, self._progress.round = False, items[0].round
            async with self._changed:
                self._fresh.extend(items)
                self._changed.notify_all()
                await self._changed.wait_for(lambda: not self._fresh)
        self._all_supplied = True
        await self.notify()

    async def _wait_for_throttle(self, number: int) -> None:
        """Wait until the throttle allows group `number` to start. Earlier groups that no trainer will see are subtracted from it."""
        closer = self._closer
        while True:
            closer.empty_group_added.clear()
            allowed = asyncio.ensure_future(self._throttle(number - closer.empty_groups))
            fewer = asyncio.create_task(closer.empty_group_added.wait())
            try:
                await asyncio.wait({allowed, fewer}, return_when=asyncio.FIRST_COMPLETED)
                if allowed.done():
                    return allowed.result()
            finally:
                allowed.cancel()
                fewer.cancel()
                await run_to_completion(wait_for_tasks(allowed, fewer))

    def _iter_groups(self, batch: str) -> Iterator[list[RolloutItem]]:
        for number in range(self._plan.rounds):
            for task in self._plan.order_tasks(number):
                group = group_name(batch, task.id, number)
                yield [RolloutItem(f"{group}.{index}", task, number, index) for index in range(self._plan.n)]

    def add_retry(self, item: RolloutItem, wait_s: float = 0.0) -> None:
        """Schedule a retry that is due in `wait_s` seconds. Waiting workers do not see it until `notify` or `end_attempt` is called."""
        heapq.heappush(self._retries, (time.monotonic() + wait_s, next(self._order), item))

    def exclude(self, rollout: str) -> None:
        """Skip a rollout when its group is added, because a retry request has already added the rollout."""
        self._requested.add(rollout)

    # ── workers ─────────────────────────────────────────────────────────────────────────────────────────────────

    def start_workers(self, count: int) -> None:
        """Set the number of workers that call `next`."""
        self._workers = count

    async def next(self) -> RolloutItem | None:
        """Return a retry that is due or else the next rollout of a group, waiting if necessary.

        Return None if no rollouts are left or the batch is stopping.
        """
        async with self._changed:
            while not self._stop:
                due_s = self._retries[0][0] - time.monotonic() if self._retries else None
                if due_s is not None and due_s <= 0:
                    self._pending += 1
                    return heapq.heappop(self._retries)[2]
                if self._fresh:
                    self._pending += 1
                    item = self._fresh.popleft()
                    if not self._fresh:
                        self._changed.notify_all()
                    return item
                if self._all_supplied and due_s is None and not self._pending:
                    self._workers -= 1
                    return None
                with suppress(TimeoutError):
                    async with asyncio.timeout(due_s):
                        await self._changed.wait()
        return None

    def start_attempt(self, rollout: str, attempt: int) -> None:
        """Mark an attempt as running until `end_attempt` is called."""
        self._attempts[rollout] = attempt

    async def end_attempt(self, rollout: str) -> None:
        """Mark a rollout as no longer running. Call this once for each rollout that `next` has returned."""
        self._attempts.pop(rollout, None)
        await self.release()

    # ── retry requests ──────────────────────────────────────────────────────────────────────────────────────────

    def hold(self) -> None:
        """Keep the workers waiting for more rollouts until `release` is called."""
        self._pending += 1

    async def release(self) -> None:
        """Undo one call to `hold`."""
        self._pending -= 1
        await self.notify()

    def is_running(self, rollout: str, attempt: int) -> bool:
        return self._attempts.get(rollout) == attempt

    @property
    def accepts_more(self) -> bool:
        """Whether a rollout that is added now will run, unless the batch is stopped first."""
        return self._workers > 0 and not self._stop

    async def wait_until_settled(self, rollout: str, attempt: int, limit_s: float | None) -> bool:
        """Wait until an attempt has ended or this run accepts no more rollouts. Return False if that takes longer than `limit_s`."""
        try:
            async with asyncio.timeout(limit_s), self._changed:
                await self._changed.wait_for(lambda: not (self.is_running(rollout, attempt) and self.accepts_more))
        except TimeoutError:
            return False
        return True

    async def notify(self) -> None:
        """Report the progress, and wake all tasks that are waiting for the schedule to change."""
        self._progress.retrying = len(self._retries)
        self._report()
        async with self._changed:
            self._changed.notify_all()
