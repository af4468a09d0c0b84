"""Fixtures: each local backend, a sandbox of it, and a check that no folders are left behind."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.sandboxes import kit
from turngate.sandboxes.base import Backend, Sandbox, SandboxSpec

pytest.register_assert_rewrite("tests.sandboxes.contract")


@pytest.fixture
def root() -> Iterator[Path]:
    """The parent folder of all sandboxes. Its path is short enough for unix sockets, and it must be empty at the end."""
    folder = Path(tempfile.mkdtemp(prefix="tg-"))
    yield folder
    leftovers = [path.name for path in folder.iterdir()]
    shutil.rmtree(folder)
    assert not leftovers, "sandboxes left folders behind"


@pytest.fixture(params=kit.backends())
def backend(request: pytest.FixtureRequest, root: Path) -> Backend:
    kit.need(request.param)
    return kit.MAKE[request.param](root)


@pytest.fixture
async def sandbox(backend: Backend) -> AsyncIterator[Sandbox]:
    sandbox = await backend.create(SandboxSpec(env={"FROM_SPEC": "yes"}))
    try:
        yield sandbox
    finally:
        await sandbox.stop()
