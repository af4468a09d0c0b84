"""Coordinate a gateway's workers during weight updates and engine changes, and collect their metrics.

Worker 0 changes the engines, and pauses and resumes calls, for all workers. Any worker can collect the metrics of all workers.

Each worker has a fence, at which calls wait during weight updates. A pause or resume is written to the store before the other workers are
notified, so a worker that restarts during a pause is paused again, at the right version. A pause or resume waits for a
worker that is restarting. If the worker does not answer in time, the pause or resume fails with `Stopping` and can be repeated.
"""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turngate.client.protocol import FenceView
from turngate.errors import Stopping
from turngate.gateway.engine_changes import LocalEngines
from turngate.server.app import Gateway
from turngate.server.engines import EngineRoutes
from turngate.server.http import json_response, route
from turngate.server.weights import FenceRoutes
from turngate.server.workers.forwarding import RESTART_WAIT_S, PeerWorkers
from turngate.telemetry.metrics import MetricsSnapshot

_METRICS_S = 2.0  # time to wait for another worker's metrics; Prometheus waits ten seconds for the scrape


class WorkerFence(msgspec.Struct, frozen=True):
    """The state of one worker's fence."""

    version: int
    paused: bool
    in_flight: int


class WorkerResume(msgspec.Struct, frozen=True):
    """A request to resume calls. If `check` is set, the worker first checks its replicas."""

    version: int
    model: str | None
    check: bool


class WorkerEngine(msgspec.Struct, frozen=True):
    """A request to wait until the worker has no calls in flight to an engine."""

    url: str


class WorkerMetricsQuery(msgspec.Struct, frozen=True):
    project: str | None = None  # None means all projects


