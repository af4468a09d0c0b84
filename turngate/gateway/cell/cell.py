"""The cell's part of a gateway: its lease, its outbox, and the threads that renew the lease and ship the sessions.

With several workers, worker 0 runs the threads for all of them. Each worker watches the lease itself.
"""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path

from turngate.common.database_url import parse_database_url
from turngate.common.sharding import Shard
from turngate.config import ServeConfig
from turngate.errors import ConfigError
from turngate.gateway.cell.keeper import CellName, LeaseKeeper, LeaseRegistry
from turngate.gateway.cell.lease_file import LeaseFile, create_lease_file
from turngate.gateway.cell.serving import LeasedFence, ServingGuard, ServingPermit
from turngate.gateway.cell.shipping import ShipmentTarget, Shipper
from turngate.gateway.fence import Fence
from turngate.gateway.fence_state import FenceState
from turngate.gateway.replicas import ReplicaSet
from turngate.gateway.sessions import Sessions
from turngate.gateway.shared_engines import FollowedEngines
from turngate.gateway.shared_fence import FenceFollower
from turngate.gateway.weights import LocalBarrier
from turngate.store.shared.shipments import ShipmentWriter, copy_settings
from turngate.store.shared.store import SharedStore
from turngate.store.sqlite import Store

_LAST_SHIPMENTS_S = 5.0  # time to ship due sessions when the cell stops
_TOKENIZER_SETTINGS = ("tokenizer:", "renderer:")


class Cell:
    """One worker's part of a cell. Call `start` before serving, and `stop` afterwards."""

    def __init__(self, config: ServeConfig, store: Store, shard: Shard) -> None:
        self._config = config
        self._store = store
        self._url = config.shared
        data = Path(config.data)
        if shard.workers == 1:  # otherwise the front process creates it
            create_lease_file(data)
        self._file = LeaseFile(data)
        self.permit = ServingPermit(self._file)
        self.guard = ServingGuard(self.permit, store.outbox, config.max_unshipped)
        self._is_first = shard.number == 0
        self._keeper = LeaseKeeper(self._file, config.lease_s, store.outbox, self._open_registry)
        self._shipper = Shipper(store.outbox, store.open_reader, self._open_target)
        self._watching: asyncio.Task[None] | None = None
        self._followed: SharedStore | None = None
        self._opened: list[SharedStore] = []

    def create_fence(self, version: int, model: str) -> LeasedFence:
        return LeasedFence(self.permit, version, model)

    def create_follower(
        self,
        fence: Fence,
        barrier: LocalBarrier,
        state: FenceState,
        replicas: ReplicaSet,
        sessions: Sessions,
        engines: FollowedEngines | None,
    ) -> FenceFollower:
        """Return a follower of the shared fence and engines for this worker. Until it starts, the fence admits no calls."""
        return FenceFollower(
            fence,
            barrier,
            state,
            replicas,
            lambda: self.open_shared().fence,
            sessions.interrupt_calls,
            id=uuid.uuid4().hex,
            name=self._config.cell_name or socket.gethostname(),
            ttl_s=self._config.lease_s,
            engines=engines,
        )

    def open_shared(self) -> SharedStore:
        """Return the shared store over the connection of the follower."""
        if self._followed is None:
            self._followed = self._open()
        return self._followed

    def _open(self) -> SharedStore:
        """Open the shared store until the cell stops."""
        store = _open_shared(self._url)
        self._opened.append(store)
        return store

    async def start(self, sessions: Sessions, url: str) -> None:
        """Get a lease, and cancel the sessions of a previous id that was taken over."""
        if self._is_first:
            await asyncio.to_thread(self._keeper.start, self._name(url))
            self._shipper.start()
        await self.guard.stop_foreign_sessions(sessions)
        self._watching = asyncio.create_task(self.guard.run(sessions))

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
        if self._is_first:
            await asyncio.to_thread(self._shipper.stop, _LAST_SHIPMENTS_S)
            await asyncio.to_thread(self._keeper.stop)
        for store in self._opened:
            store.close()

    def gauges(self) -> dict[str, float]:
        """Return the cell's metrics, by name."""
        state = self._store.outbox.state()
        waited = 0.0 if state.oldest_due is None else max(0.0, time.time() - state.oldest_due)
        return {
            "turngate_cell_unshipped_sessions": state.unshipped,
            "turngate_cell_unshipped_seconds": waited,
            "turngate_cell_failed_shipments": state.failed,
            "turngate_cell_lease_seconds": self.permit.seconds_left,
        }

    def _name(self, url: str) -> CellName:
        config = self._config
        host = f"[{config.host}]" if ":" in config.host else config.host
        return CellName(config.cell_name or socket.gethostname(), url or f"http://{host}:{config.port}")

    def _open_registry(self) -> LeaseRegistry:
        return self._open().cells

    def _open_target(self) -> ShipmentTarget:
        shared = self._open()
        copy_settings(shared, self._store.settings_with(_TOKENIZER_SETTINGS))
        return ShipmentWriter(shared)


def _open_shared(url: str) -> SharedStore:
    try:
        return SharedStore(parse_database_url(url))
    except ConfigError as error:
        raise ConfigError(error.message.replace("data: ", "shared: ", 1), param="shared") from None
