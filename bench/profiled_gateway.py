"""Run the gateway with a stack profiler, for `overhead.py --profile`.

SIGUSR1 starts profiling. SIGUSR2 stops it and writes the file named by BENCH_PROFILE. Stacks are sampled by CPU time, so that waiting is
not counted and Python functions do not look slower than C functions. A line of the file is a stack, outermost frame first, and its count,
as flame graph viewers (speedscope, flamegraph.pl) expect. Work in other threads is attributed to the current stack of the event loop.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from types import FrameType

from turngate.cli import app

_INTERVAL_S = 0.001  # the kernel may sample less often; most use 4 ms
stacks: Counter[tuple[str, ...]] = Counter()


def _sample_stack(_: int, frame: FrameType | None) -> None:
    stack: list[str] = []
    while frame is not None:
        code = frame.f_code
        stack.append(f"{_shorten_path(code.co_filename)}:{code.co_name}")
        frame = frame.f_back
    stacks[tuple(reversed(stack))] += 1


def _shorten_path(path: str) -> str:
    for mark in ("/site-packages/", "/python3.11/", "/python3.12/", "/python3.13/"):
        if mark in path:
            return path.rpartition(mark)[2]
    return path.rpartition("/turngate/")[2] and "turngate/" + path.rpartition("/turngate/")[2]


def _start(*_: object) -> None:
    stacks.clear()
    signal.setitimer(signal.ITIMER_PROF, _INTERVAL_S, _INTERVAL_S)


def _stop(*_: object) -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
    path = Path(os.environ["BENCH_PROFILE"])
    lines = [f"{';'.join(stack)} {count}\n" for stack, count in stacks.items()]
    path.with_suffix(".part").write_text("".join(lines), encoding="utf-8")
    path.with_suffix(".part").replace(path)


if __name__ == "__main__":
    signal.signal(signal.SIGPROF, _sample_stack)
    signal.signal(signal.SIGUSR1, _start)
    signal.signal(signal.SIGUSR2, _stop)
    app()
