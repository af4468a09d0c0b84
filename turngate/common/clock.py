"""A clock that returns the time of day but never jumps: it reads the system clock once, then only adds the time that has passed.

Sessions and turns use it for the times they record and for their limits. If the machine's clock is changed while a gateway is running, a
turn still ends after it began, and no session reaches its time limit early. A restarted gateway uses the new time.
"""

from __future__ import annotations

import time

_PASSING = getattr(
    time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC
)  # on Linux, this clock also runs while the machine is suspended
_START = time.time() - time.clock_gettime(_PASSING)


def now() -> float:
    """Return the current Unix time in seconds."""
    return _START + time.clock_gettime(_PASSING)
