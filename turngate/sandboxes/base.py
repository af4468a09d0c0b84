"""The sandbox seam: a place to run an agent in. Exec, a background job with a true exit code, files, stop; nothing more.

Implementations: `local`, `bubblewrap`, `docker`, `e2b`, `huggingface`; one contract suite holds all of them (`tests/sandboxes`).
Paths are paths inside the sandbox. A command is a list of arguments; nobody's shell takes it apart. Secrets go in by environment
or file, never by argument. Implementations raise only `SandboxError`s.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Protocol

import msgspec

Network = Literal["none", "open"]

# In the environment of a job that starts no others and stays when the agent's is killed: the relay.
STANDALONE_ENV = "TURNGATE_ALONE"


class Mount(msgspec.Struct, frozen=True):
    """A folder of the host that the sandbox sees. Remote sandboxes get a copy of it."""

    source: str
    target: str
    writable: bool = False


class Resources(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The most that a sandbox may use. None: the backend's own default."""

    cpus: Annotated[float, msgspec.Meta(gt=0)] | None = None
    memory_mb: Annotated[int, msgspec.Meta(ge=16)] | None = None
    pids: Annotated[int, msgspec.Meta(ge=1)] | None = None


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to make."""

    image: str = ""  # a container image or a template's name; empty: the backend's default
    dockerfile: str = ""  # a folder with a Dockerfile, instead of an image
    workdir: str = ""  # where commands run and the work lies; empty: the image's own, or the backend's
    folders: tuple[str, ...] = ()  # further ones that shall be there, empty and writable
    network: Network = "none"  # none: nothing but the relay to the gateway
    reachable: tuple[str, ...] = ()  # remote: hosts that stay open all the same, because the relay has to get there
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = {}  # for every command
    resources: Resources = Resources()
    life_s: float = 24 * 3600  # it ends by itself after this long, whatever became of its owner
    labels: Mapping[str, str] = {}


class ExecResult(msgspec.Struct, frozen=True):
    """How a command ended. `exit_code` is as a shell has it: 128 + n when signal n ended it."""

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False


class Job(Protocol):
    """A command in the background."""

    async def wait(self) -> int:
        """Its exit code, when it has ended: 128 + n when signal n ended it, never 0 for one that was killed."""

    async def kill(self, grace_s: float = 2.0) -> None:
        """End it and everything that it started: asked first, then forced. Fine when it has ended already."""


class Sandbox(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def home(self) -> str:
        """$HOME of every command; empty at first, writable."""

    @property
    def workdir(self) -> str:
        """Where commands run unless told otherwise; writable."""

    @property
    def shared(self) -> tuple[Path, str] | None:
        """A folder that both sides see, for unix sockets: its path on the host, and inside. None: there is no such thing (remote)."""

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
        """Run to the end. Past `timeout_s` it is killed with all its children: `timed_out`, and what it had printed so far.

        `keep`: of longer output only the beginning and the end, so many bytes in all; without it, very much output is an error.
        `leave`: false, and whatever it left running is killed before this returns.
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
        """In the background. Output goes to the files named; without a name it is thrown away."""

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Folders on the way are made."""

    async def read(self, path: str, *, limit: int = 64_000_000) -> bytes:
        """A file's bytes; `SandboxFileMissing` if there is none, `SandboxError` if it is larger than `limit`."""

    async def upload(self, folder: Path, target: str, *, exclude: Container[str] = ()) -> None:
        """The content of a folder of the host, into `target`. `exclude`: files and folders that stay, by their path in it."""

    async def download(self, source: str, folder: Path, *, exclude: Sequence[str] = ()) -> tuple[str, ...]:
        """The content of a folder of the sandbox into a folder of the host. Nothing in it can make us write outside of that.
        What could not be had is returned: a file that may not be read does not cost the others. `exclude`: what need not come,
        by its path in the folder."""

    async def stop(self) -> None:
        """End every process and remove everything. Stopping twice is fine."""


class Backend(Protocol):
    """Makes sandboxes of one kind."""

    @property
    def name(self) -> str: ...

    @property
    def relocates(self) -> bool:
        """Whether a mount can be seen at another path than the host's."""

    async def check(self) -> None:
        """`SandboxUnavailable`, with what is missing and how to get it, where no sandbox of this kind can be made."""

    def not_enforced(self, spec: SandboxSpec) -> tuple[str, ...]:
        """What a spec asks for and such a sandbox cannot hold an agent to."""

    async def create(self, spec: SandboxSpec) -> Sandbox: ...

    async def sweep(self) -> int:
        """Remove what owners left behind that are no longer alive (crashed, killed). How many there were."""
