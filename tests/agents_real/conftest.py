"""Fixtures: a real agent by name, a sandbox by name, and `rollout`, which runs one in the other and sees that nothing is left."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.agents_real import kit
from tests.agents_real.kit import Check
from tests.sandboxes.kit import MAKE, need
from turngate.rollout.check import Report, Staging, check
from turngate.rollout.one import Watch
from turngate.sandboxes import owner
from turngate.sandboxes.base import Backend
from turngate.sandboxes.docker import OWNER_LABEL


@pytest.fixture
def root() -> Iterator[Path]:
    """Where the sandboxes' folders lie. Short, because a unix socket's path must be. At the end nothing of them is left."""
    before = kit.children()
    folder = Path(tempfile.mkdtemp(prefix="tg-"))
    yield folder
    left = [f"folder {path.name}" for path in folder.iterdir()]
    left += [f"process {name}" for name in kit.processes_of(folder)]
    left += [f"child process {name}" for pid, name in kit.children().items() if pid not in before]
    left += [f"container {name}" for name in _containers()]
    shutil.rmtree(folder)
    assert not left, "the rollout left things behind"


@pytest.fixture
def backend(root: Path) -> Callable[[str], Backend]:
    """A sandbox backend by name."""

    def make(name: str) -> Backend:
        need(name)
        return MAKE[name](root)

    return make


@pytest.fixture
def run(backend: Callable[[str], Backend], tmp_path: Path) -> Check:
    """Runs an agent in a sandbox, both by name, as `turngate agents check` does."""

    async def run(
        agent: str, sandbox: str = "local", staging: Staging = Staging(), watch: Watch = lambda progress: None
    ) -> Report:
        spec, installed = kit.agent(agent)
        return await check(spec, installed, backend(sandbox), tmp_path, staging, watch)

    return run


def _containers() -> list[str]:
    """Of this process, alive or not."""
    if not shutil.which("docker"):
        return []
    own = f"label={OWNER_LABEL}={owner.this_process()}"
    listed = subprocess.run(
        ["docker", "ps", "--all", "--filter", own, "--format", "{{.Names}}"], capture_output=True, text=True, check=False
    )
    return listed.stdout.split()
