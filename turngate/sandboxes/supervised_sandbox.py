"""The common part of the `local` and `bubblewrap` sandboxes: a supervisor starts their commands and sends signals to them.

The host sends its orders to the supervisor through a socket pair. If the process that owns the sandbox is killed, its end of the pair
closes, and the supervisor kills all processes of the sandbox.
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
from typing import Any

from turngate.common.aio import run_to_completion
from turngate.errors import SandboxError, SandboxGone, SandboxStuck
from turngate.sandboxes import cgroups, disk, folders, supervisor, warm_start
from turngate.sandboxes.base import DEFAULT_OPEN_FILES, DEFAULT_PIDS, STANDALONE_ENV, Job, Resources, SandboxSpec
from turngate.sandboxes.posix import KILLED, PosixSandbox, open_devnull, redirect
from turngate.sandboxes.warm_start import ForkedProcess, ForkFailed, ForkServer, WarmStart

SUPERVISOR = Path(supervisor.__file__)
START_S = 30.0
KILL_TIMEOUT_S = 10.0  # how long killed processes may take to disappear
OOM_SCORE = "500"  # if the machine runs out of memory, the kernel kills an agent's processes before the gateway


class Control:
    """The host's end of the socket pair to a supervisor. The supervisor ends when this end is closed."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._closed = False

    async def wait_until_ready(self) -> bool:
        """Wait until the supervisor reports that it is ready. Return False if it exits first or takes too long."""
        try:
            async with asyncio.timeout(START_S):
                return await asyncio.get_running_loop().sock_recv(self._ours, 64) == b"ready"
        except (OSError, TimeoutError):
            return False

    async def send(self, message: Mapping[str, str | int], fds: Sequence[int] = ()) -> None:
        """Send a message to the supervisor. Raise `SandboxGone` if it has ended."""
        while not self._closed:
            try:
                socket.send_fds(self._ours, [json.dumps(message).encode()], fds)
                return
            except BlockingIOError:
                await asyncio.sleep(0.01)
            except OSError:
                break
        raise SandboxGone("the sandbox has ended")

    def close(self) -> None:
        self._closed = True
        self._ours.close()
        self.theirs.close()