class Coordinator:
    """The part of a worker that acts for all workers, as the `Barrier` for weight updates and the `EngineGroup` for engine changes."""

    def __init__(self, gateway: Gateway, peers: PeerWorkers) -> None:
        self._gateway = gateway
        self._peers = peers
        gateway.metrics_endpoint.collect_others = self._collect_metrics
        self.updates = gateway.create_updates(self)
        self.engine_changes = gateway.create_engine_changes(self.updates, self)

    def routes(self) -> list[Route]:
        """Return the client-facing routes that concern all workers."""
        return [
            *FenceRoutes(self.updates, self._gateway.auth, self._gateway.sessions, self._gateway.note_all).routes(),
            *EngineRoutes(self.engine_changes, self._gateway.auth).routes(),
            self._gateway.metrics_endpoint.route(),
        ]

    def worker_routes(self) -> list[Route]:
        """Return the routes that workers use to call each other over their private sockets."""
        return [
            route("/worker/fence", "GET", self.worker_fence, None),
            route("/worker/fence/pause", "POST", self.worker_pause, None),
            route("/worker/fence/drained", "GET", self.worker_drain, None),
            route("/worker/fence/resume", "POST", self.worker_resume, None),
            route("/worker/engines/sync", "POST", self.worker_sync_engines, None),
            route("/worker/engines/idle", "POST", self.worker_wait_for_engine, None),
            route("/worker/metrics", "GET", self.worker_metrics, None),
        ]

    async def restore_fence(self) -> None:
        """Restore the fence from the store before serving.

        Worker 0 also ends a pause when it expires, and resumes engines that were left frozen.
        """
        fence = self._gateway.fence
        version, model = self._gateway.fence_state.read_policy()
        fence.resume(version, model)
        await self._gateway.replicas.prepare(version, check=False)
        if self._peers.shard.number == 0:
            await self.updates.start()
        elif self._gateway.fence_state.read_hold() is not None:
            await fence.pause("hold")

    async def close(self) -> None:
        await self.updates.close()

    # ── the barrier across all workers ──────────────────────────────────────────────────────────────────────────

    async def describe(self) -> FenceView:
        others = await self._ask_all("GET", "/worker/fence")
        fence = self._gateway.fence
        in_flight = fence.in_flight + sum(state.in_flight for state in others)
        return msgspec.structs.replace(fence.describe(), in_flight=in_flight)

    async def hold(self, until: float | None) -> None:
        self._gateway.fence_state.write_hold(until)
        await self._gateway.fence.pause("hold")
        await self._ask_all("POST", "/worker/fence/pause")

    async def drain(self) -> None:
        await asyncio.gather(self._ask_all("GET", "/worker/fence/drained"), self._gateway.fence.drain())

    async def open(self, version: int | None, model: str | None, *, expired: bool = False, check: bool = False) -> None:
        fence = self._gateway.fence
        fence.check(version, model)
        new = fence.version if version is None else version
        await self._gateway.replicas.prepare(new, check=check)
        self._gateway.fence_state.write_open(new)
        fence.set(version, model)  # the new version applies even if a worker cannot be reached
        await self._ask_all("POST", "/worker/fence/resume", WorkerResume(new, model, check))
        self._gateway.barrier.resume(new, model, expired=expired)

    # ── the engines of all workers ──────────────────────────────────────────────────────────────────────────────

    async def sync(self) -> None:
        await self._local_engines.sync()
        await self._ask_all("POST", "/worker/engines/sync")

    async def wait_until_idle(self, url: str) -> None:
        body = WorkerEngine(url)
        await asyncio.gather(
            self._ask_all("POST", "/worker/engines/idle", body), self._local_engines.wait_until_idle(url)
        )

    @property
    def _local_engines(self) -> LocalEngines:
        assert self._gateway.local_engines is not None, "only called for a pool"
        return self._gateway.local_engines

    # ── requests between workers ────────────────────────────────────────────────────────────────────────────────

    async def _ask_all(self, method: str, target: str, body: object = None) -> list[WorkerFence]:
        """Send a request to all other workers and return their answers.

        A request that fails is sent once more. If it fails again, `Stopping` is raised.
        """

        content = None if body is None else msgspec.json.encode(body)

        async def ask_twice(number: int) -> WorkerFence:
            try:
                return await self._ask(number, method, target, content)
            except Stopping:  # the worker has died; ask the restarted one
                return await self._ask(number, method, target, content)

        return list(await asyncio.gather(*map(ask_twice, self._peers.others)))

    async def _ask(self, number: int, method: str, target: str, content: bytes | None) -> WorkerFence:
        # Draining can take as long as the longest model call. Other requests are quick unless the worker hangs.
        limit = None if target.endswith(("/drained", "/idle")) else RESTART_WAIT_S
        try:
            async with (
                asyncio.timeout(limit),
                self._peers.request(number, method, target, self._peers.own_header, content) as response,
            ):
                answer = await response.read()
        except TimeoutError:
            raise Stopping(f"worker {number} is not responding; retry the request in a moment") from None
        except (aiohttp.ClientError, OSError):
            raise Stopping(f"the connection to worker {number} was lost; retry the request in a moment") from None
        if response.status != 200:
            raise Stopping(f"worker {number} failed with status {response.status}; retry the request in a moment")
        return msgspec.json.decode(answer, type=WorkerFence)

    async def _collect_metrics(self, project: str | None) -> dict[int, MetricsSnapshot | None]:
        """Return the metrics of every other worker, for one project or for all projects.

        The value is None for a worker that does not answer or answers with an error.
        """
        target = "/worker/metrics" if project is None else f"/worker/metrics?project={project}"

        async def ask(number: int) -> MetricsSnapshot | None:
            try:
                async with (
                    asyncio.timeout(_METRICS_S),
                    self._peers.request(number, "GET", target, self._peers.own_header) as response,
                ):
                    answer = await response.read()
            except (TimeoutError, Stopping, aiohttp.ClientError, OSError):
                return None
            return msgspec.json.decode(answer, type=MetricsSnapshot) if response.status == 200 else None

        others = self._peers.others
        return dict(zip(others, await asyncio.gather(*map(ask, others)), strict=True))

    # ── this worker's part, requested by its peers ──────────────────────────────────────────────────────────────

    async def worker_fence(self, request: Request) -> Response:
        return self._fence_response()

    async def worker_pause(self, request: Request) -> Response:
        await self._gateway.fence.pause("hold")
        return self._fence_response()

    async def worker_drain(self, request: Request) -> Response:
        await self._gateway.fence.drain()
        return self._fence_response()

    async def worker_resume(self, request: Request, body: WorkerResume) -> Response:
        self._gateway.fence.check(body.version, body.model)
        await self._gateway.replicas.prepare(body.version, check=body.check)
        self._gateway.fence.resume(body.version, body.model)
        self._gateway.stale.cancel_in_background()
        return self._fence_response()

    async def worker_sync_engines(self, request: Request) -> Response:
        await self._local_engines.sync()
        return self._fence_response()

    async def worker_wait_for_engine(self, request: Request, body: WorkerEngine) -> Response:
        await self._local_engines.wait_until_idle(body.url)
        return self._fence_response()

    async def worker_metrics(self, request: Request, query: WorkerMetricsQuery) -> Response:
        if query.project is None:
            return json_response(await self._gateway.metrics_endpoint.snapshot())
        return json_response(self._gateway.find_project(query.project).metrics_endpoint.project_snapshot())

    def _fence_response(self) -> Response:
        fence = self._gateway.fence
        return json_response(WorkerFence(fence.version, fence.paused, fence.in_flight))
