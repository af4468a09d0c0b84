"""The `docker` sandbox: a container from an image or a Dockerfile, on this machine's Docker.

It uses the `docker` command, which respects the user's setup (contexts, rootless mode, podman as a replacement) and needs no Python
package. The official SDK is not used, because its calls block the event loop. The container's main process is a `sleep` that lasts for the
sandbox's lifetime. When it ends, Docker removes the container, even if Turngate has died. Commands run with `docker exec`, which reports
their exit codes.

A container has no privileges and cannot gain any. It has no network unless one is requested. The number of its processes is limited. Its
memory and CPU are limited if requested. Commands run as the image's user. An image needs a shell, `tar`, `grep` and basic commands such as
`cat` and `sleep`, which all but the smallest images have. A `DiskWatch` kills the container's commands if the container exceeds its disk
limit. Docker also enforces the limit if its file system supports quotas.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import math
import os
import re
import secrets
import shutil
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from turngate.common import owner
from turngate.common.aio import run_to_completion
from turngate.errors import SandboxError, SandboxGone, SandboxUnavailable
from turngate.sandboxes import disk, folders
from turngate.sandboxes.base import DEFAULT_OPEN_FILES, DEFAULT_PIDS, STANDALONE_ENV, ExecResult, SandboxSpec
from turngate.sandboxes.docker_process import STEP_TIMEOUT_S, run_docker, spawn_docker, try_docker
from turngate.sandboxes.posix import KILLED, PosixSandbox
from turngate.types import Json

KIND = "docker"
DEFAULT_IMAGE = "turngate-base:bookworm"  # built by `tools/base_image.py`
PUBLIC_IMAGE = "python:3.11-bookworm"  # from a registry, with Python and git
HOME, WORKDIR, SHARED = "/home/agent", "/workspace", "/run/turngate"
SANDBOX_LABEL, OWNER_LABEL, CREATED_LABEL = "turngate.sandbox", "turngate.owner", "turngate.created"
BUILD_LABEL = "turngate.build"  # on images that we built from a Dockerfile
JOB_ENV = "TURNGATE_JOB"  # set in the environment of every process that a command starts
OOM_SCORE = 500  # if the machine runs out of memory, the kernel kills an agent's processes before the gateway
KILL_TIMEOUT_S = 15.0
END_CHECK_S = 60.0  # how often to check whether Docker has failed to report the end of a command
END_GRACE_S = 10.0  # how long Docker may take to report it
# How much to raise the process limit of a container that has reached it, so that its processes can be killed.
SPARE_PIDS = 64
# Longer values, in bytes, are not passed in an --env-file, because docker limits the length of its lines.
MAX_ENV_LINE = 30_000
CLI_VARIABLES = ("DOCKER_", "HOME", "PATH", "BUILDKIT_", "COMPOSE_")  # variables that the docker command itself reads
AMBIGUOUS_CODES = (1, 125, 126, 127)  # exit codes that can also mean that the docker command itself failed

FOLDER_EXISTS = '[ -d "$1" ]'
RUN_SCRIPT = 'cd -- "$1" || exit 126; shift; exec "$@"'
# With "marked": kills all processes with the job's mark and their descendants. With "all": kills everything except process 1, its sleep
# (its oldest child), this script, and the first processes of the jobs given as further arguments with their descendants. "all" also finds
# processes that have dropped their mark and left their parent, or have taken another job's mark. Processes are stopped before they are
# killed, so that none can fork in the meantime.
KILL_SCRIPT = """
look() {
  list=
  for dir in /proc/[0-9]*; do
    read -r stat 2>/dev/null <"$dir/stat" || continue
    set -- "${dir#/proc/}" ${stat##*) }
    [ "$2" = Z ] || list="$list $1:$3:${21}"
  done
}
with_children() {
  more=1
  while [ $more = 1 ]; do
    more=0
    for one in $list; do
      pid=${one%%:*}; parent=${one#*:}; parent=${parent%%:*}
      case "$these" in *" $pid "*) continue;; *" $parent "*) these="$these$pid "; more=1;; esac
    done
  done
}
marked() { grep -ls "TURNGATE_JOB=$1" /proc/[0-9]*/environ; }
oldest() {
  best= age=
  for one in $list; do
    pid=${one%%:*}; rest=${one#*:}; parent=${rest%%:*}; born=${rest#*:}
    [ "$parent" = "$1" ] || continue
    case "$2" in "") ;; *" $pid "*) ;; *) continue;; esac
    if [ -z "$age" ] || [ "$born" -lt "$age" ]; then best=$pid age=$born; fi
  done
}
pids_of() { pids=" "; for file in $(marked "$1"); do file=${file#/proc/}; pids="$pids${file%/environ} "; done; }
find_all() {
  if [ "$mode" = marked ]; then
    pids_of "$job"; these=$pids; look; with_children; found=$these
    return
  fi
  these=" $$ "
  for name in $kept; do pids_of "$name"; look; oldest 0 "$pids"; these="$these$best "; done
  look; with_children; oldest 1 ""; these="${these}1 $best "
  found=" "
  for one in $list; do pid=${one%%:*}; case "$these" in *" $pid "*) ;; *) found="$found$pid ";; esac; done
}
send() { for pid in $found; do kill -s "$1" "$pid" 2>/dev/null; done; }
job=$1 left=$2 mode=$3; shift 3; kept=$*
if [ "$left" -gt 0 ]; then find_all; send TERM; fi
while [ "$left" -gt 0 ]; do find_all; [ "$found" = " " ] && exit 0; sleep 0.1; left=$((left - 1)); done
left=100
while [ "$left" -gt 0 ]; do
  find_all; [ "$found" = " " ] && exit 0
  send STOP; find_all; send KILL; sleep 0.05; left=$((left - 1))
