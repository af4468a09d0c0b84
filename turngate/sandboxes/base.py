"""The interface of a sandbox, an isolated place to run an agent in: exec, background jobs, files, stop.

One contract test suite (`tests/sandboxes`) checks all backends: `local`, `bubblewrap`, `docker`, `e2b`, `huggingface`. Paths are paths
inside the sandbox. A command is a list of arguments and is not parsed by a shell. Secrets are passed by environment or file, never by
argument. Implementations raise only `SandboxError`s.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Protocol

import msgspec

Network = Literal["none", "open"]

# Set in the environment of a job that starts no others and survives when the agent's job is killed: the relay.
STANDALONE_ENV = "TURNGATE_ALONE"


class Mount(msgspec.Struct, frozen=True):
    """A folder of the host that is visible in the sandbox. Remote sandboxes get a copy of it."""

    source: str
    target: str
    writable: bool = False


class Resources(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Upper limits on what a sandbox may use. None: the backend's default."""

    cpus: Annotated[float, msgspec.Meta(gt=0)] | None = None
    memory_mb: Annotated[int, msgspec.Meta(ge=16)] | None = None
    pids: Annotated[int, msgspec.Meta(ge=1)] | None = None


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the sandbox to create."""

    image: str = ""  # a container image or template name; empty: the backend's default
    dockerfile: str = ""  # a folder with a Dockerfile to build, instead of an image
    workdir: str = ""  # where commands run; empty: the image's own, or the backend's
    folders: tuple[str, ...] = ()  # more folders to create, empty and writable
    network: Network = "none"  # none: only the gateway can be reached, through the relay
    reachable: tuple[str, ...] = ()  # remote: hosts that stay reachable with network "none", for the relay
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = {}  # for every command
    resources: Resources = Resources()
    life_s: float = 24 * 3600  # it ends by itself after this long, even if its owner died
    labels: Mapping[str, str] = {}


class ExecResult(msgspec.Struct, frozen=True):
    """How a command ended. `exit_code` follows the shell's convention: 128 + n if signal n ended it."""

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False


class Job(Protocol):
    """A command in the background."""

    async def wait(self) -> int:
        """Wait for the exit code: 128 + n if signal n ended the command, never 0 for a killed one."""

    async def kill(self, grace_s: float = 2.0) -> None:
        """Terminate the command and everything it started: SIGTERM first, SIGKILL after `grace_s`. Does nothing if it has ended."""


class Sandbox(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def home(self) -> str:
        """$HOME of every command; writable, and empty at first."""

    @property
    def workdir(self) -> str:
        """The default working folder of commands; writable."""

    @property
    def shared(self) -> tuple[Path, str] | None:
        """A folder that host and sandbox share, for unix sockets: its path on the host, and inside. None for remote sandboxes."""

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
        """Run a command to its end. After `timeout_s` it is killed with all its children; the result then has the output so far.

        `keep`: the number of output bytes to keep, half from the beginning and half from the end. Without it, excessive output is an error.
        `leave`: if false, processes that the command left running are killed before this returns.
        """

    async def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        stdout: str = "",
        stderr: str = "",
    ) -> Job:
        """Start a command in the background. Output goes to the named files, or is discarded."""

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file and create missing parent folders."""

    async def read(self, path: str, *, limit: int = 64_000_000) -> bytes:
        """Read a file. Raises `SandboxFileMissing` if there is none, and `SandboxError` if it is larger than `limit`."""

    async def upload(self, folder: Path, target: str, *, exclude: Container[str] = ()) -> None:
        """Copy the content of a host folder into `target`. `exclude`: files and folders to leave out, by their path in the folder."""

    async def download(self, source: str, folder: Path, *, exclude: Sequence[str] = ()) -> tuple[str, ...]:
        """Copy the content of a sandbox folder into a host folder. Nothing in it can make us write outside that folder.

        Returns what could not be copied: one unreadable file does not prevent the others. `exclude`: paths in the folder to leave out.
        """

    async def stop(self) -> None:
        """Kill every process and remove everything. May be called twice."""


class Backend(Protocol):
    """Creates sandboxes of one kind."""

    @property
    def name(self) -> str: ...

    @property
    def relocates(self) -> bool:
        """Whether a mount can have another path inside than on the host."""

    async def check(self) -> None:
        """Check that sandboxes of this kind can be created. Raises `SandboxUnavailable` with what is missing and how to get it."""

    def not_enforced(self, spec: SandboxSpec) -> tuple[str, ...]:
        """List what a spec asks for that this backend cannot enforce."""

    async def create(self, spec: SandboxSpec) -> Sandbox: ...

    async def sweep(self) -> int:
        """Remove what dead owners left behind (after a crash or kill). Returns the number of sandboxes removed."""
