"""Limit how far a plan runs ahead of TRL's trainer. A `Batch` calls the throttle before it starts a group.

Groups are identified by name, because a feed and a plan count them differently. A feed may contain deliveries of an earlier plan or of
another runner. A plan may have groups from before the feed was created, which are never delivered. Groups may finish in a different
order than they started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable
from typing import Protocol

from turngate.rollout.group_closer import RECORDED_CLASSES
from turngate.rollout.ledger import FinishedRollout


class RowConsumer(Protocol):
    """The part of the trainer's state that the throttle needs."""

    @property
    def consumed(self) -> int:
        """The highest delivery number up to which the trainer has taken all rows."""

    def row_taken(self) -> Awaitable[None]:
        """Wait until the trainer takes a row. This may return early, so check `consumed` again."""


class DeliveryThrottle:
    """Allows a plan at most `ahead` started groups whose rows the trainer has not taken yet. Create one throttle for each run of a plan."""

    def __init__(self, consumer: RowConsumer, *, n: int, ahead: int, newest: int) -> None:
        """Create a throttle. `newest` is the number of the feed's last delivery before the plan runs."""
        self._consumer = consumer
        self._n = n
        self._ahead = ahead
        self._newest = newest
        self._finished: Counter[str] = Counter()  # rollouts per group of the plan
        self._recorded: set[str] = set()
        self._before: set[str] | None = None  # groups that were already complete when this run started
        self._read: dict[int, str] = {}  # group of each delivery after `newest` that is not counted yet
        self._taken = 0  # groups of this run whose rows the trainer has taken

    def record_finished(self, finished: FinishedRollout) -> None:
        """Count a finished rollout of the plan.

        The runner reports the rollouts of earlier runs before it starts new ones. Therefore, when the throttle is first called, it knows
        which groups were already complete.
        """
        group = finished.rollout.rpartition(".")[0]
        self._finished[group] += 1
        if finished.session and finished.kind in RECORDED_CLASSES:
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
        """Count the groups of the plan that the trainer is done with: those of this run whose rows it has taken, and those of earlier runs.

        Deliveries up to `newest` whose rows the trainer has not taken yet are subtracted. Groups of other runners are not counted.
        """
        consumed = self._consumer.consumed
        # A delivery may arrive just before the runner reports its group.
        for number in [one for one, group in self._read.items() if one <= consumed and group in self._finished]:
            self._taken += self._read.pop(number) not in before
        return len(before) - max(0, self._newest - consumed) + self._taken
