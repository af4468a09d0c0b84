"""What concerns all workers: the fence, which worker 0 puts up and takes down for everyone, and the metrics of all.

A worker that is started again in the middle of a pause, alone or with all the others, comes up paused and at the right version,
because the fence is written to the store before anybody is told. Whoever is not there when it changes is waited for. `routes` is what
the world asks for, `worker_routes` what the workers ask of each other over their private sockets. The events of all need nothing of the
kind: they are one sequence in the store, which every worker can tell.
"""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turngate.errors import Stopping
from turngate.gateway.weights import WeightUpdates
from turngate.server.app import Gateway
from turngate.server.http import decode_body, json_response, route
from turngate.server.weights import FenceRoutes
from turngate.server.workers.forwarding import RESTART_WAIT_S, PeerWorkers
from turngate.telemetry.metrics import MetricsSnapshot
from turngate.types import Json

_METRICS_S = 2.0  # for another worker to tell its numbers; Prometheus itself waits ten


class WorkerFence(msgspec.Struct, frozen=True):
    """One worker's fence."""

    version: int
    paused: bool
    in_flight: int


class WorkerResume(msgspec.Struct, frozen=True):
    """What the others are told. `look`: at the replicas first."""

    version: int
    model: str | None
    look: bool


class Coordinator:
    def __init__(self, gateway: Gateway, siblings: PeerWorkers) -> None:
        self._gateway = gateway
        self._siblings = siblings
        self.updates = WeightUpdates(gateway.fence, gateway.fence_state, gateway.events, gateway.replicas, self)

    def routes(self) -> list[Route]:
        return [
            *FenceRoutes(self.updates, self._gateway.auth).routes(),
            self._gateway.metrics_endpoint.route(self._metrics),
        ]

    def worker_routes(self) -> list[Route]:
        return [
            route("/worker/fence", "GET", self.worker_fence, None),
            route("/worker/fence/pause", "POST", self.worker_pause, None),
            route("/worker/fence/drained", "GET", self.worker_drained, None),
            route("/worker/fence/resume", "POST", self.worker_resume, None),
            route("/worker/metrics", "GET", self.worker_metrics, None),
        ]

    async def take_up(self) -> None:
        """Before serving: where the fence stands, as the store has it. Worker 0 goes on with what it had begun for all."""
        fence = self._gateway.fence
        version, model = self._gateway.fence_state.read_policy()
        fence.resume(version, model)
        await self._gateway.replicas.prepare(version, check=False)
        if self._siblings.shard.number == 0:
            await self.updates.start()
        elif self._gateway.fence_state.read_hold() is not None:
            await fence.pause("hold")

    async def close(self) -> None:
        await self.updates.close()

    # ── the fence of all: a `Barrier` ────────────────────────────────────────────────────────────────────────────

    async def describe(self) -> dict[str, Json]:
        others = await self._each("GET", "/worker/fence")
        fence = self._gateway.fence
        return {**fence.describe(), "in_flight": fence.in_flight + sum(state.in_flight for state in others)}

    async def hold(self, until: float | None) -> None:
        self._gateway.fence_state.write_hold(until)
        await self._gateway.fence.pause("hold")
        await self._each("POST", "/worker/fence/pause")

    async def drain(self) -> None:
        await asyncio.gather(self._each("GET", "/worker/fence/drained"), self._gateway.fence.drain())

    async def open(self, version: int | None, model: str | None, *, expired: bool = False, check: bool = False) -> None:
        fence = self._gateway.fence
        fence.check(version, model)
        new = fence.version if version is None else version
        await self._gateway.replicas.prepare(new, check=check)
        self._gateway.fence_state.write_open(new)
        fence.set(version, model)  # if somebody cannot be told, there is no way back behind it
        await self._each("POST", "/worker/fence/resume", WorkerResume(new, model, check))
        self._gateway.barrier.resume(new, model, expired=expired)

    async def _each(self, method: str, target: str, sent: object = None) -> list[WorkerFence]:
        """What every other worker answers; all of them, or it fails."""

        content = None if sent is None else msgspec.json.encode(sent)

        async def one(number: int) -> WorkerFence:
            try:
                return await self._ask(number, method, target, content)
            except Stopping:  # it died in between: its next life may be asked the same
                return await self._ask(number, method, target, content)

        return list(await asyncio.gather(*map(one, self._siblings.others)))

    async def _ask(self, number: int, method: str, target: str, content: bytes | None) -> WorkerFence:
        # Draining takes as long as the longest answer; everything else is done at once, by a worker that is not stuck.
        limit = None if target.endswith("/drained") else RESTART_WAIT_S
        try:
            async with (
                asyncio.timeout(limit),
                self._siblings.ask(number, method, target, self._siblings.own, content) as response,
            ):
                answer = await response.read()
        except TimeoutError:
            raise Stopping(f"worker {number} does not answer; repeat the call in a moment") from None
        except (aiohttp.ClientError, OSError):
            raise Stopping("a worker was stopped meanwhile; repeat the call in a moment") from None
        if response.status != 200:
            raise Stopping(f"worker {number} could not do it ({response.status}); repeat the call in a moment")
        return msgspec.json.decode(answer, type=WorkerFence)

    async def _metrics(self) -> dict[int, MetricsSnapshot | None]:
        """The numbers of the other workers; None for one that does not answer, which is no reason to tell nothing."""

        async def one(number: int) -> MetricsSnapshot | None:
            try:
                async with (
                    asyncio.timeout(_METRICS_S),
                    self._siblings.ask(number, "GET", "/worker/metrics", self._siblings.own) as response,
                ):
                    answer = await response.read()
            except (TimeoutError, Stopping, aiohttp.ClientError, OSError):
                return None
            return msgspec.json.decode(answer, type=MetricsSnapshot) if response.status == 200 else None

        others = self._siblings.others
        return dict(zip(others, await asyncio.gather(*map(one, others)), strict=True))

    # ── this worker's own, asked for by worker 0 ────────────────────────────────────────────────────────────────

    async def worker_fence(self, request: Request) -> Response:
        return self._state()

    async def worker_pause(self, request: Request) -> Response:
        await self._gateway.fence.pause("hold")
        return self._state()

    async def worker_drained(self, request: Request) -> Response:
        await self._gateway.fence.drain()
        return self._state()

    async def worker_resume(self, request: Request) -> Response:
        told = await decode_body(request, WorkerResume)
        self._gateway.fence.check(told.version, told.model)
        await self._gateway.replicas.prepare(told.version, check=told.look)
        self._gateway.fence.resume(told.version, told.model)
        self._gateway.stale.cancel_in_background()
        return self._state()

    async def worker_metrics(self, request: Request) -> Response:
        return json_response(await self._gateway.metrics_endpoint.snapshot())

    def _state(self) -> Response:
        fence = self._gateway.fence
        return json_response(WorkerFence(fence.version, fence.paused, fence.in_flight))