class SupervisedSandbox(PosixSandbox):
    """A sandbox with a host folder and a supervisor. The parameters `home`, `workdir` and `shared` are paths inside the sandbox."""

    def __init__(self, folder: Path, env: Mapping[str, str], *, home: str, workdir: str, shared: str) -> None:
        self.folder = folder
        self.env = env
        self.home, self.workdir = home, workdir
        self._shared = shared
        self._control = Control()
        self._process: asyncio.subprocess.Process | None = None
        self._spec = SandboxSpec()
        self._warm: WarmStart | None = None
        self._jobs: set[SupervisedJob] = set()  # jobs to kill if the disk limit is exceeded
        self._watch: disk.DiskWatch | None = None
        self.disk_error: SandboxError | None = None
        self._forked: list[tuple[Control, ForkedProcess]] = []  # additional supervisors, forked from a fork server

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def shared(self) -> tuple[Path, str] | None:
        return self.folder / "shared", self._shared

    async def launch(self, command: Sequence[str], spec: SandboxSpec, *rest: str, pass_fds: Sequence[int] = ()) -> None:
        """Start the supervisor by running `command` with the supervisor's arguments appended, and apply the limits of `spec`."""
        fd = self._control.theirs.fileno()
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
            self._control.theirs.close()
        if not await self._control.wait_until_ready():
            reason = (await asyncio.to_thread(log.read_text, errors="replace")).strip()[-500:]
            silent = f"its supervisor exited without a message, or was not ready within {START_S:.0f} s"
            raise SandboxError(f"the sandbox did not start: {reason or silent}")
        self._spec = spec
        first = self._process.pid  # only bwrap and the supervisor are running at this point
        self._limit([first, *supervisor.descendants(first)])
        self._watch = disk.DiskWatch(self.folder, self._disk_bytes, self._measure_disk, self._kill_commands)

    @property
    def _disk_bytes(self) -> int:
        return (self._spec.resources.disk_mb or disk.DEFAULT_DISK_MB) << 20

    def _limit(self, processes: Sequence[int]) -> None:
        """Apply the limits on CPU, memory and process count to `processes` and their future descendants.

        Also make the kernel prefer to kill these processes if the machine runs out of memory.
        """
        limits = self._spec.resources
        cgroups.apply_limits(self.id, limits, processes)
        with suppress(SandboxError):  # the spec does not require this limit
            if limits.pids is None:
                cgroups.apply_limits(self.id, Resources(pids=DEFAULT_PIDS), processes)
        for process in processes:
            with suppress(OSError):  # it has ended
                Path(f"/proc/{process}/oom_score_adj").write_text(OOM_SCORE)

    async def _measure_disk(self) -> int:
        processes = [self._process.pid] if self._process is not None else []
        processes += [process.pid for _, process in self._forked]
        return await asyncio.to_thread(
            lambda: disk.measure_folder(self.folder, [*processes, *supervisor.descendants(*processes)])
        )

    async def _kill_commands(self, error: SandboxError) -> None:
        """Kill all commands except standalone ones (`STANDALONE_ENV`), and record the reason as `disk_error`."""
        self.disk_error = error
        for job in list(self._jobs):
            await job.kill(grace_s=0)

    def use_server(self, warm: WarmStart, *, inside: bool) -> None:
        """Make `start` fork the preloaded program from a fork server. With `inside`, `start` forks it into the supervisor's namespaces."""
        assert self._process is not None
        self._warm = warm
        if inside:
            warm.sandbox = os.pidfd_open(supervisor.descendants(self._process.pid)[-1])

    async def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        stdout: str = "",
        stderr: str = "",
    ) -> Job:
        if self._warm is not None and self._warm.matches(command):
            full_env = self.build_env(env)
            if reason := self._warm.find_obstacle(full_env, self.folder / "home", self.home):
                warm_start.count_plain(reason)
            else:
                with suppress(ForkFailed):
                    return await self._start_warm(self._warm, command, full_env, cwd or self.workdir, stdout, stderr)
        return await super().start(command, env=env, cwd=cwd, stdout=stdout, stderr=stderr)

    async def _start_warm(
        self, warm: WarmStart, command: Sequence[str], env: Mapping[str, str], cwd: str, stdout: str, stderr: str
    ) -> SupervisedJob:
        """Start the preloaded program from the fork server. Raise `ForkFailed` if it cannot be forked."""
        order = {
            "command": redirect(command, stdout, stderr),  # run if the forked process cannot run the program itself
            "env": {**env, "PWD": cwd},  # in a plain start, the shell sets PWD
            "cwd": cwd,
            "preloaded": {"argv": list(command), "stdout": stdout, "stderr": stderr},
        }
        control = self._control if warm.sandbox is not None else await self._fork_supervisor(warm)
        with open_devnull() as null:
            fd = null.fileno()
            job = await self._send_order(control, order, [fd, fd, fd], warm)
        warm_start.counts["warm"] += 1
        return job

    async def _fork_supervisor(self, warm: WarmStart) -> Control:
        """Fork another supervisor from the fork server. This supervisor can run the preloaded program without an exec."""
        control = Control()
        env = {"PATH": os.defpath, folders.SANDBOX_ENV: self.id}
        rest = [str(self.folder)]
        argv = [warm.preload.python, str(SUPERVISOR), str(self._spec.life_s), *rest]
        message = {"do": "supervise", "env": env, "argv": argv, "life_s": self._spec.life_s, "folders": rest}
        try:
            with tempfile.TemporaryFile() as log:
                process = await warm.server.fork(message, [control.theirs.fileno(), log.fileno()])
        except BaseException:
            control.close()
            raise
        control.theirs.close()
        self._forked.append((control, process))
        if not await control.wait_until_ready():
            raise ForkFailed("a supervisor did not start")
        self._limit([process.pid])
        return control

    async def spawn(
        self, command: Sequence[str], env: Mapping[str, str], cwd: str, stdin: int, stdout: int, stderr: int
    ) -> SupervisedJob:
        order = {"command": list(command), "env": dict(env), "cwd": cwd}
        return await self._send_order(self._control, order, [stdin, stdout, stderr])

    def _track(self, job: SupervisedJob) -> None:
        self._jobs = {other for other in self._jobs if not other.is_gone} | {job}

    async def _send_order(
        self, control: Control, order: Mapping[str, Any], streams: Sequence[int], warm: WarmStart | None = None
    ) -> SupervisedJob:
        name = secrets.token_hex(8)
        open_files = self._spec.resources.open_files or DEFAULT_OPEN_FILES
        order = {**order, "file_bytes": self._disk_bytes, "open_files": open_files}
        read_end, write_end = os.pipe()
        try:
            with tempfile.TemporaryFile() as file:  # an environment may be larger than one message
                file.write(json.dumps(order).encode())
                file.seek(0)
                fds = [file.fileno(), *streams, write_end]
                if warm is None or warm.sandbox is None:
                    await control.send({"job": name}, fds)
                else:
                    await self._fork_guard(warm.server, name, warm.sandbox, fds)
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        job = await SupervisedJob.start(control, name, read_end)
        if STANDALONE_ENV not in order["env"]:
            self._track(job)
        return job

    async def _fork_guard(self, server: ForkServer, job: str, sandbox: int, fds: Sequence[int]) -> None:
        """Fork the guard of a command into the sandbox. The guard starts the command once the supervisor has adopted the guard."""
        guard = await server.fork({"do": "guard"}, [sandbox, *fds])
        try:
            self._limit([guard.pid])
            await self._control.send({"job": job, "guard": guard.inner_pid}, [fds[-1], guard.handshake.fileno()])
        finally:
            guard.close()

    async def stop(self) -> None:
        await run_to_completion(self._stop())

    async def _stop(self) -> None:
        if self._watch is not None:
            await self._watch.stop()
        for control in (self._control, *(control for control, _ in self._forked)):
            control.close()  # makes the supervisor end
        if self._warm is not None:
            self._warm.close()
        if self._process:
            await _wait_for_end(self._process)
        for _, process in self._forked:
            await _wait_for_end(process)
            process.close()
        await asyncio.to_thread(folders.remove_folder, self.folder)


