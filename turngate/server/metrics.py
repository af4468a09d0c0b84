"""`GET /metrics`, for Prometheus: what this worker counted, what can only be looked up, and the same of the other workers.

Behind the admin key, or a key that opens nothing else (`TURNGATE_METRICS_KEY`). `Gateway` owns the one `Probe`; `together.py` asks the
other workers for theirs.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turngate import __version__
from turngate.errors import StoreError, TurngateError
from turngate.server.http import bearer_key, error_response
from turngate.telemetry.metrics import (
    CONTENT_TYPE,
    Labels,
    MetricsSnapshot,
    label_by_worker,
    merge_snapshots,
    to_prometheus,
)

if TYPE_CHECKING:
    from turngate.server.app import Gateway

LAG_INTERVAL_S = 0.5  # how often the event loop is asked whether it is late
_MAX_FEEDS = 100  # that are told of, the newest
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
Gauges = dict[str, Iterable[tuple[Labels, float]]]
CollectOthers = Callable[[], Awaitable[dict[int, MetricsSnapshot | None]]]


class MetricsEndpoint:
    """Looks at one gateway when it is asked, and at the lateness of its event loop all the time."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._watching: asyncio.Task[None] | None = None
        self._started = time.time()

    def start(self) -> None:
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching

    async def _watch(self) -> None:
        loop, lag = asyncio.get_running_loop(), self._gateway.metrics.lag
        while True:
            due = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            lag.observe(max(0.0, loop.time() - due))

    async def own(self) -> MetricsSnapshot:
        """Of this worker alone."""
        gateway = self._gateway
        # As last seen. A hosted endpoint is not asked for this: it is not ours to be asked every few seconds.
        health = [] if gateway.engine is None else await gateway.engine.health()
        up = sum(replica.ok for replica in health)
        looked: Gauges = {
            "turngate_workers": [((), 1)],
            "turngate_sessions_open": [((), gateway.sessions.open_count)],
            "turngate_sessions_resting": [((), gateway.sessions.evicted_count)],
            "turngate_engines": [(("up",), up), (("down",), len(health) - up)] if health else [],
            "turngate_fence_version": [((), gateway.fence.version)],
            "turngate_fence_paused": [((), int(gateway.fence.paused))],
            **_process_gauges(self._started),
        }
        return gateway.metrics.snapshot(looked)

    async def own_and_shared(self, silent: int = 0) -> MetricsSnapshot:
        """With what is of the store, and so of all workers."""
        own = await self.own()
        shared = self._gateway.metrics.snapshot(
            {
                "turngate_info": [((__version__, self._gateway.config.engine), 1)],
                "turngate_workers_silent": [((), silent)],
                **self._feeds(),
            }
        )
        return MetricsSnapshot({**shared.families, **own.families})

    def _feeds(self) -> Gauges:
        feeds = self._gateway.feeds
        try:
            listed, waiting = feeds.listing()[-_MAX_FEEDS:], feeds.waiting()
        except StoreError:
            return {}  # whatever else there is to tell is told all the same
        none = (0, 0)
        return {
            "turngate_feed_newest": [((feed.name,), feed.newest) for feed in listed],
            "turngate_feed_handed": [((feed.name,), feed.handed) for feed in listed],
            "turngate_feed_committed": [((feed.name,), feed.committed) for feed in listed],
            "turngate_feed_waiting_groups": [((feed.name,), waiting.get(feed.name, none)[0]) for feed in listed],
            "turngate_feed_waiting_rollouts": [((feed.name,), waiting.get(feed.name, none)[1]) for feed in listed],
        }

    def route(self, others: CollectOthers | None = None) -> Route:
        """`others`: the numbers of the other workers, None for one that does not answer."""

        async def served(request: Request) -> Response:
            try:
                self._gateway.auth.require_metrics(bearer_key(request))
                apart = request.query_params.get("by") == "worker"
                body = await self._text(await others() if others is not None else {}, apart)
            except TurngateError as error:
                return error_response(error)
            return Response(body, headers={"content-type": CONTENT_TYPE, "cache-control": "no-store"})

        return Route("/metrics", served, methods=["GET"])

    async def _text(self, others: dict[int, MetricsSnapshot | None], apart: bool) -> bytes:
        found = {number: snapshot for number, snapshot in others.items() if snapshot is not None}
        own = await self.own_and_shared(silent=len(others) - len(found))
        if apart:
            return to_prometheus(label_by_worker({self._gateway.shard.number: own, **found}))
        return to_prometheus([((), merge_snapshots([own, *found.values()]))])


def _process_gauges(started: float) -> Gauges:
    """This process, as Prometheus' own clients tell of theirs. Nothing where there is no /proc."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    looked: Gauges = {
        "process_cpu_seconds_total": [((), usage.ru_utime + usage.ru_stime)],
        "process_max_fds": [((), resource.getrlimit(resource.RLIMIT_NOFILE)[0])],
        "process_start_time_seconds": [((), started)],
    }
    try:
        resident = int(Path("/proc/self/statm").read_bytes().split()[1]) * _PAGE_BYTES
        files = sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:
        return looked
    return {**looked, "process_resident_memory_bytes": [((), resident)], "process_open_fds": [((), files)]}
