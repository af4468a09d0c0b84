"""Rows → one number to descend. Pure: tensors in, tensors out. Called by `grpo.py`.

For each trained token, with ratio r = exp(log-probability now − log-probability when it was sampled) and its rollout's advantage A:

    gain = min(r·A, clip(r, 1 − low, 1 + high)·A)

A rollout that yields K rows weighs as one: each of its rows has weight 1/K. What the gains are divided by is a choice:

    token      loss = − Σ weight·gain / Σ weight              over all trained tokens of the update: long rollouts weigh more
    sequence   loss = − Σ weight·mean of a row's gains / Σ weight       over all rows: each rollout weighs the same

There is no penalty for leaving the sampling policy but the clipping: the rows are at most as old as the feed allows.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import torch
from torch import Tensor

Normalise = Literal["token", "sequence"]

# Of the logarithm of a ratio, either way. Nothing clips a large ratio where the advantage is negative, and exp(89) is infinite.
_LARGEST = 20.0


class Terms(msgspec.Struct, frozen=True):
    """What the loss is made of. Of all trained tokens of some rows, one after the other: one entry per token."""

    now: Tensor  # log-probabilities under the present weights, with gradients
    then: Tensor  # as recorded when they were sampled
    advantage: Tensor
    weight: Tensor  # of the token's row
    row: Tensor  # the number of its row, from 0


def divisor(weights: list[float], tokens: list[int], normalise: Normalise) -> float:
    """What the gains of an update are divided by: of all its rows, so that they can be computed a few at a time."""
    counts = tokens if normalise == "token" else [1] * len(tokens)
    return sum(weight * count for weight, count in zip(weights, counts, strict=True))


def loss(terms: Terms, tokens: Tensor, *, by: float, low: float, high: float, normalise: Normalise) -> Tensor:
    """`tokens`: how many trained tokens each row has; `by`: the whole update's `divisor`."""
    ratio = torch.exp(_log_ratio(terms.now, terms.then))
    clipped = ratio.clamp(1 - low, 1 + high)
    gain = torch.minimum(ratio * terms.advantage, clipped * terms.advantage) * terms.weight
    if normalise == "sequence":
        gain = gain / tokens[terms.row]
    return -gain.sum() / by


def clipped_share(terms: Terms, *, low: float, high: float) -> Tensor:
    """The share of tokens whose ratio is past the bound that holds for them."""
    ratio = torch.exp(_log_ratio(terms.now.detach(), terms.then))
    beyond = torch.where(terms.advantage > 0, ratio > 1 + high, ratio < 1 - low)
    return beyond.float().mean()


def divergence(now: Tensor, then: Tensor) -> Tensor:
    """How far the present policy is from the one that sampled, per token: r − 1 − log r, which is never negative and is 0 on average
    only where they are the same."""
    log_ratio = _log_ratio(now.detach(), then)
    return torch.exp(log_ratio) - 1 - log_ratio


def _log_ratio(now: Tensor, then: Tensor) -> Tensor:
    """Beyond the bound there is no gradient."""
    return (now - then).clamp(-_LARGEST, _LARGEST)
