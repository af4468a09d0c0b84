"""Measure CPU time and memory of a process and its children, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


def list_family(pid: int) -> list[int]:
    """List a process and all of its descendants."""
    pids = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text(encoding="ascii").split()
        except OSError:
            continue
        for child in children:
            pids += list_family(int(child))
    return pids


def cpu_seconds(pid: int) -> float:
    """Return user and system time, including that of ended children."""
    total = 0
    for each in list_family(pid):
        try:
            stat = Path(f"/proc/{each}/stat").read_text(encoding="utf-8")
        except OSError:
            continue
        fields = stat.rpartition(")")[2].split()
        total += sum(int(field) for field in fields[11:15])
    return total / _TICK


def memory_mb(pid: int) -> float:
    """Return the resident memory. Shared pages are counted once."""
    kilobytes = 0
    for each in list_family(pid):
        try:
            rollup = Path(f"/proc/{each}/smaps_rollup").read_text(encoding="ascii")
        except OSError:
            continue
        kilobytes += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return kilobytes / 1024
