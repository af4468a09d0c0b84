"""Run a batch of the Python API on a Ray cluster, as `turngate batch --ray` does, and return results like those of the service.

async with open_cluster_batch(config, place, request, tasks, n, folder) as batch:
    async for finished in batch.rollouts(watch):
        result = batch.build_result(finished)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec

from turngate.client.gateway import GatewayClient
from turngate.common.database_url import is_database_url
from turngate.errors import BadRequest
from turngate.rollout.batch import rollouts
from turngate.rollout.cluster.open_cluster import ClusterChoice, open_executor, open_shared_gateway
from turngate.rollout.concurrency import Bounds
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.executor import AttemptExecutor
from turngate.rollout.ledger import FinishedRollout
from turngate.rollout.outcome import Outcome
from turngate.rollout.plan import BatchPlan
from turngate.rollout.progress import BatchProgressCallback
from turngate.rollout.results import read_outcome
from turngate.sandboxes import get_backend
from turngate.service import report
from turngate.service.agents import Agents
from turngate.service.catalog import Catalog, EndpointChoice
from turngate.service.config import ServiceConfig
from turngate.service.planning import choose_model_limits, combine_session_settings
from turngate.service.request import TaskRolloutRequest
from turngate.service.result import ErrorInfo, RolloutResult, RolloutState
from turngate.tasks.task import Task

log = logging.getLogger("turngate")
_MODES = ("exact", "observe")
_ON_NODE = "workdir_files: left out, because they are on the node that ran the rollout"


class ClusterPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The Ray cluster that a batch runs on, and the shared store that records it."""

    address: str  # address of the Ray cluster: `auto`, HOST:PORT or ray://HOST:PORT
    shared: str  # URL of the shared store

    def check(self) -> None:
        if not is_database_url(self.shared):
            raise BadRequest(
                "if 'cluster' is set, 'data' must be the URL of a PostgreSQL database that all nodes can reach, such as "
                f"postgresql://user@host/turngate, not {self.shared!r}",
                param="data",
            )


class ClusterBatch:
    """A batch whose gateway and cells are running."""

    def __init__(
        self, plan: BatchPlan, choice: EndpointChoice, gateway: GatewayClient, executor: AttemptExecutor
    ) -> None:
        self.gateway = gateway  # serves the shared store
        self._plan = plan
        self._choice = choice
        self._executor = executor

    async def rollouts(self, watch: BatchProgressCallback) -> AsyncGenerator[FinishedRollout, None]:
        """Run the batch, and yield its rollouts as they finish. Closing the iterator cancels the rollouts that are still running."""
        async with GatewayConnector(self.gateway.url) as connector:
            running = rollouts(self._plan, self.gateway, connector, watch, executor=self._executor)
            async with aclosing(running):
                async for finished in running:
                    yield finished

    def build_result(self, finished: FinishedRollout) -> RolloutResult:
        """Build the result of a rollout, without its turns. This blocks."""
        outcome = self._read_outcome(finished)
        result = report.build_minimal_result(self.build_state(finished), outcome, ())
        result = msgspec.structs.replace(result, seconds=dict(finished.seconds))
        if outcome is None:
            return result
        return msgspec.structs.replace(
            result,
            log_tails={"stdout": outcome.collected.stdout, "stderr": outcome.collected.stderr},
            verifier_output="" if outcome.grade is None else outcome.grade.log,
            clamped=[_ON_NODE] if outcome.collected.work else [],
        )

    def build_state(self, finished: FinishedRollout) -> RolloutState:
        """Build the final state of a rollout. This blocks."""
        outcome = self._read_outcome(finished)
        error = report.error_from_outcome(outcome) if outcome is not None else None
        if outcome is None and finished.message:
            error = ErrorInfo(boundary=finished.boundary or "task", stage=finished.stage, message=finished.message)
        kind = outcome.kind if outcome is not None else "invalid task" if finished.kind == "invalid task" else None
        wall_s = round(sum(finished.seconds.values()), 3)
        return RolloutState(
            rollout_id=finished.rollout,
            task_id=finished.task,
            agent=self._plan.agent.name,
            model_key=self._choice.endpoint.key,
            model=self._plan.model,
            mode=self._choice.mode,
            status=finished.status or "error",
            stage="done",
            turns=finished.turns,
            sampled_tokens=finished.sampled_tokens,
            wall_s=wall_s,
            reward=finished.reward,
            kind=kind,
            session=finished.session,
            error=error,
            done=True,
            started=round(finished.at - wall_s, 3),
        )

    def _read_outcome(self, finished: FinishedRollout) -> Outcome | None:
        return read_outcome(self._plan.folder, finished.session) if finished.session else None


