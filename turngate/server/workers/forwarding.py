"""Forward a request that reached the wrong worker to the worker that owns its session.

The front (the parent process, which accepts connections) assigns most connections to the right worker, based on their first request. It
cannot do so for later requests on a connection that serves several sessions, for requests that open sessions, or for requests whose secret
does not contain the session's slot, the number that determines the worker. A request that reached the wrong worker is forwarded over the
owner's private Unix socket, and the reply is streamed back. If the client disconnects, the forwarded request is cancelled too. A WebSocket
is forwarded frame by frame. A request that arrived over a private socket is not forwarded again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec
from starlette.requests import HTTPConnection, Request
from yarl import URL

from turngate.common.sharding import SESSION_PATH, Shard
from turngate.dialects import DIALECTS
from turngate.errors import Stopping, TooLarge, TurngateError
from turngate.server.app import Gateway
from turngate.server.asgi import (
    GATEWAY_HEADER,
    OVERSIZED_FRAME,
    UNDECODABLE_FRAME,
    App,
    ClientDisconnect,
    DisconnectWatch,
    Receive,
    Scope,
    Send,
    parse_headers,
    parse_query,
    send_or_give_up,
)
from turngate.server.decoding import MAX_BODY
from turngate.server.http import bearer_key
from turngate.server.model_calls import respond_error
from turngate.server.request_body import read_body
from turngate.server.routing import SESSION_PREFIX, DialectRoutes, client_host, dialect_of
from turngate.server.web.files import add_security_headers, is_page_path
from turngate.server.web.login import COOKIE
from turngate.server.websocket import refuse_upgrade

log = logging.getLogger("turngate")
T = TypeVar("T")
RESTART_WAIT_S = 30.0  # time to wait for a worker that is restarting
CLIENT_HEADER = b"x-turngate-client"  # carries the client's address to the owner; ignored outside private sockets
RUN_HEADER = b"x-turngate-run"  # carries a secret of this run, which identifies requests that workers make themselves
INTERNAL_PREFIX = "/worker/"  # for requests between workers; never served to clients or forwarded
_CONNECTION_HEADERS = {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"expect", b"date"} | {
    b"sec-websocket-key",
    b"sec-websocket-version",
    b"sec-websocket-extensions",
    b"sec-websocket-protocol",
}
_HANDSHAKE = (
    ("connection", "Upgrade"),
    ("upgrade", "websocket"),
    ("sec-websocket-version", "13"),
    ("sec-websocket-key", b64encode(bytes(16)).decode()),
)
_AUTO_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
# Requests whose body may name a session.
_ROUTED_BY_BODY = {
    ("POST", "/admin/sessions"),
    ("POST", "/admin/events"),
    ("POST", "/admin/attempts/supersede"),
    ("POST", "/sessions"),
}
SHARED_ROUTES = {  # served by worker 0 for all workers
    ("GET", "/admin/fence"),
    ("POST", "/admin/fence/pause"),
    ("POST", "/admin/fence/resume"),
    ("GET", "/admin/weights"),
    ("POST", "/admin/weights"),
    ("GET", "/admin/engines"),
    ("POST", "/admin/engines"),
    ("POST", "/admin/engines/drain"),
    ("POST", "/admin/engines/remove"),
}
METRICS_ROUTE = ("GET", "/metrics")


class SocketRefused(Exception):
    """The worker that owns the session refused a WebSocket with this response."""

    def __init__(self, status: int, headers: tuple[tuple[bytes, bytes], ...], body: bytes) -> None:
        super().__init__(f"the WebSocket was refused with status {status}")
        self.status, self.headers, self.body = status, headers, body


class PeerWorkers:
    """The other workers, reached over their private sockets."""

    def __init__(self, shard: Shard, folder: Path, run: str) -> None:
        self.shard = shard
        self.own_header = ((RUN_HEADER.decode(), run),)  # identifies requests that this worker makes itself
        self.others = [n for n in range(shard.workers) if n != shard.number]
        self._clients = {n: _unix_client(socket_path(folder, n)) for n in self.others}

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    @asynccontextmanager
    async def request(
        self, number: int, method: str, target: str, headers: Sequence[tuple[str, str]] = (), body: bytes | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request to another worker and yield its response. Wait if the worker is restarting."""
        response = await self._connect(number, method, URL(f"http://worker{target}", encoded=True), headers, body)
        try:
            yield response
        finally:
            if not response.content.at_eof():
                response.close()
            response.release()

    async def open_socket(
        self, number: int, target: str, headers: Sequence[tuple[str, str]]
    ) -> aiohttp.ClientWebSocketResponse:
        """Open a WebSocket to another worker. Wait if the worker is restarting. Raise `SocketRefused` if the worker refuses it."""
        url = URL(f"http://worker{target}", encoded=True)
        client = self._clients[number]
        try:
            return await self._wait_for_worker(
                lambda: client.ws_connect(url, headers=headers, max_msg_size=0, heartbeat=None)
            )
        except aiohttp.WSServerHandshakeError:
            # This error lacks the response's body, so the request is repeated without aiohttp's WebSocket client.
            async with self.request(number, "GET", target, [*headers, *_HANDSHAKE]) as response:
                if response.status == 101:
                    raise Stopping(
                        "this WebSocket was refused at first, but would now be accepted; retry the request"
                    ) from None
                raise SocketRefused(response.status, tuple(response.raw_headers), await response.read()) from None

    async def _connect(
        self, number: int, method: str, url: URL, headers: Sequence[tuple[str, str]], body: bytes | None
    ) -> aiohttp.ClientResponse:
        client = self._clients[number]
        return await self._wait_for_worker(
            lambda: client.request(method, url, headers=list(headers), data=body, allow_redirects=False)
        )

    async def _wait_for_worker(self, connect: Callable[[], Awaitable[T]]) -> T:
        """Connect to a worker, and wait for it if it is restarting.

        Raise `Stopping` if the worker does not start in time, or if it stops before it answers. A worker that refuses a WebSocket is
        running, so its error is raised unchanged.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + RESTART_WAIT_S
        while True:
            try:
                return await connect()
            except aiohttp.WSServerHandshakeError:
                raise
            except aiohttp.ClientConnectorError:
                if loop.time() > end:
                    raise Stopping(
                        "the worker for this request is not running; retry the request in a moment"
                    ) from None
                await asyncio.sleep(0.05)
            except (aiohttp.ClientError, OSError):
                raise Stopping(
                    "the connection to the worker for this request was lost; retry the request in a moment"
                ) from None


class ForwardingApp:
    """A worker's public application.

    It serves the worker's own sessions, and forwards requests for other sessions to the workers that own them. `shared` serves the routes
    that concern all workers.
    """

    def __init__(self, gateway: Gateway, peers: PeerWorkers, shared: App) -> None:
        self._gateway = gateway
        self._peers = peers
        self._shared = shared
        self._shard = peers.shard
        self._dialect_routes = DialectRoutes(DIALECTS)
        self._next = itertools.count(self._shard.number)
        self._max_body = int(gateway.config.max_body_mb * 1e6)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            project = self._gateway.choose(scope)
        except TurngateError:
            await self._gateway(scope, receive, send)  # responds with the error
            return
        if scope["type"] == "websocket":
            await self._serve_socket(scope, receive, send)
            return
        route = (scope["method"], scope["path"])
        if is_page_path(scope["path"]):
            send = add_security_headers(send)
        if scope["path"].startswith(INTERNAL_PREFIX):
            await self._gateway(scope, receive, send)  # responds with 404
        elif route in SHARED_ROUTES and (project is self._gateway or self._is_operator(scope)):
            await self._serve_at(0, scope, receive, send, local=self._shared)
        elif route == METRICS_ROUTE and project is self._gateway:
            await self._shared(scope, receive, send)
        elif route in _ROUTED_BY_BODY:
            await self._serve_by_body(scope, receive, send)
        else:
            await self._serve_at(self._owner(scope), scope, receive, send, local=self._gateway)

    def _is_operator(self, scope: Scope) -> bool:
        """Return whether the request has the admin key. Such a request may affect all projects, even if it names a single project."""
        return self._gateway.auth.is_admin(bearer_key(Request(scope)))

    def _owner(self, scope: Scope) -> int:
        """Return the number of the worker that owns the session in the request's path or key.

        If the request names no session, return this worker's number.
        """
        if named := SESSION_PATH.match(scope["path"].encode("utf-8", "surrogatepass")):
            return self._shard.owner(named[1].decode("utf-8", "surrogatepass"))
        match = self._dialect_routes.match(scope["path"])
        dialect = match.dialect if match is not None else dialect_of(HTTPConnection(scope))
        key = dialect.read_key(parse_headers(scope), parse_query(scope))
        session_id = self._gateway.choose(scope).sessions.find_id_by_secret(key) if key else None
        return self._shard.number if session_id is None else self._shard.owner(session_id)

    def _is_authorized(self, scope: Scope) -> bool:
        """Return whether the request has a valid key or, for the page, a valid login cookie, or needs no key (`Auth.trusts`).

        The worker that serves the request checks whether the key grants access.
        """
        project = self._gateway.choose(scope)
        if is_page_path(scope["path"]):
            return project.page.login.expiry_of(Request(scope).cookies.get(COOKIE, "")) is not None
        match = self._dialect_routes.match(SESSION_PREFIX.sub("", scope["path"]))
        dialect = match.dialect if match is not None else dialect_of(HTTPConnection(scope))
        key = dialect.read_key(parse_headers(scope), parse_query(scope))
        auth = project.auth
        if auth.is_admin(key) or auth.trusts(scope) or auth.find_key(key) is not None:
            return True
        return bool(key) and project.sessions.find_id_by_secret(key) is not None

    async def _serve_by_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request whose body may name a session. Requests that name none are distributed to the workers in turn."""
        try:
            body = await read_body(receive, parse_headers(scope), MAX_BODY)
        except TooLarge:
            error = TooLarge(f"the request body is larger than the limit of {MAX_BODY} bytes")
            await respond_error(send, dialect_of(Request(scope)), error)
            return
        except ClientDisconnect:
            return
        try:
            ids = msgspec.json.decode(body or b"{}", type=_SessionIds)
            session_id = ids.id or ids.session or ids.session_id
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            session_id = None  # the gateway responds with the error
        number = self._shard.owner(session_id) if session_id is not None else next(self._next) % self._shard.workers
        await self._serve_at(number, scope, _replay_body(body, receive), send, local=self._gateway)

    async def _serve_at(self, number: int, scope: Scope, receive: Receive, send: Send, *, local: App) -> None:
        """Serve a request with `local` if `number` is this worker's. Otherwise, forward the request to the worker with that number."""
        if number == self._shard.number:
            await local(scope, receive, send)
            return
        if not self._is_authorized(scope):  # reject the request before reading a long body
            await self._gateway(scope, receive, send)
            return
        try:
            try:
                body = await read_body(receive, parse_headers(scope), self._max_body)
                extra: tuple[tuple[str, str], ...] = ()
            except TooLarge:  # send only the size, so that the owner refuses and counts the call
                body, extra = b"", (("content-length", str(self._max_body + 1)), ("connection", "close"))
            with DisconnectWatch(receive) as watch:
                try:
                    await self._forward(number, scope, body, send, extra)
                except asyncio.CancelledError:
                    if not watch.disconnected:
                        raise
                    watch.uncancel()
        except TurngateError as error:
            await respond_error(send, dialect_of(Request(scope)), error)
        except ClientDisconnect:
            return

    async def _serve_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a WebSocket, or forward it to the worker that owns its session."""
        number = self._owner(scope)
        match = self._dialect_routes.match(SESSION_PREFIX.sub("", scope["path"]))
        is_refused = match is None or not match.socket or not self._is_authorized(scope)
        if number == self._shard.number or is_refused:
            await self._gateway(scope, receive, send)
            return
        target, headers = _build_request(scope)
        try:
            owner = await self._peers.open_socket(number, target, headers)
        except TurngateError as error:
            await refuse_upgrade(send, dialect_of(HTTPConnection(scope)), error)
            return
        except SocketRefused as refusal:
            fields = [(n.lower(), v) for n, v in refusal.headers if n.lower() not in _CONNECTION_HEADERS]
            await send({"type": "websocket.http.response.start", "status": refusal.status, "headers": fields})
            await send({"type": "websocket.http.response.body", "body": refusal.body})
            return
        async with owner:
            await receive()  # the request to connect
            await send({"type": "websocket.accept", "headers": [GATEWAY_HEADER]})
            await forward_frames(owner, receive, send)

    async def _forward(
        self, number: int, scope: Scope, body: bytes, send: Send, extra: Sequence[tuple[str, str]] = ()
    ) -> None:
        target, headers = _build_request(scope)
        content = body if body or (scope["method"] == "POST" and not extra) else None
        async with self._peers.request(number, scope["method"], target, [*headers, *extra], content) as response:
            fields = [(n.lower(), v) for n, v in response.raw_headers if n.lower() not in _CONNECTION_HEADERS]
            await send({"type": "http.response.start", "status": response.status, "headers": fields})
            try:
                async for part in response.content.iter_any():
                    await send_or_give_up(send, {"type": "http.response.body", "body": part, "more_body": True})
            except (aiohttp.ClientError, OSError):
                log.warning("the connection to worker %d was lost in the middle of a reply", number)
                return  # the truncated reply signals the failure to the client
            await send_or_give_up(send, {"type": "http.response.body", "body": b""})


async def forward_frames(owner: aiohttp.ClientWebSocketResponse, receive: Receive, send: Send) -> None:
    """Forward frames in both directions until one end closes the connection."""
    rejected: int | None = None  # the disconnect code, if the server rejected a frame

    async def forward_events() -> None:
        nonlocal rejected
        while (message := await receive())["type"] != "websocket.disconnect":
            await owner.send_str(message.get("text") or (message.get("bytes") or b"").decode("utf-8", "replace"))
        rejected = message["code"] if message.get("code") in (OVERSIZED_FRAME, UNDECODABLE_FRAME) else None

    async def forward_replies() -> None:
        async for frame in owner:
            if frame.type is aiohttp.WSMsgType.TEXT:
                await send_or_give_up(send, {"type": "websocket.send", "text": frame.data})

    directions = [asyncio.ensure_future(forward_events()), asyncio.ensure_future(forward_replies())]
    try:
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in directions:
            task.cancel()
        await asyncio.gather(*directions, return_exceptions=True)
    if not directions[0].done() or directions[0].cancelled():  # the owner closed the connection
        with suppress(OSError, RuntimeError):
            await send({"type": "websocket.close", "code": owner.close_code or 1012})
    if rejected is not None:
        await owner.close(code=rejected)  # the owner records the refused call


def _build_request(scope: Scope) -> tuple[str, list[tuple[str, str]]]:
    """Return the target and the headers with which a request is forwarded to another worker."""
    query = scope["query_string"]
    target = (scope["raw_path"] + (b"?" + query if query else b"")).decode("latin-1")
    headers = [
        (name.decode("latin-1"), _decode_header(value))
        for name, value in scope["headers"]
        if name not in _CONNECTION_HEADERS and name not in (b"content-length", CLIENT_HEADER, RUN_HEADER)
    ]
    headers.append((CLIENT_HEADER.decode(), client_host(scope)))
    return target, headers


class _SessionIds(msgspec.Struct):
    id: str | None = None
    session: str | None = None
    session_id: str | None = None


def restore_client(app: App) -> App:
    """Wrap the application on the private socket so that it sees the client's address, which the forwarding worker sends in a header."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        for name, value in scope.get("headers", ()):
            if name == CLIENT_HEADER:
                scope["client"] = (value.decode("latin-1"), 0)
        scope["headers"] = [(name, value) for name, value in scope.get("headers", ()) if name != CLIENT_HEADER]
        await app(scope, receive, send)

    return serve


def socket_path(folder: Path, number: int) -> str:
    return str(folder / f"{number}")


def _unix_client(path: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(path, limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        skip_auto_headers=_AUTO_HEADERS,
        cookie_jar=aiohttp.DummyCookieJar(),
        max_line_size=64 * 1024,
        max_field_size=64 * 1024,
    )


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` function that first replays a body that has already been read."""
    pending: list[bytes] = [body]

    async def replay() -> dict[str, object]:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return dict(await receive())

    return replay


def _decode_header(value: bytes) -> str:
    """Decode a header value. If it is valid UTF-8, aiohttp sends the same bytes. Otherwise, it is read as Latin-1 and sent as UTF-8."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value.decode("latin-1")
