"""Whether a batch has to stop, and why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class StopSignal:
    """Set once by whatever finds that the batch cannot go on, or by the caller who winds it up."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.reason = ""  # why it has to stop; empty: it does not
        self.is_winding_up = False  # the caller wants no new attempts
        self._note = note
        self._stopped = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self.reason) or self.is_winding_up

    def stop(self, reason: str) -> None:
        """Stop everything. The first reason counts."""
        if not self.reason:
            self.reason = reason
            self._note(f"stopping: {reason}")
            self._stopped.set()

    async def wait(self) -> None:
        """Wait until everything has to stop."""
        await self._stopped.wait()
