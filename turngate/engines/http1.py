"""A minimal HTTP/1.1 client for one engine, with keep-alive and streamed replies.

Every turn on an HTTP engine that accepts token ids goes through this client. Replacing aiohttp with it saved about a tenth of the gateway's
CPU time per turn (`docs/decisions/0009-speed.md`). The client does not support cookies, redirects, proxies or compression, because these
engines do not need them. Relays use aiohttp (`http.py`). Like the server, this client parses with httptools.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

import httptools

# Reading from the engine pauses above this many unread bytes, because handling more at once would block the event loop for too long.
_PAUSE_AT = 2**20
_MAX_HEAD = 2**16  # bytes
_NAME_MISMATCH = (62, 63, 64)  # OpenSSL's codes for a certificate of another host name, email or IP address


class ConnectFailed(OSError):
    """The connection failed before any part of the request was sent."""


class ConnectionCut(OSError):
    """The connection ended before the response was complete."""


class MalformedReply(Exception):
    """The reply cannot be parsed as one HTTP response, or its headers are too long."""


class ConnectionPool:
    """Keep-alive connections to one origin. The most recently used connection is reused first, so that surplus connections expire."""

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

    async def request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        """Send a request, and wait for the head of the reply."""
        head = b"".join(
            (
                f"{method} {self._base}{path} HTTP/1.1\r\n".encode("ascii"),
                self._fields,
                _encode_headers(headers),
                b"Content-Length: %d\r\n\r\n" % len(body),
            )
        )
        connection = self._reuse() or await self._connect()
        response = connection.send(head, body, self._silence_s)
        try:
            await response.wait_for_head()
        except BaseException:
            response.close()
            raise
        return response

    def close(self) -> None:
        for connection in list(self._all):
            connection.abort()
        self._idle.clear()

    def _reuse(self) -> _Connection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection, since = self._idle.pop()
            if connection.open and now - since < self._keep_s:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        secure = ssl.create_default_context() if self._secure else None
        connection = _Connection(self)
        try:
            async with asyncio.timeout(self._connect_s):
                await loop.create_connection(lambda: connection, self._host, self._port, ssl=secure)
        except TimeoutError:
            connection.abort()  # the connection may have been established at the last moment
            raise ConnectFailed("the connection attempt timed out") from None
        except ssl.SSLCertVerificationError as error:
            # The verifier's own message would contain the host name, which an agent must not see.
            reason = "it is for another host name" if error.verify_code in _NAME_MISMATCH else error.verify_message
            raise ConnectFailed(f"the server's TLS certificate could not be verified: {reason}") from error
        except ssl.SSLError as error:
            raise ConnectFailed("the TLS handshake failed") from error
        except OSError as error:
            raise ConnectFailed(error.errno, error.strerror) from error
        except BaseException:
            connection.abort()
            raise
        return connection

    def add(self, connection: _Connection) -> None:
        self._all.add(connection)

    def remove(self, connection: _Connection) -> None:
        self._all.discard(connection)

    def release(self, connection: _Connection) -> None:
        """Return a connection to the pool once its whole reply has arrived."""
        now = asyncio.get_running_loop().time()
        while self._idle and now - self._idle[0][1] >= self._keep_s:
            self._idle.pop(0)[0].abort()
        self._idle.append((connection, now))


class Response:
    """A reply that can be read as it arrives."""

    def __init__(self, connection: _Connection, silence_s: float | None) -> None:
        self.status = 0
        self._connection = connection
        self.parts: list[bytes] = []  # unread parts of the body
        self._size = 0  # bytes received since the last read
        self._ended = False
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._silence_s = silence_s
        self._last_read = self._loop.time()
        self._watch = self._loop.call_later(silence_s, self._check_silence) if silence_s is not None else None

    @property
    def over(self) -> bool:
        """Whether the whole reply has arrived."""
        return self._ended

    async def wait_for_head(self) -> None:
        while not self.status:
            await self._wait_more()

    async def readany(self) -> bytes:
        """Wait for data if there is none. Return the data received since the last read, or b"" at the end of the reply."""
        while not self.parts and not self._ended:
            await self._wait_more()
        if not self.parts:
            return b""
        data = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
        self.parts.clear()
        if self._size > _PAUSE_AT:
            self._connection.resume()
        self._size = 0
        return data

    async def read(self) -> bytes:
        parts = []
        while data := await self.readany():
            parts.append(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Close the connection unless the reply is complete. Closing it tells the engine to abort."""
        self._unwatch()
        if self._error is not None:
            # Replace the error, because its traceback refers to this response. Any other reader then fails with the new error.
            self._error = ConnectionCut("the response was closed")
        if self._connection.response is self:
            self._connection.abort()

    async def _wait_more(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # ── called by the connection ─────────────────────────────────────────────────────────────────────────────────

    def head(self, status: int) -> None:
        self.status = status

    def on_read(self, size: int) -> None:
        """Handle `size` bytes that the connection has received. The parser has already added their content to `parts`."""
        self._size += size
        if self._size > _PAUSE_AT and self.parts and not self._ended:
            self._connection.pause()
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

    def touch(self) -> None:
        self._last_read = self._loop.time()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check_silence(self) -> None:
        assert self._silence_s is not None
        remaining = self._last_read + self._silence_s - self._loop.time()
        if remaining > 0:
            self._watch = self._loop.call_later(remaining, self._check_silence)
        elif self._connection.paused:  # our own reader is slow
            self._watch = self._loop.call_later(self._silence_s, self._check_silence)
        else:
            self.fail(TimeoutError(f"no data for {self._silence_s:g} s"))
            self._connection.abort()

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None


class _Connection(asyncio.Protocol):
    """One connection to the engine. `response` is the reply being awaited or received, or None while the connection is idle."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport
        self.response: Response | None = None
        self.open = False
        self.paused = False  # whether reading is paused until our own reader catches up
        self._parser = httptools.HttpResponseParser(self)
        self._read = 0
        self._until_end = False  # whether the body ends when the connection closes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # always a Transport
        self._transport = transport
        self.open = True
        self._pool.add(self)

    def send(self, head: bytes, body: bytes, silence_s: float | None) -> Response:
        self.response = Response(self, silence_s)
        self.on_body = self.response.parts.append  # called by the parser for each chunk
        self._parser = httptools.HttpResponseParser(self)
        self._read = 0
        self._until_end = True
        self._transport.writelines([head, body])
        return self.response

    def abort(self) -> None:
        if self.open:
            self.open = False
            self._transport.abort()

    def pause(self) -> None:
        if not self.paused and self.open:
            self.paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self.paused and self.open:
            self.paused = False
            self._transport.resume_reading()

    # ── asyncio callbacks ─────────────────────────────────────────────────────────────────────────────────────────────────

    def data_received(self, data: bytes) -> None:
        response = self.response
        if response is None:  # unrequested data
            self.abort()
            return
        response.touch()
        self._read += len(data)
        try:
            self._parser.feed_data(data)
            response.on_read(len(data))
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            response.fail(MalformedReply(str(error)))
            self.abort()
            return
        if not response.status and self._read > _MAX_HEAD:
            response.fail(MalformedReply("the response headers are too long"))
            self.abort()

    def eof_received(self) -> None:
        """Return None, so that the transport closes itself."""

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        self._pool.remove(self)
        del self._parser  # the parser refers to this connection
        response, self.response = self.response, None
        if response is None:
            return
        if response.status and self._until_end and error is None:
            response.end()
        else:
            response.fail(
                ConnectionCut(
                    "the response ended early"
                    if response.status
                    else "the server closed the connection without a response"
                )
            )

    # ── parser callbacks ──────────────────────────────────────────────────────────────────────────────────────────────────

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._until_end = False

    def on_message_begin(self) -> None:
        if self.response is None:
            raise MalformedReply  # a second response to one request: `data_received` aborts the connection

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.response is not None and status >= 200:
            self.response.head(status)

    def on_message_complete(self) -> None:
        response = self.response
        if response is None or not response.status:
            self._until_end = True  # an interim reply such as "100 Continue"
            return
        self.response = None
        response.end()
        # If part of the request is still unsent, the engine replied before reading all of it.
        all_sent = self._transport.get_write_buffer_size() == 0
        if self._parser.should_keep_alive() and self.open and all_sent and not self.paused:
            self._pool.release(self)
        else:
            self._transport.close()


def _encode_headers(headers: Mapping[str, str]) -> bytes:
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    encoded = "".join(lines).encode("latin-1")
    if encoded.count(b"\n") != len(lines) or encoded.count(b"\r") != len(lines):
        raise ValueError("a header must not contain a line break")
    return encoded
