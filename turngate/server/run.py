"""Run a gateway under uvicorn, in its own process or embedded in another program."""

from __future__ import annotations

import asyncio
import gc
import logging
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from typing import Any, TypeVar

import msgspec
import uvicorn
import uvloop
from starlette.requests import Request
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import PayloadTooBig
from websockets.frames import CloseCode

from turngate.common.loop_thread import LoopThread
from turngate.config import ServeConfig
from turngate.engines.base import Engine
from turngate.errors import ConfigError, Stopping
from turngate.render import Certificate, Renderer, TemplateRenderer
from turngate.server.app import Gateway
from turngate.server.asgi import OVERSIZED_FRAME, STALL_S, UNDECODABLE_FRAME, App, Receive, Scope, Send
from turngate.server.bind import (
    check_port,
    local_url,
    open_listener,
    publish_address,
    raise_file_limit,
    startup_message,
)
from turngate.server.model_calls import respond_error
from turngate.server.routing import dialect_of
from turngate.telemetry.spans import is_enabled, start_tracing, stop_tracing

log = logging.getLogger("turngate")
T = TypeVar("T")
_SWITCH_S = 0.0005


def run(config: ServeConfig) -> None:
    with trace_spans(config):
        _run(config)


def _run(config: ServeConfig) -> None:
    check_port(config)
    gateway = Gateway(config)
    try:
        listener = open_listener(config)
    except ConfigError:
        gateway.store.close()
        raise
    tune_interpreter()
    raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        server = GatewayServer(uvicorn_config(gateway, config), gateway)
        runner.run(_serve(gateway, server, listener))


@contextmanager
def trace_spans(config: ServeConfig) -> Iterator[None]:
    """Record spans for the duration of the block, if spans are enabled."""
    if not is_enabled(config.spans):
        yield
        return
    start_tracing("turngate-gateway")
    try:
        yield
    finally:
        stop_tracing()


class GatewayAddress(msgspec.Struct, frozen=True):
    """The URL and the admin key of a running gateway."""

    url: str
    admin_key: str


@asynccontextmanager
async def run_embedded(
    config: ServeConfig,
    *,
    engine: Engine | None = None,
    renderer: tuple[Renderer, Certificate] | None = None,
    wrap: Callable[[App], App] = lambda app: app,
) -> AsyncIterator[GatewayAddress]:
    """Run a gateway in this process for the duration of the block. `wrap` can wrap the application, for example to observe requests."""
    gateway = Gateway(config, engine=engine, renderer=renderer)
    try:
        listener = open_listener(config)
    except ConfigError:
        gateway.store.close()
        raise
    server = _EmbeddedServer(uvicorn_config(wrap(gateway), config), gateway)
    serving = asyncio.create_task(_serve(gateway, server, listener, announce=False))
    try:
        while not server.started:
            if serving.done():
                serving.result()
            await asyncio.sleep(0.01)
        yield GatewayAddress(local_url(listener), gateway.admin_key)
    finally:
        server.should_exit = True
        await serving


@contextmanager
def run_in_thread(manager: AbstractAsyncContextManager[T], name: str = "gateway") -> Iterator[T]:
    """Keep an async context manager, such as `run_embedded(config)`, open in the event loop of a new thread.

    This is for programs without an event loop, and for gateways that must not share an event loop with the program.
    """
    thread = LoopThread(name)
    thread.start()
    try:
        value = thread.run(manager.__aenter__())
        try:
            yield value
        finally:
            thread.run(manager.__aexit__(None, None, None))
    finally:
        thread.stop()


def uvicorn_config(app: App, config: ServeConfig) -> uvicorn.Config:
    return uvicorn.Config(
        answer_when_stopping(app),
        http="httptools",
        ws=GatewayWebSocket,
        ws_max_size=int(config.max_body_mb * 1e6),
        ws_ping_timeout=STALL_S,  # an agent that is busy with its tools may answer late
        ws_per_message_deflate=False,  # compression would cost more time than it saves
        lifespan="off",
        access_log=False,
        log_config=None,  # uvicorn logs through our handler
        log_level="warning",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        server_header=False,
        proxy_headers=False,  # do not trust a proxy's claim about the client's address
    )


class GatewayWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol, except that it reports rejected frames to the application and logs no error for a refused upgrade."""

    def handle_parser_exception(self) -> None:
        if isinstance(self.conn.parser_exc, PayloadTooBig):
            self.queue.put_nowait({"type": "websocket.disconnect", "code": OVERSIZED_FRAME})
        elif self.conn.close_sent is not None and self.conn.close_sent.code == CloseCode.INVALID_DATA:
            self.queue.put_nowait({"type": "websocket.disconnect", "code": UNDECODABLE_FRAME})
        super().handle_parser_exception()

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True


def answer_when_stopping(app: App) -> App:
    """Wrap an application so that an HTTP request that a shutdown cancels is answered in the client's dialect.

    Without this, uvicorn would respond with a bare status 500. A response that has already started is aborted.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            try:
                error = Stopping("the gateway is stopping; retry this call in a moment")
                await respond_error(send, dialect_of(Request(scope)), error)
            except RuntimeError:  # the response has already started; aborting it signals the failure to the client
                raise asyncio.CancelledError from None

    return serve


class GatewayServer(uvicorn.Server):
    """A uvicorn server that aborts calls in flight on shutdown.

    Each call then records the tokens sampled so far, and its reply asks the agent to try again.
    """

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own method would re-raise the signal after serving, before the store and the engine are closed.
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._gateway.end_requests()
        await super().shutdown(sockets)


class _EmbeddedServer(GatewayServer):
    """A gateway server that leaves signals to the host program."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(gateway: Gateway, server: uvicorn.Server, listener: socket.socket, *, announce: bool = True) -> None:
    try:
        await gateway.start(local_url(listener))
        with ExitStack() as stack:
            if announce:
                stack.enter_context(publish_address(gateway.config.folder, listener))
                log.info("%s", startup_message(gateway.config, listener))
                log_renderer(gateway)
            await server.serve(sockets=[listener])
    finally:
        await gateway.stop()


def tune_interpreter() -> None:
    """Adjust Python's settings for a process that only serves a gateway.

    The tokenizer's vocabulary is excluded from garbage collection. Otherwise, half a million permanent objects would be scanned again and
    again.

    Threads release the interpreter lock every 0.5 ms, instead of the default of every 5 ms. A turn waits for the engine and for sockets
    several times. After each wait, the turn needs the lock, which a thread that reads the store could otherwise keep for up to 5 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    sys.setswitchinterval(_SWITCH_S)


def log_renderer(gateway: Gateway) -> None:
    renderer = gateway.renderer
    if renderer is not None and gateway.certificate is not None:
        certificate = gateway.certificate
        verdict = (
            "certified" if certificate.passed else "certified in part" if certificate.certified else "NOT certified"
        )
        log.info("renderer %s, %s, %s encoder", renderer.name, verdict, "fast" if renderer.tokenizer.fast else "plain")
        if not certificate.passed:
            folder, family = shlex.quote(str(renderer.tokenizer.folder)), certificate.renderer.removeprefix("family:")
            command = f"turngate certify {folder} --family {family}"
            log.warning("%s; for details, run: %s", certificate.explain_uncertified(), command)
        if isinstance(renderer, TemplateRenderer) and renderer.unused_template:
            log.warning("%s", renderer.unused_template)
        if certificate.unread:
            log.warning("%s", certificate.explain_unread())
