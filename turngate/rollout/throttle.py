"""Limit how far a batch runs ahead of a trainer. A throttle is a function that is awaited before each group starts.

Its argument is the number of earlier groups that a trainer has seen or may still see. `TrainerThrottle` lets the group start if this number
is less than the number of groups already trained on plus `max_ahead`. A group is empty if none of its rollouts was recorded, for example
because all of them ended with infrastructure faults. Empty groups never reach a trainer, so they are not counted. If an earlier group turns
out to be empty while a group is waiting, the throttle is cancelled and awaited again with a lower number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from turngate.errors import ConfigError

Throttle = Callable[[int], Awaitable[None]]  # returns when the group may start


async def no_throttle(number: int) -> None:
    """Let every group start immediately."""


class TrainerThrottle:
    """Keeps a batch at most `max_ahead` groups ahead of a trainer. Use it in a single event loop."""

    def __init__(self, max_ahead: int, trained: int = 0) -> None:
        """Create a throttle. `trained` is the number of groups already trained on, such as a feed's committed position."""
        if max_ahead < 1:
            raise ConfigError(f"max_ahead must be at least 1, not {max_ahead}", param="max_ahead")
        self._max_ahead = max_ahead
        self._trained = trained
        self._more = asyncio.Event()

    def mark_trained(self, groups: int) -> None:
        """Report the total number of groups that have been trained on. A number lower than an earlier one is ignored."""
        self._trained = max(self._trained, groups)
        self._more.set()

    async def __call__(self, number: int) -> None:
        while number >= self._trained + self._max_ahead:
            self._more.clear()
            await self._more.wait()
