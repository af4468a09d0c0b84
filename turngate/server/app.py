"""The gateway: an ASGI application composed of an engine, a fence at which calls wait during weight updates, and projects.

The gateway itself serves the project `default`. If a request carries an API key, session secret or login cookie of another project, or the
admin key and another project's name, the gateway passes the request to that project.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from math import inf

import anyio
from starlette.requests import HTTPConnection

from turngate.common.sharding import SINGLE_SHARD, Shard
from turngate.config import ServeConfig
from turngate.engines.base import Engine, Relay
from turngate.engines.gate import Gate
from turngate.engines.pool import Pool
from turngate.errors import TurngateError
from turngate.gateway.api_keys import KeyRing, read_projects
from turngate.gateway.cell.cell import Cell
from turngate.gateway.engine_changes import EngineChanges, EngineGroup, LocalEngines
from turngate.gateway.engine_list import EngineList
from turngate.gateway.fair_shares import FairShares
from turngate.gateway.fence import Fence
from turngate.gateway.fence_state import FenceState
from turngate.gateway.loading import TimeSlicer
from turngate.gateway.projects import Projects
from turngate.gateway.quotas import QuotaKeeper
from turngate.gateway.replicas import ReplicaSet
from turngate.gateway.shared_calls import SharedCalls
from turngate.gateway.shared_engines import (
    FollowedEngineChanges,
    FollowedEngineList,
    FollowedEngines,
    SharedEngineChanges,
    SharedEngineList,
)
from turngate.gateway.shared_fence import FenceFollower, FollowedUpdates, SharedBarrier
from turngate.gateway.shared_updates import SharedUpdates
from turngate.gateway.weights import Barrier, LocalBarrier, WeightUpdates
from turngate.render import Certificate, Renderer
from turngate.server.asgi import Receive, Scope, Send
from turngate.server.auth import admin_key, metrics_key
from turngate.server.engine_factory import (
    build_engine,
    build_pool,
    build_renderer,
    build_replica,
    list_engine_addresses,
)
from turngate.server.hosted_projects import HostedProjects
from turngate.server.model_calls import respond_error
from turngate.server.project_gateway import ANSWER_S, ProjectGateway
from turngate.server.routing import dialect_of
from turngate.server.websocket import refuse_upgrade
from turngate.store.location import count_unfinished, open_store
from turngate.store.projects import DEFAULT_PROJECT, refuse_project_store
from turngate.store.shared.store import SharedStore
from turngate.telemetry.metrics import Metrics

log = logging.getLogger("turngate")
_STOP_S = 10.0  # how long a gateway that is stopping waits for the shared store


class Gateway(ProjectGateway):
    """One gateway as an ASGI application. Call `start` before serving, and `stop` afterwards.

    `engine`, `relay` and `renderer` replace the ones that would be built from the configuration.
    """

    def __init__(
        self,
        config: ServeConfig,
        *,
        engine: Engine | None = None,
        relay: Relay | None = None,
        renderer: tuple[Renderer, Certificate] | None = None,
        shard: Shard = SINGLE_SHARD,
    ) -> None:
        self.config = config
        self.shard = shard
        self.metrics = Metrics()
        refuse_project_store(config.data)
        self.store = open_store(config.data, config.durability, shard, answer_s=ANSWER_S)
        try:
            config.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.admin_key = admin_key(config.folder)
            self._metrics_key = metrics_key()
            self.renderer, self.certificate = renderer or ((None, None) if config.is_shared else build_renderer(config))
            self.engine_list = self._open_engine_list(list_engine_addresses(config, engine))
            self.engine, self.relay = self._choose_engine(engine, relay)
        except BaseException:
            self.store.close()
            raise
        self._store_renderer()
        self.cell = Cell(config, self.store, shard) if config.shared else None
        self._has_context_limit = config.max_context is not None
        self.gate = self.engine if isinstance(self.engine, Gate) else None
        self.max_context = config.max_context
        self.projects = self._compose_projects()
        is_held, weight = lambda: not self.fence.admits, self.projects.ring.weight
        self.shares = FairShares(self._is_saturated, weight, is_held, self._read_room)
        self.slicer = TimeSlicer()
        self._compose_policy()
        self._compose_sessions()
        self._compose_weight_updates()
        self._compose_routes()
        self.quota_keeper = self._compose_quotas()
        self.hosted = HostedProjects(self)

    def _open_engine_list(self, configured: list[str]) -> EngineList | SharedEngineList | FollowedEngineList:
        if isinstance(self.store, SharedStore):
            return SharedEngineList(self.store.engines, configured)
        return FollowedEngineList(configured) if self.config.shared else EngineList(self.store, configured)

    def _choose_engine(self, engine: Engine | None, relay: Relay | None) -> tuple[Engine | None, Relay | None]:
        """Return the given engine or relay, or else the configured one.

        A gateway on the shared store serves no calls. It uses no engine except a pool, into which it loads weights.
        """
        if engine is not None or relay is not None:
            return engine, relay
        urls = list(self.engine_list.read().used)
        if self.config.is_shared:
            return (build_pool(self.config, urls), None) if self.config.has_pool else (None, None)
        return build_engine(self.config, self.renderer, urls)

    def _compose_projects(self) -> Projects:
        table, audit = self.store.projects, self.store.audit
        count = partial(count_unfinished, self.config.data)
        if self.cell is not None:
            return Projects(table, audit, self.cell.ring, count, read_only=True)
        return Projects(table, audit, KeyRing(lambda: read_projects(table)), count)

    def _is_saturated(self) -> bool:
        return isinstance(self.engine, Pool) and self.engine.is_saturated

    def _read_room(self) -> float:
        return self.engine.room if isinstance(self.engine, Pool) else inf

    def _compose_quotas(self) -> QuotaKeeper:
        ring, cell = self.projects.ring, self.cell
        keeper = QuotaKeeper(ring.read_quotas, lambda: self.store.quotas if cell is None else cell.open_quotas())
        keeper.add(self.quota)
        return keeper

    def _compose_policy(self) -> None:
        self.fence_state = FenceState(self.store)
        policy = self.fence_state.read_policy()
        self.fence = Fence(*policy) if self.cell is None else self.cell.create_fence(*policy)
        if isinstance(self.engine, Gate) and self.renderer is not None:
            vocabulary = self.renderer.tokenizer.vocab_size
            self.engine.attach(vocabulary=vocabulary, version=lambda: self.fence.version)

    def _compose_weight_updates(self) -> None:
        self.replicas = ReplicaSet(self.engine, self.fence_state)
        self.replicas.expect(self.fence.version)
        self.barrier = LocalBarrier(self.fence, self.fence_state, self.events, self.replicas, self.stale)
        self.local_engines = self._compose_engines(self.engine) if isinstance(self.engine, Pool) else None
        self.updates = self.create_updates(self.barrier)
        self.follower = self._compose_follower(self.cell) if self.cell is not None else None
        self.engine_changes = self.create_engine_changes(self.updates, self.local_engines)

    def create_updates(self, barrier: Barrier) -> WeightUpdates:
        """Create the object that updates weights, using `barrier` or, on the shared store, the fence of all cells.

        In a cell, the returned object refuses all updates.
        """
        parts = (self.fence, self.fence_state, self.events, self.replicas)
        if isinstance(self.store, SharedStore) and isinstance(self.engine_list, SharedEngineList):
            shared = SharedBarrier(self.barrier, self.fence, self.fence_state, self.replicas, self.store.fence)
            return SharedUpdates(*parts, shared, self.engine_list, self.local_engines)
        return (WeightUpdates if self.cell is None else FollowedUpdates)(*parts, barrier)

    def _compose_engines(self, pool: Pool) -> LocalEngines:
        return LocalEngines(
            pool,
            self.engine_list,
            lambda url: build_replica(self.config, url),
            self.replicas,
            self.fence,
            serves=not self.config.is_shared,
        )

    def _compose_follower(self, cell: Cell) -> FenceFollower:
        shared, engines = cell.open_shared, None
        if isinstance(self.engine_list, FollowedEngineList) and self.local_engines is not None:
            engines = FollowedEngines(
                self.engine_list, self.local_engines, lambda: shared().engines, self._apply_context_limit
            )
        calls = SharedCalls(self.shares, self.engine, self.fence) if isinstance(self.engine, Pool) else None
        return cell.create_follower(self.fence, self.barrier, self.fence_state, self.replicas, engines, calls)

    def create_engine_changes(self, updates: WeightUpdates, group: EngineGroup | None) -> EngineChanges:
        """Create the object that adds, drains and removes engines: those of `group` or, on the shared store, those of all cells.

        In a cell, the returned object refuses all changes.
        """
        local, parts = self.local_engines, (updates, self.replicas, self.fence, self.events)
        if isinstance(self.store, SharedStore) and isinstance(self.engine_list, SharedEngineList) and local is not None:
            return SharedEngineChanges(local, self.engine_list, self.store.fence, *parts)
        return (EngineChanges if self.cell is None else FollowedEngineChanges)(local, group, self.engine_list, *parts)

    async def start(self, url: str = "") -> None:
        """Start the engine, the relay and the background tasks. `url` is this gateway's URL, which a cell publishes in the shared store."""
        for part in (self.engine, self.relay):
            if part is not None:
                await part.start()
        if self.local_engines is not None:
            if isinstance(self.engine_list, EngineList):
                self.engine_list.warn_about_removed()
            await self.local_engines.sync()  # restores the draining state of the engines
        if self.cell is not None:
            await asyncio.to_thread(self.cell.read_keys)
            self.hosted.start()  # before the cell gets an id, which applies to the sessions of all projects
            await self.cell.start(self.sessions, url)
        if self.follower is not None:
            await self.follower.start()
        await self._apply_context_limit()
        if self.shard.workers == 1:
            await self.updates.start()
        async with anyio.create_task_group():
            pass  # loads anyio's backend now; at the first streamed reply, this would block the loop for 25 ms
        self.metrics_endpoint.start()
        self.start_tasks()
        self.hosted.start()
        if not self.config.is_shared:  # a gateway on the shared store opens no sessions
            self.quota_keeper.start()

    async def _apply_context_limit(self) -> None:
        """Limit the context to what the engines support, unless a limit is configured or has already been applied.

        A cell calls this whenever its engines change, because it may have none when it starts. Engines that are added after a limit was
        applied do not change it.
        """
        if self._has_context_limit or self.engine is None:
            return
        limits = [health.max_context for health in await self.engine.health() if health.max_context is not None]
        if limits:
            self._has_context_limit = True
            for project in (self, *self.hosted):
                project.limit_context(min(limits))

    async def end_requests(self) -> None:
        """End event streams and long polls, and abort model calls, in all projects. Called before the gateway stops."""
        await super().end_requests()
        for project in self.hosted:
            await project.end_requests()
        if self.gate is not None:
            await self.gate.close()

    async def stop(self) -> None:
        uses_shared = self.cell is not None or self.config.is_shared
        limit = asyncio.get_running_loop().call_later(_STOP_S, self._interrupt_stores) if uses_shared else None
        await self.metrics_endpoint.stop()
        await self.stop_tasks()
        await self.updates.close()
        for part in (self.engine, self.relay):
            if part is not None:
                await part.close()
        await asyncio.to_thread(self.quota_keeper.stop)
        await self.shares.close()
        await self.close_readers()
        if self.follower is not None:
            await self.follower.stop()
        if self.cell is not None:
            await self.cell.stop()
        await self.hosted.stop()
        if limit is not None:
            limit.cancel()
        self.store.close()

    def _interrupt_stores(self) -> None:
        """Interrupt all requests to the shared store. Called when stopping takes too long, because a slow request may be the reason."""
        log.warning("the gateway is taking too long to stop; interrupting all requests to the shared store")
        for project in (self, *self.hosted):
            if isinstance(project.store, SharedStore):
                project.store.database.interrupt()
        if self.cell is not None:
            self.cell.interrupt()

    def find_project(self, name: str) -> ProjectGateway:
        return self if name == DEFAULT_PROJECT else self.hosted.open(name)

    def choose(self, scope: Scope) -> ProjectGateway:
        """Return the project that a request belongs to.

        This is `default` unless the request carries an API key, session secret or login cookie of another project, or the admin key and
        another project's name.
        """
        name = self.hosted.choose(scope)
        return self if name is None else self.hosted.open(name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            project = self.choose(scope)
        except TurngateError as error:  # the operator named an unknown project, or the project's store cannot be opened
            dialect = dialect_of(HTTPConnection(scope))
            await (refuse_upgrade if scope["type"] == "websocket" else respond_error)(send, dialect, error)
            return
        await project.serve(scope, receive, send)
