"""The host's side of a sandbox whose processes are managed by `supervisor.py`: local and bubblewrap.

Host and supervisor communicate only through a socket pair. If the owner is killed, its end closes and the supervisor kills everything.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from turngate.common.aio import run_to_completion
from turngate.errors import SandboxError, SandboxGone, SandboxStuck
from turngate.sandboxes import cgroups, folders, supervisor
from turngate.sandboxes.base import SandboxSpec
from turngate.sandboxes.posix import KILLED, PosixSandbox

SUPERVISOR = Path(supervisor.__file__)
START_S = 30.0
KILL_TIMEOUT_S = 10.0  # for killed processes to disappear


class SupervisedSandbox(PosixSandbox):
    """A sandbox with a host folder and a supervisor. `home`, `workdir` and `shared` are paths inside."""

    def __init__(self, folder: Path, env: Mapping[str, str], *, home: str, workdir: str, shared: str) -> None:
        self.folder = folder
        self.env = env
        self.home, self.workdir = home, workdir
        self._shared = shared
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._process: asyncio.subprocess.Process | None = None
        self._stopped = False

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def shared(self) -> tuple[Path, str] | None:
        return self.folder / "shared", self._shared

    async def launch(self, command: Sequence[str], spec: SandboxSpec, *rest: str, pass_fds: Sequence[int] = ()) -> None:
        """Start the supervisor by running `command` with the supervisor's arguments appended."""
        fd = self._theirs.fileno()
        log = self.folder / "supervisor.log"
        try:
            with log.open("wb") as out:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    str(fd),
                    str(spec.life_s),
                    *rest,
                    env={"PATH": os.defpath, folders.SANDBOX_ENV: self.id},
                    cwd="/",
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    pass_fds=(fd, *pass_fds),
                    start_new_session=True,
                )
        except OSError as error:
            raise SandboxError(f"cannot start the sandbox: {command[0]}: {error.strerror}") from error
        finally:
            self._theirs.close()
        try:
            async with asyncio.timeout(START_S):
                ready = await asyncio.get_running_loop().sock_recv(self._control, 64)
        except (OSError, TimeoutError):
            ready = b""
        if ready != b"ready":
            reason = log.read_text(errors="replace").strip()[-500:]
            raise SandboxError(f"the sandbox did not start: {reason or f'no response within {START_S:.0f} s'}")
        first = self._process.pid  # only bwrap and the supervisor are running at this point
        cgroups.apply_limits(self.id, spec.resources, [first, *supervisor.descendants(first)])

    async def spawn(
        self, command: Sequence[str], env: Mapping[str, str], cwd: str, stdin: int, stdout: int, stderr: int
    ) -> SupervisedJob:
        name = secrets.token_hex(8)
        order = {"command": list(command), "env": dict(env), "cwd": cwd}
        read_end, write_end = os.pipe()
        try:
            with tempfile.TemporaryFile() as file:  # an environment may be larger than one message
                file.write(json.dumps(order).encode())
                file.seek(0)
                await self.send({"job": name}, [file.fileno(), stdin, stdout, stderr, write_end])
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        return await SupervisedJob.start(self, name, read_end)

    async def send(self, message: Mapping[str, str | int], fds: Sequence[int] = ()) -> None:
        """Send a message to the supervisor."""
        while not self._stopped:
            try:
                socket.send_fds(self._control, [json.dumps(message).encode()], fds)
                return
            except BlockingIOError:
                await asyncio.sleep(0.01)
            except OSError:
                break
        raise SandboxGone("the sandbox has ended")

    async def stop(self) -> None:
        await run_to_completion(self._stop())

    async def _stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._control.close()  # makes the supervisor end
            self._theirs.close()
        if self._process:
            try:
                await asyncio.wait_for(self._process.wait(), KILL_TIMEOUT_S)
            except TimeoutError:
                with suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        await asyncio.to_thread(folders.remove_folder, self.folder)


class SupervisedJob:
    """A command. Its guard reports the start and the exit code through a pipe, which closes when all its processes have ended."""

    def __init__(self, sandbox: SupervisedSandbox, name: str) -> None:
        self._sandbox = sandbox
        self._name = name
        loop = asyncio.get_running_loop()
        self._started: asyncio.Future[bool] = loop.create_future()
        self._code: asyncio.Future[int] = loop.create_future()
        self._gone: asyncio.Future[None] = loop.create_future()

    @classmethod
    async def start(cls, sandbox: SupervisedSandbox, name: str, status: int) -> SupervisedJob:
        job = cls(sandbox, name)
        pipe = os.fdopen(status, "rb", 0)
        await asyncio.get_running_loop().connect_read_pipe(lambda: _StatusPipe(job), pipe)
        try:
            has_started = await asyncio.shield(job._started)
        except asyncio.CancelledError:
            await run_to_completion(job.kill(grace_s=0))
            raise
        if not has_started:
            raise SandboxGone("the sandbox has ended")
        return job

    def on_status(self, text: bytes) -> None:
        """Handle everything that the guard has written so far."""
        if not self._started.done():
            self._started.set_result(text.startswith(supervisor.STARTED))
        code = text[len(supervisor.STARTED) :]
        if code.endswith(b"\n") and not self._code.done():
            self._code.set_result(int(code) if code.strip().isdigit() else KILLED)

    def on_closed(self) -> None:
        if not self._started.done():
            self._started.set_result(False)
        if not self._code.done():
            self._code.set_result(KILLED)  # the guard was killed before it could report
        self._gone.set_result(None)

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    async def kill(self, grace_s: float = 2.0) -> None:
        # A process that has not been forked yet would not be found, and would keep running.
        await asyncio.wait([self._started], timeout=KILL_TIMEOUT_S)
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_TIMEOUT_S)):
            if wait_s and not self._gone.done():
                with suppress(SandboxError):  # the command ended with its sandbox
                    await self._sandbox.send({"job": self._name, "signal": int(number)})
                await asyncio.wait([self._gone], timeout=wait_s)
        if not self._gone.done():
            raise SandboxStuck(f"a process in the sandbox is still alive {KILL_TIMEOUT_S:.0f} s after it was killed")


class _StatusPipe(asyncio.Protocol):
    def __init__(self, job: SupervisedJob) -> None:
        self.job = job
        self.text = b""

    def data_received(self, data: bytes) -> None:
        self.text = (self.text + data)[:16]
        self.job.on_status(self.text)

    def connection_lost(self, error: Exception | None) -> None:
        self.job.on_closed()
