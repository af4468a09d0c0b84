"""Runs a gateway under uvicorn until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import uvicorn
import uvloop
from starlette.requests import Request

from turngate.config import ServeConfig
from turngate.engines.base import Engine
from turngate.errors import ConfigError, Stopping
from turngate.render import Certificate, Renderer
from turngate.server.app import Gateway
from turngate.server.asgi import App, Receive, Scope, Send
from turngate.server.bind import local_url, open_listener, publish_address, raise_file_limit, startup_message
from turngate.server.model_calls import respond_error
from turngate.server.routing import dialect_of
from turngate.telemetry.spans import is_enabled, start_tracing, stop_tracing

log = logging.getLogger("turngate")


def run(config: ServeConfig) -> None:
    with trace_spans(config):
        _run(config)


def _run(config: ServeConfig) -> None:
    gateway = Gateway(config)
    try:
        listener = open_listener(config)
    except ConfigError:
        gateway.store.close()
        raise
    tune_garbage_collector()
    raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(gateway, GatewayServer(uvicorn_config(gateway), gateway), listener))


@contextmanager
def trace_spans(config: ServeConfig) -> Iterator[None]:
    """Spans, where they are wanted, for as long as the block runs."""
    if not is_enabled(config.spans):
        yield
        return
    start_tracing("turngate-gateway")
    try:
        yield
    finally:
        stop_tracing()


class GatewayAddress(msgspec.Struct, frozen=True):
    """Where a running gateway is reached, and who may command it."""

    url: str
    admin_key: str


@asynccontextmanager
async def run_embedded(
    config: ServeConfig,
    *,
    engine: Engine | None = None,
    renderer: tuple[Renderer, Certificate] | None = None,
    around: Callable[[App], App] = lambda app: app,
) -> AsyncIterator[GatewayAddress]:
    """A gateway that lives in this process, beside whatever else it does: for `turngate run`. `around` may listen to what passes."""
    gateway = Gateway(config, engine=engine, renderer=renderer)
    try:
        listener = open_listener(config)
    except ConfigError:
        gateway.store.close()
        raise
    server = _EmbeddedServer(uvicorn_config(around(gateway)), gateway)
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


def uvicorn_config(app: App) -> uvicorn.Config:
    return uvicorn.Config(
        answer_when_stopping(app),
        http="httptools",
        lifespan="off",
        access_log=False,
        log_config=None,  # its lines go where ours go, in our format
        log_level="warning",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        server_header=False,
        proxy_headers=False,  # nobody in front is trusted to say who calls
    )


def answer_when_stopping(app: App) -> App:
    """The same, but whoever is still served when the time to stop is up is told so in the caller's own format. uvicorn's own reply
    to that is a bare 500, which looks as if no gateway were here at all."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            try:
                wrong = Stopping("the gateway is being stopped; repeat this call in a moment")
                await respond_error(send, dialect_of(Request(scope)), wrong)
            except RuntimeError:  # a reply has begun, and is broken off: that is how its caller learns of it
                raise asyncio.CancelledError from None

    return served


class GatewayServer(uvicorn.Server):
    """Ends calls in flight itself when told to stop, so that what they sampled is recorded and their agents are told."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own raises the signal again once it has stopped serving, before the store and the engine are closed.
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gateway.events.close()
        await self._gateway.sessions.abort_all_calls()
        await self._gateway.end_polls()
        await super().shutdown(sockets)


class _EmbeddedServer(GatewayServer):
    """Leaves signals to its host."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(gateway: Gateway, server: uvicorn.Server, listener: socket.socket, *, announce: bool = True) -> None:
    try:
        await gateway.start()
        with ExitStack() as stack:
            if announce:
                log.info("%s", startup_message(gateway.config, listener))
                log_renderer(gateway)
                stack.enter_context(publish_address(Path(gateway.config.data), listener))
            await server.serve(sockets=[listener])
    finally:
        await gateway.stop()


def tune_garbage_collector() -> None:
    """Take the vocabulary out of the garbage collector's sight: half a million objects that never die, walked again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def log_renderer(gateway: Gateway) -> None:
    renderer = gateway.renderer
    if renderer is not None and gateway.certificate is not None:
        verdict = (
            "certified" if gateway.certificate.passed else "NOT certified: every turn is rendered whole and may fork"
        )
        log.info("renderer %s, %s, %s encoder", renderer.name, verdict, "fast" if renderer.tokenizer.fast else "plain")
