"""Record the events of active rollouts: those of the service, and those of the gateways."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing

from turngate.client.gateway import GatewayClient
from turngate.errors import StoreError
from turngate.service.active_rollout import ActiveRollout
from turngate.service.result import RolloutEvent
from turngate.service.storage import ServiceStorage
from turngate.store.events import GatewayEvent
from turngate.types import Json

log = logging.getLogger("turngate")
_DRAIN_S = 20.0
_UNKNOWN_SESSION_S = 0.05  # pause before the events are read again while the gateway does not have the session yet
_STORE_RETRY_S = 1.0


class RolloutEventLog:
    """Appends events to the storage, and wakes the callers that are waiting for events."""

    def __init__(self, storage: ServiceStorage) -> None:
        self._storage = storage

    def append(
        self,
        active: ActiveRollout,
        kind: str,
        data: dict[str, Json],
        *,
        seq: int | None = None,
        at: float | None = None,
    ) -> None:
        """Store an event, and notify waiting callers. If the event cannot be stored, log an error and let the rollout continue."""
        event = RolloutEvent(cursor=active.cursor + 1, time=at or time.time(), kind=kind, data=data, seq=seq)
        try:
            self._storage.add_event(active.id, event)
        except StoreError as error:
            log.error("rollout %s: event %r could not be stored: %s", active.id, kind, error.message)
            return
        active.cursor += 1
        active.seq = seq or active.seq
        active.notify()

    async def follow(self, active: ActiveRollout, client: GatewayClient) -> None:
        """Append the gateway's events as they occur, until cancelled. In direct mode, which has no gateway, do nothing."""
        if active.choice.mode != "direct":
            await active.announced.wait()
            await self._copy(active, client, wait=True)

    async def drain(self, active: ActiveRollout, client: GatewayClient) -> None:
        """Append the gateway's remaining events after the rollout has ended. Raise `TimeoutError` if this takes too long."""
        async with asyncio.timeout(_DRAIN_S):
            await self._copy(active, client, wait=False)

    async def _copy(self, active: ActiveRollout, client: GatewayClient, *, wait: bool) -> None:
        while True:
            pause_s = _UNKNOWN_SESSION_S
            async with aclosing(client.events(active.id, active.seq, wait=wait)) as events:
                async for event in events:
                    if not self._append_from_gateway(active, event):
                        pause_s = _STORE_RETRY_S
                        break
                else:
                    if not wait:
                        return
            await asyncio.sleep(pause_s)

    def _append_from_gateway(self, active: ActiveRollout, event: GatewayEvent) -> bool:
        """Store a gateway event unless it is already stored. Return False if it could not be stored and must be read again."""
        if event.seq > active.seq:
            self.append(active, event.kind, event.data, seq=event.seq, at=event.time)
        return active.seq >= event.seq
