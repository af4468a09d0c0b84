"""A sandbox on any service that can run shell commands: the common part of the remote backends `e2b` and `huggingface`.

A service's own output stream is not sufficient: it may break, it decodes output as text, and it reports the exit code -1 if a signal ended
the command. Therefore a small shell script in the sandbox runs the command, redirects its output to files, and writes its exit code to a
file. The service only reports that the script has ended.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import logging
import math
import posixpath
import re
import shlex
import tempfile
import time
import uuid
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Protocol, TypeVar, cast

from turngate.common.aio import keep_cancellation, run_to_completion
from turngate.common.owner import Owner, current_owner
from turngate.errors import SandboxError, SandboxFileMissing, SandboxUnavailable
from turngate.sandboxes.archive import pack, parse_tar_errors, unpack
from turngate.sandboxes.base import ExecResult, SandboxSpec
from turngate.sandboxes.posix import FOLDER_LIMIT, KILLED, OUTPUT_LIMIT, STDERR_LIMIT

log = logging.getLogger(__name__)

T = TypeVar("T")

SCRIPT_TIMEOUT_S = 600.0  # time limit of our own scripts; packing a large folder takes the longest
POLL_S = 30.0  # how often to check for the exit code, because a stream can hang without breaking
MISSING, NOT_A_FILE, TOOL_MISSING = 44, 45, 46  # exit codes of our own scripts


class RequestLost(SandboxError):
    """The service or the network failed. The request may have been executed, so only idempotent requests are retried."""


class SandboxConnection(Protocol):
    """A service's operations on one sandbox. They raise only `SandboxError`s, such as `SandboxGone` and `RequestLost`."""

    @property
    def id(self) -> str: ...

    @property
    def lease_s(self) -> float:
        """The time in seconds after which the sandbox ends unless its lease is renewed."""

    async def shell(self, script: str) -> tuple[int, str]:
        """Run a short script and return its exit code and output."""

    async def spawn(self, script: str, env: Mapping[str, str]) -> Callable[[], Awaitable[None]]:
        """Start a script in the background. Return a function that waits until the script ends, even if connections are lost."""

    async def put(self, path: str, data: bytes | Path) -> None: ...

    async def get(self, path: str, limit: int) -> bytes: ...

    async def fetch(self, path: str, target: Path) -> None: ...

    async def renew(self, seconds: float) -> None: ...

    async def remove(self) -> None:
        """Remove the sandbox. Do nothing if it no longer exists."""


class ShellJob:
    """A command that is run by a script in the sandbox.

    The job's folder contains the script `run`, the process id in `pid` and, once the command has ended, its exit code in `code`.
    """

    def __init__(self, connection: SandboxConnection, folder: str, wait_for_end: Callable[[], Awaitable[None]]) -> None:
        self._connection = connection
        self._folder = folder
        self._stopped = False
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._code.add_done_callback(lambda code: code.cancelled() or code.exception())  # it may never be awaited
        self._watch = asyncio.create_task(self._watch_until_end(wait_for_end))

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    async def kill(self, grace_s: float = 2.0) -> None:
        if not self._stopped:
            await retry(lambda: self._connection.shell(kill_script(self._folder, grace_s)))

    def stop_watching(self) -> None:
        """Stop waiting for the command's exit code."""
        self._watch.cancel()

    def settle(self, error: SandboxError | None) -> None:
        """Record that the command ended because its sandbox was stopped. If stopping failed, record the error instead."""
        self._stopped = error is None
        if self._code.done():
            return
        if error:
            self._code.set_exception(error)
        else:
            self._code.set_result(KILLED)

    async def _watch_until_end(self, wait_for_end: Callable[[], Awaitable[None]]) -> None:
        try:
            code = await self._wait_for_exit(wait_for_end)
        except Exception as error:  # raised by `wait`
            self._code.set_exception(error)
        else:
            self._code.set_result(code)

    async def _wait_for_exit(self, wait_for_end: Callable[[], Awaitable[None]]) -> int:
        async with _background(wait_for_end()) as ending:
            while not (await asyncio.wait({ending}, timeout=POLL_S))[0]:
                with suppress(RequestLost):
                    if (code := await self._read_exit_code()) is not None:
                        return code
            await ending
        code = await retry(self._read_exit_code)
        # Only SIGKILL can end the script before it writes the code, because it ignores other signals.
        return KILLED if code is None else code

    async def _read_exit_code(self) -> int | None:
        try:
            return int(await self._connection.get(f"{self._folder}/code", 16))
        except SandboxFileMissing:
            return None


