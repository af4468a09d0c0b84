"""Values that prove which context a token was sampled in: log-probabilities, and what an engine can report besides them.

The mock engine derives every value of a token from all ids up to and including it. The scorer recomputes it from the ids
of a recorded row. If any id before a token differs from what the engine saw, the value differs too. So a row cannot be exact by accident,
and gateways need not know about it.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Sequence

STEP = 2.0**-18  # multiples are exact in float32, so storing float32 loses nothing
_VALUES = 5 * 2**18 - 1  # number of multiples in (-5, 0)
EXPERT_SHAPE = (2, 2)  # layers, experts per token
_EXPERTS = 64
_OTHER_IDS = 1000  # sampling masks consist of the sampled id and some ids below this number


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


def experts(state: int) -> list[int]:
    """Return the experts, over all layers, that the last token of a sequence with this digest was routed to."""
    return [(state >> (6 * n)) % _EXPERTS for n in range(EXPERT_SHAPE[0] * EXPERT_SHAPE[1])]


def sampling_mask(before: int, token: int) -> list[int]:
    """Return the ids that were left to sample from when this token was sampled after a sequence with digest `before`."""
    return sorted({token, *((before >> (5 * n)) % _OTHER_IDS for n in range(1 + before % 4))})


def teacher_logprob(state: int) -> float:
    """Return a teacher's log-probability of the last token of a sequence with this digest."""
    return logprob(state) - 1.0


def digests(ids: Sequence[int]) -> list[int]:
    """Return the digest of each prefix of ids, from the first id to the whole sequence."""
    states, state = [], 0
    for token in ids:
        state = digest((token,), state)
        states.append(state)
    return states
