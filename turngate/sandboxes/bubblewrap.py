"""The `bubblewrap` sandbox: the host's programs, read-only, in separate namespaces. It needs no image, no daemon and no root privileges.

It contains the host's /usr and folders such as /bin and /lib, a few harmless files from /etc, an empty home, a working folder, a private
/tmp and the mounts. If /usr has no Python, the sandbox also contains the Python that runs Turngate. No other files of the host are
visible. The sandbox sees none of the host's processes, and no network except a private loopback. Process 1 is a supervisor. All commands
and background jobs run under it, so they share /tmp, the loopback and the view of processes. A system call filter (`seccomp.py`) blocks
the kernel's keyrings and VSOCK, which namespaces do not isolate.

The sandbox shares the host's kernel. `not_enforced` lists what cannot be enforced. With `network="open"`, the sandbox uses the
host's network, including its loopback.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import sys
from functools import cache
from pathlib import Path, PurePosixPath

from turngate.common.aio import run_to_completion
from turngate.errors import SandboxError, SandboxUnavailable
from turngate.sandboxes import cgroups, disk, folders, seccomp
from turngate.sandboxes.base import NO_SETTINGS, Preload, SandboxSpec
from turngate.sandboxes.folders import create_folder
from turngate.sandboxes.supervised_sandbox import SUPERVISOR, SupervisedSandbox
from turngate.sandboxes.warm_start import FORK_SERVER, ServerProcess, WarmStart, count_plain, find_server

KIND = "bubblewrap"
HOME, WORKDIR, SHARED, SUPERVISOR_INSIDE = "/home/agent", "/workspace", "/run/turngate", "/run/supervisor.py"
FORK_SERVER_INSIDE = "/run/fork_server.py"
USER_ID = 1000  # inside, because some agents refuse to run as root; on the host it maps to Turngate's user, without privileges
IDENTITY = (
    *("--cap-drop", "ALL", "--uid", str(USER_ID), "--gid", str(USER_ID)),
    *("--hostname", "sandbox", "--new-session"),
)
NAMESPACES = ("--unshare-user", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")  # namespaces of a fork server
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")  # links into /usr on most machines, real folders on others
# These contain no secrets, and programs break without them.
ETC = (
    "alternatives",
    "ca-certificates.conf",
    "gai.conf",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "pki/ca-trust",
    "pki/tls/certs",
    "pki/tls/cert.pem",
    "protocols",
    "services",
    "shells",
    "ssl/certs",
    "ssl/cert.pem",
    "ssl/openssl.cnf",
    "timezone",
)
KEY_FILES = ("keys", "key-users")  # in /proc
RESERVED = ("usr", "etc", "proc", "dev", "sys", "run", *SYSTEM)  # where a sandbox cannot have its own folders
ETC_ONLINE = ("hosts", "resolv.conf")  # only with the host's network


class BubblewrapBackend:
    """Creates bubblewrap sandboxes. `root` is the parent of their folders on the host, by default a private temporary folder."""

    name = KIND
    relocates = True
    has_host_programs = True
    settings = NO_SETTINGS  # each machine has its own root

    def __init__(self, root: Path | None = None) -> None:
        self.root = root

    async def check(self) -> None:
        if not shutil.which("bwrap"):
            raise SandboxUnavailable(
                "bubblewrap is not installed; run `apt-get install bubblewrap`, or use your system's package manager"
            )
        trial = await asyncio.create_subprocess_exec(
            *("bwrap", "--unshare-all", "--ro-bind", "/", "/", "--", "/bin/sh", "-c", ":"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, stderr = await trial.communicate()
        if trial.returncode:
            raise SandboxUnavailable(
                f"bubblewrap cannot create namespaces on this machine: {stderr.decode(errors='replace').strip()[-200:]}; "
                "check the sysctls kernel.unprivileged_userns_clone and kernel.apparmor_restrict_unprivileged_userns, or use the docker "
                "sandbox"
            )

    def not_enforced(self, spec: SandboxSpec) -> tuple[str, ...]:
        """List the parts of a spec that this backend cannot enforce, and the kernel features that it cannot block."""
        image = ("image",) if spec.image or spec.dockerfile else ()
        unfiltered = () if seccomp.build_filter() else ("kernel keyrings and VSOCK",)
        return (*image, *unfiltered, *cgroups.not_enforced(spec.resources))

    async def create(self, spec: SandboxSpec) -> SupervisedSandbox:
        if not (bwrap := shutil.which("bwrap")):
            await self.check()
        _check_mounts(spec)
        _check_folders(spec)
        python, prefix = _find_python()
        path = PATH if not prefix else f"{PATH}:{Path(python).parent}"
        env = {"PATH": path, "LANG": "C.UTF-8", "TMPDIR": "/tmp", **spec.env}  # noqa: S108
        more = (_folder_name(n) for n in range(len(spec.folders)))
        folder = folders.create_folder(self.root, KIND, "home", "work", "tmp", "shared", "etc", *more)
        sandbox = SupervisedSandbox(folder, env, home=HOME, workdir=spec.workdir or WORKDIR, shared=SHARED)
        filters = _open_filters()
        warm: WarmStart | None = None
        try:
            _write_etc(folder / "etc")
            warm = await self._find_server(spec)
            options = [*_bwrap_options(spec, folder), *(prefix and ("--ro-bind", prefix, prefix)), "--remount-ro", "/"]
            for fd in filters:
                options += ["--seccomp", str(fd)]
            command = [bwrap or "bwrap", *options, "--", python, "-I", "-S", "-X", "utf8", SUPERVISOR_INSIDE]
            if warm is None:
                await sandbox.launch(command, spec, pass_fds=filters)
            else:
                namespace = f"/proc/{os.getpid()}/fd/{warm.namespace}"
                enter = ["nsenter", f"--user={namespace}", "--preserve-credentials", "--"]
                await sandbox.launch([*enter, *command], spec, pass_fds=filters)
                sandbox.use_server(warm, inside=True)
        except BaseException:
            if warm is not None:
                warm.close()
            await run_to_completion(sandbox.stop())
            raise
        finally:
            for fd in filters:
                os.close(fd)
        return sandbox

    async def _find_server(self, spec: SandboxSpec) -> WarmStart | None:
        """Return a fork server for the sandbox, or None if the sandbox must start without one.

        A fork server cannot enter the host's network. It can enter a sandbox only if the sandbox's user namespace is below the server's.
        """
        preload = spec.preload
        if preload is None:
            return None
        if spec.network != "none" or not shutil.which("nsenter"):
            count_plain("nsenter is not installed" if spec.network == "none" else "the sandbox has the host's network")
            return None
        source = next((mount.source for mount in spec.mounts if mount.target == preload.folder), preload.folder)
        key = f"{KIND} {spec.mounts}"
        return await find_server(key, preload, Path(source), lambda program: self._prepare_server(program, spec))

    def _prepare_server(self, preload: Preload, spec: SandboxSpec) -> ServerProcess:
        """Create a folder for a fork server, and return the command and settings that start the server in its own sandbox.

        The server's sandbox has no network, no view of other processes and no rollout data.

        The server must be in the host's process namespace, because otherwise it could not enter the process namespace of a sandbox. It sees
        no processes, because it has no /proc. It has no privileges, but may enter sandboxes, because their user namespaces are created
        below its own.
        """
        folder = create_folder(self.root, KIND, "etc", "scratch", "scratch/home", "scratch/tmp", "scratch/work")
        _write_etc(folder / "etc")
        scratch = f"/{folder.name}"
        options = [*NAMESPACES, "--unshare-net", *IDENTITY, *_system_options(folder, online=False), "--dir", HOME]
        options += ["--dir", "/tmp", "--bind", str(folder / "scratch"), scratch]  # noqa: S108
        options += ["--ro-bind", str(SUPERVISOR), SUPERVISOR_INSIDE, "--ro-bind", str(FORK_SERVER), FORK_SERVER_INSIDE]
        for mount in spec.mounts:
            options += ["--ro-bind", mount.source, mount.target]
        filters = _open_filters()
        for fd in filters:
            options += ["--seccomp", str(fd)]
        return ServerProcess(
            command=("bwrap", *options, "--remount-ro", "/", "--", preload.python, FORK_SERVER_INSIDE),
            env={"PATH": PATH, "LANG": "C.UTF-8", **preload.env},
            supervisor=SUPERVISOR_INSIDE,
            scratch=scratch,
            folder=folder,
            pass_fds=tuple(filters),
        )

    async def sweep(self) -> int:
        return await folders.sweep_folders(self.root, KIND)


def _bwrap_options(spec: SandboxSpec, folder: Path) -> list[str]:
    """Build the options of `bwrap`, which define what is visible inside the sandbox."""
    online = spec.network == "open"
    options = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--as-pid-1"]
    options += [*IDENTITY, "--clearenv", *(["--share-net"] if online else [])]
    options += [*_system_options(folder, online=online), "--proc", "/proc", *_cover_kernel_files()]
    further = ((_folder_name(n), target) for n, target in enumerate(spec.folders))
    for part, target in (("home", HOME), ("tmp", "/tmp"), ("work", spec.workdir or WORKDIR), *further):  # noqa: S108
        options += ["--bind", str(folder / part), target]
    options += ["--ro-bind", str(folder / "shared"), SHARED]  # sockets in it can still be used
    options += ["--symlink", "/tmp", "/var/tmp", "--ro-bind", str(SUPERVISOR), SUPERVISOR_INSIDE]  # noqa: S108
    for mount in spec.mounts:
        options += ["--bind" if mount.writable else "--ro-bind", mount.source, mount.target]
    return options


def _system_options(folder: Path, *, online: bool) -> list[str]:
    """Build the `bwrap` options for programs, devices and /etc."""
    options = ["--ro-bind", "/usr", "/usr", "--dev", "/dev", "--size", str(disk.SHM_BYTES), "--tmpfs", "/dev/shm"]  # noqa: S108
    options += ["--remount-ro", "/dev"]  # otherwise an agent could fill the host's memory with files in it
    for name in SYSTEM:
        place = Path("/", name)
        if place.is_symlink():
            options += ["--symlink", str(place.readlink()), str(place)]
        elif place.is_dir():
            options += ["--ro-bind", str(place), str(place)]
    options += ["--ro-bind", str(folder / "etc"), "/etc"]
    for name in (*ETC, *(ETC_ONLINE if online else ())):
        if Path("/etc", name).exists():
            options += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
    return options


def _open_filters() -> list[int]:
    """Return a list with a descriptor of the system call filter, or an empty list if there is no filter for this machine.

    The caller must close the descriptor.
    """
    rules = seccomp.build_filter()
    return [seccomp.open_filter(rules)] if rules else []


def _check_mounts(spec: SandboxSpec) -> None:
    for mount in spec.mounts:
        if not Path(mount.source).exists():
            raise SandboxError(
                f"cannot mount {mount.source}, because it does not exist on this machine; create it first"
            )


def _folder_name(n: int) -> str:
    return f"further-{n}"


def _check_folders(spec: SandboxSpec) -> None:
    """Raise `SandboxError` unless each of the sandbox's own folders has an absolute path outside system folders such as /usr."""
    for folder in filter(None, (spec.workdir, *spec.folders)):
        first, *rest = PurePosixPath(folder).parts
        if first != "/" or not rest or ".." in rest or rest[0] in RESERVED:
            raise SandboxError(
                f"{folder} cannot be a folder of a bubblewrap sandbox; choose an absolute path, such as {WORKDIR}, that contains no '..' "
                "and is not in a system folder"
            )


