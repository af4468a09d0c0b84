"""A signal that a batch must stop, with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class StopSignal:
    """Signals that a batch cannot continue, or that its caller does not want it to start more attempts."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.reason = ""  # why the batch must stop, or empty
        self.is_winding_up = False  # whether the caller wants no more attempts to start
        self._note = note
        self._stopped = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self.reason) or self.is_winding_up

    def stop(self, reason: str) -> None:
        """Stop the batch. If it is already stopping, the first reason is kept."""
        if not self.reason:
            self.reason = reason
            self._note(f"stopping: {reason}")
            self._stopped.set()

    async def wait(self) -> None:
        """Wait until `stop` is called."""
        await self._stopped.wait()
