"""Regression tests for security holes: the keyring, escapes from `kill`, crafted folders, ended containers, full doors, tunnels."""

from __future__ import annotations

import asyncio
import ctypes
import io
import os
import select
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.sandboxes import kit
from tests.sandboxes.test_archive import FILE, HARD, LINK, PIPE, make_tar
from tests.sandboxes.upstream import send_raw, upstream
from tests.speed import scaled
from turngate.agents import install
from turngate.common import owner
from turngate.errors import AgentError, SandboxError, SandboxGone
from turngate.sandboxes import archive, docker, door, relay, seccomp, supervisor, tunnel
from turngate.sandboxes.base import Resources, SandboxSpec
from turngate.sandboxes.bubblewrap import BubblewrapBackend
from turngate.sandboxes.docker import DockerBackend

pytestmark = [pytest.mark.process, pytest.mark.alone]

# ── the kernel ──


@pytest.fixture
def key() -> Iterator[int]:
    """A key in the keyring of the current user."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = libc.syscall(248, b"user", b"turngate-test", b"secret", 6, -4)
    if number < 0 or os.uname().machine != "x86_64":
        pytest.skip("this machine has no keyring")
    yield number
    libc.syscall(250, 9, number, -4)


@pytest.mark.needs("bubblewrap")
@pytest.mark.full
async def test_bubblewrap_closes_keyrings_and_vsock(root: Path, key: int) -> None:
    kit.need("bubblewrap")
    script = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
for call in ((250, 1, None), (250, 11, int(sys.argv[1]), None, 0), (248, b"user", b"x", b"y", 1, -4), (425, 1, None), (321, 0, None, 0)):
    print(libc.syscall(*call), ctypes.get_errno())
for family in (40, 38):
    try:
        socket.socket(family, 1)
    except PermissionError:
        print("closed")
for name in ("keys", "key-users"):
    try:
        print(len(open("/proc/" + name).read()))
    except OSError:
        print(0)
socket.socket(socket.AF_UNIX), socket.socket(socket.AF_INET)
"""
    sandbox = await BubblewrapBackend(root).create(SandboxSpec())
    try:
        done = await sandbox.exec(["python3", "-c", script, str(key)], timeout_s=scaled(30))
    finally:
        await sandbox.stop()
    assert done.stdout.decode().split("\n") == ["-1 1"] * 5 + ["closed"] * 2 + ["0"] * 2 + [""], done


def test_missing_filter_is_reported_on_unknown_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(len(seccomp.build_filter(machine) or b"") % 8 == 0 for machine in seccomp.ARCHITECTURES)
    assert not [item for item in BubblewrapBackend().not_enforced(SandboxSpec()) if "keyring" in item]
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert seccomp.build_filter() is None
    assert [item for item in BubblewrapBackend().not_enforced(SandboxSpec()) if "keyring" in item]


# ── escapes from `kill` ──

ESCAPES = {
    "kills its guard": "kill -9 $PPID; exec sleep 77123",
    "stops its guard": "kill -STOP $PPID; exec sleep 77123",
    "leaves its environment and its parents": "env -i setsid sh -c 'sleep 77123 &' & sleep 0.5; exec sleep 77123",
    "clears its environment": "exec env -i sleep 77123",
}


@pytest.mark.parametrize("how", ESCAPES)
@pytest.mark.parametrize("name", kit.backends())
async def test_no_process_survives_kill(root: Path, name: str, how: str) -> None:
    kit.need(name)
    if name == "docker" and "guard" in how:
        pytest.skip("docker has no guard process")
    sandbox = await kit.MAKE[name](root).create(SandboxSpec())
    try:
        job_sleep, relay_sleep = (
            str(77_000_000 + 2 * (10 * list(kit.MAKE).index(name) + list(ESCAPES).index(how)) + n) for n in (0, 1)
        )
        other = await sandbox.start(["sleep", relay_sleep], env={"TURNGATE_ALONE": "1"})  # marked as a relay is
        job = await sandbox.start(["/bin/sh", "-c", ESCAPES[how].replace("77123", job_sleep)])
        ended = asyncio.create_task(job.wait())
        count = 2 if "parents" in how else 1
        await kit.wait_until(lambda: ended.done() or len(kit.processes(f"sleep\0{job_sleep}")) >= count)
        await kit.wait_until(lambda: kit.processes(f"sleep\0{relay_sleep}"))
        await asyncio.wait_for(job.kill(grace_s=0.5), scaled(30))
        assert await asyncio.wait_for(ended, scaled(5))
        assert not kit.processes(f"sleep\0{job_sleep}")
        assert kit.processes(f"sleep\0{relay_sleep}")
        await other.kill()
    finally:
        await sandbox.stop()


