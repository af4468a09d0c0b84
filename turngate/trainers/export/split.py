"""A row in two: what is given and what is learned. For formats that have a prompt and a response."""

from __future__ import annotations

import msgspec
import numpy as np

from turngate.trace.sample import Sample
from turngate.types import Ids, Logprobs


class Cut(msgspec.Struct, frozen=True):
    """`prompt` ends before the first trained token; what comes after the last one is of no use to anybody, and gone."""

    prompt: Ids
    response: Ids
    mask: np.ndarray  # int8, of the response
    logprobs: Logprobs  # of the response; 0 where nothing was sampled, as the formats have it, and always masked there
    turns: int  # trained ones


def cut(row: Sample) -> Cut:
    [trained] = np.nonzero(row.mask)
    first, end = int(trained[0]), int(trained[-1]) + 1
    mask = row.mask[first:end]
    logprobs = row.logprobs[first:end]
    assert not np.isnan(logprobs[mask]).any(), "a trained token has its log-probability"
    return Cut(
        row.ids[:first],
        row.ids[first:end],
        mask.astype(np.int8),
        np.where(np.isnan(logprobs), np.float32(0), logprobs),
        sum(span.trained for span in row.spans),
    )


FILLED = "log-probabilities of tokens that nobody sampled: the format asks for a number there, so they have 0.0, and are masked"
UNEQUAL = "that a rollout with several rows weighs as one: its rows say their weight, and the trainer has to heed it"
