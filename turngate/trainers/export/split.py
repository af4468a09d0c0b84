"""Split a row into prompt and response, for formats that have both."""

from __future__ import annotations

import msgspec
import numpy as np

from turngate.trace.sample import Sample
from turngate.types import Ids, Logprobs


class SplitRow(msgspec.Struct, frozen=True):
    """`prompt` ends before the first trained token. Tokens after the last trained one are dropped."""

    prompt: Ids
    response: Ids
    mask: np.ndarray  # int8, of the response
    logprobs: Logprobs  # of the response; 0 for tokens that were not sampled, which are masked
    turns: int  # trained ones


def split_row(row: Sample) -> SplitRow:
    [trained] = np.nonzero(row.mask)
    first, end = int(trained[0]), int(trained[-1]) + 1
    mask = row.mask[first:end]
    logprobs = row.logprobs[first:end]
    assert not np.isnan(logprobs[mask]).any(), "a trained token has its log-probability"
    return SplitRow(
        row.ids[:first],
        row.ids[first:end],
        mask.astype(np.int8),
        np.where(np.isnan(logprobs), np.float32(0), logprobs),
        sum(span.trained for span in row.spans),
    )


FILLED_LOGPROBS = (
    "missing log-probabilities of tokens that were not sampled: the format needs a number, so they are 0.0 and masked"
)
ROW_WEIGHTS = "equal weight of rollouts with several rows: each row has a `weight`, which the trainer has to apply"
