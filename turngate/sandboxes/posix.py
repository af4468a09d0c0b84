"""The common part of the `local`, `bubblewrap` and `docker` sandboxes: commands and their output, files, and folders.

Files are read and written by commands (a shell, `head`, `cat`, `tar`) inside the sandbox, so paths are resolved there: a link planted by
the agent leads only to files that the agent could access itself.
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

OUTPUT_LIMIT = 256_000_000  # bytes of a command's stdout or stderr
FOLDER_LIMIT = 4_000_000_000  # bytes of a downloaded folder
FILE_TIMEOUT_S = 600.0  # time limit for copying one file or folder
LINGER_S = 0.5  # how long to wait for the end of the output, which a daemon left by the command may keep open
KILLED = 137
MISSING, NOT_A_FILE = 44, 45  # exit codes of our scripts
TAR_PARTIAL = (1, 2)  # tar's exit codes if files changed while being read, or could not be read
STDERR_LIMIT = 64_000  # bytes of tar's error messages

# A spec's PATH may lack our tools, or lead into the working folder.
SYSTEM_PATH = 'PATH="/usr/bin:/bin:$PATH"'
REDIRECT = f"""
for file in "$1" "$2"; do [ -z "$file" ] || ({SYSTEM_PATH}; mkdir -p -- "$(dirname -- "$file")") || exit 126; done
[ -z "$1" ] || exec >"$1" || exit 126
if [ "$1" = "$2" ]; then exec 2>&1; elif [ -n "$2" ]; then exec 2>"$2" || exit 126; fi
shift 2
exec "$@"
"""
# Written under a temporary name first, so that readers never see a partial file. It is private until its mode is set.
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
# Excludes match whole paths only. Otherwise GNU tar would search every part of a path, which takes minutes in deep folders.
DOWNLOAD = f"""{SYSTEM_PATH}
folder=$1; shift; [ -d "$folder" ] || exit {MISSING}
case "$(tar --version 2>/dev/null)" in *GNU*) set -- --anchored --no-wildcards --no-recursion "$@" --recursion;; esac
exec tar -cf - -C "$folder" "$@" .
"""


class PosixSandbox(ABC):
    """Base class of sandboxes that have a POSIX shell and tar."""

    env: Mapping[str, str]  # for every command
    home: str
    workdir: str

    @abstractmethod
    async def spawn(
        self, command: Sequence[str], env: Mapping[str, str], cwd: str, stdin: int, stdout: int, stderr: int
    ) -> Job:
        """Start a command with three host descriptors as its standard streams. The caller keeps ownership of the descriptors.

        Raise `SandboxError` if the sandbox has ended, or if the command cannot be sent to it.
        """

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
            stdin_file = file if stdin else None
            return await self._run(
                command, env=env, cwd=cwd, stdin=stdin_file, timeout_s=timeout_s, keep=keep, leave=leave
            )

    async def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        stdout: str = "",
        stderr: str = "",
    ) -> Job:
        with open_devnull() as null:
            fd = null.fileno()
            return await self._spawn(redirect(command, stdout, stderr), env, cwd, fd, fd, fd)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        command = ["/bin/sh", "-c", WRITE, "sh", _check_path(path), f"{mode:o}"]
        result = await self.exec(command, stdin=data, cwd=_base_folder(path), timeout_s=FILE_TIMEOUT_S)
        _check_success(result, f"cannot write {path}")

    async def read(self, path: str, *, limit: int = 64_000_000) -> bytes:
        command = ["/bin/sh", "-c", READ, "sh", _check_path(path), str(limit + 1)]
        result = await self.exec(command, cwd=_base_folder(path), timeout_s=FILE_TIMEOUT_S)
        if result.exit_code == MISSING:
            raise SandboxFileMissing(f"file {path} not found in the sandbox")
        if result.exit_code == NOT_A_FILE:
            raise SandboxError(f"{path} in the sandbox is not a file")
        _check_success(result, f"cannot read {path}")
        if len(result.stdout) > limit:
            raise SandboxError(f"{path} in the sandbox is larger than {limit} bytes")
        return result.stdout

    async def upload(self, folder: Path, target: str, *, exclude: Container[str] = ()) -> None:
        with tempfile.TemporaryFile() as tar:
            await asyncio.to_thread(archive.pack, folder, tar, exclude)
            tar.seek(0)
            command = ["/bin/sh", "-c", UPLOAD, "sh", _check_path(target)]
            result = await self._run(command, cwd=_base_folder(target), stdin=tar, timeout_s=FILE_TIMEOUT_S)
        _check_success(result, f"cannot upload to {target}")

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
            result = await self._run(command, cwd=_base_folder(source), timeout_s=FILE_TIMEOUT_S, into=tar)
            tar.truncate()  # the zeros at its end may be a hole
            if result.exit_code == MISSING:
                raise SandboxFileMissing(f"folder {source} not found in the sandbox")
            skipped: tuple[str, ...] = ()
            if result.exit_code in TAR_PARTIAL and archive.is_complete(tar):
                skipped = archive.parse_tar_errors(result.stderr)
            else:
                _check_success(result, f"cannot download {source}")
            tar.seek(0)
            return (*skipped, *await unpack_in_thread(tar, folder))

    def build_env(self, env: Mapping[str, str] | None) -> dict[str, str]:
        """Return the complete environment of a command."""
        return {**self.env, "HOME": self.home, **(env or {})}

    async def _spawn(
        self, command: Sequence[str], env: Mapping[str, str] | None, cwd: str, stdin: int, stdout: int, stderr: int
    ) -> Job:
        full_env = self.build_env(env)
        if not command:
            raise SandboxError("a command must not be empty")
        if any("\0" in word for word in (*command, cwd, *full_env, *full_env.values())):
            raise SandboxError(
                "the arguments, environment variables and paths of a command must not contain a NUL character"
            )
        if any(not name or "=" in name for name in full_env):
            raise SandboxError("an environment variable's name must not be empty or contain '='")
        return await self.spawn(command, full_env, cwd or self.workdir, stdin, stdout, stderr)

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
        """Run a command to its end. If `into` is set, standard output is written to that file and is not in the result."""
        if into:
            out, err = CapturedOutput(into, FOLDER_LIMIT), CapturedOutput(limit=STDERR_LIMIT, cut=True)
        elif keep is None:
            out, err = CapturedOutput(), CapturedOutput()
        else:
            out, err = TruncatedOutput(keep), TruncatedOutput(keep)
        try:
            with open_devnull() as null:
                source = (stdin or null).fileno()
                job = await self._spawn(command, env, cwd, source, out.write_end, err.write_end)
            await out.start_reading()
            await err.start_reading()
            code, timed_out = await _wait_or_kill(job, timeout_s, out.overflowed)
            if not leave:
                await run_to_completion(job.kill(grace_s=0))
            await asyncio.wait([out.finished, err.finished], timeout=LINGER_S)
            return ExecResult(code, out.read(), err.read(), timed_out)
        finally:
            out.close()
            err.close()


def redirect(command: Sequence[str], stdout: str, stderr: str) -> list[str]:
    """Return a command that runs `command` with its output redirected to the named files."""
    return ["/bin/sh", "-c", REDIRECT, "sh", stdout, stderr, *command] if stdout or stderr else list(command)


async def _wait_or_kill(job: Job, timeout_s: float | None, overflowed: asyncio.Event) -> tuple[int, bool]:
    """Wait for a command, and return its exit code and whether it timed out.

    The command is killed if it times out or prints too much, or if this call is cancelled.
    """
    waiting, overflowing = asyncio.ensure_future(job.wait()), asyncio.ensure_future(overflowed.wait())
    try:
        await asyncio.wait({waiting, overflowing}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result(), False
        await job.kill(grace_s=0)
        return KILLED, not overflowing.done()
    except asyncio.CancelledError:
        await run_to_completion(job.kill(grace_s=0))
        raise
    finally:
        for task in (waiting, overflowing):
            task.cancel()
        await asyncio.wait({waiting, overflowing})
        if not waiting.cancelled():
            waiting.exception()  # mark it as retrieved


async def unpack_in_thread(tar: IO[bytes], folder: Path) -> tuple[str, ...]:
    """Run `archive.unpack` in a thread that stops when the caller is cancelled."""
    cancelled = threading.Event()
    try:
        return await asyncio.to_thread(archive.unpack, tar, folder, limit=FOLDER_LIMIT, is_cancelled=cancelled.is_set)
    finally:
        cancelled.set()


class CapturedOutput:
    """A command's output, read from a pipe. Output longer than `limit` bytes is truncated if `cut` is set, and is an error otherwise."""

    def __init__(self, into: IO[bytes] | None = None, limit: int = OUTPUT_LIMIT, *, cut: bool = False) -> None:
        self._read_end, self.write_end = os.pipe()
        self._into = into
        self._limit = limit
        self._cut = cut
        self._size = 0
        self._data = bytearray()
        self.overflowed = asyncio.Event()  # set if the output exceeds the limit, unless the excess is discarded
        self._transport: asyncio.ReadTransport | None = None
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start_reading(self) -> None:
        """Close our copy of the pipe's write end, and start reading. Reading ends when all inherited copies are closed."""
        os.close(self.write_end)
        self.write_end = -1
        pipe = os.fdopen(self._read_end, "rb", 0)
        self._read_end = -1
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: _PipeReader(self), pipe)

    def feed(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= self._limit:
            if self._into:
                archive.write_sparse(self._into, data)
            else:
                self._data += data
        elif not self._cut:
            self.overflowed.set()

    def read(self) -> bytes:
        if self.overflowed.is_set():
            what = "a folder in the sandbox is larger" if self._into else "a command in the sandbox printed more"
            raise SandboxTooLarge(f"{what} than {self._limit} bytes")
        return bytes(self._data)

    def close(self) -> None:
        for fd in (self._read_end, self.write_end):
            if fd >= 0:
                os.close(fd)
        self._read_end = self.write_end = -1
        if self._transport:
            self._transport.close()


class TruncatedOutput(CapturedOutput):
    """The beginning and the end of a command's output, which may have any length."""

    def __init__(self, keep: int) -> None:
        super().__init__(limit=keep, cut=True)
        self._half = keep // 2
        self._tail = bytearray()

    def feed(self, data: bytes) -> None:
        self._size += len(data)
        room = self._half - len(self._data)
        if room > 0:
            self._data += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._half:
            del self._tail[: len(self._tail) - self._half]

    def read(self) -> bytes:
        tail = self._tail[max(0, len(self._tail) - self._half) :]
        omitted = self._size - len(self._data) - len(tail)
        note = f"\n… {omitted} of {self._size} bytes omitted …\n".encode() if omitted else b""
        return bytes(self._data + note + tail)


class _PipeReader(asyncio.Protocol):
    def __init__(self, output: CapturedOutput) -> None:
        self.output = output

    def data_received(self, data: bytes) -> None:
        self.output.feed(data)

    def connection_lost(self, error: Exception | None) -> None:
        with suppress(asyncio.InvalidStateError):
            self.output.finished.set_result(None)


def open_devnull() -> IO[bytes]:
    return open(os.devnull, "r+b", 0)


def _check_path(path: str) -> str:
    if not path:
        raise SandboxError("the path of a file or folder in the sandbox must not be empty")
    return path if not path.startswith("-") else f"./{path}"


def _base_folder(path: str) -> str:
    """Return the folder in which to resolve a path, or an empty string for the working folder.

    An absolute path must work even if the working folder no longer exists.
    """
    return "/" if path.startswith("/") else ""


def _check_success(result: ExecResult, failure: str) -> None:
    if result.timed_out:
        raise SandboxError(f"{failure}: it took longer than {FILE_TIMEOUT_S:.0f} s")
    if result.exit_code:
        reason = result.stderr.decode(errors="replace").strip()[-300:] or f"exit code {result.exit_code}"
        raise SandboxError(f"{failure}: {reason}")
