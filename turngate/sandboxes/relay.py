"""Forward an agent's HTTP requests from 127.0.0.1 in a sandbox to the gateway, and retry if the gateway does not answer.

`egress.py` runs this file in the sandbox as `python3 relay.py --target FILE --port 0 --port-file FILE`. `relay.mjs` does the same in images
without Python. On the host, `door.py` uses the same classes. The target file contains the gateway's address: `unix:/path`,
`http://host:port/prefix` or `https://…`. It is read again for every attempt, so a tunnel's new URL takes effect immediately.

A request is read completely before it is sent. If the connection fails or ends before a reply, the request is sent again. The same happens
after a 404 or 5xx reply without the gateway's `x-turngate` header, because such a reply comes from a dead tunnel. A reply is forwarded as
it arrives. If it is cut off, the agent's connection is cut off too. When the agent disconnects, the call to the gateway ends immediately.
Once the gateway has accepted a WebSocket, bytes are forwarded in both directions until one side closes the connection.

One file, standard library only, Python 3.8 and newer.
"""

# Lint rules that do not suit a dependency-free file for Python 3.8:
# ruff: noqa: PTH104, UP035, UP036, UP041

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import secrets
import signal
import socket
import ssl
import struct
import sys
import time
from asyncio import StreamReader, StreamWriter
from contextlib import suppress
from functools import partial
from typing import Any, Callable, Coroutine, Iterable, NamedTuple, Optional
from urllib.parse import urlsplit

GATEWAY_HEADER = "x-turngate"  # on every reply from the gateway
ATTEMPT_HEADER, IDEMPOTENCY_HEADER = "x-turngate-attempt", "idempotency-key"
REACHED = "reached"  # written to --reached-file on success
HEAD_LIMIT = 256 * 1024
BODY_LIMIT = 64 * 1024 * 1024
SMALL_BODY = 64 * 1024  # smaller bodies are read even if the request is refused, to keep the connection usable
CHUNK_BYTES = 64 * 1024
GIVE_UP_S, CONNECT_S = 600.0, 15.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
LINGER_S = 10.0  # how long to read and discard the rest of a refused body
TARGET_CHECK_S = 1.0  # how often a waiting call checks whether the target has changed
UPGRADE = ["connection: upgrade", "upgrade: websocket"]
HOP_BY_HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "expect"}
TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
PATH = re.compile(r"/[!-~]*\Z")
DIGITS = re.compile(r"[0-9]{1,15}\Z")


class HttpRequest(NamedTuple):
    method: str
    path: str  # with the query, as sent
    headers: list[tuple[str, str]]  # names in lower case
    body: bytes
    http_1_0: bool
    keep_alive: bool
    upgrade: bool  # whether the agent asks for a WebSocket


class HttpReply(NamedTuple):
    status: int
    reason: str
    headers: list[tuple[str, str]]


class RequestRefused(Exception):
    """An error that the relay itself, not the gateway, sends in reply to a request."""

    headers = ""  # an additional header line for the reply

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", unread: int = 0) -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.unread = unread  # body bytes not yet read; closing before they are read looks like a broken connection


class NoAnswer(Exception):
    """No valid reply came from the gateway. The request may be sent again: every attempt has the same idempotency key."""


class TruncatedReply(Exception):
    """A reply that was cut off."""


class ClientDisconnected(Exception):
    """The agent closed its connection."""


