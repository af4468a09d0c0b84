"""The time of day, without jumps: the clock is read once, and then only the time that has passed is added.

Sessions and turns use it for what they record and for their limits. If the clock of the machine is set while a gateway runs, a turn still
ends after it began, and no session reaches its time limit early. A restarted gateway uses the new time.
"""

from __future__ import annotations

import time

_PASSING = getattr(
    time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC
)  # on Linux, it also counts while the machine is suspended
_START = time.time() - time.clock_gettime(_PASSING)


def now() -> float:
    """Return the time of day in seconds since 1970."""
    return _START + time.clock_gettime(_PASSING)
