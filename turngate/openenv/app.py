"""The OpenEnv server: OpenEnv's own application with our environment, and one rollout service for all sessions.

    python -m turngate.openenv --service service.toml        # or set TURNGATE_SERVICE to the file
    uvicorn turngate.openenv.app:create --factory

Endpoint keys are read from the environment variables that the service's settings name. If `TURNGATE_OPENENV_KEY` is set, callers must send
that key, except to `/health`.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI
from fastapi.exception_handlers import http_exception_handler
from fastapi.exceptions import RequestValidationError
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.env_server.types import ConcurrencyConfig
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from turngate.common.addresses import is_loopback
from turngate.errors import ConfigError, TurngateError
from turngate.openenv.environment import NAME, TurngateEnvironment, build_mcp_server
from turngate.openenv.models import ReadyObservation, TurngateObservation, TurngateState
from turngate.openenv.service_host import ServiceHost
from turngate.server.bind import local_url
from turngate.service.config import load_config
from turngate.service.rollouts import Rollouts

SERVICE = "TURNGATE_SERVICE"
KEY = "TURNGATE_OPENENV_KEY"
SESSIONS = "MAX_CONCURRENT_ENVS"  # OpenEnv's name
_GRACE_S = 5  # how long calls in flight may take at shutdown, before rollouts are aborted
MAX_BYTES = 128 * 1024 * 1024  # maximum size of a message or a request body, which may contain files

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def create(service: Path | None = None) -> FastAPI:
    """Build the application. Raise `ConfigError` if the settings are invalid. The rollout service starts when the application starts."""
    file = service or (Path(os.environ[SERVICE]) if os.environ.get(SERVICE) else None)
    config = load_config(file)
    host = ServiceHost(lambda: Rollouts(config))
    app: FastAPI = create_app(
        functools.partial(TurngateEnvironment, host, build_mcp_server(host)),
        CallToolAction,
        TurngateObservation,
        env_name=NAME,
        concurrency_config=ConcurrencyConfig(
            max_concurrent_envs=_max_sessions(),
            # Ends sessions at /mcp that are never closed. One call may take as long as a rollout.
            session_timeout=2 * config.most_agent_timeout_s + config.setup_timeout_s + config.test_timeout_s,
        ),
        state_cls=TurngateState,
        reset_observation_cls=ReadyObservation,
    )
    app.state.service = host
    app.router.on_startup.append(functools.partial(asyncio.to_thread, host.start))
    app.router.on_shutdown.append(functools.partial(asyncio.to_thread, host.stop))
    app.add_exception_handler(TurngateError, _render_error)
    app.add_exception_handler(RequestValidationError, _render_validation_error)
    app.add_exception_handler(HTTPException, _render_http_error)
    app.add_middleware(OpenEnvAccess, key=os.environ.get(KEY, "").strip())
    return app


async def _render_error(request: Request, error: Exception) -> JSONResponse:
    """Render an error of an HTTP request such as `POST /reset`. OpenEnv's server handles WebSocket and tool errors itself."""
    assert isinstance(error, TurngateError)
    return JSONResponse({"detail": error.message, "param": error.param}, error.status)


async def _render_validation_error(request: Request, error: Exception) -> JSONResponse:
    """Render a validation error without FastAPI's copy of the input. The input may be long, or contain NaN, which is not valid JSON."""
    assert isinstance(error, RequestValidationError)
    return JSONResponse({"detail": _strip_input(error.errors())}, 422)


async def _render_http_error(request: Request, error: Exception) -> Response:
    """Render an HTTP error. If OpenEnv rejected an action, omit the copy of that action from the error."""
    assert isinstance(error, HTTPException)
    if isinstance(error.detail, list):
        return JSONResponse({"detail": _strip_input(error.detail)}, error.status_code)
    return await http_exception_handler(request, error)


def _strip_input(errors: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in error.items() if name in ("type", "loc", "msg")} for error in errors]


