"""Run a batch with the scripted engine, which replays the reference solution in every second rollout of each group.

The rewards within a group of two or more therefore normally differ, which gives nonzero advantages. This makes it possible to
try a trainer without a model.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from turngate.client.gateway import GatewayClient
from turngate.config import ServeConfig
from turngate.engines.base import Engine, Generate
from turngate.engines.scripted import ScriptedTurn
from turngate.errors import ConfigError, EngineError
from turngate.render import Renderer
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.executor import LocalExecutor
from turngate.rollout.order import RolloutOrder
from turngate.rollout.plan import BatchPlan
from turngate.rollout.playbook import Playbook
from turngate.rollout.reference import REPLAYED, ReferenceReplay, build_scripted, play_reference
from turngate.rollout.resolve import PlanResolver
from turngate.tasks.reference import solution_folders

BATCH_REPLAY_NOTE = (
    "a scripted model replays the reference solution in every second rollout of a group and changes nothing in the others, so the "
    "rewards say nothing about a model, and the log-probabilities are synthetic"
)


class BatchReplay:
    """The scripted replies of a batch. Rollouts with an even index in their group solve the task; the others change nothing."""

    def __init__(self, replays: Mapping[str, ReferenceReplay]) -> None:
        self._replays = replays  # by task
        # Session → its replay, its working folder, and whether it solves the task.
        self._rollouts: dict[str, tuple[ReferenceReplay, str, bool]] = {}

    def add_rollout(self, order: RolloutOrder, workdir: str) -> None:
        """Prepare the replies for a rollout. `workdir` is the working folder in its sandbox."""
        solves = int(order.rollout.rpartition(".")[2]) % 2 == 0
        self._rollouts[order.session_id] = (self._replays[order.task.task.id], workdir, solves)

    def build_engine(self, config: ServeConfig, renderer: Renderer) -> Engine:
        """Build the engine that replays the solutions."""

        def script(request: Generate, index: int) -> ScriptedTurn:
            if request.session not in self._rollouts:
                raise EngineError(
                    f"session {request.session} does not belong to this batch, so it has no scripted replies"
                )
            replay, workdir, solves = self._rollouts[request.session]
            return Playbook(renderer, [replay.write_scene(workdir, solves=solves)])(request, index)

        return build_scripted(config, script)

    def build_executor(self, plan: BatchPlan, gateway: GatewayClient, connector: GatewayConnector) -> LocalExecutor:
        """Build the executor that prepares the replies of each rollout once its sandbox exists."""
        return LocalExecutor(PlanResolver(plan), gateway, connector, on_sandbox_ready=self.add_rollout)


def mark_replay(plan: BatchPlan) -> BatchPlan:
    """Return the plan with its sessions marked as replays, and with the folders that the solutions' commands need."""
    metadata = {**plan.session.get("metadata", {}), REPLAYED: "reference solution in every second rollout"}
    session = {**plan.session, "metadata": metadata}
    return msgspec.structs.replace(plan, session=session, folders=solution_folders(plan.backend))


def play_references(plan: BatchPlan, config: ServeConfig) -> BatchReplay:
    """Plan the replay of the tasks' reference solutions. Raise `ConfigError` if a solution cannot be replayed."""
    replays = {}
    for task in plan.tasks:
        try:
            replays[task.id] = play_reference(task, plan.agent, plan.backend, config)
        except ConfigError as error:
            raise ConfigError(f"task {task.id}: {error.message}", param=error.param) from None
    return BatchReplay(replays)
