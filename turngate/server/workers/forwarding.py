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
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
from starlette.requests import Request
from yarl import URL

from turngate.common.sharding import NAMED, Place
from turngate.dialects import DIALECTS
from turngate.errors import Stopping, TooLarge, TurngateError
from turngate.server.app import Gateway, speaks
from turngate.server.asgi import App, HungUp, Receive, Scope, Send, Watch, headers_of, query_of, read_body, taken
from turngate.server.http import MAX_BODY
from turngate.server.model_calls import Paths, client_of, respond_error
from turngate.server.web.files import is_page, shielded
from turngate.server.web.login import COOKIE

log = logging.getLogger("turngate")
RETURN_S = 30.0  # how long a worker that is being started again is waited for
CLIENT = b"x-turngate-client"  # who calls, told to the owner; means nothing outside a private socket
RUN = b"x-turngate-run"  # a number that only the workers of this run know: by it they know each other's own requests
OWN = "/worker/"  # what workers ask of each other; nobody else's request is ever served there, or passed on
_OF_A_CONNECTION = {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"expect", b"date"}
_AUTOMATIC = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
# That name a session in their body, or none.
_BY_BODY = {("POST", "/admin/sessions"), ("POST", "/admin/events"), ("POST", "/sessions")}
_AREA = re.compile(r"^/(s|rollout|v1/rollouts)/[^/]+")
FENCE = {
    ("GET", "/admin/fence"),
    ("POST", "/admin/fence/pause"),
    ("POST", "/admin/fence/resume"),
    ("GET", "/admin/weights"),
    ("POST", "/admin/weights"),
}
METRICS = ("GET", "/metrics")


class Siblings:
    """The other workers, reached over their private sockets."""

    def __init__(self, place: Place, folder: Path, run: str) -> None:
        self.place = place
        self.own = ((RUN.decode(), run),)  # the header of our own requests
        self.others = [n for n in range(place.workers) if n != place.number]
        self._clients = {n: _client(socket_of(folder, n)) for n in self.others}

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
        end = loop.time() + RETURN_S
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