done
exit 1
"""


class DockerSandbox(PosixSandbox):
    """A sandbox in a Docker container, created by `DockerBackend.create`."""

    def __init__(self, folder: Path, env: Mapping[str, str], storage: Path) -> None:
        self.folder = folder
        self.env = env
        self._storage = storage
        self.home, self.workdir = HOME, WORKDIR
        self._jobs: set[DockerJob] = set()
        self._stopped = False
        self.gone = False  # the container has ended, though `stop` was not called
        self._started_at = 0.0
        self._pids = DEFAULT_PIDS  # process limit
        self._killed = False  # we killed the container, because its processes could not be killed otherwise
        self._watch: disk.DiskWatch | None = None
        self.disk_error: SandboxError | None = None

    @property
    def id(self) -> str:
        return f"turngate-{self.folder.name}"

    @property
    def shared(self) -> tuple[Path, str] | None:
        return self.folder / "shared", SHARED

    async def start_container(self, image: str, spec: SandboxSpec) -> None:
        """Create and start the container."""
        folder = await run_docker("image", "inspect", "--format", "{{.Config.WorkingDir}}", image)
        self.workdir = spec.workdir or (folder.strip() if folder.strip() not in ("", "/") else WORKDIR)
        self._started_at = time.time()
        self._pids = spec.resources.pids or DEFAULT_PIDS
        limit = (spec.resources.disk_mb or disk.DEFAULT_DISK_MB) << 20
        await self._create_container([*_create_options(self, spec), image, str(math.ceil(spec.life_s))], limit)
        await run_docker("start", self.id)
        self._watch = disk.DiskWatch(self._storage, limit, self._measure_disk, self._kill_commands)
        ids = await run_docker("exec", self.id, "/bin/sh", "-c", "id -u; id -g")
        user, group = map(int, ids.split())
        missing = [HOME, *spec.folders]
        if (
            self.workdir == WORKDIR
            or (await try_docker("exec", self.id, "/bin/sh", "-c", FOLDER_EXISTS, "sh", self.workdir))[0]
        ):
            missing.append(self.workdir)
        await run_docker("cp", "-", f"{self.id}:/", stdin=_pack_folders(missing, user, group))

    async def _create_container(self, words: Sequence[str], limit: int) -> None:
        """Create the container, with a quota of `limit` bytes if Docker's file system supports quotas."""
        words = ["--ulimit", f"fsize={limit}", *words]
        code, _, _ = await try_docker("create", "--storage-opt", f"size={limit}", *words)
        if code:  # quotas may be unsupported; the error message varies between Docker and its replacements
            await run_docker("create", *words)

    async def _measure_disk(self) -> int:
        form = "{{.SizeRw}} {{.State.Pid}}"
        found = (await run_docker("container", "inspect", "--size", "--format", form, self.id)).split()
        if len(found) != 2 or not all(map(str.isdigit, found)):
            raise SandboxError(f"docker inspect reported {' '.join(found)[:100]!r} instead of the container's size")
        return int(found[0]) + await asyncio.to_thread(disk.measure_deleted_files, int(found[1]))

    async def _kill_commands(self, error: SandboxError) -> None:
        """Kill all commands except the relay, and record `error`, which describes the sandbox's disk use."""
        self.disk_error = error
        for job in [job for job in self._jobs if not job.standalone]:
            await job.kill(grace_s=0)

    async def spawn(
        self, command: Sequence[str], env: Mapping[str, str], cwd: str, stdin: int, stdout: int, stderr: int
    ) -> DockerJob:
        if self._stopped or self.gone:
            raise await self._explain_end()
        job = secrets.token_hex(8)
        lines, own = _split_env({**env, JOB_ENV: job})
        with tempfile.TemporaryFile() as file:  # unnamed, so only the docker command can read it
            file.write(lines)
            file.seek(0)
            process = await spawn_docker(
                *("docker", "exec", "--interactive", "--env-file", f"/dev/fd/{file.fileno()}"),
                *(word for name in own for word in ("--env", name)),
                *(self.id, "/bin/sh", "-c", RUN_SCRIPT, "sh", cwd, *command),
                env={**os.environ, **own},
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(file.fileno(),),
            )
        new = DockerJob(self, process, job, standalone=STANDALONE_ENV in env)
        self._jobs.add(new)
        return new

    async def _run(self, *args: Any, **kwargs: Any) -> ExecResult:
        result = await super()._run(*args, **kwargs)
        if self.gone and not result.timed_out:  # the command did not run to its end
            raise await self._explain_end()
        return result

    async def _explain_end(self) -> SandboxError:
        """Return the error for a container that has ended. Docker's events show whether it was stopped from outside the sandbox."""
        if self._stopped or self._killed:
            return SandboxGone("the sandbox has ended")
        when = ("--since", f"{self._started_at:.0f}", "--until", f"{time.time() + 1:.0f}")
        output = await run_docker("events", *when, "--filter", f"container={self.id}", "--format", "{{.Action}}")
        events = {line.strip() for line in output.splitlines()}
        # "destroy" says nothing: Docker removes the container whenever it ends, because of --rm.
        if events & {"kill", "stop"}:
            return SandboxError(
                "the sandbox's container was stopped from outside the sandbox, for example with `docker stop`"
            )
        if "die" in events:
            return SandboxGone(
                "the sandbox's container has ended, although it was not stopped from outside the sandbox"
            )
        return SandboxError("the sandbox's container has ended, and Docker's events do not show why")

    async def kill(self) -> None:
        """Kill the whole container. This is the last resort if its processes cannot be killed otherwise."""
        code, _, _ = await try_docker("kill", self.id)
        self._killed = self._killed or not code  # on failure, it had already ended

    @asynccontextmanager
    async def allow_more_processes(self) -> AsyncIterator[None]:
        """Raise the process limit while the block runs, because `docker exec` fails in a container that has reached its limit."""
        await try_docker("update", "--pids-limit", str(self._pids + SPARE_PIDS), self.id)
        try:
            yield
        finally:
            await try_docker("update", "--pids-limit", str(self._pids), self.id)

    async def check_running(self) -> bool:
        """Return whether the container is running. Raise `SandboxError` if that cannot be determined."""
        code, out, stderr = await try_docker("container", "inspect", "--format", "{{.State.Running}}", self.id)
        if code and "no such" not in stderr.lower():
            raise SandboxError(f"docker inspect failed: {stderr.strip()[-300:]}")
        self.gone = code != 0 or out.strip() != "true"
        return not self.gone

    def other_jobs(self, job: DockerJob) -> list[DockerJob]:
        """Return the running jobs except for `job`."""
        return [other for other in self._jobs if other is not job and other.is_running]

    async def has_unreported_end(self) -> bool:
        """Return whether a command has ended without Docker notifying its `docker exec`, which would then wait forever.

        Docker misses the end of a command if containerd is restarting at that moment. The processes are counted outside the container,
        where an agent cannot falsify the count. If they cannot be counted, return False.
        """
        since = time.monotonic() - END_CHECK_S
        jobs = [job for job in self._jobs if job.is_running and job.started_at < since]
        try:
            count = await self._count_commands()
        except (SandboxError, ValueError):
            return False
        return count < sum(job.is_running for job in jobs)

    async def _count_commands(self) -> int:
        """Count the running commands. On the host, a command's first process has the same parent as the container's first process."""
        first = int(await run_docker("container", "inspect", "--format", "{{.State.Pid}}", self.id))
        lines = (await run_docker("top", self.id, "-eo", "pid,ppid")).splitlines()[1:]
        parents = {int(pid): int(parent) for pid, parent in map(str.split, lines)}
        if first not in parents:
            raise SandboxError("docker top does not show the container's first process")
        return sum(parent == parents[first] for parent in parents.values()) - 1

    def discard_job(self, job: DockerJob) -> None:
        self._jobs.discard(job)

    async def stop(self) -> None:
        await run_to_completion(self._stop())

    async def _stop(self) -> None:
        self._stopped = True
        if self._watch is not None:
            await self._watch.stop()
        await _remove_container(self.id)
        for job in list(self._jobs):
            await job.wait_for_client()
        self._jobs.clear()
        await asyncio.to_thread(folders.remove_folder, self.folder)


