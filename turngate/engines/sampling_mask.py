"""Sampling masks: the ids that top-k, top-p and min-p left to sample from, for each sampled token.

A trainer that computes a token's log-probability under new weights must normalize it over the same ids. What each engine returns:

- local: the kept ids for every token.
- vLLM 0.32 (`--return-sampling-mask`, Model Runner V2): the kept ids in the `generate` API, but not in the `completions` API. With
  this option, vLLM rejects calls without `top_k` and requires `--logprobs-mode processed_logprobs`, so its log-probabilities are over the
  kept ids.
- SGLang 0.5: the kept ids for calls with a `top_k` of at most `--sampling-mask-max-tokens`. Its usual log-probabilities are over
  the whole vocabulary, so it returns those over the kept ids separately.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turngate.errors import EngineError
from turngate.types import SAMPLING_MASK, RaggedArray, SideArray

MAX_KEPT = 4096  # a token for which more ids were kept has no mask, so its turn is not trained


def build_masks(
    engine: str, first: int, ids: Sequence[int], kept: Sequence[Sequence[int] | np.ndarray]
) -> tuple[SideArray, ...]:
    """Build the sampling masks of `ids`, which are consecutive tokens of a reply. The first of them has index `first`.

    `kept` contains the ids that were kept for each token. A token with more than `MAX_KEPT` of them gets no mask.

    Raise `EngineError` if the number of masks differs from the number of tokens, or if a mask excludes its own token or repeats an id.
    """
    if len(kept) != len(ids):
        raise EngineError(f"{engine} sent different numbers of sampling masks ({len(kept)}) and tokens ({len(ids)})")
    found: list[SideArray] = []
    start = 0
    for at, (token, mask) in enumerate(zip(ids, kept, strict=True)):
        if token not in mask:
            raise EngineError(f"{engine} sent a sampling mask that excludes the sampled token {token}")
        if len(np.unique(mask)) != len(mask):
            raise EngineError(f"{engine} sent a sampling mask with repeated ids for token {token}")
        if len(mask) > MAX_KEPT:
            if at > start:
                found.append(SideArray(SAMPLING_MASK, first + start, RaggedArray.from_lists(kept[start:at])))
            start = at + 1
    if len(ids) > start:
        found.append(SideArray(SAMPLING_MASK, first + start, RaggedArray.from_lists(kept[start:])))
    return tuple(found)
