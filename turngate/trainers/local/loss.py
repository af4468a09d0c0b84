"""The GRPO loss. Pure: tensors in, tensors out.

For each trained token, with ratio r = exp(log-probability now − log-probability when it was sampled) and its rollout's advantage A:

    gain = min(r·A, clip(r, 1 − low, 1 + high)·A)

A rollout that yields K rows weighs as one: each of its rows has weight 1/K. There are two ways to normalise:

    token      loss = − Σ weight·gain / Σ weight              over all trained tokens of the update: long rollouts weigh more
    sequence   loss = − Σ weight·mean of a row's gains / Σ weight       over all rows: each rollout weighs the same

Only clipping limits the distance from the sampling policy: rows are at most as old as the feed allows.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import torch
from torch import Tensor

Normalise = Literal["token", "sequence"]

# Bound of |log ratio|: a large ratio with a negative advantage is not clipped, and exp(89) is infinite.
_MAX_LOG_RATIO = 20.0


class LossTerms(msgspec.Struct, frozen=True):
    """Inputs of the loss, one entry per trained token of some rows."""

    now: Tensor  # log-probabilities under the present weights, with gradients
    then: Tensor  # recorded log-probabilities
    advantage: Tensor
    weight: Tensor  # of the token's row
    row: Tensor  # the number of its row, from 0


def compute_divisor(weights: list[float], tokens: list[int], normalise: Normalise) -> float:
    """Compute what the gains of an update are divided by, over all its rows, so that they can be processed in batches."""
    counts = tokens if normalise == "token" else [1] * len(tokens)
    return sum(weight * count for weight, count in zip(weights, counts, strict=True))


def compute_loss(
    terms: LossTerms, tokens: Tensor, *, by: float, low: float, high: float, normalise: Normalise
) -> Tensor:
    """`tokens`: how many trained tokens each row has; `by`: the divisor of the whole update."""
    ratio = torch.exp(_log_ratio(terms.now, terms.then))
    clipped = ratio.clamp(1 - low, 1 + high)
    gain = torch.minimum(ratio * terms.advantage, clipped * terms.advantage) * terms.weight
    if normalise == "sequence":
        gain = gain / tokens[terms.row]
    return -gain.sum() / by


def compute_clipped_share(terms: LossTerms, *, low: float, high: float) -> Tensor:
    """Compute the share of tokens whose ratio is clipped."""
    ratio = torch.exp(_log_ratio(terms.now.detach(), terms.then))
    beyond = torch.where(terms.advantage > 0, ratio > 1 + high, ratio < 1 - low)
    return beyond.float().mean()


def compute_divergence(now: Tensor, then: Tensor) -> Tensor:
    """Compute the divergence from the sampling policy per token: r − 1 − log r, which is 0 on average only for equal policies."""
    log_ratio = _log_ratio(now.detach(), then)
    return torch.exp(log_ratio) - 1 - log_ratio


def _log_ratio(now: Tensor, then: Tensor) -> Tensor:
    """Compute the bounded log ratio; beyond the bound there is no gradient."""
    return (now - then).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
