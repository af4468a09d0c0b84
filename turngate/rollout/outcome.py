"""How far a rollout is and how it ended, as its runner knows it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Literal

import msgspec

from turngate.errors import Boundary
from turngate.rollout.collect import Collected
from turngate.store.outcomes import OutcomeClass
from turngate.tasks.grading.types import Grade

Stage = Literal[
    "sandbox", "files", "setup", "session", "relay", "launch", "agent", "seal", "collect", "clean", "grade", "record"
]
Phase = Literal["start", "run", "grade"]  # each has its own limit on how many rollouts are in it at once
Status = Literal["finished", "failed", "timed out", "limit", "cancelled", "error"]
PhaseGate = Callable[[Phase], AbstractAsyncContextManager[None]]
# `not graded`: the task has no grader; `cancelled`: somebody ended its session at the gateway; `stale`: the gateway ended it, because
# the policy had moved on too far to train on it.
RolloutClass = OutcomeClass | Literal["not graded", "cancelled", "stale"]
ROLLOUT_CLASSES: tuple[RolloutClass, ...] = (
    "graded",
    "agent failed",
    "invalid task",
    "infrastructure fault",
    "not graded",
    "cancelled",
    "stale",
)


class Fault(msgspec.Struct, frozen=True):
    """What went wrong in which stage, and who is to blame."""

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
    kind: OutcomeClass | None = None  # None: it was cancelled, or is not graded
    reward: float | None = None  # None: unknown, which is not 0
    grade: Grade | None = None
    exit_code: int | None = None  # of the agent; None: it did not end by itself
    stop: str = ""  # the limit that the session reached, or who ended it
    fault: Fault | None = None
    seconds: dict[str, float] = {}
    turns: int = 0
    sampled_tokens: int = 0
    roles: dict[str, int] = {}
    rows: int | None = None  # None: the gateway could not be asked
    calls: int | None = None  # model calls that the agent made; None: they did not pass through a door of ours
    collected: Collected = Collected()
    unrecorded: str = ""  # why the gateway has not recorded this yet; empty: it has, or does not need to
    not_enforced: tuple[str, ...] = ()  # limits that the sandbox does not enforce
    notes: tuple[str, ...] = ()


class RolloutProgress(msgspec.Struct):
    """How far a rollout is, for a progress callback."""

    stage: Stage | Literal["done"] = "sandbox"
    turns: int = 0
    sampled_tokens: int = 0
    session: str = ""
    started: float = 0.0


ProgressCallback = Callable[[RolloutProgress], None]