SLOW_GUARD = """
import json, os, runpy, signal, sys, time
supervisor = runpy.run_path(sys.argv[1])
write = os.write

def write_late(fd, data):
    if data == supervisor["STARTED"]:
        time.sleep(0.5)  # on a slow machine, the command runs first
    return write(fd, data)

os.write = write_late
reading, order = os.pipe()
write(order, b"{}")
os.close(order)
fds = [reading, *(os.open(os.devnull, os.O_RDWR) for _ in range(3)), 1]
guard = os.getpid()  # once it has ended, the parent of the command is another process
supervisor["run_guard"](fds, lambda *_: os.kill(guard, signal.SIGSTOP))
"""


def test_command_that_stops_its_guard_at_once_is_reported_as_started() -> None:
    command = [sys.executable, "-c", SLOW_GUARD, supervisor.__file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as guard:
        assert guard.stdout is not None
        ready, _, _ = select.select([guard.stdout], [], [], scaled(10))
        guard.kill()
        assert ready and guard.stdout.read() == supervisor.STARTED


SIGNALLED_COMMAND = """
import os, runpy, signal, sys
supervisor = runpy.run_path(sys.argv[1])
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the supervisor does

def run(order, *streams):
    os.kill(os.getpid(), signal.SIGTERM)  # the command was reported as started, but has not prepared its process
    supervisor["exec_command"](order, *streams)

reading, order = os.pipe()
os.write(order, b'{"command": ["true"], "env": {"PATH": "/usr/bin:/bin"}, "cwd": "/"}')
os.close(order)
supervisor["run_guard"]([reading, *(os.open(os.devnull, os.O_RDWR) for _ in range(3)), 1], run)
"""


def test_sigterm_ends_a_command_that_is_just_starting() -> None:
    command = [sys.executable, "-c", SIGNALLED_COMMAND, supervisor.__file__]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=scaled(30))
    assert done.stdout == supervisor.STARTED + b"%d\n" % (128 + signal.SIGTERM)


@pytest.mark.parametrize(
    ("events", "is_gone", "message"),
    [
        ("die\ndestroy\n", True, "was not stopped from outside"),
        ("kill\ndie\ndestroy\n", False, "container was stopped from outside"),
        ("stop\ndie\n", False, "container was stopped from outside"),
        ("", False, "Docker's events do not show why"),
    ],
)
async def test_only_a_container_stopped_from_outside_is_a_fault(
    root: Path, monkeypatch: pytest.MonkeyPatch, events: str, is_gone: bool, message: str
) -> None:
    """Docker removes a container that has ended, so its event "destroy" does not show who ended it."""

    async def list_events(*arguments: str) -> str:
        return events

    monkeypatch.setattr(docker, "run_docker", list_events)
    error = await docker.DockerSandbox(root / "one", {}, root)._explain_end()
    assert isinstance(error, SandboxGone) == is_gone and message in error.message


# ── downloads ──


def test_hard_links_do_not_count_towards_limit(tmp_path: Path) -> None:
    many = [(f"l{n}", HARD, "a") for n in range(50)]
    archive.unpack(make_tar(("a", FILE, b"x" * 1000), *many), tmp_path / "out", limit=1000)
    assert (tmp_path / "out" / "a").stat().st_nlink == 51


def test_invalid_links_are_skipped_and_named(tmp_path: Path) -> None:
    members = [("p", PIPE, ""), ("p2", HARD, "p"), ("s", LINK, "good"), ("d/s2", HARD, "s"), ("up", LINK, "d/x")]
    skipped = archive.unpack(
        make_tar(*members, ("n", HARD, "none"), ("e", HARD, "."), ("good", FILE, b"x")), tmp_path, limit=9
    )
    assert sorted(os.listdir(tmp_path)) == ["d", "good", "s", "up"]
    assert [line.partition(":")[0] for line in skipped] == ["p", "n", "e"]


def craft_header(kind: bytes, size: int) -> io.BytesIO:
    header = tarfile.TarInfo("p")
    header.type, header.size = kind, size
    return io.BytesIO(header.tobuf(tarfile.USTAR_FORMAT) + bytes(5000))


def test_huge_headers_are_refused(tmp_path: Path) -> None:
    for kind in (b"x", b"L", b"K", b"X"):
        with pytest.raises(SandboxError, match=r"was not copied completely"):
            archive.unpack(craft_header(kind, 2_000_000), tmp_path, limit=10**9)
    for kind in (b"g", b"S"):
        with pytest.raises(SandboxError, match=r"was not copied completely"):
            archive.unpack(craft_header(kind, 10), tmp_path, limit=10**9)


