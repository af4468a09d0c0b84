"""What the tests of the image are written with: Docker, a base image with pip made of the local one, wheels from where this machine's
own pip finds them, and a context to build from.

No registry is asked: `turngate-python:bookworm` stands in for `python:3.11-slim-bookworm`. It has no curl, so that no health check can
lean on one. Wheels are fetched once and kept in the cache; the image's layers are kept by Docker.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.needs import uses
from tests.speed import scaled
from tools import base_image

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PYTHON = "turngate-python:bookworm"
PIP = "pip==26.3"
SENT = ("pyproject.toml", "README.md", "LICENSE", ".dockerignore", "deploy", "turngate")
CACHES = shutil.ignore_patterns("__pycache__", ".*_cache", "wheels", "secrets")
PYTHON_DOCKERFILE = f"""FROM {base_image.IMAGE}
USER root
COPY pip-*.whl /tmp/
RUN set -- /tmp/pip-*.whl && python3 "$1/pip" install --quiet --break-system-packages --root-user-action ignore --no-index "$1" \\
 && rm -f /usr/bin/curl /usr/bin/git
"""


@uses("docker")
def docker(*words: str | Path, check: bool = True, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
    command = ["docker", *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=scaled(timeout), check=False
    )
    assert not check or done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done


def inspected(name: str) -> Any:
    [found] = msgspec.json.decode(docker("inspect", name).stdout)
    return found


# ── images ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def wheels() -> Path:
    """What the image installs, for its Python: fetched by this machine's pip, with its settings."""
    files = [DEPLOY / "docker" / "requirements.txt", DEPLOY / "docker" / "build.txt"]
    digest = hashlib.sha256(b"\0".join([PIP.encode(), *(file.read_bytes() for file in files)])).hexdigest()[:16]
    place = base_image.cache() / "docker" / f"wheels-{digest}"
    if not place.exists():
        part = place.with_name(f"{place.name}.{os.getpid()}")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--python-version", "3.11"]
        for words in (["--no-deps", "-r", files[0], "-r", files[1]], ["--no-deps", PIP]):
            subprocess.run([*pip, "--dest", part, *words], check=True, capture_output=True, timeout=scaled(300))
        with suppress(OSError):  # another process was quicker
            part.rename(place)
        shutil.rmtree(part, ignore_errors=True)
    return place


@contextmanager
def temporary_image(tag: str, context: Path, *words: str | Path) -> Iterator[str]:
    """Build an image, and remove it at the end."""
    try:
        yield built(tag, context, *words)
    finally:
        docker("rmi", "--force", tag, check=False)


def built(tag: str, context: Path, *words: str | Path) -> str:
    """An image of that name. The network is the host's: this machine may have no other for containers."""
    old = _id(tag)
    docker("build", "--network", "host", "--force-rm", "--tag", tag, *words, context, timeout=600)
    if old not in ("", _id(tag)):
        docker("rmi", old, check=False)  # else every change of the sources leaves an image behind
    return tag


def _id(tag: str) -> str:
    return docker("image", "inspect", "--format", "{{.Id}}", tag, check=False).stdout.strip()


def python_image(scratch: Path) -> str:
    """The local base image, with pip and without curl."""
    scratch.mkdir()
    [pip] = wheels().glob("pip-*.whl")
    shutil.copyfile(pip, scratch / pip.name)
    (scratch / "Dockerfile").write_text(PYTHON_DOCKERFILE)
    return built(PYTHON, scratch)


def context(scratch: Path) -> Path:
    """The repository as a builder is sent it, with wheels that were fetched before."""
    scratch.mkdir()
    for name in SENT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, scratch / name, ignore=CACHES)
        else:
            shutil.copyfile(source, scratch / name)
    shutil.copytree(wheels(), scratch / "deploy" / "wheels", copy_function=_linked)
    return scratch


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


# ── containers ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Container:
    """A gateway in a container, on this machine's own network."""

    def __init__(self, name: str, key: str) -> None:
        self.name = name
        self.key = key

    def logs(self) -> str:
        done = docker("logs", self.name)
        return done.stdout + done.stderr

    def url(self) -> str:
        """Where it listens: what it said last."""
        found: list[str] = []

        def said() -> bool:
            found[:] = re.findall(r"listens on (http://\S+)", self.logs())
            return bool(found)

        self.until(said)
        return found[-1]

    def until(self, holds: Callable[[], object], seconds: float = 90.0) -> None:
        end = time.monotonic() + scaled(seconds)
        while not holds():
            state = inspected(self.name)["State"]
            assert state["Running"] and time.monotonic() < end, f"{state}\n{self.logs()}"
            time.sleep(0.1)

    def checks(self) -> list[Any]:
        """What its health check said, each time."""
        return inspected(self.name)["State"]["Health"]["Log"] or []

    def healthy(self) -> None:
        self.until(lambda: inspected(self.name)["State"]["Health"]["Status"] == "healthy")

    def get(self, path: str) -> Any:
        """What the admin API answers."""
        key = {"authorization": f"Bearer {self.key}"}
        asked = httpx.get(self.url() + path, headers=key, trust_env=False, timeout=scaled(5))
        assert asked.status_code == 200, asked.text
        return asked.json()

    def inside(self, *words: str) -> subprocess.CompletedProcess[str]:
        return docker("exec", self.name, *words, check=False)


@contextmanager
def container(image: str, *words: str | Path, command: tuple[str, ...] = (), key: str = "") -> Iterator[Container]:
    """`words`: options of `docker run`. Gone at the end, with its volumes."""
    name = f"turngate-test-{secrets.token_hex(6)}"
    docker("run", "--detach", "--name", name, "--network", "host", *words, image, *command)
    try:
        yield Container(name, key)
    finally:
        docker("rm", "--force", "--volumes", name)
