"""The output of the sampling thread: sampled ids and ended calls, delivered in batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from turngate.engines.local.cache import Places
from turngate.errors import EngineError
from turngate.types import ID_DTYPE, LOGPROB_DTYPE, Ids, Logprobs

End = Literal["stop", "length"] | EngineError


class SampledBatch(msgspec.Struct, frozen=True):
    """Tokens sampled since the last batch, sorted by call, and the calls that have ended.

    `version` is the policy version of the weights, if it is known. `masks` maps a call's serial number to its sampling masks: for each
    token, the ids that could have been sampled. Only calls that requested masks are included.
    """

    serials: Places
    ids: Ids
    logprobs: Logprobs
    ends: dict[int, End]
    version: int | None
    masks: Mapping[int, Sequence[Ids]] = {}


Deliver = Callable[[SampledBatch], None]


class Outbox:
    """A buffer of results.

    It delivers them at most once every `flush_s` seconds, unless a call has ended or `flush` is called with `now`.
    """

    def __init__(self, deliver: Deliver, flush_s: float) -> None:
        self.ends: dict[int, End] = {}
        self.samples: list[tuple[Places, Ids, Logprobs]] = []
        self.masks: dict[int, list[Ids]] = {}
        self._deliver = deliver
        self._flush_s = flush_s
        self._flushed = 0.0

    def flush(self, version: int | None, *, now: bool = False) -> None:
        if not (self.samples or self.ends):
            return
        clock = time.monotonic()
        if not (now or self.ends or clock - self._flushed >= self._flush_s):
            return
        self._flushed = clock
        samples, self.samples = self.samples, []
        ends, self.ends = self.ends, {}
        masks, self.masks = self.masks, {}
        # Perhaps nothing was sampled, but concatenate needs at least one array.
        samples.append((np.empty(0, np.int64), np.empty(0, ID_DTYPE), np.empty(0, LOGPROB_DTYPE)))
        serials, ids, logprobs = (np.concatenate([part[n] for part in samples]) for n in range(3))
        order = np.argsort(serials, kind="stable")
        self._deliver(SampledBatch(serials[order], ids[order], logprobs[order], ends, version, masks))
