"""Test the advantages of turns against values computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.trace.kit import Call, Recorder, assistant, system, user
from turngate.errors import ConfigError
from turngate.trace.advantage import EPSILON, Choice, compute_advantages
from turngate.trace.sample import Sample, build_samples
from turngate.trace.turn_advantage import (
    NO_TURN_REWARDS,
    ScoredRollout,
    TurnCredit,
    compute_returns,
    compute_turn_advantages,
)
from turngate.trace.turn_rewards import TurnReward


def part(turn: int, value: float) -> TurnReward:
    return TurnReward(turn=turn, value=value, kind="part")


def extra(turn: int, value: float, **fields: Any) -> TurnReward:
    return TurnReward(turn=turn, value=value, kind="extra", **fields)


# trained turns, rewards of turns, the rollout's reward, gamma → the return of each trained turn
RETURNS: dict[str, tuple[list[int], list[TurnReward], float, float, list[float]]] = {
    "no turns": ([], [extra(2, 1.0)], 1.0, 1.0, []),
    "only the rollout's reward": ([2, 4, 6], [], 1.0, 1.0, [1.0, 1.0, 1.0]),
    "which is discounted": ([2, 4, 6], [], 1.0, 0.5, [0.25, 0.5, 1.0]),
    # 0.5 + (0.25 + (1)) and so on
    "extras come on top": ([2, 4, 6], [extra(2, 0.5), extra(4, 0.25)], 1.0, 1.0, [1.75, 1.25, 1.0]),
    # 1; 0.25 + 1/2; 0.5 + 0.75/2
    "and are discounted": ([2, 4, 6], [extra(2, 0.5), extra(4, 0.25)], 1.0, 0.5, [0.875, 0.75, 1.0]),
    "parts replace the reward": ([2, 4, 6], [part(2, 0.25), part(6, 0.75)], 1.0, 1.0, [1.0, 0.75, 0.75]),
    "parts beside an extra": ([2, 4], [part(2, 1.0), extra(4, -0.5)], 1.0, 1.0, [0.5, -0.5]),
    "several rewards of one turn": ([2], [extra(2, 0.5), extra(2, 0.25, start=0, end=1)], 0.0, 1.0, [0.75]),
    "gamma 0: only its own": ([2, 4], [extra(2, 0.5)], 1.0, 0.0, [0.5, 1.0]),
    # Turn 5 is not trained: its reward counts for turn 4. Nothing trained can have led to that of turn 1.
    "an untrained turn": ([2, 4, 6], [extra(5, 1.0), extra(1, 8.0)], 0.0, 0.5, [0.5, 1.0, 0.0]),
    "an untrained last turn": ([2, 4], [extra(7, 1.0)], 0.5, 1.0, [1.5, 1.5]),
}


@pytest.mark.parametrize("name", RETURNS)
def test_returns(name: str) -> None:
    turns, rewards, reward, gamma, expected = RETURNS[name]
    assert compute_returns(turns, rewards, reward, gamma) == pytest.approx(expected, abs=1e-12)


def rows_of(turns: int) -> list[Sample]:
    """The rows of one conversation, whose turns have the node ids 2, 4, 6 …"""
    history, recorder = [system("You code."), user("Fix it.")], Recorder()
    for n in range(turns):
        answer = assistant(f"answer {n}")
        recorder.add(Call(history, answer))
        history = [*history, answer, user(f"more {n}")]
    assert [turn.id for turn in recorder.turns] == [recorder.turns[0].id + 2 * n for n in range(turns)]
    return build_samples(recorder.trace)


def rollout(reward: float | None, *earned: float) -> ScoredRollout:
    """A rollout whose turns have these extra rewards."""
    rows = rows_of(len(earned))
    turns = [span.node for span in rows[0].spans]
    return ScoredRollout(rows, reward, [extra(turn, value) for turn, value in zip(turns, earned, strict=True)])


def unit(value: float, deviation: float) -> float:
    return value / (deviation + EPSILON)


# Returns with gamma 1:  a: 3, 2   b: 1, 1   c: 2       (c has one turn)
GROUP = [rollout(2.0, 1.0, 0.0), rollout(1.0, 0.0, 0.0), rollout(1.0, 1.0)]
D1, D2 = math.sqrt(2 / 3), 0.5  # of 3, 1, 2 and of 2, 1
ALL = [3, 2, 1, 1, 2]
MEAN, DEV = 9 / 5, math.sqrt(sum((value - 9 / 5) ** 2 for value in ALL) / 5)
ADVANTAGES: dict[tuple[str, Choice], list[list[float]]] = {
    ("turn_index", "normalised"): [[unit(1, D1), unit(0.5, D2)], [unit(-1, D1), unit(-0.5, D2)], [0.0]],
    # first turns: 3 - 3/2, 1 - 5/2, 2 - 4/2; second turns: 2 - 1, 1 - 2
    ("turn_index", "leave_one_out"): [[1.5, 1.0], [-1.5, -1.0], [0.0]],
    ("turn_index", "none"): [[3.0, 2.0], [1.0, 1.0], [2.0]],
    ("all_turns", "normalised"): [
        [unit(3 - MEAN, DEV), unit(2 - MEAN, DEV)],
        [unit(1 - MEAN, DEV), unit(1 - MEAN, DEV)],
        [unit(2 - MEAN, DEV)],
    ],
    # the others of a: 1, 1, 2; of b: 3, 2, 2; of c: 3, 2, 1, 1
    ("all_turns", "leave_one_out"): [[3 - 4 / 3, 2 - 4 / 3], [1 - 7 / 3, 1 - 7 / 3], [2 - 7 / 4]],
    ("all_turns", "none"): [[3.0, 2.0], [1.0, 1.0], [2.0]],
}


@pytest.mark.parametrize(("compare", "choice"), ADVANTAGES)
def test_advantages(compare: Any, choice: Choice) -> None:
    found = compute_turn_advantages(GROUP, TurnCredit(compare=compare), choice)
    for credited, one, expected in zip(found, GROUP, ADVANTAGES[compare, choice], strict=True):
        assert credited.missing == ""
        assert [credited.values[turn] for turn in one.turns] == pytest.approx(expected, rel=1e-9)
        assert credited.of_row(one.rows[0]) == tuple(credited.values[turn] for turn in one.turns)


def test_a_turn_that_only_one_rollout_reached() -> None:
    group = [rollout(1.0, 0.5, 0.0, 0.0), rollout(0.0, 0.0)]
    for choice, last in (("normalised", 0.0), ("leave_one_out", None), ("none", 1.0)):
        (long, short) = compute_turn_advantages(group, TurnCredit(), choice)  # type: ignore[arg-type]
        assert list(long.values.values())[1:] == [last, last]
        assert len(short.values) == 1


def test_missing_turn_rewards_are_marked_and_do_not_affect_the_others() -> None:
    without = ScoredRollout(rows_of(3), 1.0, None)
    excluded = ScoredRollout(rows_of(2), None, [])
    alone = compute_turn_advantages(GROUP, TurnCredit(), "normalised")
    mixed = compute_turn_advantages([without, *GROUP, excluded], TurnCredit(), "normalised")
    assert mixed[1:4] == alone
    assert mixed[0].values == {} and mixed[0].missing == NO_TURN_REWARDS
    assert mixed[0].of_row(without.rows[0]) == (None, None, None)
    assert mixed[4].values == {} and "no reward" in mixed[4].missing
    undecided = ScoredRollout(rows_of(1), 1.0, [TurnReward(call=3, value=1.0, kind="extra")])
    assert "host-tool call 3" in compute_turn_advantages([undecided], TurnCredit(), "none")[0].missing
    # Given, but none earned, is not missing.
    assert compute_turn_advantages([ScoredRollout(rows_of(1), 1.0, [])], TurnCredit(), "none")[0].missing == ""


def test_without_discount_and_turn_rewards_it_is_the_rollouts_advantage() -> None:
    rewards = [1.0, 0.0, 0.5, 0.5]
    group = [ScoredRollout(rows_of(2), reward, []) for reward in rewards]
    found = compute_turn_advantages(group, TurnCredit(), "normalised")
    expected = compute_advantages(rewards, "normalised")
    assert [list(one.values.values()) for one in found] == [[value, value] for value in expected]


def test_untrained_turns_have_no_advantage() -> None:
    history = [system("You code."), user("Fix it.")]
    recorder = Recorder(
        [Call(history, assistant("On it."), logprobs=None), Call([*history, assistant("On it."), user("?")])]
    )
    rows = build_samples(recorder.trace)
    first, second = (turn.id for turn in recorder.turns)
    (found,) = compute_turn_advantages([ScoredRollout(rows, 1.0, [extra(first, 5.0)])], TurnCredit(), "none")
    # The reward of the untrained first turn precedes every trained turn.
    assert dict(found.values) == {second: 1.0} and found.of_row(rows[0]) == (None, 1.0)


def test_empty_group() -> None:
    assert compute_turn_advantages([], TurnCredit(), "normalised") == []
    assert compute_turn_advantages([], TurnCredit(compare="all_turns"), "leave_one_out") == []


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"gamma": 1.5}, "gamma must be a number from 0 to 1, not 1.5"),
        ({"gamma": math.nan}, "gamma must be"),
        ({"compare": "turns"}, "'compare' must be one of turn_index, all_turns"),
    ],
)
def test_invalid_credit(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        TurnCredit(**fields)
