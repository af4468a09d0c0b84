"""Fixtures for MCP servers over both transports."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.mcp import kit


@contextmanager
def _folder() -> Iterator[Path]:
    """A new folder with a short path."""
    path = Path(tempfile.mkdtemp(prefix="tg-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    with _folder() as path:
        yield path


@pytest.fixture(scope="session")
def http() -> Iterator[kit.Server]:
    """A shared HTTP server, since starting one takes two seconds."""
    with _folder() as path, kit.serve_http(path) as server:
        yield server


@pytest.fixture
def stdio(folder: Path) -> kit.Server:
    """A server that each client starts over stdio."""
    return kit.prepare(folder)


@pytest.fixture(params=["stdio", "http"])
def server(request: pytest.FixtureRequest) -> kit.Server:
    found: kit.Server = request.getfixturevalue(request.param)
    return found
