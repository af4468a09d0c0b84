"""The `bubblewrap` sandbox: the host's own programs, read-only, in namespaces of their own. No image, no daemon, no root needed.

Inside there is /usr, a few harmless files of /etc, an empty home, a work folder, a private /tmp and the mounts: nothing else of the
host, no process of it, no network but a loopback of its own. One supervisor is process 1 of the sandbox, and every command
and background job runs under it, so that they share /tmp, processes and loopback.

A filter of system calls (`seccomp.py`) closes the kernel's keyrings and VSOCK, which no namespace divides.

What is not a wall: the kernel is shared, disk space is not limited, and `not_enforced` names the other limits that are wishes
here. With `network="open"` the sandbox has the host's network, its loopback included.
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
from turngate.sandboxes import cgroups, folders, seccomp
from turngate.sandboxes.base import SandboxSpec
from turngate.sandboxes.supervised import SUPERVISOR, SupervisedSandbox

KIND = "bubblewrap"
HOME, WORKDIR, SHARED, SUPERVISOR_INSIDE = "/home/agent", "/workspace", "/run/turngate", "/run/supervisor.py"
USER_ID = 1000  # inside; some agents refuse to be root. On the host it is whoever runs Turngate, without any privilege
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")  # links into /usr on most machines, folders on some
# No secrets in these, and programs break without them.
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
RESERVED = ("usr", "etc", "proc", "dev", "sys", "run", *SYSTEM)  # where no folder of a sandbox's own can be
ETC_ONLINE = ("hosts", "resolv.conf")  # with the host's network only


class BubblewrapBackend:
    """`root`: as for `local`."""

    name = KIND
    relocates = True

    def __init__(self, root: Path | None = None) -> None:
        self.root = root

    async def check(self) -> None:
        if not shutil.which("bwrap"):
            raise SandboxUnavailable(
                "bubblewrap is not installed: apt-get install bubblewrap (or your system's package)"
            )
        trial = await asyncio.create_subprocess_exec(
            *("bwrap", "--unshare-all", "--ro-bind", "/", "/", "--", "/bin/sh", "-c", ":"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await trial.communicate()
        if trial.returncode:
            raise SandboxUnavailable(
                f"bubblewrap cannot make namespaces here: {said.decode(errors='replace').strip()[-200:]} "
                "(is kernel.unprivileged_userns_clone or kernel.apparmor_restrict_unprivileged_userns in the way?)"
            )

    def not_enforced(self, spec: SandboxSpec) -> tuple[str, ...]:
        """What a spec asks for and this backend cannot hold an agent to."""
        image = ("image",) if spec.image or spec.dockerfile else ()
        unfiltered = () if seccomp.build_filter() else ("the kernel's keyrings and VSOCK are closed",)
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
        filters = [seccomp.open_filter(rules)] if (rules := seccomp.build_filter()) else []
        try:
            _write_etc(folder / "etc")
            walls = [*_bwrap_options(spec, folder), *(prefix and ("--ro-bind", prefix, prefix)), "--remount-ro", "/"]
            for fd in filters:
                walls += ["--seccomp", str(fd)]
            command = [bwrap or "bwrap", *walls, "--", python, "-I", "-S", "-X", "utf8", SUPERVISOR_INSIDE]
            await sandbox.launch(command, spec, pass_fds=filters)
        except BaseException:
            await run_to_completion(sandbox.stop())
            raise
        finally:
            for fd in filters:
                os.close(fd)
        return sandbox

    async def sweep(self) -> int:
        return await folders.sweep_folders(self.root, KIND)


def _bwrap_options(spec: SandboxSpec, folder: Path) -> list[str]:
    """bwrap's options: what there is inside, and what is cut off."""
    walls = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--as-pid-1", "--new-session"]
    walls += ["--cap-drop", "ALL", "--uid", str(USER_ID), "--gid", str(USER_ID), "--hostname", "sandbox", "--clearenv"]
    if spec.network == "open":
        walls += ["--share-net"]
    walls += ["--ro-bind", "/usr", "/usr", "--dev", "/dev", "--proc", "/proc", *_cover_kernel_files()]
    for name in SYSTEM:
        place = Path("/", name)
        if place.is_symlink():
            walls += ["--symlink", str(place.readlink()), str(place)]
        elif place.is_dir():
            walls += ["--ro-bind", str(place), str(place)]
    walls += ["--ro-bind", str(folder / "etc"), "/etc"]
    for name in (*ETC, *(ETC_ONLINE if spec.network == "open" else ())):
        if Path("/etc", name).exists():
            walls += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
    further = ((_folder_name(n), target) for n, target in enumerate(spec.folders))
    for part, target in (("home", HOME), ("tmp", "/tmp"), ("work", spec.workdir or WORKDIR), *further):  # noqa: S108
        walls += ["--bind", str(folder / part), target]
    walls += ["--ro-bind", str(folder / "shared"), SHARED]  # a socket in there can be used all the same
    walls += ["--symlink", "/tmp", "/var/tmp", "--ro-bind", str(SUPERVISOR), SUPERVISOR_INSIDE]  # noqa: S108
    for mount in spec.mounts:
        walls += ["--bind" if mount.writable else "--ro-bind", mount.source, mount.target]
    return walls


def _check_mounts(spec: SandboxSpec) -> None:
    for mount in spec.mounts:
        if not Path(mount.source).exists():
            raise SandboxError(f"{mount.source} does not exist")


def _folder_name(n: int) -> str:
    return f"further-{n}"


def _check_folders(spec: SandboxSpec) -> None:
    """Folders of the sandbox's own stand beside what it shows of the host, never in it."""
    for place in filter(None, (spec.workdir, *spec.folders)):
        first, *rest = PurePosixPath(place).parts
        if first != "/" or not rest or ".." in rest or rest[0] in RESERVED:
            raise SandboxError(
                f"a bubblewrap sandbox cannot have its own folder at {place}; choose one such as {WORKDIR}"
            )


def _cover_kernel_files() -> list[str]:
    """Covers for the files in /proc that are the kernel's, not a process's.

    They belong to the host's root. Where Turngate runs as root, an agent without any privilege counts as their owner: it could
    set `kernel.core_pattern` and so run programs outside. What can be written becomes read-only, what only root can read, empty;
    and so do the lists of the host user's keys.
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
    """Who one is in there; and the places where files of the host's /etc are laid over."""
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
    """An interpreter that is there inside as well, and the folder to show where it lies outside of /usr."""
    own = Path(os.path.realpath(sys.executable))
    if own.is_relative_to("/usr"):
        return str(own), ""
    system = Path("/usr/bin/python3")
    if system.exists():
        return str(system), ""
    return str(own), sys.base_prefix
