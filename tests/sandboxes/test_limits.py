"""Limits of local and bubblewrap: enforced where the machine allows it, reported otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sandboxes import kit
from tests.speed import scaled
from turngate.sandboxes import cgroups
from turngate.sandboxes.base import Backend, Resources, SandboxSpec

pytestmark = [pytest.mark.process, pytest.mark.alone]

LIMITS = Resources(cpus=0.5, memory_mb=100, pids=30)
ALL = {"cpus", "memory_mb", "pids"}


@pytest.fixture(params=kit.backends("local", "bubblewrap"))
def backend(request: pytest.FixtureRequest, root: Path) -> Backend:
    kit.need(request.param)
    return kit.MAKE[request.param](root)


def groups(sandbox: str) -> list[Path]:
    """Return the control groups of one sandbox. Others on this machine may come and go."""
    return [path for path in cgroups.MOUNT.rglob(f"{cgroups.GROUP}/{sandbox}") if path.is_dir()]


async def test_limits_are_enforced(backend: Backend) -> None:
    if cgroups.enforceable_limits() != ALL:
        pytest.skip("this machine does not allow control groups")
    assert not set(backend.not_enforced(SandboxSpec(resources=LIMITS))) & ALL  # type: ignore[attr-defined]
    sandbox = await backend.create(SandboxSpec(resources=LIMITS))
    try:
        assert groups(sandbox.id)
        greedy = await sandbox.exec(["python3", "-c", "x = bytearray(500_000_000)"], timeout_s=scaled(60))
        assert greedy.exit_code == 137
        forks = await sandbox.exec(
            ["/bin/sh", "-c", "for i in $(seq 100); do sleep 5 & done; wait"], timeout_s=scaled(60)
        )
        assert b"annot fork" in forks.stderr
        full = await sandbox.exec(["true"])  # processes of the shell are still sleeping
        assert (full.exit_code, b"cannot fork" in full.stderr) in ((126, True), (0, False))
        await kit.wait_until(lambda: not kit.processes("sleep\x005\x00"), within_s=20)
        script = "import time; began = time.monotonic(); t = time.process_time\nwhile time.monotonic() - began < 2: pass\nprint(t())"
        used = float((await sandbox.exec(["python3", "-c", script], timeout_s=scaled(60))).stdout)
        assert used < 1.5
    finally:
        await sandbox.stop()
    assert not groups(sandbox.id)


def test_cgroup_v2_files(tmp_path: Path) -> None:
    """Uses plain folders in place of a real cgroup v2 hierarchy."""
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("")
    assert cgroups.enforceable_limits(tmp_path) == ALL
    cgroups.apply_limits("s1", LIMITS, [11, 12], tmp_path)
    group = tmp_path / "turngate" / "s1"
    found = {path.name: path.read_text() for path in group.iterdir()}
    assert found == {
        "cpu.max": "50000 100000",
        "memory.max": "104857600",
        "memory.swap.max": "0",
        "pids.max": "30",
        "cgroup.procs": "12",
    }
    assert (tmp_path / "turngate" / "cgroup.subtree_control").read_text() == "+pids"


def test_unenforced_limits_are_reported(tmp_path: Path) -> None:
    assert cgroups.enforceable_limits(tmp_path) == frozenset()
    assert set(cgroups.not_enforced(LIMITS, tmp_path)) == ALL
    assert cgroups.not_enforced(Resources(), tmp_path) == ()
    cgroups.apply_limits("s1", LIMITS, [1], tmp_path)  # does nothing
