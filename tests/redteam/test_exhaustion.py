"""A hostile agent tries to use up the machine, to outlive its sandbox, and to plant files for the host to copy.

Each table names what the agent does. The control does the same without the wall, and succeeds.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.kit import say
from tests.rollout.kit import open_harness
from tests.sandboxes import kit
from tests.speed import scaled
from tests.tasks.grading.kit import write_files
from turngate.errors import SandboxError, SandboxTooLarge
from turngate.rollout import collect
from turngate.sandboxes import cgroups, disk, docker, door, supervisor
from turngate.sandboxes.base import Resources, SandboxSpec
from turngate.sandboxes.disk import FreeSpace

pytestmark = [pytest.mark.process, pytest.mark.promise(7)]

SANDBOXES = [
    pytest.param("local"),
    pytest.param("bubblewrap", marks=[pytest.mark.needs("bubblewrap"), pytest.mark.real]),
    pytest.param("docker", marks=[pytest.mark.needs("docker"), pytest.mark.full]),
]
NO_DOCKER = SANDBOXES[:2]


class Exhaustion(msgspec.Struct, frozen=True, kw_only=True):
    """A resource that an agent uses up. The code prints `took it all` if nothing stops it."""

    code: str
    limit: Resources
    control: Resources  # enough for the code

    @property
    def fields(self) -> set[str]:
        """The limits that need control groups."""
        return {name for name, value in msgspec.structs.asdict(self.limit).items() if value} - {"disk_mb", "open_files"}


FILES = "import os, resource, socket\n_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
FILES += "resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))\n"
DISK = {"limit": Resources(disk_mb=24), "control": Resources(disk_mb=1000)}
EXHAUSTION = {
    "memory": Exhaustion(
        code="x = bytearray(300_000_000)", limit=Resources(memory_mb=100), control=Resources(memory_mb=1000)
    ),
    "processes": Exhaustion(
        code="import os, time\nfor _ in range(100):\n    if os.fork() == 0:\n        time.sleep(600)",
        limit=Resources(pids=30),
        control=Resources(pids=300),
    ),
    "files": Exhaustion(
        code=FILES + "kept = [os.open('/dev/null', os.O_RDONLY) for _ in range(1500)]",
        limit=Resources(open_files=1000),
        control=Resources(open_files=2000),
    ),
    "sockets": Exhaustion(
        code=FILES + "kept = [socket.socketpair() for _ in range(2500)]",
        limit=Resources(),  # the default
        control=Resources(open_files=8000),
    ),
    "disk, with one file": Exhaustion(code="open('f', 'wb').truncate(100_000_000)", **DISK),
    "disk, with many files": Exhaustion(
        code="import os\nfor n in range(12):\n    open(f'f{n}', 'wb').write(os.urandom(4 << 20))", **DISK
    ),
    "disk, with deleted files": Exhaustion(
        code="import os\nkept = []\nfor n in range(12):\n    kept.append(open('f', 'wb', 0)); os.unlink('f')\n"
        "    kept[-1].write(os.urandom(4 << 20))",
        **DISK,
    ),
    "disk, in the home folder": Exhaustion(
        code="import os\nfor n in range(12):\n    open(os.path.expanduser(f'~/f{n}'), 'wb').write(os.urandom(4 << 20))",
        **DISK,
    ),
    "inodes": Exhaustion(code="for n in range(4000):\n    open(f'f{n}', 'w').close()", **DISK),
}


@pytest.fixture
def quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "CHECK_S", 0.05)
    # A slow Docker must not make Turngate kill the container instead of the command.
    monkeypatch.setattr(docker, "KILL_TIMEOUT_S", scaled(15))


async def take(
    root: Path, sandbox: str, code: str, resources: Resources, nap_s: float = 0.0
) -> tuple[bool, SandboxError | None]:
    """Run code in a sandbox with these limits. Return whether it took all it wanted, and the error of its disk.

    `nap_s` is how long it holds what it took, so that a watch has time to notice."""
    backend = kit.MAKE[sandbox](root)
    created, neighbor = await backend.create(SandboxSpec(resources=resources)), await backend.create(SandboxSpec())
    try:
        command = ["python3", "-c", f"{code}\nimport time; time.sleep({nap_s}); print('took it all')"]
        done = await created.exec(command, timeout_s=scaled(60), leave=False)
        assert (await neighbor.exec(["echo", "fine"])).stdout == b"fine\n"
        assert (await created.exec(["echo", "still usable"])).stdout == b"still usable\n"
        return b"took it all" in done.stdout, created.disk_error
    finally:
        await created.stop()
        await neighbor.stop()


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = Path(f"/tmp/tg-{os.urandom(4).hex()}")
    folder.mkdir(mode=0o700)
    yield folder
    leftovers = [path.name for path in folder.iterdir()]
    shutil.rmtree(folder)
    assert not leftovers, "sandboxes left folders behind"


@pytest.mark.sample(4)
@pytest.mark.usefixtures("quick_watch")
@pytest.mark.parametrize("resource", EXHAUSTION)
@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_resource_is_limited(sandbox: str, resource: str, root: Path) -> None:
    case = EXHAUSTION[resource]
    if sandbox != "local":
        kit.need(sandbox)
    if sandbox != "docker" and not case.fields <= cgroups.enforceable_limits():
        pytest.skip("this machine does not allow control groups")
    if sandbox == "docker" and resource == "inodes":
        pytest.skip("docker counts bytes only")
    is_watched = case.limit.disk_mb is not None and resource != "disk, with one file"  # which the kernel limits
    took_all, error = await take(root, sandbox, case.code, case.limit, nap_s=scaled(40) if is_watched else 0)
    assert not took_all
    assert isinstance(error, SandboxTooLarge) == is_watched, error


@pytest.mark.sample(4)
@pytest.mark.usefixtures("quick_watch")
@pytest.mark.parametrize("resource", EXHAUSTION)
async def test_resource_is_available_without_limit(resource: str, root: Path) -> None:
    assert await take(root, "local", EXHAUSTION[resource].code, EXHAUSTION[resource].control) == (True, None)


SHARED_MEMORY = "import os\ns = os.statvfs('/dev/shm')\nprint(s.f_blocks * s.f_frsize, os.access('/dev', os.W_OK))"


@pytest.mark.needs("bubblewrap")
@pytest.mark.real
async def test_shared_memory_is_limited(root: Path) -> None:
    """Without a limit, it would be half of the machine's memory; the control is the machine itself."""
    kit.need("bubblewrap")
    sandbox = await kit.MAKE["bubblewrap"](root).create(SandboxSpec())
    try:
        size, can_write = (await sandbox.exec(["python3", "-c", SHARED_MEMORY])).stdout.split()
        assert (int(size), can_write) == (disk.SHM_BYTES, b"False")
    finally:
        await sandbox.stop()
    outside = subprocess.run([sys.executable, "-c", SHARED_MEMORY], capture_output=True, check=True).stdout.split()
    assert int(outside[0]) != disk.SHM_BYTES and outside[1] == b"True"


