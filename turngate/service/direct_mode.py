"""Direct mode: the agent calls the endpoint itself, and nothing is recorded but what the agent writes down.

A sandbox has no network but its way out, which leads to a gateway. Here it leads to a forwarder that sends model calls on to one
endpoint and hands its replies back unread. It has no key to add, takes off whatever key the agent sends, follows no redirect, and
knows one address. It counts the generations that were answered, and remembers how the newest failed and for how long nothing has
come: an endpoint that is dead, failing or silent is to blame for how a rollout ends, here as elsewhere. The rollout talks to
`Unrecorded` where it would talk to a gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from turngate.client.gateway import GatewayClient, OpenedSession
from turngate.common.aio import run_to_completion
from turngate.engines.http import boundary, failure, message_of
from turngate.errors import EngineError, TurngateError
from turngate.sandboxes.relay import GATEWAY_HEADER
from turngate.store.outcomes import RecordedOutcome
from turngate.trace.session import CallError, EngineSilence
from turngate.types import Json

PLACEHOLDER = "none"  # what the agent gets for a key
_SILENCE_S = 600.0
_LARGEST = 64 * 1024 * 1024
_OURS = {GATEWAY_HEADER: "1"}  # a relay takes a reply without it for a dead tunnel's, and tries again
_KEYS = ("authorization", "x-api-key", "x-goog-api-key", "api-key", "cookie", "proxy-authorization")
# How the paths end of calls that sample something; others say nothing about the endpoint's health.
_GENERATIONS = ("/completions", "/messages", "/responses", ":generateContent", ":streamGenerateContent")
_NAMED = "the endpoint"
_EVIDENCE = 4096  # bytes of an endpoint's refusal that are read for its reason
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
    """To one endpoint. `answered`: how many generations were, to the end. `last_error`: how the newest failed, if it did."""

    def __init__(self, url: str) -> None:
        self._base = url.rstrip("/")
        self._http: aiohttp.ClientSession | None = None
        self.answered = 0
        self.last_error: CallError | None = None
        self.engine_silence = EngineSilence()

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
        if request.method != "POST" or not request.path.endswith(_GENERATIONS):
            return await self._forwarded(request, sampled=False)
        self.engine_silence.begin()
        try:
            return await self._forwarded(request, sampled=True)
        finally:
            self.engine_silence.end()

    async def _forwarded(self, request: web.Request, *, sampled: bool) -> web.StreamResponse:
        assert self._http is not None
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in (*_KEYS, *_HOP) and not name.lower().startswith("x-turngate")
        }
        sent, query = await request.read(), request.rel_url.raw_query_string
        # As it came: quoted anew, it would be another.
        url = URL(self.target(request.rel_url.raw_path) + (f"?{query}" if query else ""), encoded=True)
        try:
            with boundary(_NAMED):
                reply = await self._http.request(request.method, url, data=sent, headers=headers, allow_redirects=False)
        except EngineError as error:
            self._failed(error, sampled)
            return _refused(502, error.message)
        async with reply:
            if 300 <= reply.status < 400:
                unmoved = EngineError(f"{_NAMED} answers {reply.status}, and redirects are not followed")
                self._failed(unmoved, sampled)
                return _refused(502, unmoved.message)
            return await self._handed_on(request, reply, sampled)

    async def _handed_on(
        self, request: web.Request, reply: aiohttp.ClientResponse, sampled: bool
    ) -> web.StreamResponse:
        kept = {name: reply.headers[name] for name in _HANDED_ON if name in reply.headers}
        response = web.StreamResponse(status=reply.status, headers={**kept, **_OURS})
        said = b""
        try:
            await response.prepare(request)
            while True:
                with boundary(_NAMED):
                    piece = await reply.content.readany()
                if not piece:
                    break
                if sampled:
                    self.engine_silence.reset()
                if reply.status >= 400:
                    said = (said + piece)[:_EVIDENCE]
                await response.write(piece)
            self._ended(reply.status, said, sampled)
            await response.write_eof()
        except EngineError as error:  # cut short, and so it is for the agent
            self._failed(error, sampled)
            if request.transport is not None:
                request.transport.abort()
        except OSError:  # the agent has gone
            pass
        return response

    def _ended(self, status: int, said: bytes, sampled: bool) -> None:
        """A reply came whole."""
        if status == 401:
            self._failed(EngineError(f"{_NAMED} wants a key, and in direct mode it gets none: use observe"), sampled)
        elif status >= 400:
            self._failed(failure(_NAMED, status, message_of(said), said.decode("utf-8", "replace")), sampled)
        elif sampled:
            self.answered += 1
            self.last_error = None

    def _failed(self, error: TurngateError, sampled: bool) -> None:
        if sampled:
            self.engine_silence.reset()
            self.last_error = CallError(error.boundary, error.kind, error.message)

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
                await run_to_completion(site.start())  # half started, its socket would be watched for ever
                host, port = runner.addresses[0][:2]
                yield f"http://{host}:{port}"
            finally:
                await runner.cleanup()


def _refused(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "endpoint_error"}}, status=status, headers=_OURS)


class Unrecorded(GatewayClient):
    """In a gateway's place: takes everything that a rollout tells it, and keeps nothing. `tell` is told the stages."""

    def __init__(self, url: str, forwarder: Forwarder, tell: Callable[[str, dict[str, Json]], None]) -> None:
        super().__init__(url, PLACEHOLDER)
        self._forwarder = forwarder
        self._tell = tell

    async def open(self, config: dict[str, Json], session: str | None = None, traceparent: str = "") -> OpenedSession:
        return OpenedSession(session or PLACEHOLDER, PLACEHOLDER)

    async def show(self, session: str) -> Json:
        """With the answers for turns: whoever got none has done nothing that could be graded."""
        through = self._forwarder
        return {
            "last_error": msgspec.to_builtins(through.last_error),
            "unheard_s": through.engine_silence.seconds,
            "stop": "",
            "turns": through.answered,
            "sampled_tokens": 0,
            "roles": {},
        }

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

    async def record(self, session: str, recorded: RecordedOutcome, *, replace: bool = False) -> None:
        return

    async def events(self, session: str = "", after: int = 0, *, wait: bool = True) -> AsyncGenerator[Json, None]:
        """None, for as long as somebody waits."""
        if wait:
            await asyncio.Event().wait()
        nothing: tuple[Json, ...] = ()
        for event in nothing:
            yield event
