"""The distribution that each trained token was sampled from: its temperature, and the ids that its sampling mask kept.

For a token that was sampled with top-p, top-k or min-p, training uses its log-probability among the kept ids, both under the weights that
sampled it and under the new weights. Otherwise, its importance ratio would also depend on the probability of the ids that were cut off.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from turngate.client.feed import Row
from turngate.types import SAMPLING_MASK, RaggedArray


def adjust_scores(scores: Tensor, rows: Sequence[Row], temperature: float | None) -> Tensor:
    """Divide the scores (logits) of all trained tokens by the temperature, and mask the ids that sampling cut off.

    The result describes the distributions from which the tokens were sampled. `scores` has one row per trained token. If `temperature` is
    None, each token has the temperature that was recorded for its turn.
    """
    if temperature is None:
        scores = scores / torch.from_numpy(np.concatenate([list_temperatures(row) for row in rows])).to(scores)[:, None]
    else:
        scores = scores / temperature
    places, ids = _list_kept(rows)
    if not len(places):
        return scores
    at = torch.from_numpy(places).to(scores.device)
    excluded = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    excluded[at] = True
    excluded[at, torch.from_numpy(ids).to(scores.device)] = False
    return scores.masked_fill(excluded, -torch.inf)


def find_obstacle(row: Row, temperature: float | None, vocabulary: int) -> str:
    """Return why the distribution that a row was sampled from cannot be computed with `adjust_scores`, or an empty string if it can."""
    if temperature is None and not list_temperatures(row).all():
        return "trained tokens were sampled greedily, so their probability does not depend on the weights"
    if (_list_kept([row])[1] >= vocabulary).any():
        return f"its sampling masks contain ids outside the model's vocabulary of {vocabulary} tokens"
    return ""


def list_temperatures(row: Row) -> np.ndarray:
    """Return the recorded temperature of each trained token of a row."""
    values = np.ones(row.ids.size, np.float32)
    for span in row.spans:
        values[span.start : span.end] = span.temperature
    trained: np.ndarray = values[row.mask]
    return trained


def has_masks(row: Row) -> bool:
    """Return whether any trained token of a row was sampled with a sampling mask."""
    return bool(len(_list_kept([row])[0]))


def _list_kept(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """List the ids that the sampling masks of trained tokens kept.

    Return two arrays with one entry per kept id: the index, among all trained tokens, of the token whose mask kept it, and the id.
    """
    places, ids, before = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
    for row in rows:
        column = row.side.get(SAMPLING_MASK)
        number = np.cumsum(row.mask) - 1 + before  # of each trained token
        before += int(row.mask.sum())
        if column is None:
            continue
        assert isinstance(column.values, RaggedArray), "sampling masks are lists of ids"
        tokens = np.concatenate([np.arange(start, end) for start, end in ((0, 0), *column.spans)])
        of_id = np.repeat(tokens, column.values.sizes)
        trained = row.mask[of_id]
        places.append(number[of_id[trained]])
        ids.append(column.values.items[trained].astype(np.int64))
    return np.concatenate(places), np.concatenate(ids)
