"""An agent cannot reach the network, the host's files and processes, or other sandboxes, nor gain privileges."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.sandboxes import kit
from tests.sandboxes.contract import sh
from tests.speed import scaled
from turngate.errors import SandboxError
from turngate.sandboxes.base import Backend, Mount, Sandbox, SandboxSpec
from turngate.sandboxes.bubblewrap import BubblewrapBackend
from turngate.sandboxes.local import LocalBackend


@pytest.fixture(params=kit.backends(*kit.ISOLATED))
def backend(request: pytest.FixtureRequest, root: Path) -> Backend:
    kit.need(request.param)
    return kit.MAKE[request.param](root)


@pytest.fixture
def secret() -> Iterator[Path]:
    """A file in the host's /tmp that every user can read."""
    with tempfile.NamedTemporaryFile("w", prefix="secret-", delete=False) as file:
        file.write("secret of the host")
    path = Path(file.name)
    path.chmod(0o644)
    yield path
    path.unlink()


# ── network ──


async def test_network_is_unreachable(sandbox: Sandbox) -> None:
    """Neither services on the host's loopback nor addresses nor host names are reachable."""
    with socket.create_server(("0.0.0.0", 0)) as host:
        port = host.getsockname()[1]
        script = """
import socket, sys
for address in (("127.0.0.1", int(sys.argv[1])), ("1.1.1.1", 53), ("172.17.0.1", int(sys.argv[1])), ("example.com", 80)):
    try:
        socket.create_connection(address, timeout=3)
        print("reached", address)
    except OSError:
        pass
print([name for _, name in socket.if_nameindex()])
"""
        done = await sandbox.exec(["python3", "-c", script, str(port)], timeout_s=scaled(60))
        assert done.stdout.decode().splitlines() == ["['lo']"], done
        host.settimeout(0.1)
        with pytest.raises(TimeoutError):
            host.accept()


async def test_host_abstract_sockets_are_unreachable(sandbox: Sandbox) -> None:
    with socket.socket(socket.AF_UNIX) as host:
        host.bind("\0turngate-test")
        host.listen()
        script = "import socket; socket.socket(socket.AF_UNIX).connect('\\0turngate-test')"
        done = await sandbox.exec(["python3", "-c", script])
        assert b"ConnectionRefusedError" in done.stderr


async def test_commands_share_one_loopback(sandbox: Sandbox) -> None:
    job = await sandbox.start(["python3", "-m", "http.server", "--bind", "127.0.0.1", "8123"])
    try:
        assert "200" in await sh(
            sandbox,
            "curl -s --retry $1 --retry-connrefused --retry-delay 1 -o /dev/null -w '%{http_code}' 127.0.0.1:8123/",
            f"{scaled(20):.0f}",
        )
    finally:
        await job.kill()


# ── files and processes ──


async def test_host_files_are_unreadable(sandbox: Sandbox, secret: Path) -> None:
    this_file = str(Path(__file__).resolve())
    for path in (
        str(secret),
        this_file,
        str(Path.home() / ".cache" / "turngate"),
        f"/proc/{os.getpid()}/environ",
        "/etc/shadow",
    ):
        if path == "/etc/shadow" and (await sandbox.exec(["test", "-e", path])).exit_code == 0:  # the image's own
            continue
        done = await sandbox.exec(["cat", path])
        assert done.exit_code != 0, path
        assert b"secret of the host" not in done.stdout
    assert "work" not in (await sh(sandbox, "ls /")).split()
    assert str(secret.name) not in await sh(sandbox, "ls -A /tmp")


