"""A sandbox on top of any service that runs a shell for us: what the remote ones have in common.

A service's own stream is never the truth here. It may break, it decodes output as text, and it says -1 for a signal. So a
small shell script in the sandbox runs the command, sends its output to files and writes down how it ended; the stream only
says when to look. `e2b` and `huggingface` stand on this.
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

from turngate.common.aio import run_to_completion
from turngate.errors import SandboxError, SandboxFileMissing, SandboxGone, SandboxUnavailable
from turngate.sandboxes.archive import pack, parse_tar_errors, unpack
from turngate.sandboxes.base import ExecResult, SandboxSpec
from turngate.sandboxes.owner import Owner, current_owner
from turngate.sandboxes.posix import FOLDER_LIMIT, KILLED, OUTPUT_LIMIT, STDERR_LIMIT

log = logging.getLogger(__name__)

T = TypeVar("T")

SCRIPT_TIMEOUT_S = 600.0  # for our own short scripts; packing a large folder is the longest of them
POLL_S = 30.0  # a stream can hang without breaking; this often we look for ourselves
MISSING, NOT_A_FILE, TOOL_MISSING = 44, 45, 46  # exit codes of our own scripts


class Gone(SandboxGone):
    """The sandbox itself is no more."""


class RequestLost(SandboxError):
    """The service or the way to it failed. What was asked may have happened or not; a question may be asked again."""


class SandboxConnection(Protocol):
    """What a service does for one sandbox. Raises only `SandboxError`s: `Gone`, `Lost`, `SandboxFileMissing` among them."""

    @property
    def id(self) -> str: ...

    @property
    def lease_s(self) -> float:
        """The sandbox ends by itself when it was not renewed for this long."""

    async def shell(self, script: str) -> tuple[int, str]:
        """A short script: its exit code, and what it said."""

    async def spawn(self, script: str, env: Mapping[str, str]) -> Callable[[], Awaitable[None]]:
        """A script in the background. What comes back waits until it has ended, through lost connections."""

    async def put(self, path: str, data: bytes | Path) -> None: ...

    async def get(self, path: str, limit: int) -> bytes: ...

    async def fetch(self, path: str, target: Path) -> None: ...

    async def renew(self, seconds: float) -> None: ...

    async def remove(self) -> None:
        """Fine when there is nothing left to remove."""


class ShellJob:
    """A command under our script. Its folder holds `run`, `pid` while it runs, and `code` when it has ended."""

    def __init__(self, wire: SandboxConnection, folder: str, over: Callable[[], Awaitable[None]]) -> None:
        self._wire = wire
        self._folder = folder
        self._stopped = False
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._code.add_done_callback(lambda code: code.cancelled() or code.exception())  # it need not be waited for
        self._watch = asyncio.create_task(self._watched(over))

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    async def kill(self, grace_s: float = 2.0) -> None:
        if not self._stopped:
            await retry(lambda: self._wire.shell(kill_script(self._folder, grace_s)))

    def forget(self) -> None:
        """Look no longer how it ends."""
        self._watch.cancel()

    def settle(self, error: SandboxError | None) -> None:
        """The sandbox was ended, and this with it; or it could not be."""
        self._stopped = error is None
        if self._code.done():
            return
        if error:
            self._code.set_exception(error)
        else:
            self._code.set_result(KILLED)

    async def _watched(self, over: Callable[[], Awaitable[None]]) -> None:
        try:
            code = await self._ended(over)
        except Exception as error:  # whatever it is: it belongs to whoever waits
            self._code.set_exception(error)
        else:
            self._code.set_result(code)

    async def _ended(self, over: Callable[[], Awaitable[None]]) -> int:
        async with _background(over()) as ending:
            while not (await asyncio.wait({ending}, timeout=POLL_S))[0]:
                with suppress(RequestLost):
                    if (code := await self._written()) is not None:
                        return code
            await ending
        code = await retry(self._written)
        # Only SIGKILL can end the script before it has written: it catches the others.
        return KILLED if code is None else code

    async def _written(self) -> int | None:
        try:
            return int(await self._wire.get(f"{self._folder}/code", 16))
        except SandboxFileMissing:
            return None


class ShellSandbox:
    """The seam, on a service's wire."""

    shared = None

    def __init__(self, wire: SandboxConnection, root: str, spec: SandboxSpec, ends: float) -> None:
        self._wire = wire
        self._root = root
        self._env = dict(spec.env)
        self.workdir = spec.workdir or f"{root}/work"
        self._ends = ends
        self._jobs: set[ShellJob] = set()
        self._stopped = False
        self._renewing = asyncio.create_task(self._renew())

    @classmethod
    async def on(cls, wire: SandboxConnection, spec: SandboxSpec, ends: float) -> ShellSandbox:
        """A new sandbox, ready to use until `ends`; the service's is removed again if it cannot be made so."""
        try:
            code, said = await wire.shell(SETUP_SCRIPT)
            if code == TOOL_MISSING:
                raise SandboxUnavailable(f"the image {spec.image!r} has no {said.strip()}, which Turngate needs there")
            if code or not re.fullmatch(r"/[\w./-]+\n", said, re.ASCII):  # our scripts name it without quotes
                raise SandboxError(f"a new sandbox could not be set up: {said.strip()[-300:]}")
            sandbox = cls(wire, said.strip(), spec, ends)
        except BaseException:
            with suppress(SandboxError):
                await run_to_completion(retry(wire.remove))
            raise
        try:
            for folder in (sandbox.workdir, *spec.folders):
                await sandbox._script(folder_script(folder), folder)
            for mount in spec.mounts:  # nothing of the host can be mounted there: a copy
                await sandbox.upload(Path(mount.source), mount.target)
        except BaseException:
            with suppress(SandboxError):
                await sandbox.stop()
            raise
        return sandbox

    @property
    def id(self) -> str:
        return self._wire.id

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
        folder = self._new()
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
                await self._script(truncate_script(folder, keep), "output")
            out, err = await asyncio.gather(self._output(f"{folder}/out"), self._output(f"{folder}/err"))
        except asyncio.CancelledError:
            with suppress(SandboxError):
                await run_to_completion(job.kill(0))
            raise
        finally:
            self._jobs.discard(job)
            job.forget()
            with suppress(SandboxError):  # litter, not an error
                await self._wire.shell(f"rm -rf {folder}")
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
        where = self._path(cwd)
        out, err = (posixpath.join(where, path) if path else "/dev/null" for path in (stdout, stderr))
        return await self._run(self._new(), command, env, cwd, out, err, b"")

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        # By way of our private folder: nobody sees half a file, nor a secret under a mode that is too wide.
        target, staged = shlex.quote(self._path(_check_path(path))), self._new()
        await retry(lambda: self._wire.put(staged, data))
        await self._script(
            f'[ ! -d {target} ] || exit {NOT_A_FILE}; mkdir -p "$(dirname {target})" && '
            f"chmod {mode:o} {staged} && mv -f {staged} {target}",
            path,
        )

    async def read(self, path: str, *, limit: int = 64_000_000) -> bytes:
        # Looked at from inside first: there may be a link on the way, and a service would wait for a pipe for ever.
        quoted = shlex.quote(self._path(_check_path(path)))
        look = f"[ -e {quoted} ] || exit {MISSING}; [ -f {quoted} ] || exit {NOT_A_FILE}; readlink -f {quoted}"
        found = await retry(lambda: self._script(look, path))
        return await retry(lambda: self._wire.get(found.removesuffix("\n"), limit))

    async def upload(self, folder: Path, target: str, *, exclude: Container[str] = ()) -> None:
        quoted, staged = shlex.quote(self._path(target)), self._new()
        with tempfile.NamedTemporaryFile(suffix=".tgz") as archive:
            await asyncio.to_thread(_pack_gzip, folder, Path(archive.name), exclude)
            await retry(lambda: self._wire.put(staged, Path(archive.name)))
        await self._script(
            f"mkdir -p {quoted} && tar -xzpof {staged} -C {quoted}; code=$?; rm -f {staged}; exit $code", target
        )

    async def download(self, source: str, folder: Path, *, exclude: Sequence[str] = ()) -> tuple[str, ...]:
        quoted, staged = shlex.quote(self._path(source)), self._new()
        without = shlex.join(f"--exclude=./{path}" for path in exclude)
        # tar says 1 when a file grew while it was read, and 2 when one could not be read; the others come all the same
        tar = (
            f"cd {quoted} || exit {MISSING}; umask 077; tar -czf {staged} {without} . 2>{staged}.err; code=$?; "
            f"head -c {STDERR_LIMIT} {staged}.err; rm -f {staged}.err; [ $code -le 2 ]"
        )
        said = await retry(lambda: self._script(tar, source))
        with tempfile.NamedTemporaryFile(suffix=".tgz") as file:
            await retry(lambda: self._wire.fetch(staged, Path(file.name)))
            left = await asyncio.to_thread(_unpack_gzip, Path(file.name), folder)
        with suppress(SandboxError):
            await self._wire.shell(f"rm -f {staged}")
        return (*parse_tar_errors(said.encode()), *left)

    async def stop(self) -> None:
        if not self._stopped:
            self._renewing.cancel()
            await run_to_completion(self._end())

    async def _end(self) -> None:
        for job in self._jobs:
            job.forget()
        failed = None
        try:
            await retry(self._wire.remove)
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
        lines = run_script(folder, command, variables, self._path(cwd), out, err, bool(stdin))
        await retry(lambda: self._wire.put(f"{folder}/run", lines.encode()))
        if stdin:
            await retry(lambda: self._wire.put(f"{folder}/in", stdin))
        left = math.ceil(max(1.0, self._ends - time.monotonic()))
        try:
            # Values travel by environment, never in a script: services log those.
            over = await self._wire.spawn(
                watch_script(folder, left), {_env_slot(i): value for i, value in enumerate(variables.values())}
            )
        except (RequestLost, asyncio.CancelledError):
            # It may be running. Starting it again could run it twice; so it is ended, and the caller told.
            with suppress(SandboxError):
                await run_to_completion(self._wire.shell(kill_script(folder, 0)))
            raise
        job = ShellJob(self._wire, folder, over)
        self._jobs.add(job)
        return job

    async def _output(self, path: str) -> bytes:
        try:
            return await retry(lambda: self._wire.get(path, OUTPUT_LIMIT))
        except SandboxFileMissing:  # killed before it had begun
            return b""
        except SandboxError:
            if self._stopped:  # and its output is gone with it
                return b""
            raise

    async def _script(self, script: str, path: str) -> str:
        code, said = await self._wire.shell(f"{{ {script}; }} 2>&1")
        if code == MISSING:
            raise SandboxFileMissing(f"there is no {path} in the sandbox")
        if code == NOT_A_FILE:
            raise SandboxError(f"{path} is not a file")
        if code:
            raise SandboxError(f"{path}: {said.strip()[-300:] or f'exit code {code}'}")
        return said

    async def _renew(self) -> None:
        pause = self._wire.lease_s / 3
        await asyncio.sleep(min(pause, self._ends - time.monotonic()))  # it was made with its first lease
        while (left := self._ends - time.monotonic()) > 0:
            try:
                await self._wire.renew(min(self._wire.lease_s, left))
            except RequestLost as error:
                log.warning("sandbox %s could not be renewed, trying again: %s", self.id, error)
            except SandboxError as error:
                log.warning("sandbox %s can be kept no longer: %s", self.id, error)
                return
            await asyncio.sleep(min(pause, self._ends - time.monotonic()))
        with suppress(SandboxError):
            await self._end()

    def _new(self) -> str:
        return f"{self._root}/jobs/{uuid.uuid4().hex}"

    def _path(self, path: str) -> str:
        return posixpath.join(self.workdir, path)


