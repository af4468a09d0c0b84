"""Summaries of groups of rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import fsum, sqrt

import msgspec

from turngate.trace.advantage import is_too_large
from turngate.trace.pass_at_k import has_passed
from turngate.views.rollout_entry import ACTIVE_STATUSES, RolloutRow

_MAX_REWARDS = 128


class GroupRow(msgspec.Struct, kw_only=True):
    group: str
    task: str
    agent: str
    model: str
    batch: str
    rollouts: int
    running: int
    graded: int
    passed: int
    mean_reward: float | None
    pass_at_1: float | None
    rewards: list[float | None]
    classes: dict[str, int]
    signal: bool | None  # whether the rewards of trained rollouts differ; None if fewer than two rewards are known
    opened: float
    latest: float


def summarize_group(name: str, rows: Sequence[RolloutRow]) -> GroupRow:
    latest = max(row.seen for row in rows)
    rows = sorted(last_attempts(rows), key=lambda row: row.opened)
    rewards = [row.counted_reward for row in rows]
    known = [reward for reward in rewards if reward is not None]
    passed = sum(bool(has_passed(row.reward, row.resolved)) for row in rows if not row.excluded)
    classes: Counter[str] = Counter(row.kind for row in rows)
    return GroupRow(
        group=name,
        task=rows[0].task,
        agent=rows[0].agent,
        model=rows[0].model,
        batch=rows[0].batch,
        rollouts=len(rows),
        running=sum(row.status in ACTIVE_STATUSES for row in rows),
        graded=len(known),
        passed=passed,
        mean_reward=mean(known),
        pass_at_1=passed / len(known) if known else None,
        rewards=rewards[:_MAX_REWARDS],
        classes=dict(classes),
        signal=rewards_differ([row.trained_reward for row in rows]),
        opened=rows[0].opened,
        latest=latest,
    )


def last_attempts(rows: Sequence[RolloutRow]) -> list[RolloutRow]:
    """Return only the last attempt at each rollout."""
    newest: dict[str, int] = {}
    for row in rows:
        if row.name:
            newest[row.name] = max(row.attempt, newest.get(row.name, 0))
    return [row for row in rows if not row.name or row.attempt == newest[row.name]]


def rewards_differ(rewards: Sequence[float | None]) -> bool | None:
    """Return whether the known rewards differ, or None if fewer than two are known. Rewards that are too large for a feed are ignored."""
    usable = _usable_rewards([reward for reward in rewards if reward is not None])
    return None if len(usable) < 2 else min(usable) != max(usable)


def mean(known: Sequence[float]) -> float | None:
    """Return the mean of the rewards, or None if there are none. Rewards that are too large for a feed are ignored."""
    usable = _usable_rewards(known)
    return fsum(usable) / len(usable) if usable else None


def standard_deviation(known: Sequence[float]) -> float | None:
    usable = _usable_rewards(known)
    middle = mean(usable)
    return None if middle is None else sqrt(fsum((reward - middle) ** 2 for reward in usable) / len(usable))


def _usable_rewards(known: Sequence[float]) -> list[float]:
    return [reward for reward in known if not is_too_large(reward)]
