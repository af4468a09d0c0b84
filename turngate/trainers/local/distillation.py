"""On-policy distillation: per-token advantages from a teacher's scores (`turngate.trainers.teacher`).

For a sampled token, the recorded log-probability minus the teacher's is an unbiased estimate of the reverse KL divergence of the policy
from the teacher in the context of the token. The following is added to the token's advantage:

    teacher_kl · (mean estimate over the update − estimate for this token)

With a small `teacher_kl` and a reference model as the teacher, this is the usual KL penalty. With a `teacher_kl` of 1 and a
`reward_weight` of 0, it is distillation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turngate.client.feed import Row
from turngate.trainers.local.sampling import has_masks, list_temperatures
from turngate.trainers.teacher import TEACHER_LOGPROBS


def read_scores(row: Row) -> np.ndarray | str:
    """Return the teacher's log-probabilities of the trained tokens of a row, or why they are missing or unusable."""
    column = row.side.get(TEACHER_LOGPROBS)
    if column is None:
        return row.unscored or "the feed has no teacher; pass one to Feed.open"
    if (list_temperatures(row) != 1).any() or has_masks(row):
        return "the teacher's scores assume sampling at temperature 1 from the whole vocabulary, but the row was sampled differently"
    scores = column.fill(row.ids.size, np.nan)[row.mask]
    return scores if np.isfinite(scores).all() else "the teacher did not score all trained tokens"


def split_scored(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Return the rows with usable scores, and the reasons why the remaining rows have none."""
    scored, unscored = [], []
    for row in rows:
        found = read_scores(row)
        if isinstance(found, str):
            unscored.append(f"branch {row.branch}: no usable teacher scores: {found}")
        else:
            scored.append(row)
    return scored, unscored


def compute_teacher_advantages(rows: Sequence[Row], mean_kl: float) -> np.ndarray:
    """Return `mean_kl` minus the estimated reverse KL divergence for each trained token. All rows must have usable scores.

    `mean_kl` is the mean estimate over the whole update. As a baseline, it lowers the variance of the gradient, and hardly
    changes the expected gradient, because a single token contributes little to the mean.
    """
    return np.float32(mean_kl) - np.concatenate([compute_reverse_kl(row) for row in rows])


def compute_mean_kl(rows: Sequence[Row]) -> float:
    """Return the mean of the estimated reverse KL divergence over all trained tokens. All rows must have usable scores."""
    return float(np.concatenate([compute_reverse_kl(row) for row in rows]).mean())


def compute_reverse_kl(row: Row) -> np.ndarray:
    """Return the recorded log-probability minus the teacher's for each trained token of a row. The row must have usable scores."""
    scores = read_scores(row)
    assert not isinstance(scores, str), "the row has scores"
    difference: np.ndarray = row.logprobs[row.mask] - scores
    return difference
