"""Direct mode: the agent's calls go to the endpoint without a gateway, and only the agent's own logs are kept.

An isolated sandbox can reach only its gateway. In direct mode, a `Forwarder` takes the gateway's place: it forwards model calls to one
endpoint, and returns the status and body of each reply unchanged. It adds no key, strips credential headers and the session's key, and
turns a redirect into an error. It also counts completed generations, and records when the endpoint fails or goes silent. As in the other
modes, the agent is not at fault if its endpoint is down, fails or stops responding. The rollout uses `DirectModeClient` in place of a
gateway client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from yarl import URL

from turngate.client.gateway import GatewayClient
from turngate.client.protocol import OpenedSession, SampleRow, SessionInfo, SessionSettings, ToolCallView
from turngate.common.aio import run_to_completion
from turngate.engines.http import error_from_status, extract_message, map_errors
from turngate.errors import EngineError, TurngateError
from turngate.sandboxes.relay import GATEWAY_HEADER
from turngate.store.events import GatewayEvent
from turngate.store.outcomes import RecordedOutcome
from turngate.trace.session import CallError, EngineSilence
from turngate.types import Json

PLACEHOLDER = "none"  # the API key that the agent gets
_SILENCE_S = 600.0
_MAX_BODY = 64 * 1024 * 1024
# Without this header, a relay mistakes the reply for the error page of a dead tunnel, and retries.
_GATEWAY_HEADERS = {GATEWAY_HEADER: "1"}
_CREDENTIAL_HEADERS = ("authorization", "x-api-key", "x-goog-api-key", "api-key", "cookie", "proxy-authorization")
# Path suffixes of calls that sample. Only these calls show whether the endpoint is healthy.
_GENERATIONS = ("/completions", "/messages", "/responses", ":generateContent", ":streamGenerateContent")
_ENDPOINT = "the endpoint"
_MAX_ERROR_BODY = 4096  # bytes of an error reply to keep for the error message
_HOP_HEADERS = (
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
_FORWARDED_HEADERS = ("content-type", "retry-after", "request-id", "x-request-id", "x-should-retry")


class Forwarder:
    """Forwards model calls to one endpoint.

    `answered` counts completed generations. `last_error` is the error of the latest generation, or None if it succeeded.
    """

    def __init__(self, url: str) -> None:
        self._base = url.rstrip("/")
        self._http: aiohttp.ClientSession | None = None
        self.answered = 0
        self.last_error: CallError | None = None
        self.engine_silence = EngineSilence()

    def target_url(self, path: str) -> str:
        """Return the endpoint's URL for a path. A path in the base URL replaces a leading /v1, as in observe mode.

        A leading /v1beta is kept, but not repeated if the base URL ends with it.
        """
        own = urlsplit(self._base).path
        for version in ("/v1beta", "/v1"):
            if own.endswith(version) and path.startswith(f"{version}/"):
                return self._base.removesuffix(version) + path
        return self._base + (path.removeprefix("/v1") if own and path.startswith("/v1/") else path)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/":
            return web.json_response({}, headers=_GATEWAY_HEADERS)
        if request.path.startswith("/v1/tools"):
            return _error_response(404, "direct mode does not support host tools")
        if request.headers.get("upgrade", "").lower() == "websocket":  # agents fall back to HTTP after this status
            return _error_response(426, "direct mode does not support WebSockets; send the request over HTTP")
        if request.method != "POST" or not request.path.endswith(_GENERATIONS):
            return await self._forward(request, is_generation=False)
        self.engine_silence.begin()
        try:
            return await self._forward(request, is_generation=True)
        finally:
            self.engine_silence.end()

    async def _forward(self, request: web.Request, *, is_generation: bool) -> web.StreamResponse:
        assert self._http is not None
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in (*_CREDENTIAL_HEADERS, *_HOP_HEADERS) and not name.lower().startswith("x-turngate")
        }
        body, query = await request.read(), _remove_session_key(request.rel_url.raw_query_string)
        # The URL is already quoted, and quoting it again would change it.
        url = URL(self.target_url(request.rel_url.raw_path) + (f"?{query}" if query else ""), encoded=True)
        try:
            with map_errors(_ENDPOINT):
                reply = await self._http.request(request.method, url, data=body, headers=headers, allow_redirects=False)
        except EngineError as error:
            self._note_failure(error, is_generation)
            return _error_response(502, error.message)
        async with reply:
            if 300 <= reply.status < 400:
                redirect = EngineError(
                    f"{_ENDPOINT} answered with a redirect ({reply.status}), which is not followed; use the URL that it redirects to"
                )
                self._note_failure(redirect, is_generation)
                return _error_response(502, redirect.message)
            return await self._stream_reply(request, reply, is_generation)

    async def _stream_reply(
        self, request: web.Request, reply: aiohttp.ClientResponse, is_generation: bool
    ) -> web.StreamResponse:
        headers = {name: reply.headers[name] for name in _FORWARDED_HEADERS if name in reply.headers}
        response = web.StreamResponse(status=reply.status, headers={**headers, **_GATEWAY_HEADERS})
        error_body = b""
        try:
            await response.prepare(request)
            while True:
                with map_errors(_ENDPOINT):
                    chunk = await reply.content.readany()
                if not chunk:
                    break
                if is_generation:
                    self.engine_silence.reset()
                if reply.status >= 400:
                    error_body = (error_body + chunk)[:_MAX_ERROR_BODY]
                await response.write(chunk)
            self._note_reply(reply.status, error_body, is_generation)
            await response.write_eof()
        except EngineError as error:  # the reply was cut off, so cut off the agent's reply too
            self._note_failure(error, is_generation)
            if request.transport is not None:
                request.transport.abort()
        except OSError:  # the agent disconnected
            pass
        return response

    def _note_reply(self, status: int, error_body: bytes, is_generation: bool) -> None:
        """Record the status of a complete reply: an error, or a completed generation."""
        if status == 401:
            needs_key = EngineError(
                f"{_ENDPOINT} requires a key, which direct mode never sends; use observe mode with an endpoint whose key_env is set"
            )
            self._note_failure(needs_key, is_generation)
        elif status >= 400:
            text = error_body.decode("utf-8", "replace")
            self._note_failure(error_from_status(_ENDPOINT, status, extract_message(error_body), text), is_generation)
        elif is_generation:
            self.answered += 1
            self.last_error = None

    def _note_failure(self, error: TurngateError, is_generation: bool) -> None:
        if is_generation:
            self.engine_silence.reset()
            self.last_error = CallError(error.boundary, error.kind, error.message)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Listen for calls for the duration of the block, and yield the URL."""
        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self.handle)
        # If the agent disconnects, the call to the endpoint is cancelled too.
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        limit = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=_SILENCE_S)
        async with aiohttp.ClientSession(timeout=limit, cookie_jar=aiohttp.DummyCookieJar()) as self._http:
            await runner.setup()
            try:
                site = web.TCPSite(runner, "127.0.0.1", 0)
                await run_to_completion(site.start())  # cancelling the start midway would leak its socket
                host, port = runner.addresses[0][:2]
                yield f"http://{host}:{port}"
            finally:
                await runner.cleanup()


