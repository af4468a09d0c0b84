"""The way in of one of several workers: a request for a session that another worker has is passed on to that one.

Most connections arrive where they belong, since the front looks at their first request. What is left are connections that speak
for several sessions, secrets without a slot, and whoever opens sessions. Such a request goes, as it came, over the owner's
private Unix socket; the reply streams back as it comes, and a caller that hangs up is gone for the owner too. What arrived
over a private socket is never passed on again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
from starlette.requests import Request
from yarl import URL

from turngate.common.sharding import SESSION_PATH, Shard
from turngate.dialects import DIALECTS
from turngate.errors import Stopping, TooLarge, TurngateError
from turngate.server.app import Gateway
from turngate.server.asgi import (
    App,
    ClientDisconnected,
    DisconnectWatch,
    Receive,
    Scope,
    Send,
    parse_headers,
    parse_query,
    read_body,
    send_or_give_up,
)
from turngate.server.http import MAX_BODY
from turngate.server.model_calls import respond_error
from turngate.server.routing import SESSION_PREFIX, DialectRoutes, client_host, dialect_of
from turngate.server.web.files import add_security_headers, is_page_path
from turngate.server.web.login import COOKIE

log = logging.getLogger("turngate")
RESTART_WAIT_S = 30.0  # how long a worker that is being started again is waited for
CLIENT_HEADER = b"x-turngate-client"  # who calls, told to the owner; means nothing outside a private socket
RUN_HEADER = (
    b"x-turngate-run"  # a number that only the workers of this run know: by it they know each other's own requests
)
INTERNAL_PREFIX = "/worker/"  # what workers ask of each other; nobody else's request is ever served there, or passed on
_CONNECTION_HEADERS = {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"expect", b"date"}
_AUTO_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
# That name a session in their body, or none.
_ROUTED_BY_BODY = {("POST", "/admin/sessions"), ("POST", "/admin/events"), ("POST", "/sessions")}
FENCE_ROUTES = {
    ("GET", "/admin/fence"),
    ("POST", "/admin/fence/pause"),
    ("POST", "/admin/fence/resume"),
    ("GET", "/admin/weights"),
    ("POST", "/admin/weights"),
}
METRICS_ROUTE = ("GET", "/metrics")


class PeerWorkers:
    """The other workers, reached over their private sockets."""

    def __init__(self, shard: Shard, folder: Path, run: str) -> None:
        self.shard = shard
        self.own = ((RUN_HEADER.decode(), run),)  # the header of our own requests
        self.others = [n for n in range(shard.workers) if n != shard.number]
        self._clients = {n: _unix_client(socket_path(folder, n)) for n in self.others}

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    @asynccontextmanager
    async def ask(
        self, number: int, method: str, target: str, headers: Sequence[tuple[str, str]] = (), body: bytes | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Another worker's reply. One that is just being started again is waited for."""
        response = await self._begun(number, method, URL(f"http://worker{target}", encoded=True), headers, body)
        try:
            yield response
        finally:
            if not response.content.at_eof():
                response.close()
            response.release()

    async def _begun(
        self, number: int, method: str, url: URL, headers: Sequence[tuple[str, str]], body: bytes | None
    ) -> aiohttp.ClientResponse:
        loop = asyncio.get_running_loop()
        end = loop.time() + RESTART_WAIT_S
        while True:
            try:
                return await self._clients[number].request(
                    method, url, headers=list(headers), data=body, allow_redirects=False
                )
            except aiohttp.ClientConnectorError:
                if loop.time() > end:
                    raise Stopping("the worker that has this is not there; repeat the call in a moment") from None
                await asyncio.sleep(0.05)
            except (aiohttp.ClientError, OSError):
                raise Stopping("the worker that has this was stopped; repeat the call in a moment") from None


