"""Turn an order into the spec of a rollout, by adding the parts that depend on the machine that runs it.

    task      its files, unpacked from their archive; a missing archive is fetched, if the resolver has a fetcher
    agent     its installation, in this machine's cache
    sandbox   a backend, with this machine's own folders
    env       the values of environment variables on this machine; the order has only the names

The agent is never at fault for a failure here, and another machine may be able to run the order.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path

import msgspec

from turngate.agents.install import ensure_installed
from turngate.agents.installation import Installation
from turngate.agents.spec import AgentSpec
from turngate.errors import AgentError, ConfigError
from turngate.rollout.order import RolloutOrder, SandboxChoice
from turngate.rollout.plan import BatchPlan
from turngate.rollout.spec import RolloutSpec
from turngate.sandboxes import get_backend
from turngate.sandboxes.base import Backend
from turngate.store.projects import DEFAULT_PROJECT
from turngate.tasks.archive import PackedTask, function_names
from turngate.tasks.archive_cache import ArchiveCache, ArchiveError
from turngate.tasks.host_env import read_variable
from turngate.tasks.task import Task

log = logging.getLogger(__name__)


class MachineParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a rollout's spec that depend on the machine."""

    task: Task  # its paths are on this machine
    installed: Installation
    backend: Backend
    env: Mapping[str, str]
    folder: Path  # for the agent's files


def build_spec(order: RolloutOrder, parts: MachineParts) -> RolloutSpec:
    """Build the spec of a rollout from its order and the parts that depend on the machine."""
    return RolloutSpec(
        task=parts.task,
        agent=order.agent,
        installed=parts.installed,
        backend=parts.backend,
        model=order.model,
        timeout_s=order.timeout_s,
        image=order.image,
        network=order.network,
        resources=order.resources,
        folders=order.folders,
        env=parts.env,
        session=order.session,
        endpoint_sampling=order.endpoint_sampling,
        model_limits=order.model_limits,
        options=order.options,
        folder=parts.folder,
        keep_work=order.keep_work,
        reuse_grades=order.reuse_grades,
        grade=order.grade,
        policy=order.policy,
        rollout=order.rollout,
        group=order.group,
        attempt=order.attempt,
    )


class PlanResolver:
    """Resolves the orders of a batch in the process that made them. All parts come from the plan, so nothing is unpacked or installed."""

    def __init__(self, plan: BatchPlan) -> None:
        self._plan = plan
        self._tasks = {task.id: task for task in plan.tasks}

    @property
    def backends(self) -> Collection[Backend]:
        return (self._plan.backend,)

    def hold_files(self, order: RolloutOrder) -> AbstractContextManager[None]:
        return nullcontext()  # the task's original files are used

    async def resolve(self, order: RolloutOrder) -> RolloutSpec:
        plan = self._plan
        parts = MachineParts(
            task=self._tasks[order.task.task.id],
            installed=plan.installed,
            backend=plan.backend,
            env=plan.env,
            folder=plan.folder / "rollouts",
        )
        return build_spec(order, parts)


ArchiveFetcher = Callable[[str], Awaitable[bytes]]  # SHA-256 → archive


async def refuse_to_fetch(digest: str) -> bytes:
    """Raise `ArchiveError`. This fetcher is for machines that must already have all archives."""
    raise ArchiveError(f"task archive {digest[:12]} is not on this machine, and there is no machine to fetch it from")


class MachineResolver:
    """Resolves orders that were made on this machine or another: unpacks tasks and installs agents as necessary."""

    def __init__(
        self,
        folder: Path,
        archives: ArchiveCache,
        fetch: ArchiveFetcher = refuse_to_fetch,
        *,
        environment: Mapping[str, str] = os.environ,
        install: Callable[[AgentSpec], Installation] = lambda agent: ensure_installed(agent, log.info),
    ) -> None:
        """Prepare a resolver. Agents' files are stored in `folder`. Orders name environment variables; `environment` has their values."""
        self._folder = folder
        self._archives = {DEFAULT_PROJECT: archives}  # by project
        self._fetch = fetch
        self._environment = environment
        self._install = install
        self._installing: dict[bytes, asyncio.Lock] = {}  # by the agent's recipe
        self._installations: dict[bytes, Installation] = {}
        self._fetching: dict[tuple[str, str], asyncio.Lock] = {}  # by project and the archive's digest
        self._backends: dict[bytes, Backend] = {}  # by name and settings

    @property
    def backends(self) -> Collection[Backend]:
        return self._backends.values()

    def hold_files(self, order: RolloutOrder) -> AbstractContextManager[None]:
        return self._find_archives(order.project).hold(order.task.archive)

    async def resolve(self, order: RolloutOrder) -> RolloutSpec:
        parts = MachineParts(
            task=await self._open_task(order.project, order.task),
            installed=await self._install_agent(order.agent),
            backend=self._find_backend(order.sandbox),
            env={name: read_variable(name, self._environment, f"rollout {order.rollout}") for name in order.env},
            folder=self._folder,
        )
        return build_spec(order, parts)

    def _find_archives(self, project: str) -> ArchiveCache:
        """Return the archives of a project. An empty name means the project `default`."""
        project = project or DEFAULT_PROJECT
        if project not in self._archives:
            self._archives[project] = self._archives[DEFAULT_PROJECT].open_project(project)
        return self._archives[project]

    async def _open_task(self, project: str, packed: PackedTask) -> Task:
        archives = self._find_archives(project)
        await self._fetch_missing(project, packed.archive)
        try:
            task = await asyncio.to_thread(archives.open_task, packed, self._environment)
        except ArchiveError:
            if archives.has(packed.archive):
                raise
            await self._fetch_missing(project, packed.archive)  # the archive was damaged and has been removed
            task = await asyncio.to_thread(archives.open_task, packed, self._environment)
        _check_modules(task)
        return task

    async def _fetch_missing(self, project: str, digest: str) -> None:
        if not digest:
            return
        archives = self._find_archives(project)
        async with self._fetching.setdefault((project, digest), asyncio.Lock()):
            if not archives.has(digest):
                data = await self._fetch(digest)
                await asyncio.to_thread(archives.add, digest, data)

    async def _install_agent(self, agent: AgentSpec) -> Installation:
        """Install the agent if necessary, and return its installation. The result is cached, because `ensure_installed` is slow."""
        key = msgspec.json.encode([agent.name, agent.install, agent.uses("node"), agent.code_cache])
        async with self._installing.setdefault(key, asyncio.Lock()):
            if key not in self._installations:
                try:
                    self._installations[key] = await asyncio.to_thread(self._install, agent)
                except AgentError as error:
                    raise ConfigError(
                        f"agent {agent.name} cannot be installed on this machine: {error.message}", param="agent"
                    ) from None
            return self._installations[key]

    def _find_backend(self, sandbox: SandboxChoice) -> Backend:
        key = msgspec.json.encode(sandbox, order="deterministic")
        if key not in self._backends:
            self._backends[key] = get_backend(sandbox.name, sandbox.settings)
        return self._backends[key]


def _check_modules(task: Task) -> None:
    """Raise `ConfigError` if the Python module of a grading function is not installed here. Modules are not sent with the task."""
    for name in function_names(task.grader):
        location = name.rpartition(":")[0]
        module = location.partition(".")[0]
        if not location.endswith(".py") and find_spec(module) is None:
            raise ConfigError(
                f"the grader of task {task.id} needs the Python module {module}, which this machine does not have; install it, or "
                "put the grading function into a file in the task's folder",
                param="grader",
            )
