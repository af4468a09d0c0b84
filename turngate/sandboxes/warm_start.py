"""Warm starts: a Python agent is forked from a process that has already imported the agent's libraries (`fork_server.py`).

All sandboxes of the same kind that one Turngate process creates share one server per installation and environment. The first sandbox that
could use the server starts without it, because a single rollout would gain nothing. A server ends with the Turngate process that started
it, or after being idle for a while. A program that cannot be forked gets a plain start, which means that it starts without a server.
`counts` contains the number of warm starts, and the number of plain starts for each reason.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from turngate.errors import SandboxError
from turngate.sandboxes import fork_server, supervisor
from turngate.sandboxes.base import Preload

T = TypeVar("T")
log = logging.getLogger(__name__)

SETTING = "TURNGATE_WARM_STARTS"  # an environment variable: "on" (the default) or "off"
FORK_SERVER, SUPERVISOR = Path(fork_server.__file__), Path(supervisor.__file__)
PLAIN_STARTS = 1  # number of plain starts before a server is started
IMPORT_S = 60.0  # how long a server may take to import its modules
IDLE_S = 120.0  # a server exits after this time without sandboxes
EXIT_S = 5.0  # how long a server may take to exit before it is killed
ANSWER_S = 20.0  # how long a forked process may take to be ready
RESTARTS = 3  # how often a server that has died is started again
POLL_S = 0.02
# Variables that the interpreter or C libraries read unnoticed by the fork server. Their values must be the same as the server's.
START_VARIABLES = ("PYTHON", "LD_", "LC_", "LANG", "TZ", "MALLOC_", "GLIBC_", "OPENSSL_", "SSL_", "RUST_", "OMP_")
_CREDENTIALS = struct.Struct("3i")  # process, user and group

counts: Counter[str] = Counter()  # starts of this process: "warm", or the reason for a plain one


class ServerProcess(msgspec.Struct, frozen=True):
    """How to run a fork server. Paths are as the server sees them, unless stated otherwise."""

    command: tuple[str, ...]  # a socket's descriptor number is appended as the last argument
    env: Mapping[str, str]
    supervisor: str  # the file supervisor.py
    scratch: str  # a folder with the empty folders `home`, `tmp` and `work`
    folder: Path | None = None  # a folder on the host to remove after the imports
    pass_fds: tuple[int, ...] = ()  # descriptors for the server, closed once it has started


class ForkAnswer(msgspec.Struct, frozen=True):
    """The answer from a forked process: its id in its own namespace, or why it failed."""

    pid: int = 0
    error: str = ""


class ImportReport(msgspec.Struct, frozen=True):
    """A server's report on its imports: why it cannot serve, or the environment variables that the imports read, with their values."""

    fault: str
    reads: dict[str, str | None]