@asynccontextmanager
async def open_cluster_batch(
    config: ServiceConfig,
    place: ClusterPlace,
    request: TaskRolloutRequest,
    tasks: Sequence[Task],
    n: int,
    folder: Path,
    *,
    timeout_s: float | None = None,
    note: Callable[[str], None] = lambda text: log.info("%s", text),
) -> AsyncIterator[ClusterBatch]:
    """Open a batch of n rollouts of each task: start a gateway on the shared store, and a cell on each node with room for rollouts.

    `request` contains the settings that all rollouts share; its `task`, `group`, `agent_timeout_s` and `endpoint_url` are not used. The
    batch's ledger is written to `folder`.
    """
    place.check()
    request = request.check()
    choice = _choose_endpoint(config, request)
    serve = choice.endpoint.gateway_config(choice.mode, place.shared)
    assert serve is not None
    agents = Agents(config)
    try:
        plan = await _build_plan(config, choice, request, tasks, n, folder, agents, timeout_s)
        async with open_shared_gateway(serve) as gateway:
            if not plan.model:
                plan = msgspec.structs.replace(plan, model=next(iter(await gateway.models()), ""))
            cluster = ClusterChoice(address=place.address, config=serve)
            async with open_executor(cluster, plan, gateway, note) as executor:
                yield ClusterBatch(plan, choice, gateway, executor)
    finally:
        await agents.close()


def _choose_endpoint(config: ServiceConfig, request: TaskRolloutRequest) -> EndpointChoice:
    choice = Catalog(config.endpoints).choose(request.model_key, request.mode, request.thinking)
    if choice.endpoint.scheme == "gateway":
        raise BadRequest(
            "model must not be a gateway:// endpoint on a cluster, because each node has its own gateway; pass the endpoint "
            "that the gateway calls, such as vllm://MODEL@URL",
            param="model",
        )
    if choice.mode not in _MODES:
        raise BadRequest(f"mode must be {' or '.join(_MODES)} on a cluster, not {choice.mode}", param="mode")
    return choice


async def _build_plan(
    config: ServiceConfig,
    choice: EndpointChoice,
    request: TaskRolloutRequest,
    tasks: Sequence[Task],
    n: int,
    folder: Path,
    agents: Agents,
    timeout_s: float | None,
) -> BatchPlan:
    agent = agents.find(request.agent)
    for task in tasks:
        agents.check(agent, task.instruction)
    installed = await agents.install(agent)
    return await asyncio.to_thread(
        BatchPlan,
        tasks=tuple(_with_image(task, config.image) for task in tasks),
        agent=agent,
        installed=installed,
        backend=get_backend(config.sandbox),
        model=choice.endpoint.served,
        folder=folder,
        n=n,
        bounds=Bounds(running=config.running, starting=config.starting, grading=config.grading),
        timeout_s=timeout_s,
        network=config.network,
        resources=config.resources,
        session=combine_session_settings(request, choice),
        endpoint_sampling=choice.endpoint.session.get("sampling", {}),
        model_limits=choose_model_limits(request, choice),
        options=agents.options(agent),
    )


def _with_image(task: Task, image: str) -> Task:
    return (
        task if task.image or task.dockerfile is not None or not image else msgspec.structs.replace(task, image=image)
    )
