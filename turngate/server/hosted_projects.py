"""Choose the project of each request, and open each project other than `default` on its own store."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import msgspec

from turngate.engines.project_engine import ProjectEngine
from turngate.errors import TurngateError
from turngate.server.asgi import Scope
from turngate.server.auth import KEY_HEADERS, SECRET
from turngate.server.project_gateway import ANSWER_S, ProjectGateway
from turngate.server.web.login import COOKIE
from turngate.store.location import open_store
from turngate.store.projects import DEFAULT_PROJECT, PROJECT_NAME, locate_project, unknown_project
from turngate.telemetry.metrics import Metrics

log = logging.getLogger("turngate")
_WATCH_S = 1.0  # interval between checks for new and deleted projects
PROJECT_HEADER = b"x-turngate-project"  # with the admin key, this header names the project of a request
_HEADERS = KEY_HEADERS | {b"cookie", PROJECT_HEADER}
_API_KEY = re.compile(rb"tgp-[0-9a-f]{8}-[\w-]{43}", re.ASCII)
_LOGIN = re.compile(rb"(?:^|;\s*)" + COOKIE.encode() + rb"=(tgp-[0-9a-f]{8})\.")


class HostedProject(ProjectGateway):
    """A project other than `default`. It uses the engine, the fence and the cell of the gateway that hosts it."""

    def __init__(self, host: ProjectGateway, project: str) -> None:
        self.project = project
        self.config = msgspec.structs.replace(host.config, data=locate_project(host.config.data, project))
        self.shard = host.shard
        self.metrics = Metrics()
        self.admin_key, self._metrics_key = host.admin_key, ""
        self.renderer, self.relay, self.gate = host.renderer, host.relay, host.gate
        self.engine = None if host.engine is None else ProjectEngine(host.engine, project)
        self.max_context = host.max_context
        self.projects, self.fence, self.cell, self.shares = host.projects, host.fence, host.cell, host.shares
        self.slicer = host.slicer
        self.updates, self.barrier, self.engine_changes = host.updates, host.barrier, host.engine_changes
        if not self.config.is_shared:
            Path(self.config.data).mkdir(parents=True, exist_ok=True, mode=0o700)
        self.store = open_store(self.config.data, self.config.durability, self.shard, answer_s=ANSWER_S)
        self._store_renderer()
        self._compose_sessions()
        self._compose_routes()
        self.metrics_endpoint.collect_others = host.metrics_endpoint.collect_others

    async def close(self) -> None:
        """Stop the project's tasks, and close its store."""
        await self.stop_tasks()
        await self.close_readers()
        self.store.close()