class ForkServer:
    """A running fork server. Its socket is used without an event loop, because batches in different loops share the server."""

    def __init__(self, preload: Preload, start: ServerProcess) -> None:
        self.fault = ""  # why the server cannot serve
        self.is_ready = False
        self.pid = 0
        self.namespace = -1  # a descriptor of the server's user namespace
        self._start = start
        self._reads: dict[str, str | None] = {}
        self._lock = threading.Lock()
        self._deadline = time.monotonic() + IMPORT_S
        self._log = os.memfd_create("fork-server", os.MFD_CLOEXEC)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._control.setblocking(False)
        try:
            self._process = subprocess.Popen(  # noqa: S603  our own program
                [*start.command, str(theirs.fileno())],
                env={**start.env, "HOME": f"{start.scratch}/home", "TMPDIR": f"{start.scratch}/tmp"},  # noqa: S108
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(), *start.pass_fds),
                start_new_session=True,
            )
        finally:
            theirs.close()
            for fd in start.pass_fds:
                os.close(fd)
        order = {
            "folder": preload.folder,
            "modules": preload.modules,
            "supervisor": start.supervisor,
            "scratch": start.scratch,
            "idle_s": IDLE_S,
        }
        self._send(order)

    @property
    def exit_code(self) -> int | None:
        """The exit code of the server: None while it is running, and 0 if it exited because it was idle."""
        return self._process.poll()

    async def wait_until_ready(self) -> bool:
        """Wait until the imports are done. Return whether the server can serve. If it cannot, `fault` says why."""
        while not (self.is_ready or self.fault):
            with self._lock:
                if not (self.is_ready or self.fault):
                    self._receive_report()
            if not (self.is_ready or self.fault):
                await asyncio.sleep(POLL_S)
        return not self.fault

    def _receive_report(self) -> None:
        try:
            text, pid = _receive(self._control)
        except BlockingIOError:
            if time.monotonic() > self._deadline:
                self._give_up(f"the fork server's imports took longer than {IMPORT_S:.0f} s")
            return
        except OSError:
            text, pid = b"", 0
        printed = os.pread(self._log, 500, 0).decode(errors="replace").strip()
        if not text:
            self._give_up(f"the fork server ended during its imports: {printed[-300:] or 'no output'}")
            return
        report = msgspec.json.decode(text, type=ImportReport)
        if fault := report.fault or (f"an import prints: {printed[:200]}" if printed else ""):
            self._give_up(fault)
        elif len(list(Path(f"/proc/{pid}/task").iterdir())) > 1:
            self._give_up("an import starts threads")
        else:
            self.pid, self._reads = pid, report.reads
            self.namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
            self.is_ready = True
            self._remove_scratch()

    def _give_up(self, fault: str) -> None:
        self.fault = fault
        self._process.kill()  # it has no children yet
        self.close()
        self._remove_scratch()

    def _remove_scratch(self) -> None:
        if self._start.folder is not None:
            supervisor.remove_folder(str(self._start.folder))

    def find_difference(self, env: Mapping[str, str]) -> str:
        """Return why a process with the environment `env` cannot be forked, or an empty string if it can."""
        for name, value in self._reads.items():
            if env.get(name) != value:
                return f"{name} differs from its value during the imports"
        for name in {*env, *self._start.env}:
            if name.startswith(START_VARIABLES) and env.get(name) != self._start.env.get(name):
                return f"{name} differs from its value in the fork server, and takes effect only when Python starts"
        return ""

    def hold(self) -> socket.socket:
        """Make the server ignore its limit on idle time until the returned socket is closed."""
        ours, theirs = socket.socketpair()
        with theirs, suppress(OSError):  # if the server has exited or is too busy, a later fork may fail
            self._send({"do": "hold"}, [theirs.fileno()])
        return ours

    async def fork(self, message: Mapping[str, object], fds: Sequence[int]) -> ForkedProcess:
        """Fork a process. Raise `ForkFailed` if the server cannot fork or the new process fails to start."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        ours.setblocking(False)
        deadline = time.monotonic() + ANSWER_S
        try:
            with theirs:
                try:
                    await _retry_while_blocked(lambda: self._send(message, [theirs.fileno(), *fds]), deadline)
                except ConnectionError as error:
                    raise ForkFailed("the fork server has exited") from error
                except OSError as error:
                    raise ForkFailed(f"the fork server cannot be reached ({error.strerror or error})") from error
            text, pid = await _retry_while_blocked(lambda: _receive(ours), deadline)
            answer = (
                msgspec.json.decode(text, type=ForkAnswer) if text else ForkAnswer(error="the forked process ended")
            )
            if answer.error:
                raise ForkFailed(answer.error)
            return ForkedProcess(pid, answer.pid, ours)
        except BaseException:
            ours.close()
            raise

    def _send(self, message: Mapping[str, object], fds: Sequence[int] = ()) -> None:
        socket.send_fds(self._control, [json.dumps(message).encode()], fds)

    def close(self) -> None:
        """Make the server exit, and release its resources."""
        if self._log < 0:
            return
        self._control.close()
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:  # it is stopped, or a process forked from this one still has the socket
            self._process.kill()
            self._process.wait()
        os.close(self._log)
        self._log = -1
        if self.namespace >= 0:
            os.close(self.namespace)


class WarmStart:
    """Lets a sandbox start one program from a fork server.

    Until this object is closed, the server ignores its limit on idle time.
    """

    def __init__(self, server: ForkServer, preload: Preload) -> None:
        self.server = server
        self.preload = preload
        self.namespace = os.dup(server.namespace)  # a descriptor of the user namespace, which outlives the server
        # A descriptor of the sandbox's first process; None if the program need not enter its namespaces.
        self.sandbox: int | None = None
        self._lease = server.hold()

    def matches(self, command: Sequence[str]) -> bool:
        return tuple(command[:2]) == (self.preload.python, self.preload.folder)

    def find_obstacle(self, env: Mapping[str, str], home: Path, inside: str) -> str:
        """Return why the program needs a plain start, or an empty string if it does not.

        `home` is the home folder's path on the host, and `inside` its path in the sandbox.
        """
        if env["HOME"] != inside:
            return "HOME is not the sandbox's home folder"
        if os.path.lexists(home / ".local" / "lib"):
            return "HOME contains Python packages"  # Python looks for them only when it starts
        return self.server.find_difference(env)

    def close(self) -> None:
        self._lease.close()
        for fd in (self.namespace, self.sandbox):
            if fd is not None and fd >= 0:
                os.close(fd)
        self.namespace, self.sandbox = -1, None


class ForkFailed(Exception):
    """A fork server could not fork a process, so the program gets a plain start. The reason is counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        count_plain(f"the fork server failed: {reason}")


