"""HTTP access to engines: one client per engine, server-sent events, and failures mapped to `TurngateError`s.

Apart from errors, this module does not interpret the JSON that engines send. Two rules hold throughout:

- Leaving the `EngineClient.post` block before the generation has finished closes the connection, which tells the engine to abort.
- Errors are `TurngateError`s whose message is safe to show to an agent: the client adds no URL or request headers to an engine's
  message, and removes the API key from it.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TypeVar

import aiohttp
import msgspec

from turngate.engines.base64_field import Base64Field
from turngate.engines.http1 import ConnectFailed, ConnectionCut, ConnectionPool, MalformedReply, Response
from turngate.errors import (
    ContextOverflow,
    EngineBusy,
    EngineError,
    EngineNotFound,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    TurngateError,
)
from turngate.types import Json

T = TypeVar("T")

MESSAGE_CHARS = 500  # maximum length of an engine's message in our errors
EVENT_BYTES = 64 * 2**20  # maximum size of an incomplete event
DRAIN_S = 0.25  # timeout for reading the end of a finished reply
PROBE_S = 5.0  # timeout for health checks and aborts, which must never hang
# uvicorn, which both vLLM and SGLang use, closes idle connections after 5 s. A POST on a connection that is being closed
# fails as if the engine were down, so the client closes idle connections earlier.
KEEPALIVE_S = 2.0
# vLLM sends this if the log-probability of a token is missing, NaN or minus infinity.
NO_LOGPROB = -9999.0

# The exceptions that msgspec raises for JSON that is invalid or nested too deeply.
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_DONE = b"[DONE]"
# Messages with which vLLM, SGLang, OpenAI, Anthropic, Gemini and compatible servers report a context overflow.
_OVERFLOW = re.compile(
    r"context_length_exceeded|maximum context length|maximum model length|model's context length"
    r"|input length \(\d+ tokens\) exceeds|context window|prompt is too long|exceed context limit"
    r"|input token count.{0,20} exceeds the maximum"
    r"|max_tokens must be at least 1, got 0",  # vLLM, if the prompt leaves no room for a single token
    re.IGNORECASE,
)
# The numbers in these messages: the size of the request (the total, if present), and the limit.
_SIZES = tuple(
    re.compile(pattern)
    for pattern in (
        r"exceed context limit: (\d+) \+ (\d+) >",
        r"max_\w*tokens\W? is too large: (\d+)\..* has (\d+) input tokens",
        r"total of (?:at least )?(\d+) tokens",
        r"requested (\d+) tokens",
        r"(\d+) tokens >",
        r"input token count \((\d+)\)",
        r"(?:resulted in|contains|has) (?:at least )?(\d+) (?:input )?tokens",
        r"\(length (\d+)\)",
        r"input(?: length)? \((\d+) tokens\)",
    )
)
_LIMITS = re.compile(
    r"(?:tokens|\d) > (\d+)|(?:context|model) length (?:is|of) (\d+)|context length \((\d+) tokens\)|tokens allowed \(?(\d+)"
)
# Gemini reports an invalid key with status 400.
_NO_KEY = re.compile(r"API_KEY_INVALID|API key not valid|API key expired", re.IGNORECASE)
# HTTP statuses for the types of errors inside a stream, which itself has status 200.
_STATUS_OF = {
    "invalid_request_error": 400,
    "invalid_prompt": 400,
    "context_length_exceeded": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "RESOURCE_EXHAUSTED": 429,
    "overloaded_error": 529,
    "timeout_error": 504,
    "UNAVAILABLE": 503,
}
# vLLM and SGLang reject requests with status 503 when their queues are full. They are busy, not down.
_BUSY = re.compile(r"currently busy|backlog limit|queue is full|higher priority request|overloaded", re.IGNORECASE)
# vLLM reports this with status 500 when its engine process has died. The server exits within a second.
_DYING = re.compile(r"EngineCore encountered an issue")


def error_from_status(engine: str, status: int, message: str, evidence: str = "") -> TurngateError:
    """Map an engine's HTTP status to an error.

    `message` is the readable part of the body, and `evidence` is the start of the raw body.
    """
    text = f"{engine}: {message}" if message else f"{engine} returned status {status}"
    words = f"{message} {evidence}"
    if status == 401 or (status == 400 and _NO_KEY.search(words)):
        # The gateway's own key is wrong. Providers quote parts of the key in their message, so the message is not forwarded.
        return EngineError(
            f"{engine} rejected the gateway's API key or requires one; check the key in the gateway's configuration"
        )
    if status in (402, 403):  # a problem with the gateway's account, not with the agent's request
        return EngineError(text)
    if status in (429, 529):  # Anthropic sends 529 when it is overloaded
        return EngineBusy(text)
    if status in (408, 504):
        return EngineTimeout(text)
    if 400 <= status < 500:
        if _OVERFLOW.search(words):
            return parse_overflow(text, words)
        return EngineNotFound(text) if status in (404, 405) else EngineRejected(text)
    if status in (502, 503):
        return EngineBusy(text) if _BUSY.search(words) else EngineUnavailable(text)
    return EngineUnavailable(text) if _DYING.search(words) else EngineError(text)


def parse_overflow(text: str, words: str) -> ContextOverflow:
    """Build a `ContextOverflow` with the message `text`, and with the request size and the limit if `words` contains them."""
    sizes = next((found for pattern in _SIZES if (found := pattern.search(words))), None)
    size = None if sizes is None else sum(int(n) for n in sizes.groups())
    limits = _LIMITS.search(words)
    limit = None if limits is None else next(int(n) for n in limits.groups() if n)
    if size is not None and limit is not None and size <= limit:
        size = None  # not the number that exceeded the limit
    return ContextOverflow(text, limit=limit, size=size)


def make_abort_error(engine: str) -> EngineBusy:
    """Build the retryable error for a call that the engine aborted before its first token, for example during a weight update."""
    return EngineBusy(f"{engine} aborted the call before its first token")


class map_errors:  # lower case, because it is used like a function
    """A context manager that maps other libraries' exceptions to `TurngateError`s.

    Never use it around a `yield`, because it would also map exceptions that are thrown into the generator there, such as those of a `with`
    block's body. It is a class because it is entered several times per turn, and `@contextmanager` is ten times slower.
    """

    __slots__ = ("_engine",)

    def __init__(self, engine: str) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        mapped = None if error is None else _map_error(self._engine, error)
        if mapped is None:
            return
        try:
            raise mapped from error
        finally:
            # The error's traceback refers to this frame. A cycle would keep the request in memory until a garbage collection.
            del mapped


def _map_error(engine: str, error: BaseException) -> TurngateError | None:
    match error:
        case aiohttp.ConnectionTimeoutError():
            return EngineUnavailable(f"timed out connecting to {engine}")
        case MalformedReply():
            return EngineError(f"{engine} sent an invalid HTTP response: {error}")
        case TimeoutError():
            return EngineTimeout(f"timed out waiting for {engine}")
        case aiohttp.ClientConnectionError() | aiohttp.ClientPayloadError() | OSError():
            return EngineUnavailable(f"the connection to {engine} failed: {_reason(error)}")
        case aiohttp.ClientError():
            return EngineError(f"{engine} sent an invalid HTTP response: {type(error).__name__}")
        case msgspec.DecodeError() | UnicodeDecodeError():
            return EngineError(f"{engine} sent a response that cannot be decoded: {error}")
        case RecursionError():
            return EngineError(f"{engine} sent a response that cannot be decoded: a value is nested too deeply")
        case _:
            return None


def _reason(error: Exception) -> str:
    """Return why a connection failed. The address is left out, because agents read these messages."""
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the server closed the connection without a response"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the response ended early"
    if isinstance(error, ConnectionCut | ConnectFailed) and not error.errno:
        return str(error)
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        return os.strerror(error.errno).lower()
    return "the server is unreachable"


def extract_message(body: bytes) -> str:
    """Extract the readable part of an error body, such as OpenAI's `error.message`, FastAPI's `detail`, or plain text."""
    try:
        return _readable(msgspec.json.decode(body))
    except DECODE_ERRORS:
        return body.decode("utf-8", "replace").strip()


def _readable(value: Json) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        for field in ("error", "message", "detail"):
            if value.get(field):
                return _readable(value[field])
    if isinstance(value, list) and len(value) == 1:  # Gemini's form for streams
        return _readable(value[0])
    return msgspec.json.encode(value).decode() if value else ""


def align_logprobs(engine: str, ids: Sequence[int], logprobs: Sequence[float | None] | None) -> list[float | None]:
    """Return one log-probability per id, with None where it is missing. Raise `EngineError` if the lengths differ."""
    if logprobs is None:
        return [None] * len(ids)
    if len(logprobs) != len(ids):
        raise EngineError(
            f"{engine} sent different numbers of log-probabilities ({len(logprobs)}) and tokens ({len(ids)})"
        )
    return clean_logprobs(logprobs)


def clean_logprobs(logprobs: Sequence[float | None]) -> list[float | None]:
    """Replace each marker for a missing log-probability (`NO_LOGPROB` or less) with None."""
    return [None if value is None or value <= NO_LOGPROB else value for value in logprobs]


class EventParser:
    """An incremental parser of server-sent events. An event may be split across reads. Only the data of an event is kept."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0  # of the lines in `_data`, in bytes

    def feed(self, read: bytes) -> list[bytes]:
        """Parse `read`, the next part of the stream, and return the data of the events that it completes."""
        complete = self._parse_simple(read)
        if complete is not None:
            return complete
        lines = (self._rest + read).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._size += len(line)
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
                self._size = 0
        if self._size + len(self._rest) > EVENT_BYTES:
            raise EngineError(f"the engine sent an event larger than {EVENT_BYTES} bytes")
        return events

    def _parse_simple(self, read: bytes) -> list[bytes] | None:
        """Parse `read` if it consists of complete one-line events, which is the usual case. Otherwise, return None."""
        if self._rest or self._data or not read.endswith(b"\n\n"):
            return None
        if not read.startswith(b"data: ") or b"\r" in read:
            return None
        events = read[6:-2].split(b"\n\ndata: ")
        return events if read.count(b"\n") == 2 * len(events) else None


