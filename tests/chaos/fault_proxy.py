"""A TCP proxy that delays, cuts, repeats or swallows the bytes of its connections."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from tests.ports import free_port

Way = Literal["up", "down", "both"]  # up: from the client to the server
Cut = Literal["reset", "close", "half-close"]
_READ = 65_536
_NO_LINGER = struct.pack("ii", 1, 0)  # closing the socket sends a reset


@dataclass(frozen=True)
class NetworkFault:
    """What happens to the bytes that travel in one direction, or in both."""

    way: Way = "both"
    delay_s: float = 0.0  # before each read is passed on
    jitter_s: float = 0.0  # up to this much more
    piece: int = 0  # pass on this many bytes at a time, each after `delay_s`
    cut: Cut | None = None  # end the connection after a random number of bytes …
    cut_after: tuple[int, int] = (0, 600)  # … between these
    repeat: float = 0.0  # probability that a read is passed on twice
    swallow: bool = False  # pass on nothing; the connection stays open


class FaultProxy:
    """A proxy in front of one port. `fault` applies to all its connections while it is set."""

    def __init__(self, target: int, rng: random.Random) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.fault: NetworkFault | None = None
        self._target, self._rng = target, rng
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    def refuse(self) -> None:
        """Close all connections and refuse new ones, until `listen` is called."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.drop_all()

    def drop_all(self) -> None:
        for connection in list(self._connections):
            connection.reset()

    async def close(self) -> None:
        self.refuse()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)

    def heal(self) -> None:
        """End the fault. Connections that have lost bytes are reset."""
        self.fault = None
        for connection in list(self._connections):
            if connection.has_lost_bytes:
                connection.reset()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            _reset(writer)
            return
        connection = _Connection(self, self._rng, writer, far_writer)
        self._connections.add(connection)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.gather(connection.pump("up", reader, far_writer), connection.pump("down", far_reader, writer))
        finally:
            self._connections.discard(connection)
            for each in (writer, far_writer):
                each.close()


class _Connection:
    def __init__(
        self, proxy: FaultProxy, rng: random.Random, near: asyncio.StreamWriter, far: asyncio.StreamWriter
    ) -> None:
        self._proxy, self._rng, self._near, self._far = proxy, rng, near, far
        self._left: dict[tuple[NetworkFault, Way], int] = {}  # bytes until the cut, by fault and direction
        self.has_lost_bytes = False

    def reset(self) -> None:
        for writer in (self._near, self._far):
            _reset(writer)

    async def pump(self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(_READ):
                fault = self._proxy.fault
                if fault is None or fault.way not in (way, "both"):
                    writer.write(data)
                elif not await self._pass_on(fault, way, data, writer):
                    return
                await writer.drain()
            if not self.has_lost_bytes and writer.can_write_eof():
                writer.write_eof()
        except OSError:
            self.reset()  # one side has reset its connection: tell the other

    async def _pass_on(self, fault: NetworkFault, way: Way, data: bytes, writer: asyncio.StreamWriter) -> bool:
        """Pass data on as the fault says. Return whether this direction is still open."""
        if fault.swallow:
            self.has_lost_bytes = True
            return True
        is_cut = False
        if fault.cut is not None:
            left = self._left.setdefault((fault, way), self._rng.randint(*fault.cut_after))
            self._left[fault, way] = left - len(data)
            data, is_cut = data[:left], len(data) >= left
        size = fault.piece or max(1, len(data))
        for start in range(0, len(data), size):
            if fault.delay_s or fault.jitter_s:
                await asyncio.sleep(fault.delay_s + self._rng.random() * fault.jitter_s)
            if self._proxy.fault is not fault:  # it has ended: pass the rest on without a delay
                writer.write(data[start:])
                break
            writer.write(data[start : start + size] * (2 if self._rng.random() < fault.repeat else 1))
            await writer.drain()
        if is_cut and fault.cut is not None:
            await self._end(fault.cut, writer)
        return not is_cut

    async def _end(self, cut: Cut, writer: asyncio.StreamWriter) -> None:
        self.has_lost_bytes = True
        if cut == "reset":
            self.reset()
            return
        await writer.drain()
        if cut == "half-close":
            writer.write_eof()
        else:
            for each in (self._near, self._far):
                each.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    if (sock := writer.get_extra_info("socket")) is not None:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    writer.transport.abort()


@asynccontextmanager
async def open_proxy(target: int, rng: random.Random) -> AsyncIterator[FaultProxy]:
    proxy = FaultProxy(target, rng)
    await proxy.listen()
    try:
        yield proxy
    finally:
        await proxy.close()
