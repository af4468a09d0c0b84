"""Log-probabilities that prove where they came from.

The mock engine gives each sampled token a log-probability that follows from every id up to and including it. Whoever holds a
recorded row can work them out again from the row's ids alone: if one id before a token differs from what the engine saw when
it sampled it, the value differs too. A row cannot be exact by accident, and no gateway needs to know any of this.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Sequence

STEP = 2.0**-18  # multiples of it are exact in float32, so a gateway that stores float32 loses nothing
_VALUES = 5 * 2**18 - 1  # how many there are, in (-5, 0)


def digest(ids: Iterable[int], before: int = 0) -> int:
    """A number for a sequence of ids; `before` is that of what stands in front of it."""
    return zlib.crc32(array("i", ids).tobytes(), before)


def logprob(state: int) -> float:
    """The log-probability of the token with which the sequence reached this digest."""
    return -(1 + state % _VALUES) * STEP


def logprobs(prompt: Sequence[int], sampled: Sequence[int]) -> list[float]:
    """One for each sampled id."""
    state = digest(prompt)
    values = []
    for token in sampled:
        state = digest((token,), state)
        values.append(logprob(state))
    return values
