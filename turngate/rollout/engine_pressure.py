"""Start fewer rollouts while the gateway's engines are saturated, instead of letting agents wait or fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from turngate.client.gateway import GatewayClient
from turngate.errors import TurngateError

_PAUSE_S = 2.0  # between looks at the engines


class EnginePressure:
    """Asks the gateway whether its engines are saturated. One answer serves all workers of a batch for two seconds."""

    def __init__(self, gateway: GatewayClient) -> None:
        self._gateway = gateway
        self._asking = asyncio.Lock()
        self._answer = (-_PAUSE_S, False)

    async def wait(self, is_held: Callable[[], bool]) -> None:
        """Wait while the engines are saturated and `is_held` returns True."""
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
            except TurngateError:  # an older gateway, or one that is restarting; rollouts notice that themselves
                saturated = False
            self._answer = time.monotonic(), saturated
            return saturated
