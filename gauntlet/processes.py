"""What a process and its children cost, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """A process and everything below it."""
    out = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text(encoding="ascii").split()
        except OSError:
            continue
        for child in children:
            out += family(int(child))
    return out


def cpu_seconds(pid: int) -> float:
    """User and system time, that of children which have ended included."""
    total = 0
    for each in family(pid):
        try:
            stat = Path(f"/proc/{each}/stat").read_text(encoding="utf-8")
        except OSError:
            continue
        fields = stat.rpartition(")")[2].split()
        total += sum(int(field) for field in fields[11:15])
    return total / _TICK


def memory_mb(pid: int) -> float:
    """Resident memory; pages that several processes share are counted once."""
    kilobytes = 0
    for each in family(pid):
        try:
            rollup = Path(f"/proc/{each}/smaps_rollup").read_text(encoding="ascii")
        except OSError:
            continue
        kilobytes += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return kilobytes / 1024
