"""Grading with several graders, each in its own sandboxes. The reward is their weighted mean, or None if one of them gives no reward."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import msgspec

from turngate.errors import TaskError
from turngate.store.outcomes import OutcomeClass
from turngate.tasks.grading.types import Grade, PartGrade
from turngate.tasks.task import Part, Rubric

_WORST: tuple[OutcomeClass, ...] = ("infrastructure fault", "invalid task", "agent failed")


async def grade_rubric(rubric: Rubric, grade_part: Callable[[Part], Awaitable[Grade]]) -> Grade:
    """Grade every part with `grade_part`, and combine the grades. A failed part does not prevent grading the others."""
    total = sum(part.weight for part in rubric.parts)
    if not 0 < total < math.inf or any(part.weight < 0 for part in rubric.parts):
        raise TaskError(
            "task: the weights of the rubric must not be negative, and their sum must be positive and finite",
            param="rubric",
        )
    grades = {part.name: await grade_part(part) for part in rubric.parts}
    combined = Grade(
        kind="graded",
        cases={f"{name}: {case}": outcome for name, grade in grades.items() for case, outcome in grade.cases.items()},
        parts=tuple(
            PartGrade(
                name=part.name, weight=part.weight, reward=grades[part.name].reward, message=grades[part.name].message
            )
            for part in rubric.parts
        ),
        message="; ".join(f"{name}: {grade.message}" for name, grade in grades.items() if grade.message),
        notes=tuple(f"{name}: {note}" for name, grade in grades.items() for note in grade.notes),
    )
    unrewarded = [name for name, grade in grades.items() if grade.reward is None]
    if unrewarded:
        kinds = {grades[name].kind for name in unrewarded}
        return msgspec.structs.replace(combined, kind=next((kind for kind in _WORST if kind in kinds), "invalid task"))
    reward = sum(part.weight * (grades[part.name].reward or 0.0) for part in rubric.parts) / total
    if not math.isfinite(reward):
        raise TaskError("task: the sum of the rubric's weighted rewards overflows; use smaller weights", param="rubric")
    return msgspec.structs.replace(combined, reward=reward)
