"""What concerns all workers: the fence, which worker 0 puts up and takes down for everyone.

A worker that is started again in the middle of a pause comes up paused and at the right version, because the fence is written to
the store before anybody is told. Whoever is not there when it changes is waited for. `routes` is what the world asks for,
`worker_routes` what the workers ask of each other over their private sockets. The events of all need nothing of the kind: they are one
sequence in the store, which every worker can tell.
"""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turngate.errors import Stopping
from turngate.server.admin import PauseBody, ResumeBody
from turngate.server.app import Gateway
from turngate.server.http import body, reply, route
from turngate.server.siblings import RETURN_S, Siblings
from turngate.types import Json

_PAUSED = "paused"  # the setting: by which run of the gateway


class State(msgspec.Struct, frozen=True):
    """One worker's fence."""

    version: int
    paused: bool
    in_flight: int


class Together:
    def __init__(self, gateway: Gateway, siblings: Siblings, run: str) -> None:
        self._gateway = gateway
        self._siblings = siblings
        self._run = run
        self._changing = asyncio.Lock()  # one change of the fence after the other

    def routes(self) -> list[Route]:
        auth = self._gateway.auth
        return [
            route("/admin/fence", "GET", self.fence, auth),
            route("/admin/fence/pause", "POST", self.pause, auth),
            route("/admin/fence/resume", "POST", self.resume, auth),
        ]

    def worker_routes(self) -> list[Route]:
        return [
            route("/worker/fence", "GET", self.worker_fence, None),
            route("/worker/fence/pause", "POST", self.worker_pause, None),
            route("/worker/fence/drained", "GET", self.worker_drained, None),
            route("/worker/fence/resume", "POST", self.worker_resume, None),
        ]

    async def take_up(self) -> None:
        """Before serving: where the fence stands, as the store has it."""
        fence, store = self._gateway.fence, self._gateway.store
        fence.resume(int(store.setting("policy_version") or 0))
        if store.setting(_PAUSED) == self._run:
            await fence.pause("hold")

    # ── the fence of all ────────────────────────────────────────────────────────────────────────────────────────

    async def fence(self, request: Request) -> Response:
        return reply(self._stands(await self._each("GET", "/worker/fence")))

    async def pause(self, request: Request) -> Response:
        wanted = await body(request, PauseBody)
        async with self._changing:
            self._gateway.store.set_setting(_PAUSED, self._run)
            await self._gateway.fence.pause("hold")
            states = await self._each("POST", "/worker/fence/pause")
        if wanted.mode == "drain":
            states, _ = await asyncio.gather(self._each("GET", "/worker/fence/drained"), self._gateway.fence.drained())
        self._gateway.control.paused(wanted.mode)
        return reply(self._stands(states))

    async def resume(self, request: Request) -> Response:
        wanted = await body(request, ResumeBody)
        fence, control, store = self._gateway.fence, self._gateway.control, self._gateway.store
        async with self._changing:
            fence.check(wanted.version)
            version = fence.version if wanted.version is None else wanted.version
            store.set_setting("policy_version", str(version))
            store.set_setting(_PAUSED, "")
            fence.version = version  # if somebody cannot be told, there is no way back behind it
            states = await self._each("POST", "/worker/fence/resume", ResumeBody(version))
            control.resume(version)
        return reply(self._stands(states))

    async def _each(self, method: str, target: str, sent: object = None) -> list[State]:
        """What every other worker answers; all of them, or it fails."""

        content = None if sent is None else msgspec.json.encode(sent)

        async def one(number: int) -> State:
            try:
                return await self._ask(number, method, target, content)
            except Stopping:  # it died in between: its next life may be asked the same
                return await self._ask(number, method, target, content)

        return list(await asyncio.gather(*map(one, self._siblings.others)))

    async def _ask(self, number: int, method: str, target: str, content: bytes | None) -> State:
        # Draining takes as long as the longest answer; everything else is done at once, by a worker that is not stuck.
        limit = None if target.endswith("/drained") else RETURN_S
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
        return msgspec.json.decode(answer, type=State)

    def _stands(self, others: list[State]) -> dict[str, Json]:
        ours = self._gateway.control.fence()
        in_flight = self._gateway.fence.in_flight + sum(state.in_flight for state in others)
        return {**ours, "in_flight": in_flight}

    # ── this worker's own, asked for by worker 0 ────────────────────────────────────────────────────────────────

    async def worker_fence(self, request: Request) -> Response:
        return self._state()

    async def worker_pause(self, request: Request) -> Response:
        await self._gateway.fence.pause("hold")
        return self._state()

    async def worker_drained(self, request: Request) -> Response:
        await self._gateway.fence.drained()
        return self._state()

    async def worker_resume(self, request: Request) -> Response:
        self._gateway.fence.resume((await body(request, ResumeBody)).version)
        self._gateway.control.version_rose()
        return self._state()

    def _state(self) -> Response:
        fence = self._gateway.fence
        return reply(State(fence.version, fence.paused, fence.in_flight))
