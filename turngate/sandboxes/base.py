"""The interface of a sandbox, the environment in which an agent runs.

A sandbox runs commands in the foreground and the background, reads and writes files, and can be stopped. One contract test suite
(`tests/sandboxes`) covers all backends: `local`, `bubblewrap`, `docker`, `e2b`, `huggingface`. Unless stated otherwise, paths are paths
inside the sandbox. A command is a list of arguments and is not parsed by a shell. Secrets are passed in the environment or in files, never
as arguments. Implementations raise only `SandboxError`s.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

import msgspec

from turngate.errors import SandboxError

if TYPE_CHECKING:  # `types` imports numpy, which sandboxes do not need
    from turngate.types import Json

Network = Literal["none", "open"]

NO_SETTINGS: Mapping[str, Json] = {}  # the settings of a backend that works the same way on every machine

DEFAULT_PIDS = 4096  # process limit for specs without one, where it can be enforced
DEFAULT_OPEN_FILES = 4096  # the kernel's default hard limit; some machines also limit the total of all users

# Marks a job that starts no other processes and must survive when the agent's job is killed, such as the relay.
STANDALONE_ENV = "TURNGATE_ALONE"


class Mount(msgspec.Struct, frozen=True):
    """A host folder that is visible inside the sandbox. Remote sandboxes receive a copy of it."""

    source: str
    target: str
    writable: bool = False


class Resources(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Upper limits on a sandbox's resources. None means the backend's default."""

    cpus: Annotated[float, msgspec.Meta(gt=0)] | None = None
    memory_mb: Annotated[int, msgspec.Meta(ge=16)] | None = None
    pids: Annotated[int, msgspec.Meta(ge=1)] | None = None
    disk_mb: Annotated[int, msgspec.Meta(ge=16)] | None = None
    open_files: Annotated[int, msgspec.Meta(ge=64)] | None = None  # files and sockets of each process


class Preload(msgspec.Struct, frozen=True, kw_only=True):
    """A Python program that a fork server can start with its modules already imported. Paths are paths inside the sandbox."""

    python: str  # the interpreter
    folder: str  # contains `__main__.py` and the packages; the program is started as `python folder …`
    modules: tuple[str, ...]  # modules to import in advance
    env: Mapping[str, str] = {}  # environment variables that have these values in every run


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a sandbox to create."""

    image: str = ""  # the name of a container image or template; empty: the backend's default
    dockerfile: str = ""  # a folder with a Dockerfile to build, instead of an image
    workdir: str = ""  # where commands run; empty: the image's default, or else the backend's
    folders: tuple[str, ...] = ()  # additional empty, writable folders to create
    network: Network = "none"  # none: only the gateway is reachable, through the relay
    reachable: tuple[str, ...] = ()  # remote: hosts that stay reachable with network "none", for the relay
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = {}  # environment variables of every command
    resources: Resources = Resources()
    life_s: float = 24 * 3600  # the sandbox ends after this time, even if its owner has died
    labels: Mapping[str, str] = {}
    preload: Preload | None = None  # local and bubblewrap: start this program from a fork server


class ExecResult(msgspec.Struct, frozen=True):
    """The result of a command. As in a shell, `exit_code` is 128 + n if signal n ended the command."""

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False


class Job(Protocol):
    """A command running in the background."""

    async def wait(self) -> int:
        """Wait until the command has ended, and return its exit code.

        The exit code is 128 + n if signal n ended the command, and 137 if no exit code was reported, such as when the sandbox has ended.
        """

    async def kill(self, grace_s: float = 2.0) -> None:
        """End the command and all processes that it started, with SIGTERM and, after `grace_s`, with SIGKILL.

        Do nothing if they have already ended.
        """


class Sandbox(Protocol):
    """One sandbox, created by a `Backend`."""

    @property
    def id(self) -> str: ...

    @property
    def home(self) -> str:
        """The home folder ($HOME) of every command. It is writable and initially empty."""

    @property
    def workdir(self) -> str:
        """The default working folder of commands. It is writable."""

    @property
    def shared(self) -> tuple[Path, str] | None:
        """The folder that host and sandbox share for unix sockets, as its path on the host and its path in the sandbox.

        None for remote sandboxes.
        """

    @property
    def disk_error(self) -> SandboxError | None:
        """The error that explains why the sandbox's commands were killed for lack of disk space, or None if they were not.

        It is `SandboxTooLarge` if the sandbox used too much disk space, and a plain `SandboxError` if the machine's disk was nearly full.
        """

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
        """Run a command to its end. After `timeout_s`, kill the command and all its children, and return the output so far.

        `keep` limits stdout and stderr to this many bytes each, half from the beginning and half from the end. Without `keep`, excessive
        output is an error. If `leave` is false, processes that the command left running are killed before this returns.
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
        """Start a command in the background. Its output is written to the files `stdout` and `stderr`, or discarded if they are not set."""

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file. Create missing parent folders."""

    async def read(self, path: str, *, limit: int = 64_000_000) -> bytes:
        """Read a file.

        Raise `SandboxFileMissing` if it does not exist, or `SandboxError` if it is not a file or is larger than `limit` bytes.
        """

    async def upload(self, folder: Path, target: str, *, exclude: Container[str] = ()) -> None:
        """Copy the content of a host folder into `target`, except for the paths in `exclude`, which are relative to the folder."""

    async def download(self, source: str, folder: Path, *, exclude: Sequence[str] = ()) -> tuple[str, ...]:
        """Copy the content of a sandbox folder into a host folder. Return the entries that could not be copied, with reasons.

        Nothing is written outside the host folder. If a file cannot be read, the others are still copied. Paths in `exclude`, relative to
        `source`, are left out.
        """

    async def stop(self) -> None:
        """Kill every process and remove the sandbox. Safe to repeat."""


class Backend(Protocol):
    """Creates sandboxes of one kind."""

    @property
    def name(self) -> str: ...

    @property
    def relocates(self) -> bool:
        """Whether a mount can have a different path inside the sandbox than on the host."""

    @property
    def has_host_programs(self) -> bool:
        """Whether the host's /usr is visible inside the sandbox, so that the host's interpreters run there."""

    @property
    def settings(self) -> Mapping[str, Json]:
        """The arguments with which another machine can create the same backend. They contain no secrets and no paths of this machine."""

    async def check(self) -> None:
        """Raise `SandboxUnavailable` if sandboxes of this kind cannot be created. The message gives the cause and, if possible, a fix."""

    def not_enforced(self, spec: SandboxSpec) -> tuple[str, ...]:
        """List the parts of a spec that this backend cannot enforce."""

    async def create(self, spec: SandboxSpec) -> Sandbox: ...

    async def sweep(self) -> int:
        """Remove sandboxes whose owner has ended without removing them, for example after a crash. Return their number."""
