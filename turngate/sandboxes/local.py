"""The `local` sandbox: a private folder on this machine and processes that can all be found again. For trusted agents and tests.

It keeps things apart and tidy (own HOME, own TMPDIR, clean environment, nothing left behind), but it is no wall: an agent here can
read what its user can read and reach what its user can reach. `not_enforced` says what of a spec is a wish only.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from turngate.common.aio import run_to_completion
from turngate.errors import SandboxError, SandboxUnavailable
from turngate.sandboxes import cgroups, folders
from turngate.sandboxes.base import SandboxSpec
from turngate.sandboxes.supervised import SUPERVISOR, SupervisedSandbox

KIND = "local"
FALLBACK_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class LocalBackend:
    """`root`: where the sandboxes' folders lie; a folder of this user's in the host's temporary folder unless told otherwise."""

    name = KIND
    relocates = False  # there is one file system

    def __init__(self, root: Path | None = None) -> None:
        self.root = root

    async def check(self) -> None:
        if not sys.platform.startswith("linux"):
            raise SandboxUnavailable("the local sandbox needs Linux, because it finds processes in /proc; use docker")

    def not_enforced(self, spec: SandboxSpec) -> tuple[str, ...]:
        """What a spec asks for and this backend cannot hold an agent to."""
        wishes = {
            "network": spec.network == "none",
            "read-only mounts": any(not mount.writable for mount in spec.mounts),
            "image": bool(spec.image or spec.dockerfile),
            "workdir": bool(spec.workdir),
        }
        return (*(wish for wish, asked in wishes.items() if asked), *cgroups.not_enforced(spec.resources))

    async def create(self, spec: SandboxSpec) -> SupervisedSandbox:
        await self.check()
        _check_mounts(spec)
        if spec.folders:
            raise SandboxError(f"the local sandbox cannot make {spec.folders[0]}: there is one file system, the host's")
        folder = folders.create_folder(self.root, KIND, "home", "work", "tmp", "shared")
        env = {
            "PATH": os.environ.get("PATH") or FALLBACK_PATH,
            "LANG": "C.UTF-8",
            "TMPDIR": str(folder / "tmp"),
            **spec.env,
            folders.SANDBOX_ENV: folder.name,
        }
        home, work, shared = (str(folder / part) for part in ("home", "work", "shared"))
        sandbox = SupervisedSandbox(folder, env, home=home, workdir=work, shared=shared)
        command = [sys.executable, "-I", "-S", "-X", "utf8", str(SUPERVISOR)]
        try:
            await sandbox.launch(command, spec, str(folder))
        except BaseException:
            await run_to_completion(sandbox.stop())
            raise
        return sandbox

    async def sweep(self) -> int:
        return await folders.sweep_folders(self.root, KIND)


def _check_mounts(spec: SandboxSpec) -> None:
    """There is one file system: a folder is where it is."""
    for mount in spec.mounts:
        if mount.source != mount.target:
            raise SandboxError(f"the local sandbox cannot show {mount.source} as {mount.target}; use the same path")
        if not Path(mount.source).exists():
            raise SandboxError(f"{mount.source} does not exist")
