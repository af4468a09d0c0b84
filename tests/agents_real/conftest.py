"""Fixtures: a real agent by name, a sandbox by name, and `run`, which lets one work in the other. Nothing of it may be left."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
import pytest

from tests.agents_real import kit
from tests.agents_real.kit import Check, Staged
from tests.needs import needs
from tests.sandboxes.kit import MAKE, need
from tests.speed import scaled
from turngate.rollout.agent_check import AgentCheck, CheckOptions, CheckReport, prepare_check
from turngate.sandboxes import owner
from turngate.sandboxes.base import Backend
from turngate.sandboxes.docker import OWNER_LABEL


@pytest.fixture
def root(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Where the sandboxes' folders lie. Short, because a unix socket's path must be. At the end nothing of them is left."""
    before = kit.children()
    folder = Path(tempfile.mkdtemp(prefix="tg-"))
    yield folder
    deadline = time.monotonic() + scaled(5)  # the kernel may take a moment to bury what has been killed
    docker = "docker" in needs(request.node)
    while (left := _list_leftovers(folder, before, docker)) and time.monotonic() < deadline:
        time.sleep(0.1)
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
def stage(backend: Callable[[str], Backend], tmp_path: Path) -> Staged:
    """An agent and a sandbox, both by name, ready for a rollout on the scripted engine."""

    def stage(
        agent: str, sandbox: str = "local", staging: CheckOptions = CheckOptions()
    ) -> AbstractAsyncContextManager[AgentCheck]:
        spec, installed = kit.agent(agent)
        patient = msgspec.structs.replace(staging, timeout_s=scaled(staging.timeout_s))
        return prepare_check(spec, installed, backend(sandbox), tmp_path, patient)

    return stage


@pytest.fixture
def run(stage: Staged) -> Check:
    """The same, run to its end: what `turngate agents check` does."""

    async def run(agent: str, sandbox: str = "local", staging: CheckOptions = CheckOptions()) -> CheckReport:
        async with stage(agent, sandbox, staging) as ready:
            return await ready.run()

    return run


def _list_leftovers(folder: Path, before: Container[int], docker: bool) -> list[str]:
    left = [f"folder {path.name}" for path in folder.iterdir()]
    left += [f"process {pid}: {name}" for pid, name in kit.processes_of(folder).items()]
    left += [f"child {pid}: {name}" for pid, name in kit.children().items() if pid not in before]
    return left + [f"container {name}" for name in (_containers() if docker else ())]


def _containers() -> list[str]:
    """Of this process, running or not."""
    own = f"label={OWNER_LABEL}={owner.current_owner()}"
    command = ["docker", "ps", "--all", "--filter", own, "--format", "{{.Names}}"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