@pytest.mark.parametrize("pax", [{"path": "a\0b"}, {"size": "-1"}, {"linkpath": ""}, {"mtime": "x"}, {"path": ""}])
def test_crafted_stream_raises_only_sandbox_errors(pax: dict[str, str], tmp_path: Path) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        entry = tarfile.TarInfo("x")
        entry.type, entry.pax_headers = tarfile.LNKTYPE if "linkpath" in pax else tarfile.REGTYPE, pax
        tar.addfile(entry)
    for data in (stream.getvalue(), tarfile.TarInfo("p").tobuf()[:156] + b"L" * 4000):
        with suppress(SandboxError):
            archive.unpack(io.BytesIO(data), tmp_path / "out", limit=1000)


def test_unpacking_has_deadline_and_can_be_cancelled(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="longer"):
        archive.unpack(make_tar(("a", FILE, b"x")), tmp_path, limit=9, timeout_s=-1)
    with pytest.raises(SandboxError, match="cancelled"):
        archive.unpack(make_tar(("a", FILE, b"x")), tmp_path, limit=9, is_cancelled=lambda: True)


@pytest.mark.needs("bubblewrap")
@pytest.mark.full
async def test_unreadable_file_does_not_fail_download(root: Path, tmp_path: Path) -> None:
    kit.need("bubblewrap")
    sandbox = await BubblewrapBackend(root).create(SandboxSpec())
    try:
        await sandbox.exec(["/bin/sh", "-c", "echo good >good; echo x >x; mkdir d; chmod 000 x d; mkfifo a; ln a b"])
        skipped = await sandbox.download(sandbox.workdir, tmp_path / "out")
    finally:
        await sandbox.stop()
    assert (tmp_path / "out" / "good").read_text() == "good\n"
    assert any("./x" in line for line in skipped) and any("./d" in line for line in skipped)


DEEP = """
import os
for _ in range(1400):
    os.mkdir("a"); os.chdir("a"); open("f", "w").close()
os.chmod(".", 0)
"""


@pytest.mark.parametrize("name", kit.backends("local", "bubblewrap"))
async def test_deep_folder_is_partly_downloaded_and_removed(root: Path, name: str, tmp_path: Path) -> None:
    kit.need(name)
    sandbox = await kit.MAKE[name](root).create(SandboxSpec())
    try:
        done = await sandbox.exec(["python3", "-c", DEEP], timeout_s=scaled(30))
        assert not done.exit_code, done
        async with asyncio.timeout(scaled(30)):
            skipped = await sandbox.download(sandbox.workdir, tmp_path / "out", exclude=[".git"])
        assert any("folders deep" in line for line in skipped)
        assert (tmp_path / "out" / "a" / "a" / "f").exists()
        await sandbox.upload(tmp_path / "out", f"{sandbox.home}/again")
    finally:
        await asyncio.wait_for(sandbox.stop(), scaled(30))
    assert not list(root.iterdir())


# ── docker ──


FORK_BOMB = """
import os, time
while True:
    try:
        if os.fork() == 0:
            time.sleep(600)
    except OSError:
        pass  # the limit is reached; try again at once
"""


@pytest.mark.needs("docker")
@pytest.mark.full
async def test_fork_bomb_is_killed_without_its_container(root: Path) -> None:
    """`docker exec` cannot fork in a container that has reached its limit of processes."""
    kit.need("docker")
    sandbox = await DockerBackend(root).create(SandboxSpec(resources=Resources(pids=12)))
    try:
        job = await sandbox.start(["python3", "-c", FORK_BOMB, "bomb-4203"])
        await kit.wait_until(lambda: len(kit.processes("bomb-4203")) >= 10)
        await job.kill()
        assert (await sandbox.exec(["echo", "still usable"])).stdout == b"still usable\n"
    finally:
        await sandbox.stop()


@pytest.mark.needs("docker")
@pytest.mark.full
async def test_agent_that_ends_its_container_gets_exit_code(root: Path) -> None:
    kit.need("docker")
    sandbox = await DockerBackend(root).create(SandboxSpec())
    try:
        job = await sandbox.start(["/bin/sh", "-c", "kill 1; sleep 0.2; exit 1"])
        async with asyncio.timeout(scaled(30)):
            assert await job.wait() in (1, 137)
            with pytest.raises(SandboxError):  # once the container has ended
                while True:
                    await sandbox.exec(["true"])
        await job.kill()
    finally:
        await sandbox.stop()


