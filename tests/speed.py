"""Scale timeouts to the speed of this machine.

A test waits for `scaled(5)` seconds, never for 5: on a machine at a quarter of the reference speed, that is four times as long. Such a
timeout only ends a test that hangs, so it is generous. No test asserts how long something took; `bench/` measures time.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from functools import cache

SLOWNESS = "TURNGATE_TEST_SLOWNESS"  # environment variable: set by tools/tier.py for all tests of a run
REFERENCE_S = 0.60  # duration of `_work` on one of two idle cores of a Neoverse N1
MARGIN = 4.0  # allows for other load, and for pauses that one measurement misses


def scaled(seconds: float) -> float:
    """Return a timeout for something that takes up to `seconds` on the idle reference machine."""
    return seconds * MARGIN * slowness()


def paced(seconds: float) -> float:
    """Return a timeout that is expected to expire, just long enough for the steps before it."""
    return seconds * 1.5 * slowness()


@cache
def slowness() -> float:
    """Return how many times longer work takes here than on the reference machine; at least 1."""
    given = os.environ.get(SLOWNESS)
    return max(1.0, float(given)) if given else measure()


def measure() -> float:
    """Measure the slowness of this machine."""
    began = time.perf_counter()
    _work()
    return max(1.0, (time.perf_counter() - began) / REFERENCE_S)


def _work() -> None:
    """Hash, update dictionaries and encode JSON, for long enough to exhaust a CPU quota."""
    digest = b""
    for _ in range(20):
        for _ in range(400):
            digest = hashlib.sha256(digest * 128).digest()
        counts: dict[int, int] = {}
        for n in range(60_000):
            counts[n % 997] = counts.get(n % 997, 0) + n
        json.loads(json.dumps([{"name": str(n), "value": n} for n in range(8_000)]))
