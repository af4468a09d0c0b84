"""The way out of a sandbox: takes an agent's model calls on 127.0.0.1 and gets each of them answered by the gateway.

Runs inside as `python3 relay.py --target FILE --port 0 --port-file FILE` (`wayout.py` starts it; `relay.mjs` is its twin for images
that have Node and no Python). The host's `door.py` uses the same machinery. FILE names the target and is read for every attempt:
`unix:/path`, `http://host:port/prefix` or `https://…`; so a tunnel that got a new URL is used at once.

A request is taken whole, then sent until somebody answers it: connections that fail or end before a reply are tried again, and
so are 404 and 5xx replies without the gateway's own header `x-turngate` (a dead tunnel answers by itself). A reply is handed on
as it comes. Cut in the middle, it is cut for the agent too; and an agent that hangs up ends the call upstream at once.

One file, standard library only, Python 3.8 and newer.
"""

# Python 3.8, and files that depend on little:
# ruff: noqa: PTH104, UP035, UP041

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
from typing import Any, Callable, NamedTuple, Optional
from urllib.parse import urlsplit

GATEWAY_HEADER = "x-turngate"  # is on every reply of the gateway
ATTEMPT_HEADER = "x-turngate-attempt"
REACHED = "reached"  # in the file that says so
IDEMPOTENCY_HEADER = "idempotency-key"
HEAD_LIMIT = 256 * 1024
BODY_LIMIT = 64 * 1024 * 1024
CHUNK_BYTES = 64 * 1024
GIVE_UP_S = 600.0
CONNECT_S = 15.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
SMALL_BODY = (
    64 * 1024
)  # a body that is read also for a request that will be refused, so that its connection can be used again
LINGER_S = 10.0  # for the rest of a body that nobody wants
LOOK_S = 1.0  # how often a call that waits for its reply looks whether the target is still the same
HOP_BY_HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "expect"}
TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
PATH = re.compile(r"/[!-~]*\Z")
DIGITS = re.compile(r"[0-9]{1,15}\Z")


class HttpRequest(NamedTuple):
    method: str
    path: str  # and query, as sent
    headers: list[tuple[str, str]]  # names in lower case
    body: bytes
    old: bool  # HTTP/1.0
    keep: bool  # the connection, for another request


class HttpReply(NamedTuple):
    status: int
    reason: str
    headers: list[tuple[str, str]]


