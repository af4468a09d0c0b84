"""Imported by Python at start-up, in every process of a gateway under test: its wall clock can be moved while it runs.

The file that `TURNGATE_CHAOS_CLOCK` names contains the seconds to add to the wall clock. Monotonic clocks are not changed, because they do
not jump on Linux either.
"""

from __future__ import annotations

import os
import time

_real = time.time
_path = os.environ.get("TURNGATE_CHAOS_CLOCK", "")


def _read_offset() -> float:
    try:
        with open(_path) as file:  # pathlib would slow down the start of every process
            return float(file.read() or 0)
    except (OSError, ValueError):
        return 0.0


if _path:
    time.time = lambda: _real() + _read_offset()
