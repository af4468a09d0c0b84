"""The parts of a gateway that make it a cell: its lease, its outbox, and the threads that renew the lease and ship the sessions.

With several workers, worker 0 runs these threads for all of them. Each worker watches the lease itself.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
import uuid
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import partial
from pathlib import Path

from turngate.common.database_url import parse_database_url
from turngate.common.sharding import Shard
from turngate.config import ServeConfig
from turngate.errors import ConfigError
from turngate.gateway.cell.api_keys import CellKeyRing, KeyFollower
from turngate.gateway.cell.lease_file import LeaseFile, create_lease_file
from turngate.gateway.cell.lease_keeper import CellName, LeaseKeeper, LeaseRegistry
from turngate.gateway.cell.serving import LeasedFence, ServingGuard, ServingPermit
from turngate.gateway.cell.shipping import ShipmentTarget, Shipper
from turngate.gateway.fence import Fence
from turngate.gateway.fence_state import FenceState
from turngate.gateway.replicas import ReplicaSet
from turngate.gateway.sessions import Sessions
from turngate.gateway.shared_calls import SharedCalls
from turngate.gateway.shared_engines import FollowedEngines
from turngate.gateway.shared_fence import FenceFollower
from turngate.gateway.weights import LocalBarrier
from turngate.store.outbox import Outboxes
from turngate.store.projects import DEFAULT_PROJECT, locate_project
from turngate.store.quotas import QuotaTable
from turngate.store.shared.shipments import ShipmentWriter, copy_settings
from turngate.store.shared.store import SharedStore
from turngate.store.shipment import open_shipping_reader
from turngate.store.store import Store

log = logging.getLogger("turngate")
_LAST_SHIPMENTS_S = 5.0  # time to ship due sessions when the cell stops
_TOKENIZER_SETTINGS = ("tokenizer:", "renderer:")


class Cell:
    """One worker's part of a cell. Call `start` before serving, and `stop` afterwards."""

    def __init__(self, config: ServeConfig, store: Store, shard: Shard) -> None:
        self._config = config
        self._store = store
        self._url = config.shared
        data = Path(config.data)
        if shard.workers == 1:  # otherwise the front process creates the lease file
            create_lease_file(data)
        self._file = LeaseFile(data)
        self.permit = ServingPermit(self._file)
        self._outboxes = Outboxes(store.outbox)
        self.guard = ServingGuard(self.permit, config.max_unshipped)
        self.ring = CellKeyRing(self.permit)
        self._keys = KeyFollower(self.ring, lambda: self.open_shared().projects)
        self._is_first = shard.number == 0
        self._keeper = LeaseKeeper(self._file, config.lease_s, self._outboxes, self._open_registry)
        self._shippers = [self._create_shipper(store, DEFAULT_PROJECT)]
        self._watching: asyncio.Task[None] | None = None
        self._followed: SharedStore | None = None
        self._follow_lock = threading.Lock()
        self._opened: list[SharedStore] = []

    def create_fence(self, version: int, model: str) -> LeasedFence:
        return LeasedFence(self.permit, version, model)

    def create_follower(
        self,
        fence: Fence,
        barrier: LocalBarrier,
        state: FenceState,
        replicas: ReplicaSet,
        engines: FollowedEngines | None,
        calls: SharedCalls | None,
    ) -> FenceFollower:
        """Create the follower that applies the shared fence, engine list and call counts to this worker.

        Until the follower starts, the fence admits no calls.
        """
        return FenceFollower(
            fence,
            barrier,
            state,
            replicas,
            lambda: self.open_shared().fence,
            self.guard.interrupt_calls,
            id=uuid.uuid4().hex,
            name=self._config.cell_name or socket.gethostname(),
            ttl_s=self._config.lease_s,
            engines=engines,
            calls=calls,
        )

    def open_shared(self) -> SharedStore:
        """Return the shared store, opened with connections that are used only to follow the fence, the engines and the keys.

        Leases and shipments have their own connections, so that a long transaction on one connection does not delay the others.
        """
        with self._follow_lock:
            if self._followed is None:
                self._followed = self._open()
            return self._followed

    def _open(self, project: str = DEFAULT_PROJECT) -> SharedStore:
        """Open the shared store of a project. It stays open until the cell stops."""
        store = _open_shared(locate_project(self._url, project))
        self._opened.append(store)
        return store

    def open_quotas(self) -> QuotaTable:
        return self._open().quotas

    def wake_shippers(self) -> None:
        """Make the shippers announce new sessions now, if they run in this worker."""
        for shipper in self._shippers:
            shipper.wake()

    def read_keys(self) -> None:
        """Read the projects and keys of the shared store, and keep reading them every few seconds."""
        self._keys.start()

    def add_project(self, store: Store, sessions: Sessions, project: str) -> None:
        """Guard and ship the sessions of an additional project, under the same lease."""
        store.outbox.cell = self.permit.cell if self._watching is not None else ""
        self._outboxes.add(store.outbox)
        self.guard.add(store.outbox, sessions)
        shipper = self._create_shipper(store, project)
        self._shippers.append(shipper)
        if self._watching is not None and self._is_first:
            shipper.start()

    def remove_project(self, store: Store) -> None:
        """Stop guarding and shipping the sessions of a project that was deleted."""
        self._outboxes.remove(store.outbox)
        self.guard.remove(store.outbox)
        for shipper in [one for one in self._shippers if one.outbox is store.outbox]:
            self._shippers.remove(shipper)
            shipper.stop(0)

    async def start(self, sessions: Sessions, url: str) -> None:
        """Cancel this worker's sessions that belong to an earlier id of the cell, and start watching the lease.

        Worker 0 first starts the threads that renew the lease and ship the sessions.
        """
        self.guard.add(self._store.outbox, sessions)
        if self._is_first:
            await asyncio.to_thread(self._keeper.start, self._name(url))
            for shipper in self._shippers:
                shipper.start()
        await self.guard.stop_foreign_sessions()
        self._watching = asyncio.create_task(self.guard.run())

    def interrupt(self) -> None:
        """Abort all requests that are waiting for the shared store. Call this when stopping takes too long."""
        for store in self._opened:
            store.database.interrupt()

    async def stop(self) -> None:
        """Stop all parts of the cell. Each step is taken even if another fails."""
        async with AsyncExitStack() as steps:  # taken from the last to the first
            steps.callback(self._close_stores)
            if self._is_first:
                steps.push_async_callback(asyncio.to_thread, self._keeper.stop)
                steps.push_async_callback(self._stop_shippers)
            steps.push_async_callback(asyncio.to_thread, self._keys.stop)
            steps.push_async_callback(self._stop_guard)

    async def _stop_guard(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching

    async def _stop_shippers(self) -> None:
        stopped = (asyncio.to_thread(shipper.stop, _LAST_SHIPMENTS_S) for shipper in self._shippers)
        for error in await asyncio.gather(*stopped, return_exceptions=True):
            if error is not None:
                raise error

    def _close_stores(self) -> None:
        with ExitStack() as stores:
            for store in self._opened:
                stores.callback(store.close)

    def gauges(self) -> dict[str, float]:
        """Return the cell's metrics, by name."""
        state = self._outboxes.state()
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

    def _create_shipper(self, store: Store, project: str) -> Shipper:
        def open_target() -> ShipmentTarget:
            shared = self._open(project)
            copy_settings(shared, store.settings_with(_TOKENIZER_SETTINGS))
            return ShipmentWriter(shared)

        return Shipper(store.outbox, partial(open_shipping_reader, store), open_target)


def _open_shared(url: str) -> SharedStore:
    try:
        return SharedStore(parse_database_url(url))
    except ConfigError as error:
        raise ConfigError(error.message.replace("data: ", "shared: ", 1), param="shared") from None
