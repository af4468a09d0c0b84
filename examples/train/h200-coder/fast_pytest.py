"""Run the agents' tests quickly: `python3 -m pytest` in a fork of a process that has already imported pytest.

Importing pytest takes most of the CPU time of a short test run, and an agent runs tests after each change. Only agents use this. Graders
start a new Python.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OTHER_EXAMPLE = Path(__file__).parents[1] / "h200"
_IMPORTS = ("_pytest.assertion.rewrite", "_pytest.terminal", "_pytest.python", "_pytest.unittest")
_PYTHON3 = """\
#!/bin/sh
if [ "$1 $2" = "-m pytest" ]; then
    shift 2
    exec {python} -I -S {client} {socket} "$@"
fi
exec {python} "$@"
"""


@contextmanager
def run_pytest_server(folder: Path) -> Iterator[str]:
    """Run the server for the duration of the block. Yield a PATH on which `python3 -m pytest` uses it."""
    path = os.environ["PATH"]
    python = shutil.which("python3", path=path)
    assert python is not None
    socket, programs = folder / "tests", folder / "bin"
    programs.mkdir()
    words = {"python": python, "client": str(OTHER_EXAMPLE / "fork_client.py"), "socket": str(socket)}
    (programs / "python3").write_text(_PYTHON3.format(**{name: shlex.quote(word) for name, word in words.items()}))
    (programs / "python3").chmod(0o755)
    env = {"PATH": path, "HOME": os.environ.get("HOME", "/"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, str(OTHER_EXAMPLE / "fork_server.py"), str(socket), "", "pytest", *_IMPORTS]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder) as server:
        try:
            assert server.stdout is not None
            if server.stdout.readline() != b"ready\n":
                raise SystemExit(f"fork_server.py did not start with {python}; check that pytest is installed for it")
            yield f"{programs}{os.pathsep}{path}"
        finally:
            assert server.stdin is not None
            server.stdin.close()  # the server kills the tests that are still running, and ends
            with suppress(subprocess.TimeoutExpired):
                server.wait(timeout=5)
            server.kill()