class ForwardingApp:
    """What a worker serves to the world. `together`: what concerns all workers, and is served by this one."""

    def __init__(self, gateway: Gateway, siblings: PeerWorkers, together: App) -> None:
        self._gateway = gateway
        self._siblings = siblings
        self._together = together
        self._shard = siblings.shard
        self._paths = DialectRoutes(DIALECTS)
        self._next = itertools.count(self._shard.number)
        self._max_body = int(gateway.config.max_body_mb * 1e6)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._gateway(scope, receive, send)
            return
        asked = (scope["method"], scope["path"])
        if is_page_path(scope["path"]):
            send = add_security_headers(send)
        if scope["path"].startswith(INTERNAL_PREFIX):
            await self._gateway(scope, receive, send)  # which has nothing of the kind
        elif asked in FENCE_ROUTES:
            await self._at(0, scope, receive, send, here=self._together)
        elif asked == METRICS_ROUTE:  # whoever is asked asks the others
            await self._together(scope, receive, send)
        elif asked in _ROUTED_BY_BODY:
            await self._by_body(scope, receive, send)
        else:
            await self._at(self._owner(scope), scope, receive, send, here=self._gateway)

    def _owner(self, scope: Scope) -> int:
        """By the path, else by the key. Whoever speaks for no session is served here."""
        if named := SESSION_PATH.match(scope["path"].encode("utf-8", "surrogatepass")):
            return self._shard.owner(named[1].decode("utf-8", "surrogatepass"))
        found = self._paths.match(scope["path"])
        dialect = found.dialect if found is not None else dialect_of(Request(scope))
        key = dialect.read_key(parse_headers(scope), parse_query(scope))
        session_id = self._gateway.sessions.find_id_by_secret(key) if key else None
        return self._shard.number if session_id is None else self._shard.owner(session_id)

    def _may(self, scope: Scope) -> bool:
        """Whether somebody with this key may ask for anything at all, or with this cookie for what the page asks."""
        if is_page_path(scope["path"]):
            return self._gateway.page.login.expiry_of(Request(scope).cookies.get(COOKIE, "")) is not None
        found = self._paths.match(SESSION_PREFIX.sub("", scope["path"]))
        dialect = found.dialect if found is not None else dialect_of(Request(scope))
        key = dialect.read_key(parse_headers(scope), parse_query(scope))
        auth = self._gateway.auth
        if auth.is_admin(key) or auth.trusts(key, client_host(scope)):
            return True
        return bool(key) and self._gateway.sessions.find_id_by_secret(key) is not None

    async def _by_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A session that is given no id goes to each worker in turn; one with an id to whom it belongs, so that none has it twice."""
        try:
            body = await read_body(receive, parse_headers(scope), MAX_BODY)
        except TooLarge:
            wrong = TooLarge(f"the request has more than {MAX_BODY} bytes, which is the limit here")
            await respond_error(send, dialect_of(Request(scope)), wrong)
            return
        except ClientDisconnected:
            return
        try:
            named = msgspec.json.decode(body or b"{}", type=_SessionIds)
            wanted = named.id or named.session or named.session_id
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            wanted = None  # whoever serves it says what is wrong
        number = self._shard.owner(wanted) if wanted is not None else next(self._next) % self._shard.workers
        await self._at(number, scope, _replay_body(body, receive), send, here=self._gateway)

    async def _at(self, number: int, scope: Scope, receive: Receive, send: Send, *, here: App) -> None:
        if number == self._shard.number:
            await here(scope, receive, send)
            return
        if not self._may(scope):  # is told so here, before a long body is read for nothing
            await self._gateway(scope, receive, send)
            return
        try:
            body = await read_body(receive, parse_headers(scope), self._max_body)
            with DisconnectWatch(receive) as watch:
                try:
                    await self._relay(number, scope, body, send)
                except asyncio.CancelledError:
                    if not watch.gone:
                        raise
                    task = asyncio.current_task()
                    assert task is not None
                    task.uncancel()
        except TurngateError as error:
            await respond_error(send, dialect_of(Request(scope)), error)
        except ClientDisconnected:
            return

    async def _relay(self, number: int, scope: Scope, body: bytes, send: Send) -> None:
        query = scope["query_string"]
        target = (scope["raw_path"] + (b"?" + query if query else b"")).decode("latin-1")
        headers = [
            (name.decode("latin-1"), _decode_header(value))
            for name, value in scope["headers"]
            if name not in _CONNECTION_HEADERS and name not in (b"content-length", CLIENT_HEADER, RUN_HEADER)
        ]
        headers.append((CLIENT_HEADER.decode(), client_host(scope)))
        sent = body if body or scope["method"] == "POST" else None
        async with self._siblings.ask(number, scope["method"], target, headers, sent) as response:
            kept = [(n.lower(), v) for n, v in response.raw_headers if n.lower() not in _CONNECTION_HEADERS]
            await send({"type": "http.response.start", "status": response.status, "headers": kept})
            try:
                async for part in response.content.iter_any():
                    await send_or_give_up(send, {"type": "http.response.body", "body": part, "more_body": True})
            except (aiohttp.ClientError, OSError):
                log.warning("worker %d ended in the middle of a reply, which is broken off", number)
                return  # an unfinished reply is how the caller learns of it
            await send_or_give_up(send, {"type": "http.response.body", "body": b""})


class _SessionIds(msgspec.Struct):
    id: str | None = None
    session: str | None = None
    session_id: str | None = None


def restore_client(app: App) -> App:
    """What a worker serves to its siblings: as if the caller had come here."""

    async def told(scope: Scope, receive: Receive, send: Send) -> None:
        for name, value in scope.get("headers", ()):
            if name == CLIENT_HEADER:
                scope["client"] = (value.decode("latin-1"), 0)
        scope["headers"] = [(name, value) for name, value in scope.get("headers", ()) if name != CLIENT_HEADER]
        await app(scope, receive, send)

    return told


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
    """For a request whose body was read already."""
    first: list[bytes] = [body]

    async def replayed() -> dict[str, object]:
        if first:
            return {"type": "http.request", "body": first.pop(), "more_body": False}
        return dict(await receive())

    return replayed


def _decode_header(value: bytes) -> str:
    """As aiohttp will encode it again."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value.decode("latin-1")
