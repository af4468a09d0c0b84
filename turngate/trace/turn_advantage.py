"""Compute the advantages of individual turns from the rewards of turns and rollouts.

The trained turns of a rollout are numbered from 1 in the order in which they were recorded. Turn t of rollout i earns r(i,t), the sum of
its rewards. The rollout's own reward also counts for its last trained turn, unless rewards of kind `part` already distribute it. The
rewards of a turn that is not trained count for the last trained turn before it, if there is one. The return of a turn is the discounted sum
of what it and later turns earn:

    G(i,t) = r(i,t) + gamma · G(i,t+1)

The advantage compares this return with other returns of the group, using the advantage method of the feed or export (`advantage.py`):

    turn_index   with the returns of the turns with the same number t, in all rollouts that have at least t trained turns
    all_turns    with the returns of all trained turns of the group; `leave_one_out` leaves out those of the same rollout

Only returns are compared, never single rewards. A sum of rewards that were each compared with others would depend on the number of turns.
The policy decides that number itself, so it could earn more just by making rollouts shorter or longer.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, get_args

import msgspec
import numpy as np

from turngate.errors import ConfigError
from turngate.trace.advantage import Choice, compute_advantages
from turngate.trace.sample import RowSpan, Sample
from turngate.trace.turn_rewards import TurnReward

Compare = Literal["turn_index", "all_turns"]
NO_TURN_REWARDS = "its outcome contains no turn rewards"


class TurnCredit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to compute the advantages of turns."""

    compare: Compare = "turn_index"
    gamma: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0

    def __post_init__(self) -> None:
        if self.compare not in get_args(Compare):
            raise ConfigError(
                f"'compare' must be one of {', '.join(get_args(Compare))}, not {self.compare!r}", param="compare"
            )
        if not 0 <= self.gamma <= 1:
            raise ConfigError(f"gamma must be a number from 0 to 1, not {self.gamma}", param="gamma")


class ScoredRollout(msgspec.Struct, frozen=True):
    """One rollout of a group, with its rewards. A reward of None is unknown or excluded."""

    rows: Sequence[Sample]
    reward: float | None
    turn_rewards: Sequence[TurnReward] | None  # None: no turn rewards were given

    @property
    def turns(self) -> list[int]:
        """The node ids of the rollout's trained turns that have tokens, in the order in which they were recorded."""
        spans = (span for row in self.rows for span in row.spans)
        return sorted(span.node for span in spans if span.trained and span.end > span.start)


class TurnAdvantages(msgspec.Struct, frozen=True):
    """The advantages of a rollout's trained turns, by node id. If they cannot be computed, `missing` says why."""

    values: Mapping[int, float | None] = {}  # None: no other turn to compare it with
    missing: str = ""

    def of_row(self, row: Sample) -> tuple[float | None, ...]:
        """Return one advantage per span of a row: None if the row does not train the span's turn, or if that turn has no advantage."""
        return tuple(self.values.get(span.node) if span.trained else None for span in row.spans)


def compute_turn_advantages(
    rollouts: Sequence[ScoredRollout], credit: TurnCredit, choice: Choice
) -> list[TurnAdvantages]:
    """Compute the advantages of the turns of a group's rollouts.

    A rollout gets no advantages, and does not affect the other rollouts, if its reward or its `turn_rewards` is None, or if the turn of one
    of its turn rewards is unknown.
    """
    missing = [_explain_missing(rollout) for rollout in rollouts]
    turns = [[] if why else rollout.turns for rollout, why in zip(rollouts, missing, strict=True)]
    returns = [
        [] if why else compute_returns(numbered, rollout.turn_rewards or (), rollout.reward or 0.0, credit.gamma)
        for rollout, numbered, why in zip(rollouts, turns, missing, strict=True)
    ]
    compared = (_compare_by_index if credit.compare == "turn_index" else _compare_all)(returns, choice)
    return [
        TurnAdvantages(dict(zip(numbered, values, strict=True)), why)
        for numbered, values, why in zip(turns, compared, missing, strict=True)
    ]


def _explain_missing(rollout: ScoredRollout) -> str:
    """Return why a rollout gets no turn advantages, or an empty string if it gets them."""
    if rollout.reward is None:
        return "it has no reward that counts"
    if rollout.turn_rewards is None:
        return NO_TURN_REWARDS
    unknown = next((one.call for one in rollout.turn_rewards if one.turn is None), None)
    return (
        ""
        if unknown is None
        else f"host-tool call {unknown} has a reward, but it cannot be decided which turn made the call"
    )


def compute_returns(turns: Sequence[int], rewards: Sequence[TurnReward], reward: float, gamma: float) -> list[float]:
    """Compute the discounted return of each trained turn. `turns` are their node ids, in ascending order."""
    earned = [0.0] * len(turns)
    for one in rewards:
        assert one.turn is not None, "checked by the caller"
        at = bisect_right(turns, one.turn) - 1
        if at >= 0:  # no trained turn can have led to an earlier reward
            earned[at] += one.value
    if earned and not any(one.kind == "part" for one in rewards):
        earned[-1] += reward
    for at in reversed(range(len(earned) - 1)):
        earned[at] += gamma * earned[at + 1]
    return earned


def _compare_by_index(returns: Sequence[Sequence[float]], choice: Choice) -> list[list[float | None]]:
    compared: list[list[float | None]] = [[] for _ in returns]
    for at in range(max(map(len, returns), default=0)):
        reached = [values[at] if at < len(values) else None for values in returns]
        for values, own, advantage in zip(returns, compared, compute_advantages(reached, choice), strict=True):
            if at < len(values):
                own.append(advantage)
    return compared


def _compare_all(returns: Sequence[Sequence[float]], choice: Choice) -> list[list[float | None]]:
    if choice == "leave_one_out":
        return [_subtract_mean(own, [v for values in returns if values is not own for v in values]) for own in returns]
    flat = iter(compute_advantages([value for values in returns for value in values], choice))
    return [[next(flat) for _ in values] for values in returns]


def _subtract_mean(own: Sequence[float], others: Sequence[float]) -> list[float | None]:
    mean = math.fsum(others) / len(others) if others else None
    return [None if mean is None else value - mean for value in own]


def spread_advantages(tokens: int, spans: Sequence[RowSpan], advantages: Sequence[float | None]) -> np.ndarray:
    """Return the advantage at each token of a row, as float32, with NaN for tokens without an advantage.

    `advantages` has one value per span, or is empty.
    """
    spread = np.full(tokens, np.nan, np.float32)
    for span, advantage in zip(spans, advantages or (None,) * len(spans), strict=True):
        if span.trained and advantage is not None:
            spread[span.start : span.end] = advantage
    return spread
