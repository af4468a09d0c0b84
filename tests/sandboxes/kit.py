"""Helpers for the sandbox tests: local backends and live processes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.needs import require
from tests.speed import scaled
from turngate.sandboxes.base import Backend
from turngate.sandboxes.bubblewrap import BubblewrapBackend
from turngate.sandboxes.docker import DockerBackend
from turngate.sandboxes.local import LocalBackend

# Local backends by name. Their sandboxes are below the given folder.
MAKE: dict[str, Callable[[Path], Backend]] = {
    "local": LocalBackend,
    "bubblewrap": BubblewrapBackend,
    "docker": DockerBackend,
}
ISOLATED = ("bubblewrap", "docker")  # backends with isolation


def backends(*names: str) -> list[Any]:
    """Return backend names for `parametrize`, each with its marks. Without arguments, return all backends."""
    marks: dict[str, list[pytest.MarkDecorator]] = {
        "local": [pytest.mark.process],
        "bubblewrap": [pytest.mark.needs("bubblewrap"), pytest.mark.full],
        "docker": [pytest.mark.needs("docker"), pytest.mark.full],
    }
    return [pytest.param(name, marks=marks[name]) for name in names or MAKE]


def need(name: str) -> None:
    """Skip the current test if the part that a backend needs is missing; see `require`."""
    if name != "local":
        require(name)


def processes(text: str) -> list[int]:
    """Return live processes whose command line contains a text, including those in containers."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if text.encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                pass
    return found


async def wait_until(condition: Callable[[], object], within_s: float = 10.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + scaled(within_s)
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        await asyncio.sleep(0.02)
