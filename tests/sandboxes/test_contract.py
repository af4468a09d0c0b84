"""Every local backend fulfils the contract and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.sandboxes import kit
from tests.sandboxes.contract import Contract, wait_until_ended
from tests.speed import scaled
from turngate.errors import SandboxError, SandboxUnavailable
from turngate.sandboxes import BACKENDS, folders, get_backend
from turngate.sandboxes.base import Backend, SandboxSpec

pytestmark = pytest.mark.process


class TestContract(Contract):
    pass


def test_backends_by_name() -> None:
    assert set(BACKENDS) >= {"local", "bubblewrap", "docker"}
    for name in ("local", "bubblewrap", "docker"):
        assert get_backend(name).name == name
    with pytest.raises(SandboxUnavailable, match="local, bubblewrap, docker"):
        get_backend("nowhere")


async def test_available_backend_passes_check(backend: Backend) -> None:
    await backend.check()


async def test_missing_program_error_names_package(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend.name == "local":
        pytest.skip("needs no program")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailable, match="apt-get install"):
        await backend.check()
    with pytest.raises(SandboxUnavailable, match="apt-get install"):
        await backend.create(SandboxSpec())


async def test_many_sandboxes_leave_nothing_behind(backend: Backend, root: Path) -> None:
    async def use_sandbox(n: int) -> None:
        sandbox = await backend.create(SandboxSpec())
        await sandbox.start(["/bin/sh", "-c", f"(setsid sleep 41{n:02} &); sleep 41{n:02}"])
        assert (await sandbox.exec(["echo", "x"])).stdout == b"x\n"
        await sandbox.stop()

    await use_sandbox(99)  # create everything that is created only once
    before = len(os.listdir("/proc/self/fd"))
    for batch in range(2):
        await asyncio.gather(*(use_sandbox(batch * 4 + n) for n in range(4)))
    await kit.wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert not [pid for n in range(8) for pid in kit.processes(f"sleep\x0041{n:02}")]
    assert not list(root.iterdir())


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.05, 0.1, 0.3, 0.6])
async def test_cancelled_creation_leaves_nothing_behind(backend: Backend, root: Path, after_s: float) -> None:
    task = asyncio.create_task(backend.create(SandboxSpec()))
    await asyncio.sleep(after_s)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await (await task).stop()  # the creation finished first
    assert not list(root.iterdir())
    assert not kit.processes(str(root))


async def test_cancelled_stop_still_stops(backend: Backend, root: Path) -> None:
    sandbox = await backend.create(SandboxSpec())
    task = asyncio.create_task(sandbox.stop())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not list(root.iterdir())


async def test_sandbox_ends_after_its_life(backend: Backend) -> None:
    sandbox = await backend.create(SandboxSpec(life_s=scaled(1)))
    try:
        job = await sandbox.start(["sleep", "4201"])
        assert await asyncio.wait_for(job.wait(), scaled(20)) == 137
        with pytest.raises(SandboxError):
            await sandbox.exec(["true"])
        await kit.wait_until(lambda: not kit.processes("sleep\x004201"))
    finally:
        await sandbox.stop()


OWNER = """
import asyncio, sys
from pathlib import Path
from tests.sandboxes import kit
from turngate.sandboxes.base import SandboxSpec

async def main():
    sandbox = await kit.MAKE[sys.argv[1]](Path(sys.argv[2])).create(SandboxSpec())
    await sandbox.start(["/bin/sh", "-c", "(setsid sleep " + sys.argv[3] + " &); env -i setsid sleep " + sys.argv[3]])
    await kit.wait_until(lambda: len(kit.processes("sleep\\0" + sys.argv[3])) >= 2)
    print("ready", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


async def test_sweep_removes_sandboxes_of_killed_owner(backend: Backend, root: Path) -> None:
    seconds = {"local": "4301", "bubblewrap": "4302", "docker": "4303"}[backend.name]
    command = [sys.executable, "-c", OWNER, backend.name, str(root), seconds]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert owner.stdout
    assert await asyncio.to_thread(owner.stdout.readline) == b"ready\n"
    owner.stdout.close()
    assert kit.processes(f"sleep\x00{seconds}")
    assert await backend.sweep() == 0  # the owner is alive
    assert kit.processes(f"sleep\x00{seconds}")
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    await backend.sweep()  # 0 if the supervisor was faster
    await kit.wait_until(lambda: not kit.processes(f"sleep\x00{seconds}"))
    await backend.sweep()
    assert await backend.sweep() == 0
    assert not list(root.iterdir())


async def test_sweep_after_owner_and_supervisor_were_killed(root: Path) -> None:
    backend = kit.MAKE["local"](root)
    command = [sys.executable, "-c", OWNER, "local", str(root), "4304"]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert owner.stdout
    assert await asyncio.to_thread(owner.stdout.readline) == b"ready\n"
    owner.stdout.close()
    for pid in {*kit.processes("supervisor.py")} & {*kit.processes(str(root))}:
        os.kill(pid, signal.SIGKILL)
    owner.kill()
    owner.wait()
    assert await backend.sweep() == 1
    # Local has no isolation: a process that cleared its environment and lost its supervisor is not found.
    for pid in kit.processes("sleep\x004304"):
        os.kill(pid, signal.SIGKILL)


KILLED = """
import os, signal, sys
from pathlib import Path
from turngate.sandboxes import folders, supervisor

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[2] == "create":
    setattr(Path, sys.argv[3], die)
folder = folders.create_folder(Path(sys.argv[1]), "local", "work")
os.rmdir = die
supervisor.remove_folder(str(folder))
"""


@pytest.mark.parametrize("moment", [("create", "write_text"), ("create", "rename"), ("remove", "rmdir")])
async def test_sweep_removes_half_made_folders_of_killed_owner(root: Path, moment: tuple[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(root), *moment])
    assert done.returncode == -signal.SIGKILL
    (left,) = root.iterdir()
    await kit.MAKE["local"](root).sweep()
    assert not left.exists()


async def test_sweep_removes_old_unfinished_folders_of_older_versions(root: Path) -> None:
    """Before November 2026, the name of an unfinished folder did not contain its owner."""
    old, new = root / ".local-0123456789ab", root / ".local-ba9876543210"
    for folder in (old, new):
        folder.mkdir(parents=True, mode=0o700)
        (folder / "work").mkdir()
    os.utime(old, (0, time.time() - 2 * folders.STALE_S))
    await kit.MAKE["local"](root).sweep()
    assert [path.name for path in root.iterdir()] == [new.name]
    shutil.rmtree(new)


async def test_fork_bomb_is_killed_with_its_job(backend: Backend) -> None:
    sandbox = await backend.create(SandboxSpec())
    try:
        bomb = "n=0; while [ $n -lt 60 ]; do (setsid sh -c 'while :; do sleep 4305 & sleep 0.2; done' &); n=$((n+1)); done; wait"
        job = await sandbox.start(["/bin/sh", "-c", bomb])
        await kit.wait_until(lambda: len(kit.processes("sleep\x004305")) >= 100, within_s=20)
        await job.kill(grace_s=0)
        await asyncio.sleep(0.5)
        assert await wait_until_ended(sandbox, "sleep 4305")
    finally:
        await sandbox.stop()
    assert not kit.processes("sleep\x004305")
