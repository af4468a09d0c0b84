"""Split a row into prompt and response, for formats that need both."""

from __future__ import annotations

import msgspec
import numpy as np

from turngate.trace.sample import Sample
from turngate.types import Ids, Logprobs


class SplitRow(msgspec.Struct, frozen=True):
    """A row split before its first trained token. Tokens after the last trained token are dropped."""

    prompt: Ids
    response: Ids
    mask: np.ndarray  # int8, of the response
    logprobs: Logprobs  # of the response; 0 for tokens without a log-probability, which are masked
    turns: int  # trained turns


def split_row(row: Sample) -> SplitRow:
    [trained] = np.nonzero(row.mask)
    first, end = int(trained[0]), int(trained[-1]) + 1
    mask = row.mask[first:end]
    logprobs = row.logprobs[first:end]
    assert not np.isnan(logprobs[mask]).any(), "every trained token has a log-probability"
    return SplitRow(
        row.ids[:first],
        row.ids[first:end],
        mask.astype(np.int8),
        np.where(np.isnan(logprobs), np.float32(0), logprobs),
        sum(span.trained for span in row.spans),
    )


FILLED_LOGPROBS = (
    "the difference between a missing log-probability and 0.0: tokens without one have 0.0, and are masked"
)
ROW_WEIGHTS = (
    "equal weights for rollouts with different numbers of rows: the trainer must apply the `weight` of each row"
)
