"""A stand-in for the gateway with a script for each connection, and a raw client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.speed import scaled

OK = "x-turngate: 1\r\n"


@dataclass
class RecordedRequest:
    """One request as it arrived."""

    request_line: str
    headers: dict[str, str]
    body: bytes
    names: list[str] = field(default_factory=list)


@dataclass
class Call:
    """One connection whose request has been read."""

    request: RecordedRequest
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, text: str | bytes) -> None:
        self.writer.write(text.encode() if isinstance(text, str) else text)
        await self.writer.drain()

    async def reply(self, body: str = "hello", status: str = "200 OK", headers: str = OK) -> None:
        head = f"HTTP/1.1 {status}\r\n{headers}content-length: {len(body.encode())}\r\n\r\n"
        await self.send(head + ("" if self.request.request_line.startswith("HEAD ") else body))

    async def wait_for_hang_up(self) -> bool:
        """Wait until the client has disconnected."""
        try:
            return await asyncio.wait_for(self.reader.read(1), scaled(10)) == b""
        except ConnectionError:
            return True


Script = Callable[[Call], Awaitable[None]]


class Upstream:
    """`script` replies to each call. `requests` are all requests so far."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[RecordedRequest] = []
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
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            request_line, *lines = head[:-4].split("\r\n")
            pairs = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
            headers = dict(pairs)
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            self.requests.append(RecordedRequest(request_line, headers, body, [name for name, _ in pairs]))
            await self.script(Call(self.requests[-1], reader, writer))
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


def in_sequence(*scripts: Script) -> Script:
    """Use the first script for the first call, and so on. The last script replies to all further calls."""
    count = 0

    async def script(call: Call) -> None:
        nonlocal count
        count += 1
        await scripts[min(count, len(scripts)) - 1](call)

    return script


def reply_with(body: str = "hello", status: str = "200 OK", headers: str = OK) -> Script:
    async def script(call: Call) -> None:
        await call.reply(body, status, headers)

    return script


async def drop(call: Call) -> None:
    """End the connection without a reply."""


async def send_raw(port: int, request: bytes | str, *, path: Path | None = None) -> bytes:
    """Send bytes, and read until the server closes the connection."""
    if path:
        reader, writer = await asyncio.open_unix_connection(str(path))
    else:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.encode() if isinstance(request, str) else request)
    try:
        return await asyncio.wait_for(reader.read(), scaled(20))
    finally:
        writer.close()
