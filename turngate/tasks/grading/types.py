"""Types for grading: the agent's work as it was copied to the host, and its grade.

A reward comes from a grader, or is the 0 that an end policy assigns to a failure. Work that breaks the grader gets 0. If there is no
reward, `reward` is None, and the outcome class states what was at fault.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from turngate.sandboxes.base import Backend, Resources
from turngate.store.outcomes import OutcomeClass
from turngate.trace.turn_rewards import ToolCallRecord, TurnRecord, TurnReward
from turngate.types import Message

CaseOutcome = Literal["passed", "failed", "error", "skipped", "missing"]


class GradedTurn(TurnRecord, frozen=True, kw_only=True):
    """One turn of the rollout, as a grader sees it."""

    role: str  # main, subagent, side …
    message: Message  # the model's reply


class RecordedTurns(msgspec.Struct, frozen=True):
    """The turns of a rollout and its host tool calls, both oldest first."""

    turns: tuple[GradedTurn, ...] = ()
    calls: tuple[ToolCallRecord, ...] = ()


NO_TURNS = RecordedTurns()


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """A copy on the host of an agent's working folder, made after all of the agent's processes had ended.

    If `lost` is set, the work could not be copied.
    """

    folder: Path  # the copy; none of its links point outside
    left_out: tuple[str, ...] = ()  # files that could not be copied, each with the reason
    lost: str = ""  # why the work could not be copied, if the agent is at fault
    answers: tuple[
        Mapping[str, object], ...
    ] = ()  # host tool calls, oldest first: {"call": 1, "tool": …, "arguments": …}
    read_turns: Callable[[], Awaitable[RecordedTurns]] | None = None  # reads the rollout's turns; None: there are none


class GradingEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """The backend and the settings with which work is graded. Graders use only fresh sandboxes that no agent has touched."""

    backend: Backend
    image: str = ""  # takes precedence over the task's image
    resources: Resources = Resources()
    log: Path | None = None  # file for the grader's complete log


class PartGrade(msgspec.Struct, frozen=True, kw_only=True):
    """The grade of one part of a rubric."""

    name: str
    weight: float
    reward: float | None
    message: str = ""


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """The host's decision about the work. An unknown `reward` is None, never 0."""

    kind: OutcomeClass
    reward: float | None = None
    resolved: bool | None = None
    cases: Mapping[str, CaseOutcome] = {}  # outcome of each test, if the grader runs tests
    parts: tuple[PartGrade, ...] = ()
    turn_rewards: tuple[TurnReward, ...] | None = None  # None: the grader gives no rewards to turns
    message: str = ""  # the reason for the grade
    notes: tuple[str, ...] = ()  # remarks, such as which files of the work were left out before grading
    log: str = ""  # the end of the grader's output
    seconds: float = 0.0