# Scripts: POSIX sh, with nothing but coreutils, grep, tar and setsid.

SETUP_SCRIPT = f"""
for tool in setsid tar gzip grep; do command -v $tool >/dev/null || {{ echo $tool; exit {TOOL_MISSING}; }}; done
base=${{HOME:-/tmp}}; base=${{base%/}}/turngate
mkdir -p "$base/home" "$base/work" "$base/jobs" && chmod 700 "$base/jobs" && cd "$base" && pwd -P
"""


def run_script(
    folder: str, command: Sequence[str], env: Mapping[str, str], cwd: str, out: str, err: str, has_input: bool
) -> str:
    """Becomes the command. Its variables are set here, after a login shell's profile had its say."""
    if not command or any("\0" in word for word in (*command, cwd, out, err, *env, *env.values())):
        raise SandboxError("a command needs a first word, and no word of it may hold a NUL")
    lines = [f"echo $$ >{folder}/pid"]
    lines += [f'mkdir -p "$(dirname {shlex.quote(path)})"' for path in (out, err) if not path.startswith(folder)]
    where = "&1" if err == out else shlex.quote(err)
    lines.append(f"exec <{folder + '/in' if has_input else '/dev/null'} >{shlex.quote(out)} 2>{where}")
    for i, name in enumerate(env):
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise SandboxError(f"a shell cannot carry a variable named {name!r}")
        lines.append(f'export {name}="${_env_slot(i)}"; unset {_env_slot(i)}')
    lines.append(f"cd {shlex.quote(cwd)} || exit 126")
    lines.append(f"exec {shlex.join(command)}")
    return "\n".join(lines) + "\n"