class Doors:
    """What a worker serves to the world. `together`: what concerns all workers, and is served by this one."""

    def __init__(self, gateway: Gateway, siblings: Siblings, together: App) -> None:
        self._gateway = gateway
        self._siblings = siblings
        self._together = together
        self._place = siblings.place
        self._paths = Paths(DIALECTS)
        self._next = itertools.count(self._place.number)
        self._max_body = int(gateway.config.max_body_mb * 1e6)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._gateway(scope, receive, send)
            return
        asked = (scope["method"], scope["path"])
        if is_page(scope["path"]):
            send = shielded(send)
        if scope["path"].startswith(OWN):
            await self._gateway(scope, receive, send)  # which has nothing of the kind
        elif asked in FENCE:
            await self._at(0, scope, receive, send, here=self._together)
        elif asked == METRICS:  # whoever is asked asks the others
            await self._together(scope, receive, send)
        elif asked in _BY_BODY:
            await self._by_body(scope, receive, send)
        else:
            await self._at(self._owner(scope), scope, receive, send, here=self._gateway)

    def _owner(self, scope: Scope) -> int:
        """By the path, else by the key. Whoever speaks for no session is served here."""
        if named := NAMED.match(scope["path"].encode("utf-8", "surrogatepass")):
            return self._place.owner(named[1].decode("utf-8", "surrogatepass"))
        found = self._paths.find(scope["path"])
        dialect = found.dialect if found is not None else speaks(Request(scope))
        key = dialect.key(headers_of(scope), query_of(scope))
        session_id = self._gateway.control.id_of_secret(key) if key else None
        return self._place.number if session_id is None else self._place.owner(session_id)

    def _may(self, scope: Scope) -> bool:
        """Whether somebody with this key may ask for anything at all, or with this cookie for what the page asks."""
        if is_page(scope["path"]):
            return self._gateway.page.login.opens(Request(scope).cookies.get(COOKIE, "")) is not None
        found = self._paths.find(_AREA.sub("", scope["path"]))
        dialect = found.dialect if found is not None else speaks(Request(scope))
        key = dialect.key(headers_of(scope), query_of(scope))
        auth = self._gateway.auth
        if auth.is_admin(key) or auth.trusts(key, client_of(scope)):
            return True
        return bool(key) and self._gateway.control.id_of_secret(key) is not None

    async def _by_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A session that is given no id goes to each worker in turn; one with an id to whom it belongs, so that none has it twice."""
        try:
            body = await read_body(receive, headers_of(scope), MAX_BODY)
        except TooLarge:
            wrong = TooLarge(f"the request has more than {MAX_BODY} bytes, which is the limit here")
            await respond_error(send, speaks(Request(scope)), wrong)
            return
        except HungUp:
            return
        try:
            named = msgspec.json.decode(body or b"{}", type=_Named)
            wanted = named.id or named.session or named.session_id
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            wanted = None  # whoever serves it says what is wrong
        number = self._place.owner(wanted) if wanted is not None else next(self._next) % self._place.workers
        await self._at(number, scope, _again(body, receive), send, here=self._gateway)

    async def _at(self, number: int, scope: Scope, receive: Receive, send: Send, *, here: App) -> None:
        if number == self._place.number:
            await here(scope, receive, send)
            return
        if not self._may(scope):  # is told so here, before a long body is read for nothing
            await self._gateway(scope, receive, send)
            return
        try:
            body = await read_body(receive, headers_of(scope), self._max_body)
            with Watch(receive) as watch:
                try:
                    await self._relay(number, scope, body, send)
                except asyncio.CancelledError:
                    if not watch.gone:
                        raise
                    task = asyncio.current_task()
                    assert task is not None
                    task.uncancel()
        except TurngateError as error:
            await respond_error(send, speaks(Request(scope)), error)
        except HungUp:
            return

    async def _relay(self, number: int, scope: Scope, body: bytes, send: Send) -> None:
        query = scope["query_string"]
        target = (scope["raw_path"] + (b"?" + query if query else b"")).decode("latin-1")
        headers = [
            (name.decode("latin-1"), _text(value))
            for name, value in scope["headers"]
            if name not in _OF_A_CONNECTION and name not in (b"content-length", CLIENT, RUN)
        ]
        headers.append((CLIENT.decode(), client_of(scope)))
        sent = body if body or scope["method"] == "POST" else None
        async with self._siblings.ask(number, scope["method"], target, headers, sent) as response:
            kept = [(n.lower(), v) for n, v in response.raw_headers if n.lower() not in _OF_A_CONNECTION]
            await send({"type": "http.response.start", "status": response.status, "headers": kept})
            try:
                async for part in response.content.iter_any():
                    await taken(send, {"type": "http.response.body", "body": part, "more_body": True})
            except (aiohttp.ClientError, OSError):
                log.warning("worker %d ended in the middle of a reply, which is broken off", number)
                return  # an unfinished reply is how the caller learns of it
            await taken(send, {"type": "http.response.body", "body": b""})


class _Named(msgspec.Struct):
    id: str | None = None
    session: str | None = None
    session_id: str | None = None


def private(app: App) -> App:
    """What a worker serves to its siblings: as if the caller had come here."""

    async def told(scope: Scope, receive: Receive, send: Send) -> None:
        for name, value in scope.get("headers", ()):
            if name == CLIENT:
                scope["client"] = (value.decode("latin-1"), 0)
        scope["headers"] = [(name, value) for name, value in scope.get("headers", ()) if name != CLIENT]
        await app(scope, receive, send)

    return told


def socket_of(folder: Path, number: int) -> str:
    return str(folder / f"{number}")


def _client(path: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(path, limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        skip_auto_headers=_AUTOMATIC,
        cookie_jar=aiohttp.DummyCookieJar(),
        max_line_size=64 * 1024,
        max_field_size=64 * 1024,
    )


def _again(body: bytes, receive: Receive) -> Receive:
    """For a request whose body was read already."""
    first: list[bytes] = [body]

    async def replayed() -> dict[str, object]:
        if first:
            return {"type": "http.request", "body": first.pop(), "more_body": False}
        return dict(await receive())

    return replayed


def _text(value: bytes) -> str:
    """As aiohttp will encode it again."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value.decode("latin-1")
