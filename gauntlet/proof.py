"""Log-probabilities that prove which context a token was sampled in.

The mock engine derives the log-probability of each sampled token from all ids up to and including it. The scorer recomputes it from the ids
of a recorded row. If any id before a token differs from what the engine saw, the value differs too. So a row cannot be exact by accident,
and gateways need not know about it.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Sequence

STEP = 2.0**-18  # multiples are exact in float32, so storing float32 loses nothing
_VALUES = 5 * 2**18 - 1  # number of multiples in (-5, 0)


def digest(ids: Iterable[int], before: int = 0) -> int:
    """Return a checksum of ids. `before` is the checksum of the ids in front of them."""
    return zlib.crc32(array("i", ids).tobytes(), before)


def logprob(state: int) -> float:
    """Return the log-probability of the last token of a sequence with this digest."""
    return -(1 + state % _VALUES) * STEP


def logprobs(prompt: Sequence[int], sampled: Sequence[int]) -> list[float]:
    """Return the log-probability of each sampled id."""
    state = digest(prompt)
    values = []
    for token in sampled:
        state = digest((token,), state)
        values.append(logprob(state))
    return values
