"""Limits how far a plan runs ahead of TRL's trainer. A `Batch` calls it before it starts a group.

A feed and a plan count differently. A feed may hold deliveries of an earlier plan or of another runner; a plan may have groups from before
the feed was opened, which are never delivered; and groups finish in another sequence than they
start. So groups are identified by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable
from typing import Protocol

from turngate.rollout.group_closer import RECORDED_CLASSES
from turngate.rollout.ledger import FinishedRollout


class RowConsumer(Protocol):
    """The trainer's side of the throttle."""

    @property
    def consumed(self) -> int:
        """The newest delivery up to which the trainer has taken every row."""

    def row_taken(self) -> Awaitable[None]:
        """Return when `consumed` may have changed."""


class DeliveryThrottle:
    """Allows at most `ahead` started groups whose rows the trainer has not all taken. For one event loop and one run of a plan."""

    def __init__(self, consumer: RowConsumer, *, n: int, ahead: int, newest: int) -> None:
        """`newest`: the feed's last delivery, before the plan runs."""
        self._consumer = consumer
        self._n = n
        self._ahead = ahead
        self._newest = newest
        self._finished: Counter[str] = Counter()  # rollouts per group of the plan
        self._recorded: set[str] = set()
        self._before: set[str] | None = None  # groups that were complete when this run started
        self._read: dict[int, str] = {}  # groups of deliveries past `newest` that are not counted yet
        self._taken = 0  # groups of this run that the trainer has finished

    def record_finished(self, one: FinishedRollout) -> None:
        """Count a finished rollout of the plan; those of earlier runs come first."""
        group = one.rollout.rpartition(".")[0]
        self._finished[group] += 1
        if one.session and one.kind in RECORDED_CLASSES:
            self._recorded.add(group)

    def record_delivery(self, number: int, group: str) -> None:
        if number > self._newest:
            self._read[number] = group

    async def __call__(self, number: int) -> None:
        if self._before is None:
            self._before = {group for group in self._recorded if self._finished[group] >= self._n}
        while number >= self._count_done(self._before) + self._ahead:
            await self._consumer.row_taken()

    def _count_done(self, before: set[str]) -> int:
        """Count the groups of the plan that the trainer has finished, without those of other runners."""
        consumed = self._consumer.consumed
        # A delivery may be read just before its runner reports the group here.
        for number in [one for one, group in self._read.items() if one <= consumed and group in self._finished]:
            self._taken += self._read.pop(number) not in before
        return len(before) - max(0, self._newest - consumed) + self._taken
