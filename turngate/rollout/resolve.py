"""Turn an order into the spec of a rollout: add what belongs to the machine that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from turngate.agents.install import Installation
from turngate.rollout.order import RolloutOrder
from turngate.rollout.plan import BatchPlan
from turngate.rollout.spec import RolloutSpec
from turngate.sandboxes.base import Backend
from turngate.tasks.task import Task


class MachineParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a rollout that belong to one machine."""

    task: Task  # with paths on this machine
    installed: Installation
    backend: Backend
    env: Mapping[str, str]
    folder: Path  # for the agent's files


def build_spec(order: RolloutOrder, parts: MachineParts) -> RolloutSpec:
    """Build the spec of an attempt from its order and the machine's parts."""
    return RolloutSpec(
        task=parts.task,
        agent=order.agent,
        installed=parts.installed,
        backend=parts.backend,
        model=order.model,
        timeout_s=order.timeout_s,
        image=order.image,
        network=order.network,
        resources=order.resources,
        folders=order.folders,
        env=parts.env,
        session=order.session,
        endpoint_sampling=order.endpoint_sampling,
        model_limits=order.model_limits,
        options=order.options,
        folder=parts.folder,
        keep_work=order.keep_work,
        grade=order.grade,
        policy=order.policy,
        rollout=order.rollout,
        group=order.group,
        attempt=order.attempt,
    )


class PlanResolver:
    """Resolves the orders of a batch in the process that made them: the plan has all parts, so nothing is unpacked or installed."""

    def __init__(self, plan: BatchPlan) -> None:
        self._plan = plan
        self._tasks = {task.id: task for task in plan.tasks}

    async def resolve(self, order: RolloutOrder) -> RolloutSpec:
        plan = self._plan
        parts = MachineParts(
            task=self._tasks[order.task.task.id],
            installed=plan.installed,
            backend=plan.backend,
            env=plan.env,
            folder=plan.folder / "rollouts",
        )
        return build_spec(order, parts)
