"""Finding a Python of another version: on the PATH, behind pyenv's shims, and where uv installs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from turngate.agents.interpreters import Interpreter, find_python


@pytest.fixture(autouse=True)
def empty_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("PYENV_ROOT", "UV_PYTHON_INSTALL_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    find_python.cache_clear()
    yield
    find_python.cache_clear()


def write_python(path: Path, version: str, script: str = "") -> Path:
    """Write a program that answers like a Python of this version, or runs `script`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    answer = f"printf '%s\\n' {version} {path} {path.parent.parent}"
    path.write_text(f"#!/bin/sh\n{script or answer}\n")
    path.chmod(0o755)
    return path


def test_own_python_is_found_without_running_anything() -> None:
    found = find_python("{}.{}".format(*sys.version_info))
    assert found == Interpreter(os.path.realpath(sys.executable), sys.base_prefix)


@pytest.mark.process
def test_failing_shim_is_skipped(tmp_path: Path) -> None:
    write_python(tmp_path / "bin" / "python3.98", "", "echo 'pyenv: python3.98: command not found' >&2; exit 127")
    assert find_python("3.98") is None
    find_python.cache_clear()
    for patch in ("3.98.1", "3.98.2"):
        write_python(tmp_path / ".pyenv" / "versions" / patch / "bin" / "python3.98", "3.98")
    newest = tmp_path / ".pyenv" / "versions" / "3.98.2"
    assert find_python("3.98") == Interpreter(str(newest / "bin" / "python3.98"), str(newest))


@pytest.mark.process
def test_program_of_another_version_is_skipped(tmp_path: Path) -> None:
    write_python(tmp_path / "bin" / "python3.98", "3.9")
    prefix = tmp_path / ".local" / "share" / "uv" / "python" / "cpython-3.98.0-linux"
    write_python(prefix / "bin" / "python3.98", "3.98")
    assert find_python("3.98") == Interpreter(str(prefix / "bin" / "python3.98"), str(prefix))


@pytest.mark.process
def test_program_on_path_comes_first(tmp_path: Path) -> None:
    own = write_python(tmp_path / "bin" / "python3.98", "3.98")
    write_python(tmp_path / ".pyenv" / "versions" / "3.98.2" / "bin" / "python3.98", "3.98")
    assert find_python("3.98") == Interpreter(str(own), str(tmp_path))


@pytest.mark.parametrize(("prefix", "mounts"), [("/usr", ()), ("/usr/local", ()), ("/opt/py", ("/opt/py",))])
def test_prefix_outside_usr_must_be_mounted(prefix: str, mounts: tuple[str, ...]) -> None:
    assert Interpreter(f"{prefix}/bin/python3.12", prefix).mounts == mounts