class DockerJob:
    """A command that runs through `docker exec`.

    A `standalone` job starts no other processes. It survives when the agent's job is killed, unless the whole container must be killed.
    """

    def __init__(
        self, sandbox: DockerSandbox, process: asyncio.subprocess.Process, name: str, *, standalone: bool
    ) -> None:
        self._sandbox = sandbox
        self._process = process
        self.name = name
        self.standalone = standalone
        self.started_at = time.monotonic()

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> int:
        code = await self._wait_for_exit()
        self._sandbox.discard_job(self)
        if code in AMBIGUOUS_CODES and not await self._sandbox.check_running():
            return KILLED  # its container ended; a command inside can cause that, so it is not a sandbox error
        return code if code >= 0 else KILLED

    async def _wait_for_exit(self) -> int:
        """Wait until `docker exec` has ended, and return its exit code. Raise `SandboxError` if Docker does not report a command's end."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(END_CHECK_S):
                    return await self._process.wait()
            if not await self._sandbox.has_unreported_end():
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(END_GRACE_S):
                    return await self._process.wait()
            if await self._sandbox.has_unreported_end():
                raise SandboxError("Docker did not report the end of a command; containerd was probably restarted")

    async def kill(self, grace_s: float = 2.0) -> None:
        deadline = time.monotonic() + grace_s + KILL_TIMEOUT_S
        others = self._sandbox.other_jobs(self)
        last = all(job.standalone for job in others) and not self.standalone
        arguments = ["all", *(job.name for job in others)] if last else ["marked"]
        while True:
            code, stderr = await self._kill_inside(grace_s, arguments)
            if code:
                async with self._sandbox.allow_more_processes():
                    code, stderr = await self._kill_inside(grace_s, arguments)
            failed = f"cannot kill a process in the container: {stderr.strip()[-200:]}" if code else ""
            if failed and not await self._sandbox.check_running():
                failed = ""
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), 1)
                if not failed:
                    break
            if failed or time.monotonic() > deadline:
                if not last:
                    raise SandboxError(failed or "docker exec is still running, although its command is not")
                await self._sandbox.kill()  # always works, and no other job of the agent is running
                await self.wait_for_client()
                break
            # Docker had not started the command yet when we searched for it, so try again.
        self._sandbox.discard_job(self)

    async def wait_for_client(self) -> None:
        """Wait until `docker exec` notices that its container has ended. Kill `docker exec` if that takes too long."""
        try:
            await asyncio.wait_for(self._process.wait(), KILL_TIMEOUT_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def _kill_inside(self, grace_s: float, arguments: Sequence[str]) -> tuple[int, str]:
        tenths = str(math.ceil(grace_s * 10))
        command = ("exec", self._sandbox.id, "/bin/sh", "-c", KILL_SCRIPT, "sh", self.name, tenths, *arguments)
        code, _, stderr = await try_docker(*command, timeout_s=grace_s + STEP_TIMEOUT_S)
        return code, stderr


class DockerBackend:
    """Creates Docker sandboxes.

    `root` is the parent of their folders on the host, by default a private temporary folder. `image` is the default image. If `image` is
    empty, the default is Turngate's base image if this machine has it, and a public image otherwise.
    """

    name = KIND
    relocates = True
    has_host_programs = False

    def __init__(self, root: Path | None = None, image: str = "") -> None:
        self.root = root
        self.image = image
        self._storage: Path | None = None

    @property
    def settings(self) -> Mapping[str, Json]:
        return {"image": self.image} if self.image else {}

    async def check(self) -> None:
        if not shutil.which("docker"):
            raise SandboxUnavailable(
                "docker is not installed; run `apt-get install docker.io`, or see https://docs.docker.com"
            )
        code, _, stderr = await try_docker("version", "--format", "{{.Server.Version}}")
        if code:
            raise SandboxUnavailable(
                f"`docker version` failed: {stderr.strip()[-300:]}; start the Docker daemon, or allow this user to use it"
            )

    def not_enforced(self, spec: SandboxSpec) -> tuple[str, ...]:
        """Return an empty tuple: Docker enforces every part of a spec."""
        return ()

    async def create(self, spec: SandboxSpec) -> DockerSandbox:
        image = await self._resolve_image(spec)
        self._storage = self._storage or await _find_storage(self.root or Path(tempfile.gettempdir()))
        folder = folders.create_folder(self.root, KIND, "shared")  # removed by `stop` if the creation fails
        _make_readable(folder / "shared")
        sandbox = DockerSandbox(folder, {"LANG": "C.UTF-8", **spec.env}, self._storage)
        try:
            await run_to_completion(sandbox.start_container(image, spec))
        except BaseException:
            await run_to_completion(sandbox.stop())
            raise
        return sandbox

    async def _resolve_image(self, spec: SandboxSpec) -> str:
        if spec.dockerfile:
            return await _build_image(Path(spec.dockerfile))
        requested = spec.image or self.image
        for image in (requested,) if requested else (DEFAULT_IMAGE, PUBLIC_IMAGE):
            code, _, _ = await try_docker("image", "inspect", image)
            if not code:
                return image
        await run_docker("pull", "--quiet", image, timeout_s=3600)
        return image

    async def sweep(self) -> int:
        form = f'{{{{.ID}}}}\t{{{{.Label "{OWNER_LABEL}"}}}}'
        containers = await run_docker("ps", "--all", "--no-trunc", "--filter", f"label={OWNER_LABEL}", "--format", form)
        removed = 0
        for line in containers.splitlines():
            container, _, name = line.partition("\t")
            parsed = owner.parse_owner(name)
            if parsed and parsed.gone:
                await _remove_container(container)
                removed += 1
        await folders.sweep_folders(self.root, KIND)
        return removed


def _create_options(sandbox: DockerSandbox, spec: SandboxSpec) -> list[str]:
    limits = spec.resources
    labels = {
        **spec.labels,
        SANDBOX_LABEL: sandbox.id,
        OWNER_LABEL: str(owner.current_owner()),
        CREATED_LABEL: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    options = ["--name", sandbox.id, "--init", "--rm", "--entrypoint", "sleep", "--hostname", "sandbox"]
    options += [
        "--cap-drop",
        "ALL",
        "--security-opt",
        "no-new-privileges",
        "--pids-limit",
        str(limits.pids or DEFAULT_PIDS),
        "--oom-score-adj",
        str(OOM_SCORE),
        "--ulimit",
        f"nofile={limits.open_files or DEFAULT_OPEN_FILES}",
    ]
    if spec.network == "none":
        options += ["--network", "none"]
    if limits.memory_mb:  # an equal --memory-swap means no swap
        options += ["--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m"]
    if limits.cpus:
        options += ["--cpus", str(limits.cpus)]
    for name, value in labels.items():
        options += ["--label", f"{name}={value}"]
    # Read-only, so that the container cannot leave files in it. Sockets in it can still be used.
    options += ["--mount", _mount_option(str(sandbox.folder / "shared"), SHARED, writable=False)]
    for mount in spec.mounts:
        options += ["--mount", _mount_option(mount.source, mount.target, writable=mount.writable)]
    return options


async def _find_storage(default: Path) -> Path:
    """Return Docker's data folder, or `default` if this user cannot read it."""
    _, storage, _ = await try_docker("info", "--format", "{{.DockerRootDir}}")
    return Path(storage.strip()) if os.access(storage.strip(), os.R_OK) else default


