"""The nouns of a rollout: what is ordered, how far it has come, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Literal

import msgspec

from turngate.agents.install import Installation
from turngate.agents.launch import ModelLimits
from turngate.agents.spec import AgentSpec
from turngate.errors import Boundary
from turngate.rollout.collect import Collected
from turngate.sandboxes.base import Backend, Network, Resources
from turngate.tasks.grading.types import Class, Grade
from turngate.tasks.task import Task
from turngate.types import Json

Stage = Literal[
    "sandbox", "files", "setup", "session", "relay", "launch", "agent", "seal", "collect", "clean", "grade", "record"
]
Phase = Literal["start", "run", "grade"]  # what is bounded when many rollouts run: each has its own limit
Status = Literal["finished", "failed", "timed out", "limit", "cancelled", "error"]
AtEnd = Literal["grade", "exclude", "zero"]
Gates = Callable[[Phase], AbstractAsyncContextManager[None]]


class EndPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of an agent that did not end well by itself: its work is graded as it stands, or it has no reward, or 0."""

    timed_out: AtEnd = "grade"
    failed: AtEnd = "grade"  # it ended with another exit code than 0
    limit: AtEnd = "grade"  # its session met a limit
    lost: Literal["exclude", "zero"] = (
        "zero"  # it left nothing that could be graded: it broke its sandbox, or left too much
    )


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, where, within which bounds."""

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
    told: ModelLimits = ModelLimits()  # what the agent is told about its model
    options: Mapping[str, str] = {}  # of the agent's own
    folder: Path  # where what it left is kept, in a folder of the session's name
    keep_work: bool = True
    grade: bool = True  # where the task has a grader
    policy: EndPolicy = EndPolicy()
    rollout: str = ""  # the caller's name for it; the session's id where there is none
    group: str = ""
    attempt: int = 1


class Fault(msgspec.Struct, frozen=True):
    """What went wrong, and on whose side."""

    stage: Stage
    boundary: Boundary
    message: str


class Outcome(msgspec.Struct, kw_only=True):
    """How a rollout ended, and what the host decided about it."""

    session: str = ""
    rollout: str = ""
    group: str = ""
    attempt: int = 1
    task: str
    agent: str
    version: str
    sandbox: str
    model: str
    status: Status = "error"
    kind: Class | None = None  # None: it was cancelled, or nobody was asked for a grade
    reward: float | None = None  # None: not known, which is not 0
    grade: Grade | None = None
    exit_code: int | None = None  # of the agent; None: it did not end by itself
    stop: str = ""  # the session's limit that was met, or who ended it
    fault: Fault | None = None
    seconds: dict[str, float] = {}
    turns: int = 0
    sampled_tokens: int = 0
    roles: dict[str, int] = {}
    rows: int | None = None  # None: the gateway could not be asked
    calls: int | None = None  # that the agent made through its door; None: it had none of ours
    collected: Collected = Collected()
    unrecorded: str = ""  # why the gateway does not have this yet; empty: it has, or need not
    not_enforced: tuple[str, ...] = ()  # what was asked of the sandbox and is a wish there
    notes: tuple[str, ...] = ()


class Progress(msgspec.Struct):
    """For whoever watches."""

    stage: Stage | Literal["done"] = "sandbox"
    turns: int = 0
    sampled_tokens: int = 0
    session: str = ""
    started: float = 0.0


Watch = Callable[[Progress], None]