class ForkedProcess:
    """A process that was forked by a fork server. It is not a child of this process."""

    def __init__(self, pid: int, inner_pid: int, handshake: socket.socket) -> None:
        self.pid = pid
        self.inner_pid = inner_pid  # the process's id in its own namespace
        self.handshake = handshake
        self._fd = os.pidfd_open(pid)

    async def wait(self) -> int:
        """Wait until the process has ended. Always return 0, because its exit code is unknown."""
        if self._fd >= 0:
            ended = asyncio.Event()
            loop = asyncio.get_running_loop()
            loop.add_reader(self._fd, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(self._fd)
        return 0

    def kill(self) -> None:
        signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.handshake.close()


async def _retry_while_blocked(call: Callable[[], T], deadline: float) -> T:
    """Repeat a call on a non-blocking socket until the socket is ready. Raise `ForkFailed` if it is not ready by the deadline."""
    while True:
        try:
            return call()
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ForkFailed(f"no answer within {ANSWER_S:.0f} s") from None
        await asyncio.sleep(0.002)


def _receive(control: socket.socket) -> tuple[bytes, int]:
    """Receive a message and the id of the process that sent it."""
    text, ancillary, _, _ = control.recvmsg(1 << 18, socket.CMSG_SPACE(_CREDENTIALS.size))
    return text, next(
        (_CREDENTIALS.unpack(data)[0] for _, kind, data in ancillary if kind == socket.SCM_CREDENTIALS), 0
    )


# ---- the servers of this process ----

_servers: dict[tuple[object, ...], ForkServer] = {}
_requests: Counter[tuple[object, ...]] = Counter()
_crashes: Counter[tuple[object, ...]] = Counter()


def is_enabled() -> bool:
    """Return whether agents may have warm starts. Raise `SandboxError` if the setting is neither on nor off."""
    setting = os.environ.get(SETTING) or "on"
    if setting not in ("on", "off"):
        raise SandboxError(f"{SETTING} must be on or off, not {setting!r}")
    return setting == "on"


async def find_server(
    kind: str, preload: Preload, source: Path, prepare: Callable[[Preload], ServerProcess]
) -> WarmStart | None:
    """Return a sandbox's `WarmStart`, or None for a plain start. `source` is the folder of the installation on the host."""
    if not is_enabled():
        return None
    try:
        status = (source / "__main__.py").stat()
    except OSError:
        return None
    # A new installation has new files, so the server of an older installation is never used.
    version = (str(source), status.st_dev, status.st_ino, status.st_mtime_ns)
    key = (os.getpid(), kind, *version, msgspec.json.encode(preload, order="sorted"))
    _requests[key] += 1
    if _requests[key] <= PLAIN_STARTS:
        counts["the first"] += 1
        return None
    server = _servers.get(key)
    if server is not None and server.is_ready and (code := server.exit_code) is not None:
        server.close()
        server = None
        _crashes[key] += code != 0
    if _crashes[key] > RESTARTS:
        count_plain("the fork server has died too often")
        return None
    if server is None:
        try:
            server = _servers[key] = ForkServer(preload, prepare(preload))
        except (OSError, SandboxError) as error:
            count_plain(f"the fork server did not start: {error}")
            return None
    if await server.wait_until_ready():
        return WarmStart(server, preload)
    count_plain(server.fault)
    return None


@atexit.register
def close_servers() -> None:
    """Make all servers of this process exit. Programs that they have already forked continue."""
    for key, server in _servers.items():
        if key[0] == os.getpid():  # the others belong to the process that this one was forked from
            server.close()
    _servers.clear()
    _requests.clear()


def count_plain(reason: str) -> None:
    """Count a plain start by its reason. The first plain start for each reason is logged."""
    counts[reason] += 1
    if counts[reason] == 1:
        log.warning("starting an agent without a fork server: %s", reason)
