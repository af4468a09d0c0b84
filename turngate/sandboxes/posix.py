"""Sandboxes that have a shell, `cat` and `tar` in them: everything but starting a command and stopping is the same for all.

`local`, `bubblewrap` and `docker` say how one command is started on given descriptors. Files go in and out through commands, so
that a path means what it means inside: a link that the agent laid leads nowhere but where the agent could go itself.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from turngate.common.aio import run_to_completion
from turngate.errors import SandboxError, SandboxFileMissing, SandboxTooLarge
from turngate.sandboxes import archive
from turngate.sandboxes.base import ExecResult, Job

OUTPUT_LIMIT = 256_000_000  # bytes that a command may print before we stop remembering
FOLDER_LIMIT = 4_000_000_000  # bytes that a folder may have that is downloaded
FILE_TIMEOUT_S = 600.0  # a file or folder that takes longer is not coming
LINGER_S = 0.5  # a daemon that a command left behind may keep its output open: we wait no longer than this for the end
KILLED = 137
MISSING, NOT_A_FILE = 44, 45  # exit codes of READ
TAR_PARTIAL = (1, 2)  # exit codes of tar: some files changed meanwhile, or could not be read
STDERR_LIMIT = 64_000  # bytes of what tar complains about

# A spec may set a PATH that has none of our tools, or one that leads into the working folder.
SYSTEM_PATH = 'PATH="/usr/bin:/bin:$PATH"'
REDIRECT = f"""
for file in "$1" "$2"; do [ -z "$file" ] || ({SYSTEM_PATH}; mkdir -p -- "$(dirname -- "$file")") || exit 126; done
[ -z "$1" ] || exec >"$1" || exit 126
if [ "$1" = "$2" ]; then exec 2>&1; elif [ -n "$2" ]; then exec 2>"$2" || exit 126; fi
shift 2
exec "$@"
"""
# Under another name first, so that a reader never finds half a file; and readable by nobody else before it has its mode.
WRITE = f"""{SYSTEM_PATH}
[ ! -d "$1" ] || {{ echo "$1 is a folder" >&2; exit 1; }}
umask 022 && mkdir -p -- "$(dirname -- "$1")" && umask 077 || exit 1
cat >"$1.$$.new" && chmod "$2" "$1.$$.new" && mv -f -- "$1.$$.new" "$1" || {{ rm -f -- "$1.$$.new"; exit 1; }}
"""
READ = f"""{SYSTEM_PATH}
[ -e "$1" ] || exit {MISSING}
[ -f "$1" ] || exit {NOT_A_FILE}
exec head -c "$2" -- "$1"
"""
UPLOAD = SYSTEM_PATH + '; mkdir -p -- "$1" && exec tar -xof - -C "$1"'
# What is left out is compared with whole names only: GNU's tar would look for it in every part, for minutes where folders are deep.
DOWNLOAD = f"""{SYSTEM_PATH}
folder=$1; shift; [ -d "$folder" ] || exit {MISSING}
case "$(tar --version 2>/dev/null)" in *GNU*) set -- --anchored --no-wildcards --no-recursion "$@" --recursion;; esac
exec tar -cf - -C "$folder" "$@" .
"""


class PosixSandbox(ABC):
    """The common part of such a sandbox."""

    env: Mapping[str, str]  # for every command
    home: str
    workdir: str

    @abstractmethod
    async def spawn(
        self, command: Sequence[str], env: Mapping[str, str], cwd: str, stdin: int, stdout: int, stderr: int
    ) -> Job:
        """Start a command on three descriptors of the host; they stay the caller's. Only a sandbox that is gone raises."""

    async def exec(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        stdin: bytes = b"",
        timeout_s: float | None = None,
        keep: int | None = None,
        leave: bool = True,
    ) -> ExecResult:
        with tempfile.TemporaryFile() as file:
            file.write(stdin)
            file.seek(0)
            given = file if stdin else None
            return await self._run(command, env=env, cwd=cwd, stdin=given, timeout_s=timeout_s, keep=keep, leave=leave)

    async def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        stdout: str = "",
        stderr: str = "",
    ) -> Job:
        redirected = ["/bin/sh", "-c", REDIRECT, "sh", stdout, stderr, *command] if stdout or stderr else command
        with _open_devnull() as null:
            fd = null.fileno()
            return await self._spawn(redirected, env, cwd, fd, fd, fd)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        command = ["/bin/sh", "-c", WRITE, "sh", _check_path(path), f"{mode:o}"]
        done = await self.exec(command, stdin=data, cwd=_base_folder(path), timeout_s=FILE_TIMEOUT_S)
        _check_success(done, f"cannot write {path}")

    async def read(self, path: str, *, limit: int = 64_000_000) -> bytes:
        command = ["/bin/sh", "-c", READ, "sh", _check_path(path), str(limit + 1)]
        done = await self.exec(command, cwd=_base_folder(path), timeout_s=FILE_TIMEOUT_S)
        if done.exit_code == MISSING:
            raise SandboxFileMissing(f"there is no file {path} in the sandbox")
        if done.exit_code == NOT_A_FILE:
            raise SandboxError(f"{path} is not a file")
        _check_success(done, f"cannot read {path}")
        if len(done.stdout) > limit:
            raise SandboxError(f"{path} is larger than {limit} bytes")
        return done.stdout

    async def upload(self, folder: Path, target: str, *, exclude: Container[str] = ()) -> None:
        with tempfile.TemporaryFile() as tar:
            await asyncio.to_thread(archive.pack, folder, tar, exclude)
            tar.seek(0)
            command = ["/bin/sh", "-c", UPLOAD, "sh", _check_path(target)]
            done = await self._run(command, cwd=_base_folder(target), stdin=tar, timeout_s=FILE_TIMEOUT_S)
        _check_success(done, f"cannot upload to {target}")

    async def download(self, source: str, folder: Path, *, exclude: Sequence[str] = ()) -> tuple[str, ...]:
        with tempfile.TemporaryFile() as tar:
            command = [
                "/bin/sh",
                "-c",
                DOWNLOAD,
                "sh",
                _check_path(source),
                *(f"--exclude=./{path}" for path in exclude),
            ]
            done = await self._run(command, cwd=_base_folder(source), timeout_s=FILE_TIMEOUT_S, into=tar)
            if done.exit_code == MISSING:
                raise SandboxFileMissing(f"there is no folder {source} in the sandbox")
            left: tuple[str, ...] = ()
            if done.exit_code in TAR_PARTIAL and archive.is_complete(tar):
                left = archive.parse_tar_errors(done.stderr)
            else:
                _check_success(done, f"cannot download {source}")
            tar.seek(0)
            return (*left, *await unpack_in_thread(tar, folder))

    async def _spawn(
        self, command: Sequence[str], env: Mapping[str, str] | None, cwd: str, stdin: int, stdout: int, stderr: int
    ) -> Job:
        whole = {**self.env, "HOME": self.home, **(env or {})}
        if not command or any("\0" in word for word in (*command, cwd, *whole, *whole.values())):
            raise SandboxError("a command needs a first word, and no word of it may hold a NUL")
        if any(not name or "=" in name for name in whole):
            raise SandboxError("that is no name of an environment variable")
        return await self.spawn(command, whole, cwd or self.workdir, stdin, stdout, stderr)

    async def _run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        stdin: IO[bytes] | None = None,
        timeout_s: float | None = None,
        into: IO[bytes] | None = None,
        keep: int | None = None,
        leave: bool = True,
    ) -> ExecResult:
        """Run to the end. `into`: a file that takes what it prints, instead of the result."""
        if into:
            out, err = CapturedOutput(into, FOLDER_LIMIT), CapturedOutput(limit=STDERR_LIMIT, cut=True)
        elif keep is None:
            out, err = CapturedOutput(), CapturedOutput()
        else:
            out, err = TruncatedOutput(keep), TruncatedOutput(keep)
        try:
            with _open_devnull() as null:
                source = (stdin or null).fileno()
                job = await self._spawn(command, env, cwd, source, out.write_end, err.write_end)
            await out.listen()
            await err.listen()
            code, timed_out = await _wait_or_kill(job, timeout_s, out.overflown)
            if not leave:
                await run_to_completion(job.kill(grace_s=0))
            await asyncio.wait([out.finished, err.finished], timeout=LINGER_S)
            return ExecResult(code, out.taken(), err.taken(), timed_out)
        finally:
            out.close()
            err.close()


