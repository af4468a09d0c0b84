"""A gateway's stand-in that a test tells, connection by connection, what to do with the bytes; and a raw client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.speed import scaled

OK = "x-turngate: 1\r\n"


@dataclass
class Seen:
    """One request as it arrived."""

    first: str
    headers: dict[str, str]
    body: bytes
    names: list[str] = field(default_factory=list)


@dataclass
class Call:
    """One connection, of which the request has been read."""

    seen: Seen
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, text: str | bytes) -> None:
        self.writer.write(text.encode() if isinstance(text, str) else text)
        await self.writer.drain()

    async def reply(self, body: str = "hello", status: str = "200 OK", headers: str = OK) -> None:
        head = f"HTTP/1.1 {status}\r\n{headers}content-length: {len(body.encode())}\r\n\r\n"
        await self.send(head + ("" if self.seen.first.startswith("HEAD ") else body))

    async def hung_up(self) -> bool:
        """Wait until the other side has gone."""
        try:
            return await asyncio.wait_for(self.reader.read(1), scaled(10)) == b""
        except ConnectionError:
            return True


Script = Callable[[Call], Awaitable[None]]


class Upstream:
    """`script` answers each call; `seen` are all requests so far."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[Seen] = []
        self.url = ""
        self._server: asyncio.AbstractServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, *, port: int = 0, path: Path | None = None) -> None:
        if path:
            self._server = await asyncio.start_unix_server(self._accept, str(path))
            self.url = f"unix:{path}"
        else:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
            self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]

    async def close(self) -> None:
        if self._server:
            self._server.close()
            self._server = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._one(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head[:-4].split("\r\n")
            pairs = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
            headers = dict(pairs)
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            self.seen.append(Seen(first, headers, body, [name for name, _ in pairs]))
            await self.script(Call(self.seen[-1], reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def upstream(script: Script | None = None, *, path: Path | None = None) -> AsyncIterator[Upstream]:
    async def greet(call: Call) -> None:
        await call.reply()

    server = Upstream(script or greet)
    await server.listen(path=path)
    try:
        yield server
    finally:
        await server.close()


def each(*scripts: Script) -> Script:
    """The first call is answered by the first script, and so on; the last one answers the rest."""
    count = 0

    async def script(call: Call) -> None:
        nonlocal count
        count += 1
        await scripts[min(count, len(scripts)) - 1](call)

    return script


def answer(body: str = "hello", status: str = "200 OK", headers: str = OK) -> Script:
    async def script(call: Call) -> None:
        await call.reply(body, status, headers)

    return script


async def drop(call: Call) -> None:
    """End the connection without a word."""


async def raw(port: int, request: bytes | str, *, path: Path | None = None) -> bytes:
    """Send bytes, and read all that comes until the other side closes."""
    if path:
        reader, writer = await asyncio.open_unix_connection(str(path))
    else:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.encode() if isinstance(request, str) else request)
    try:
        return await asyncio.wait_for(reader.read(), scaled(20))
    finally:
        writer.close()
