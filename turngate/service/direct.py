"""Direct mode: the agent calls the endpoint itself, and nothing is recorded but what the agent writes down.

A sandbox has no network but its way out, which leads to a gateway. Here it leads to a forwarder that sends model calls on to one
endpoint and hands its replies back unread. It has no key to add, takes off whatever key the agent sends, follows no redirect, and
knows one address. The rollout talks to `Unrecorded` where it would talk to a gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from turngate.rollout.client import GatewayClient, Opened
from turngate.sandboxes.posix import to_the_end
from turngate.sandboxes.relay import GATEWAY
from turngate.store.outcome import Recorded
from turngate.types import Json

PLACEHOLDER = "none"  # what the agent gets for a key
_SILENCE_S = 600.0
_LARGEST = 64 * 1024 * 1024
_OURS = {GATEWAY: "1"}  # a relay takes a reply without it for a dead tunnel's, and tries again
_KEYS = ("authorization", "x-api-key", "x-goog-api-key", "api-key", "cookie", "proxy-authorization")
_COUNTS = ("/count_tokens", ":countTokens")  # calls that sample nothing
_HOP = (
    "host",
    "accept-encoding",
    "content-length",
    "transfer-encoding",
    "connection",
    "keep-alive",
    "te",
    "upgrade",
    "expect",
)
_HANDED_ON = ("content-type", "retry-after", "request-id", "x-request-id", "x-should-retry")


class Forwarder:
    """To one endpoint. `calls`: how many generations went through."""

    def __init__(self, url: str) -> None:
        self._base = url.rstrip("/")
        self._http: aiohttp.ClientSession | None = None
        self.calls = 0

    def target(self, path: str) -> str:
        """Where a path leads. A base that has a path of its own is taken as it is, as the relaying engines take it."""
        own = urlsplit(self._base).path
        for version in ("/v1beta", "/v1"):
            if own.endswith(version) and path.startswith(f"{version}/"):
                return self._base.removesuffix(version) + path
        return self._base + (path.removeprefix("/v1") if own else path)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/":
            return web.json_response({}, headers=_OURS)
        if request.path.startswith("/v1/tools"):
            return _refused(404, "there are no host tools in direct mode")
        assert self._http is not None
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in (*_KEYS, *_HOP) and not name.lower().startswith("x-turngate")
        }
        self.calls += request.method == "POST" and not request.path.endswith(_COUNTS)
        url = self.target(request.path) + (f"?{request.query_string}" if request.query_string else "")
        try:
            async with self._http.request(
                request.method, url, data=await request.read(), headers=headers, allow_redirects=False
            ) as reply:
                if 300 <= reply.status < 400:
                    return _refused(502, f"the endpoint answers {reply.status}, and redirects are not followed")
                return await _handed_on(request, reply)
        except (aiohttp.ClientError, TimeoutError) as error:
            return _refused(502, f"the endpoint cannot be reached: {type(error).__name__}")

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """The URL that takes calls, as long as the block runs."""
        app = web.Application(client_max_size=_LARGEST)
        app.router.add_route("*", "/{path:.*}", self.handle)
        # A call whose agent has gone is ended at the endpoint too.
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        limit = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=_SILENCE_S)
        async with aiohttp.ClientSession(timeout=limit, cookie_jar=aiohttp.DummyCookieJar()) as self._http:
            await runner.setup()
            try:
                site = web.TCPSite(runner, "127.0.0.1", 0)
                await to_the_end(site.start())  # half started, its socket would be watched for ever
                host, port = runner.addresses[0][:2]
                yield f"http://{host}:{port}"
            finally:
                await runner.cleanup()


def _refused(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "endpoint_error"}}, status=status, headers=_OURS)


async def _handed_on(request: web.Request, reply: aiohttp.ClientResponse) -> web.StreamResponse:
    kept = {name: reply.headers[name] for name in _HANDED_ON if name in reply.headers}
    response = web.StreamResponse(status=reply.status, headers={**kept, **_OURS})
    await response.prepare(request)
    try:
        async for piece in reply.content.iter_any():
            await response.write(piece)
        await response.write_eof()
    except (aiohttp.ClientError, TimeoutError, OSError):  # cut short, and so it is for the agent
        if request.transport is not None:
            request.transport.abort()
    return response


class Unrecorded(GatewayClient):
    """In a gateway's place: takes everything that a rollout tells it, and keeps nothing. `tell` is told the stages."""

    def __init__(self, url: str, calls: Callable[[], int], tell: Callable[[str, dict[str, Json]], None]) -> None:
        super().__init__(url, PLACEHOLDER)
        self._calls = calls
        self._tell = tell

    async def open(self, config: dict[str, Json], session: str | None = None, traceparent: str = "") -> Opened:
        return Opened(session or PLACEHOLDER, PLACEHOLDER)

    async def show(self, session: str) -> Json:
        """With the calls for turns: whoever made none has done nothing that could be graded."""
        return {"last_error": None, "stop": "", "turns": self._calls(), "sampled_tokens": 0, "roles": {}}

    async def seal(self, session: str, stop: str = "") -> Json:
        return await self.show(session)

    async def cancel(self, session: str) -> Json:
        return await self.show(session)

    async def samples(self, session: str, *, everything: bool = False) -> list[Json]:
        return []

    async def tool_calls(self, session: str) -> list[Json]:
        return []

    async def announce(self, session: str, kind: str, data: dict[str, Json]) -> int:
        self._tell(kind, data)
        return 0

    async def record(self, session: str, recorded: Recorded, *, replace: bool = False) -> None:
        return

    async def events(self, session: str = "", after: int = 0, *, wait: bool = True) -> AsyncGenerator[Json, None]:
        """None, for as long as somebody waits."""
        if wait:
            await asyncio.Event().wait()
        nothing: tuple[Json, ...] = ()
        for event in nothing:
            yield event
