"""How rewards changed during training, for each kind of task and for the most improved task.

The policy versions with which graded rollouts started are split into thirds. "Before" is the first third, and "after" is the last one. For
the most improved task, one rollout from before and one from after are chosen as examples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from math import fsum

import msgspec

from turngate.types import Json

ENTROPY_VERSIONS = 32  # maximum number of policy versions whose entropy is estimated
ENTROPY_ROLLOUTS = 4  # rollouts per version that are read for the estimate
_EXACT_DIGITS = 9  # means that differ only by rounding are equal


class RewardTotal(msgspec.Struct, frozen=True, kw_only=True):
    """The total reward of a task's graded rollouts that started with policy version `version`."""

    task: str
    kind: str  # of the task; empty if unknown
    version: int
    total: float
    graded: int


class RewardedRollout(msgspec.Struct, frozen=True):
    id: str
    reward: float


# Returns the graded rollouts of a task that started with a policy version, oldest first.
FindRollouts = Callable[[str, int], Sequence[RewardedRollout]]


def summarize_improvement(totals: Collection[RewardTotal], find_rollouts: FindRollouts) -> dict[str, Json] | None:
    """Compare rewards between the first and the last third of the policy versions. Return None if there are fewer than two versions."""
    versions = sorted({total.version for total in totals})
    if len(versions) < 2:
        return None
    size = max(1, len(versions) // 3)
    early, late = versions[size - 1], versions[-size]
    before = [total for total in totals if total.version <= early]
    after = [total for total in totals if total.version >= late]
    return {
        "before": {"first": versions[0], "last": early},
        "after": {"first": late, "last": versions[-1]},
        "kinds": _summarize_kinds(before, after),
        "example": _choose_example(before, after, find_rollouts),
    }


def _summarize_kinds(before: Iterable[RewardTotal], after: Iterable[RewardTotal]) -> list[Json]:
    """Return the mean rewards by kind of task, with the unknown kind last. Return an empty list if no kind is known."""
    early, late = _group(before, lambda total: total.kind), _group(after, lambda total: total.kind)
    kinds = sorted(early.keys() | late.keys(), key=lambda kind: (not kind, kind))
    if kinds == [""]:
        return []
    return [
        {"kind": kind, "before": _describe_mean(early.get(kind, ())), "after": _describe_mean(late.get(kind, ()))}
        for kind in kinds
    ]


def _choose_example(
    before: Iterable[RewardTotal], after: Iterable[RewardTotal], find_rollouts: FindRollouts
) -> dict[str, Json] | None:
    """Return the task whose mean reward rose most, with one rollout from its first and one from its last policy version.

    The chosen rollouts are those whose rewards are closest to the means before and after. Ties go to the first task in alphabetical order
    and to the oldest rollout. Return None if no mean rose, or if the rollouts were deleted in the meantime.
    """
    early, late = _group(before, lambda total: total.task), _group(after, lambda total: total.task)
    gains = [
        (round(_mean(late[task]) - _mean(early[task]), _EXACT_DIGITS), task)
        for task in early.keys() & late.keys()
        if task
    ]
    gain, task = min(gains, key=lambda gained: (-gained[0], gained[1]), default=(0.0, ""))
    if gain <= 0:
        return None
    first, last = min(total.version for total in early[task]), max(total.version for total in late[task])
    shown_first = _describe_rollout(early[task], first, find_rollouts(task, first))
    shown_last = _describe_rollout(late[task], last, find_rollouts(task, last))
    if shown_first is None or shown_last is None:
        return None
    return {"task": task, "before": shown_first, "after": shown_last}


def _describe_rollout(
    totals: Sequence[RewardTotal], version: int, rollouts: Sequence[RewardedRollout]
) -> dict[str, Json] | None:
    """Describe the rollout whose reward is closest to the mean reward in `totals`. Return None if `rollouts` is empty."""
    mean = _mean(totals)
    chosen = min(rollouts, key=lambda rollout: round(abs(rollout.reward - mean), _EXACT_DIGITS), default=None)
    if chosen is None:
        return None
    return {"version": version, "rollout": chosen.id, "reward": chosen.reward, **_describe_mean(totals)}


def _describe_mean(totals: Sequence[RewardTotal]) -> dict[str, Json]:
    return {"mean": _mean(totals) if totals else None, "graded": _count(totals)}


def _group(totals: Iterable[RewardTotal], key: Callable[[RewardTotal], str]) -> dict[str, list[RewardTotal]]:
    grouped: dict[str, list[RewardTotal]] = {}
    for total in totals:
        grouped.setdefault(key(total), []).append(total)
    return grouped


def _mean(totals: Sequence[RewardTotal]) -> float:
    return fsum(total.total for total in totals) / _count(totals)


def _count(totals: Iterable[RewardTotal]) -> int:
    return sum(total.graded for total in totals)


def choose_evenly(versions: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the versions, evenly spaced, including the first and the last one."""
    if len(versions) <= most:
        return list(versions)
    return [versions[place * (len(versions) - 1) // (most - 1)] for place in range(most)]