class ClientConnection:
    """An agent's connection. The relay reads ahead, so that it notices a disconnect while a call is in progress."""

    def __init__(self, relay: HttpRelay, reader: StreamReader, writer: StreamWriter) -> None:
        self._relay, self._reader, self.writer = relay, reader, writer
        self._buffer = bytearray()
        self._has_data, self._has_room, self.closed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._read_ahead_limit = HEAD_LIMIT

    async def read_ahead(self) -> None:
        try:
            with suppress(OSError):
                while data := await self._reader.read(CHUNK_BYTES):
                    self._buffer += data
                    self._has_data.set()
                    while len(self._buffer) >= self._read_ahead_limit:
                        self._has_room.clear()
                        await self._has_room.wait()
        finally:
            self.closed.set()
            self._has_data.set()

    async def _wait_until(self, is_ready: Callable[[], bool], limit: int = HEAD_LIMIT, patient: bool = False) -> None:
        self._read_ahead_limit = max(limit, HEAD_LIMIT)
        self._has_room.set()
        while not is_ready():
            if self.closed.is_set():
                raise ClientDisconnected
            self._has_data.clear()
            try:
                await within(None if patient else self._relay.stall_s, self._has_data.wait())
            except asyncio.TimeoutError:
                if not self._buffer and limit == HEAD_LIMIT:
                    raise ClientDisconnected from None  # idle between requests
                raise RequestRefused(408, f"the request stalled: no data for {self._relay.stall_s} s") from None

    async def discard(self, count: int) -> None:
        """Read and discard `count` bytes of a body."""
        while count > 0:
            await self._wait_until(lambda: bool(self._buffer), patient=True)
            count -= len(self._take(min(len(self._buffer), count)))

    def _take(self, count: int) -> bytes:
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        self._has_room.set()
        return data

    async def pass_all(self, upstream: StreamWriter) -> None:
        while True:
            await self._wait_until(lambda: bool(self._buffer), patient=True)
            upstream.write(self._take(len(self._buffer)))
            await upstream.drain()

    async def read_exactly(self, count: int) -> bytes:
        await self._wait_until(lambda: len(self._buffer) >= count, count + CHUNK_BYTES)
        return self._take(count)

    async def read_until(self, mark: bytes, limit: int) -> bytes:
        """Read up to and including `mark`. Raise `RequestRefused` if it does not occur within `limit` bytes."""
        await self._wait_until(lambda: mark in self._buffer or len(self._buffer) > limit, limit + CHUNK_BYTES)
        end = self._buffer.find(mark)
        if end < 0 or end > limit:
            raise RequestRefused(431, "the request's head, or a line of its chunked body, is too long")
        return self._take(end + len(mark))

    async def read_request(self, reserve: Callable[[int], None]) -> HttpRequest:
        """Read the next request. Before body bytes are read, `reserve` is called with their number and may refuse them."""
        await self._wait_until(lambda: bool(self._buffer.lstrip(b"\r\n")))
        self._take(len(self._buffer) - len(self._buffer.lstrip(b"\r\n")))  # some clients send an empty line first
        first, headers = parse_head(await self.read_until(b"\r\n\r\n", HEAD_LIMIT))
        words = first.split(" ")
        if len(words) != 3 or not TOKEN.match(words[0]) or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
            raise RequestRefused(400, "not an HTTP/1.1 or HTTP/1.0 request")
        method, path, version = words
        if not PATH.match(path):
            raise RequestRefused(400, "the request target must be a path in visible ASCII characters")
        if [name for name, _ in headers].count("host") > 1:
            raise RequestRefused(400, "the request has more than one host header")
        length = body_length(headers, limit := self._relay.body_limit)
        try:
            if length is None or length > SMALL_BODY:
                self._relay.check_route(method, path)
            reserve(length or 0)
        except RequestRefused as refused:
            refused.unread = limit if length is None else length
            raise
        if "100-continue" in header_values(headers, "expect"):
            self.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await self._read_chunks(limit, reserve) if length is None else await self.read_exactly(length)
        http_1_0, connection = version == "HTTP/1.0", header_values(headers, "connection")
        keep_alive = "close" not in connection and (not http_1_0 or "keep-alive" in connection)
        upgrade = method == "GET" and "upgrade" in connection and "websocket" in header_values(headers, "upgrade")
        return HttpRequest(method, path, headers, body, http_1_0, keep_alive, upgrade)

    async def _read_chunks(self, limit: int, reserve: Callable[[int], None]) -> bytes:
        body = bytearray()
        while True:
            size = chunk_size(await self.read_until(b"\r\n", 4096))
            if size is None:
                raise RequestRefused(400, "a chunk has an invalid size")
            if len(body) + size > limit:
                raise RequestRefused(413, f"the body is larger than {limit} bytes")
            if not size:
                break
            reserve(size)
            body += await self.read_exactly(size)
            if await self.read_exactly(2) != b"\r\n":
                raise RequestRefused(400, "a chunk does not end with a line break")
        while await self.read_until(b"\r\n", HEAD_LIMIT) != b"\r\n":  # trailers
            pass
        return bytes(body)