class Reply:
    """A POST request and its reply. The first read sends the request. The reply is closed when the `EngineClient.post` block exits.

    `sent` says whether the engine may have received the request. The code that reads the reply sets `finished` when the generation has
    ended; the remaining bytes are then read and discarded. `done` is set when the stream has ended with `[DONE]`.
    """

    def __init__(
        self,
        client: EngineClient,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        large_field: Base64Field | None = None,
    ) -> None:
        self.finished = False
        self.sent = False
        self.done = False
        self._client = client
        self.body = body
        self._path, self._headers, self._large_field = path, headers, large_field
        self._response: aiohttp.ClientResponse | Response | None = None
        self._events = EventParser()
        self._closed = False

    async def __aenter__(self) -> Reply:
        self._client.in_flight += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.in_flight -= 1
        await self.leave()

    async def whole(self) -> AsyncIterator[list[bytes]]:
        """Yield the whole body as one batch with one event."""
        yield [await self.document()]

    async def events(self) -> AsyncIterator[list[bytes]]:
        """Yield batches of complete events, up to the end of the body or `[DONE]`."""
        while (batch := await self.batch()) is not None:
            yield batch

    async def document(self) -> bytes:
        """Read the whole body."""
        response = await self.open()
        with map_errors(self._client.engine):
            if self._large_field is None:
                return await response.read()
            parts = []
            while read := await _readany(response):
                parts.append(await self._large_field.feed_slowly(read))
            return b"".join(parts)

    async def batch(self) -> list[bytes] | None:
        """Read until at least one event is complete, and return the complete events. Return None at the end of the stream."""
        response = await self.open()
        while not self.done:
            with map_errors(self._client.engine):
                read = await _readany(response)
            if not read:
                return None
            if self._large_field is not None:
                read = await self._large_field.feed_slowly(read)
            batch = self._events.feed(read)
            if _DONE in batch:
                self.done = True
                batch = batch[: batch.index(_DONE)]
            if batch:
                return batch
        return None

    async def leave(self) -> None:
        """Close the reply. A finished reply is first read to its end so that its connection can be reused."""
        self._closed = True
        if self._response is None:
            return
        if isinstance(self._response, Response) and self._response.over:
            return  # the connection is already free
        try:
            if self.finished:
                async with asyncio.timeout(DRAIN_S):
                    while await _readany(self._response):
                        pass
        except (TimeoutError, aiohttp.ClientError, ConnectionCut, MalformedReply):
            pass  # the answer is complete; only the connection is lost
        finally:
            self._response.close()

    async def open(self) -> aiohttp.ClientResponse | Response:
        """Send the request if it has not been sent yet, and return the response. Raise an error if its status is not 200.

        After such an error, `body` may be changed and `open` called again.
        """
        if self._response is not None:
            return self._response
        self.finished = False
        response = await self._post()
        if self._closed:  # another task closed the reply while this one waited for the response
            response.close()
            raise EngineUnavailable(f"the call to {self._client.engine} was cancelled before the engine responded")
        if response.status != 200:
            try:
                with map_errors(self._client.engine):
                    body = await response.read()
            except BaseException:
                response.close()
                raise
            self.finished = True
            raise self._client.failure(response.status, body)
        self._response = response
        return response

    async def _post(self) -> aiohttp.ClientResponse | Response:
        self.sent = True
        if self._client.direct is not None:
            with map_errors(self._client.engine):
                try:
                    return await self._client.direct.request("POST", self._path, self.body, self._headers)
                except ConnectFailed:
                    self.sent = False
                    raise
        data = self.body if len(self.body) < 2**20 else io.BytesIO(self.body)  # aiohttp expects large bodies as files
        with map_errors(self._client.engine):
            try:
                return await self._client.session.post(
                    self._client.url + self._path, data=data, headers=self._headers, allow_redirects=False
                )
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                self.sent = False
                raise


