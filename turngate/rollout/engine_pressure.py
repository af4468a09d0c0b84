"""Start no new rollouts while the gateway's engines are saturated, so that running agents do not have to wait or fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from turngate.client.gateway import GatewayClient
from turngate.errors import TurngateError

_PAUSE_S = 2.0  # between two requests to the gateway


class EnginePressure:
    """Asks the gateway whether its engines are saturated. All workers of a batch share each answer for two seconds."""

    def __init__(self, gateway: GatewayClient) -> None:
        self._gateway = gateway
        self._asking = asyncio.Lock()
        self._answer = (-_PAUSE_S, False)

    async def wait(self, is_held: Callable[[], bool]) -> None:
        """Wait until the engines are no longer saturated, or until `is_held` returns False."""
        while True:
            if not is_held() or not await self._is_saturated():
                return
            await asyncio.sleep(_PAUSE_S)

    async def _is_saturated(self) -> bool:
        async with self._asking:
            at, saturated = self._answer
            if time.monotonic() - at < _PAUSE_S:
                return saturated
            try:
                saturated = (await self._gateway.engines()).saturated
            except TurngateError:  # an old gateway cannot report this; if the gateway is down, the rollouts report it
                saturated = False
            self._answer = time.monotonic(), saturated
            return saturated