class HostedProjects:
    """The projects that a gateway serves besides `default`.

    A project that exists when the gateway starts is opened then. A project that is created later is opened at its first request or, in
    worker 0 of a cell, soon after its creation.
    """

    def __init__(self, host: ProjectGateway) -> None:
        self._host = host
        self._open: dict[str, HostedProject] = {}
        self._removed: set[str] = set()  # deleted projects that this process has finished removing
        self._watching: asyncio.Task[None] | None = None

    def __iter__(self) -> Iterator[HostedProject]:
        return iter(list(self._open.values()))

    def start(self) -> None:
        self._open_known()
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    def _open_known(self) -> None:
        """Open all listed projects and, in a cell, any others with data on this machine, except `default` and deleted projects."""
        names = {*self._host.projects.ring.list_projects()}
        if self._host.cell is not None:
            folder = Path(self._host.config.data) / "projects"
            names |= {path.name for path in folder.glob("*") if PROJECT_NAME.fullmatch(path.name)}
        deleted = self._host.projects.ring.list_deleted()
        for name in sorted(names - deleted - {DEFAULT_PROJECT}):
            self.open(name)

    async def _watch(self) -> None:
        """Remove deleted projects and, in worker 0 of a cell, open newly created ones. Run until cancelled."""
        while True:
            try:
                if self._host.cell is not None and self._host.shard.number == 0:
                    self._open_known()  # this worker ships the sessions of all workers, so it opens all projects
                if self._host.cell is not None and len(self._host.projects.ring.list_projects()) > 1:
                    self._host.shares.is_active = True  # other cells may serve the other projects with the same engines
                deleted = self._host.projects.ring.list_deleted() - self._removed
            except (TurngateError, OSError) as error:
                log.warning("cannot update the list of open projects: %s; retrying", error)
                deleted = frozenset()
            for name in deleted:
                try:
                    await self._remove(name)
                except (TurngateError, OSError) as error:
                    log.warning("cannot finish removing deleted project %s: %s; retrying", name, error)
            await asyncio.sleep(_WATCH_S)

    async def _remove(self, name: str) -> None:
        """End the requests and tasks of a deleted project. Worker 0 also removes the project's data from this machine."""
        project = self._open.pop(name, None)
        if project is not None:
            log.warning("project %s was deleted; ending its requests and closing its store", name)
            # Each step is taken even if another fails. The first waits until a shipment in progress has ended.
            async with AsyncExitStack() as steps:
                steps.push_async_callback(project.close)
                steps.push_async_callback(project.end_requests)
                await asyncio.to_thread(self._host.detach_project, project)
        folder = Path(self._host.config.data) / "projects" / name
        if not self._host.config.is_shared and self._host.shard.number == 0:
            await asyncio.to_thread(_remove_folder, folder)
        self._removed.add(name)

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
        for project in self:
            await project.close()
        self._open.clear()

    def open(self, name: str) -> HostedProject:
        project = self._open.get(name)
        if project is None:
            project = self._open[name] = HostedProject(self._host, name)
            project.start_tasks()
            self._host.attach_project(project)
        return project

    def choose(self, scope: Scope) -> str | None:
        """Return the name of the project that a request belongs to, or None for the project `default`.

        The session secret, API key or login cookie in the request decides. With the admin key, the caller may name a project in a header;
        an error is raised if that project does not exist. A request that identifies no project belongs to `default`. The request is
        authenticated later, by the project's own gateway.
        """
        ring = self._host.projects.ring
        named, keys = "", []
        for header, value in scope["headers"]:
            if header not in _HEADERS:
                continue
            if header in KEY_HEADERS:
                # Every model call runs this, so a cheap test precedes each pattern.
                if b"." in value and (secret := SECRET.search(value)) is not None:
                    return self._find(secret[1].decode())
                if b"tgp-" in value and (api_key := _API_KEY.search(value)) is not None:
                    found = ring.find(api_key[0].decode())
                    return None if found is None else self._find(found.project)
                keys.append(value)
            elif header == b"cookie" and (login := _LOGIN.search(value)) is not None:
                found = ring.find_prefix(login[1].decode())
                return None if found is None else self._find(found.project)
            elif header == PROJECT_HEADER:
                named = value.decode("latin-1")
        if named and any(map(self._is_admin, keys)):
            if ring.find_project(named) is None:
                raise unknown_project(named)
            return self._find(named)
        return self._choose_by_address(scope)

    def _choose_by_address(self, scope: Scope) -> str | None:
        """Find the project by a session secret in the path (OpenEnv) or query (Gemini). Return None for `default`, or if none is found."""
        query = scope["query_string"]
        if b"tg-" not in query and "/tg-" not in scope["path"]:
            return None
        secret = SECRET.search(query) or SECRET.search(scope["path"].encode("utf-8", "surrogatepass"))
        return None if secret is None else self._find(secret[1].decode())

    def _find(self, name: str) -> str | None:
        """Return the project's name, or None if the project is `default` or does not exist."""
        if name in self._open:
            return name
        return name if name != DEFAULT_PROJECT and self._host.projects.ring.find_project(name) is not None else None

    def _is_admin(self, value: bytes) -> bool:
        key = value.decode("latin-1")
        return self._host.auth.is_admin(key.partition(" ")[2].strip() if key[:7].lower() == "bearer " else key)


def _remove_folder(folder: Path) -> None:
    """Remove a folder. It is renamed first, so that nothing uses a folder that is only partly removed."""
    gone = folder.with_name(f".deleted-{folder.name}")
    with suppress(FileNotFoundError):
        folder.rename(gone)
    if gone.exists():
        shutil.rmtree(gone)