def body_length(headers: list[tuple[str, str]], limit: int) -> Optional[int]:
    """Return the length of a request's body, or None if it is chunked."""
    codings, lengths = header_values(headers, "transfer-encoding"), set(header_values(headers, "content-length"))
    if codings:
        if codings != ["chunked"] or lengths:
            raise RequestRefused(400, "transfer-encoding must be chunked, without a content-length")
        return None
    length = (lengths or {"0"}).pop()
    if lengths or not DIGITS.match(length):
        raise RequestRefused(400, "content-length must be one number")
    if int(length) > limit:
        raise RequestRefused(413, f"the body is larger than {limit} bytes", unread=int(length))
    return int(length)


def parse_head(head: bytes) -> tuple[str, list[tuple[str, str]]]:
    """Split a head into its first line and its headers. A malformed head is rejected, because other programs may parse it differently."""
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    headers = []
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not TOKEN.match(name) or re.search(r"[\r\n\0]", value):
            raise RequestRefused(400, "a header is malformed")
        headers.append((name.lower(), value.strip(" \t")))
    if re.search(r"[\r\n\0]", first):
        raise RequestRefused(400, "the first line is malformed")
    return first, headers


def encode_head(lines: Iterable[str]) -> bytes:
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def header_values(headers: list[tuple[str, str]], name: str) -> list[str]:
    """Return the values of a header in lower case. The header may be repeated, and each occurrence may contain a list."""
    return [part.strip().lower() for key, value in headers if key == name for part in value.split(",") if part.strip()]


def chunk_size(line: bytes) -> Optional[int]:
    digits = line.split(b";")[0].strip()
    return int(digits, 16) if re.match(rb"[0-9A-Fa-f]{1,12}\Z", digits) else None


