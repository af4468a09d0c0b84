"""Runs a gateway under uvicorn until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import msgspec
import uvicorn
import uvloop

from turngate.config import ServeConfig
from turngate.engines.base import Engine
from turngate.errors import ConfigError
from turngate.render import Certificate, Renderer
from turngate.server.app import Gateway
from turngate.server.asgi import App

log = logging.getLogger("turngate")
_SERVING = "gateway.json"


def run(config: ServeConfig) -> None:
    gateway = Gateway(config)
    try:
        listener = _listen(config)
    except ConfigError:
        gateway.store.close()
        raise
    _settle_memory()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(gateway, _Server(_settings(gateway), gateway), listener))


class Address(msgspec.Struct, frozen=True):
    """Where a running gateway is reached, and who may command it."""

    url: str
    admin_key: str


@asynccontextmanager
async def embedded(
    config: ServeConfig,
    *,
    engine: Engine | None = None,
    renderer: tuple[Renderer, Certificate] | None = None,
    around: Callable[[App], App] = lambda app: app,
) -> AsyncIterator[Address]:
    """A gateway that lives in this process, beside whatever else it does: for `turngate run`. `around` may listen to what passes."""
    gateway = Gateway(config, engine=engine, renderer=renderer)
    try:
        listener = _listen(config)
    except ConfigError:
        gateway.store.close()
        raise
    server = _Embedded(_settings(around(gateway)), gateway)
    serving = asyncio.create_task(_serve(gateway, server, listener, announce=False))
    try:
        while not server.started:
            if serving.done():
                serving.result()
            await asyncio.sleep(0.01)
        yield Address(_url(listener), gateway.admin_key)
    finally:
        server.should_exit = True
        await serving


class Serving(msgspec.Struct, frozen=True):
    """Left in the data folder by a gateway that serves it, for others on the machine to find it."""

    url: str
    pid: int


def serving(data: Path) -> Serving | None:
    """The gateway that serves this data folder at present, as far as it can be told."""
    try:
        found = msgspec.json.decode((data / _SERVING).read_bytes(), type=Serving)
        os.kill(found.pid, 0)
    except (OSError, msgspec.DecodeError):
        return None
    return found


def _settings(app: App) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        lifespan="off",
        access_log=False,
        log_level="warning",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        server_header=False,
        proxy_headers=False,  # nobody in front is trusted to say who calls
    )


class _Server(uvicorn.Server):
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
        await self._gateway.control.stop()
        await super().shutdown(sockets)


class _Embedded(_Server):
    """Leaves signals to its host."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(gateway: Gateway, server: uvicorn.Server, listener: socket.socket, *, announce: bool = True) -> None:
    note = Path(gateway.config.data) / _SERVING
    try:
        await gateway.start()
        if announce:
            _announce(gateway, listener)
            note.write_bytes(msgspec.json.encode(Serving(_url(listener), os.getpid())))
        await server.serve(sockets=[listener])
    finally:
        if announce:
            with suppress(OSError):
                note.unlink(missing_ok=True)
        await gateway.stop()


def _url(listener: socket.socket) -> str:
    """As seen from this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _settle_memory() -> None:
    """Take the vocabulary out of the garbage collector's sight: half a million objects that never die, walked again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _announce(gateway: Gateway, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    config, renderer = gateway.config, gateway.renderer
    log.info(
        "turngate listens on http://%s:%d · engine %s · model %s · data %s",
        host,
        port,
        config.engine,
        config.model or "any",
        config.data,
    )
    if renderer is not None and gateway.certificate is not None:
        verdict = (
            "certified" if gateway.certificate.passed else "NOT certified: every turn is rendered whole and may fork"
        )
        log.info("renderer %s, %s, %s encoder", renderer.name, verdict, "fast" if renderer.tokenizer.fast else "plain")


def _listen(config: ServeConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"port: cannot listen on {config.host}:{config.port} ({error.strerror}); choose another --port",
            param="port",
        ) from None
    return listener
