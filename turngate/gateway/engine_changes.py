"""Change the engine pool while the gateway is running: add, drain and remove engines.

    add     load the current weights into the engine, add it to the list, and let every process use it
    drain   send the engine no new calls: calls in flight finish there, and sessions move to another engine with their next call
    remove  drain the engine, wait until its calls have ended, and remove it from the list

The list in the store is authoritative (`engine_list.py`), and `LocalEngines` makes the pool of this process match it. A change is applied
through an `EngineGroup`: the pool of this process, or the pools of all workers or cells. In one gateway, changes to the
list and weight updates never run at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from turngate.client.protocol import EngineState, EnginesView, EngineView
from turngate.engines.base import Engine
from turngate.engines.pool import Pool
from turngate.engines.replica import Replica, merge_loads
from turngate.errors import Conflict, EngineTimeout, NotFound
from turngate.gateway.engine_list import ListedEngines
from turngate.gateway.events import Events
from turngate.gateway.fence import Fence
from turngate.gateway.replicas import ReplicaSet
from turngate.gateway.weights import WeightUpdates

MakeEngine = Callable[[str], Engine]
REMOVE_S = 600.0  # how long a removal waits for calls in flight, by default


class EngineGroup(Protocol):
    """The engine pools of one or several processes. All pools follow the stored list of engines."""

    async def sync(self) -> None:
        """Make every pool match the stored list."""

    async def wait_until_idle(self, url: str) -> None:
        """Wait until no pool has a call in flight at this engine."""


class LocalEngines:
    """The engine pool of this process. With `serves=False`, the pool gets no calls: it only reports its load and loads weights."""

    def __init__(
        self,
        pool: Pool,
        listed: ListedEngines,
        make_engine: MakeEngine,
        replicas: ReplicaSet,
        fence: Fence,
        *,
        serves: bool = True,
    ) -> None:
        self.pool = pool
        self.make_engine = make_engine
        self._listed = listed
        self._replicas = replicas
        self._fence = fence
        self._serves = serves
        self._lock = asyncio.Lock()

    async def sync(self) -> None:
        async with self._lock:
            states = self._listed.read().used
            present = {replica.address for replica in self.pool.replicas}
            await asyncio.gather(*(self._add(url) for url in states if url not in present))
            for url in present - states.keys():
                await self.pool.remove(url)
            for url, state in states.items():
                self.pool.set_draining(url, state == "draining")

    async def _add(self, url: str) -> None:
        engine = self.make_engine(url)
        self._replicas.expect_of(engine, self._fence.version)
        await self.pool.add(engine)

    async def wait_until_idle(self, url: str) -> None:
        if any(replica.address == url for replica in self.pool.replicas):
            await self.pool.wait_until_idle(url)

    def describe(self) -> EnginesView:
        failed = [
            EngineView(url=url, state="failed", up=False, in_flight=0, detail=reason)
            for url, reason in self._listed.read().failed.items()
        ]
        return EnginesView(
            engines=[*(_describe(replica) for replica in self.pool.replicas), *failed],
            waiting=self.pool.waiting,
            saturated=self.pool.is_saturated if self._serves else self.pool.is_crowded,
        )


class EngineChanges:
    """Changes the list of engines, one change at a time."""

    def __init__(
        self,
        local: LocalEngines | None,
        group: EngineGroup | None,
        listed: ListedEngines,
        updates: WeightUpdates,
        replicas: ReplicaSet,
        fence: Fence,
        events: Events,
    ) -> None:
        self._local = local
        self._group = group
        self._listed = listed
        self._updates = updates
        self._replicas = replicas
        self._fence = fence
        self._events = events

    async def show(self) -> EnginesView:
        """Return the engines and their load, or no engines if the gateway has no pool."""
        if self._local is None:
            return EnginesView(engines=[], scripted=self._replicas.is_scripted)
        return self._local.describe()

    async def add(self, url: str, version: int | None = None) -> EnginesView:
        """Add an engine. If it is already in the pool and draining, let it receive calls again.

        `version` is the policy version of the weights that the engine already has, if known.
        """
        local, group = self._require()
        address = _address(local.make_engine(url))
        async with self._updates.lock:
            self._require_open()
            if self._is_listed(address):
                return local.describe()
            await self._prepare(local, url, version)
            await self._apply(group, address, "active")
        return local.describe()

    async def drain(self, url: str) -> EnginesView:
        """Stop sending new calls to an engine."""
        local, group = self._require()
        async with self._updates.lock:
            await self._drain(local, group, url)
        return local.describe()

    async def remove(self, url: str, limit_s: float = REMOVE_S, *, force: bool = False) -> EnginesView:
        """Drain an engine, and remove it when its calls have ended. Raise `EngineTimeout` if that takes longer than `limit_s` seconds.

        With `force`, remove it immediately: its calls in flight that have produced tokens fail, and the others are retried on another
        engine.
        """
        local, group = self._require()
        address = self._find(local, url)
        if address in self._listed.read().failed:
            force = True  # it has no calls
        if not force:
            async with self._updates.lock:
                self._require_another(address)
                await self._drain(local, group, url)
            try:
                async with asyncio.timeout(limit_s):
                    await group.wait_until_idle(address)
            except TimeoutError:
                raise EngineTimeout(
                    f"{address} still has calls after {limit_s:g} s, so it was not removed and is still draining; repeat the request, "
                    "or set 'force' to end its calls"
                ) from None
        async with self._updates.lock:
            state = self._listed.read().used.get(address)
            if state == "active" and not force:
                raise Conflict(
                    f"{address} was added again while it was draining, so it was not removed; to remove it, repeat the request",
                    param="url",
                )
            if state is not None:
                self._require_another(address)
            await self._apply(group, address, None)
        return local.describe()

    def _is_listed(self, address: str) -> bool:
        return self._listed.read().used.get(address) == "active"

    async def _prepare(self, local: LocalEngines, url: str, version: int | None) -> None:
        engine = local.make_engine(url)
        await engine.start()
        try:
            await self._replicas.load_into_new(engine, self._fence.version, claimed=version)
        finally:
            await engine.close()

    async def _drain(self, local: LocalEngines, group: EngineGroup, url: str) -> None:
        address = self._find(local, url)
        if address in self._listed.read().failed:
            raise Conflict(
                f"cannot drain {address}: it has failed and gets no calls; add it again, or remove it", param="url"
            )
        await self._apply(group, address, "draining")

    async def _apply(self, group: EngineGroup, address: str, state: EngineState | None) -> None:
        self._listed.write(address, state)
        await group.sync()
        self._events.add("", "engine", {"url": address, "state": state or "removed"})

    def _require(self) -> tuple[LocalEngines, EngineGroup]:
        if self._local is None or self._group is None:
            raise Conflict(
                "this gateway has no pool of engines to change; only gateways with vllm or sglang engines have one"
            )
        return self._local, self._group

    def _require_another(self, address: str) -> None:
        """Raise `Conflict` if no engine would take new calls without the engine at `address`."""
        used = self._listed.read().used
        if not any(state == "active" for url, state in used.items() if url != address):
            raise Conflict(
                f"no other engine takes new calls, so {address} was not removed; first add another engine, or add a draining one "
                "again",
                param="url",
            )

    def _require_open(self) -> None:
        if self._fence.paused:
            raise Conflict(
                "cannot add an engine while calls are paused, because it would miss a weight update in progress; add it after calls have "
                "resumed"
            )

    def _find(self, local: LocalEngines, url: str) -> str:
        address = _address(local.make_engine(url))
        listed = [*(states := self._listed.read()).used, *states.failed]
        if address not in listed:
            raise NotFound(
                f"engine {address} is not in the pool; the pool contains {', '.join(listed) or 'no engines'}",
                param="url",
            )
        return address


def _address(engine: Engine) -> str:
    return Replica.address_of(engine)


def _describe(replica: Replica) -> EngineView:
    health = replica.snapshot()
    load = merge_loads([lane.load.report for lane in replica.lanes if lane.load.report is not None])
    return EngineView(
        url=replica.address,
        state="draining" if replica.is_draining else "active",
        up=replica.up,
        detail=next((one.detail for one in health if one.detail), ""),
        in_flight=replica.in_flight,
        sessions=sum(lane.load.sessions for lane in replica.lanes),
        running=None if load is None else load.running,
        waiting=None if load is None else load.waiting,
        kv_use=None if load is None else load.kv_use,
        crowded=any(lane.load.is_crowded for lane in replica.lanes),
    )
