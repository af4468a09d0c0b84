"""Retry requests while a gateway is restarting."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from turngate.client.transport import GatewayUnreachable

T = TypeVar("T")
log = logging.getLogger("turngate")
RESTART_S = 40.0  # how long a restart may take
PAUSES_S = (0.05, 0.2, 0.5, 1.0, 2.0)  # between successive attempts


async def retry_while_unreachable(
    call: Callable[[], Awaitable[T]],
    *,
    limit_s: float | None = None,
    pause_s: float = 0.5,
    unreachable: tuple[type[Exception], ...] = (GatewayUnreachable,),
    warn: bool = False,
) -> T:
    """Repeat a call while the gateway cannot be reached. After `limit_s` seconds (default: `RESTART_S`), raise the last error.

    Use this only for calls that are safe to repeat. With `warn`, log the first failure.
    """
    limit_s = RESTART_S if limit_s is None else limit_s
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return await call()
        except unreachable as error:
            if time.monotonic() > deadline:
                raise
            if warn:
                log.warning("%s; retrying for up to %.0f s", error, limit_s)
                warn = False
        await asyncio.sleep(pause_s)


class Backoff:
    """Growing pauses for a loop that polls a gateway."""

    def __init__(self) -> None:
        self._attempts = 0

    def reset(self) -> None:
        """Return to the shortest pause. Call this when the gateway has answered."""
        self._attempts = 0

    async def pause(self, at_most_s: float | None = None) -> None:
        pause_s = PAUSES_S[min(self._attempts, len(PAUSES_S) - 1)]
        self._attempts += 1
        await asyncio.sleep(pause_s if at_most_s is None else min(pause_s, at_most_s))
