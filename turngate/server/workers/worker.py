"""A worker process: a complete gateway that receives its clients' connections from the front, its parent process (`front.py`).

The front runs `python -m turngate.server.workers.worker` and writes a `WorkerStart` to the worker's standard input.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from turngate.common.sharding import Shard
from turngate.errors import TurngateError
from turngate.server.app import Gateway
from turngate.server.asgi import App, Receive, Scope, Send, add_gateway_header
from turngate.server.run import GatewayServer, log_renderer, trace_spans, tune_interpreter, uvicorn_config
from turngate.server.workers.coordinator import Coordinator
from turngate.server.workers.forwarding import (
    INTERNAL_PREFIX,
    RUN_HEADER,
    SHARED_ROUTES,
    ForwardingApp,
    PeerWorkers,
    restore_client,
    socket_path,
)
from turngate.server.workers.front import HEAD_BYTES, WorkerReport, WorkerStart
from turngate.telemetry import logs

log = logging.getLogger("turngate")


def main() -> None:
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerStart)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process, but the front decides when to stop
    with logs.log_to_stderr(start.config.log_format, worker=start.number):
        _run(start)


def _run(start: WorkerStart) -> None:
    for descriptor in (start.lock, start.pair):  # processes started by the worker must not inherit these
        os.set_inheritable(descriptor, False)
    with socket.socket(fileno=start.pair) as pair:
        try:
            gateway = Gateway(start.config, shard=Shard(start.number, start.workers))
            tune_interpreter()
            with trace_spans(start.config), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_serve(start, pair, gateway))
        except TurngateError as error:
            with suppress(OSError):
                pair.send(msgspec.json.encode(WorkerReport(error=error.message)))
            sys.exit(2)


async def _serve(start: WorkerStart, pair: socket.socket, gateway: Gateway) -> None:
    worker = WorkerGateway(gateway, Shard(start.number, start.workers), Path(start.sockets), start.run)
    inside = uvicorn_config(worker.inside, start.config)
    outside = uvicorn_config(worker.outside, start.config)
    inside.uds = socket_path(Path(start.sockets), start.number)
    try:
        await worker.start()
        if start.number == 0:
            log_renderer(gateway)
        await WorkerServer(inside, outside, gateway, pair).serve()
    finally:
        await worker.stop()


class WorkerGateway:
    """A worker's gateway and its connections to the other workers.

    `inside` is the application on the private socket, and `outside` is the public one.
    """

    def __init__(self, gateway: Gateway, shard: Shard, folder: Path, run: str) -> None:
        self.gateway = gateway
        self._number = shard.number
        self._peers = PeerWorkers(shard, folder, run)
        self._run = run.encode()
        self._coordinator = Coordinator(gateway, self._peers)
        self._shared = _starlette(self._coordinator.routes())
        self._internal = _starlette(self._coordinator.worker_routes())
        self.inside = restore_client(self._serve_inside)
        self.outside = ForwardingApp(gateway, self._peers, self._shared)

    async def start(self) -> None:
        await self.gateway.start()
        await self._coordinator.restore_fence()

    async def stop(self) -> None:
        await self._coordinator.close()
        await self._peers.close()
        await self.gateway.stop()

    async def _serve_inside(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve requests that other workers make or forward. Worker 0 also serves the routes that concern all workers."""
        if scope["type"] == "websocket":
            await self.gateway(scope, receive, send)
        elif scope["path"].startswith(INTERNAL_PREFIX) and self._is_from_peer(scope):
            await self._internal(scope, receive, send)
        elif self._number == 0 and (scope["method"], scope["path"]) in SHARED_ROUTES:
            await self._shared(scope, receive, send)
        else:
            await self.gateway(scope, receive, send)

    def _is_from_peer(self, scope: Scope) -> bool:
        """Return whether another worker of this run made the request itself, instead of forwarding a client's request."""
        values = [value for name, value in scope["headers"] if name == RUN_HEADER]
        return len(values) == 1 and secrets.compare_digest(values[0], self._run)


def _starlette(routes: list[Route]) -> App:
    app = Starlette(routes=routes)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, add_gateway_header(send))

    return serve


class WorkerServer(GatewayServer):
    """A server for the worker's private socket and for the connections that the front hands over."""

    def __init__(self, inside: uvicorn.Config, outside: uvicorn.Config, gateway: Gateway, pair: socket.socket) -> None:
        super().__init__(inside, gateway)
        self._outside = outside
        self._pair = pair
        self._accepting: set[asyncio.Task[None]] = set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.handle_exit, signal.SIGTERM, None)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._outside.load()
        self._pair.setblocking(False)
        asyncio.get_running_loop().add_reader(self._pair, self._receive_connections)
        self._pair.send(msgspec.json.encode(WorkerReport()))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().remove_reader(self._pair)
        await super().shutdown(sockets)

    def _receive_connections(self) -> None:
        for _ in range(64):
            try:
                message, descriptors, _, _ = socket.recv_fds(self._pair, HEAD_BYTES + 1, 1, socket.MSG_CMSG_CLOEXEC)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                message, descriptors = b"", []
            if not message:
                log.warning("the front process has exited; stopping")
                asyncio.get_running_loop().remove_reader(self._pair)
                self.should_exit = True
                return
            for descriptor in descriptors:
                task = asyncio.create_task(self._serve_connection(socket.socket(fileno=descriptor), message[1:]))
                self._accepting.add(task)
                task.add_done_callback(self._accepting.discard)

    async def _serve_connection(self, connection: socket.socket, head: bytes) -> None:
        with suppress(OSError):  # the client has already disconnected
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(
                lambda: HandedOverConnection(head, self._outside, self.server_state), connection
            )
            return
        connection.close()


class HandedOverConnection(HttpToolsProtocol):
    """A connection whose first bytes have already been read by the front."""

    def __init__(self, head: bytes, config: uvicorn.Config, state: uvicorn.server.ServerState) -> None:
        super().__init__(config, state, {})
        self._head_read = head

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # the same signature as in uvicorn
        super().connection_made(transport)
        if self._head_read:
            self.data_received(self._head_read)


if __name__ == "__main__":
    main()
