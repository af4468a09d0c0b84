"""HTTP/1.1 to one engine with as little in between as possible: a request, its reply as it comes, connections that are kept.

Every turn goes through here, and a general client costs as much as all of the turn's own bookkeeping. So this one knows nothing of cookies,
redirects, proxies or compression, which no engine that takes token ids needs; relays use aiohttp (`http.py`). The parsing is
httptools', as in the server.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

import httptools

_PAUSE_AT = 4 * 2**20  # bytes that were not fetched yet, from which on the engine has to wait
_MAX_HEAD = 2**16


class ConnectFailed(OSError):
    """There is no connection, and nothing was sent."""


class ConnectionCut(OSError):
    """The engine hung up: before its answer, or in the middle of it."""


class MalformedReply(Exception):
    """What came is no HTTP."""


class ConnectionPool:
    """Kept connections to one origin. The newest is used first, so that a quiet hour leaves few."""

    def __init__(
        self, url: str, *, connect_s: float, silence_s: float | None, keep_s: float, headers: Mapping[str, str]
    ) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._secure = parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        self._base = parts.path.rstrip("/")
        self._connect_s, self._silence_s, self._keep_s = connect_s, silence_s, keep_s
        fields = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*", **headers}
        if parts.username is not None and "Authorization" not in fields:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            fields["Authorization"] = f"Basic {base64.b64encode(login).decode()}"
        self._fields = _encode_headers(fields)
        self._idle: list[tuple[_Connection, float]] = []
        self._all: set[_Connection] = set()

    async def ask(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        """Sends, and waits for the head of the answer."""
        head = b"".join(
            (
                f"{method} {self._base}{path} HTTP/1.1\r\n".encode("ascii"),
                self._fields,
                _encode_headers(headers),
                b"Content-Length: %d\r\n\r\n" % len(body),
            )
        )
        connection = self._kept() or await self._connected()
        response = connection.send(head, body, self._silence_s)
        try:
            await response.begun()
        except BaseException:
            response.close()
            raise
        return response

    def close(self) -> None:
        for connection in list(self._all):
            connection.abort()
        self._idle.clear()

    def _kept(self) -> _Connection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection, since = self._idle.pop()
            if connection.open and now - since < self._keep_s:
                return connection
            connection.abort()
        return None

    async def _connected(self) -> _Connection:
        loop = asyncio.get_running_loop()
        secure = ssl.create_default_context() if self._secure else None
        connection = _Connection(self)
        try:
            async with asyncio.timeout(self._connect_s):
                await loop.create_connection(lambda: connection, self._host, self._port, ssl=secure)
        except TimeoutError:
            connection.abort()  # it may have been made in the last moment
            raise ConnectFailed("it could not be reached in time") from None
        except ssl.SSLCertVerificationError as error:
            raise ConnectFailed("its certificate is not to be trusted") from error
        except ssl.SSLError as error:
            raise ConnectFailed("it does not speak TLS as expected") from error
        except OSError as error:
            raise ConnectFailed(error.errno, error.strerror) from error
        except BaseException:
            connection.abort()  # likewise
            raise
        return connection

    def made(self, connection: _Connection) -> None:
        self._all.add(connection)

    def lost(self, connection: _Connection) -> None:
        self._all.discard(connection)

    def back(self, connection: _Connection) -> None:
        """Its reply was read to the end: it can serve another call."""
        now = asyncio.get_running_loop().time()
        while self._idle and now - self._idle[0][1] >= self._keep_s:
            self._idle.pop(0)[0].abort()
        self._idle.append((connection, now))


class Response:
    """One answer, as it comes."""

    def __init__(self, connection: _Connection, silence_s: float | None) -> None:
        self.status = 0
        self._connection = connection
        self.parts: list[bytes] = []  # of the body, that were not fetched yet
        self._size = 0  # of what was read meanwhile
        self._ended = False
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._silence_s = silence_s
        self._heard = self._loop.time()
        self._watch = self._loop.call_later(silence_s, self._silent) if silence_s is not None else None

    @property
    def over(self) -> bool:
        """All of it has come."""
        return self._ended

    async def begun(self) -> None:
        while not self.status:
            await self._more()

    async def readany(self) -> bytes:
        """What has come since; b"" at the end."""
        while not self.parts and not self._ended:
            await self._more()
        if not self.parts:
            return b""
        data = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
        self.parts.clear()
        if self._size > _PAUSE_AT:
            self._connection.go_on()
        self._size = 0
        return data

    async def read(self) -> bytes:
        parts = []
        while data := await self.readany():
            parts.append(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Ends the connection, unless all was heard: so an engine learns that it must abort. Else it serves another call already."""
        self._unwatch()
        if self._connection.response is self:
            self._connection.abort()

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # ── told by the connection ──────────────────────────────────────────────────────────────────────────────────

    def head(self, status: int) -> None:
        self.status = status

    def came(self, size: int) -> None:
        """A read is over; what it held is among the parts."""
        self._size += size
        if self._size > _PAUSE_AT and self.parts and not self._ended:
            self._connection.wait()
        self._wake()

    def end(self) -> None:
        self._ended = True
        self._unwatch()
        self._wake()

    def fail(self, error: BaseException) -> None:
        if not self._ended:
            self._error = self._error or error
            self._unwatch()
            self._wake()

    def heard(self) -> None:
        self._heard = self._loop.time()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _silent(self) -> None:
        assert self._silence_s is not None
        rest = self._heard + self._silence_s - self._loop.time()
        if rest > 0:
            self._watch = self._loop.call_later(rest, self._silent)
        elif self._connection.waiting:  # it is we who do not listen
            self._watch = self._loop.call_later(self._silence_s, self._silent)
        else:
            self.fail(TimeoutError("nothing came for too long"))
            self._connection.abort()

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None