async def _wait_or_kill(job: Job, timeout_s: float | None, overflown: asyncio.Event) -> tuple[int, bool]:
    """The exit code, and whether time ran out. Whoever stops waiting for a command kills it; nobody waits for output without end."""
    waiting, too_much = asyncio.ensure_future(job.wait()), asyncio.ensure_future(overflown.wait())
    try:
        await asyncio.wait({waiting, too_much}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result(), False
        await job.kill(grace_s=0)
        return KILLED, not too_much.done()
    except asyncio.CancelledError:
        await run_to_completion(job.kill(grace_s=0))
        raise
    finally:
        for task in (waiting, too_much):
            task.cancel()
        await asyncio.wait({waiting, too_much})
        if not waiting.cancelled():
            waiting.exception()  # seen


async def unpack_in_thread(tar: IO[bytes], folder: Path) -> tuple[str, ...]:
    """`archive.unpack`, in a thread that gives up when nobody waits for it any more."""
    over = threading.Event()
    try:
        return await asyncio.to_thread(archive.unpack, tar, folder, limit=FOLDER_LIMIT, stopped=over.is_set)
    finally:
        over.set()


class CapturedOutput:
    """A pipe that a command prints into, read to its end, remembered up to a limit. `cut`: more than that is no error."""

    def __init__(self, into: IO[bytes] | None = None, limit: int = OUTPUT_LIMIT, *, cut: bool = False) -> None:
        self._read_end, self.write_end = os.pipe()
        self._into = into
        self._limit = limit
        self._cut = cut
        self._size = 0
        self._kept = bytearray()
        self.overflown = asyncio.Event()  # more than is remembered, and that is an error
        self._transport: asyncio.ReadTransport | None = None
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def listen(self) -> None:
        """The command has its end; from now on only it can keep the pipe open."""
        os.close(self.write_end)
        self.write_end = -1
        pipe = os.fdopen(self._read_end, "rb", 0)
        self._read_end = -1
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: _PipeReader(self), pipe)

    def take(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= self._limit:
            if self._into:
                self._into.write(data)
            else:
                self._kept += data
        elif not self._cut:
            self.overflown.set()

    def taken(self) -> bytes:
        if self.overflown.is_set():
            raise SandboxTooLarge(f"a command printed more than {self._limit} bytes")
        return bytes(self._kept)

    def close(self) -> None:
        for fd in (self._read_end, self.write_end):
            if fd >= 0:
                os.close(fd)
        self._read_end = self.write_end = -1
        if self._transport:
            self._transport.close()


class TruncatedOutput(CapturedOutput):
    """Output of which the beginning and the end are remembered, however long it is."""

    def __init__(self, keep: int) -> None:
        super().__init__(limit=keep, cut=True)
        self._half = keep // 2
        self._tail = bytearray()

    def take(self, data: bytes) -> None:
        self._size += len(data)
        room = self._half - len(self._kept)
        if room > 0:
            self._kept += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._half:
            del self._tail[: -self._half]

    def taken(self) -> bytes:
        tail = self._tail[-self._half :]
        left = self._size - len(self._kept) - len(tail)
        note = f"\n… {left} bytes were left out here …\n".encode() if left else b""
        return bytes(self._kept + note + tail)


class _PipeReader(asyncio.Protocol):
    def __init__(self, output: CapturedOutput) -> None:
        self.output = output

    def data_received(self, data: bytes) -> None:
        self.output.take(data)

    def connection_lost(self, error: Exception | None) -> None:
        with suppress(asyncio.InvalidStateError):
            self.output.finished.set_result(None)


def _open_devnull() -> IO[bytes]:
    return open(os.devnull, "r+b", 0)


def _check_path(path: str) -> str:
    if not path:
        raise SandboxError("a file needs a name")
    return path if not path.startswith("-") else f"./{path}"


def _base_folder(path: str) -> str:
    """Where a path counts from. A whole one has no need of the working folder, which may be gone."""
    return "/" if path.startswith("/") else ""


def _check_success(done: ExecResult, otherwise: str) -> None:
    if done.timed_out:
        raise SandboxError(f"{otherwise}: it took longer than {FILE_TIMEOUT_S:.0f} s")
    if done.exit_code:
        raise SandboxError(f"{otherwise}: {done.stderr.decode(errors='replace').strip()[-300:]}")