class RequestRefused(Exception):
    """Answered by ourselves."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", headers: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.headers = status, message, kind, headers
        self.unread = 0  # bytes of the body that were not read; the sender would take a plain end for a broken line


class NoAnswer(Exception):
    """The gateway has not answered; the same request may be sent again."""


class TruncatedReply(Exception):
    """A reply has ended before its end."""


class ClientDisconnected(Exception):
    """The agent has gone."""


# ---- reading what an agent sends ----


class ClientConnection:
    """An agent's end of a connection, read ahead: so that we notice when it hangs up while its call is under way."""

    def __init__(self, reader: asyncio.StreamReader, stall_s: Optional[float] = None) -> None:
        self._reader = reader
        self._stall_s = stall_s
        self._buffer = bytearray()
        self._came = asyncio.Event()
        self._room = asyncio.Event()
        self._wanted = HEAD_LIMIT  # bytes, beyond which we do not read ahead
        self.gone = asyncio.Event()

    async def pump(self) -> None:
        try:
            while True:
                while len(self._buffer) >= self._wanted:
                    self._room.clear()
                    await self._room.wait()
                data = await self._reader.read(CHUNK_BYTES)
                if not data:
                    return
                self._buffer += data
                self._came.set()
        except OSError:
            pass
        finally:
            self.gone.set()
            self._came.set()

    async def _have(self, enough: Callable[[], bool], wanted: int) -> None:
        self._wanted = max(wanted, HEAD_LIMIT)
        self._room.set()
        while not enough():
            if self.gone.is_set():
                raise ClientDisconnected
            self._came.clear()
            try:
                await asyncio.wait_for(self._came.wait(), self._stall_s)
            except asyncio.TimeoutError:
                if not self._buffer and wanted == HEAD_LIMIT:
                    raise ClientDisconnected from None  # between two requests
                raise RequestRefused(408, "the request stalled") from None

    async def discard(self, count: int) -> None:
        """Read the rest of a body and forget it."""
        deadline = time.monotonic() + LINGER_S
        while True:
            count -= len(self._take(min(len(self._buffer), count)))
            left = deadline - time.monotonic()
            if count <= 0 or left <= 0 or self.gone.is_set():
                return
            self._came.clear()
            try:
                await asyncio.wait_for(self._came.wait(), left)
            except asyncio.TimeoutError:
                return

    def _take(self, count: int) -> bytes:
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        self._room.set()
        return data

    async def exactly(self, count: int) -> bytes:
        await self._have(lambda: len(self._buffer) >= count, count + CHUNK_BYTES)
        return self._take(count)

    async def until(self, mark: bytes, limit: int) -> bytes:
        """Up to and with the mark."""
        await self._have(lambda: mark in self._buffer or len(self._buffer) > limit, limit + CHUNK_BYTES)
        end = self._buffer.find(mark)
        if end < 0 or end > limit:
            raise RequestRefused(431, "the request's head is too large")
        return self._take(end + len(mark))

    async def request(
        self,
        body_limit: int,
        go_on: Callable[[], None],
        look: Callable[[str, str], None] = lambda method, path: None,
        hold: Callable[[int], None] = lambda count: None,
    ) -> HttpRequest:
        """The next request. `go_on` tells a client to send the body that it holds back. `look` sees method and path before a
        body that is not small is read, `hold` how many bytes will be; both may raise `Refused`."""
        await self._have(lambda: bool(self._buffer.lstrip(b"\r\n")), HEAD_LIMIT)
        self._take(len(self._buffer) - len(self._buffer.lstrip(b"\r\n")))  # some clients send an empty line before
        first, headers = parse_head(await self.until(b"\r\n\r\n", HEAD_LIMIT))
        words = first.split(" ")
        if len(words) != 3 or not TOKEN.match(words[0]) or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
            raise RequestRefused(400, "that is not an HTTP/1.1 request")
        method, path, version = words
        if not PATH.match(path):
            raise RequestRefused(400, "a request's target must be a path")
        if [name for name, _ in headers].count("host") > 1:
            raise RequestRefused(400, "a request has one host")
        length = _length(headers, body_limit)
        try:
            if length is None or length > SMALL_BODY:
                look(method, path)
            hold(length or 0)
        except RequestRefused as refused:
            refused.unread = body_limit if length is None else length
            raise
        if "100-continue" in values(headers, "expect"):
            go_on()
        body = await self._chunks(body_limit, hold) if length is None else await self.exactly(length)
        old = version == "HTTP/1.0"
        close = "close" in values(headers, "connection") or (old and "keep-alive" not in values(headers, "connection"))
        return HttpRequest(method, path, headers, body, old, not close)

    async def _chunks(self, limit: int, hold: Callable[[int], None]) -> bytes:
        body = bytearray()
        while True:
            size = chunk_size(await self.until(b"\r\n", 4096))
            if size is None:
                raise RequestRefused(400, "a chunk has no size")
            if len(body) + size > limit:
                raise RequestRefused(413, f"the body is larger than {limit} bytes")
            if not size:
                break
            hold(size)
            body += await self.exactly(size)
            if await self.exactly(2) != b"\r\n":
                raise RequestRefused(400, "a chunk has no end")
        while await self.until(b"\r\n", HEAD_LIMIT) != b"\r\n":  # trailers
            pass
        return bytes(body)


