"""On-policy distillation: per-token advantages from a teacher's scores (`turngate.trainers.teacher`).

For a sampled token, the recorded log-probability minus the teacher's is an unbiased estimate of the reverse KL divergence of the policy
from the teacher in this context. The negative of this estimate, relative to the mean of the update, is multiplied by the weight
`teacher_kl` and added to the advantage of the token. With a small weight and a reference model as the teacher, this is the usual KL
penalty; with a weight of 1 and no reward, it is distillation.
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
    """Return `mean_kl` minus the reverse KL divergence of each trained token, concatenated over all rows with scores.

    `mean_kl` is the mean divergence over all rows of the update. As a baseline, it lowers the variance of the gradient, and hardly
    changes the expected gradient, because a single token contributes little to the mean.
    """
    return np.float32(mean_kl) - np.concatenate([compute_reverse_kl(row) for row in rows])


def compute_mean_kl(rows: Sequence[Row]) -> float:
    """Return the mean reverse KL divergence of all trained tokens of rows with scores."""
    return float(np.concatenate([compute_reverse_kl(row) for row in rows]).mean())


def compute_reverse_kl(row: Row) -> np.ndarray:
    """Return the recorded minus the teacher's log-probability for each trained token of a row with scores."""
    scores = read_scores(row)
    assert not isinstance(scores, str), "the row has scores"
    difference: np.ndarray = row.logprobs[row.mask] - scores
    return difference