class EngineClient:
    """An HTTP client for one engine.

    `silence_s` limits the time between received bytes; None means no limit. `headers` are sent with every request, and default to an
    `Authorization` header with `key`. `direct` selects the minimal client in `http1.py`, for engines that accept token ids.
    """

    def __init__(
        self,
        engine: str,
        url: str,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        connect_s: float = 10.0,
        silence_s: float | None = None,
        direct: bool = False,
    ) -> None:
        self.engine = engine
        self.url = url.rstrip("/")
        self.direct: ConnectionPool | None = None
        self.in_flight = 0
        self._key = key
        self._headers = {"Authorization": f"Bearer {key}"} if key and headers is None else dict(headers or {})
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=silence_s)
        self._connect_s, self._silence_s, self._is_direct = connect_s, silence_s, direct
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"EngineClient({self.engine!r}, {self.url!r})"

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError(f"{self.engine} was used before start() or after close()")
        return self._session

    async def start(self) -> None:
        if self._session is not None:
            return
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=self._timeout,
            headers={"Content-Type": "application/json", **self._headers},
        )
        if self._is_direct:
            self.direct = ConnectionPool(
                self.url,
                connect_s=self._connect_s,
                silence_s=self._silence_s,
                keep_s=KEEPALIVE_S,
                headers={"Content-Type": "application/json", **self._headers},
            )

    async def close(self) -> None:
        session, self._session = self._session, None
        if self.direct is not None:
            self.direct.close()
            self.direct = None
        if session is not None:
            await session.close()

    def post(self, path: str, body: bytes, headers: Mapping[str, str], large_field: Base64Field | None = None) -> Reply:
        """Return a POST request and its reply as a context manager. The first read sends the request.

        If `large_field` is set, it takes the content of one long field out of the reply.
        """
        return Reply(self, path, body, headers, large_field)

    async def get(self, path: str, shape: type[T]) -> T:
        """Fetch a small JSON document with a short timeout, and decode it as `shape`."""
        body = await self._probe("GET", path, b"")
        return self.decode(msgspec.json.Decoder(shape).decode, body)

    async def fetch(self, path: str) -> bytes:
        """Fetch a document as bytes, with a short timeout."""
        return await self._probe("GET", path, b"")

    async def ping(self, path: str) -> None:
        """Check that a GET of the path returns status 200."""
        await self._probe("GET", path, b"")

    async def check_connection(self) -> None:
        """Check that a server answers at the engine's URL, with any HTTP status. Raise an error if the connection fails or times out."""
        timeout = aiohttp.ClientTimeout(total=PROBE_S)
        with map_errors(self.engine):
            async with self.session.get(self.url, timeout=timeout, allow_redirects=False):
                pass

    async def notify(self, path: str, body: bytes) -> None:
        """Send a message, such as an abort, and discard the reply. Raise an error if the message is rejected or cannot be sent."""
        await self._probe("POST", path, body)

    async def command(self, path: str, body: Json, within_s: float) -> bytes:
        """Send a command that may take up to `within_s` seconds, and return the body of the reply."""
        return await self._probe("POST", path, msgspec.json.encode(body), within_s)

    def decode(self, decoder: Callable[[bytes], T], data: bytes) -> T:
        with map_errors(self.engine):
            return decoder(data)

    def decode_all(self, decoder: Callable[[bytes], T], batch: Sequence[bytes]) -> list[T]:
        with map_errors(self.engine):
            return list(map(decoder, batch))

    def failure(self, status: int, body: bytes) -> TurngateError:
        """Map an HTTP error to an exception. The engine's message is shortened, and the API key is removed from it."""
        return error_from_status(
            self.engine, status, self.redact(extract_message(body)), body[:4096].decode("utf-8", "replace")
        )

    def failure_in_stream(self, error: msgspec.Raw, default_status: int) -> TurngateError:
        """Map an error event in a stream to an exception. `default_status` applies if the event contains no known status."""
        try:
            value = msgspec.json.decode(error)
        except DECODE_ERRORS:
            value = None
        codes = [value.get(field) for field in ("code", "status", "type")] if isinstance(value, dict) else []
        statuses = [code if isinstance(code, int) else _STATUS_OF.get(str(code), 0) for code in codes]
        status = next((status for status in statuses if 400 <= status < 600), default_status)
        return self.failure(status, bytes(error))

    def redact(self, text: str) -> str:
        if self._key:
            text = text.replace(self._key, "[key]")
        return text if len(text) <= MESSAGE_CHARS else text[: MESSAGE_CHARS - 1] + "…"

    async def _probe(self, method: str, path: str, body: bytes, within_s: float = PROBE_S) -> bytes:
        if self.direct is not None:
            return await self._probe_directly(self.direct, method, path, body, within_s)
        with map_errors(self.engine):
            async with self.session.request(
                method,
                self.url + path,
                data=body or None,
                timeout=aiohttp.ClientTimeout(total=within_s),
                allow_redirects=False,
            ) as response:
                answer = await response.read()
        return self._check_status(response.status, answer)

    async def _probe_directly(
        self, direct: ConnectionPool, method: str, path: str, body: bytes, within_s: float
    ) -> bytes:
        with map_errors(self.engine):
            async with asyncio.timeout(within_s):
                response = await direct.request(method, path, body, {})
                try:
                    answer = await response.read()
                finally:
                    response.close()
        return self._check_status(response.status, answer)

    def _check_status(self, status: int, answer: bytes) -> bytes:
        if status != 200:
            raise self.failure(status, answer)
        return answer


async def _readany(response: aiohttp.ClientResponse | Response) -> bytes:
    return await (response.readany() if isinstance(response, Response) else response.content.readany())


def is_present(error: msgspec.Raw) -> bool:
    """Return whether a raw JSON field is present and not null."""
    return bytes(error) not in (b"", b"null")
