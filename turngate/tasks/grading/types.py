"""The nouns of grading: the agent's work as copied to the host, and the grade that the host gave it.

A reward is a number that a grader really gave. Where there is none it is None, and the class says whose fault that is.
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
    """What an agent left in its working folder, copied to the host after all of its processes had ended."""

    folder: Path  # its content; no link in it leads outside
    left_out: tuple[str, ...] = ()  # what could not be copied
    lost: str = ""  # why there is nothing to grade: the agent left more than the limit
    answers: tuple[Mapping[str, object], ...] = ()  # host tool calls in their order: {"tool": …, "arguments": …}


class GradingEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """Where to grade. The backend creates a fresh sandbox; one that an agent has touched is never used."""

    backend: Backend
    image: str = ""  # takes precedence over the task's
    resources: Resources = Resources()
    log: Path | None = None  # the file for the grader's complete log


class PartGrade(msgspec.Struct, frozen=True, kw_only=True):
    """The grade of one part of a rubric."""

    name: str
    weight: float
    reward: float | None
    message: str = ""


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """What the host decided. An unknown `reward` is None, never 0."""

    kind: OutcomeClass
    reward: float | None = None
    resolved: bool | None = None
    cases: Mapping[str, CaseOutcome] = {}  # per test, where the grader runs tests
    parts: tuple[PartGrade, ...] = ()
    message: str = ""  # why there is no reward, or what was unusual
    notes: tuple[str, ...] = ()  # parts of the work that were set aside before grading
    log: str = ""  # the end of the grader's output
    seconds: float = 0.0