def _length(headers: list[tuple[str, str]], limit: int) -> Optional[int]:
    """Of the body; None: it comes in chunks."""
    codings, lengths = values(headers, "transfer-encoding"), set(values(headers, "content-length"))
    if codings:
        if codings != ["chunked"] or lengths:
            raise RequestRefused(400, "a body is chunked or has a length, not both")
        return None
    if not lengths:
        return 0
    length = lengths.pop()
    if lengths or not DIGITS.match(length):
        raise RequestRefused(400, "the body's length is no number")
    if int(length) > limit:
        refused = RequestRefused(413, f"the body is larger than {limit} bytes")
        refused.unread = int(length)
        raise refused
    return int(length)


def parse_head(head: bytes) -> tuple[str, list[tuple[str, str]]]:
    """The first line and the headers; strictly, because what two programs read differently can be used against one of them."""
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


def values(headers: list[tuple[str, str]], name: str) -> list[str]:
    """The values of a header, which may come more than once or as a list, in lower case."""
    return [one.strip().lower() for key, value in headers if key == name for one in value.split(",") if one.strip()]


def chunk_size(line: bytes) -> Optional[int]:
    digits = line.split(b";")[0].strip()
    return int(digits, 16) if re.match(rb"[0-9A-Fa-f]{1,12}\Z", digits) else None


def _bound(path: str, mode: int) -> socket.socket:
    """A unix socket with that mode from its first moment. The umask is the whole process's: it is never stricter than it was for longer
    than this, or the folders that somebody else makes meanwhile could not be entered."""
    own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            os.fchmod(own.fileno(), mode)  # Linux: what is bound has the socket's mode, less the umask
            mask = 0
        except OSError:
            mask = 0o777 & ~mode
        before = os.umask(mask)
        try:
            own.bind(path)
        finally:
            os.umask(before)
    except BaseException:
        own.close()
        raise
    return own


# ---- getting it answered ----