class ShellSandbox:
    """A sandbox on a remote service, used through the service's `SandboxConnection`."""

    shared = None
    disk_error = None  # the service limits the disk

    def __init__(self, connection: SandboxConnection, root: str, spec: SandboxSpec, ends: float) -> None:
        self._connection = connection
        self._root = root
        self._env = dict(spec.env)
        self.workdir = spec.workdir or f"{root}/work"
        self._ends = ends
        self._jobs: set[ShellJob] = set()
        self._stopped = False
        self._renewing = asyncio.create_task(self._renew())

    @classmethod
    async def create(cls, connection: SandboxConnection, spec: SandboxSpec, ends: float) -> ShellSandbox:
        """Set up a new sandbox that lasts until `ends`, a `time.monotonic()` value. If the setup fails, remove the service's sandbox."""
        try:
            code, output = await connection.shell(SETUP_SCRIPT)
            if code == TOOL_MISSING:
                raise SandboxUnavailable(
                    f"the {f'image {spec.image!r}' if spec.image else 'default image'} has no {output.strip()}, "
                    "which Turngate needs; use an image that has it"
                )
            root = output.removesuffix("\n")
            if code or not root:
                reason = root.strip()[-300:] or f"the setup script printed nothing (exit code {code})"
                raise SandboxError(f"could not set up the new sandbox: {reason}")
            if not re.fullmatch(r"/[\w./-]+", root, re.ASCII):  # our scripts use it without quotes
                raise SandboxError(
                    f"could not set up the new sandbox: the path {root[-300:]!r} contains characters other than letters, digits, "
                    "'.', '_', '-' and '/'; use an image with a different HOME"
                )
            sandbox = cls(connection, root, spec, ends)
        except BaseException:
            with suppress(SandboxError):
                await run_to_completion(retry(connection.remove))
            raise
        try:
            for folder in (sandbox.workdir, *spec.folders):
                await sandbox._script(folder_script(folder), folder)
            for mount in spec.mounts:  # a remote sandbox receives a copy
                await sandbox.upload(Path(mount.source), mount.target)
        except BaseException:
            with suppress(SandboxError):
                await sandbox.stop()
            raise
        return sandbox

    @property
    def id(self) -> str:
        return self._connection.id

    @property
    def home(self) -> str:
        return f"{self._root}/home"

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
        folder = self._new_path()
        job = await self._run(folder, command, env, cwd, f"{folder}/out", f"{folder}/err", stdin)
        timed_out = False
        try:
            try:
                code = await asyncio.wait_for(job.wait(), timeout_s)
            except TimeoutError:
                await job.kill(0)
                code, timed_out = KILLED, True
            if not leave:
                await job.kill(0)
            if keep is not None:
                await self._script(truncate_script(folder, keep), "the command's output")
            out, err = await asyncio.gather(self._output(f"{folder}/out"), self._output(f"{folder}/err"))
        except asyncio.CancelledError:
            with suppress(SandboxError):
                await run_to_completion(job.kill(0))
            raise
        finally:
            self._jobs.discard(job)
            job.stop_watching()
            with suppress(SandboxError):  # leftover files are not an error
                await self._connection.shell(f"rm -rf {folder}")
        return ExecResult(code, out, err, timed_out)

    async def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        stdout: str = "",
        stderr: str = "",
    ) -> ShellJob:
        where = self._absolute(cwd)
        out, err = (posixpath.join(where, path) if path else "/dev/null" for path in (stdout, stderr))
        return await self._run(self._new_path(), command, env, cwd, out, err, b"")

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        # The file is staged in our private folder, so that neither a partial file nor a secret with too open a mode is ever visible.
        target, staged = shlex.quote(self._absolute(_check_path(path))), self._new_path()
        await retry(lambda: self._connection.put(staged, data))
        await self._script(
            f'[ ! -d {target} ] || exit {NOT_A_FILE}; mkdir -p "$(dirname {target})" && '
            f"chmod {mode:o} {staged} && mv -f {staged} {target}",
            path,
        )

    async def read(self, path: str, *, limit: int = 64_000_000) -> bytes:
        # The path is checked inside the sandbox first: it may contain links, and reading a pipe would block the service forever.
        quoted = shlex.quote(self._absolute(_check_path(path)))
        check = f"[ -e {quoted} ] || exit {MISSING}; [ -f {quoted} ] || exit {NOT_A_FILE}; readlink -f {quoted}"
        resolved = await retry(lambda: self._script(check, path))
        return await retry(lambda: self._connection.get(resolved.removesuffix("\n"), limit))

    async def upload(self, folder: Path, target: str, *, exclude: Container[str] = ()) -> None:
        quoted, staged = shlex.quote(self._absolute(target)), self._new_path()
        with tempfile.NamedTemporaryFile(suffix=".tgz") as archive:
            await asyncio.to_thread(_pack_gzip, folder, Path(archive.name), exclude)
            await retry(lambda: self._connection.put(staged, Path(archive.name)))
        await self._script(
            f"mkdir -p {quoted} && tar -xzpof {staged} -C {quoted}; code=$?; rm -f {staged}; exit $code", target
        )

    async def download(self, source: str, folder: Path, *, exclude: Sequence[str] = ()) -> tuple[str, ...]:
        quoted, staged = shlex.quote(self._absolute(source)), self._new_path()
        without = shlex.join(f"--exclude=./{path}" for path in exclude)
        # tar exits with 1 if a file changed while being read, and with 2 if one could not be read. It still packs the others.
        tar = (
            f"cd {quoted} || exit {MISSING}; umask 077; tar -czf {staged} {without} . 2>{staged}.err; code=$?; "
            f"head -c {STDERR_LIMIT} {staged}.err; rm -f {staged}.err; [ $code -le 2 ]"
        )
        errors = await retry(lambda: self._script(tar, source))
        with tempfile.NamedTemporaryFile(suffix=".tgz") as file:
            await retry(lambda: self._connection.fetch(staged, Path(file.name)))
            skipped = await asyncio.to_thread(_unpack_gzip, Path(file.name), folder)
        with suppress(SandboxError):
            await self._connection.shell(f"rm -f {staged}")
        return (*parse_tar_errors(errors.encode()), *skipped)

    async def stop(self) -> None:
        if not self._stopped:
            self._renewing.cancel()
            await run_to_completion(self._end())

    async def _end(self) -> None:
        for job in self._jobs:
            job.stop_watching()
        failed = None
        try:
            await retry(self._connection.remove)
            self._stopped = True
        except SandboxError as error:
            failed = error
            raise
        finally:
            for job in self._jobs:
                job.settle(failed)

    async def _run(
        self,
        folder: str,
        command: Sequence[str],
        env: Mapping[str, str] | None,
        cwd: str,
        out: str,
        err: str,
        stdin: bytes,
    ) -> ShellJob:
        variables = {**self._env, "HOME": self.home, **(env or {})}
        lines = run_script(folder, command, variables, self._absolute(cwd), out, err, bool(stdin))
        await retry(lambda: self._connection.put(f"{folder}/run", lines.encode()))
        if stdin:
            await retry(lambda: self._connection.put(f"{folder}/in", stdin))
        remaining = math.ceil(max(1.0, self._ends - time.monotonic()))
        try:
            # Values are passed in the environment, never in a script, because services log scripts.
            wait_for_end = await keep_cancellation(
                self._connection.spawn(
                    watch_script(folder, remaining), {_env_slot(i): value for i, value in enumerate(variables.values())}
                )
            )
        except (RequestLost, asyncio.CancelledError):
            # The command may be running, so starting it again could run it twice. Kill it, and raise the error.
            with suppress(SandboxError):
                await run_to_completion(self._connection.shell(kill_script(folder, 0)))
            raise
        job = ShellJob(self._connection, folder, wait_for_end)
        self._jobs.add(job)
        return job

    async def _output(self, path: str) -> bytes:
        try:
            return await retry(lambda: self._connection.get(path, OUTPUT_LIMIT))
        except SandboxFileMissing:  # the command was killed before it started
            return b""
        except SandboxError:
            if self._stopped:  # the output was removed with the sandbox
                return b""
            raise

    async def _script(self, script: str, path: str) -> str:
        code, output = await self._connection.shell(f"{{ {script}; }} 2>&1")
        if code == MISSING:
            raise SandboxFileMissing(f"{path} not found in the sandbox")
        if code == NOT_A_FILE:
            raise SandboxError(f"{path} in the sandbox is not a file")
        if code:
            raise SandboxError(
                f"the sandbox reported an error for {path}: {output.strip()[-300:] or f'exit code {code}'}"
            )
        return output

    async def _renew(self) -> None:
        pause = self._connection.lease_s / 3
        await asyncio.sleep(min(pause, self._ends - time.monotonic()))  # creation includes the first lease
        while (remaining := self._ends - time.monotonic()) > 0:
            try:
                await self._connection.renew(min(self._connection.lease_s, remaining))
            except RequestLost as error:
                log.warning("cannot renew the lease of sandbox %s: %s; retrying", self.id, error)
            except SandboxError as error:
                log.warning(
                    "cannot renew the lease of sandbox %s: %s; not retrying, so the sandbox will end if it has not ended already",
                    self.id,
                    error,
                )
                return
            await asyncio.sleep(min(pause, self._ends - time.monotonic()))
        with suppress(SandboxError):
            await self._end()

    def _new_path(self) -> str:
        return f"{self._root}/jobs/{uuid.uuid4().hex}"

    def _absolute(self, path: str) -> str:
        return posixpath.join(self.workdir, path)


