"""The `docker` sandbox: a container of an image, or of a folder with a Dockerfile, on the Docker of this machine.

Over the `docker` command: it reaches Docker the way its user does (contexts, rootless, podman's stand-in), starts no threads and
needs no package; the official SDK blocks. The container's only own process is a `sleep` that ends with the sandbox's life, and
Docker removes the container then, whatever became of us. Commands are `docker exec`s, whose exit codes are true.

No privileges, no new ones, no network unless asked for, limits on processes, memory and processors. Commands run as the image's
user. An image needs a shell, `sleep`, `cat`, `grep` and `tar` (any but the barest has them). Disk space is not limited.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import math
import os
import secrets
import shutil
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from turngate.errors import SandboxError, SandboxUnavailable
from turngate.sandboxes import folders, owner
from turngate.sandboxes.base import SandboxSpec
from turngate.sandboxes.posix import KILLED, Posix, to_the_end

KIND = "docker"
DEFAULT_IMAGE = "turngate-base:bookworm"  # what `tools/base_image.py` makes
PUBLIC_IMAGE = "python:3.11-bookworm"  # what a registry has, with Python and git
HOME, WORKDIR, SHARED = "/home/agent", "/workspace", "/run/turngate"
SANDBOX_LABEL, OWNER_LABEL, CREATED_LABEL = "turngate.sandbox", "turngate.owner", "turngate.created"
JOB = "TURNGATE_JOB"  # in the environment of everything that a command starts
PIDS = 4096  # the most processes, where a spec does not say
STEP_S = 120.0  # for Docker to do one thing
END_S = 15.0
LONG = 30_000  # bytes; the docker command does not read longer lines from a file of variables
OF_THE_CLI = ("DOCKER_", "HOME", "PATH", "BUILDKIT_", "COMPOSE_")  # variables that the docker command heeds itself
DOUBTFUL = (1, 125, 126, 127)  # exit codes by which the docker command also says that it has failed itself

COMMAND = 'cd -- "$1" || exit 126; shift; exec "$@"'
# Everything that has a job's mark, and what descends from it. Stopped before it is killed, so that nothing is born meanwhile.
KILL = """
find_all() {
  found=" "
  for file in $(grep -ls "$1" /proc/[0-9]*/environ); do file=${file#/proc/}; found="$found${file%/environ} "; done
  more=1
  while [ $more = 1 ]; do
    more=0
    for dir in /proc/[0-9]*; do
      pid=${dir#/proc/}
      case "$found" in *" $pid "*) continue;; esac
      read -r stat 2>/dev/null <"$dir/stat" || continue
      set -- ${stat##*) }
      case "$found" in *" $2 "*) found="$found$pid "; more=1;; esac
    done
  done
}
send() { for pid in $found; do kill -s "$1" "$pid" 2>/dev/null; done; }
mark=$1 left=$2
if [ "$left" -gt 0 ]; then find_all "$mark"; send TERM; fi
while [ "$left" -gt 0 ]; do find_all "$mark"; [ "$found" = " " ] && exit 0; sleep 0.1; left=$((left - 1)); done
left=100
while [ "$left" -gt 0 ]; do
  find_all "$mark"; [ "$found" = " " ] && exit 0
  send STOP; find_all "$mark"; send KILL; sleep 0.05; left=$((left - 1))
done
exit 1
"""


class Docker(Posix):
    """A container. Made by `DockerBackend.create`."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder = folder
        self.env = env
        self.home, self.workdir = HOME, WORKDIR
        self._commands: set[asyncio.subprocess.Process] = set()
        self._stopped = False

    @property
    def id(self) -> str:
        return f"turngate-{self.folder.name}"

    @property
    def shared(self) -> tuple[Path, str] | None:
        return self.folder / "shared", SHARED

    async def begin(self, image: str, spec: SandboxSpec) -> None:
        """Create and start the container."""
        folder = await docker("image", "inspect", "--format", "{{.Config.WorkingDir}}", image)
        if folder.strip() not in ("", "/"):
            self.workdir = folder.strip()
        await docker("create", *_options(self, spec), image, str(math.ceil(spec.life_s)))
        await docker("start", self.id)
        ids = await docker("exec", self.id, "/bin/sh", "-c", "id -u; id -g")
        user, group = map(int, ids.split())
        made = [HOME] if self.workdir != WORKDIR else [HOME, WORKDIR]
        await docker("cp", "-", f"{self.id}:/", stdin=_folders(made, user, group))

    async def spawn(
        self, command: Sequence[str], env: Mapping[str, str], cwd: str, stdin: int, stdout: int, stderr: int
    ) -> DockerJob:
        if self._stopped:
            raise SandboxError("the sandbox has ended")
        job = secrets.token_hex(8)
        lines, own = _variables({**env, JOB: job})
        with tempfile.TemporaryFile() as file:  # without a name, for the docker command alone
            file.write(lines)
            file.seek(0)
            process = await _start(
                *("docker", "exec", "--interactive", "--env-file", f"/dev/fd/{file.fileno()}"),
                *(word for name in own for word in ("--env", name)),
                *(self.id, "/bin/sh", "-c", COMMAND, "sh", cwd, *command),
                env={**os.environ, **own},
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(file.fileno(),),
            )
        self._commands.add(process)
        return DockerJob(self, process, job)

    async def running(self) -> bool:
        code, out, _ = await _docker("inspect", "--format", "{{.State.Running}}", self.id)
        return code == 0 and out.strip() == "true"

    def ended(self, process: asyncio.subprocess.Process) -> None:
        self._commands.discard(process)

    async def stop(self) -> None:
        await to_the_end(self._stop())

    async def _stop(self) -> None:
        self._stopped = True
        await _remove(self.id)
        for process in list(self._commands):
            try:
                await asyncio.wait_for(process.wait(), END_S)
            except TimeoutError:
                with suppress(ProcessLookupError):
                    process.kill()
        self._commands.clear()
        await asyncio.to_thread(folders.remove, self.folder)


class DockerJob:
    """A `docker exec`."""

    def __init__(self, sandbox: Docker, process: asyncio.subprocess.Process, name: str) -> None:
        self._sandbox = sandbox
        self._process = process
        self._name = name

    async def wait(self) -> int:
        code = await self._process.wait()
        self._sandbox.ended(self._process)
        if code in DOUBTFUL and not await self._sandbox.running():
            raise SandboxError("the sandbox has ended")
        return code if code >= 0 else KILLED

    async def kill(self, grace_s: float = 2.0) -> None:
        deadline = time.monotonic() + grace_s + END_S
        while True:
            code, said = await self._kill_inside(grace_s)
            if code and await self._sandbox.running():
                raise SandboxError(f"a process cannot be killed: {said.strip()[-200:]}")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), 1)
                break
            if time.monotonic() > deadline:
                raise SandboxError("docker exec does not end though its command has")
            # Docker was only about to start it when we looked for it.
        self._sandbox.ended(self._process)

    async def _kill_inside(self, grace_s: float) -> tuple[int, str]:
        mark, tenths = f"{JOB}={self._name}", str(math.ceil(grace_s * 10))
        command = ("exec", self._sandbox.id, "/bin/sh", "-c", KILL, "sh", mark, tenths)
        code, _, said = await _docker(*command, timeout_s=grace_s + STEP_S)
        return code, said


