"""Do the work of one rollout: wait for a free slot, connect to the gateway, install the agent, then run and grade the rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from turngate.rollout.concurrency import Bounds, Concurrency
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.outcome import Outcome
from turngate.rollout.rollout import Rollout
from turngate.sandboxes.base import Backend
from turngate.service.active_rollout import ActiveRollout
from turngate.service.agents import Agents
from turngate.service.config import ServiceConfig
from turngate.service.direct_mode import DirectModeClient, Forwarder
from turngate.service.event_log import RolloutEventLog
from turngate.service.gateways import GatewayConnection, Gateways
from turngate.service.planning import build_rollout_spec, write_inputs
from turngate.service.storage import ServiceStorage

OnWorkDone = Callable[[ActiveRollout, asyncio.Task[Outcome]], Awaitable[None]]


class RolloutRunner:
    """Runs at most `config.running` rollouts at the same time. Further rollouts wait in a queue."""

    def __init__(
        self,
        config: ServiceConfig,
        *,
        backend: Backend,
        agents: Agents,
        gateways: Gateways,
        storage: ServiceStorage,
        events: RolloutEventLog,
    ) -> None:
        self._config = config
        self._backend = backend
        self._agents = agents
        self._gateways = gateways
        self._storage = storage
        self._events = events
        self._slots = asyncio.Semaphore(config.running)
        self._concurrency = Concurrency(
            Bounds(running=config.running, starting=config.starting, grading=config.grading, warm=0)
        )
        self._supervisors: set[asyncio.Task[None]] = set()

    def start(self, active: ActiveRollout, on_work_done: OnWorkDone) -> None:
        """Start the work of a rollout. Once the work has finished, failed or been cancelled, `on_work_done` is called."""
        active.writing_inputs = asyncio.create_task(self._write_inputs(active))
        active.work = asyncio.create_task(self._run(active), name=f"rollout {active.id}")
        supervisor = asyncio.create_task(
            _supervise(active, active.work, on_work_done), name=f"supervisor of rollout {active.id}"
        )
        self._supervisors.add(supervisor)
        supervisor.add_done_callback(self._supervisors.discard)

    async def wait(self) -> None:
        """Wait until every rollout has ended."""
        await asyncio.gather(*self._supervisors)

    async def _run(self, active: ActiveRollout) -> Outcome:
        """Do the work of a rollout. An abort cancels this method. Connections stay open afterwards, so that the last events can be read."""
        async with self._slots:
            active.running = True
            active.seconds["queued"] = active.wall_s
            self._events.append(active, "started", {"waited_s": active.seconds["queued"]})
            with active.time_stage("gateway"):
                connection = active.connection = await self._connect(active)
                active.model = connection.model
            with active.time_stage("install"):
                installed = await self._agents.install(active.agent)
            if active.writing_inputs is not None:
                await asyncio.shield(active.writing_inputs)
            spec = build_rollout_spec(
                active.id,
                active.request,
                active.task,
                active.choice,
                self._config,
                backend=self._backend,
                agent=active.agent,
                installed=installed,
                options=self._agents.options(active.agent),
                model=connection.model,
                folder=self._storage.artifacts,
            )
            slot = self._concurrency.new_slot()
            active.rollout = Rollout(
                spec, connection.client, connection.connector, active.on_progress, gate=slot, session=active.id
            )
            active.following = asyncio.create_task(self._events.follow(active, connection.client))
            try:
                return await active.rollout.run()
            finally:
                slot.leave()

    async def _write_inputs(self, active: ActiveRollout) -> None:
        """Move the caller's files from memory to disk at once, so that a queued rollout does not keep them in memory."""
        await asyncio.to_thread(write_inputs, active.request, self._storage.inputs_folder(active.id))
        active.request = active.request.without_files()

    async def _connect(self, active: ActiveRollout) -> GatewayConnection:
        if active.choice.mode != "direct":
            return await active.stack.enter_async_context(self._gateways.connect(active.choice))
        forwarder = Forwarder(active.choice.endpoint.urls[0])
        url = await active.stack.enter_async_context(forwarder.open())
        client = DirectModeClient(url, forwarder, lambda kind, data: self._events.append(active, kind, data))
        connector = GatewayConnector(url, self._config.public_url, self._config.tunnel)
        await active.stack.enter_async_context(client)
        await active.stack.enter_async_context(connector)
        return GatewayConnection(client, connector, active.choice.endpoint.served)


async def _supervise(active: ActiveRollout, work: asyncio.Task[Outcome], on_work_done: OnWorkDone) -> None:
    """Wait for the work to end, then call `on_work_done`. This task is never cancelled, so every rollout gets a result."""
    await asyncio.wait([work])
    await on_work_done(active, work)