# Scripts for POSIX sh that need only coreutils, grep, tar, gzip and setsid.

SETUP_SCRIPT = f"""
for tool in setsid tar gzip grep; do command -v $tool >/dev/null || {{ echo $tool; exit {TOOL_MISSING}; }}; done
base=${{HOME:-/tmp}}; base=${{base%/}}/turngate
mkdir -p "$base/home" "$base/work" "$base/jobs" && chmod 700 "$base/jobs" && cd "$base" && pwd -P
"""


def run_script(
    folder: str, command: Sequence[str], env: Mapping[str, str], cwd: str, out: str, err: str, has_input: bool
) -> str:
    """Return a script that execs the command.

    It sets the environment variables itself, because a login shell's profile may change them.
    """
    if not command:
        raise SandboxError("a command must not be empty")
    if any("\0" in word for word in (*command, cwd, out, err, *env, *env.values())):
        raise SandboxError(
            "the arguments, environment variables and paths of a command must not contain a NUL character"
        )
    lines = [f"echo $$ >{folder}/pid"]
    lines += [f'mkdir -p "$(dirname {shlex.quote(path)})"' for path in (out, err) if not path.startswith(folder)]
    where = "&1" if err == out else shlex.quote(err)
    lines.append(f"exec <{folder + '/in' if has_input else '/dev/null'} >{shlex.quote(out)} 2>{where}")
    for i, name in enumerate(env):
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise SandboxError(
                f"invalid environment variable name {name!r}: use only letters, digits and '_', without a digit at the start"
            )
        lines.append(f'export {name}="${_env_slot(i)}"; unset {_env_slot(i)}')
    lines.append(f"cd {shlex.quote(cwd)} || exit 126")
    lines.append(f"exec {shlex.join(command)}")
    return "\n".join(lines) + "\n"