async def test_links_to_host_files_are_not_followed(sandbox: Sandbox, secret: Path, tmp_path: Path) -> None:
    """Not even the host's own reads and writes follow it."""
    await sh(
        sandbox, 'ln -s "$1" link && mkdir d && ln -s "$1" d/link && ln -s "$2" folder', str(secret), str(tmp_path)
    )
    with pytest.raises(SandboxError):
        await sandbox.read("link")
    await sandbox.download("d", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
    await sandbox.write("link", b"overwritten")
    assert secret.read_text() == "secret of the host"
    with pytest.raises(SandboxError):
        await sandbox.write("folder/file", b"x")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "file").write_text("x")
    with pytest.raises(SandboxError):
        await sandbox.upload(tmp_path / "in", "folder")
    assert not (tmp_path / "file").exists()


async def test_host_processes_are_invisible(sandbox: Sandbox) -> None:
    with subprocess.Popen(["sleep", "6201"]) as host_process:
        try:
            assert "6201" not in await sh(sandbox, "ps axww -o args")
            assert (await sandbox.exec(["/bin/sh", "-c", f"kill -0 {host_process.pid}"])).exit_code != 0
            await sandbox.exec(["/bin/sh", "-c", "kill -9 -1"], timeout_s=scaled(20))
            await asyncio.sleep(0.2)
            assert host_process.poll() is None
        finally:
            host_process.kill()


async def test_other_sandbox_is_unreachable(backend: Backend, sandbox: Sandbox) -> None:
    other = await backend.create(SandboxSpec(env={"KEY": "of the other"}))
    try:
        await other.write(f"{other.home}/private", b"of the other")
        await other.start(["sleep", "6202"])
        found = await sh(
            sandbox,
            "ps axww -o args; cat ~/private 2>/dev/null; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'; true",
        )
        assert "of the other" not in found
        assert "6202" not in found
        assert sandbox.shared and other.shared
        assert sandbox.shared[0] != other.shared[0]
        assert other.id not in await sh(
            sandbox, "find / -xdev -path /proc -prune -o -name '*shared*' -print 2>/dev/null; true"
        )
    finally:
        await other.stop()


# ── rights ──


async def test_system_is_read_only_and_unprivileged(sandbox: Sandbox) -> None:
    status = await sh(sandbox, "cat /proc/self/status")
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert f"{kind}:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    for path in ("/usr/bin/evil", "/etc/evil", "/evil", "/usr/lib/evil", f"{(sandbox.shared or (0, ''))[1]}/evil"):
        assert (await sandbox.exec(["touch", path])).exit_code != 0, path
    for command in ("mount -t tmpfs none /mnt", "unshare -U true", "chroot /", "mknod x b 8 0"):
        assert (await sandbox.exec(["/bin/sh", "-c", command])).exit_code != 0, command


async def test_kernel_settings_are_not_writable(sandbox: Sandbox) -> None:
    """`core_pattern` alone would allow running programs on the host as root."""
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    script = r"""
import os, stat
written = []
for place, folders, names in os.walk("/proc"):
    if place == "/proc":
        folders[:] = [name for name in folders if not name.isdigit() and name != "pressure"]  # to be told of pressure
    for name in names:
        path = os.path.join(place, name)
        if not stat.S_ISREG(os.lstat(path).st_mode):  # a cover
            continue
        try:
            os.close(os.open(path, os.O_WRONLY))
            written.append(path)
        except OSError:
            pass
print(written)
"""
    assert (await sandbox.exec(["python3", "-c", script])).stdout == b"[]\n"
    assert (await sandbox.exec(["/bin/sh", "-c", "echo x >/proc/sys/kernel/core_pattern"])).exit_code != 0
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before


