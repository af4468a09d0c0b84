"""What to run: one task, one agent, one sandbox, and the limits and policies of the rollout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from turngate.agents.install import Installation
from turngate.agents.launch import ModelLimits
from turngate.agents.spec import AgentSpec
from turngate.sandboxes.base import Backend, Network, Resources
from turngate.tasks.task import Task
from turngate.types import Json

EndAction = Literal["grade", "exclude", "zero"]


class EndPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How to score an agent that did not end well by itself: grade its work as it stands, exclude it, or give it 0."""

    timed_out: EndAction = "grade"
    failed: EndAction = "grade"  # its exit code was not 0
    limit: EndAction = "grade"  # its session reached a limit
    lost: Literal["exclude", "zero"] = "zero"  # nothing to grade: it broke its sandbox, or left more than can be copied


class RolloutSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, where, and within which limits."""

    task: Task
    agent: AgentSpec
    installed: Installation
    backend: Backend
    model: str
    timeout_s: float
    image: str = ""
    network: Network = "none"
    resources: Resources = Resources()
    env: Mapping[str, str] = {}
    session: Mapping[str, Json] = {}  # further settings of the session: limits, sampling, policy …
    model_limits: ModelLimits = ModelLimits()  # what the agent's configuration says about its model
    options: Mapping[str, str] = {}  # of the agent
    folder: Path  # what the agent left is stored here, in a folder named after the session
    keep_work: bool = True
    grade: bool = True  # if the task has a grader
    policy: EndPolicy = EndPolicy()
    rollout: str = ""  # the caller's name for the rollout; by default the id of its session
    group: str = ""
    attempt: int = 1

    @property
    def is_graded(self) -> bool:
        return self.grade and self.task.grader is not None
