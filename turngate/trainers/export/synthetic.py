"""Detect the synthetic log-probabilities of the scripted engine.

The store does not record which engine was used. The scripted engine derives its log-probabilities from the ids, so they can be recognized.
"""

from __future__ import annotations

import numpy as np

from turngate.engines.scripted import derive_logprobs
from turngate.trainers.export.source import RecordedRollout

_ENOUGH = 16  # tokens to compare; this many do not match by chance


def is_synthetic(rollout: RecordedRollout) -> bool:
    """Return whether a rollout has synthetic log-probabilities. Only its first trained turn that has tokens is checked."""
    for row in rollout.rows:
        for span in row.spans:
            if span.trained and span.end > span.start:
                end = min(span.end, span.start + _ENOUGH)
                derived = derive_logprobs(row.ids[: span.start], row.ids[span.start : end].tolist())
                return np.array_equal(row.logprobs[span.start : end], np.array(derived, np.float32))
    return False
