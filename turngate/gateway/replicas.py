"""The engine's replicas during a weight update: freeze and thaw them, load weights into each, and roll back if a load fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

import msgspec

from turngate.engines.base import Engine, Health
from turngate.engines.pool import Pool
from turngate.engines.scripted import Scripted
from turngate.engines.weights import PolicyWeights, UpdatableReplica, list_updatable_replicas
from turngate.errors import Conflict, EngineError, EngineUnavailable, StoreError, TurngateError
from turngate.gateway.fence_state import FenceState

log = logging.getLogger("turngate")
_SETTLE_S = 0.1  # how long to wait for tokens that an engine sent before it was frozen
_NOT_TRIED = "not tried"
_KEPT_ADAPTERS = 2  # the current one and the previous one, which calls in flight may still use
KEEP_CALLS = "keep calls in flight during an update (use mode 'hold' or 'drain' instead)"


class ReplicaResult(msgspec.Struct, frozen=True):
    """The result of a weight update on one replica."""

    url: str
    ok: bool
    has: int | None  # the version of the replica's weights; None: unknown, so it receives no calls
    detail: str = ""


class ReplicaSet:
    """All replicas of the gateway's engine whose weights can be updated."""

    def __init__(self, engine: Engine | None, state: FenceState) -> None:
        self._engine = engine
        self._state = state
        self._adapters: list[str] = []  # loaded by this process and not yet unloaded
        self.is_frozen = False  # whether the engines are paused with calls in flight

    def require(self, action: str) -> list[UpdatableReplica]:
        """Return the replicas. If there are none, raise `Conflict`; `action` completes "this gateway has no engine that can …"."""
        found = list_updatable_replicas(self._engine)
        if not found:
            raise Conflict(f"this gateway has no engine that can {action}; the engines vllm, sglang and local can")
        return found

    @property
    def is_scripted(self) -> bool:
        return isinstance(self._engine, Scripted)

    async def health(self) -> list[Health]:
        return [] if self._engine is None else await self._engine.health()

    def expect(self, version: int) -> None:
        """Treat replicas without the weights of `version` as down. If the location of these weights is unknown, accept any weights."""
        load = self._read_loadable(version)
        for replica in list_updatable_replicas(self._engine):
            replica.expect(load)

    def expect_of(self, engine: Engine, version: int) -> None:
        """Do the same as `expect` for an engine that is about to join the pool."""
        if isinstance(engine, UpdatableReplica):
            engine.expect(self._read_loadable(version))

    def _read_loadable(self, version: int) -> PolicyWeights | None:
        """Return the weights of a version, or None if the gateway does not know where they are."""
        load = self._state.read_weights(version)
        return load if load is not None and (load.path or load.lora_path) else None

    async def load_into_new(self, engine: Engine, version: int, *, claimed: int | None) -> None:
        """Load the current weights into an engine that is about to join the pool, unless it already has them.

        `claimed` is the version that the engine already has, according to the caller. If another program loaded the current weights into
        the other engines, the gateway cannot load them into the new engine, so `claimed` must be the current version. Raise an error if the
        engine is not ready afterwards.
        """
        load = self._read_loadable(version)
        if load is None and version > 0 and claimed != version:
            raise Conflict(
                f"the gateway cannot load version {version} into a new engine, because another program loaded it into the other engines; "
                f"load it into the new engine too, and set version to {version}",
                param="version",
            )
        self.expect_of(engine, version)
        health = await engine.health()
        if load is not None and isinstance(engine, UpdatableReplica) and all(one.ok or one.wrong for one in health):
            if claimed != version and not (engine.reports_weights and all(one.ok for one in health)):
                await engine.load(load, frozen=False)
            health = await engine.health()
        for one in health:
            if not one.ok:
                raise EngineUnavailable(f"{one.url} cannot be added: {one.detail}")

    async def prepare(self, version: int, *, check: bool) -> None:
        """Prepare for a version that is about to become current. With `check`, ask every replica which weights it has."""
        self.expect(version)
        if check and isinstance(self._engine, Pool):
            await self._engine.check()

    # ── freeze and thaw ─────────────────────────────────────────────────────────────────────────────────────────

    async def freeze(self) -> None:
        """Pause sampling in every replica. Calls in flight stay open."""
        each = self.require(KEEP_CALLS)
        self._state.write_frozen(True)
        self.is_frozen = True
        # Wait for all replicas even if one fails: a pause still in progress would outlast the resume.
        found = await asyncio.gather(*(one.pause() for one in each), return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException):
                raise error
        await asyncio.sleep(_SETTLE_S)

    async def thaw(self) -> None:
        """Resume sampling in every replica."""
        found = await asyncio.gather(
            *(one.resume() for one in list_updatable_replicas(self._engine)), return_exceptions=True
        )
        for error in found:
            if isinstance(error, BaseException):
                raise error
        self.is_frozen = False
        try:
            self._state.write_frozen(False)
        except StoreError as error:
            log.warning("cannot record that the engines were resumed: %s", error.message)

    # ── load and roll back ──────────────────────────────────────────────────────────────────────────────────────

    async def load(self, each: list[UpdatableReplica], load: PolicyWeights, *, repair: bool) -> list[ReplicaResult]:
        """Load weights into one replica first and then into the others, so that bad weights affect only one replica.

        With `repair`, load the current version again into all replicas that are not healthy, even if the first one fails.
        """

        async def load_into(one: UpdatableReplica) -> None:
            if not (repair and all(health.ok for health in await one.health())):
                await one.load(load, frozen=self.is_frozen)

        first = await _try_on(each[0], load, load_into)
        if not first.ok and not repair:
            return [first, *(ReplicaResult(one.address, True, None, _NOT_TRIED) for one in each[1:])]
        return [first, *await asyncio.gather(*(_try_on(one, load, load_into) for one in each[1:]))]

    async def roll_back(
        self, each: list[UpdatableReplica], results: list[ReplicaResult], load: PolicyWeights, before: PolicyWeights
    ) -> list[ReplicaResult]:
        """Undo a failed load, and return which version each replica has now.

        On each replica where the load succeeded, an adapter is unloaded, or a model is replaced with the previous one. A replica that could
        have the wrong model aborts its calls in flight. If the current version was being loaded again, nothing is undone.
        """
        if load.version == before.version:
            return results

        async def undo(one: UpdatableReplica) -> None:
            if load.is_adapter:
                if load.version > before.version:
                    with contextlib.suppress(TurngateError):
                        await one.unload(load.name)
            else:
                await self.restore(one, before)

        after = []
        for one, result in zip(each, results, strict=True):
            if result.detail == _NOT_TRIED or (load.is_adapter and not result.ok):
                after.append(msgspec.structs.replace(result, has=before.version))
                continue
            undone = await _try_on(one, before, undo) if result.ok else result
            if not undone.ok:  # the replica is marked as down, and its frozen calls must not continue on these weights
                with contextlib.suppress(TurngateError):
                    await one.abort_all()
            after.append(undone)
        return after

    async def restore(self, one: UpdatableReplica, before: PolicyWeights) -> None:
        """Load the previous weights into a replica again. If another program loaded them, this fails and marks the replica as down."""
        if before.version == 0 or before.is_adapter:
            await one.reload_initial_weights(frozen=self.is_frozen)
        else:
            await one.load(before, frozen=self.is_frozen)

    async def undo_unfinished_load(self, present: int) -> None:
        """Load the current version again into replicas that have the newer model of an unfinished load."""
        load = self._state.read_unfinished_load()
        if load is None or load.is_adapter or load.version <= present:
            return
        before = self._state.read_weights(present) or PolicyWeights(version=present)
        for one in list_updatable_replicas(self._engine):
            one.expect(load)
            if all(health.ok for health in await one.health()):
                log.warning("%s has weights of an unfinished update; loading version %d again", one.address, present)
                await self.restore(one, before)

    async def unload_old_adapters(self, each: list[UpdatableReplica], names: tuple[str, ...]) -> None:
        """Unload all adapters except the two that were loaded last. `names` contains the previous and the current adapter."""
        self._adapters += [name for name in names if name and name not in self._adapters]
        while len(self._adapters) > _KEPT_ADAPTERS:
            old = self._adapters.pop(0)
            for one in each:
                with contextlib.suppress(TurngateError):  # the engine was restarted and no longer has it
                    await one.unload(old)


async def _try_on(
    one: UpdatableReplica, load: PolicyWeights, action: Callable[[UpdatableReplica], Awaitable[None]]
) -> ReplicaResult:
    try:
        await action(one)
    except TurngateError as error:
        return ReplicaResult(one.address, False, None, error.message)
    return ReplicaResult(one.address, True, load.version)


def load_error(load: PolicyWeights, before: int, results: list[ReplicaResult]) -> EngineError:
    is_repair = load.version == before
    each = []
    for result in results:
        has = "has no usable weights" if result.has is None else f"has version {result.has}"
        detail = result.detail or ("" if is_repair else "rolled back")
        each.append(f"{result.url}: {detail} ({has})" if detail else f"{result.url}: {has}")
    if is_repair:
        problem = f"version {before} remains active, but could not be loaded again into every engine"
    else:
        problem = f"version {load.version} was not loaded; version {before} remains active"
    return EngineError(f"{problem}. {'; '.join(each)}")
