"""Weight updates for all cells, run by the gateway on the shared store.

The gateway holds the calls of every cell, loads the weights into every listed engine, and resumes the calls at the new version. If the
first engine rejects the weights, the old version remains active. If a later engine rejects them, that engine is taken out of service, the
reason is recorded, and the update continues: one broken engine among many does not stop training.
"""

from __future__ import annotations

import contextlib

from turngate.client.protocol import FenceView, PauseMode
from turngate.engines.weights import PolicyWeights, UpdatableReplica
from turngate.errors import TurngateError
from turngate.gateway.engine_changes import LocalEngines
from turngate.gateway.events import Events
from turngate.gateway.fence import Fence
from turngate.gateway.fence_state import FenceState
from turngate.gateway.replicas import ReplicaResult, ReplicaSet
from turngate.gateway.shared_engines import SharedEngineList
from turngate.gateway.shared_fence import SharedBarrier
from turngate.gateway.weights import LoadReply, WeightUpdates


class SharedUpdates(WeightUpdates):
    """Updates the weights for all cells. `local` is the engine pool of the gateway on the shared store, if it has one."""

    def __init__(
        self,
        fence: Fence,
        state: FenceState,
        events: Events,
        replicas: ReplicaSet,
        barrier: SharedBarrier,
        listed: SharedEngineList,
        local: LocalEngines | None,
    ) -> None:
        super().__init__(fence, state, events, replicas, barrier)
        self._shared = barrier
        self._listed = listed
        self._local = local

    async def pause(self, mode: PauseMode, limit_s: float | None) -> FenceView:
        await self._shared.adopt_version()
        return await super().pause(mode, limit_s)

    async def resume(self, version: int | None, model: str | None) -> FenceView:
        await self._shared.adopt_version()
        return await super().resume(version, model)

    async def load(self, load: PolicyWeights, mode: PauseMode | None, limit_s: float) -> LoadReply:
        await self._shared.adopt_version()
        return await super().load(load, mode, limit_s)

    async def _list_replicas(self) -> list[UpdatableReplica]:
        """Return the listed replicas, healthy ones first, because the whole update fails if the first replica rejects the weights."""
        if self._local is not None:
            await self._local.sync()
        healthy = {health.url for health in await self._replicas.health() if health.ok}
        return sorted(await super()._list_replicas(), key=lambda one: one.address not in healthy)

    def _accepts(self, results: list[ReplicaResult]) -> bool:
        return results[0].ok

    async def _retire_failed(self, each: list[UpdatableReplica], results: list[ReplicaResult]) -> None:
        """Take engines that could not load the weights out of service. This must happen before calls resume."""
        for one, result in zip(each, results, strict=True):
            if result.ok:
                continue
            for end in (one.abort_all, one.resume):  # its frozen calls must not continue, and later ones must not wait
                with contextlib.suppress(TurngateError):
                    await end()
            self._listed.fail(one.address, result.detail)
            self._announce("engine", {"url": one.address, "state": "failed", "reason": result.detail})
        if self._local is not None:
            await self._local.sync()
