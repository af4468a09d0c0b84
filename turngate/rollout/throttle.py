"""How far a runner may be ahead of a trainer: what `batch.py` asks before it begins a group.

The number that is asked with counts the groups before it that a trainer has heard of, or may yet. Groups that nothing came of (every
rollout lost to faults) reach no trainer and are not counted, so `number < trained + ahead` is the whole rule. A group that turns out to be
such a one while the next is waiting makes the runner ask again with a lower number: a pace may be cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from turngate.errors import ConfigError

Throttle = Callable[[int], Awaitable[None]]  # returns when the group may begin


async def no_throttle(number: int) -> None:
    """The pace of a batch that nobody has to keep up with."""


class TrainerThrottle:
    """At most so many groups have begun that a trainer is not done with. Of one event loop."""

    def __init__(self, most: int, trained: int = 0) -> None:
        """`trained`: with how many it is done already, such as the committed number of its feed."""
        if most < 1:
            raise ConfigError(f"ahead: {most} must be at least 1", param="ahead")
        self._most = most
        self._trained = trained
        self._more = asyncio.Event()

    def mark_trained(self, groups: int) -> None:
        """So many by now, in all."""
        self._trained = max(self._trained, groups)
        self._more.set()

    async def __call__(self, number: int) -> None:
        while number >= self._trained + self._most:
            self._more.clear()
            await self._more.wait()
