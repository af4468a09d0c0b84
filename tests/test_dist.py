"""`make dist`: the checks find what is missing, and the wheel and the sdist install and run."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from tests.speed import scaled
from tools import dist
from turngate import __version__


def write_archives(folder: Path, names: set[str]) -> tuple[Path, Path]:
    """Write a wheel and an sdist with empty files of these names."""
    wheel, sdist = folder / "turngate.whl", folder / "turngate.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names - set(dist.IN_SDIST):
            archive.writestr(name, "")
    with tarfile.open(sdist, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"turngate-{__version__}/{name}"))
    return wheel, sdist


def test_the_files_that_a_user_needs_belong_to_the_package() -> None:
    assert {
        "turngate/py.typed",
        "turngate/ui/index.html",
        "turngate/agents/catalog/shell.toml",
        "turngate/render/builtin/tokenizer.json",
        "turngate/sandboxes/relay.mjs",
        "turngate/tasks/bundled/fix-add/instruction.md",
    } <= dist.package_files()


@pytest.mark.parametrize("missing", ["turngate/py.typed", "turngate/ui/index.html", "LICENSE"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    complete = dist.package_files() | set(dist.IN_SDIST)
    dist.check_contents(*write_archives(tmp_path, complete))
    with pytest.raises(dist.DistError, match=f"lacks {missing}"):
        dist.check_contents(*write_archives(tmp_path, complete - {missing}))


def test_a_file_outside_the_package_is_named(tmp_path: Path) -> None:
    names = dist.package_files() | set(dist.IN_SDIST) | {"tests/conftest.py"}
    with pytest.raises(dist.DistError, match=r"outside the package: tests/conftest\.py"):
        dist.check_contents(*write_archives(tmp_path, names))


def test_wrong_metadata_is_named() -> None:
    metadata = Message()
    metadata["Version"] = "0.0.1"
    problems = "\n".join(dist.find_metadata_problems(metadata))
    assert f"Version is '0.0.1', expected '{__version__}'" in problems
    assert "License-Expression is None" in problems
    assert "the description is not README.md" in problems


@pytest.mark.repeat  # of `make dist`
@pytest.mark.process
@pytest.mark.needs("agent:mini-swe-agent")
@pytest.mark.timeout(scaled(600))
def test_the_wheel_installs_into_an_empty_environment_and_runs(tmp_path: Path) -> None:
    """The wheel is built from the sdist. `make dist` also installs the sdist."""
    command = [sys.executable, "tools/dist.py", "--out", str(tmp_path / "dist"), "--wheel-only"]
    done = subprocess.run(command, cwd=dist.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("installs and runs") == 1
