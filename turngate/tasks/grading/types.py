"""The nouns of grading: the agent's work as the host has it, and what the host decided about it.

A reward is a number that a grader really gave. Where there is none it is None, with a class that says whose fault that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from turngate.sandboxes.base import Backend, Resources
from turngate.store.outcomes import OutcomeClass

CaseOutcome = Literal["passed", "failed", "error", "skipped", "missing"]


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent left in its working folder, copied to the host when nothing of the agent ran any more."""

    folder: Path  # its content; no link in it leads out
    left_out: tuple[str, ...] = ()  # what could not be had
    lost: str = ""  # why there is nothing to grade: the agent left more than is ever taken
    answers: tuple[Mapping[str, object], ...] = ()  # calls of host tools: {"tool": …, "arguments": …}, in order


class GradingEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """Where to grade. Never a sandbox that an agent has touched: the backend makes a fresh one."""

    backend: Backend
    image: str = ""  # wins over the task's
    resources: Resources = Resources()
    log: Path | None = None  # the whole log of the grader is written there


class PartGrade(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a rubric, graded."""

    name: str
    weight: float
    reward: float | None
    message: str = ""


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """What the host decided. `reward` is None wherever it is not known, and never 0 for that reason."""

    kind: OutcomeClass
    reward: float | None = None
    resolved: bool | None = None
    cases: Mapping[str, CaseOutcome] = {}  # per test, where the grader runs tests
    parts: tuple[PartGrade, ...] = ()
    message: str = ""  # why there is no reward, or what was odd about it
    notes: tuple[str, ...] = ()  # what of the work was set aside before grading
    log: str = ""  # the end of what the grader printed
    seconds: float = 0.0