def serve(make: Callable[[], FastAPI] | None = None, argv: Sequence[str] | None = None) -> None:
    """Run the command-line program. `make` builds the application; None means `create`."""
    parser = argparse.ArgumentParser(
        prog="python -m turngate.openenv", description="Serve Turngate as an OpenEnv environment."
    )
    parser.add_argument("--service", type=Path, help=f"TOML file with the service's settings (default: ${SERVICE})")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: 8000)")
    parser.add_argument(
        "--open", action="store_true", help=f"accept connections from other machines even if ${KEY} is not set"
    )
    options = parser.parse_args(argv)
    try:
        _check_exposure(options.host, options.open)
        with _listen(options.host, options.port) as listener:
            app = make() if make else create(options.service)
            service: ServiceHost = app.state.service
            service.start()
            try:
                print(
                    f"Turngate is serving an OpenEnv environment at {local_url(listener)}", file=sys.stderr, flush=True
                )
                config = uvicorn.Config(
                    app,
                    log_level="warning",
                    timeout_graceful_shutdown=_GRACE_S,
                    timeout_keep_alive=75,  # longer than clients keep idle connections
                    ws_max_size=MAX_BYTES,
                )
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, _ignore_signal)
                uvicorn.Server(config).run(sockets=[listener])
            finally:
                service.stop()
    except TurngateError as error:
        sys.exit(f"error: {error.message}")


def _ignore_signal(number: int, frame: object) -> None:
    """Do nothing. uvicorn shuts down on a signal and then raises it again for the previous handler, which is this one."""


@contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(2048)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot listen on {host}:{port} ({error}); choose a different --host or --port", param="port"
            ) from None
        yield listener


def _max_sessions() -> int:
    value = os.environ.get(SESSIONS, "256")
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{SESSIONS} must be an integer of at least 1, not {value!r}", param=SESSIONS)
    return int(value)


def _check_exposure(host: str, is_open: bool) -> None:
    """Raise `ConfigError` if other machines could connect without a key, unless `is_open` allows it.

    Callers can run programs in sandboxes at the operator's expense.
    """
    if not (is_loopback(host) or is_open or os.environ.get(KEY, "").strip()):
        raise ConfigError(
            f"host {host} is reachable from other machines; set {KEY}, or pass --open if something else controls access "
            "(such as a private Space, or a proxy with a login)",
            param="host",
        )


class OpenEnvAccess:
    """Middleware that checks access and limits the size of request bodies.

    If a key is set, callers must send it, except to `/health`. If no key is set, programs and this server's own pages have access. Pages of
    other sites do not: otherwise, any page that is open in a browser on this machine could call a local server. For the same reason, a
    local server without a key rejects calls whose Host header does not name this machine.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], key: str) -> None:
        self._app = app
        self._key = f"Bearer {key}".encode() if key else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        why = "" if scope["type"] == "lifespan" or scope["path"] == "/health" else self._refusal(scope)
        if not why:
            await self._app(scope, _limit_body(scope, receive), send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": why})
        else:
            await JSONResponse({"detail": why}, 401 if self._key else 403)(scope, receive, send)

    def _refusal(self, scope: Scope) -> str:
        headers = Headers(scope=scope)
        if self._key:
            authorization = headers.get("authorization", "").encode("utf-8", "surrogatepass")
            is_valid = secrets.compare_digest(authorization, self._key)
            return "" if is_valid else "the key is missing or wrong; send it as 'Authorization: Bearer …'"
        host, origin = headers.get("host", ""), headers.get("origin")
        if origin is not None and _netloc(origin) != host:
            return "the Origin header does not name this server, and pages of other sites may not call it"
        if is_loopback((scope.get("server") or ("",))[0]) and not is_loopback(_hostname(host)):
            return f"the Host header does not name this machine; if the server is behind a proxy, set {KEY}"
        return ""


def _limit_body(scope: Scope, receive: Receive) -> Receive:
    """Limit the size of a request's body, whatever its Content-Length says. uvicorn limits WebSocket messages."""
    if scope["type"] != "http":
        return receive
    received = 0

    async def receive_limited() -> MutableMapping[str, Any]:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > MAX_BYTES:
            raise HTTPException(413, f"the request body is larger than the limit of {MAX_BYTES} bytes")
        return message

    return receive_limited


def _netloc(url: str) -> str | None:
    """Return the host and port of a URL, or None if the URL is invalid."""
    try:
        return urlsplit(url).netloc
    except ValueError:
        return None


def _hostname(netloc: str) -> str:
    """Return the host of `netloc` without its port, or an empty string if it has no host."""
    try:
        return urlsplit(f"//{netloc}").hostname or ""
    except ValueError:
        return ""
