"""Fixtures that run real agents in sandboxes and check that nothing is left behind."""

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
from tests.agents_real.kit import Check, Prepare
from tests.needs import needs
from tests.sandboxes.kit import MAKE, need
from tests.speed import scaled
from turngate.common import owner
from turngate.rollout.agent_check import AgentCheck, CheckOptions, CheckReport, prepare_check
from turngate.sandboxes.base import Backend
from turngate.sandboxes.docker import OWNER_LABEL
from turngate.sandboxes.warm_start import FORK_SERVER


@pytest.fixture
def root(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The parent folder of the sandboxes, with a short path for unix sockets; fails if anything is left behind."""
    before = kit.children()
    folder = Path(tempfile.mkdtemp(prefix="tg-"))
    yield folder
    deadline = time.monotonic() + scaled(5)  # killed processes may take a moment to disappear
    docker = "docker" in needs(request.node)
    while (left := _list_leftovers(folder, before, docker)) and time.monotonic() < deadline:
        time.sleep(0.1)
    shutil.rmtree(folder)
    assert not left, "the rollout left something behind"


@pytest.fixture
def backend(root: Path) -> Callable[[str], Backend]:
    """Make a sandbox backend by name."""

    def make(name: str) -> Backend:
        need(name)
        return MAKE[name](root)

    return make


@pytest.fixture
def prepare(backend: Callable[[str], Backend], tmp_path: Path) -> Prepare:
    """Prepare a rollout of an agent in a sandbox, both by name, on the scripted engine."""

    def prepare(
        agent: str, sandbox: str = "local", options: CheckOptions = CheckOptions()
    ) -> AbstractAsyncContextManager[AgentCheck]:
        spec, installed = kit.agent(agent)
        scaled_options = msgspec.structs.replace(options, timeout_s=scaled(options.timeout_s))
        return prepare_check(spec, installed, backend(sandbox), tmp_path, scaled_options)

    return prepare


@pytest.fixture
def run(prepare: Prepare) -> Check:
    """Run an agent to completion, as `turngate agents check` does."""

    async def run(agent: str, sandbox: str = "local", options: CheckOptions = CheckOptions()) -> CheckReport:
        async with prepare(agent, sandbox, options) as ready:
            return await ready.run()

    return run


def _list_leftovers(folder: Path, before: Container[int], docker: bool) -> list[str]:
    left = [f"folder {path.name}" for path in folder.iterdir()]
    left += [f"process {pid}: {name}" for pid, name in kit.processes_of(folder).items()]
    left += [f"child {pid}: {name}" for pid, name in kit.children().items() if pid not in before]
    left = [line for line in left if FORK_SERVER.name not in line]  # it serves later tests, and ends with this process
    return left + [f"container {name}" for name in (_containers() if docker else ())]


def _containers() -> list[str]:
    """The containers of this process, running or not."""
    own = f"label={OWNER_LABEL}={owner.current_owner()}"
    command = ["docker", "ps", "--all", "--filter", own, "--format", "{{.Names}}"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
