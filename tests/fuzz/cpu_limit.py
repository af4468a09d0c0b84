"""A limit on the CPU time of one input, so that a hang is a finding."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limit_cpu_time(seconds: float) -> Iterator[None]:
    """Raise an error in the code that this process runs if it computes for longer. Use it in the main thread."""

    def fail(*_: object) -> None:
        raise AssertionError(f"it has computed for {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, fail)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