async def test_mounts_are_read_only_by_default(backend: Backend, tmp_path: Path) -> None:
    for name in ("read, only", "write"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("of the host")
        (tmp_path / name).chmod(0o777)
    mounts = (
        Mount(str(tmp_path / "read, only"), "/mnt/read"),
        Mount(str(tmp_path / "write"), "/mnt/write", writable=True),
    )
    sandbox = await backend.create(SandboxSpec(mounts=mounts))
    try:
        assert await sh(sandbox, "cat /mnt/read/file /mnt/write/file") == "of the hostof the host"
        assert (await sandbox.exec(["touch", "/mnt/read/new"])).exit_code != 0
        await sh(sandbox, "echo x >/mnt/write/new")
        assert (tmp_path / "write" / "new").read_text() == "x\n"
    finally:
        await sandbox.stop()
    assert (tmp_path / "write" / "new").exists()
    with pytest.raises(SandboxError):
        await backend.create(SandboxSpec(mounts=(Mount("/no/such/folder", "/mnt/x"),)))


@pytest.mark.needs("bubblewrap")
@pytest.mark.full
async def test_supervisor_is_not_inspectable(root: Path) -> None:
    """The supervisor has the agent's user id."""
    kit.need("bubblewrap")
    sandbox = await BubblewrapBackend(root).create(SandboxSpec())
    try:
        for path in ("/proc/1/environ", "/proc/1/mem", "/proc/1/fd/0", "/proc/1/root/etc/passwd"):
            assert (await sandbox.exec(["cat", path])).exit_code != 0, path
        assert (await sandbox.exec(["/bin/sh", "-c", "kill -KILL 1; kill -STOP 1; kill -TERM 1"])).exit_code == 0
        assert await sh(sandbox, "echo alive") == "alive\n"
    finally:
        await sandbox.stop()


@pytest.fixture
async def as_nobody(root: Path) -> AsyncIterator[list[str]]:
    """The prefix that runs a command as an unprivileged user."""
    if os.geteuid() != 0:
        pytest.skip("this is already an unprivileged user")
    yield ["runuser", "-u", "nobody", "--"]


@pytest.mark.needs("bubblewrap")
@pytest.mark.full
async def test_bubblewrap_needs_no_root(as_nobody: list[str]) -> None:
    kit.need("bubblewrap")
    script = """
import asyncio, sys, tempfile
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from turngate.sandboxes.bubblewrap import BubblewrapBackend
from turngate.sandboxes.base import SandboxSpec
async def main():
    backend = BubblewrapBackend(Path(tempfile.mkdtemp()) / "root")
    await backend.check()
    sandbox = await backend.create(SandboxSpec())
    done = await sandbox.exec(["/bin/sh", "-c", "id -u; touch ~/x /workspace/y /tmp/z && mkdir ~/locked && chmod 0 ~/locked && echo done"])
    await sandbox.stop()
    print(done.stdout.decode().split(), list(backend.root.iterdir()))
asyncio.run(main())
"""
    # Uses a copy with the system's Python: other users may not be able to read this checkout.
    with tempfile.TemporaryDirectory() as folder:
        import msgspec

        for package in (Path(msgspec.__file__).parent, Path(__file__).parents[2] / "turngate"):
            subprocess.run(["cp", "-r", str(package), folder], check=True)
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        if not Path("/usr/bin/python3").exists():
            pytest.skip("no system Python that another user could run")
        done = subprocess.run(
            [*as_nobody, "/usr/bin/python3", "-c", script, folder], capture_output=True, text=True, cwd="/", check=False
        )
    assert done.stdout == "['1000', 'done'] []\n", done.stderr


# ── local ──


@pytest.mark.process
async def test_local_reports_what_it_does_not_enforce(root: Path) -> None:
    backend = LocalBackend(root)
    assert "network" in backend.not_enforced(SandboxSpec())
    assert backend.not_enforced(SandboxSpec(network="open")) == ()
    with pytest.raises(SandboxError, match="use the same path"):
        await backend.create(SandboxSpec(mounts=(Mount("/usr", "/elsewhere"),)))
    sandbox = await backend.create(SandboxSpec(mounts=(Mount("/usr", "/usr"),)))
    try:
        for folder in (sandbox.home, sandbox.workdir):
            assert Path(folder).stat().st_mode & 0o077 == 0
    finally:
        await sandbox.stop()


async def test_unsafe_root_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for root in ("open", "link"):
        with pytest.raises(SandboxError, match="chmod 700"):
            await LocalBackend(tmp_path / root).create(SandboxSpec())