def _remove_session_key(query: str) -> str:
    """Remove the session's key from a query such as `alt=sse&key=none`. Gemini clients may send their key in the query."""
    return "&".join(field for field in query.split("&") if field != f"key={PLACEHOLDER}")


def _error_response(status: int, message: str) -> web.Response:
    return web.json_response(
        {"error": {"message": message, "type": "endpoint_error"}}, status=status, headers=_GATEWAY_HEADERS
    )


class DirectModeClient(GatewayClient):
    """Takes the place of a gateway client in direct mode. It records nothing, and passes the rollout's stages to `on_event`."""

    def __init__(self, url: str, forwarder: Forwarder, on_event: Callable[[str, dict[str, Json]], None]) -> None:
        super().__init__(url, PLACEHOLDER)
        self._forwarder = forwarder
        self._on_event = on_event

    async def open(self, config: dict[str, Json], session: str | None = None, traceparent: str = "") -> OpenedSession:
        return OpenedSession(session or PLACEHOLDER, PLACEHOLDER)

    async def show(self, session: str) -> SessionInfo:
        """Return a session with one turn per completed generation, so that an agent that failed before its first turn is recognized."""
        forwarder = self._forwarder
        return SessionInfo(
            id=session,
            key=0,
            status="open",
            stop="",
            opened=0.0,
            closed=None,
            config=SessionSettings(),
            outcome=None,
            turns=forwarder.answered,
            sampled_tokens=0,
            in_flight=0,
            last_error=forwarder.last_error,
            unheard_s=forwarder.engine_silence.seconds,
            last_used=0.0,
            tokens=0,
            roles={},
            forks=[],
        )

    async def seal(self, session: str, stop: str = "") -> SessionInfo:
        return await self.show(session)

    async def cancel(self, session: str) -> SessionInfo:
        return await self.show(session)

    async def samples(self, session: str, *, everything: bool = False, masks: bool = False) -> list[SampleRow]:
        return []

    async def tool_calls(self, session: str) -> list[ToolCallView]:
        return []

    async def announce(self, session: str, kind: str, data: dict[str, Json]) -> int:
        self._on_event(kind, data)
        return 0

    async def record(self, session: str, recorded: RecordedOutcome, *, replace: bool = False) -> str:
        return ""

    async def events(
        self, session: str = "", after: int = 0, *, wait: bool = True
    ) -> AsyncGenerator[GatewayEvent, None]:
        """Yield no events. If `wait` is set, wait until cancelled; otherwise, end at once."""
        if wait:
            await asyncio.Event().wait()
        nothing: tuple[GatewayEvent, ...] = ()
        for event in nothing:
            yield event
