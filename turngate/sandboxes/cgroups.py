"""Limits on processors, memory and processes for sandboxes that are plain processes of this machine: local and bubblewrap.

Control groups of the kernel, version 1 or 2, one per sandbox and named like it. Only root may make them (or whoever the machine
gave a part of them to at the top); where that is not so, `available` says less, and the backends' `not_enforced` says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from turngate.errors import SandboxError
from turngate.sandboxes.base import Resources

MOUNT = Path("/sys/fs/cgroup")
GROUP = "turngate"
CONTROLLER = {"cpus": "cpu", "memory_mb": "memory", "pids": "pids"}
PERIOD_US = 100_000  # over which the share of processors is counted


def enforceable_limits(mount: Path = MOUNT) -> frozenset[str]:
    """The fields of `Resources` that can be enforced here."""
    if _is_unified(mount):
        if not os.access(mount / "cgroup.subtree_control", os.W_OK):
            return frozenset()
        there = set((mount / "cgroup.controllers").read_text().split())
    else:
        there = {name for name in CONTROLLER.values() if os.access(mount / name / "cgroup.procs", os.W_OK)}
    return frozenset(field for field, controller in CONTROLLER.items() if controller in there)


def not_enforced(limits: Resources, mount: Path = MOUNT) -> tuple[str, ...]:
    """Those of the limits that are a wish here."""
    return tuple(field for field in _requested_limits(limits) if field not in enforceable_limits(mount))


def apply_limits(name: str, limits: Resources, processes: Iterable[int], mount: Path = MOUNT) -> None:
    """Hold processes, and all that they will start, to those limits that can be enforced here."""
    wanted = {field: value for field, value in _requested_limits(limits).items() if field in enforceable_limits(mount)}
    try:
        for field, value in wanted.items():
            place = _create_group(name, CONTROLLER[field], mount)
            place.mkdir(parents=True, exist_ok=True)
            for file, text in _limit_files(field, value, unified=_is_unified(mount)).items():
                (place / file).write_text(text)
            for process in processes:
                (place / "cgroup.procs").write_text(str(process))
    except OSError as error:
        raise SandboxError(f"the limits cannot be set: {error.filename}: {error.strerror}") from error


def remove_group(name: str, mount: Path = MOUNT) -> None:
    """When none of its processes is left."""
    for controller in CONTROLLER.values():
        with suppress(OSError):
            (mount / GROUP / name if _is_unified(mount) else mount / controller / GROUP / name).rmdir()


def _is_unified(mount: Path) -> bool:
    """Version 2: one tree for all of them."""
    return (mount / "cgroup.controllers").exists()


def _requested_limits(limits: Resources) -> dict[str, float]:
    asked = {"cpus": limits.cpus, "memory_mb": limits.memory_mb, "pids": limits.pids}
    return {field: value for field, value in asked.items() if value is not None}


def _create_group(name: str, controller: str, mount: Path) -> Path:
    if not _is_unified(mount):
        return mount / controller / GROUP / name
    (mount / GROUP).mkdir(exist_ok=True)
    for parent in (mount, mount / GROUP):  # a child has only what its parents hand down
        (parent / "cgroup.subtree_control").write_text(f"+{controller}")
    return mount / GROUP / name


def _limit_files(field: str, value: float, *, unified: bool) -> dict[str, str]:
    """Files and what to write into them."""
    quota, size = str(int(value * PERIOD_US)), str(int(value) << 20)
    if field == "pids":
        return {"pids.max": str(int(value))}
    if field == "cpus":
        if unified:
            return {"cpu.max": f"{quota} {PERIOD_US}"}
        return {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": quota}
    return {"memory.max": size, "memory.swap.max": "0"} if unified else {"memory.limit_in_bytes": size}
