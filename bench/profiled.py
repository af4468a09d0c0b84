"""The gateway under cProfile, for `overhead.py --profile`: SIGUSR1 begins, SIGUSR2 ends and writes the file named by BENCH_PROFILE.

Only the event loop's thread is profiled, which is where turns run.
"""

from __future__ import annotations

import cProfile
import os
import signal

from turngate.cli import app

profile = cProfile.Profile()


def _begin(*_: object) -> None:
    profile.enable()


def _end(*_: object) -> None:
    profile.disable()
    profile.dump_stats(os.environ["BENCH_PROFILE"])


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _begin)
    signal.signal(signal.SIGUSR2, _end)
    app()
