"""Compare the group size of a batch with the group sizes that the gateway's feeds expect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from turngate.client.gateway import GatewayClient
from turngate.errors import TurngateError
from turngate.rollout.plan import BatchPlan, group_name

_EVERY_S = 30.0  # pause between checks, since a feed may be opened while the batch runs


class FeedSizeCheck:
    """Adds a note to the batch for each feed that accepts the batch's groups but expects a different group size."""

    def __init__(self, plan: BatchPlan, gateway: GatewayClient, note: Callable[[str], None]) -> None:
        self._plan = plan
        self._gateway = gateway
        self._note = note
        self._noted: set[str] = set()

    async def run(self, batch: str) -> None:
        """Check repeatedly until cancelled."""
        while True:
            await self.check(batch)
            await asyncio.sleep(_EVERY_S)

    async def check(self, batch: str) -> None:
        """Add a note for each feed that accepts groups of this batch but expects a different group size. A feed gets at most one note."""
        try:
            feeds = await self._gateway.feeds()
        except TurngateError:  # other requests report a gateway that does not respond
            return
        groups = [group_name(batch, task.id, 0) for task in self._plan.tasks]
        for feed in feeds:
            n = feed.config.n
            is_accepting = any(group.startswith(feed.config.groups) for group in groups)
            if n != self._plan.n and is_accepting and feed.name not in self._noted:
                self._noted.add(feed.name)
                self._note(
                    f"feed {feed.name} expects groups of {n}, but this batch runs groups of {self._plan.n}; use the same n for both"
                )
