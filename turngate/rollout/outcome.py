"""The nouns of a rollout: what is ordered, how far it has come, and how it ended."""

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
Phase = Literal["start", "run", "grade"]  # what is bounded when many rollouts run: each has its own limit
Status = Literal["finished", "failed", "timed out", "limit", "cancelled", "error"]
PhaseGate = Callable[[Phase], AbstractAsyncContextManager[None]]


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
    kind: OutcomeClass | None = None  # None: it was cancelled, or nobody was asked for a grade
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


class RolloutProgress(msgspec.Struct):
    """For whoever watches."""

    stage: Stage | Literal["done"] = "sandbox"
    turns: int = 0
    sampled_tokens: int = 0
    session: str = ""
    started: float = 0.0


ProgressCallback = Callable[[RolloutProgress], None]
