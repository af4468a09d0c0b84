"""Limits on CPU, memory and processes for sandboxes that are ordinary processes on this machine (local and bubblewrap).

This module uses the kernel's control groups, version 1 or 2. The groups of a sandbox are named after it. Creating groups requires root or a
delegated subtree. `enforceable_limits` returns the limits that can be enforced on this machine. The backends' `not_enforced` lists the
requested limits that cannot be enforced.
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
PERIOD_US = 100_000  # the period of the CPU quota


def enforceable_limits(mount: Path = MOUNT) -> frozenset[str]:
    """Return the fields of `Resources` that control groups can enforce on this machine."""
    if _is_unified(mount):
        if not os.access(mount / "cgroup.subtree_control", os.W_OK):
            return frozenset()
        controllers = set((mount / "cgroup.controllers").read_text().split())
    else:
        controllers = {name for name in CONTROLLER.values() if os.access(mount / name / "cgroup.procs", os.W_OK)}
    return frozenset(field for field, controller in CONTROLLER.items() if controller in controllers)


def not_enforced(limits: Resources, mount: Path = MOUNT) -> tuple[str, ...]:
    """Return the requested limits that cannot be enforced on this machine."""
    return tuple(field for field in _limits_by_field(limits) if field not in enforceable_limits(mount))


def apply_limits(name: str, limits: Resources, processes: Iterable[int], mount: Path = MOUNT) -> None:
    """Apply the enforceable limits to `processes` and their future descendants. `name` is the name of the sandbox."""
    enforceable = {
        field: value for field, value in _limits_by_field(limits).items() if field in enforceable_limits(mount)
    }
    try:
        for field, value in enforceable.items():
            group = _create_group(name, CONTROLLER[field], mount)
            group.mkdir(parents=True, exist_ok=True)
            for file, text in _limit_files(field, value, unified=_is_unified(mount)).items():
                (group / file).write_text(text)
            for process in processes:
                (group / "cgroup.procs").write_text(str(process))
    except OSError as error:
        raise SandboxError(f"cannot set the resource limits in {error.filename or mount}: {error.strerror}") from error


def remove_group(name: str, mount: Path = MOUNT) -> None:
    """Remove a sandbox's groups, which must not contain any processes. A group that cannot be removed is left behind."""
    for controller in CONTROLLER.values():
        with suppress(OSError):
            (mount / GROUP / name if _is_unified(mount) else mount / controller / GROUP / name).rmdir()


def _is_unified(mount: Path) -> bool:
    """Return whether the control groups are version 2, which has one tree for all controllers."""
    return (mount / "cgroup.controllers").exists()


def _limits_by_field(limits: Resources) -> dict[str, float]:
    limits_by_field = {"cpus": limits.cpus, "memory_mb": limits.memory_mb, "pids": limits.pids}
    return {field: value for field, value in limits_by_field.items() if value is not None}


def _create_group(name: str, controller: str, mount: Path) -> Path:
    if not _is_unified(mount):
        return mount / controller / GROUP / name
    (mount / GROUP).mkdir(exist_ok=True)
    for parent in (mount, mount / GROUP):  # a group can only use the controllers that its ancestors enable
        (parent / "cgroup.subtree_control").write_text(f"+{controller}")
    return mount / GROUP / name


def _limit_files(field: str, value: float, *, unified: bool) -> dict[str, str]:
    """Return the control files that set a limit, each with the content to write."""
    quota, size = str(int(value * PERIOD_US)), str(int(value) << 20)
    if field == "pids":
        return {"pids.max": str(int(value))}
    if field == "cpus":
        if unified:
            return {"cpu.max": f"{quota} {PERIOD_US}"}
        return {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": quota}
    return {"memory.max": size, "memory.swap.max": "0"} if unified else {"memory.limit_in_bytes": size}
