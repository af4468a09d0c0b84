"""Whether log-probabilities are the scripted engine's. No store says which engine answered, but those follow from the ids."""

from __future__ import annotations

import numpy as np

from turngate.engines.scripted import derived_logprobs
from turngate.trainers.export.source import Rollout

_ENOUGH = 16  # tokens: no model comes upon so many by chance


def is_made_up(rollout: Rollout) -> bool:
    """By the first trained turn of a rollout."""
    for row in rollout.rows:
        for span in row.spans:
            if span.trained:
                end = min(span.end, span.start + _ENOUGH)
                derived = derived_logprobs(row.ids[: span.start], row.ids[span.start : end].tolist())
                return np.array_equal(row.logprobs[span.start : end], np.array(derived, np.float32))
    return False