@pytest.mark.needs("docker")
@pytest.mark.full
async def test_failing_build_shows_last_lines_and_leaves_nothing(root: Path, tmp_path: Path) -> None:
    kit.need("docker")
    (tmp_path / "Dockerfile").write_text(
        "FROM turngate-base:bookworm\nRUN printf '\\033[31mred-77\\033[0m\\n'; exit 3\n"
    )
    ids = ["docker", "ps", "--all", "--quiet", "--no-trunc"]
    before = set(subprocess.run(ids, capture_output=True, check=True).stdout.split())
    with pytest.raises(SandboxError, match="last lines") as caught:
        await DockerBackend(root).create(SandboxSpec(dockerfile=str(tmp_path)))
    assert "\x1b" not in caught.value.message
    leftovers = set(subprocess.run(ids, capture_output=True, check=True).stdout.split()) - before
    assert not leftovers


# ── the door ──


async def test_large_body_for_unknown_path_is_refused_unread() -> None:
    async with upstream() as gateway, door.open_door(gateway.url) as opened_door:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(opened_door.address.rpartition(":")[2]))
        writer.write(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 60000000\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), scaled(5))).startswith(b"HTTP/1.1 404")
        assert opened_door.refused == 1
        writer.close()


async def test_door_limits_connections_bodies_and_silence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(door, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(door, "MAX_BODY_BYTES", 100_000)
    monkeypatch.setattr(door, "STALL_S", scaled(0.5))
    head = "POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n"
    async with upstream() as gateway, door.open_door(gateway.url, folder=tmp_path) as opened_door:
        slow = [await asyncio.open_unix_connection(str(opened_door.socket)) for _ in range(2)]
        slow[0][1].write(head.format(90_000).encode())
        await asyncio.sleep(0.1)
        reply = await send_raw(0, head.format(20_000) + "x" * 20_000, path=opened_door.socket)
        assert reply.startswith(b"HTTP/1.1 503") and b"x-turngate" not in reply  # so a relay retries
        slow.append(await asyncio.open_unix_connection(str(opened_door.socket)))
        await asyncio.sleep(0.1)
        assert (await send_raw(0, "", path=opened_door.socket)).startswith(b"HTTP/1.1 503")
        assert (await asyncio.wait_for(slow[0][0].readline(), scaled(5))).startswith(b"HTTP/1.1 408")
        assert await asyncio.wait_for(slow[1][0].read(), scaled(5)) == b""  # an idle connection is closed
        assert (await send_raw(0, head.format(2) + "ok", path=opened_door.socket)).startswith(b"HTTP/1.1 200")
        for _, writer in slow:
            writer.close()
    assert relay.HttpRelay(lambda: "").max_connections > 1_000_000  # no limit in a sandbox


# ── tunnels, installations, owners ──


async def test_tunnel_ends_with_its_owner() -> None:
    script = """
import asyncio
from turngate.sandboxes import tunnel
async def main():
    async with tunnel.open_tunnel("sh -c 'echo http://abc.example; (setsid sleep 77125 &); exec sleep 77125'", "http://127.0.0.1:9"):
        print("up", flush=True)
        await asyncio.sleep(3600)
asyncio.run(main())
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert child.stdout
    assert await asyncio.to_thread(child.stdout.readline) == b"up\n"
    await kit.wait_until(lambda: len(kit.processes("sleep\x0077125")) == 2)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    await kit.wait_until(lambda: not kit.processes("sleep\x0077125"))


def test_tunnel_command_sees_only_its_own_secrets() -> None:
    env = {"PATH": "p", "TURNGATE_ADMIN_KEY": "a", "OPENAI_API_KEY": "b", "NGROK_AUTHTOKEN": "c", "TUNNEL_TOKEN": "d"}
    assert set(tunnel.filter_environment("/usr/bin/ngrok", env)) == {"PATH", "NGROK_AUTHTOKEN", "TUNNEL_TOKEN"}
    assert set(tunnel.filter_environment("ssh", env)) == {"PATH", "TUNNEL_TOKEN"}


def test_install_command_sees_no_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("OPENAI_API_KEY", "TURNGATE_ADMIN_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret-77")
    monkeypatch.setenv("npm_config_registry", "registry-77")
    with pytest.raises(AgentError) as caught:
        install._run_command("look", ["sh", "-c", "env; exit 1"], scratch=tmp_path)
    assert "secret-77" not in caught.value.message and "registry-77" in caught.value.message


def test_host_id_includes_machine_id() -> None:
    current = owner.current_owner()
    if Path("/etc/machine-id").exists() and Path("/etc/machine-id").read_text().strip():
        assert "/" in current.host and Path("/etc/machine-id").read_text().strip() not in current.host
    assert not owner.Owner(current.host.partition("/")[0] + "/other", "x", "y", 1, 1).gone