class HttpRelay:
    """A relay that looks up its target before each attempt. With `give_up_s=0`, it makes only one attempt.

    Subclasses may set limits and override `check_route`, `admit` and `log`. `check_route` and `admit` may raise `RequestRefused`.
    """

    body_limit = BODY_LIMIT  # maximum size of one body
    max_connections = sys.maxsize  # maximum number of open connections
    max_body_bytes = sys.maxsize  # maximum size of all bodies in memory
    stall_s: Optional[float] = None  # longest silence within a request

    def __init__(self, get_target: Callable[[], str], *, give_up_s: float = GIVE_UP_S) -> None:
        self.get_target, self.give_up_s = get_target, give_up_s
        self._body_bytes = 0  # size of all bodies in memory
        self._server: Optional[asyncio.AbstractServer] = None
        self._connections: set[Any] = set()  # one task per connection

    def check_route(self, method: str, path: str) -> None:
        """Check a request's method and path before a large or chunked body is read. Other requests are checked only by `admit`."""

    def admit(self, request: HttpRequest) -> HttpRequest:
        """Check a complete request. Return the request to send, which may be modified."""
        return request

    def log(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    async def listen(self, listener: socket.socket) -> None:
        # Start serving only after `self._server` is set, so that `close` can close it. Otherwise, if this call were cancelled in between,
        # the event loop would keep watching the descriptor and miss events of the next file with the same number.
        try:
            self._server = await asyncio.start_server(self._accept, sock=listener, start_serving=False)
        except BaseException:
            listener.close()
            raise
        await self._server.start_serving()

    async def close(self) -> None:
        if self._server:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        # Not a coroutine: before Python 3.12, asyncio logs a traceback when the task that runs it is cancelled.
        if not self._server or not self._server.is_serving() or len(self._connections) >= self.max_connections:
            refuse(writer, RequestRefused(503, "the relay is closing or has too many connections", "overloaded"))
            writer.close()
            return
        task = asyncio.ensure_future(self._serve(ClientConnection(self, reader, writer)))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        task.add_done_callback(lambda _: writer.close())  # also if the task is cancelled before it starts

    async def _serve(self, client: ClientConnection) -> None:
        reading = asyncio.ensure_future(client.read_ahead())
        with suppress(ClientDisconnected, TruncatedReply, OSError, asyncio.TimeoutError):
            try:
                while await self._serve_request(client):
                    pass
                await client.writer.drain()
            except RequestRefused as refused:
                refuse(client.writer, refused)
                await within(LINGER_S, client.discard(refused.unread))
            finally:
                reading.cancel()
                await asyncio.wait({reading})

    async def _serve_request(self, client: ClientConnection) -> bool:
        """Answer one request. Return whether the connection can be reused."""
        reserved = 0

        def reserve(count: int) -> None:
            nonlocal reserved
            if self._body_bytes + count > self.max_body_bytes:
                raise RequestRefused(503, "too many large requests at the same time; retry later", "overloaded")
            reserved, self._body_bytes = reserved + count, self._body_bytes + count

        try:
            request = await client.read_request(reserve)
            try:
                request = self.admit(request)
            except RequestRefused as refused:
                return refuse(client.writer, refused, request)
            answering, _ = await run_until_first(self._answer(request, client), client.closed.wait())
            if answering.cancelled():
                raise ClientDisconnected
            return bool(answering.result())
        finally:
            self._body_bytes -= reserved

    async def _answer(self, request: HttpRequest, client: ClientConnection) -> bool:
        if IDEMPOTENCY_HEADER not in dict(request.headers):
            request = request._replace(headers=[*request.headers, (IDEMPOTENCY_HEADER, secrets.token_hex(16))])
        attempt, wait, deadline = 1, FIRST_WAIT_S, time.monotonic() + self.give_up_s
        while True:
            try:
                return await self._try_once(request, attempt, client)
            except NoAnswer as error:
                self.log(f"attempt {attempt}: {error}")
                pause = wait * random.uniform(0.5, 1)
                if time.monotonic() + pause >= deadline:
                    status, message = 503 if self.give_up_s else 502, f"the gateway cannot be reached: {error}"
                    return refuse(client.writer, RequestRefused(status, message, "gateway_unreachable"), request)
            await asyncio.sleep(pause)
            attempt, wait = attempt + 1, min(2 * wait, LONGEST_WAIT_S)

    async def _try_once(self, request: HttpRequest, attempt: int, client: ClientConnection) -> bool:
        target = self.get_target()
        reader, upstream, host, prefix = await connect(target)
        try:
            upstream.write(request_head(request, host, prefix, attempt) + request.body)
            waiting = asyncio.ensure_future(read_reply(reader, upstream, request.upgrade))
            try:
                while not (await asyncio.wait({waiting}, timeout=TARGET_CHECK_S))[0]:
                    if self.give_up_s and self.get_target() != target:
                        raise NoAnswer("the gateway's address has changed")
            finally:
                waiting.cancel()
            reply = waiting.result()
            from_gateway = GATEWAY_HEADER in dict(reply.headers)
            if self.give_up_s and (reply.status == 404 or reply.status >= 500) and not from_gateway:
                raise NoAnswer(f"received a reply with status {reply.status}, but not from the gateway")
            if reply.status == 101:
                return await pass_socket(reply, reader, upstream, client)
            return await pass_reply(request, reply, reader, client.writer)
        finally:
            upstream.transport.abort()


async def connect(target: str) -> tuple[StreamReader, StreamWriter, str, str]:
    """Connect to the target. Return the reader, the writer, the value of the host header, and the prefix for request paths."""
    try:
        if target.startswith("unix:"):
            opening = asyncio.open_unix_connection(target[5:], limit=HEAD_LIMIT)
            reader, writer = await within(CONNECT_S, opening)
            return reader, writer, "localhost", ""
        url = urlsplit(target)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise NoAnswer("the gateway's address is not known yet")
        context = ssl.create_default_context() if url.scheme == "https" else None
        port = url.port or (443 if context else 80)
        opening = asyncio.open_connection(url.hostname, port, ssl=context, limit=HEAD_LIMIT)
        reader, writer = await within(CONNECT_S, opening)
    except (OSError, ValueError, asyncio.TimeoutError) as error:
        raise NoAnswer(f"cannot connect: {str(error) or type(error).__name__}") from error
    enable_tcp_keepalive(writer.get_extra_info("socket"))
    return reader, writer, url.netloc.rpartition("@")[2], url.path.rstrip("/")


def enable_tcp_keepalive(connection: socket.socket) -> None:
    """Make the operating system detect a peer that has disappeared without closing the connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def request_head(request: HttpRequest, host: str, prefix: str, attempt: int) -> bytes:
    # Headers listed under `connection` apply to this hop only.
    dropped = HOP_BY_HOP | {"host", "content-length", ATTEMPT_HEADER, *header_values(request.headers, "connection")}
    lines = [f"{request.method} {prefix}{request.path} HTTP/1.1", f"host: {host}"]
    lines += [f"{name}: {value}" for name, value in request.headers if name not in dropped]
    if request.body or request.method in ("POST", "PUT", "PATCH"):
        lines.append(f"content-length: {len(request.body)}")
    lines += UPGRADE if request.upgrade else ["connection: close"]
    return encode_head([*lines, f"{ATTEMPT_HEADER}: {attempt}"])


async def read_reply(reader: StreamReader, upstream: StreamWriter, upgrade: bool) -> HttpReply:
    try:
        await upstream.drain()
        while True:
            first, headers = parse_head(await reader.readuntil(b"\r\n\r\n"))
            version, _, rest = first.partition(" ")
            status, _, reason = rest.partition(" ")
            if not version.startswith("HTTP/1.") or not re.match(r"[1-9][0-9]{2}\Z", status):
                raise NoAnswer("the reply is not HTTP")
            if int(status) >= 200 or (upgrade and status == "101"):
                return HttpReply(int(status), reason, headers)
    except asyncio.IncompleteReadError as error:
        raise NoAnswer("the connection closed before a reply arrived") from error
    except (OSError, RequestRefused, asyncio.LimitOverrunError) as error:
        raise NoAnswer(f"no valid reply: {error}") from error


async def pass_reply(request: HttpRequest, reply: HttpReply, reader: StreamReader, writer: StreamWriter) -> bool:
    """Forward a reply as it arrives. Return whether the agent's connection can be reused."""
    chunked = "chunked" in header_values(reply.headers, "transfer-encoding")
    lengths = [] if chunked else header_values(reply.headers, "content-length")
    has_body = request.method != "HEAD" and reply.status not in (204, 304)
    as_chunks = chunked and not request.http_1_0
    # Only closing the connection marks the end of a reply with neither chunks nor a length, so the agent's connection is closed, too.
    keep_alive = request.keep_alive and (not has_body or as_chunks or bool(lengths))
    lines = [f"HTTP/1.1 {reply.status} {reply.reason}"]
    dropped = HOP_BY_HOP | ({"content-length"} if chunked else set())
    lines += [f"{name}: {value}" for name, value in reply.headers if name not in dropped]
    lines += ["transfer-encoding: chunked"] * as_chunks + ["connection: close"] * (not keep_alive)
    writer.write(encode_head(lines))
    try:
        if has_body and chunked:
            await pass_chunks(reader, writer, framed=as_chunks)
        elif has_body:
            await pass_bytes(reader, writer, int(lengths[0]) if lengths else None)
        await writer.drain()
    except (TruncatedReply, OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        if not as_chunks and not lengths:
            reset(writer)  # a normal close would look like a complete reply
        raise TruncatedReply from error
    return keep_alive


async def pass_socket(reply: HttpReply, reader: StreamReader, upstream: StreamWriter, client: ClientConnection) -> bool:
    """Forward the bytes of an accepted WebSocket both ways until one side closes it. Return False: the connection cannot be reused."""
    headers = [f"{name}: {value}" for name, value in reply.headers if name not in HOP_BY_HOP]
    client.writer.write(encode_head([f"HTTP/1.1 101 {reply.reason}", *headers, *UPGRADE]))
    await run_until_first(client.pass_all(upstream), pass_bytes(reader, client.writer, None))
    return False


async def pass_bytes(reader: StreamReader, writer: StreamWriter, count: Optional[int]) -> None:
    """Forward `count` bytes or, if `count` is None, everything until the connection closes."""
    while count is None or count > 0:
        data = await reader.read(CHUNK_BYTES if count is None else min(CHUNK_BYTES, count))
        if not data and count is None:
            return
        if not data:
            raise TruncatedReply
        writer.write(data)
        await writer.drain()
        count = None if count is None else count - len(data)


async def pass_chunks(reader: StreamReader, writer: StreamWriter, framed: bool) -> None:
    """Forward a chunked body. If `framed` is false, forward only the data, without the chunk sizes and the trailers."""
    write_frame = writer.write if framed else lambda data: None
    while True:
        line = await reader.readuntil(b"\r\n")
        size = chunk_size(line)
        if size is None:
            raise TruncatedReply
        write_frame(line)
        if not size:
            break
        await pass_bytes(reader, writer, size)
        write_frame(await reader.readexactly(2))
    while line != b"\r\n":  # trailers
        line = await reader.readuntil(b"\r\n")
        write_frame(line)


def refuse(writer: StreamWriter, refused: RequestRefused, request: Optional[HttpRequest] = None) -> bool:
    """Send an error reply. Return whether the connection can be reused. Omit `request` if it was not read completely."""
    keep_alive = request is not None and request.keep_alive
    body = json.dumps({"error": {"message": refused.message, "type": refused.kind, "code": refused.kind}}).encode()
    lines = [f"HTTP/1.1 {refused.status} Refused", "content-type: application/json", f"content-length: {len(body)}"]
    lines += [*filter(None, [refused.headers]), *([] if keep_alive else ["connection: close"])]
    writer.write(encode_head(lines) + (b"" if request is not None and request.method == "HEAD" else body))
    return keep_alive


def reset(writer: StreamWriter) -> None:
    """Abort a connection. Over TCP, the peer cannot mistake this for a normal close."""
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def within(seconds: Optional[float], work: Coroutine[Any, Any, Any]) -> Any:
    """Await a coroutine with a time limit. `asyncio.wait_for` is only a fallback: before Python 3.12, it can lose a cancellation."""
    if sys.version_info < (3, 11):
        return await asyncio.wait_for(work, seconds)
    async with asyncio.timeout(seconds):
        return await work


async def run_until_first(*works: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run coroutines until one of them ends, then cancel the others. Return the tasks of all coroutines."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return tasks


def read_target(path: str) -> str:
    with suppress(OSError), open(path) as file:
        return file.read().strip()
    return ""


async def run(options: argparse.Namespace) -> int:
    relay = HttpRelay(partial(read_target, options.target), give_up_s=options.give_up_s)
    relay.body_limit = options.body_limit
    listener = socket.create_server(("127.0.0.1", options.port))
    port = listener.getsockname()[1]
    await relay.listen(listener)
    write_atomically(options.port_file, str(port))
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    probing = asyncio.ensure_future(report_reached(port, options.reached_file))
    await stopped.wait()
    probing.cancel()
    await relay.close()
    return 0


def write_atomically(path: str, text: str) -> None:
    with open(path + ".new", "w") as file:
        file.write(text)
    os.rename(path + ".new", path)


async def report_reached(port: int, path: Optional[str]) -> None:
    """Write "reached", or why the gateway does not answer through this relay, to the file `path`. Do nothing if `path` is None."""
    if not path:
        return
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HEAD / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        first, headers = parse_head(await reader.readuntil(b"\r\n\r\n"))
        writer.close()
        result = REACHED if GATEWAY_HEADER in dict(headers) else f"the reply is not from the gateway: {first}"
    except (OSError, RequestRefused, asyncio.IncompleteReadError) as error:
        result = f"the relay does not answer: {error}"
    write_atomically(path, result)


def main() -> int:
    parser = argparse.ArgumentParser(description="Forward HTTP requests to the gateway whose address is in a file.")
    parser.add_argument("--target", help="the file with the gateway's address: unix:/path, http://… or https://…")
    parser.add_argument("--port", type=int, default=0, help="the port to listen on; 0 (the default) chooses a free one")
    parser.add_argument("--port-file", help="the file to write the port to once it is open")
    parser.add_argument("--reached-file", help="where to write 'reached', or why the gateway does not answer")
    parser.add_argument("--give-up-s", type=float, default=GIVE_UP_S, help="how long to retry a request, in seconds")
    parser.add_argument("--body-limit", type=int, default=BODY_LIMIT, help="the maximum size of a body, in bytes")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
