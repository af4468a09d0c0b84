"""MCP over streamable HTTP: many clients, each with the key. Called by `turngate mcp --http`.

Before a request reaches the SDK it has to name a host that is ours (a page that had its own name point here cannot), come from no
foreign page, and carry the key.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from urllib.parse import urlsplit

import msgspec
import uvicorn
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from turngate.errors import ConfigError
from turngate.mcp.server import build_server
from turngate.server.bind import local_url
from turngate.service.rollouts import Rollouts

PATH = "/mcp"
KEY = "TURNGATE_MCP_KEY"
KEY_FILE = "mcp-key"
MAX_BYTES = 64 * 1024 * 1024  # of a request: files to upload are in it
_LOOPBACK = ("localhost", "127.0.0.1", "::1")

log = logging.getLogger("turngate")


class HttpSettings(msgspec.Struct, frozen=True):
    """Where to listen, who may come in, and under which names of ours."""

    host: str
    port: int
    key: str
    names: Sequence[str] = ()  # further names of this machine that clients use

    @classmethod
    def parse(cls, text: str, key: str, names: Sequence[str] = ()) -> HttpSettings:
        """Of HOST:PORT, :PORT or PORT."""
        host, _, port = text.rpartition(":")
        if not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"http: {text!r} is not HOST:PORT, such as 127.0.0.1:8710", param="http")
        return cls(host.strip("[]") or "127.0.0.1", int(port), key, names)


async def serve(rollouts: Rollouts, place: HttpSettings) -> None:
    """Until this is cancelled. Then whatever runs is aborted, the calls that wait for it are answered, and the door is closed."""
    with _listen(place) as listener:
        door = McpAccess(StreamableHTTPSessionManager(build_server(rollouts), max_request_body_size=MAX_BYTES), place)
        async with _run_server(door, listener), door.manager.run():
            try:
                async with rollouts:
                    door.open = True
                    log.warning("turngate serves MCP on %s%s", local_url(listener), PATH)
                    await asyncio.Event().wait()
            finally:
                door.open = False


class McpAccess:
    """The ASGI application: refuses, or hands on to the SDK."""

    def __init__(self, manager: StreamableHTTPSessionManager, place: HttpSettings) -> None:
        self.manager = manager
        self.open = False  # new calls are taken
        self._key = place.key.encode()
        # Nobody can make an address of ours the name of a page of theirs, so any address will do; names are ours or they are not.
        self._hosts = {*_LOOPBACK, place.host, socket.gethostname().lower(), *(name.lower() for name in place.names)}
        self._pages = {*_LOOPBACK, *(name.lower() for name in place.names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = self._refusal(scope["path"], Headers(scope=scope))
            await (self.manager.handle_request if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> Response | None:
        if path == "/health":
            return JSONResponse({"status": "ok" if self.open else "stopping"}, 200 if self.open else 503)
        if not self._is_ours(headers.get("host", "")):
            return _error_response(
                421, "Host: this is not a name of this server; start it with --allow-host for another one"
            )
        if (origin := headers.get("origin")) is not None and _parse_host(origin) not in self._pages:
            return _error_response(
                403, "Origin: pages of other sites may not call this server; --allow-host lets one in"
            )
        if path != PATH:
            return _error_response(404, f"there is only {PATH} here")
        if not self._may_enter(headers.get("authorization", "")):
            return _error_response(
                401,
                "the key is missing or wrong; send it as 'Authorization: Bearer …'",
                {"WWW-Authenticate": 'Bearer realm="turngate"'},
            )
        if not self.open:
            return _error_response(503, "the server is starting or being stopped; repeat this call in a moment")
        return None

    def _is_ours(self, host: str) -> bool:
        name = _parse_host(f"//{host}")
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._hosts
        return True

    def _may_enter(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        given = key.strip().encode("utf-8", "surrogatepass")
        return scheme.lower() == "bearer" and secrets.compare_digest(given, self._key)


def _parse_host(url: str) -> str:
    """Its host, without a port; empty where there is none to be read."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _error_response(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """In JSON-RPC's form, as clients expect it."""
    error = {"code": -32600, "message": message}
    return JSONResponse({"jsonrpc": "2.0", "id": None, "error": error}, status, headers)


# ── uvicorn ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Server(uvicorn.Server):
    """Leaves signals to the command line."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def _listen(place: HttpSettings) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((place.host, place.port))
            listener.listen(2048)
        except OSError as error:
            raise ConfigError(
                f"http: cannot listen on {place.host}:{place.port} ({error.strerror}); choose another place",
                param="http",
            ) from None
        yield listener


@asynccontextmanager
async def _run_server(door: McpAccess, listener: socket.socket) -> AsyncIterator[None]:
    server = _Server(
        uvicorn.Config(
            door,
            http="httptools",
            lifespan="off",
            access_log=False,
            log_level="warning",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
            server_header=False,
            proxy_headers=False,
        )
    )
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await task
