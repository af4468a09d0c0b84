"""Fixtures: each backend of this machine in turn, a sandbox of it, and a check that nothing of it is left."""

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
    """Where sandboxes' folders lie. Short, because a unix socket's path must be; and empty again at the end."""
    folder = Path(tempfile.mkdtemp(prefix="tg-"))
    yield folder
    left = [path.name for path in folder.iterdir()]
    shutil.rmtree(folder)
    assert not left, "sandboxes left folders behind"


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