def watch_script(folder: str, seconds: int) -> str:
    """Return a script that runs the job's script `run`, kills it after `seconds`, and writes its exit code to the file `code`."""
    job = posixpath.basename(folder)
    return f"""
trap : HUP INT TERM
setsid /bin/sh -c 'sleep {seconds}; kill -s KILL -- "-$(cat {folder}/pid)"' </dev/null >/dev/null 2>&1 &
dog=$!
TURNGATE_JOB={job} setsid /bin/sh {folder}/run </dev/null >/dev/null 2>&1
code=$?
kill -s KILL -- "-$dog" "$dog" 2>/dev/null
echo "$code" >{folder}/code.new && mv {folder}/code.new {folder}/code
"""


def kill_script(folder: str, grace_s: float) -> str:
    """Return a script that ends a command with SIGTERM, and with SIGKILL if that takes longer than `grace_s` seconds.

    If `grace_s` is 0, the script sends only SIGKILL. It signals the command's process group and all processes whose environment names the
    job (`TURNGATE_JOB`).
    """
    return f"""
mine() {{ grep -sl TURNGATE_JOB={posixpath.basename(folder)} /proc/[0-9]*/environ | cut -d/ -f3; }}
alive() {{ [ ! -e {folder}/code ] || [ -n "$(mine)" ]; }}
end() {{ [ -e {folder}/code ] || kill -s "$1" -- "-$(cat {folder}/pid)"; for p in $(mine); do kill -s "$1" "$p"; done; }}
exec 2>/dev/null
n=30; while [ ! -e {folder}/pid ] && [ $n -gt 0 ]; do sleep 0.1; n=$((n-1)); done
n={math.ceil(grace_s * 10)}; [ $n -eq 0 ] || end TERM
while [ $n -gt 0 ] && alive; do sleep 0.1; n=$((n-1)); done
n=50; while [ $n -gt 0 ] && alive; do end KILL; sleep 0.05; n=$((n-1)); done
true
"""


