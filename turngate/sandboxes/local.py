"""The `local` sandbox: a private folder and tracked processes on this machine, for trusted agents and tests.

It separates rollouts from each other (own HOME and TMPDIR, clean environment, full cleanup), but it does not isolate them: an agent can
access everything that its user can. `not_enforced` lists the parts of a spec that have no effect.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from turngate.common.aio import run_to_completion
from turngate.errors import SandboxError, SandboxUnavailable
from turngate.sandboxes import cgroups, folders
from turngate.sandboxes.base import NO_SETTINGS, Preload, SandboxSpec
from turngate.sandboxes.supervised_sandbox import SUPERVISOR, SupervisedSandbox
from turngate.sandboxes.warm_start import FORK_SERVER, ServerProcess, find_server

KIND = "local"
FALLBACK_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class LocalBackend:
    """Creates local sandboxes. `root` is the parent of their folders, by default a private folder below the host's temporary folder."""

    name = KIND
    relocates = False  # host and sandbox share a file system
    has_host_programs = True
    settings = NO_SETTINGS  # each machine has its own root

    def __init__(self, root: Path | None = None) -> None:
        self.root = root

    async def check(self) -> None:
        if not sys.platform.startswith("linux"):
            raise SandboxUnavailable(
                "the local sandbox needs Linux, because it finds processes in /proc; use the docker sandbox"
            )

    def not_enforced(self, spec: SandboxSpec) -> tuple[str, ...]:
        """List the parts of a spec that this backend cannot enforce."""
        requested = {
            "network": spec.network == "none",
            "read-only mounts": any(not mount.writable for mount in spec.mounts),
            "image": bool(spec.image or spec.dockerfile),
            "workdir": bool(spec.workdir),
        }
        return (
            *(name for name, is_requested in requested.items() if is_requested),
            *cgroups.not_enforced(spec.resources),
        )

    async def create(self, spec: SandboxSpec) -> SupervisedSandbox:
        await self.check()
        _check_mounts(spec)
        if spec.folders:
            raise SandboxError(
                f"the local sandbox cannot create {spec.folders[0]}, because it shares the host's file system; use the docker sandbox"
            )
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
            if spec.preload is not None:
                source = Path(spec.preload.folder)
                if (warm := await find_server(KIND, spec.preload, source, self._prepare_server)) is not None:
                    sandbox.use_server(warm, inside=False)
        except BaseException:
            await run_to_completion(sandbox.stop())
            raise
        return sandbox

    def _prepare_server(self, preload: Preload) -> ServerProcess:
        folder = folders.create_folder(self.root, KIND, "scratch", "scratch/home", "scratch/tmp", "scratch/work")
        return ServerProcess(
            command=(preload.python, str(FORK_SERVER)),
            env={"PATH": os.environ.get("PATH") or FALLBACK_PATH, "LANG": "C.UTF-8", **preload.env},
            supervisor=str(SUPERVISOR),
            scratch=str(folder / "scratch"),
            folder=folder,
        )

    async def sweep(self) -> int:
        return await folders.sweep_folders(self.root, KIND)


def _check_mounts(spec: SandboxSpec) -> None:
    """Check that each mount exists on the host and has the same path in the sandbox, which shares the host's file system."""
    for mount in spec.mounts:
        if mount.source != mount.target:
            raise SandboxError(
                f"the local sandbox cannot mount {mount.source} at {mount.target}; use the same path for both"
            )
        if not Path(mount.source).exists():
            raise SandboxError(
                f"cannot mount {mount.source}, because it does not exist on this machine; create it first"
            )
