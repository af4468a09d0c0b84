"""The specification of a rollout: its task, agent, sandbox, limits and policies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from turngate.agents.installation import Installation
from turngate.agents.launch import ModelLimits
from turngate.agents.spec import AgentSpec
from turngate.sandboxes.base import Backend, Network, Resources
from turngate.tasks.task import Task
from turngate.types import Json

EndAction = Literal["grade", "exclude", "zero"]


class EndPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What to do if an agent does not end normally: grade its work anyway, exclude the rollout, or score it 0."""

    timed_out: EndAction = "grade"
    failed: EndAction = "grade"  # the exit code was not 0
    limit: EndAction = "grade"  # the session or the sandbox reached a limit
    lost: Literal["exclude", "zero"] = "zero"  # the agent broke its sandbox, or left more files than can be copied


class RolloutSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is needed to run one rollout on this machine."""

    task: Task
    agent: AgentSpec
    installed: Installation
    backend: Backend
    model: str
    timeout_s: float
    image: str = ""
    network: Network = "none"
    resources: Resources = Resources()
    folders: tuple[str, ...] = ()  # additional writable folders in a sandbox that has its own root
    env: Mapping[str, str] = {}
    session: Mapping[str, Json] = {}  # additional session settings: limits, sampling, policy …
    endpoint_sampling: Mapping[str, Json] = {}  # sampling settings that `session` and the agent's file override
    model_limits: ModelLimits = ModelLimits()  # the model's limits, for the agent's configuration
    options: Mapping[str, str] = {}  # the agent's options
    folder: Path  # for the agent's files, in a subfolder named after the session
    keep_work: bool = True
    grade: bool = True  # grade the work, if the task has a grader
    reuse_grades: bool = False  # grade identical work in the group once
    policy: EndPolicy = EndPolicy()
    rollout: str = ""  # the caller's name for the rollout; by default, the session's id
    group: str = ""
    attempt: int = 1

    @property
    def is_graded(self) -> bool:
        return self.grade and self.task.grader is not None
