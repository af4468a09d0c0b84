"""The progress and the outcome of a rollout, from the runner's point of view."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Literal

import msgspec

from turngate.errors import Boundary
from turngate.rollout.collect import Collected
from turngate.store.outcomes import OutcomeClass
from turngate.tasks.grading.types import Grade
from turngate.trace.training_report import TrainingReport, list_warnings
from turngate.trace.tree import RefusedCalls

Stage = Literal[
    "sandbox", "files", "setup", "session", "relay", "launch", "agent", "seal", "collect", "clean", "grade", "record"
]
Phase = Literal["start", "run", "grade"]  # each phase limits the number of concurrent rollouts
Status = Literal["finished", "failed", "timed out", "limit", "cancelled", "error"]
PhaseGate = Callable[[Phase], AbstractAsyncContextManager[None]]
# `not graded`: the task has no grader. `cancelled`: someone ended the session at the gateway. `stale`: the gateway ended the session,
# because the policy had changed too much to train on it.
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
    """A failure: the stage in which it occurred, and the boundary at fault."""

    stage: Stage
    boundary: Boundary
    message: str


class Outcome(msgspec.Struct, kw_only=True):
    """The outcome of a rollout: how it ended, and how the host graded it."""

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
    kind: OutcomeClass | None = None  # None if it was cancelled or is not graded
    reward: float | None = None  # None means unknown, which is not 0
    grade: Grade | None = None
    exit_code: int | None = None  # None if the agent did not exit on its own
    stop: str = ""  # the limit that the session reached, or how it was ended
    fault: Fault | None = None
    seconds: dict[str, float] = {}
    turns: int = 0
    sampled_tokens: int = 0
    roles: dict[str, int] = {}
    rows: int | None = None  # None if the gateway did not respond
    training: TrainingReport | None = None  # None if the gateway did not respond
    refused: RefusedCalls | None = None  # model calls that the gateway refused because of what was asked
    # The agent's model calls; None if they did not pass through a door on this host, or if they came over a WebSocket.
    calls: int | None = None
    collected: Collected = Collected()
    unrecorded: str = ""  # why the gateway has not recorded this yet; empty if it has, or does not need to
    excluded: str = ""  # why the recorded outcome does not count: its attempt was superseded, or its session cancelled
    not_enforced: tuple[str, ...] = ()  # limits that the sandbox does not enforce
    notes: tuple[str, ...] = ()

    @property
    def exclusion(self) -> str:
        """Why the rollout is neither trained nor part of its group's baseline, although it has a reward; empty if it is not excluded."""
        if self.excluded:
            return self.excluded
        is_excluded = self.refused is not None and self.training is not None and not self.training.trained_tokens
        return "; ".join(self.warnings) if is_excluded else ""

    @property
    def warnings(self) -> list[str]:
        """What is wrong with the training data, one line each. Empty for a rollout that has none because it failed."""
        has_failed = self.status in ("error", "cancelled") or self.kind in ("infrastructure fault", "invalid task")
        return list_warnings(None if has_failed else self.training, self.refused)


class RolloutProgress(msgspec.Struct):
    """The progress of a rollout, as passed to a progress callback."""

    stage: Stage | Literal["done"] = "sandbox"
    turns: int = 0
    sampled_tokens: int = 0
    session: str = ""
    started: float = 0.0


ProgressCallback = Callable[[RolloutProgress], None]
