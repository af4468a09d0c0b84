"""The progress and the outcome of a rollout, as the runner sees them."""

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

GRADE_LOG = "grade.log"  # the complete output of the grader, in the rollout's folder
Stage = Literal[
    "sandbox", "files", "setup", "session", "relay", "launch", "agent", "seal", "collect", "clean", "grade", "record"
]
Phase = Literal["start", "run", "grade"]  # the number of concurrent rollouts is limited separately for each phase
Status = Literal["finished", "failed", "timed out", "limit", "cancelled", "error"]
PhaseGate = Callable[[Phase], AbstractAsyncContextManager[None]]
# `not graded`: the task has no grader, or the caller wants no grade. `cancelled`: the caller cancelled the rollout, or someone ended the
# session at the gateway. `stale`: the gateway ended the session, because its policy version had become too old to train on.
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
    """A failure: its stage, the boundary at fault, and a message."""

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
    kind: OutcomeClass | None = None  # None if the rollout was cancelled or is not graded
    reward: float | None = None  # None means unknown, which is not 0
    grade: Grade | None = None
    exit_code: int | None = None  # None if the agent did not exit on its own
    stop: str = ""  # the limit that the session or the sandbox reached, or how the session was ended
    fault: Fault | None = None
    seconds: dict[str, float] = {}
    turns: int = 0
    sampled_tokens: int = 0
    roles: dict[str, int] = {}
    rows: int | None = None  # None if the gateway did not respond
    training: TrainingReport | None = None  # None if the gateway did not respond
    refused: RefusedCalls | None = None  # model calls that the gateway refused because of their content
    # The agent's model calls; None if they did not pass through a door on this host, or if they came over a WebSocket.
    calls: int | None = None
    collected: Collected = Collected()
    unrecorded: str = ""  # why the gateway has not recorded the outcome yet; empty if it has, or need not
    excluded: str = ""  # why the recorded outcome does not count: superseded attempt, or cancelled session
    not_enforced: tuple[str, ...] = ()  # limits that the sandbox does not enforce
    notes: tuple[str, ...] = ()

    @property
    def exclusion(self) -> str:
        """Why the rollout is not trained on and does not affect its group's baseline, or an empty string if it is not excluded."""
        if self.excluded:
            return self.excluded
        is_excluded = self.refused is not None and self.training is not None and not self.training.trained_tokens
        return "; ".join(self.warnings) if is_excluded else ""

    @property
    def warnings(self) -> list[str]:
        """Problems with the training data, one line each.

        A rollout that was cancelled, ended with an error, or could not be graded is not trained on, so only its refused calls are listed.
        """
        has_failed = self.status in ("error", "cancelled") or self.kind in ("infrastructure fault", "invalid task")
        return list_warnings(None if has_failed else self.training, self.refused)


class RolloutProgress(msgspec.Struct):
    """The progress of a rollout, which is passed to progress callbacks."""

    stage: Stage | Literal["done"] = "sandbox"
    turns: int = 0
    sampled_tokens: int = 0
    session: str = ""
    started: float = 0.0


ProgressCallback = Callable[[RolloutProgress], None]