def folder_script(folder: str) -> str:
    """Return a script that creates a writable folder. Where the user may not create folders, such as in `/`, it uses sudo if available."""
    name = shlex.quote(folder)
    return (
        f"mkdir -p {name} 2>/dev/null && [ -w {name} ] || "
        f'{{ sudo -n mkdir -p {name} && sudo -n chown "$(id -u)" {name}; }} || '
        f"{{ echo the folder cannot be created, or is not writable; false; }}"
    )


def truncate_script(folder: str, keep: int) -> str:
    """Return a script that shortens a command's output to its beginning and its end."""
    half = keep // 2
    return f"""
for file in {folder}/out {folder}/err; do
  [ -f "$file" ] && [ "$(wc -c <"$file")" -gt {2 * half} ] || continue
  {{ head -c {half} "$file"; echo; echo "… bytes omitted …"; tail -c {half} "$file"; }} >"$file.ends" &&
    mv -f "$file.ends" "$file"
done
true
"""


def _check_path(path: str) -> str:
    if not path or "\0" in path:
        raise SandboxError("the path of a file in the sandbox must not be empty or contain a NUL character")
    return path


def _env_slot(i: int) -> str:
    return f"TURNGATE_ENV_{i}"


async def as_coroutine(work: Awaitable[T]) -> T:
    return await work


async def retry(request: Callable[[], Awaitable[T]]) -> T:
    """Call `request`, and repeat it up to two times if it raises `RequestLost`. The request must be idempotent."""
    for pause in (0.2, 1.0):
        try:
            return await request()
        except RequestLost:
            await asyncio.sleep(pause)
    return await request()


@asynccontextmanager
async def _background(work: Awaitable[None]) -> AsyncIterator[asyncio.Future[None]]:
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


def _pack_gzip(folder: Path, archive: Path, exclude: Container[str]) -> None:
    with gzip.open(archive, "wb", compresslevel=1) as file:
        pack(folder, cast("IO[bytes]", file), exclude)


def _unpack_gzip(archive: Path, folder: Path) -> tuple[str, ...]:
    try:
        with gzip.open(archive, "rb") as file:
            return unpack(cast("IO[bytes]", file), folder, limit=FOLDER_LIMIT)
    except (EOFError, OSError, zlib.error) as error:
        raise SandboxError(f"the folder was not copied completely: {error}") from error


def owner_labels() -> dict[str, str]:
    """Return labels that identify this process as the owner of a sandbox. They are short enough for every service."""
    here = current_owner()
    return {
        "turngate-host": _short_digest(here.host),
        "turngate-boot": here.boot,
        "turngate-namespace": _short_digest(here.namespace),
        "turngate-process": f"{here.pid}-{here.started}",
    }


def host_label() -> dict[str, str]:
    """Return the label of sandboxes created on this machine. `is_abandoned` can check only the owners of these sandboxes."""
    return {"turngate-host": owner_labels()["turngate-host"]}


def is_abandoned(labels: Mapping[str, str]) -> bool:
    """Return whether a sandbox was created on this machine by a process that has ended.

    Sandboxes created on other machines end when their leases expire.
    """
    here = current_owner()
    pid, _, started = labels.get("turngate-process", "").partition("-")
    if labels.get("turngate-host") != _short_digest(here.host) or not (pid.isdigit() and started.isdigit()):
        return False
    same = labels.get("turngate-namespace") == _short_digest(here.namespace)
    return Owner(
        here.host, labels.get("turngate-boot", ""), here.namespace if same else "", int(pid), int(started)
    ).gone


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def describe_error(error: BaseException, secret: str) -> str:
    """Describe an error in one line, without `secret`."""
    text = f"{type(error).__name__}: {error}"
    return " ".join((text.replace(secret, "***") if secret else text).split())[:500]
