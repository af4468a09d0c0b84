"""How far a plan may run ahead of TRL's trainer. What the `Batch` of `worker.py` asks before it begins a group.

A feed and a plan do not count alike. A feed may hold deliveries from before the plan, or of another runner; a plan may have groups that
were run before the feed was opened, and that it never delivers; and groups are not complete in the order in which they begin. So
groups are told apart by their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable
from typing import Protocol

from turngate.rollout.group_closer import RECORDED_CLASSES
from turngate.rollout.ledger import FinishedRollout


class Taking(Protocol):
    """The trainer's side: `TurngateWorker`."""

    @property
    def consumed(self) -> int:
        """The newest delivery up to which the trainer has taken every row."""

    def row_taken(self) -> Awaitable[None]:
        """Returns when that may have changed."""


class Pace:
    """At most `ahead` groups have begun of which the trainer has not taken every row. Of one event loop, for one run of a plan."""

    def __init__(self, taking: Taking, *, n: int, ahead: int, newest: int) -> None:
        """`newest`: the feed's last delivery, before the plan runs."""
        self._taking = taking
        self._n = n
        self._ahead = ahead
        self._newest = newest
        self._finished: Counter[str] = Counter()  # of each group of the plan, how many rollouts
        self._heard_of: set[str] = set()
        self._before: set[str] | None = None  # groups that were complete when this run began
        self._read: dict[int, str] = {}  # deliveries past `newest` that are not counted yet, with their groups
        self._taken = 0  # groups of this run that the trainer is done with

    def finished(self, one: FinishedRollout) -> None:
        """The plan has a rollout that is done; first of all those of earlier runs."""
        group = one.rollout.rpartition(".")[0]
        self._finished[group] += 1
        if one.session and one.kind in RECORDED_CLASSES:
            self._heard_of.add(group)

    def delivered(self, number: int, group: str) -> None:
        if number > self._newest:
            self._read[number] = group

    async def __call__(self, number: int) -> None:
        if self._before is None:
            self._before = {group for group in self._heard_of if self._finished[group] >= self._n}
        while number >= self._done(self._before) + self._ahead:
            await self._taking.row_taken()

    def _done(self, before: set[str]) -> int:
        """Groups of the plan with which the trainer is done. What an earlier run has left in the feed is not, nor what others did."""
        consumed = self._taking.consumed
        # A delivery may be read a moment before its runner says here that the group is its own.
        for number in [one for one, group in self._read.items() if one <= consumed and group in self._finished]:
            self._taken += self._read.pop(number) not in before
        return len(before) - max(0, self._newest - consumed) + self._taken
