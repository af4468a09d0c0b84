"""What the tests of sandboxes are written with: which backends there are here, and who is alive."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tools import base_image
from turngate.sandboxes.base import Backend
from turngate.sandboxes.bubblewrap import BubblewrapBackend
from turngate.sandboxes.docker import DockerBackend
from turngate.sandboxes.local import LocalBackend

# Backends on this machine, and what each one needs. Their sandboxes' folders lie below the root that a test gives.
MAKE: dict[str, Callable[[Path], Backend]] = {
    "local": LocalBackend,
    "bubblewrap": BubblewrapBackend,
    "docker": DockerBackend,
}
CLOSED = ("bubblewrap", "docker")  # those with walls
MISSING: dict[str, Callable[[], str | None]] = {
    "local": lambda: None,
    "bubblewrap": cache(base_image.missing_bubblewrap),
    "docker": cache(base_image.missing_docker),
}


def need(name: str) -> None:
    """Skip the test where the part that a backend needs is missing; in CI that is a failure."""
    if reason := MISSING[name]():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


def processes(text: str) -> list[int]:
    """The live processes of this machine whose command line holds a text, those in containers too."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if text.encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                pass
    return found


async def soon(holds: Callable[[], object], within_s: float = 10.0) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "that never came to hold"
        await asyncio.sleep(0.02)
