"""An installed agent, as seen from this machine or from inside a sandbox."""

from __future__ import annotations

from pathlib import Path

import msgspec

from turngate.agents.interpreters import Interpreter

# The environment variable that sets the Python for the programs in an installation's `bin`.
PYTHON_VARIABLE = "TURNGATE_PYTHON"


class Installation(msgspec.Struct, frozen=True):
    """The paths of an installed agent. All paths are empty if the agent is not installed by Turngate."""

    folder: str = ""
    program: str = ""
    node: str = ""  # path of the Node binary, if the agent uses one
    python: str = ""  # the Python that it was built for: a name such as python3.11, or a path
    host_python: Interpreter | None = None  # the Python of this version on this machine, if there is one
    code_cache: str = ""  # path of the script that enables the code cache, if there is one

    @property
    def mounts(self) -> tuple[str, ...]:
        """The folders on this machine that must be mounted into a sandbox at the same paths."""
        node = str(Path(self.node).parent) if self.node else ""
        return (*(folder for folder in (self.folder, node) if folder), *self._python_mounts)

    @property
    def _python_mounts(self) -> tuple[str, ...]:
        host = self.host_python
        return host.mounts if host is not None and self.python == host.path else ()

    def use_host_python(self) -> Installation:
        """Return the installation for a sandbox that uses this machine's programs: `python` becomes the path of `host_python`, if set."""
        return msgspec.structs.replace(self, python=self.host_python.path) if self.host_python is not None else self

    def relocate(self, root: str) -> tuple[Installation, tuple[tuple[str, str], ...]]:
        """Return the installation with its paths below `root` in a sandbox, and the (source, target) pairs to mount.

        The path of Python does not change.
        """
        pairs = [(folder, folder) for folder in self._python_mounts]
        moved = self
        if self.folder:
            pairs.append((self.folder, f"{root}/agent"))
            program, code_cache = (
                path.replace(self.folder, f"{root}/agent", 1) for path in (self.program, self.code_cache)
            )
            moved = msgspec.structs.replace(moved, folder=f"{root}/agent", program=program, code_cache=code_cache)
        if self.node:
            pairs.append((str(Path(self.node).parent), f"{root}/node"))
            moved = msgspec.structs.replace(moved, node=f"{root}/node/{Path(self.node).name}")
        return moved, tuple(pairs)