def _cover_kernel_files() -> list[str]:
    """Return `bwrap` options that cover the files in /proc that belong to the kernel, not to a process.

    The host's root owns these files. If Turngate runs as root, even an agent without privileges counts as their owner, and could set
    `kernel.core_pattern` to run programs outside the sandbox. Therefore folders and writable files become read-only. Other files that
    only root can read become empty, and so do the lists of the host user's keys.
    """
    covers = []
    for entry in sorted(Path("/proc").iterdir()):
        if entry.name.isdigit() or entry.is_symlink():
            continue
        mode = entry.stat().st_mode
        if stat.S_ISDIR(mode) or mode & 0o222:
            covers += ["--ro-bind", str(entry), str(entry)]
        elif not mode & 0o004 or entry.name in KEY_FILES:
            covers += ["--ro-bind", "/dev/null", str(entry)]
    return covers


def _write_etc(etc: Path) -> None:
    """Write the sandbox's own /etc files, and create mount points for files from the host's /etc."""
    (etc / "passwd").write_text(f"agent:x:{USER_ID}:{USER_ID}::{HOME}:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n")
    (etc / "group").write_text(f"agent:x:{USER_ID}:\nnogroup:x:65534:\n")
    (etc / "hosts").write_text("127.0.0.1 localhost sandbox\n::1 localhost\n")
    (etc / "hostname").write_text("sandbox\n")
    (etc / "resolv.conf").write_text("")
    for name in ETC:
        place, source = etc / name, Path("/etc", name)
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            place.mkdir(exist_ok=True)
        elif source.exists():
            place.touch()


@cache
def _find_python() -> tuple[str, str]:
    """Return the Python interpreter to run inside the sandbox. If it is outside /usr, also return the folder to mount."""
    own = Path(os.path.realpath(sys.executable))
    if own.is_relative_to("/usr"):
        return str(own), ""
    system = Path("/usr/bin/python3")
    if system.exists():
        return str(system), ""
    return str(own), sys.base_prefix