# ── the disk, in rollouts ──

FILL = """
print(ask('Hi'))
for n in range(12):
    open(f'f{n}', 'wb').write(os.urandom(4 << 20))
time.sleep(float(os.environ['NAP_S']))
print(ask('Hi'))
"""


@pytest.mark.usefixtures("quick_watch")
@pytest.mark.parametrize("sandbox", NO_DOCKER)
async def test_full_disk_ends_rollout_with_clear_outcome(sandbox: str) -> None:
    if sandbox != "local":
        kit.need(sandbox)
    async with open_harness(lambda request, n: say("Hello.")) as harness:
        backend = kit.MAKE[sandbox](harness.root)
        greedy, other = (  # the second is the control: the same program within its limit
            harness.rollout(
                FILL, backend=backend, folder=harness.folder / name, resources=resources, env={"NAP_S": nap_s}
            )
            for name, resources, nap_s in (
                ("greedy", Resources(disk_mb=24), str(scaled(40))),
                ("other", Resources(), "0"),
            )
        )
        ended, finished = await asyncio.gather(greedy.run(), other.run())
        assert (ended.status, ended.stop, ended.turns) == ("limit", "disk_space", 1), ended
        assert any("its limit is 24 MB" in note for note in ended.notes)
        assert (finished.status, finished.stop, finished.turns) == ("finished", "", 2), finished