class DockerBackend:
    """`root`: where the folders with the sandboxes' sockets lie; as for `local`. `image`: the one to take where a spec names none;
    left empty, our own base image if it was made here, else a public one."""

    name = KIND
    relocates = True

    def __init__(self, root: Path | None = None, image: str = "") -> None:
        self.root = root
        self.image = image

    async def check(self) -> None:
        if not shutil.which("docker"):
            raise SandboxUnavailable("docker is not installed: apt-get install docker.io, or https://docs.docker.com")
        code, _, said = await _docker("version", "--format", "{{.Server.Version}}")
        if code:
            raise SandboxUnavailable(f"no Docker daemon answers (is it started?): {said.strip()[-300:]}")

    def not_enforced(self, spec: SandboxSpec) -> tuple[str, ...]:
        """What a spec asks for and this backend cannot hold an agent to."""
        return ()

    async def create(self, spec: SandboxSpec) -> Docker:
        image = await self._image(spec)
        folder = folders.make(self.root, KIND, "shared")
        _open_for_the_container(folder / "shared")
        sandbox = Docker(folder, {"LANG": "C.UTF-8", **spec.env})
        try:
            await to_the_end(sandbox.begin(image, spec))
        except BaseException:
            await to_the_end(sandbox.stop())
            raise
        return sandbox

    async def _image(self, spec: SandboxSpec) -> str:
        if spec.dockerfile:
            return await _built(Path(spec.dockerfile))
        named = spec.image or self.image
        for image in (named,) if named else (DEFAULT_IMAGE, PUBLIC_IMAGE):
            code, _, _ = await _docker("image", "inspect", image)
            if not code:
                return image
        await docker("pull", "--quiet", image, timeout_s=3600)
        return image

    async def sweep(self) -> int:
        form = f'{{{{.ID}}}}\t{{{{.Label "{OWNER_LABEL}"}}}}'
        listed = await docker("ps", "--all", "--no-trunc", "--filter", f"label={OWNER_LABEL}", "--format", form)
        left = 0
        for line in listed.splitlines():
            container, _, name = line.partition("\t")
            known = owner.parse(name)
            if known and known.gone:
                await _remove(container)
                left += 1
        await folders.sweep(self.root, KIND)
        return left


