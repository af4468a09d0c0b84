"""A warm start cannot be told from a plain one, shares nothing between rollouts, and gives way to a plain start."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.sandboxes import kit, warm_kit
from tests.sandboxes.contract import Contract
from tests.sandboxes.warm_kit import WarmBackend, install
from tests.speed import scaled
from turngate.errors import SandboxError
from turngate.sandboxes import cgroups, warm_start
from turngate.sandboxes.base import Resources, Sandbox, SandboxSpec

pytestmark = pytest.mark.process

# Everything of a process that an agent could depend on, except for its identity and memory.
PORTRAIT = """
import builtins, gc, io, json, locale, os, resource, signal, site, socket, sys, tempfile, threading, warnings
import library
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines())
kept = ("Name Umask TracerPid Uid Gid FDSize Groups Threads SigPnd ShdPnd SigBlk SigIgn SigCgt CapInh CapPrm CapEff CapBnd CapAmb "
        "NoNewPrivs Seccomp Seccomp_filters Cpus_allowed").split()
main = sys.modules["__main__"]
print(json.dumps({
    "status": {name: status[name] for name in kept},
    "namespaces": [os.readlink("/proc/self/ns/" + name) for name in sorted(os.listdir("/proc/self/ns"))],
    "cgroup": open("/proc/self/cgroup").read(),
    "limits": open("/proc/self/limits").read(),
    "argv": sys.argv, "orig_argv": sys.orig_argv, "cmdline": open("/proc/self/cmdline").read(),
    "env": sorted(os.environ.items()), "environ": sorted(open("/proc/self/environ").read().split("\\0")),
    "cwd": os.getcwd(), "exe": os.readlink("/proc/self/exe"), "executable": sys.executable, "path": sys.path,
    "prefix": [sys.prefix, sys.base_prefix], "flags": str(sys.flags), "warnings": len(warnings.filters),
    "main": [main.__name__, main.__file__, main.__package__, main.__loader__ is None, sorted(set(dir(main)) - {"main"})],
    "streams": [[type(stream).__name__, stream.encoding, stream.errors, stream.line_buffering, stream.isatty(), stream.fileno()]
                for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "fds": sorted(os.listdir("/proc/self/fd")), "targets": [os.readlink(f"/proc/self/fd/{n}") for n in range(3)],
    "ids": [os.getpid() == os.getsid(0) == os.getpgid(0), os.nice(0), os.getuid(), os.getgid(), os.getgroups(), socket.gethostname()],
    "handlers": [str(signal.getsignal(n)) for n in range(1, 65)], "blocked": str(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "gc": gc.get_threshold(), "recursion": sys.getrecursionlimit(), "locale": locale.setlocale(locale.LC_ALL),
    "threads": [thread.name for thread in threading.enumerate()], "native": len(os.listdir("/proc/self/task")),
    "folders": [tempfile.gettempdir(), os.path.expanduser("~"), site.USER_SITE, site.USER_BASE, library.cwd, library.home],
    "dumpable": __import__("ctypes").CDLL(None).prctl(3, 0, 0, 0, 0), "mode": library.mode,
    "relative": os.path.exists("program.py"), "score": open("/proc/self/oom_score_adj").read(),
}))
"""


@pytest.fixture(autouse=True)
def no_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start every program warm, and end the servers of a test with it."""
    warm_start.close_servers()  # of earlier tests
    monkeypatch.setattr(warm_start, "PLAIN_STARTS", 0)
    warm_start.counts.clear()
    yield
    warm_start.close_servers()


@pytest.fixture(params=warm_kit.KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    kit.need(request.param)
    return str(request.param)


@pytest.fixture
def folder(root: Path) -> Iterator[Path]:
    """A folder for installations. A sandbox's root must be empty at the end, so it is next to it."""
    path = root.with_name(root.name + "-installed")
    path.mkdir()
    yield path
    subprocess.run(["rm", "-rf", str(path)], check=True)


@pytest.fixture
def backend(kind: str, root: Path, folder: Path) -> WarmBackend:
    return WarmBackend(kind, root, install(folder / "agent"))


@pytest.fixture
async def sandbox(backend: WarmBackend) -> AsyncIterator[Sandbox]:
    sandbox = await backend.create(SandboxSpec(env={"FROM_SPEC": "yes"}))
    try:
        yield sandbox
    finally:
        await sandbox.stop()


@pytest.mark.full
class TestContract(Contract):
    """A sandbox that belongs to a fork server fulfils the same contract."""


async def test_process_is_the_same_as_after_plain_start(backend: WarmBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    async def paint(setting: str) -> dict[str, object]:
        monkeypatch.setenv(warm_start.SETTING, setting)
        sandbox = await backend.create(SandboxSpec(env={"FROM_SPEC": "yes"}, resources=Resources(pids=100)))
        try:
            portrait = await backend.report(sandbox, PORTRAIT, {"KEY": "secret", "UNICODE": "ä\ufffd"})
            listed = await sandbox.exec(["/bin/sh", "-c", "readlink /proc/self/ns/*"])
            assert portrait.pop("namespaces") == listed.stdout.decode().split()
        finally:
            await sandbox.stop()
        assert isinstance(portrait, dict)
        return {key: re.sub(re.escape(sandbox.id), "ID", repr(value)) for key, value in portrait.items()}

    plain, warm = await paint("off"), await paint("on")
    assert warm_start.counts == {"warm": 1}
    assert warm == plain


async def test_nothing_is_shared_between_rollouts(backend: WarmBackend) -> None:
    program = """
import json, library, multiprocessing, os, random, secrets, ssl, tempfile, uuid
library.seen.append(os.getpid())
os.environ["LEFT"] = "behind"
print(json.dumps([len(library.seen), random.random(), secrets.token_hex(8), str(uuid.uuid4()), ssl.RAND_bytes(8).hex(),
      multiprocessing.current_process().authkey.hex(), tempfile.mkdtemp()[-8:], "LEFT" in os.environ.copy()]))
"""
    # `multiprocessing` makes its key, and OpenSSL its state, when they are imported.
    Path(backend.mounts[0].source, "library.py").write_text(warm_kit.LIBRARY + "import multiprocessing, ssl, uuid\n")
    reports = []
    for _ in range(3):
        sandbox = await backend.create()
        reports.append(await backend.report(sandbox, program))
        await sandbox.stop()
    assert warm_start.counts == {"warm": 3}
    for values in list(zip(*reports, strict=True))[1:-1]:
        assert len(set(values)) == 3, values
    assert [report[0] for report in reports] == [1, 1, 1]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("raise SystemExit('a message')", 1),
        ("def f():\n    raise ValueError('wrong')\nf()", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", 128 + signal.SIGTERM),
        ("raise KeyboardInterrupt", 128 + signal.SIGINT),
        ("import atexit; atexit.register(print, 'at the end'); file = open('late', 'w'); file.write('buffered')", 0),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()", 0),
        ("class Late:\n    def __del__(self): print('deleted')\nlate = Late()", 0),
        ("import sys; sys.stdout.write('no newline'); sys.stderr.write('e')", 0),
    ],
)
async def test_end_is_the_same_as_after_plain_start(
    root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, program: str, code: int
) -> None:
    backend = WarmBackend("local", root, install(folder / "agent"))

    async def end(setting: str) -> tuple[int, str, str]:
        monkeypatch.setenv(warm_start.SETTING, setting)
        sandbox = await backend.create()
        try:
            ended = await backend.run(sandbox, program)
            if "late" in program and "open" in program:
                assert await sandbox.read("late") == b"buffered"
        finally:
            await sandbox.stop()
        return ended[0], ended[1].replace(sandbox.id, "ID"), ended[2].replace(sandbox.id, "ID")

    plain, warm = await end("off"), await end("on")
    assert warm_start.counts == {"warm": 1}
    assert plain[0] == code
    if "KeyboardInterrupt" in program:  # Python itself prints its traceback, with two lines of ours
        plain, warm = (*plain[:2], ""), (*warm[:2], "")
    assert warm == plain


REFUSED = {
    "threads": "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "open files": "file = open('/etc/hostname')",
    "signal handlers": "import signal; signal.signal(signal.SIGUSR1, lambda *_: None)",
    "child processes": "import subprocess; child = subprocess.Popen(['sleep', '60'], close_fds=True)",
    "working folder": "import os; os.chdir('/usr')",
    "file mode mask": "import os; os.umask(0o077)",
    "wrote files": "import os; open(os.path.expanduser('~/cache'), 'w').close()",
    "whole environment": "import os; copy = dict(os.environ)",
    "stored the server's HOME": "import os; settings = {'cache': [os.path.expanduser('~/cache')]}",
    "prints": "print('Welcome!')",
    "import failed: ValueError": "raise ValueError('broken')",
    "ended during its imports": "import os; os._exit(3)",
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("fault", REFUSED)
async def test_import_with_side_effect_is_refused(root: Path, folder: Path, fault: str) -> None:
    backend = WarmBackend("local", root, install(folder / "agent", REFUSED[fault]))
    sandbox = await backend.create()
    try:
        assert (await backend.run(sandbox, "print('runs')"))[1].endswith("runs\n")  # plain
    finally:
        await sandbox.stop()
    assert len(warm_start.counts) == 1 and fault in next(iter(warm_start.counts)), warm_start.counts


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"MODE": "other"}, "MODE differs"),
        ({"PYTHONDONTWRITEBYTECODE": "1"}, "PYTHONDONTWRITEBYTECODE differs from its value in the fork server"),
        ({"LC_ALL": "C"}, "LC_ALL differs from its value in the fork server"),
        ({"HOME": "/usr"}, "HOME is not the sandbox's home folder"),
    ],
)
async def test_different_environment_needs_plain_start(
    root: Path, folder: Path, env: dict[str, str], reason: str
) -> None:
    backend = WarmBackend("local", root, install(folder / "agent"), {"MODE": "constant"})
    sandbox = await backend.create()
    try:
        program = "import json, library, sys; print(json.dumps([library.mode, sys.flags.dont_write_bytecode]))"
        mode, flag = await backend.report(sandbox, program, {"MODE": "constant", **env})
        assert (mode, flag) == (env.get("MODE", "constant"), "PYTHONDONTWRITEBYTECODE" in env)
        await backend.report(sandbox, program, {"MODE": "constant"})
    finally:
        await sandbox.stop()
    assert warm_start.counts["warm"] == 1 and any(found.startswith(reason) for found in warm_start.counts)


