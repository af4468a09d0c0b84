"""Sample ids from scores, and return their log-probabilities in the distribution that was sampled.

Each row is sampled with one random number, which depends only on the call's seed and on how many tokens the call has sampled, not on the
batch. A call without adjustments needs only `draw`, which can run in a CUDA graph. Adjustments to the distribution (`Adjustment`) are
applied before `draw`, row by row.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from turngate.types import ID_DTYPE, Ids, Sampling

_BITS = 48  # bits of a random number in [0, 1), few enough that rounding never yields 1
_MASK = (1 << 63) - 1
_BLOCKS = (256, 128, 64)


class Adjustment(msgspec.Struct, frozen=True):
    """The input for adjusting one row's scores: the row's sampling settings, and its tokens so far."""

    row: int
    sampling: Sampling
    prompt: Ids
    sampled: Ids
    stop_ids: tuple[int, ...]
    wants_mask: bool = False  # whether to return the ids that are left to sample from


def draw(
    scores: Tensor, temperature: Tensor, seed: Tensor, drawn: Tensor, *, some_greedy: bool = True
) -> tuple[Tensor, Tensor]:
    """Draw one id per row of `scores` (rows, vocabulary; float32, modified in place), with its log-probability.

    At temperature 0, the likeliest id is drawn, with log-probability 0. `some_greedy=False` promises that no row has temperature 0.
    """
    greedy = temperature == 0
    probabilities = F.softmax(scores.div_(torch.where(greedy, 1.0, temperature)[:, None]), dim=-1)
    ids = _pick_by_share(probabilities, uniform(seed, drawn))
    ids.clamp_(max=scores.shape[-1] - 1)  # out of range only if scores are NaN
    if some_greedy:
        ids = torch.where(greedy, probabilities.argmax(dim=-1), ids)
    logprobs = probabilities.gather(-1, ids[:, None])[:, 0].log()
    return ids, torch.where(greedy & logprobs.isfinite(), 0.0, logprobs)


def _pick_by_share(probabilities: Tensor, share: Tensor) -> Tensor:
    """Return, for each row, the first id at which the cumulative probability exceeds `share` of the row's total.

    This finds the block of ids first, and then the id in the block. A cumulative sum over the whole vocabulary would be the most expensive
    part of a step on a CPU.
    """
    width = next((size for size in _BLOCKS if probabilities.shape[-1] % size == 0), 0)
    if not width:
        width = _BLOCKS[0]
        probabilities = F.pad(probabilities, (0, -probabilities.shape[-1] % width))
    blocks = probabilities.unflatten(-1, (-1, width))
    ends = blocks.sum(dim=-1).double().cumsum(dim=-1)
    target = share[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[-1] - 1)
    before = torch.where(block > 0, ends.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, width))[:, 0].cumsum(dim=-1, dtype=torch.float64)
    # The two sums differ in their last bits, and an id of probability 0 must never be reached.
    target = torch.minimum(target - before, inside[:, -1:] * (1 - 2.0**-50))
    offset = torch.searchsorted(inside, target, right=True).clamp_(max=width - 1)
    return (block * width + offset)[:, 0]


def uniform(seed: Tensor, index: Tensor) -> Tensor:
    """Compute a pseudo-random number in [0, 1) for each pair of seed and index. Integer arithmetic makes it the same on every device."""
    x = seed + (index + 1) * -7046029254386353131  # wraps around, as do the products below
    x = (x ^ _shift_right(x, 30)) * -4658895280553007687
    x = (x ^ _shift_right(x, 27)) * -7723592293110705685
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 64 - _BITS).double() / (1 << _BITS)


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros, even if the number is negative."""
    return (x >> by) & (_MASK >> (by - 1))


def find_kept(scores: Tensor, adjustment: Adjustment) -> Ids:
    """Return the ids that can still be sampled after `adjust_scores`."""
    kept: Ids = torch.isfinite(scores[adjustment.row]).nonzero()[:, 0].cpu().numpy().astype(ID_DTYPE)
    return kept


def adjust_scores(scores: Tensor, adjustment: Adjustment) -> None:
    """Adjust one row of scores in place: penalties and the minimum number of tokens first, then min-p, top-k and top-p.

    At temperature 0, the last three have no effect.
    """
    row, sampling = scores[adjustment.row], adjustment.sampling
    _penalize(row, adjustment)
    if len(adjustment.sampled) < sampling.min_tokens and adjustment.stop_ids:
        row[torch.tensor(adjustment.stop_ids, device=row.device)] = -torch.inf
    if sampling.temperature == 0:
        return
    if sampling.min_p > 0:
        logprobs = F.log_softmax(row / sampling.temperature, dim=-1)
        row[logprobs < logprobs.max() + float(np.log(sampling.min_p))] = -torch.inf
    if 0 < sampling.top_k < row.shape[0]:
        row[row < row.topk(sampling.top_k).values[-1]] = -torch.inf
    if sampling.top_p < 1:
        probabilities, order = F.softmax(row / sampling.temperature, dim=-1).sort(descending=True)
        beyond = probabilities.double().cumsum(dim=-1) - probabilities >= sampling.top_p
        beyond[0] = False  # the likeliest id is always kept
        row[order[beyond]] = -torch.inf


def _penalize(row: Tensor, adjustment: Adjustment) -> None:
    """Apply the repetition penalty to all tokens so far, and the presence and frequency penalties only to sampled tokens."""
    sampling = adjustment.sampling
    if sampling.repetition_penalty != 1:
        seen = torch.from_numpy(np.unique(np.concatenate((adjustment.prompt, adjustment.sampled))).astype(np.int64)).to(
            row.device
        )
        before = row[seen]
        row[seen] = torch.where(before > 0, before / sampling.repetition_penalty, before * sampling.repetition_penalty)
    if (sampling.presence_penalty or sampling.frequency_penalty) and len(adjustment.sampled):
        ids, counts = np.unique(adjustment.sampled, return_counts=True)
        cost = sampling.presence_penalty + sampling.frequency_penalty * counts
        row[torch.from_numpy(ids.astype(np.int64)).to(row.device)] -= torch.from_numpy(cost).to(row)