class _Connection(asyncio.Protocol):
    """One connection. `response` is the answer that it waits for or receives, None while it is idle."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport
        self.response: Response | None = None
        self.open = False
        self.waiting = False  # for our own reader
        self._parser: httptools.HttpResponseParser
        self._read = 0
        self._until_end = False  # the body ends with the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as it always is
        self._transport = transport
        self.open = True
        self._pool.made(self)

    def send(self, head: bytes, body: bytes, silence_s: float | None) -> Response:
        self.response = Response(self, silence_s)
        self.on_body = self.response.parts.append  # called by the parser for each chunk, of which a stream has many
        self._parser = httptools.HttpResponseParser(self)
        self._read = 0
        self._until_end = True
        self._transport.writelines([head, body])
        return self.response

    def abort(self) -> None:
        if self.open:
            self.open = False
            self._transport.abort()

    def wait(self) -> None:
        if not self.waiting and self.open:
            self.waiting = True
            self._transport.pause_reading()

    def go_on(self) -> None:
        if self.waiting and self.open:
            self.waiting = False
            self._transport.resume_reading()

    # ── asyncio's ───────────────────────────────────────────────────────────────────────────────────────────────

    def data_received(self, data: bytes) -> None:
        response = self.response
        if response is None:  # nobody asked
            self.abort()
            return
        response.heard()
        self._read += len(data)
        try:
            self._parser.feed_data(data)
            response.came(len(data))
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            response.fail(MalformedReply(str(error)))
            self.abort()
            return
        if not response.status and self._read > _MAX_HEAD:
            response.fail(MalformedReply("the head of its answer does not end"))
            self.abort()

    def eof_received(self) -> None:
        """The transport closes by itself."""

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        self._pool.lost(self)
        response, self.response = self.response, None
        if response is None:
            return
        if response.status and self._until_end and error is None:
            response.end()
        else:
            response.fail(ConnectionCut("the reply was cut off" if response.status else "it hung up without an answer"))

    # ── the parser's ────────────────────────────────────────────────────────────────────────────────────────────

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._until_end = False

    def on_message_begin(self) -> None:
        if self.response is None:
            raise MalformedReply("it answered twice")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.response is not None and status >= 200:
            self.response.head(status)

    def on_message_complete(self) -> None:
        response = self.response
        if response is None or not response.status:
            self._until_end = True  # "100 Continue" and its like: the answer is still to come
            return
        self.response = None
        response.end()
        heard_out = self._transport.get_write_buffer_size() == 0  # else it answered before it had read all
        if self._parser.should_keep_alive() and self.open and heard_out and not self.waiting:
            self._pool.back(self)
        else:
            self._transport.close()


def _encode_headers(headers: Mapping[str, str]) -> bytes:
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    written = "".join(lines).encode("latin-1")
    if written.count(b"\n") != len(lines) or written.count(b"\r") != len(lines):
        raise ValueError("a header must not hold a line break")
    return written