def watch_script(folder: str, seconds: int) -> str:
    """Runs `run` in a session of its own, and writes down how it ended; ends it itself after `seconds`."""
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
    """Asks, then forces: the process group, and whatever left it but still carries the job's mark in its environment."""
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
    """A folder that is there and writable, also at the root where the service gives its user the right to that."""
    name = shlex.quote(folder)
    return (
        f"mkdir -p {name} 2>/dev/null && [ -w {name} ] || "
        f'{{ sudo -n mkdir -p {name} && sudo -n chown "$(id -u)" {name}; }} || '
        f"{{ echo the folder cannot be made, or not be written; false; }}"
    )


def truncate_script(folder: str, keep: int) -> str:
    """Of what a command printed, the beginning and the end."""
    half = keep // 2
    return f"""
for file in {folder}/out {folder}/err; do
  [ -f "$file" ] && [ "$(wc -c <"$file")" -gt {2 * half} ] || continue
  {{ head -c {half} "$file"; echo; echo "… bytes were left out here …"; tail -c {half} "$file"; }} >"$file.ends" &&
    mv -f "$file.ends" "$file"
done
true
"""


def _check_path(path: str) -> str:
    if not path or "\0" in path:
        raise SandboxError("a file needs a name, without a NUL")
    return path


def _env_slot(i: int) -> str:
    return f"TURNGATE_ENV_{i}"


async def as_coroutine(work: Awaitable[T]) -> T:
    return await work


async def retry(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask once more, and once more, where the answer was lost. Only for what may happen twice."""
    for pause in (0.2, 1.0):
        try:
            return await ask()
        except RequestLost:
            await asyncio.sleep(pause)
    return await ask()


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
        raise SandboxError(f"the folder did not come through whole: {error}") from error


def owner_labels() -> dict[str, str]:
    """Who makes a sandbox, in the few characters that every service lets a label have."""
    here = current_owner()
    return {
        "turngate-host": _short_digest(here.host),
        "turngate-boot": here.boot,
        "turngate-namespace": _short_digest(here.namespace),
        "turngate-process": f"{here.pid}-{here.started}",
    }


def host_label() -> dict[str, str]:
    """What only sandboxes made on this machine have: of others, nobody here can say whether their owner lives."""
    return {"turngate-host": owner_labels()["turngate-host"]}


def is_abandoned(labels: Mapping[str, str]) -> bool:
    """Made on this machine, by a process that is no more. What others leave behind ends with its lease."""
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
    """What went wrong, in one line, without the key."""
    said = f"{type(error).__name__}: {error}"
    return " ".join((said.replace(secret, "***") if secret else said).split())[:500]
