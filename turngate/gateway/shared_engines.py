"""The list of engines in the shared store, which all cells use.

The gateway on the shared store changes the list (`SharedEngineList`), and every cell follows it (`FollowedEngineList`). A gateway or a cell
uses its configured engines and the listed ones. The state of an engine in the list applies to all gateways and cells.

A change raises the epoch of the shared fence (`shared_fence.py`), so that cells read the list again after their next report to the store.
The gateway waits until each cell has carried out the change or can no longer serve.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from turngate.client.protocol import EnginesView
from turngate.errors import Conflict
from turngate.gateway.engine_changes import REMOVE_S, EngineChanges, LocalEngines
from turngate.gateway.engine_list import EngineStates, StoredState, merge_engines
from turngate.gateway.events import Events
from turngate.gateway.fence import Fence
from turngate.gateway.followers import wait_for_followers, wait_until_idle_everywhere
from turngate.gateway.replicas import ReplicaSet
from turngate.gateway.weights import WeightUpdates
from turngate.store.shared.engines import EngineTable, SharedEngine, SharedEngineState
from turngate.store.shared.fence import FenceTable

_STORED: dict[SharedEngineState, StoredState] = {"active": "active", "draining": "draining"}


def apply_shared(configured: Sequence[str], shared: Sequence[SharedEngine]) -> EngineStates:
    """Merge the configured engines with the shared list, which takes precedence. Return the engines to use and the failed engines."""
    stored = {engine.url: _STORED.get(engine.state) for engine in shared}
    failed = {engine.url: engine.reason for engine in shared if engine.state == "failed"}
    return EngineStates(merge_engines(configured, stored), failed)


class SharedEngineList:
    """The shared list of engines, as the gateway on the shared store reads and changes it."""

    def __init__(self, table: EngineTable, configured: Sequence[str]) -> None:
        self._table = table
        self._configured = list(configured)
        self.epoch = 0  # of the newest change

    def read(self) -> EngineStates:
        return apply_shared(self._configured, self._table.list_engines())

    def has(self, url: str) -> bool:
        """Return whether the shared list contains this engine as active."""
        return SharedEngine(url, "active") in self._table.list_engines()

    def write(self, url: str, state: StoredState) -> None:
        self.epoch = self._table.write(SharedEngine(url, state or "removed"))

    def fail(self, url: str, reason: str) -> None:
        """Take an engine out of service, and record the reason."""
        self.epoch = self._table.write(SharedEngine(url, "failed", reason))


class FollowedEngineList:
    """The shared list of engines, as a cell last read it."""

    def __init__(self, configured: Sequence[str]) -> None:
        self._configured = list(configured)
        self._shared: list[SharedEngine] = []

    def read(self) -> EngineStates:
        return apply_shared(self._configured, self._shared)

    def write(self, url: str, state: StoredState) -> None:
        raise _refusal()

    def replace(self, shared: Sequence[SharedEngine]) -> None:
        self._shared = list(shared)


class SharedEngineGroup:
    """The engine pools of all cells. `local` is the pool of the gateway on the shared store, which serves no calls."""

    def __init__(self, local: LocalEngines, listed: SharedEngineList, fence: FenceTable) -> None:
        self._local = local
        self._listed = listed
        self._fence = fence

    async def sync(self) -> None:
        await self._local.sync()
        await wait_for_followers(self._fence, self._listed.epoch)

    async def wait_until_idle(self, url: str) -> None:
        await wait_until_idle_everywhere(self._fence, url)


class SharedEngineChanges(EngineChanges):
    """Changes the shared list of engines, for a gateway on the shared store. Other gateways on the store may also change the list."""

    def __init__(
        self,
        local: LocalEngines,
        listed: SharedEngineList,
        fence_table: FenceTable,
        updates: WeightUpdates,
        replicas: ReplicaSet,
        fence: Fence,
        events: Events,
    ) -> None:
        super().__init__(local, SharedEngineGroup(local, listed, fence_table), listed, updates, replicas, fence, events)
        self._pool = local
        self._list = listed

    async def show(self) -> EnginesView:
        await self._pool.sync()
        return await super().show()

    def _is_listed(self, address: str) -> bool:
        return self._list.has(address)  # the cells must also get an engine that only this gateway's configuration lists


class FollowedEngines:
    """The engine pool of one process of a cell, which follows the shared list."""

    def __init__(
        self,
        listed: FollowedEngineList,
        local: LocalEngines,
        connect: Callable[[], EngineTable],
        on_change: Callable[[], Awaitable[None]],
    ) -> None:
        self._listed = listed
        self._local = local
        self._connect = connect
        self._on_change = on_change

    async def follow(self) -> None:
        """Read the shared list, and make the pool match it."""
        self._listed.replace(await asyncio.to_thread(lambda: self._connect().list_engines()))
        await self._local.sync()
        await self._on_change()

    @property
    def busy(self) -> list[str]:
        """The draining engines at which this process has calls."""
        return [replica.address for replica in self._local.pool.replicas if replica.is_draining and replica.in_flight]


class FollowedEngineChanges(EngineChanges):
    """Refuses changes to the list of engines, because a cell follows the shared list and cannot change it."""

    async def add(self, url: str, version: int | None = None) -> EnginesView:
        raise _refusal()

    async def drain(self, url: str) -> EnginesView:
        raise _refusal()

    async def remove(self, url: str, limit_s: float = REMOVE_S, *, force: bool = False) -> EnginesView:
        raise _refusal()


def _refusal() -> Conflict:
    return Conflict(
        "this cell uses the list of engines in the shared store; change the list at the gateway on the shared store"
    )
