"""Turn rewards of graders: how a rubric combines those of its parts. Whole rollouts are in tests/rollout/test_turn_rewards.py."""

from __future__ import annotations

import pytest

from turngate.errors import TaskError
from turngate.tasks.grading.rubric import grade_rubric
from turngate.tasks.grading.types import Grade
from turngate.tasks.task import Function, Part, Rubric
from turngate.trace.turn_rewards import TurnReward


def graded(reward: float, *rewards: TurnReward) -> Grade:
    return Grade(kind="graded", reward=reward, turn_rewards=rewards)


def part(value: float, turn: int = 2, name: str = "") -> TurnReward:
    return TurnReward(turn=turn, value=value, kind="part", name=name)


def extra(value: float, turn: int = 2, name: str = "") -> TurnReward:
    return TurnReward(turn=turn, value=value, kind="extra", name=name)


WEIGHTS = {"tests": 3.0, "style": 1.0}
NO_REWARDS = Grade(kind="graded", reward=1.0)


async def combine(tests: Grade, style: Grade) -> Grade:
    grades = {"tests": tests, "style": style}
    parts = tuple(Part(name=name, weight=weight, grader=Function(name="g.py:g")) for name, weight in WEIGHTS.items())

    async def grade_part(one: Part) -> Grade:
        return grades[one.name]

    return await grade_rubric(Rubric(parts=parts), grade_part)


async def test_rewards_have_the_weight_of_their_part() -> None:
    combined = await combine(graded(1.0, part(0.25, 2, "plan"), part(0.75, 4)), graded(0.0, extra(-1.0, 4)))
    assert combined.reward == 0.75 and combined.turn_rewards is not None
    assert [(r.turn, r.name, r.value, r.kind) for r in combined.turn_rewards] == [
        (2, "tests: plan", 0.1875, "part"),
        (4, "tests", 0.5625, "part"),
        (4, "style", -0.25, "extra"),
    ]


async def test_extras_need_no_rewards_in_other_parts() -> None:
    combined = await combine(NO_REWARDS, graded(0.0, extra(-1.0)))
    assert combined.turn_rewards is not None and [r.value for r in combined.turn_rewards] == [-0.25]
    assert (await combine(NO_REWARDS, NO_REWARDS)).turn_rewards is None


@pytest.mark.parametrize(
    ("style", "text"),
    [(NO_REWARDS, "some parts of the rubric give no turn rewards: style; add"), (graded(1.0), "add up to the reward")],
)
async def test_parts_must_add_up_to_the_whole_reward(style: Grade, text: str) -> None:
    with pytest.raises(TaskError, match=text):
        await combine(graded(1.0, part(1.0)), style)
