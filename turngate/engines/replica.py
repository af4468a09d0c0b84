"""One engine of a pool: its health, its lanes, and its load."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from turngate.engines.base import Engine, Health
from turngate.engines.load import EngineLoad, ReportsLoad
from turngate.engines.placement import LaneLoad
from turngate.errors import EngineError, EngineUnavailable, TurngateError

log = logging.getLogger(__name__)
_POLL_SHARE = 50  # requesting load reports takes at most 1/50 of the time


@runtime_checkable
class HasLanes(Protocol):
    """An engine that may have several data-parallel ranks, each of which is a lane.

    Lanes use the engine's connections, so they are not started or closed.
    """

    def lanes(self) -> Sequence[Engine]: ...


@runtime_checkable
class HasAddress(Protocol):
    @property
    def address(self) -> str: ...


class PoolTiming(msgspec.Struct, frozen=True, kw_only=True):
    """How often a pool checks its replicas and reads their load. Times are in seconds.

    A replica that is up is checked every `check_s`. It is marked down after `misses` consecutive failed checks, because a single failure
    under load means little, and moving sessions loses their caches. One failure is enough if the replica was never up, has the wrong
    weights, or was unavailable for a call. A replica that is down is checked after `backoff_s`, with exponential backoff up to
    `backoff_max_s`, and before a call if no replica accepts calls. The load is read every `load_s`, but less often if the engine answers
    slowly. If `load_s` is 0, the load is never read.
    """

    check_s: float = 10.0
    backoff_s: float = 0.5
    backoff_max_s: float = 30.0
    misses: int = 2
    load_s: float = 2.0


class Lane:
    """A destination for calls: a replica, or one of its data-parallel ranks."""

    def __init__(self, replica: Replica, engine: Engine) -> None:
        self.replica = replica
        self.engine = engine
        self.load = LaneLoad()

    @property
    def accepts_calls(self) -> bool:
        return self.replica.up and not self.replica.is_draining


class Replica:
    """One engine of a pool, with its lanes and its health.

    Once the replica is down, only a successful check brings it back up. A successful call does not show which weights the engine has: the
    engine may have restarted with its initial ones.
    """

    def __init__(self, engine: Engine, timing: PoolTiming) -> None:
        self.engine = engine
        self.lanes = [Lane(self, lane) for lane in (engine.lanes() if isinstance(engine, HasLanes) else [engine])]
        self.up = True
        self.is_draining = False  # receives no new calls
        self.is_wrong = False  # the last answer of the engine showed that it must not be used
        self.idle = asyncio.Event()  # set while no calls are in flight
        self.idle.set()
        self._timing = timing
        self._was_up = False  # whether the replica has ever been up
        self._misses = 0
        self._lost = asyncio.Event()
        self._reason = ""  # why the replica is down
        self._recheck: asyncio.Task[None] | None = None
        self._last_health: list[Health] = []
        self._tasks: list[asyncio.Task[None]] = []

    @staticmethod
    def address_of(engine: Engine) -> str:
        return engine.address if isinstance(engine, HasAddress) else engine.name

    @property
    def address(self) -> str:
        return self.address_of(self.engine)

    @property
    def in_flight(self) -> int:
        return sum(lane.load.in_flight for lane in self.lanes)

    def begin_call(self, lane: Lane) -> None:
        lane.load.in_flight += 1
        self.idle.clear()

    def end_call(self, lane: Lane) -> None:
        lane.load.in_flight -= 1
        if not self.in_flight:
            self.idle.set()

    # ── life ────────────────────────────────────────────────────────────────────────────────────────────────────

    def watch(self) -> None:
        """Start checking the replica and reading its load. This continues until `close`."""
        self._tasks.append(asyncio.create_task(self._keep_checking()))
        if self._timing.load_s > 0 and isinstance(self.engine, ReportsLoad):
            self._tasks.append(asyncio.create_task(self._keep_reading_load(self.engine)))

    async def close(self) -> None:
        tasks, self._tasks = [*self._tasks, *([self._recheck] if self._recheck else [])], []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.engine.close()

    # ── health ──────────────────────────────────────────────────────────────────────────────────────────────────

    def snapshot(self) -> list[Health]:
        """Return the results of the last health check, with the current `in_flight`. `ok` is false while the replica is down."""
        return [
            msgspec.structs.replace(health, ok=health.ok and self.up, in_flight=self.in_flight)
            for health in self._last_health
        ]

    def mark_lost(self, error: EngineError) -> None:
        """Mark the replica as down, because it was unavailable for a call."""
        self._misses = max(self._misses, self._timing.misses)
        self._mark_down(error.message)
        self._lost.set()

    def record_success(self) -> None:
        """Forget failed checks, because a call succeeded. A replica that is down stays down."""
        if self.up:
            self._misses = 0

    async def recheck(self) -> None:
        """Check a replica that is down. Concurrent calls share one check."""
        if self._recheck is None or self._recheck.done():
            self._recheck = asyncio.create_task(self.check())
        await asyncio.shield(self._recheck)

    def explain_down(self) -> EngineUnavailable:
        return EngineUnavailable(self._reason)

    async def check(self) -> None:
        self._last_health = await self.engine.health()
        missing = next((health for health in self._last_health if not health.ok), None)
        # A replica with wrong weights that stops responding may still have them when it responds again.
        self.is_wrong = missing is not None and (missing.wrong or self.is_wrong)
        if missing is None:
            if not self.up:
                log.warning("%s is up", self.address)
            self.up = self._was_up = True
            self._misses = 0
            return
        self._misses += 1
        if self._misses >= self._timing.misses or not self._was_up or missing.wrong:
            self._mark_down(missing.detail)

    def _mark_down(self, reason: str) -> None:
        if self.up:
            log.warning("%s is down: %s", self.address, reason)
        self.up = False
        self._reason = reason

    async def _keep_checking(self) -> None:
        """Check the replica regularly while it is up, and with backoff while it is down."""
        while True:
            try:
                async with asyncio.timeout(self._pause()):
                    await self._lost.wait()
                self._lost.clear()
                await asyncio.sleep(self._timing.backoff_s)  # an immediate check would only repeat the failure
            except TimeoutError:
                pass  # the pause is over
            await self.check()

    def _pause(self) -> float:
        timing = self._timing
        if self.up:
            return timing.check_s
        doubled = timing.backoff_s * 2.0 ** max(0, min(self._misses - timing.misses, 16))
        return min(doubled, timing.backoff_max_s)

    # ── load ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def read_load(self, engine: ReportsLoad) -> None:
        """Read the engine's load. Without a report, a lane's load consists only of this gateway's own calls."""
        try:
            reports = await engine.load_report() if self.up else []
        except TurngateError:  # the health check decides whether the replica is down
            reports = []
        self._update_loads(reports)

    def _update_loads(self, reports: Sequence[EngineLoad]) -> None:
        if len(reports) == len(self.lanes):
            for lane, report in zip(self.lanes, reports, strict=True):
                lane.load.update(report)
            return
        # One lane serves all ranks, or the server reports only some of its ranks. In the first case, the loads are merged.
        merged = merge_loads(reports) if len(self.lanes) == 1 else None
        for lane in self.lanes:
            lane.load.update(merged)

    async def _keep_reading_load(self, engine: ReportsLoad) -> None:
        while True:
            began = time.monotonic()
            await self.read_load(engine)
            took = time.monotonic() - began
            await asyncio.sleep(max(self._timing.load_s, _POLL_SHARE * took))


def merge_loads(loads: Sequence[EngineLoad]) -> EngineLoad | None:
    """Combine the loads of an engine's ranks: the sum of their calls, and the highest KV use, because the fullest rank is the limit."""
    if not loads:
        return None
    known = [load.kv_use for load in loads if load.kv_use is not None]
    return EngineLoad(
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        kv_use=max(known, default=None),
    )
