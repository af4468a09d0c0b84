"""One fence for many cells, kept in the shared store (its tables are in `store/shared/fence.py`).

Calls wait at the fence during weight updates (`fence.py`). The gateway on the shared store changes the fence (`SharedBarrier`), and every
cell follows it (`FenceFollower`). After a change, the gateway waits until each follower has carried it out or can no longer serve. A
follower may serve only for `ttl_s` seconds after it sent its last successful report, so the gateway waits at most that long for a cell
that cannot be reached. By then, that cell holds new calls and aborts its calls in flight.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from turngate.client.protocol import FenceView, PauseMode
from turngate.engines.weights import PolicyWeights
from turngate.errors import Conflict, TurngateError
from turngate.gateway.fence import Fence, fence_clock
from turngate.gateway.fence_state import FenceState
from turngate.gateway.followers import POLL_S, wait_for_followers
from turngate.gateway.replicas import ReplicaSet
from turngate.gateway.shared_calls import REPORT_S, SharedCalls
from turngate.gateway.shared_engines import FollowedEngines
from turngate.gateway.weights import LoadReply, LocalBarrier, WeightUpdates
from turngate.store.shared.fence import FenceStage, FenceTable, SharedFence

log = logging.getLogger("turngate")
_REPORTS = 5  # reports per ttl
_HELD_S = 0.25  # between reports while calls are held, so that agents hardly wait longer than the update takes
_BUSY_S = 1.0  # between reports while a draining engine has calls, so that it can be removed soon after they end
_FRESH = 2 / _REPORTS  # share of the ttl for which the reported calls count
_DRIFT = 0.02  # share of the ttl by which a follower stops early, since two clocks do not run at the same speed


class SharedBarrier:
    """The fence that all cells share. The gateway on the shared store controls it. `local` is that gateway's own fence."""

    def __init__(
        self, local: LocalBarrier, fence: Fence, state: FenceState, replicas: ReplicaSet, table: FenceTable
    ) -> None:
        self._local = local
        self._fence = fence
        self._state = state
        self._replicas = replicas
        self._table = table

    async def adopt_version(self) -> None:
        """If another gateway on the same store has activated a newer version, adopt that version."""
        shared = await asyncio.to_thread(self._table.read)
        if shared.version > self._fence.version:
            self._fence.set(shared.version, shared.model if shared.model or self._fence.model else None)
            await self._replicas.prepare(shared.version, check=False)

    async def hold(self, until: float | None) -> None:
        await self._local.hold(until)
        await self._change("hold", self._fence.version, self._fence.model)

    async def drain(self) -> None:
        await self._change("drain", self._fence.version, self._fence.model)
        await self._local.drain()

    async def open(self, version: int | None, model: str | None, *, expired: bool = False, check: bool = False) -> None:
        await self.adopt_version()
        self._fence.check(version, model)
        new = self._fence.version if version is None else version
        await self._replicas.prepare(new, check=check)
        self._state.write_open(new)
        self._fence.set(version, model)  # the new version applies even if the shared store fails now
        await self._change("open", new, self._fence.model)
        self._local.resume(new, model, expired=expired)

    async def describe(self) -> FenceView:
        await self.adopt_version()
        return await self._local.describe()

    async def _change(self, stage: FenceStage, version: int, model: str) -> None:
        """Write a change to the shared store, and wait until every follower has carried it out or can no longer serve."""
        weights = self._state.read_weights(version)
        encoded = "" if weights is None else msgspec.json.encode(weights).decode()
        epoch = await asyncio.to_thread(self._table.write, stage, version, model, encoded)
        await wait_for_followers(self._table, epoch, drains=stage == "drain")


class FollowedUpdates(WeightUpdates):
    """Refuses weight updates, because a cell follows the fence of the shared store and cannot change it."""

    async def pause(self, mode: PauseMode, limit_s: float | None) -> FenceView:
        raise _refusal()

    async def resume(self, version: int | None, model: str | None) -> FenceView:
        raise _refusal()

    async def load(self, load: PolicyWeights, mode: PauseMode | None, limit_s: float) -> LoadReply:
        raise _refusal()


def _refusal() -> Conflict:
    return Conflict(
        "this cell follows the fence of the shared store; to pause calls, resume calls or load weights, use the gateway on the shared store"
    )


