"""The GRPO loss, as pure functions on tensors.

For each trained token, with the ratio r = exp(log-probability now − log-probability when sampled) and the token's advantage A:

    gain = min(r·A, clip(r, 1 − low, 1 + high)·A)

Each of a rollout's K rows has weight 1/K, so splitting a rollout into rows does not increase its weight. There are two ways to normalize:

    token      loss = − Σ weight·gain / Σ weight                      over all trained tokens of the update: long rollouts have more weight
    sequence   loss = − Σ weight·(mean gain of the row) / Σ weight    over all rows of the update: all rollouts have the same weight

Only clipping limits the distance from the sampling policy. The feed limits the age of rows. A penalty can limit the distance from the
initial weights (`compute_reference_penalty`).
"""

from __future__ import annotations

from typing import Literal

import msgspec
import torch
from torch import Tensor

Normalise = Literal["token", "sequence"]

# Bound on |log ratio|. Large ratios with a negative advantage are not clipped, and exp(89) overflows.
_MAX_LOG_RATIO = 20.0


class LossTerms(msgspec.Struct, frozen=True):
    """Inputs of the loss, with one entry per trained token."""

    now: Tensor  # log-probabilities under the current weights, with gradients
    then: Tensor  # recorded log-probabilities
    advantage: Tensor
    weight: Tensor  # of the token's row
    row: Tensor  # index of the token's row


def compute_divisor(weights: list[float], tokens: list[int], normalise: Normalise) -> float:
    """Compute the divisor of the loss from all rows of an update. The rows can then be processed in batches."""
    counts = tokens if normalise == "token" else [1] * len(tokens)
    return sum(weight * count for weight, count in zip(weights, counts, strict=True))


def compute_loss(
    terms: LossTerms, tokens: Tensor, *, by: float, low: float, high: float, normalise: Normalise
) -> Tensor:
    """Compute the loss of a batch.

    `tokens` contains the number of trained tokens of each row, and `by` is the divisor of the whole update.
    """
    ratio = torch.exp(_log_ratio(terms.now, terms.then))
    clipped = ratio.clamp(1 - low, 1 + high)
    gain = torch.minimum(ratio * terms.advantage, clipped * terms.advantage) * terms.weight
    return -_normalise(gain, terms, tokens, normalise) / by


def compute_reference_penalty(
    terms: LossTerms, reference: Tensor, tokens: Tensor, *, by: float, normalise: Normalise
) -> Tensor:
    """Compute the mean of d²/2 over the tokens, where d = log-probability now − `reference`, the one under the initial weights.

    On tokens that were sampled with the current weights, its expected gradient is that of the KL divergence from the initial weights, and
    unlike exp(−d) − 1 + d, it has no huge gradients where a token became much less likely. It is normalized like the loss.
    """
    difference = terms.now - reference
    return _normalise(difference**2 / 2 * terms.weight, terms, tokens, normalise) / by


def _normalise(values: Tensor, terms: LossTerms, tokens: Tensor, normalise: Normalise) -> Tensor:
    return (values / tokens[terms.row] if normalise == "sequence" else values).sum()


def compute_clipped_share(terms: LossTerms, *, low: float, high: float) -> Tensor:
    """Compute the share of tokens whose gain is limited by clipping. Tokens with an advantage of 0 never count as clipped."""
    ratio = torch.exp(_log_ratio(terms.now.detach(), terms.then))
    too_high = (terms.advantage > 0) & (ratio > 1 + high)
    too_low = (terms.advantage < 0) & (ratio < 1 - low)
    return (too_high | too_low).float().mean()


def compute_divergence(now: Tensor, then: Tensor) -> Tensor:
    """Compute r − 1 − log r for each token, where r is its importance ratio.

    The mean estimates the KL divergence between the sampling policy and the current one. It is 0 only if all ratios are 1.
    """
    log_ratio = _log_ratio(now.detach(), then)
    return torch.exp(log_ratio) - 1 - log_ratio


def _log_ratio(now: Tensor, then: Tensor) -> Tensor:
    """Compute the log ratio, clamped to ±`_MAX_LOG_RATIO`. Beyond this bound, it has no gradient."""
    return (now - then).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
