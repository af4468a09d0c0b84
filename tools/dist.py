#!/usr/bin/env python3
"""Build the wheel and the sdist, and try each in an empty environment: `python tools/dist.py [--out dist]`.

Fail if the wheel lacks a file of the package, if the metadata differs from pyproject.toml, or if a command of the installed package fails.
The package index is needed for the dependencies, and for the default agent unless it is in the cache. Part of `make dist`.
"""

from __future__ import annotations

import argparse
import email
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.speed import scaled  # noqa: E402
from turngate import __version__  # noqa: E402

PACKAGE = ROOT / "turngate"
IN_SDIST = ("LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml")
STEP_S = 300.0


class DistError(Exception):
    """The distribution is incomplete or does not work."""


def run(*command: str, cwd: Path, environment: dict[str, str] | None = None) -> str:
    """Run a command and return its output. Raise DistError with the output if it fails."""
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=scaled(STEP_S))
    if done.returncode:
        raise DistError(f"exit code {done.returncode}: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def build(out: Path) -> tuple[Path, Path]:
    """Build the sdist, then the wheel from the sdist. Return the wheel and the sdist."""
    for old in (*out.glob("*.whl"), *out.glob("*.tar.gz")):
        old.unlink()
    run(sys.executable, "-m", "build", "--outdir", str(out), str(ROOT), cwd=ROOT)
    wheels, sdists = sorted(out.glob("*.whl")), sorted(out.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        raise DistError(f"expected one wheel and one sdist in {out}, found {[file.name for file in out.iterdir()]}")
    return wheels[0], sdists[0]


def package_files() -> set[str]:
    """Return the files that an installed package needs, with paths relative to the checkout."""
    return {
        str(file.relative_to(ROOT)) for file in PACKAGE.rglob("*") if file.is_file() and "__pycache__" not in file.parts
    }


def check_contents(wheel: Path, sdist: Path) -> None:
    """Raise DistError if a file of the package is missing from the wheel or from the sdist."""
    needed = package_files()
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    for file, missing in ((wheel, needed - in_wheel), (sdist, (needed | set(IN_SDIST)) - in_sdist)):
        if missing:
            raise DistError(f"{file.name} lacks {', '.join(sorted(missing))}")
    if extra := {name for name in in_wheel if not name.startswith(("turngate/", f"turngate-{__version__}.dist-info/"))}:
        raise DistError(f"{wheel.name} has files outside the package: {', '.join(sorted(extra))}")


def read_metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_bytes(archive.read(f"turngate-{__version__}.dist-info/METADATA"))


def find_metadata_problems(metadata: Message) -> Iterator[str]:
    """Yield each difference between the metadata of a wheel and pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    expected = {
        "Name": project["name"],
        "Version": __version__,
        "Summary": project["description"],
        "License-Expression": project["license"],
        "License-File": "LICENSE",
        "Requires-Python": project["requires-python"],
        "Description-Content-Type": "text/markdown",
    }
    for name, value in expected.items():
        if metadata[name] != value:
            yield f"{name} is {metadata[name]!r}, expected {value!r}"
    lists = {"Classifier": project["classifiers"], "Provides-Extra": project["optional-dependencies"]}
    for name, values in lists.items():
        if set(metadata.get_all(name) or ()) != set(values):
            yield f"{name} is {metadata.get_all(name)}, expected {sorted(values)}"
    description = metadata.get_payload(decode=True)
    if not isinstance(description, bytes) or description.strip() != (ROOT / "README.md").read_bytes().strip():
        yield "the description is not README.md"


def try_install(archive: Path, folder: Path) -> None:
    """Install a wheel or sdist into an empty environment, and run commands there."""
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TURNGATE_"))}
    if cache := os.environ.get("TURNGATE_CACHE"):
        kept["TURNGATE_CACHE"] = cache
    environment = kept | {"PATH": f"{programs}:{os.environ['PATH']}", "VIRTUAL_ENV": str(folder / "venv")}
    here = folder / "work"
    here.mkdir()

    def turngate(*arguments: str) -> str:
        return run(str(programs / "turngate"), *arguments, cwd=here, environment=environment)

    run(
        str(programs / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        str(archive),
        cwd=here,
        environment=environment,
    )
    run(str(programs / "python"), "-m", "pip", "check", cwd=here, environment=environment)
    where = "import pathlib, turngate; print(pathlib.Path(turngate.__file__).parent)"
    installed = Path(run(str(programs / "python"), "-c", where, cwd=here, environment=environment).strip())
    if missing := {name for name in package_files() if not (installed.parent / name).is_file()}:
        raise DistError(f"installing {archive.name} left out {', '.join(sorted(missing))}")
    if __version__ not in (output := turngate("--version")):
        raise DistError(f"turngate --version printed {output!r}, expected {__version__}")
    agents = turngate("agents")
    if absent := [file.stem for file in (PACKAGE / "agents" / "catalog").glob("*.toml") if file.stem not in agents]:
        raise DistError(f"turngate agents does not list {', '.join(absent)}")
    outcome = json.loads(turngate("run", "--json"))  # the default agent solves the bundled task
    if outcome["reward"] != 1:
        raise DistError(f"turngate run earned reward {outcome['reward']}, expected 1:\n{outcome}")
    if "log-probability" not in (output := turngate("show", "last", "--tokens")):
        raise DistError(f"turngate show last --tokens does not print the recorded tokens:\n{output}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the wheel and the sdist, and try each in an empty environment.")
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "dist",
        help="folder for the wheel and the sdist; old ones in it are removed first",
    )
    parser.add_argument(
        "--wheel-only", action="store_true", help="do not try the sdist, which the wheel is built from in any case"
    )
    arguments = parser.parse_args()
    try:
        wheel, sdist = build(arguments.out.resolve())
        check_contents(wheel, sdist)
        if problems := list(find_metadata_problems(read_metadata(wheel))):
            raise DistError("\n".join(problems))
        for archive in (wheel,) if arguments.wheel_only else (wheel, sdist):
            started = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="turngate-dist-") as folder:
                try_install(archive, Path(folder))
            size = archive.stat().st_size / 1e6
            print(f"dist: {archive.name} ({size:.1f} MB) installs and runs ({time.monotonic() - started:.0f} s)")
    except (DistError, subprocess.TimeoutExpired) as error:
        print(f"dist: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
