"""Several graders, each in sandboxes of its own, and the weighted mean of what they say. Without one of them there is no reward."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import msgspec

from turngate.errors import TaskError
from turngate.store.outcomes import OutcomeClass
from turngate.tasks.grading.types import Grade, PartGrade
from turngate.tasks.task import Part, Rubric

_WORST: tuple[OutcomeClass, ...] = ("infrastructure fault", "invalid task", "agent failed")


async def grade_rubric(rubric: Rubric, one: Callable[[Part], Awaitable[Grade]]) -> Grade:
    """`one` grades a part. All of them are, also after one has failed: what each said is kept."""
    total = sum(part.weight for part in rubric.parts)
    if not 0 < total < math.inf or any(part.weight < 0 for part in rubric.parts):
        raise TaskError(
            "task: rubric: weights must not be negative, and their sum must be a finite number above 0", param="rubric"
        )
    grades = {part.name: await one(part) for part in rubric.parts}
    whole = Grade(
        kind="graded",
        cases={f"{name}: {case}": found for name, grade in grades.items() for case, found in grade.cases.items()},
        parts=tuple(
            PartGrade(
                name=part.name, weight=part.weight, reward=grades[part.name].reward, message=grades[part.name].message
            )
            for part in rubric.parts
        ),
        message="; ".join(f"{name}: {grade.message}" for name, grade in grades.items() if grade.message),
        notes=tuple(f"{name}: {note}" for name, grade in grades.items() for note in grade.notes),
    )
    without = [name for name, grade in grades.items() if grade.reward is None]
    if without:
        kinds = {grades[name].kind for name in without}
        return msgspec.structs.replace(whole, kind=next((kind for kind in _WORST if kind in kinds), "invalid task"))
    reward = sum(part.weight * (grades[part.name].reward or 0.0) for part in rubric.parts) / total
    if not math.isfinite(reward):
        raise TaskError("task: rubric: weights and rewards are too large to add up", param="rubric")
    return msgspec.structs.replace(whole, reward=reward)
