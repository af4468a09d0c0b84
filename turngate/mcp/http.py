"""MCP over streamable HTTP, for many clients (`turngate mcp --http`).

A request reaches the SDK only if all of these hold:

- The Host header is an IP address or names this server. This prevents DNS rebinding.
- The Origin header is absent or allowed.
- The request carries the key.
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
MAX_BYTES = 64 * 1024 * 1024  # maximum size of a request, which may contain files
_LOOPBACK = ("localhost", "127.0.0.1", "::1")

log = logging.getLogger("turngate")


class HttpSettings(msgspec.Struct, frozen=True):
    """The address to listen on, the key that clients must send, and additional host names of this server."""

    host: str
    port: int
    key: str
    names: Sequence[str] = ()  # additional host names that clients may use

    @classmethod
    def parse(cls, text: str, key: str, names: Sequence[str] = ()) -> HttpSettings:
        """Parse HOST:PORT, :PORT or PORT."""
        host, _, port = text.rpartition(":")
        if not port.isdecimal() or int(port) > 65535:
            raise ConfigError(
                f"http must be HOST:PORT, with a port from 0 to 65535, such as 127.0.0.1:8710, not {text!r}",
                param="http",
            )
        return cls(host.strip("[]") or "127.0.0.1", int(port), key, names)


async def serve(rollouts: Rollouts, settings: HttpSettings) -> None:
    """Serve until cancelled. Then abort all rollouts, answer the calls that are waiting for them, and stop listening."""
    with _listen(settings) as listener:
        access = McpAccess(
            StreamableHTTPSessionManager(build_server(rollouts), max_request_body_size=MAX_BYTES), settings
        )
        async with _run_server(access, listener), access.manager.run():
            try:
                async with rollouts:
                    access.is_open = True
                    log.warning("turngate serves MCP on %s%s", local_url(listener), PATH)
                    await asyncio.Event().wait()
            finally:
                access.is_open = False


class McpAccess:
    """An ASGI application that checks each request and forwards the allowed ones to the SDK."""

    def __init__(self, manager: StreamableHTTPSessionManager, settings: HttpSettings) -> None:
        self.manager = manager
        self.is_open = False  # whether new calls are accepted
        self._key = settings.key.encode()
        # IP addresses are always allowed, because DNS rebinding works only with host names.
        self._hosts = {
            *_LOOPBACK,
            settings.host,
            socket.gethostname().lower(),
            *(name.lower() for name in settings.names),
        }
        self._pages = {*_LOOPBACK, *(name.lower() for name in settings.names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = self._refusal(scope["path"], Headers(scope=scope))
            await (self.manager.handle_request if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> Response | None:
        if path == "/health":
            return JSONResponse(
                {"status": "ok" if self.is_open else "starting or stopping"}, 200 if self.is_open else 503
            )
        if not self._is_own_host(headers.get("host", "")):
            return _error_response(
                421,
                "the Host header does not name this server; to accept this host name, start the server with --allow-host NAME",
            )
        if (origin := headers.get("origin")) is not None and _parse_host(origin) not in self._pages:
            return _error_response(
                403,
                "the site in the Origin header may not call this server; to allow it, start the server with --allow-host NAME",
            )
        if path != PATH:
            return _error_response(404, f"path not found; this server serves MCP at {PATH}")
        if not self._has_key(headers.get("authorization", "")):
            return _error_response(
                401,
                "the key is missing or wrong; send it as 'Authorization: Bearer …'",
                {"WWW-Authenticate": 'Bearer realm="turngate"'},
            )
        if not self.is_open:
            return _error_response(503, "the server is starting or stopping; retry in a moment")
        return None

    def _is_own_host(self, host: str) -> bool:
        name = _parse_host(f"//{host}")
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._hosts
        return True

    def _has_key(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        given = key.strip().encode("utf-8", "surrogatepass")
        return scheme.lower() == "bearer" and secrets.compare_digest(given, self._key)


def _parse_host(url: str) -> str:
    """Return the host of a URL without its port, or an empty string if it has none or is invalid."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _error_response(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """Build a JSON-RPC error response."""
    error = {"code": -32600, "message": message}
    return JSONResponse({"jsonrpc": "2.0", "id": None, "error": error}, status, headers)


# ── uvicorn ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Server(uvicorn.Server):
    """A uvicorn server without signal handlers, because the command line handles signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def _listen(settings: HttpSettings) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
            listener.listen(2048)
        except OSError as error:
            raise ConfigError(
                f"http: cannot listen on {settings.host}:{settings.port} ({error.strerror}); choose a different address",
                param="http",
            ) from None
        yield listener


@asynccontextmanager
async def _run_server(access: McpAccess, listener: socket.socket) -> AsyncIterator[None]:
    server = _Server(
        uvicorn.Config(
            access,
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