def _options(sandbox: Docker, spec: SandboxSpec) -> list[str]:
    """Of `docker create`."""
    limits = spec.resources
    labels = {
        **spec.labels,
        SANDBOX_LABEL: sandbox.id,
        OWNER_LABEL: str(owner.this_process()),
        CREATED_LABEL: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    options = ["--name", sandbox.id, "--init", "--rm", "--entrypoint", "sleep", "--hostname", "sandbox"]
    options += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--pids-limit", str(limits.pids or PIDS)]
    if spec.network == "none":
        options += ["--network", "none"]
    if limits.memory_mb:  # the second: no swap on top
        options += ["--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m"]
    if limits.cpus:
        options += ["--cpus", str(limits.cpus)]
    for name, value in labels.items():
        options += ["--label", f"{name}={value}"]
    # Read-only, so that nobody else's files are left in it; a socket can be used all the same.
    options += ["--mount", _mount(str(sandbox.folder / "shared"), SHARED, writable=False)]
    for mount in spec.mounts:
        options += ["--mount", _mount(mount.source, mount.target, writable=mount.writable)]
    return options


def _mount(source: str, target: str, *, writable: bool) -> str:
    words = ["type=bind", f"source={source}", f"target={target}", *([] if writable else ["readonly"])]
    quoted = ['"' + word.replace('"', '""') + '"' if "," in word or '"' in word else word for word in words]
    return ",".join(quoted)


def _open_for_the_container(folder: Path) -> None:
    """Its user may be anybody; on the host, the folder around this one is closed."""
    folder.chmod(0o755)


def _folders(paths: Sequence[str], user: int, group: int) -> bytes:
    """A tar file with empty folders that belong to the container's user. Docker puts them in place; nobody inside could."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path in paths:
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.type, entry.mode, entry.mtime = tarfile.DIRTYPE, 0o755, int(time.time())
            entry.uid, entry.gid = user, group
            tar.addfile(entry)
    return packed.getvalue()


def _variables(env: Mapping[str, str]) -> tuple[bytes, dict[str, str]]:
    """Variables as a file for the docker command, and those that it must take from its own environment. None as arguments:
    those can be read by every user of the host."""
    lines, own = [], {}
    for name, value in env.items():
        if "\n" in value or "\r" in value or len(value) > LONG:
            if name.startswith(OF_THE_CLI):
                raise SandboxError(f"docker cannot take a value of several lines for {name}")
            own[name] = value
        else:
            lines.append(f"{name}={value}\n")
    return "".join(lines).encode("utf-8", "surrogateescape"), own


async def _built(folder: Path) -> str:
    """The image of a folder with a Dockerfile; built only when its content has never been."""
    tag = f"turngate-build:{await asyncio.to_thread(_digest, folder)}"
    code, _, _ = await _docker("image", "inspect", tag)
    if code:
        await docker("build", "--quiet", "--tag", tag, str(folder), timeout_s=3600)
    return tag


def _digest(folder: Path) -> str:
    if not (folder / "Dockerfile").is_file():
        raise SandboxError(f"there is no Dockerfile in {folder}")
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        kind = b"link" if path.is_symlink() else b"file" if path.is_file() else b"folder"
        content = os.fsencode(path.readlink()) if kind == b"link" else path.read_bytes() if kind == b"file" else b""
        mode = b"%o" % (path.lstat().st_mode & 0o777)
        for part in (os.fsencode(path.relative_to(folder)), kind, mode, content):
            digest.update(b"%d:" % len(part) + part)
    return digest.hexdigest()[:32]


async def _remove(container: str) -> None:
    """Remove a container with its processes and volumes, and see it gone."""
    deadline = time.monotonic() + STEP_S
    while True:
        code, _, said = await _docker("rm", "--force", "--volumes", container)
        if code == 0 or "No such container" in said:
            return
        if time.monotonic() > deadline:
            raise SandboxError(f"docker cannot remove {container}: {said.strip()[-300:]}")
        await asyncio.sleep(0.2)  # it is being removed already, because its time was over


async def docker(*arguments: str, stdin: bytes = b"", timeout_s: float = STEP_S) -> str:
    """Run the docker command; what it printed."""
    code, out, err = await _docker(*arguments, stdin=stdin, timeout_s=timeout_s)
    if code:
        raise SandboxError(f"docker {arguments[0]} failed: {err.strip()[-500:]}")
    return out


async def _docker(*arguments: str, stdin: bytes = b"", timeout_s: float = STEP_S) -> tuple[int, str, str]:
    process = await _start(
        "docker",
        *arguments,
        env=os.environ,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(stdin), timeout_s)
    except TimeoutError as error:
        raise SandboxError(f"docker {arguments[0]} has not ended after {timeout_s:.0f} s") from error
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await to_the_end(process.wait())
    return process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace")


async def _start(
    *command: str, env: Mapping[str, str], stdin: int, stdout: int, stderr: int, pass_fds: Sequence[int] = ()
) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            env=env,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            start_new_session=True,  # a Ctrl-C in our terminal is not for it
        )
    except FileNotFoundError as error:
        raise SandboxUnavailable(
            "docker is not installed: apt-get install docker.io, or https://docs.docker.com"
        ) from error
    except (OSError, ValueError) as error:
        raise SandboxError(f"docker cannot be started: {error}") from error
