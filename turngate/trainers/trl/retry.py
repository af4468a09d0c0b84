"""Wait for a gateway that restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from turngate.client.gateway import GatewayUnreachable

T = TypeVar("T")
_RESTART_S = 40.0


async def patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Call the gateway, and repeat the call while it cannot be reached, for as long as a restart takes."""
    deadline = time.monotonic() + _RESTART_S
    while True:
        try:
            return await ask()
        except GatewayUnreachable:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.5)
