"""Helpers for the image tests: Docker, a base image with pip built from the local one, wheels downloaded with this machine's pip, and a
build context.

No registry is contacted: `turngate-python:bookworm` stands in for `python:3.11-slim-bookworm`. It has no curl, so no health check can
rely on it. Wheels are downloaded once and cached. Docker caches the image's layers.
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


def inspect(name: str) -> Any:
    [description] = msgspec.json.decode(docker("inspect", name).stdout)
    return description


# ── images ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def download_wheels() -> Path:
    """Download the wheels that the image installs, for its Python version, with this machine's pip settings."""
    files = [DEPLOY / "docker" / "requirements.txt", DEPLOY / "docker" / "build.txt"]
    digest = hashlib.sha256(b"\0".join([PIP.encode(), *(file.read_bytes() for file in files)])).hexdigest()[:16]
    folder = base_image.cache() / "docker" / f"wheels-{digest}"
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--python-version", "3.11"]
        for options in (["--no-deps", "-r", files[0], "-r", files[1]], ["--no-deps", PIP]):
            subprocess.run([*pip, "--dest", partial, *options], check=True, capture_output=True, timeout=scaled(300))
        with suppress(OSError):  # another process was faster
            partial.rename(folder)
        shutil.rmtree(partial, ignore_errors=True)
    return folder


@contextmanager
def temporary_image(tag: str, context: Path, *words: str | Path) -> Iterator[str]:
    """Build an image, and remove it at the end."""
    try:
        yield build_image(tag, context, *words)
    finally:
        docker("rmi", "--force", tag, check=False)


def build_image(tag: str, context: Path, *words: str | Path) -> str:
    """Build an image. It uses the host's network: the machine may have no other for containers."""
    old = _id(tag)
    docker("build", "--network", "host", "--force-rm", "--tag", tag, *words, context, timeout=600)
    if old not in ("", _id(tag)):
        docker("rmi", old, check=False)  # otherwise every change of the sources leaves an image behind
    return tag


def _id(tag: str) -> str:
    return docker("image", "inspect", "--format", "{{.Id}}", tag, check=False).stdout.strip()


def build_python_image(scratch: Path) -> str:
    """Build the local base image with pip and without curl."""
    scratch.mkdir()
    [pip] = download_wheels().glob("pip-*.whl")
    shutil.copyfile(pip, scratch / pip.name)
    (scratch / "Dockerfile").write_text(PYTHON_DOCKERFILE)
    return build_image(PYTHON, scratch)


def build_context(scratch: Path) -> Path:
    """Copy what a builder receives of the repository, with downloaded wheels."""
    scratch.mkdir()
    for name in SENT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, scratch / name, ignore=CACHES)
        else:
            shutil.copyfile(source, scratch / name)
    shutil.copytree(download_wheels(), scratch / "deploy" / "wheels", copy_function=_link)
    return scratch


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


# ── containers ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Container:
    """A gateway in a container, on the host's network."""

    def __init__(self, name: str, key: str) -> None:
        self.name = name
        self.key = key

    def logs(self) -> str:
        done = docker("logs", self.name)
        return done.stdout + done.stderr

    def url(self) -> str:
        """Return the URL that the gateway printed last."""
        urls: list[str] = []

        def printed() -> bool:
            urls[:] = re.findall(r"listens on (http://\S+)", self.logs())
            return bool(urls)

        self.until(printed)
        return urls[-1]

    def until(self, holds: Callable[[], object], seconds: float = 90.0) -> None:
        end = time.monotonic() + scaled(seconds)
        while not holds():
            state = inspect(self.name)["State"]
            assert state["Running"] and time.monotonic() < end, f"{state}\n{self.logs()}"
            time.sleep(0.1)

    def health_results(self) -> list[Any]:
        """Return all results of the health check."""
        return inspect(self.name)["State"]["Health"]["Log"] or []

    def wait_until_healthy(self) -> None:
        self.until(lambda: inspect(self.name)["State"]["Health"]["Status"] == "healthy")

    def get(self, path: str) -> Any:
        """Get a path of the admin API."""
        key = {"authorization": f"Bearer {self.key}"}
        response = httpx.get(self.url() + path, headers=key, trust_env=False, timeout=scaled(5))
        assert response.status_code == 200, response.text
        return response.json()

    def exec(self, *words: str) -> subprocess.CompletedProcess[str]:
        return docker("exec", self.name, *words, check=False)


@contextmanager
def container(image: str, *words: str | Path, command: tuple[str, ...] = (), key: str = "") -> Iterator[Container]:
    """Run a container with `words` as options of `docker run`, and remove it with its volumes at the end."""
    name = f"turngate-test-{secrets.token_hex(6)}"
    docker("run", "--detach", "--name", name, "--network", "host", *words, image, *command)
    try:
        yield Container(name, key)
    finally:
        docker("rm", "--force", "--volumes", name)
