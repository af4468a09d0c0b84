"""The gateway, its stacks looked at every few milliseconds of its own CPU time, for `overhead.py --profile`: SIGUSR1 begins, SIGUSR2
ends and writes the file named by BENCH_PROFILE.

Sampled by CPU time, so that waiting counts for nothing and Python functions do not look dearer than C ones. A line of the file is a stack,
outermost first, and how often it was seen: what flame graph viewers (speedscope, flamegraph.pl) read. Work in other threads counts as the
event loop's, at the place where it was.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from types import FrameType

from turngate.cli import app

_EVERY = 0.001  # as often as the kernel will; most look every 4 ms
seen: Counter[tuple[str, ...]] = Counter()


def _look(_: int, frame: FrameType | None) -> None:
    stack: list[str] = []
    while frame is not None:
        code = frame.f_code
        stack.append(f"{_short(code.co_filename)}:{code.co_name}")
        frame = frame.f_back
    seen[tuple(reversed(stack))] += 1


def _short(path: str) -> str:
    for mark in ("/site-packages/", "/python3.11/", "/python3.12/", "/python3.13/"):
        if mark in path:
            return path.rpartition(mark)[2]
    return path.rpartition("/turngate/")[2] and "turngate/" + path.rpartition("/turngate/")[2]


def _begin(*_: object) -> None:
    seen.clear()
    signal.setitimer(signal.ITIMER_PROF, _EVERY, _EVERY)


def _end(*_: object) -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
    path = Path(os.environ["BENCH_PROFILE"])
    lines = [f"{';'.join(stack)} {count}\n" for stack, count in seen.items()]
    path.with_suffix(".part").write_text("".join(lines), encoding="utf-8")
    path.with_suffix(".part").replace(path)


if __name__ == "__main__":
    signal.signal(signal.SIGPROF, _look)
    signal.signal(signal.SIGUSR1, _begin)
    signal.signal(signal.SIGUSR2, _end)
    app()