async def _wait_for_end(process: asyncio.subprocess.Process | ForkedProcess) -> None:
    """Wait until a supervisor has ended. Kill it if that takes too long."""
    try:
        await asyncio.wait_for(process.wait(), KILL_TIMEOUT_S)
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class SupervisedJob:
    """A command in a supervised sandbox.

    Its guard reports the start and the exit code through a pipe. The pipe closes when all processes of the command have ended.
    """

    def __init__(self, control: Control, name: str) -> None:
        self._control = control
        self._name = name
        loop = asyncio.get_running_loop()
        self._started: asyncio.Future[bool] = loop.create_future()
        self._code: asyncio.Future[int] = loop.create_future()
        self._gone: asyncio.Future[None] = loop.create_future()

    @classmethod
    async def start(cls, control: Control, name: str, status: int) -> SupervisedJob:
        job = cls(control, name)
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

    @property
    def is_gone(self) -> bool:
        """Whether all processes of the command have ended."""
        return self._gone.done()

    def on_status(self, text: bytes) -> None:
        """Process `text`, which is everything that the guard has written so far."""
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
                    await self._control.send({"job": self._name, "signal": int(number)})
                await asyncio.wait([self._gone], timeout=wait_s)
        if not self._gone.done():
            raise SandboxStuck(
                f"a process in the sandbox is still running {KILL_TIMEOUT_S:.0f} s after SIGKILL was sent to it"
            )


class _StatusPipe(asyncio.Protocol):
    def __init__(self, job: SupervisedJob) -> None:
        self.job = job
        self.text = b""

    def data_received(self, data: bytes) -> None:
        self.text = (self.text + data)[:16]
        self.job.on_status(self.text)

    def connection_lost(self, error: Exception | None) -> None:
        self.job.on_closed()
