"""`GET /metrics` for Prometheus, with the values of all workers.

With the admin key, or the key in `TURNGATE_METRICS_KEY` (which grants access to nothing else), the endpoint returns sums over all projects.
Feed metrics are the exception: they cover only the project `default`. With an API key, the endpoint returns only the values of the key's
project, and no process metrics. With the admin key and the name of a project other than `default`, it returns what an API key of that
project would return.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turngate import __version__
from turngate.common.sharding import Shard
from turngate.engines.base import Engine
from turngate.errors import StoreError, TurngateError
from turngate.gateway.cell.cell import Cell
from turngate.gateway.feeds import Feeds
from turngate.gateway.fence import Fence
from turngate.gateway.sessions import Sessions
from turngate.server.auth import Auth
from turngate.server.http import bearer_key, error_response
from turngate.server.operations import ApiRoute, describe_operation
from turngate.server.scopes import scopes_of
from turngate.store.projects import DEFAULT_PROJECT
from turngate.telemetry.metrics import (
    CONTENT_TYPE,
    Labels,
    Metrics,
    MetricsSnapshot,
    label_by_worker,
    merge_snapshots,
    to_prometheus,
)

LAG_INTERVAL_S = 0.5  # interval between measurements of the event loop's delay
_MAX_FEEDS = 100  # only the newest feeds are reported
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
Gauges = dict[str, Iterable[tuple[Labels, float]]]
# Fetches the other workers' snapshots for one project, or for all projects if the argument is None. The value is None for a worker that
# does not answer.
CollectOthers = Callable[[str | None], Awaitable[dict[int, MetricsSnapshot | None]]]
_PROCESS_FAMILIES = ("turngate_loop_lag_seconds",)  # process metrics, which a request for one project does not return


class MetricsQuery(msgspec.Struct, frozen=True):
    """Query parameters. With `by=worker`, values are labeled with the number of their worker, unless all workers share them."""

    by: Literal["worker", ""] = ""


class MetricsEndpoint:
    """The metrics endpoint of one project. The endpoint of the project `default` can also return the metrics of the whole gateway.

    Between `start` and `stop`, it measures the event loop's delay.
    """

    def __init__(
        self,
        metrics: Metrics,
        sessions: Sessions,
        feeds: Feeds,
        fence: Fence,
        engine: Engine | None,
        auth: Auth,
        *,
        engine_name: str,
        shard: Shard,
        project: str,
        cell: Cell | None = None,
    ) -> None:
        self._metrics = metrics
        self._sessions = sessions
        self._feeds = feeds
        self._fence = fence
        self._engine = engine
        self._auth = auth
        self._engine_name = engine_name
        self._shard = shard
        self._project = project
        self._cell = cell
        self.collect_others: CollectOthers | None = None  # set if there are other workers
        self.hosted: list[MetricsEndpoint] = []  # endpoints of the other projects, if this one serves the whole gateway
        self._lag_task: asyncio.Task[None] | None = None
        self._started = time.time()

    def start(self) -> None:
        self._lag_task = asyncio.create_task(self._measure_lag())

    async def stop(self) -> None:
        if self._lag_task is not None:
            self._lag_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._lag_task

    async def _measure_lag(self) -> None:
        loop, lag = asyncio.get_running_loop(), self._metrics.lag
        while True:
            due = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            lag.observe(max(0.0, loop.time() - due))

    def project_snapshot(self) -> MetricsSnapshot:
        """Return this worker's metrics for this endpoint's project."""
        families = self._metrics.snapshot(self._session_gauges()).families
        return MetricsSnapshot({name: series for name, series in families.items() if name not in _PROCESS_FAMILIES})

    def _session_gauges(self) -> Gauges:
        return {
            "turngate_sessions_open": [((), self._sessions.open_count)],
            "turngate_sessions_resting": [((), self._sessions.evicted_count)],
        }

    async def snapshot(self) -> MetricsSnapshot:
        """Return this worker's metrics for all projects."""
        # This is the result of the last health check. Relays are omitted, because a scrape must not send requests to a provider.
        health = [] if self._engine is None else await self._engine.health()
        up = sum(replica.ok for replica in health)
        gauges: Gauges = {
            "turngate_workers": [((), 1)],
            **self._session_gauges(),
            "turngate_engines": [(("up",), up), (("down",), len(health) - up)] if health else [],
            "turngate_fence_version": [((), self._fence.version)],
            "turngate_fence_paused": [((), int(self._fence.paused))],
            **_process_gauges(self._started),
        }
        own = self._metrics.snapshot(gauges)
        return merge_snapshots([own, *(project.project_snapshot() for project in self.hosted)]) if self.hosted else own

    async def _snapshot_with_shared(self, silent_workers: int) -> MetricsSnapshot:
        """Return this worker's metrics for all projects, and the metrics that all workers have in common, such as feed metrics."""
        own = await self.snapshot()
        shared = self._metrics.snapshot(
            {
                "turngate_info": [((__version__, self._engine_name), 1)],
                "turngate_workers_silent": [((), silent_workers)],
                **self._feed_gauges(),
                **self._cell_gauges(),
            }
        )
        return MetricsSnapshot({**shared.families, **own.families})

    def _feed_gauges(self) -> Gauges:
        feeds = self._feeds
        try:
            listed, waiting = feeds.list_feeds()[-_MAX_FEEDS:], feeds.count_incomplete()
        except StoreError:
            return {}  # serve the other metrics anyway
        none = (0, 0)
        return {
            "turngate_feed_newest": [((feed.name,), feed.newest) for feed in listed],
            "turngate_feed_handed": [((feed.name,), feed.handed) for feed in listed],
            "turngate_feed_committed": [((feed.name,), feed.committed) for feed in listed],
            "turngate_feed_waiting_groups": [((feed.name,), waiting.get(feed.name, none)[0]) for feed in listed],
            "turngate_feed_waiting_rollouts": [((feed.name,), waiting.get(feed.name, none)[1]) for feed in listed],
        }

    def _cell_gauges(self) -> Gauges:
        if self._cell is None:
            return {}
        try:
            return {name: [((), value)] for name, value in self._cell.gauges().items()}
        except StoreError:
            return {}

    def route(self) -> Route:
        scopes = scopes_of("GET", "/metrics")
        media = CONTENT_TYPE.partition(";")[0]
        operation = describe_operation("/metrics", "GET", self.read, "key", scopes=scopes, reply_media=media)

        async def serve(request: Request) -> Response:
            try:
                sees_all = self._auth.require_metrics(bearer_key(request), scopes) and self._project == DEFAULT_PROJECT
                request.state.project = None if sees_all else self._project
                return await self.read(request, **cast(Any, await operation.read_arguments(request)))
            except TurngateError as error:
                return error_response(error)

        return ApiRoute(operation, serve)

    async def read(self, request: Request, query: MetricsQuery) -> Response:
        """Return the metrics in the Prometheus format."""
        project = request.state.project
        others = await self.collect_others(project) if self.collect_others is not None else {}
        text = await self._render(project, others, query.by == "worker")
        return Response(text, headers={"content-type": CONTENT_TYPE, "cache-control": "no-store"})

    async def _render(self, project: str | None, others: dict[int, MetricsSnapshot | None], per_worker: bool) -> bytes:
        answered = {number: snapshot for number, snapshot in others.items() if snapshot is not None}
        silent = len(others) - len(answered)
        own = await self._snapshot_with_shared(silent) if project is None else self._project_with_feeds()
        if per_worker:
            return to_prometheus(label_by_worker({self._shard.number: own, **answered}))
        return to_prometheus([((), merge_snapshots([own, *answered.values()]))])

    def _project_with_feeds(self) -> MetricsSnapshot:
        feeds = self._metrics.snapshot(self._feed_gauges())
        return MetricsSnapshot({**feeds.families, **self.project_snapshot().families})


def _process_gauges(started: float) -> Gauges:
    """Return the standard process metrics of Prometheus clients. Without /proc, memory and open files are omitted."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    gauges: Gauges = {
        "process_cpu_seconds_total": [((), usage.ru_utime + usage.ru_stime)],
        "process_max_fds": [((), resource.getrlimit(resource.RLIMIT_NOFILE)[0])],
        "process_start_time_seconds": [((), started)],
    }
    try:
        resident = int(Path("/proc/self/statm").read_bytes().split()[1]) * _PAGE_BYTES
        files = sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:
        return gauges
    return {**gauges, "process_resident_memory_bytes": [((), resident)], "process_open_fds": [((), files)]}