async def test_setting_is_checked(root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(warm_start.SETTING, "no")
    with pytest.raises(SandboxError, match="TURNGATE_WARM_STARTS must be on or off, not 'no'"):
        await WarmBackend("local", root, install(folder / "agent")).create()


async def test_packages_in_home_need_plain_start(root: Path, folder: Path) -> None:
    backend = WarmBackend("local", root, install(folder / "agent"))
    sandbox = await backend.create()
    try:
        version = "python{}.{}".format(*sys.version_info)
        await sandbox.write(f"{sandbox.home}/.local/lib/{version}/site-packages/own.py", b"x = 1")
        assert await backend.report(sandbox, "import own; print(own.x)") == 1
    finally:
        await sandbox.stop()
    assert warm_start.counts == {"HOME contains Python packages": 1}


async def test_variables_that_imports_set_are_set(backend: WarmBackend) -> None:
    Path(backend.mounts[0].source, "library.py").write_text(
        "import os\nos.environ['ADDED'] = 'yes'\nos.environ.pop('KEY', 0)\n"
    )
    sandbox = await backend.create()
    try:
        found = await backend.report(
            sandbox, "import json, os; print(json.dumps([os.environ['ADDED'], os.environ.get('OWN')]))", {"OWN": "1"}
        )
    finally:
        await sandbox.stop()
    assert found == ["yes", "1"]
    assert warm_start.counts == {"warm": 1}


# ── limits and ends ──


@pytest.mark.alone
async def test_limits_hold(backend: WarmBackend) -> None:
    if cgroups.enforceable_limits() != {"cpus", "memory_mb", "pids"}:
        pytest.skip("this machine does not allow control groups")
    sandbox = await backend.create(SandboxSpec(resources=Resources(memory_mb=100, pids=20)))
    try:
        assert (await backend.run(sandbox, "x = bytearray(500_000_000)"))[0] == 128 + signal.SIGKILL
        forks = """
import os, signal, time
children = []
try:
    while len(children) < 50:
        children.append(os.fork())
        if not children[-1]:
            time.sleep(60)
            os._exit(0)
except BlockingIOError:
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.wait()
print(len(children))
"""
        assert 5 < await backend.report(sandbox, forks) < 20
    finally:
        await sandbox.stop()
    assert warm_start.counts == {"warm": 2}


async def test_kill_ends_daemons_and_orphans(backend: WarmBackend, sandbox: Sandbox) -> None:
    nap = f"65{os.getpid():07d}"
    program = f"""
import os, signal, subprocess, time
subprocess.Popen(["setsid", "sleep", "{nap}"])
time.sleep(0.2)
os.kill(os.getppid(), signal.SIGKILL)  # its guard
time.sleep(60)
"""
    await sandbox.write("program.py", program.encode())
    job = await sandbox.start([warm_kit.PYTHON, backend.folder, f"{sandbox.workdir}/program.py"])
    await asyncio.wait_for(job.wait(), scaled(20))
    await job.kill()
    await kit.wait_until(lambda: not kit.processes(nap))
    assert (await sandbox.exec(["echo", "alive"])).stdout == b"alive\n"
    assert warm_start.counts == {"warm": 1}


async def test_killed_server_is_replaced(backend: WarmBackend) -> None:
    first = await backend.create()
    (server,) = warm_start._servers.values()
    os.kill(server.pid, signal.SIGKILL)
    await kit.wait_until(lambda: server.exit_code is not None)
    assert await backend.report(first, "print(1)") == 1  # plain
    second = await backend.create()
    assert await backend.report(second, "print(2)") == 2
    await first.stop()
    await second.stop()
    (other,) = warm_start._servers.values()
    assert other.pid != server.pid
    assert warm_start.counts == {"warm": 1, "the fork server failed: the fork server has exited": 1}


async def test_fork_waits_while_server_has_many_requests(backend: WarmBackend) -> None:
    sandbox = await backend.create()
    (server,) = warm_start._servers.values()
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(BlockingIOError):
            while True:
                server._control.send(b'{"do": "hold"}')
        running = asyncio.create_task(backend.report(sandbox, "print(1)"))
        await asyncio.sleep(0.5)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert await running == 1
    await sandbox.stop()
    assert warm_start.counts == {"warm": 1}


async def test_fork_does_not_wait_forever(backend: WarmBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "ANSWER_S", 1.0)
    sandbox = await backend.create()
    (server,) = warm_start._servers.values()
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(BlockingIOError):
            while True:
                server._control.send(b'{"do": "hold"}')
        assert await backend.report(sandbox, "print(1)") == 1  # plain
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await sandbox.stop()
    assert warm_start.counts == {"the fork server failed: no answer within 1 s": 1}


async def test_server_that_keeps_dying_is_given_up(root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "RESTARTS", 1)
    backend = WarmBackend("local", root, install(folder / "agent"))
    for _ in range(4):
        await (await backend.create()).stop()
        for server in warm_start._servers.values():
            if server.exit_code is None:
                os.kill(server.pid, signal.SIGKILL)
                await kit.wait_until(lambda server=server: server.exit_code is not None)
    assert warm_start.counts["the fork server has died too often"] == 2


def test_servers_of_a_process_are_closed_when_it_exits(root: Path, folder: Path) -> None:
    program = f"""
        import asyncio
        from pathlib import Path
        from tests.sandboxes.warm_kit import WarmBackend, install
        from turngate.sandboxes import warm_start

        async def start() -> None:
            await (await WarmBackend("local", Path({str(root)!r}), install(Path({str(folder / "agent")!r}))).create()).stop()

        warm_start.PLAIN_STARTS = 0
        asyncio.run(start())
        [server] = warm_start._servers.values()
        assert server.exit_code is None
        print(server.pid)
    """
    command = [sys.executable, "-X", "dev", "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=scaled(60))
    assert "ResourceWarning" not in ended.stderr
    assert not Path(f"/proc/{ended.stdout.strip()}").exists()


async def test_new_installation_has_new_server(root: Path, folder: Path) -> None:
    backend = WarmBackend("local", root, install(folder / "agent", "version = 1"))
    versions = []
    for version in (1, 2):
        if version == 2:
            (folder / "agent").rename(folder / "old")
            install(folder / "agent", "version = 2")
        sandbox = await backend.create()
        versions.append(await backend.report(sandbox, "import library; print(library.version)"))
        await sandbox.stop()
    assert versions == [1, 2]
    assert warm_start.counts == {"warm": 2}


async def test_idle_server_ends_and_held_server_stays(backend: WarmBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "IDLE_S", 0.2)
    sandbox = await backend.create()
    (server,) = warm_start._servers.values()
    await asyncio.sleep(0.6)
    assert server.exit_code is None
    await sandbox.stop()
    await kit.wait_until(lambda: server.exit_code == 0)
    again = await backend.create()  # an end for lack of work is no crash
    assert await backend.report(again, "print(1)") == 1
    await again.stop()
    assert warm_start.counts == {"warm": 1}


async def test_first_start_is_plain(root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "PLAIN_STARTS", 1)
    backend = WarmBackend("local", root, install(folder / "agent"))
    for _ in range(2):
        sandbox = await backend.create()
        assert await backend.report(sandbox, "print(1)") == 1
        await sandbox.stop()
    assert warm_start.counts == {"the first": 1, "warm": 1}


def test_server_ends_with_killed_owner(kind: str, root: Path, folder: Path) -> None:
    mark = f"66{os.getpid():07d}"
    install(folder / f"agent-{mark}")
    script = f"""
        import asyncio, sys
        from pathlib import Path
        from tests.sandboxes.warm_kit import PYTHON, WarmBackend
        from turngate.sandboxes import warm_start
        warm_start.PLAIN_STARTS = 0
        async def main():
            backend = WarmBackend({kind!r}, Path({str(root)!r}), Path({str(folder)!r}, "agent-{mark}"))
            sandbox = await backend.create()
            await sandbox.write("program.py", b"import time; print(flush=True); time.sleep({mark})")
            await sandbox.start([PYTHON, backend.folder, sandbox.workdir + "/program.py", "{mark}"])
            print(warm_start.counts["warm"], *[server.pid for server in warm_start._servers.values()], flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert owner.stdout is not None
    with owner.stdout as output:
        warm, pid = output.readline().split()
    assert int(warm) == 1 and kit.processes(mark)
    owner.kill()
    owner.wait()
    asyncio.run(kit.wait_until(lambda: not Path(f"/proc/{int(pid)}").exists() and not kit.processes(mark)))
    assert asyncio.run(kit.MAKE[kind](root).sweep()) >= 0


# ── the server is out of reach ──


@pytest.mark.needs("bubblewrap")
@pytest.mark.full
async def test_host_network_needs_plain_start(root: Path, folder: Path) -> None:
    kit.need("bubblewrap")
    backend = WarmBackend("bubblewrap", root, install(folder / "agent"))
    sandbox = await backend.create(SandboxSpec(network="open"))
    assert await backend.report(sandbox, "print(1)") == 1
    await sandbox.stop()
    assert warm_start.counts == {"the sandbox has the host's network": 1}


@pytest.mark.needs("bubblewrap")
@pytest.mark.full
async def test_server_is_confined_and_invisible(root: Path, folder: Path) -> None:
    """The server has no network, no privileges and no processes in sight, and an agent finds no trace of it."""
    kit.need("bubblewrap")
    library = """
import os, socket
facts = [os.listdir("/"), os.path.exists("/proc/self"), os.getuid(), [name for _, name in socket.if_nameindex()]]
for path in ("/usr/x", "/x", "/etc/x", "/opt/turngate/agent/x"):
    try: open(path, "w"); facts.append(path)
    except OSError: pass
"""
    backend = WarmBackend("bubblewrap", root, install(folder / "agent", library))
    sandbox = await backend.create()
    program = """
import glob, json, library, os
links = [os.readlink(path) for path in glob.glob(f"/proc/{os.getpid()}/fd/*") if os.path.islink(path)]
lines = [open(path).read() for path in glob.glob("/proc/[0-9]*/cmdline")]
print(json.dumps([library.facts, [link for link in links if "socket" in link], lines, open("/proc/net/unix").read()]))
"""
    (files, has_proc, user, interfaces, *written), sockets, lines, unix = await backend.report(sandbox, program)
    (server,) = warm_start._servers.values()
    status = Path(f"/proc/{server.pid}/status").read_text()
    await sandbox.stop()
    assert not has_proc and user == 1000 and interfaces == ["lo"] and not written
    assert "home" in files and "work" not in files and "sys" not in files
    assert re.search(r"CapEff:\t0+\n", status) and re.search(r"CapBnd:\t0+\n", status) and "NoNewPrivs:\t1" in status
    assert not sockets and len(unix.splitlines()) <= 2, (sockets, unix)
    assert len(lines) == 3  # the supervisor, the guard and the agent
    assert warm_start.counts == {"warm": 1}