class HttpRelay:
    """Forwards requests. `target` is asked before each attempt; `admit` may raise `Refused`, and so may `look`, before a large body
    is read; `give_up_s=0`: one attempt, and whatever is answered counts. `connections`, `held` (bytes of bodies) and `stall_s`:
    the most at a time, and the longest silence in a request."""

    def __init__(
        self,
        target: Callable[[], str],
        *,
        admit: Callable[[HttpRequest], HttpRequest] = lambda request: request,
        look: Callable[[str, str], None] = lambda method, path: None,
        give_up_s: float = GIVE_UP_S,
        body_limit: int = BODY_LIMIT,
        connections: int = sys.maxsize,
        held: int = sys.maxsize,
        stall_s: Optional[float] = None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.target = target
        self.admit = admit
        self.give_up_s = give_up_s
        self.body_limit = body_limit
        self.look = look
        self.connections = connections
        self.held = held
        self.stall_s = stall_s
        self.log = log
        self._held = 0
        self._server: Optional[asyncio.AbstractServer] = None
        self._connections: set[asyncio.Future[Any]] = set()

    async def listen(self, host: str, port: int) -> int:
        """On a TCP port; 0: any. The port."""
        self._server = await asyncio.start_server(self._accept, host, port, limit=CHUNK_BYTES, start_serving=False)
        await self._server.start_serving()
        return int(self._server.sockets[0].getsockname()[1])

    async def listen_unix(self, path: str, mode: int) -> None:
        own = _bound(path, mode)
        # Nobody is listened to before `close` knows of the server. Were it cancelled in between, the event loop would go on watching the
        # socket's number, and be deaf to whatever has it next.
        try:
            self._server = await asyncio.start_unix_server(
                self._accept, sock=own, limit=CHUNK_BYTES, start_serving=False
            )
        except BaseException:
            own.close()
            raise
        await self._server.start_serving()

    async def close(self) -> None:
        if self._server:
            self._server.close()
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= self.connections:  # a relay tries again
            refuse(writer, RequestRefused(503, "too many connections", "overloaded"), close=True)
            writer.close()
            return
        task = asyncio.ensure_future(self._connection(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inbound = ClientConnection(reader, self.stall_s)
        pump = asyncio.ensure_future(inbound.pump())
        try:
            while await self._one(inbound, writer):
                pass
            await writer.drain()
        except RequestRefused as refused:
            refuse(writer, refused, close=True)
            await inbound.discard(refused.unread)
        except (ClientDisconnected, TruncatedReply, OSError):
            pass
        finally:
            pump.cancel()
            writer.close()

    async def _one(self, inbound: ClientConnection, writer: asyncio.StreamWriter) -> bool:
        """Answer one request. Whether the connection may be used for another."""
        mine = 0

        def hold(count: int) -> None:
            nonlocal mine
            if self._held + count > self.held:
                raise RequestRefused(503, "too many large requests at once", "overloaded")
            mine, self._held = mine + count, self._held + count

        try:
            go_on = b"HTTP/1.1 100 Continue\r\n\r\n"
            request = await inbound.request(self.body_limit, lambda: writer.write(go_on), self.look, hold)
            return await self._handle(request, inbound, writer)
        finally:
            self._held -= mine

    async def _handle(self, request: HttpRequest, inbound: ClientConnection, writer: asyncio.StreamWriter) -> bool:
        try:
            request = self.admit(request)
        except RequestRefused as refused:
            refuse(writer, refused, close=not request.keep, bodiless=request.method == "HEAD")
            return request.keep
        work = asyncio.ensure_future(self._answer(request, writer))
        gone = asyncio.ensure_future(inbound.gone.wait())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientDisconnected
            return work.result()
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait({work})

    async def _answer(self, request: HttpRequest, writer: asyncio.StreamWriter) -> bool:
        if IDEMPOTENCY_HEADER not in dict(request.headers):
            request = request._replace(headers=[*request.headers, (IDEMPOTENCY_HEADER, secrets.token_hex(16))])
        deadline = time.monotonic() + self.give_up_s
        attempt, wait = 1, FIRST_WAIT_S
        while True:
            try:
                return await self._attempt(request, attempt, writer)
            except NoAnswer as unanswered:
                self.log(f"attempt {attempt}: {unanswered}")
                pause = wait * random.uniform(0.5, 1)
                if time.monotonic() + pause >= deadline:
                    status = 503 if self.give_up_s else 502
                    failed = RequestRefused(
                        status, f"the gateway cannot be reached: {unanswered}", "gateway_unreachable"
                    )
                    refuse(writer, failed, close=not request.keep, bodiless=request.method == "HEAD")
                    return request.keep
            await asyncio.sleep(pause)
            attempt, wait = attempt + 1, min(2 * wait, LONGEST_WAIT_S)

    async def _attempt(self, request: HttpRequest, attempt: int, writer: asyncio.StreamWriter) -> bool:
        target = self.target()
        reader, upstream, host, prefix = await connect(target)
        try:
            upstream.write(request_head(request, host, prefix, attempt) + request.body)
            waiting = asyncio.ensure_future(read_reply(reader, upstream))
            try:
                while not (await asyncio.wait({waiting}, timeout=LOOK_S))[0]:
                    if self.give_up_s and self.target() != target:
                        raise NoAnswer("the way to the gateway has changed")
            finally:
                waiting.cancel()
            reply = waiting.result()
            if (
                self.give_up_s
                and (reply.status == 404 or reply.status >= 500)
                and GATEWAY_HEADER not in dict(reply.headers)
            ):
                raise NoAnswer(f"{reply.status} that the gateway did not send")
            return await hand_on(request, reply, reader, writer)
        finally:
            upstream.transport.abort()


async def connect(target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str, str]:
    """A connection to the target, the host to name in the request, and what its paths begin with."""
    try:
        if target.startswith("unix:"):
            opening = asyncio.open_unix_connection(target[5:], limit=HEAD_LIMIT)
            reader, writer = await asyncio.wait_for(opening, CONNECT_S)
            return reader, writer, "localhost", ""
        url = urlsplit(target)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise NoAnswer("there is no target yet")
        secure = ssl.create_default_context() if url.scheme == "https" else None
        port = url.port or (443 if secure else 80)
        joining = asyncio.open_connection(url.hostname, port, ssl=secure, limit=HEAD_LIMIT)
        reader, writer = await asyncio.wait_for(joining, CONNECT_S)
    except (OSError, ValueError, asyncio.TimeoutError) as error:
        raise NoAnswer(f"cannot connect: {error or type(error).__name__}") from error
    keep_alive(writer.get_extra_info("socket"))
    return reader, writer, url.netloc.rpartition("@")[2], url.path.rstrip("/")


def keep_alive(connection: socket.socket) -> None:
    """Let the system find out that the other side is no more, though nobody said so."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def request_head(request: HttpRequest, host: str, prefix: str, attempt: int) -> bytes:
    ours = {"host", "content-length", ATTEMPT_HEADER}
    named = set(values(request.headers, "connection"))  # headers for this hop alone, as the client says
    lines = [f"{request.method} {prefix}{request.path} HTTP/1.1", f"host: {host}"]
    lines += [
        f"{name}: {value}"
        for name, value in request.headers
        if name not in HOP_BY_HOP and name not in ours and name not in named
    ]
    if request.body or request.method in ("POST", "PUT", "PATCH"):
        lines.append(f"content-length: {len(request.body)}")
    lines += [f"{ATTEMPT_HEADER}: {attempt}", "connection: close"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def read_reply(reader: asyncio.StreamReader, upstream: asyncio.StreamWriter) -> HttpReply:
    try:
        await upstream.drain()
        while True:
            first, headers = parse_head(await reader.readuntil(b"\r\n\r\n"))
            version, _, rest = first.partition(" ")
            status, _, reason = rest.partition(" ")
            if not version.startswith("HTTP/1.") or not re.match(r"[1-9][0-9]{2}\Z", status):
                raise NoAnswer("the reply is not HTTP")
            if int(status) >= 200:
                return HttpReply(int(status), reason, headers)
    except asyncio.IncompleteReadError as error:
        raise NoAnswer("the connection ended before a reply") from error
    except (OSError, RequestRefused, asyncio.LimitOverrunError) as error:
        raise NoAnswer(f"no reply: {error}") from error


# ---- handing the reply on ----


async def hand_on(
    request: HttpRequest, reply: HttpReply, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bool:
    """Pass a reply through as it comes. Whether the agent's connection may be used for another request."""
    chunked = "chunked" in values(reply.headers, "transfer-encoding")
    lengths = [] if chunked else values(reply.headers, "content-length")
    bodiless = request.method == "HEAD" or reply.status in (204, 304)
    as_chunks = chunked and not request.old
    # Without either, the end of the connection is the end of the reply, also for the agent.
    keep = request.keep and (bodiless or as_chunks or bool(lengths))
    lines = [f"HTTP/1.1 {reply.status} {reply.reason}"]
    dropped = HOP_BY_HOP | ({"content-length"} if chunked else set())
    lines += [f"{name}: {value}" for name, value in reply.headers if name not in dropped]
    lines += ["transfer-encoding: chunked"] * as_chunks + ["connection: close"] * (not keep)
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
    try:
        if bodiless:
            pass
        elif chunked:
            await pass_chunks(reader, writer, framed=as_chunks)
        elif lengths:
            await pass_bytes(reader, writer, int(lengths[0]))
        else:
            await pass_bytes(reader, writer, None)
        await writer.drain()
    except (TruncatedReply, OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        if not as_chunks and not lengths:
            reset(writer)  # a plain end would look like a good one
        raise TruncatedReply from error
    return keep


async def pass_bytes(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    count: Optional[int],
) -> None:
    """So many bytes; None: to the end."""
    while count is None or count > 0:
        data = await reader.read(CHUNK_BYTES if count is None else min(CHUNK_BYTES, count))
        if not data:
            if count is None:
                return
            raise TruncatedReply
        writer.write(data)
        await writer.drain()
        if count is not None:
            count -= len(data)


async def pass_chunks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, framed: bool) -> None:
    """A chunked body; with its frame as it is, or bare."""

    def frame(data: bytes) -> None:
        if framed:
            writer.write(data)

    while True:
        line = await reader.readuntil(b"\r\n")
        size = chunk_size(line)
        if size is None:
            raise TruncatedReply
        frame(line)
        if not size:
            break
        await pass_bytes(reader, writer, size)
        frame(await reader.readexactly(2))
    while line != b"\r\n":  # trailers
        line = await reader.readuntil(b"\r\n")
        frame(line)


def refuse(writer: asyncio.StreamWriter, refused: RequestRefused, *, close: bool, bodiless: bool = False) -> None:
    error = {"message": refused.message, "type": refused.kind, "code": refused.kind}
    body = json.dumps({"error": error}).encode()
    lines = [f"HTTP/1.1 {refused.status} Refused", "content-type: application/json"]
    lines += [
        f"content-length: {len(body)}",
        *filter(None, [refused.headers]),
        *(["connection: close"] if close else []),
    ]
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (b"" if bodiless else body))


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection so that the other side cannot take it for a good end."""
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


# ---- inside a sandbox ----


def file_target(path: str) -> Callable[[], str]:
    def read() -> str:
        try:
            with open(path) as file:
                return file.read().strip()
        except OSError:
            return ""

    return read


async def run(options: argparse.Namespace) -> int:
    relay = HttpRelay(
        file_target(options.target),
        give_up_s=options.give_up_s,
        body_limit=options.body_limit,
        log=lambda line: print(line, file=sys.stderr, flush=True),
    )
    port = await relay.listen("127.0.0.1", options.port)
    _say(options.port_file, str(port))
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    asked = asyncio.ensure_future(_reached(port, options.reached_file)) if options.reached_file else None
    await ended.wait()
    if asked is not None:
        asked.cancel()
    await relay.close()
    return 0


def _say(path: str, text: str) -> None:
    """A file that is there has all of it."""
    with open(path + ".new", "w") as file:
        file.write(text)
    os.rename(path + ".new", path)


async def _reached(port: int, path: str) -> None:
    """Ask ourselves whether the gateway answers, and write down what came of it: another process to ask would take longer to start."""
    _say(path, await _unreached(port) or REACHED)


async def _unreached(port: int) -> str:
    """Why the gateway cannot be reached through a relay; empty when it answered, with whatever status."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HEAD / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        first, headers = parse_head(await reader.readuntil(b"\r\n\r\n"))
        writer.close()
    except (OSError, RequestRefused, asyncio.IncompleteReadError) as error:
        return f"the relay does not answer: {error}"
    return "" if GATEWAY_HEADER in dict(headers) else f"the gateway does not answer: {first}"


async def probe(port: int) -> int:
    """The same of a relay that runs elsewhere: 0 when the gateway answered."""
    why = await _unreached(port)
    if why:
        print(why, file=sys.stderr)
    return 1 if why else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Forward HTTP requests to the gateway named in a file.")
    parser.add_argument("--target", help="the file that names where to: unix:/path, http://… or https://…")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--port-file", help="gets the port, once it is open")
    parser.add_argument("--reached-file", help="gets a word when the gateway has answered, or why it does not")
    parser.add_argument("--give-up-s", type=float, default=GIVE_UP_S)
    parser.add_argument("--body-limit", type=int, default=BODY_LIMIT)
    parser.add_argument("--probe", type=int, metavar="PORT", help="ask a running relay whether the gateway answers")
    options = parser.parse_args()
    return asyncio.run(probe(options.probe) if options.probe else run(options))


if __name__ == "__main__":
    sys.exit(main())
