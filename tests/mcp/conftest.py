"""Fixtures: a server of the tests' own, over either transport."""

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
    """A new one, with a short path."""
    made = Path(tempfile.mkdtemp(prefix="tg-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    with _folder() as made:
        yield made


@pytest.fixture(scope="session")
def http() -> Iterator[kit.Server]:
    """One that listens, for all tests: a start takes two seconds."""
    with _folder() as made, kit.over_http(made) as server:
        yield server


@pytest.fixture
def stdio(folder: Path) -> kit.Server:
    """One that every client starts anew."""
    return kit.prepared(folder)


@pytest.fixture(params=["stdio", "http"])
def server(request: pytest.FixtureRequest) -> kit.Server:
    found: kit.Server = request.getfixturevalue(request.param)
    return found
