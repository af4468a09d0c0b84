"""Weight updates: hold calls at the fence, load weights into the engines and resume at the new version, or roll back on failure.

    pause   make new calls wait; mode `drain` also waits until calls in flight have ended, and mode `keep` freezes them in the engines
    load    into one replica first, then into the others (`replicas.py`)
    resume  record the version, then let calls through

`WeightUpdates` operates on a `Barrier`: the fence of this process, at which calls wait during an update (`fence.py`), or the fences of all
workers or cells together.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Protocol

import msgspec

from turngate.client.protocol import FenceView, PauseMode
from turngate.engines.base import Health
from turngate.engines.weights import PolicyWeights, UpdatableReplica
from turngate.errors import Conflict, EngineTimeout, StoreError, TurngateError
from turngate.gateway.events import Events
from turngate.gateway.fence import Fence
from turngate.gateway.fence_state import FenceState
from turngate.gateway.replicas import KEEP_CALLS, ReplicaResult, ReplicaSet, load_error
from turngate.gateway.stale_sessions import StaleSessions
from turngate.store.events import new_event
from turngate.types import Json

log = logging.getLogger("turngate")
LIMIT_S = 600.0  # default of how long an update waits for calls in flight
_RETRY_S = 2.0  # between attempts to resume engines or calls


class LoadReply(FenceView, frozen=True, kw_only=True, omit_defaults=True):
    """The state of the fence after a load, and the result for each replica."""

    replicas: list[ReplicaResult]


class WeightsView(FenceView, frozen=True, kw_only=True, omit_defaults=True):
    """The state of the fence, the current weights and the health of the replicas."""

    weights: PolicyWeights | None
    replicas: list[Health]


class Barrier(Protocol):
    """The fence of one process, or the fences of several processes together."""

    async def hold(self, until: float | None) -> None:
        """Make new calls wait.

        `until` is the time at which the hold expires (None: never). It is recorded for processes that start during the hold.
        """

    async def drain(self) -> None:
        """Wait until no call is in flight."""

    async def open(self, version: int | None, model: str | None, *, expired: bool = False, check: bool = False) -> None:
        """Resume calls at a version (None: the current one). `expired` means that the pause has timed out.

        With `check`, first ask every replica which weights it has.
        """

    async def describe(self) -> FenceView:
        """Return the state of the fence as the API shows it."""


class LocalBarrier:
    """The barrier of one process. The state of its fence is kept in the store."""

    def __init__(
        self, fence: Fence, state: FenceState, events: Events, replicas: ReplicaSet, stale: StaleSessions
    ) -> None:
        self._fence = fence
        self._state = state
        self._events = events
        self._replicas = replicas
        self._stale = stale
        self.other_events: list[Events] = []  # those of other projects, where new versions are also announced

    async def hold(self, until: float | None) -> None:
        self._state.write_hold(until)
        await self._fence.pause("hold")

    async def drain(self) -> None:
        await self._fence.drain()

    async def open(self, version: int | None, model: str | None, *, expired: bool = False, check: bool = False) -> None:
        self._fence.check(version, model)
        await self._replicas.prepare(self._fence.version if version is None else version, check=check)
        self.resume(version, model, expired=expired)

    def resume(self, version: int | None, model: str | None = None, *, expired: bool = False) -> None:
        """Record the version, resume calls at this version, and cancel sessions that become stale."""
        self._fence.check(version, model)
        new = self._fence.version if version is None else version
        facts: dict[str, Json] = {"paused": False, "version": new}
        facts |= {"model": model} if model else {}
        facts |= {"expired": True} if expired else {}
        self._state.write_open(new, new_event("", "fence", facts))
        self._fence.resume(version, model)
        self._events.wake("")
        for events in self.other_events:
            events.add("", "fence", facts)
        self._stale.cancel_in_background()

    async def describe(self) -> FenceView:
        return self._fence.describe()


class WeightUpdates:
    """Pauses calls, resumes them and loads weights, one operation at a time."""

    def __init__(self, fence: Fence, state: FenceState, events: Events, replicas: ReplicaSet, barrier: Barrier) -> None:
        self._fence = fence
        self._state = state
        self._events = events
        self._replicas = replicas
        self._barrier = barrier
        self.lock = asyncio.Lock()  # also held while engines are added or removed
        self._timer: asyncio.Task[None] | None = None  # ends a pause at its time limit, or retries a failed resume

    async def start(self) -> None:
        """Restore a pause that was active before a restart, since a trainer may still be sending weights.

        If the pause has expired, resume calls. If the engines were frozen but calls were not held, resume the engines.
        """
        self._replicas.is_frozen = self._state.read_frozen()
        until = self._state.read_hold()
        if until is not None:
            await self._continue_hold(until)
        elif self._replicas.is_frozen:
            log.warning("the engines were paused when the gateway stopped; resuming them")
            self._retry_thaw()

    async def _continue_hold(self, until: float) -> None:
        await self._fence.pause("hold")
        left = until - time.time()
        if left <= 0:  # this includes an unfinished update by the gateway itself, which no trainer will resume
            log.warning(
                "when the gateway stopped, calls were held, either by a pause that has since expired or because weights were being loaded; "
                "resuming the calls"
            )
            self._timer = asyncio.create_task(self._keep_opening(expired=True))
            return
        self._announce_pause("keep" if self._replicas.is_frozen else "hold", restarted=True)
        log.warning(
            "calls are still held after the restart: a trainer paused the gateway and may have sent only part of its weights. "
            "Resume calls with POST /admin/fence/resume and the version that the engines have (the current version is %d)%s",
            self._fence.version,
            ""
            if left == math.inf
            else f", or wait {left:.0f} s until the pause expires and calls resume at the current version",
        )
        if left < math.inf:
            self._start_timer(left)

    async def close(self) -> None:
        self._stop_timer()

    # ── pause and resume, for a trainer that updates the engines itself ─────────────────────────────────────────

    async def pause(self, mode: PauseMode, limit_s: float | None) -> FenceView:
        async with self.lock:
            await self._hold(mode, limit_s)
        if mode == "drain":
            await self._barrier.drain()
        self._announce_pause(mode)
        return await self._barrier.describe()

    async def resume(self, version: int | None, model: str | None) -> FenceView:
        async with self.lock:
            self._fence.check(version, model)
            if version is not None and version > self._fence.version:
                self._state.write_weights(PolicyWeights(version=version, name=model or ""))
            else:
                await self._replicas.undo_unfinished_load(self._fence.version)
            await self._open(version, model)
            self._stop_timer()
        return await self._barrier.describe()

    async def _hold(self, mode: PauseMode, limit_s: float | None) -> None:
        if mode == "keep":
            self._replicas.require(KEEP_CALLS)
        before = self._snapshot()
        await self._barrier.hold(None if limit_s is None else time.time() + limit_s)
        if mode == "keep":
            try:
                await self._replicas.freeze()
            except TurngateError:
                await self._restore(*before)
                raise
        self._stop_timer()
        if limit_s is not None:
            self._start_timer(limit_s)

    def _snapshot(self) -> tuple[bool, bool]:
        """Return whether calls are held and whether the engines are frozen."""
        return self._fence.paused, self._replicas.is_frozen

    async def _restore(self, was_paused: bool, was_frozen: bool) -> None:
        """Restore the state that preceded a failed operation. If calls cannot be resumed now, keep trying in the background.

        Errors are only logged, since the caller raises the original error.
        """
        try:
            if not was_paused:
                await self._open(None, None, check=True)
            elif self._replicas.is_frozen and not was_frozen:
                await self._thaw()
        except TurngateError as error:
            log.warning("cannot resume calls after a failed pause or weight update: %s; retrying", error.message)
            if self._fence.paused and not was_paused:
                self._stop_timer()
                self._timer = asyncio.create_task(self._keep_opening())

    async def _open(self, version: int | None, model: str | None, *, check: bool = False) -> None:
        """Resume calls at a version, and only then thaw the engines, so that all tokens sampled from then on have this version."""
        await self._barrier.open(version, model, check=check)
        if self._replicas.is_frozen:
            await self._thaw()

    async def _thaw(self) -> None:
        try:
            await self._replicas.thaw()
        except Exception:
            self._retry_thaw()
            raise

    def _retry_thaw(self) -> None:
        """Keep trying to resume the engines in the background, since frozen calls are waiting in them."""
        self._stop_timer()
        self._timer = asyncio.create_task(self._keep_thawing())

    async def _keep_thawing(self) -> None:
        while True:
            async with self.lock:
                if not self._replicas.is_frozen:
                    return
                try:
                    await self._replicas.thaw()
                    return
                except Exception as error:
                    log.warning("cannot resume the engines yet: %s; retrying", error)
            await asyncio.sleep(_RETRY_S)

    # ── the time limit of a pause ───────────────────────────────────────────────────────────────────────────────

    def _start_timer(self, seconds: float) -> None:
        self._timer = asyncio.create_task(self._expire(seconds))

    def _stop_timer(self) -> None:
        if self._timer is not None and self._timer is not asyncio.current_task():
            self._timer.cancel()
        self._timer = None

    async def _expire(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        log.warning("calls were not resumed within the time limit of the pause; resuming them at the old version")
        await self._keep_opening(expired=True)

    async def _keep_opening(self, *, expired: bool = False) -> None:
        """Resume calls at the current version, and retry until that succeeds."""
        while True:
            try:
                async with self.lock:
                    await self._replicas.undo_unfinished_load(self._fence.version)
                    await self._barrier.open(None, None, expired=expired, check=True)
                break
            except TurngateError as error:
                log.warning("cannot resume calls yet: %s; retrying", error.message)
            await asyncio.sleep(_RETRY_S)
        if self._replicas.is_frozen:
            self._retry_thaw()

    # ── weights that the gateway loads ──────────────────────────────────────────────────────────────────────────

    async def load(self, load: PolicyWeights, mode: PauseMode | None, limit_s: float) -> LoadReply:
        """Load weights into every replica, and resume calls at the version of these weights.

        If `mode` is None, calls are drained before a model is loaded and held before an adapter is loaded. `limit_s` limits how long calls
        in flight may take to end.
        """
        mode = mode or ("drain" if load.path else "hold")
        async with self.lock:
            before = self._check_load(load, mode)
            each = await self._list_replicas()
            began = time.monotonic()
            snapshot = self._snapshot()
            self._state.write_loading(load)
            await self._stop_calls(mode, limit_s, snapshot)
            results = await self._replicas.load(each, load, repair=load.version == before.version)
            if not self._accepts(results):
                results = await self._replicas.roll_back(each, results, load, before)
                await self._restore(*snapshot)
                self._announce("weights", {"version": load.version, "failed": True, "replicas": results})
                raise load_error(load, before.version, results)
            await self._retire_failed(each, results)
            try:
                await self._open(load.version, load.name if load.is_adapter or before.name else None, check=True)
            except TurngateError:
                if self._fence.version != load.version:  # new weights must not be sampled under the old version
                    await self._replicas.roll_back(each, results, load, before)
                if self._fence.paused:
                    await self._restore(*snapshot)
                raise
            self._stop_timer()
            await self._replicas.unload_old_adapters(each, (before.name if before.lora_path else "", load.name))
            seconds = round(time.monotonic() - began, 3)
            facts = {"version": load.version, "mode": mode, "seconds": seconds, "replicas": results}
            self._announce("weights", facts)
        fence = await self._barrier.describe()
        return LoadReply(**msgspec.structs.asdict(fence), replicas=results)

    async def _list_replicas(self) -> list[UpdatableReplica]:
        """Return the replicas to load weights into. Their order matters: if the first one rejects new weights, the others are not tried."""
        return self._replicas.require("load weights")

    def _accepts(self, results: list[ReplicaResult]) -> bool:
        """Return whether the new version becomes current, given the result of each replica."""
        return all(result.ok for result in results)

    async def _retire_failed(self, each: list[UpdatableReplica], results: list[ReplicaResult]) -> None:
        """Take replicas that could not load the weights out of service.

        The base class does nothing: if a replica cannot load the weights, the old version stays current.
        """

    async def describe_fence(self) -> FenceView:
        return await self._barrier.describe()

    async def describe(self) -> WeightsView:
        """Return the state of the fence, the current weights and the health of the replicas."""
        fence = await self._barrier.describe()
        return WeightsView(
            **msgspec.structs.asdict(fence),
            weights=self._state.read_weights(fence.version),
            replicas=await self._replicas.health(),
        )

    def _check_load(self, load: PolicyWeights, mode: PauseMode) -> PolicyWeights:
        """Return the current weights, or raise `Conflict` if `load` is not allowed.

        Loading the current version again is allowed, to repair replicas.
        """
        present = self._fence.version
        in_force = self._state.read_weights(present) or PolicyWeights(version=present)
        if load.version < present:
            raise Conflict(
                f"version {load.version} is older than the current version {present}; use a higher version, or {present} to load the "
                "current weights again",
                param="version",
            )
        if load.version == present and load != in_force:
            raise Conflict(
                f"version {present} is already active with different weights; use a higher version", param="version"
            )
        if in_force.name and load.path and mode == "keep":
            raise Conflict(
                "mode 'keep' is not possible if a whole model replaces an adapter, which calls may still use; use mode 'drain'",
                param="mode",
            )
        return in_force

    async def _stop_calls(self, mode: PauseMode, limit_s: float, snapshot: tuple[bool, bool]) -> None:
        was_paused, _ = snapshot
        try:
            if not was_paused:
                # Record a hold that expires now, so that a gateway that restarts during the load resumes calls immediately.
                await self._barrier.hold(time.time())
            if mode == "keep":
                await self._replicas.freeze()
            elif mode == "drain":
                async with asyncio.timeout(limit_s):
                    await self._barrier.drain()
        except TimeoutError:
            await self._restore(*snapshot)
            raise EngineTimeout(
                f"calls in flight did not end within {limit_s:g} s, so nothing was loaded; use a longer limit_s, or mode 'keep' (not "
                "possible if a whole model replaces an adapter)"
            ) from None
        except TurngateError:
            await self._restore(*snapshot)
            raise

    def _announce_pause(self, mode: PauseMode, *, restarted: bool = False) -> None:
        self._announce("fence", {"paused": True, "mode": mode, **({"restarted": True} if restarted else {})})

    def _announce(self, kind: str, facts: dict[str, Json]) -> None:
        """Add an event. A failure to add it is only logged, since the change itself has already taken effect."""
        try:
            self._events.add("", kind, msgspec.to_builtins(facts))
        except StoreError as error:
            log.warning("cannot record an event of kind %r: %s", kind, error.message)
