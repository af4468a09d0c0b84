"""Grading with several graders, which share no sandbox. The reward is the weighted mean of their rewards, or None if one is missing."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from turngate.errors import BadRequest, TaskError
from turngate.store.outcomes import OutcomeClass
from turngate.tasks.grading.types import Grade, PartGrade
from turngate.tasks.task import Part, Rubric
from turngate.trace.turn_rewards import TurnReward, check_turn_rewards

_WORST: tuple[OutcomeClass, ...] = ("infrastructure fault", "invalid task", "agent failed")


async def grade_rubric(rubric: Rubric, grade_part: Callable[[Part], Awaitable[Grade]]) -> Grade:
    """Grade every part with `grade_part`, and combine the grades. If a part cannot be graded, the others are still graded."""
    total = sum(part.weight for part in rubric.parts)
    if not 0 < total < math.inf or any(part.weight < 0 for part in rubric.parts):
        raise TaskError(
            "task: the weights of the rubric must not be negative, and their sum must be positive and finite, but they are "
            f"{', '.join(f'{part.weight:g}' for part in rubric.parts)}",
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
    return msgspec.structs.replace(combined, reward=reward, turn_rewards=_combine_turn_rewards(rubric, grades, reward))


def _combine_turn_rewards(rubric: Rubric, grades: Mapping[str, Grade], reward: float) -> tuple[TurnReward, ...] | None:
    """Return the turn rewards of all parts, each multiplied by its part's share of the total weight. Return None if no part gives any."""
    given = {part.name: grades[part.name].turn_rewards for part in rubric.parts}
    if all(rewards is None for rewards in given.values()):
        return None
    total = sum(part.weight for part in rubric.parts)
    combined = tuple(
        msgspec.structs.replace(
            one, value=one.value * part.weight / total, name=": ".join(filter(None, (part.name, one.name)))
        )
        for part in rubric.parts
        for one in given[part.name] or ()
    )
    without = [part.name for part in rubric.parts if part.weight and given[part.name] is None]
    if without and any(one.kind == "part" for one in combined):
        raise TaskError(
            f"task: turn rewards of kind 'part' must add up to the whole reward, but some parts of the rubric give no turn rewards: "
            f"{', '.join(without)}; add turn rewards to them, or use kind 'extra'",
            param="rubric",
        )
    try:
        check_turn_rewards(combined, reward)
    except BadRequest as error:
        raise TaskError(f"task: the rubric's {error.message}", param="rubric") from None
    return combined