async def test_nearly_full_machine_is_not_the_agents_fault(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox that uses much disk space is stopped, so that others can go on, but its agent is not blamed."""
    full = FreeSpace(bytes=500 << 20, entries=1000)
    monkeypatch.setattr(FreeSpace, "read", lambda folder: full)
    monkeypatch.setattr(disk, "CHECK_S", 0.01)
    stopped: list[SandboxError] = []
    for used in (2 << 30, 100 << 20):  # the second is the control: it is small enough

        async def measure(used: int = used) -> int:
            return used

        async def stop(error: SandboxError) -> None:
            stopped.append(error)

        watch = disk.DiskWatch(root, 4 << 30, measure, stop)
        await asyncio.sleep(0.2)
        await watch.stop()
    assert {type(error) for error in stopped} == {SandboxError} and "only 500 MB left" in stopped[0].message
    assert all("uses 2048 MB" in error.message for error in stopped)


def test_deleted_files_and_hard_links_are_measured(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 1_000_000)
    once = disk.measure_folder(tmp_path)
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    assert 1_000_000 <= once == disk.measure_folder(tmp_path) < 1_100_000
    with (tmp_path / "c").open("wb") as file:
        file.write(b"x" * 3_000_000)
        file.flush()
        os.fsync(file.fileno())  # so that its blocks are allocated
        (tmp_path / "c").unlink()
        assert disk.measure_folder(tmp_path) == once
        assert disk.measure_folder(tmp_path, [os.getpid()]) >= once + 3_000_000


# ── sockets and logs ──

HOG = """
import socket
kept = []
for _ in range(300):
    connection = socket.create_connection(("127.0.0.1", int(URL.rpartition(":")[2])))
    connection.sendall(b"POST /v1/messages HTTP/1.1\\r\\nhost: x\\r\\ncontent-length: 100000\\r\\n\\r\\n")
    kept.append(connection)
print(len(kept), flush=True)
open("ready", "w").close()
time.sleep(3)
"""


async def test_agent_that_holds_connections_does_not_stop_others() -> None:
    async with open_harness(lambda request, n: say("Hello.")) as harness:
        hog = harness.rollout(HOG, folder=harness.folder / "hog")
        running = asyncio.create_task(hog.run())
        await kit.wait_until(lambda: list(harness.root.glob("*/work/ready")), within_s=30)
        outcome = await harness.run("print(ask('Hi'))", folder=harness.folder / "other")
        assert (outcome.status, outcome.collected.stdout) == ("finished", "Hello.\n")
        held = int((await running).collected.stdout)
        assert held > door.MAX_CONNECTIONS  # the attack took place


@pytest.mark.parametrize("limit", [1_000_000, 64_000_000])  # the second is the control
async def test_log_space_is_limited(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "_MAX_FILE_BYTES", limit)
    async with open_harness() as harness:
        outcome = await harness.run("sys.stdout.write('x' * 5_000_000); print('the end')")
        kept = (harness.folder / outcome.session / "stdout").read_bytes()
        assert len(kept) == min(limit, 5_000_008) and kept.endswith(b"the end\n")
        assert bool(outcome.collected.missing) == (limit < 5_000_000)


# ── outliving the sandbox ──

OUTLIVE = {
    "nohup": "nohup sleep {n} >/dev/null 2>&1 &",
    "its own session": "setsid -f sleep {n}",
    "a double fork": "(setsid sh -c '(exec sleep {n}) & exit' &)",
    "no environment": "env -i setsid -f sleep {n}",
    "no signals": "setsid -f sh -c \"trap '' HUP INT TERM QUIT; while :; do sleep {n}; done\"",
    "a stopped parent": "setsid -f sh -c 'sleep {n} & kill -STOP $$'",
    "an endless chain of forks": "setsid -f python3 -c 'import os, time\nwhile True:\n"
    "    if os.fork(): os._exit(0)\n    time.sleep(0.01)' {n}",
}


@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_no_process_outlives_sandbox(sandbox: str, root: Path) -> None:
    if sandbox != "local":
        kit.need(sandbox)
    number = str(int.from_bytes(os.urandom(4), "big") + 10**9)
    script = "\n".join(OUTLIVE.values()).replace("{n}", number) + "\nsleep 0.5"
    created = await kit.MAKE[sandbox](root).create(SandboxSpec())
    try:
        await created.exec(["/bin/sh", "-c", script], timeout_s=scaled(30))
        await kit.wait_until(lambda: len(kit.processes(number)) >= len(OUTLIVE))
    finally:
        await created.stop()
    await kit.wait_until(lambda: not kit.processes(number))


async def test_processes_outlive_plain_shell() -> None:
    """The control: each way outlives a shell whose session ends."""
    number = str(int.from_bytes(os.urandom(4), "big") + 10**9)
    script = "\n".join(OUTLIVE.values()).replace("{n}", number)
    argv = ["/bin/sh", "-c", f"{script}\necho started\nsleep 600"]
    shell = subprocess.Popen(argv, start_new_session=True, stdout=subprocess.PIPE)
    assert shell.stdout is not None
    try:
        assert await asyncio.to_thread(shell.stdout.readline) == b"started\n"
        await kit.wait_until(lambda: len(kit.processes(number)) > len(OUTLIVE))  # the shell's own arguments count, too
        os.killpg(shell.pid, signal.SIGHUP)
        shell.wait()
        await asyncio.sleep(0.2)
        assert len(kit.processes(number)) >= len(OUTLIVE)
    finally:
        shell.kill()
        shell.stdout.close()
        while supervisor.kill_all(lambda: kit.processes(number)):
            await asyncio.sleep(0.02)


# ── files for the host to copy ──

COPIED = {
    "a link to a file": "ln -s {folder}/secret leak",
    "a link to a folder": "ln -s {folder} leak",
    "a link through /proc": "ln -s /proc/self/root{folder}/secret leak",
    "a link upwards": "ln -s ../../../../../../../../../..{folder}/secret leak",
    "a chain of links": "ln -s {folder} first && ln -s first/secret leak",
    "a link in a folder": "mkdir a && ln -s {folder} a/leak",
}


def has_secret(folder: Path) -> bool:
    return any(b"of the host" in path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("sandbox", NO_DOCKER)
async def test_copied_files_lead_nowhere(sandbox: str, root: Path, tmp_path: Path) -> None:
    if sandbox != "local":
        kit.need(sandbox)
    write_files(tmp_path / "host", {"secret": "a secret of the host"})
    for n, (name, script) in enumerate(COPIED.items()):
        created = await kit.MAKE[sandbox](root).create(SandboxSpec())
        try:
            done = await created.exec(["/bin/sh", "-c", script.replace("{folder}", str(tmp_path / "host"))])
            assert done.exit_code == 0, done
            skipped = await created.download(created.workdir, tmp_path / str(n))
            assert skipped and not has_secret(tmp_path / str(n)), name
            naive = tmp_path / f"control-{n}"
            shutil.copytree(root / created.id / "work", naive)  # the control: it follows links
            assert has_secret(naive), name
        finally:
            await created.stop()


@pytest.mark.parametrize("sandbox", NO_DOCKER)
async def test_special_files_do_not_harm_host(sandbox: str, root: Path, tmp_path: Path) -> None:
    """Sparse files stay sparse, and pipes and devices are left out. The control is a plain copy of the same folder."""
    if sandbox != "local":
        kit.need(sandbox)
    created = await kit.MAKE[sandbox](root).create(SandboxSpec())
    try:
        await created.exec(["/bin/sh", "-c", "truncate -s 50M sparse; printf x >>sparse; mkfifo pipe; printf x >file"])
        skipped = await created.download(created.workdir, tmp_path / "copy")
        copy = (tmp_path / "copy" / "sparse").stat()
        assert copy.st_size == (50 << 20) + 1 and copy.st_blocks * 512 < 1_000_000
        assert (tmp_path / "copy" / "sparse").read_bytes().endswith(b"\0x")
        assert [line.partition(":")[0] for line in skipped] == ["./pipe"]
        work = root / created.id / "work"
        (tmp_path / "control").write_bytes((work / "sparse").read_bytes())
        assert (tmp_path / "control").stat().st_blocks * 512 >= 50_000_000
        with pytest.raises(shutil.Error, match="named pipe"):
            shutil.copytree(work, tmp_path / "naive")
    finally:
        await created.stop()


# ── links that replace files and folders while the host copies or measures them ──

SWAP = """
import os, sys
os.mkdir('folder'); open('folder/secret', 'w').write('mine'); open('file', 'w').write('mine')
os.symlink(sys.argv[1], 'folder.link'); os.symlink(sys.argv[1] + '/secret', 'file.link')
print('swapping', flush=True)
while True:
    for name in ('folder', 'file'):
        os.rename(name, name + '.real'); os.rename(name + '.link', name)
        os.rename(name, name + '.link'); os.rename(name + '.real', name)
"""


def copy_carelessly(source: Path, target: Path) -> None:
    """The control: check that a file is no link, and then copy it."""
    for name in ("file", "folder/secret"):
        with suppress(OSError):
            path = source / name
            if not path.is_symlink() and not path.parent.is_symlink():
                time.sleep(0.0002)
                target.mkdir(exist_ok=True)
                (target / name.replace("/", "-")).write_bytes(path.read_bytes())


@pytest.mark.parametrize("sandbox", NO_DOCKER)
async def test_link_swaps_lead_nowhere(sandbox: str, root: Path, tmp_path: Path) -> None:
    if sandbox != "local":
        kit.need(sandbox)
    write_files(tmp_path / "host", {"secret": "a secret of the host" * 1_000_000})
    created = await kit.MAKE[sandbox](root).create(SandboxSpec())
    work = root / created.id / "work"
    try:
        await created.start(["python3", "-c", SWAP, str(tmp_path / "host")], stdout="swapping")
        await kit.wait_until(lambda: (work / "swapping").exists() and (work / "swapping").read_bytes())
        for n in range(20):
            with suppress(SandboxError):  # a file may be missing for a moment
                await created.download(created.workdir, tmp_path / f"copy-{n}")
            assert not has_secret(tmp_path / f"copy-{n}")
        assert max([disk.measure_folder(work) for _ in range(200)]) < 1_000_000
        deadline = time.monotonic() + scaled(60)
        while not has_secret(tmp_path / "control") and time.monotonic() < deadline:
            copy_carelessly(work, tmp_path / "control")
        assert has_secret(tmp_path / "control")
    finally:
        await created.stop()


def test_measuring_does_not_follow_folder_that_becomes_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = write_files(tmp_path / "outside", {"deep/large": "x" * 8_000_000})
    inside = write_files(tmp_path / "inside", {"folder/deep/small": "x"})
    scandir = os.scandir

    def swap_after_scan(place: int | str) -> Any:
        found = list(scandir(place))
        if (inside / "folder" / "deep").exists() and any(entry.name == "deep" for entry in found):
            (inside / "folder").rename(inside / "was")
            (inside / "folder").symlink_to(outside)
        return nullcontext(found)

    monkeypatch.setattr(os, "scandir", swap_after_scan)
    assert disk.measure_folder(inside) < 1_000_000
    assert sum(path.stat().st_size for path in (inside / "folder" / "deep").iterdir()) == 8_000_000  # the control