class FenceFollower:
    """Makes the fence of one process of a cell follow the fence of the shared store, and reports the process's calls by project.

    `connect` opens the table of the shared fence. `abort_calls` aborts the calls in flight when the cell may no longer serve.
    """

    def __init__(
        self,
        fence: Fence,
        barrier: LocalBarrier,
        state: FenceState,
        replicas: ReplicaSet,
        connect: Callable[[], FenceTable],
        abort_calls: Callable[[], Awaitable[None]],
        *,
        id: str,
        name: str,
        ttl_s: float,
        engines: FollowedEngines | None = None,
        calls: SharedCalls | None = None,
    ) -> None:
        self._fence = fence
        self._barrier = barrier
        self._state = state
        self._replicas = replicas
        self._connect = connect
        self._abort_calls = abort_calls
        self._id, self._name, self._ttl_s = id, name, ttl_s
        self._engines = engines
        self._calls = calls
        self._table: FenceTable | None = None
        self._epoch = -1  # the newest change that was carried out
        self._is_away = False
        self._tasks: list[asyncio.Task[None]] = []
        fence.valid_until = 0.0  # hold calls until the first report

    async def start(self) -> None:
        """Start following the shared fence. Calls are held until the shared store has answered."""
        try:
            await self._report()
        except TurngateError as error:
            log.warning("cannot follow the fence of the shared store: %s; retrying", error.message)
            self._is_away = True
        self._tasks = [asyncio.create_task(self._keep_reporting()), asyncio.create_task(self._watch())]

    async def stop(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fence.valid_until = 0.0
        if self._table is not None:
            with suppress(TurngateError):
                await asyncio.to_thread(self._table.forget, self._id)

    async def _keep_reporting(self) -> None:
        pause = self._ttl_s / _REPORTS
        while True:
            await self._pause(pause)
            try:
                pause = await self._report()
            except TurngateError as error:
                if not self._is_away:
                    log.warning("cannot follow the fence of the shared store: %s; retrying", error.message)
                self._is_away, pause = True, self._ttl_s / _REPORTS
            except Exception:  # without further reports, the cell would never serve a call again
                if not self._is_away:
                    log.exception("cannot follow the fence of the shared store; retrying")
                self._is_away, pause = True, self._ttl_s / _REPORTS

    async def _pause(self, seconds: float) -> None:
        """Wait until the next report is due. If calls begin to wait for their share of the engines, the report is due sooner."""
        began = fence_clock()
        while True:
            left = began + min(seconds, self._longest_pause_s) - fence_clock()
            if left <= 0:
                return
            await asyncio.sleep(min(left, REPORT_S))

    @property
    def _longest_pause_s(self) -> float:
        return math.inf if self._calls is None else self._calls.longest_pause_s

    async def _report(self) -> float:
        """Report to the shared store, and apply any change to the fence. Return the longest time until the next report, in seconds."""
        sent = fence_clock()
        calls = "" if self._calls is None else self._calls.encode()
        shared, others = await asyncio.to_thread(self._exchange, " ".join(self._busy), calls)
        self._is_away = False
        if self._calls is not None and calls:
            self._calls.update(others, sent + self._ttl_s * _FRESH - fence_clock())
        carried_out = await self._carry_out(shared)
        self._fence.valid_until = sent + self._ttl_s * (1 - _DRIFT)
        if carried_out and self._epoch != shared.epoch:
            self._epoch = shared.epoch
            return 0.0  # report it immediately
        return min(self._choose_pause(shared, carried_out), self._ttl_s / _REPORTS)

    def _choose_pause(self, shared: SharedFence, carried_out: bool) -> float:
        """Return the longest allowed time until the next report, in seconds."""
        if not carried_out:
            return POLL_S
        if shared.stage != "open":
            return _HELD_S
        return _BUSY_S if self._busy else math.inf

    @property
    def _busy(self) -> list[str]:
        return [] if self._engines is None else self._engines.busy

    def _exchange(self, busy: str, calls: str) -> tuple[SharedFence, list[str]]:
        """Send a report. Return the shared fence, and the calls of the other processes if this report contains `calls`."""
        if self._table is None:
            self._table = self._connect()
        shared = self._table.report(self._id, self._name, self._ttl_s, self._epoch, busy, calls)
        return shared, self._table.list_calls(self._id, _FRESH) if calls else []

    async def _carry_out(self, shared: SharedFence) -> bool:
        """Apply the shared engine list, stage and version in this process. Return False while a drain waits for calls in flight."""
        if self._engines is not None and shared.epoch != self._epoch:
            await self._engines.follow()
        if shared.stage != "open":
            await self._fence.pause("hold")
            return shared.stage == "hold" or not self._fence.in_flight
        if shared.version == self._fence.version and not self._fence.paused:
            return True
        if shared.version < self._fence.version:
            await self._fence.pause("hold")
            raise Conflict(
                f"the shared store is at policy version {shared.version}, but this cell has served version {self._fence.version}; "
                "if the shared store was restored from a backup, send POST /admin/fence/resume with a version above "
                f"{self._fence.version} to the gateway on the shared store"
            )
        if shared.weights:
            self._state.write_weights(msgspec.json.decode(shared.weights, type=PolicyWeights))
        await self._replicas.prepare(shared.version, check=shared.epoch != self._epoch)
        has_name = shared.model or self._fence.model
        is_newer = shared.version > self._fence.version
        self._barrier.resume(shared.version, shared.model if has_name and is_newer else None)
        return True

    async def _watch(self) -> None:
        """Hold new calls and abort those in flight whenever the last successful report is too old."""
        has_failed = False
        while True:
            left = self._fence.valid_until - fence_clock()
            if left > 0:
                await asyncio.sleep(left)
                continue
            try:
                await self._stop_serving()
                has_failed = False
            except (
                Exception
            ):  # otherwise, calls that the trainer believes have ended would still be sampled and recorded
                if not has_failed:
                    log.exception("cannot abort the calls in flight; retrying")
                has_failed = True
            await asyncio.sleep(POLL_S)

    async def _stop_serving(self) -> None:
        await self._fence.pause("hold")
        if self._fence.in_flight:
            log.warning("this cell could not follow the shared fence for %g s; aborting calls in flight", self._ttl_s)
            await self._abort_calls()
