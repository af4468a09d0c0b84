"""A signal that a batch must stop, with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class StopSignal:
    """Signals that a batch cannot continue, or that its caller wants it to start no more attempts."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.reason = ""  # why the batch must stop; empty if it need not
        self.is_winding_up = False  # no new attempts are started
        self._note = note
        self._stopped = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self.reason) or self.is_winding_up

    def stop(self, reason: str) -> None:
        """Stop the batch. Only the first reason is kept."""
        if not self.reason:
            self.reason = reason
            self._note(f"stopping: {reason}")
            self._stopped.set()

    async def wait(self) -> None:
        """Wait until `stop` is called."""
        await self._stopped.wait()
