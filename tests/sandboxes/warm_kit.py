"""Helpers for tests of warm starts: an installation with a small library, and backends whose sandboxes preload it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.sandboxes import kit
from turngate.agents.install import RUN_MODULE
from turngate.sandboxes.base import ExecResult, Mount, Preload, Sandbox, SandboxSpec
from turngate.sandboxes.supervised_sandbox import SupervisedSandbox

PYTHON = os.path.realpath(sys.executable)
INSIDE = "/opt/turngate/agent"  # where bubblewrap mounts the installation
KINDS = kit.backends("local", "bubblewrap")
LIBRARY = """
import os, random, secrets, tempfile
seen = []
pid = os.getpid()
cwd = os.getcwd()
home = os.path.expanduser("~")
mode = os.environ.get("MODE")
"""


def install(folder: Path, library: str = LIBRARY) -> Path:
    """Create an installation whose library is `library`."""
    folder.mkdir(parents=True)
    (folder / "__main__.py").write_text(RUN_MODULE)
    (folder / "library.py").write_text(library)
    return folder


# Becomes the command, so that the command has exactly what a warm process has.
BECOME = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"


class WarmSandbox:
    """A sandbox whose commands are started by a process that was started warm."""

    def __init__(self, backend: WarmBackend, inner: SupervisedSandbox) -> None:
        self.backend = backend
        self.inner = inner
        self.runs = 0

    async def exec(self, command: Sequence[str], **options: Any) -> ExecResult:
        if options.keys() - {"timeout_s"}:
            return await self.inner.exec(command, **options)
        self.runs += 1
        base = f"{self.inner.home}/run-{self.runs}"
        await self.inner.write(f"{base}/become.py", BECOME.encode())
        words = [PYTHON, self.backend.folder, f"{base}/become.py", *command]
        job = await self.inner.start(words, stdout=f"{base}/stdout", stderr=f"{base}/stderr")
        code = await job.wait()
        return ExecResult(code, await self.inner.read(f"{base}/stdout"), await self.inner.read(f"{base}/stderr"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class WarmBackend:
    """A backend all of whose sandboxes preload the library of an installation."""

    def __init__(self, kind: str, root: Path, installation: Path, env: Mapping[str, str] | None = None) -> None:
        self.kind = kind
        self.inner = kit.MAKE[kind](root)
        self.folder = str(installation) if kind == "local" else INSIDE
        prefix = sys.base_prefix
        self.mounts = (Mount(str(installation), self.folder), Mount(prefix, prefix))
        if prefix.startswith("/usr"):
            self.mounts = self.mounts[:1]
        self.preload = Preload(python=PYTHON, folder=self.folder, modules=("library",), env=env or {})

    async def create(self, spec: SandboxSpec | None = None) -> SupervisedSandbox:
        spec = spec or SandboxSpec()
        changed = msgspec.structs.replace(spec, preload=self.preload, mounts=(*spec.mounts, *self.mounts))
        sandbox = await self.inner.create(changed)
        assert isinstance(sandbox, SupervisedSandbox)
        return sandbox

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def run(
        self, sandbox: Sandbox, program: str, *arguments: str, env: Mapping[str, str] | None = None
    ) -> tuple[int, str, str]:
        """Run a program of the installation to its end. Return its exit code, output and errors."""
        await sandbox.write("program.py", program.encode())
        out, err = f"{sandbox.home}/out/stdout", f"{sandbox.home}/out/stderr"
        command = [PYTHON, self.folder, f"{sandbox.workdir}/program.py", *arguments]
        job = await sandbox.start(command, env=env, stdout=out, stderr=err)
        code = await job.wait()
        return code, (await sandbox.read(out)).decode(), (await sandbox.read(err)).decode()

    async def report(self, sandbox: Sandbox, program: str, env: Mapping[str, str] | None = None) -> Any:
        """Run a program that prints JSON, and return what it printed."""
        code, out, err = await self.run(sandbox, program, env=env)
        assert (code, err) == (0, ""), (code, out, err)
        return json.loads(out)
