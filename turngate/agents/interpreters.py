"""Find a Python of a given version on this machine: the running one, or one from the PATH, the system folders, pyenv or uv."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec

PROBE_S = 20.0
_PROBE = "import os, sys; print('%d.%d' % sys.version_info[:2], os.path.realpath(sys.executable), sys.base_prefix, sep='\\n')"


class Interpreter(msgspec.Struct, frozen=True):
    """A Python interpreter on this machine. It can be started without HOME and PATH."""

    path: str
    prefix: str  # the folder that contains the interpreter and its library

    @property
    def mounts(self) -> tuple[str, ...]:
        """The folders on this machine that a sandbox needs in addition to /usr to run this interpreter."""
        return () if Path(self.prefix).is_relative_to("/usr") else (self.prefix,)


@cache
def find_python(version: str) -> Interpreter | None:
    """Return a Python of the given version (such as 3.12), or None if this machine has none.

    Each candidate is run, because a program on the PATH may be a shim that fails. For example, pyenv's shim fails unless the version is
    selected.
    """
    if version == "{}.{}".format(*sys.version_info):
        return Interpreter(os.path.realpath(sys.executable), sys.base_prefix)
    return next((found for path in _list_candidates(version) if (found := _probe(path, version)) is not None), None)


def _list_candidates(version: str) -> Iterator[Path]:
    name = f"python{version}"
    home = Path.home()
    pyenv = Path(os.environ.get("PYENV_ROOT") or home / ".pyenv") / "versions"
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or home / ".local" / "share" / "uv" / "python")
    yield from (Path(folder) / name for folder in os.environ.get("PATH", "").split(os.pathsep) if folder)
    yield from (Path(folder, name) for folder in ("/usr/bin", "/usr/local/bin"))
    yield from sorted(pyenv.glob(f"{version}*/bin/{name}"), reverse=True)
    yield from sorted(uv.glob(f"cpython-{version}*/bin/{name}"), reverse=True)


def _probe(path: Path, version: str) -> Interpreter | None:
    """Run an interpreter. Return it if it works and has the right version, or else None."""
    if not os.access(path, os.X_OK):
        return None
    try:
        command = [str(path), "-I", "-S", "-c", _PROBE]
        result = subprocess.run(  # noqa: S603  a Python on this machine
            command, capture_output=True, text=True, timeout=PROBE_S, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    answer = result.stdout.splitlines()
    return Interpreter(answer[1], answer[2]) if answer[:1] == [version] and len(answer) == 3 else None
