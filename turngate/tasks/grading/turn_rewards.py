"""Check a grader's turn rewards against the turns of the rollout."""

from __future__ import annotations

import msgspec

from turngate.errors import BadRequest
from turngate.tasks.grading.result import Undecided
from turngate.tasks.grading.types import NO_TURNS, Grade, Work
from turngate.trace.turn_rewards import TurnReward, check_turn_rewards, resolve_turn_rewards


async def check_grade(grade: Grade, work: Work | None) -> Grade:
    """Fill in the turn that each turn reward is for, and return the new grade. Raise `Undecided` if the turn rewards are invalid."""
    if grade.turn_rewards is None:
        return grade
    try:
        # A function may pass values of any type, because structs are not validated when they are created.
        given = {"turn_rewards": msgspec.to_builtins(grade.turn_rewards)}
        rewards = msgspec.convert(given, _GivenRewards).turn_rewards
        check_turn_rewards(rewards, grade.reward)
        turns = await work.read_turns() if rewards and work is not None and work.read_turns is not None else NO_TURNS
        return msgspec.structs.replace(grade, turn_rewards=resolve_turn_rewards(rewards, turns.turns, turns.calls))
    except (msgspec.ValidationError, TypeError) as error:
        raise Undecided(f"the grader returned invalid turn rewards: {error}") from None
    except BadRequest as error:
        raise Undecided(f"the grader returned invalid turn rewards: {error.message}") from None


class _GivenRewards(msgspec.Struct, frozen=True):
    turn_rewards: tuple[TurnReward, ...]