def _mount_option(source: str, target: str, *, writable: bool) -> str:
    words = ["type=bind", f"source={source}", f"target={target}", *([] if writable else ["readonly"])]
    quoted = ['"' + word.replace('"', '""') + '"' if "," in word or '"' in word else word for word in words]
    return ",".join(quoted)


def _make_readable(folder: Path) -> None:
    """Let every user read a folder, because the container may run as any user. The parent folder keeps the host's other users out."""
    folder.chmod(0o755)


def _pack_folders(paths: Sequence[str], user: int, group: int) -> bytes:
    """Build a tar file with empty folders owned by the container's user.

    Docker can unpack it even where that user may not create folders.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path in paths:
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.type, entry.mode, entry.mtime = tarfile.DIRTYPE, 0o755, int(time.time())
            entry.uid, entry.gid = user, group
            tar.addfile(entry)
    return packed.getvalue()


def _split_env(env: Mapping[str, str]) -> tuple[bytes, dict[str, str]]:
    """Return the content of an --env-file, and the variables that must be passed through the docker command's own environment instead.

    Values are never passed as arguments, which every user of the host can read.
    """
    lines, own = [], {}
    for name, value in env.items():
        if "\n" in value or "\r" in value or len(os.fsencode(value)) > MAX_ENV_LINE:
            if name.startswith(CLI_VARIABLES):
                raise SandboxError(
                    f"the environment variable {name} cannot be set in a container: the docker command may read it itself, and its value "
                    f"contains line breaks or more than {MAX_ENV_LINE} bytes; rename the variable, or give it a shorter value without "
                    "line breaks"
                )
            own[name] = value
        else:
            lines.append(f"{name}={value}\n")
    return "".join(lines).encode("utf-8", "surrogateescape"), own


async def _build_image(folder: Path) -> str:
    """Build an image from a folder with a Dockerfile, unless one that was built from the same content exists. Return its tag."""
    tag = f"turngate-build:{await asyncio.to_thread(_digest_folder, folder)}"
    code, _, _ = await try_docker("image", "inspect", tag)
    if code:
        # A failed build leaves nothing behind. The image has no owner label: every container started from it would inherit the label, and
        # `sweep` could remove the container.
        command = ("build", "--quiet", "--force-rm", "--label", f"{BUILD_LABEL}=1", "--tag", tag, str(folder))
        code, out, stderr = await try_docker(*command, timeout_s=3600)
        if code:
            raise SandboxError(
                f"docker could not build {folder}/Dockerfile; the last lines of its output:\n{_last_lines(stderr or out)}"
            )
    return tag


def _last_lines(stderr: str, count: int = 12) -> str:
    """Return the last lines of a log, with colors and progress bars removed."""
    plain = re.sub(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]", "", stderr)
    lines = [line.rpartition("\r")[2].rstrip() for line in plain.replace("\r\n", "\n").split("\n")]
    clean = ["".join(c for c in line if c.isprintable() or c == "\t")[:300] for line in lines if line]
    return "\n".join(f"    {line}" for line in clean[-count:])


def _digest_folder(folder: Path) -> str:
    if not (folder / "Dockerfile").is_file():
        raise SandboxError(
            f"cannot build an image: {folder} is not a folder with a Dockerfile; set the task's dockerfile to a folder that contains one"
        )
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        kind = b"link" if path.is_symlink() else b"file" if path.is_file() else b"folder"
        content = os.fsencode(path.readlink()) if kind == b"link" else path.read_bytes() if kind == b"file" else b""
        mode = b"%o" % (path.lstat().st_mode & 0o777)
        for part in (os.fsencode(path.relative_to(folder)), kind, mode, content):
            digest.update(b"%d:" % len(part) + part)
    return digest.hexdigest()[:32]


async def _remove_container(container: str) -> None:
    """Remove a container with its processes and volumes, and wait until it no longer exists."""
    deadline = time.monotonic() + STEP_TIMEOUT_S
    while True:
        code, _, stderr = await try_docker("rm", "--force", "--volumes", container)
        if code == 0 or "No such container" in stderr:
            return
        if time.monotonic() > deadline:
            raise SandboxError(f"docker could not remove container {container}: {stderr.strip()[-300:]}")
        await asyncio.sleep(0.2)  # Docker may already be removing it, because its lifetime is over
