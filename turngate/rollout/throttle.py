"""How far a batch may be ahead of a trainer: a throttle is awaited before each group begins.

Its argument is the number of earlier groups that a trainer has seen or may still see. Groups without a recorded rollout (all were lost
to faults) reach no trainer and do not count, so `number < trained + max_ahead` is the whole rule. If an earlier group turns out to be
empty while the next one waits, the throttle is cancelled and awaited again with a lower number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from turngate.errors import ConfigError

Throttle = Callable[[int], Awaitable[None]]  # returns when the group may begin


async def no_throttle(number: int) -> None:
    """Let every group begin at once."""


class TrainerThrottle:
    """Keeps a batch at most `max_ahead` groups ahead of a trainer. Belongs to one event loop."""

    def __init__(self, max_ahead: int, trained: int = 0) -> None:
        """`trained`: how many groups are trained already, such as the committed number of a feed."""
        if max_ahead < 1:
            raise ConfigError(f"ahead: {max_ahead} must be at least 1", param="ahead")
        self._max_ahead = max_ahead
        self._trained = trained
        self._more = asyncio.Event()

    def mark_trained(self, groups: int) -> None:
        """Set how many groups are trained by now, in total."""
        self._trained = max(self._trained, groups)
        self._more.set()

    async def __call__(self, number: int) -> None:
        while number >= self._trained + self._max_ahead:
            self._more.clear()
            await self._more.wait()
