"""Tests for the HTTP/1.1 connection pool, on both event loops."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.speed import scaled
from turngate.engines import http1
from turngate.engines.http1 import ConnectFailed, ConnectionCut, ConnectionPool, MalformedReply

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Reads whole requests and calls `handler` to answer each."""

    def __init__(self, handler: Serve) -> None:
        self._handler = handler
        self.requests: list[bytes] = []
        self.connections = 0
        self.hung_up = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
                self.requests.append(head + await reader.readexactly(size))
                await self._handler(reader, writer)
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            self.hung_up.set()
        finally:
            writer.close()


@asynccontextmanager
async def connected(handler: Serve, **settings: Any):
    server = Server(handler)
    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    given = {"connect_s": scaled(5), "silence_s": scaled(5), "keep_s": scaled(5), **settings}
    given.setdefault("headers", {"Authorization": "Bearer k"})
    connections = ConnectionPool(f"http://127.0.0.1:{port}/base/", **given)
    try:
        yield server, connections
    finally:
        connections.close()
        listening.close()


def reply_with(*pieces: bytes, close: bool = False) -> Serve:
    async def handler(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        if close:
            writer.close()

    return handler


def run_on(loop: str, scenario: Coroutine[Any, Any, None]) -> None:
    factory = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(asyncio.wait_for(scenario, scaled(20)))


both_loops = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
HELLO = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@both_loops
@pytest.mark.parametrize(
    "pieces",
    [
        (HELLO,),
        tuple(HELLO[i : i + 1] for i in range(len(HELLO))),
        (CHUNKED, b"2\r\nhe\r\n", b"3\r\nllo\r\n0\r\n\r\n"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", HELLO),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + HELLO,),
    ],
)
def test_connection_is_reused_after_complete_reply(loop: str, pieces: tuple[bytes, ...]) -> None:
    async def scenario() -> None:
        async with connected(reply_with(*pieces)) as (server, connections):
            for n in range(3):
                response = await connections.request("POST", "/p", b'{"n":%d}' % n, {"X-Session-ID": "s"})
                assert (response.status, await response.read(), await response.readany()) == (200, b"hello", b"")
                response.close()
            assert server.connections == 1
            head, body = server.requests[2].split(b"\r\n\r\n")
            assert head.startswith(b"POST /base/p HTTP/1.1\r\nHost: 127.0.0.1:") and body == b'{"n":2}'
            assert b"\r\nAuthorization: Bearer k\r\n" in head and b"\r\nX-Session-ID: s\r\n" in head

    run_on(loop, scenario())


@both_loops
def test_reply_delimited_by_connection_close(loop: str) -> None:
    async def scenario() -> None:
        async with connected(reply_with(b"HTTP/1.1 200 OK\r\n\r\nhel", b"lo", close=True)) as (server, connections):
            for _ in range(2):
                response = await connections.request("POST", "/", b"", {})
                assert await response.read() == b"hello"
                response.close()
            assert server.connections == 2

    run_on(loop, scenario())


@both_loops
@pytest.mark.parametrize(
    ("pieces", "error", "words"),
    [
        ((), ConnectionCut, "without a response"),
        ((b"HTTP/1.1 200",), ConnectionCut, "without a response"),
        ((HELLO[:-2],), ConnectionCut, "ended early"),
        ((CHUNKED, b"5\r\nhel"), ConnectionCut, "ended early"),
        ((CHUNKED, b"5\r\nhello\r\n"), ConnectionCut, "ended early"),
        ((b"SSH-2.0-OpenSSH_9\r\n\r\n",), MalformedReply, "."),
        ((b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,), MalformedReply, "."),
    ],
)
def test_truncated_or_malformed_reply_raises(
    loop: str, pieces: tuple[bytes, ...], error: type[Exception], words: str
) -> None:
    async def scenario() -> None:
        async with connected(reply_with(*pieces, close=True)) as (_, connections):
            with pytest.raises(error, match=words):
                response = await connections.request("POST", "/", b"", {})
                await response.read()

    run_on(loop, scenario())


@both_loops
def test_closing_unfinished_reply_drops_connection(loop: str) -> None:
    async def scenario() -> None:
        async with connected(reply_with(CHUNKED, b"2\r\nhe\r\n")) as (server, connections):
            response = await connections.request("POST", "/", b"", {})
            assert await response.readany() == b"he"
            response.close()
            await server.hung_up.wait()
            again = await connections.request("POST", "/", b"", {})
            again.close()
            assert server.connections == 2

    run_on(loop, scenario())


@both_loops
def test_cancelled_request_drops_connection(loop: str) -> None:
    async def scenario() -> None:
        async with connected(reply_with()) as (server, connections):
            call = asyncio.create_task(connections.request("POST", "/", b"x", {}))
            while not server.requests:
                await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await server.hung_up.wait()

    run_on(loop, scenario())


@both_loops
def test_silence_timeout_restarts_with_each_byte(loop: str) -> None:
    async def slow(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        for _n in range(10):
            writer.write(b"1\r\nx\r\n")
            await asyncio.sleep(scaled(0.02))
        await asyncio.sleep(3600)

    async def scenario() -> None:
        async with connected(slow, silence_s=scaled(0.15)) as (_, connections):
            response = await connections.request("POST", "/", b"", {})
            got = b""
            with pytest.raises(TimeoutError):
                while True:
                    got += await response.readany()
            assert got == b"x" * 10
            response.close()

    run_on(loop, scenario())


@both_loops
def test_expired_or_closed_connection_is_not_reused(loop: str) -> None:
    async def scenario() -> None:
        async with connected(reply_with(HELLO), keep_s=0.05) as (server, connections):
            for _ in range(2):
                response = await connections.request("POST", "/", b"", {})
                await response.read()
                response.close()
                await asyncio.sleep(0.1)
            assert server.connections == 2
        async with connected(reply_with(HELLO, close=True)) as (server, connections):
            for _ in range(2):
                response = await connections.request("POST", "/", b"", {})
                await response.read()
                response.close()
                while connections._all:
                    await asyncio.sleep(0.01)
            assert server.connections == 2

    run_on(loop, scenario())


@both_loops
def test_unread_data_applies_backpressure(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "_PAUSE_AT", 100_000)
    total, piece = 20_000_000, b"x" * 500_000
    sent = 0

    async def floods(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        while sent < total:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)

    async def scenario() -> None:
        async with connected(floods, silence_s=scaled(0.2)) as (_, connections):
            response = await connections.request("POST", "/", b"", {})
            await asyncio.sleep(scaled(0.3))  # a paused read is not engine silence
            assert sent < total
            assert len(await response.read()) == total
            response.close()

    run_on(loop, scenario())


@both_loops
def test_unreachable_server_is_connect_failed(loop: str) -> None:
    async def scenario() -> None:
        given: dict[str, Any] = {"connect_s": 1.0, "silence_s": None, "keep_s": 1.0, "headers": {}}
        for url in ("http://127.0.0.1:1", "http://nowhere.invalid"):
            with pytest.raises(ConnectFailed):
                await ConnectionPool(url, **given).request("POST", "/", b"", {})

    run_on(loop, scenario())


# A self-signed certificate for other.test, with its key. `openssl req -x509` made it for this test.
OTHER_TEST = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgj5WS1yKeiXhLwXk9
MqH6IHzudcBQs2H2iNt99rIaPwmhRANCAAT4zAY8MwV/IU1gCP1e+XeTrPjI30ju
I3DGUUv+T+OoZpsmfVU/N9HWKtT2EDKgwcY5955tR7M2eGlzh+VRawAK
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBmDCCAT6gAwIBAgIUBstws7MxqddU4FukhqxMfNG2vwcwCgYIKoZIzj0EAwIw
FTETMBEGA1UEAwwKb3RoZXIudGVzdDAgFw0yNjExMTkxODQxMDlaGA8yMTI2MTAy
NjE4NDEwOVowFTETMBEGA1UEAwwKb3RoZXIudGVzdDBZMBMGByqGSM49AgEGCCqG
SM49AwEHA0IABPjMBjwzBX8hTWAI/V75d5Os+MjfSO4jcMZRS/5P46hmmyZ9VT83
0dYq1PYQMqDBxjn3nm1HszZ4aXOH5VFrAAqjajBoMB0GA1UdDgQWBBRdpud+d96v
79Py1RzqV4oRXUZyljAfBgNVHSMEGDAWgBRdpud+d96v79Py1RzqV4oRXUZyljAP
BgNVHRMBAf8EBTADAQH/MBUGA1UdEQQOMAyCCm90aGVyLnRlc3QwCgYIKoZIzj0E
AwIDSAAwRQIhAMrtMb/bjbfu7B9sgqTbWF37H49XLtCG+OWoxLhhV9lPAiAB6y9k
iW6Jy6N9CV8J3ZrxSBfGI5WfTXNGUYf3WxH1Xw==
-----END CERTIFICATE-----
"""


@both_loops
@pytest.mark.parametrize(
    ("trusted", "reason"), [(False, "self-signed certificate"), (True, "it is for another host name")]
)
def test_rejected_certificate_is_explained(
    loop: str, trusted: bool, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says why, without the host name, which an agent must not see."""
    (tmp_path / "pem").write_text(OTHER_TEST)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "pem")

    async def scenario() -> None:
        listening = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0, ssl=context)
        url = f"https://localhost:{listening.sockets[0].getsockname()[1]}"
        connections = ConnectionPool(url, connect_s=scaled(5), silence_s=None, keep_s=1.0, headers={})
        with pytest.raises(ConnectFailed, match=f"certificate could not be verified: {reason}") as raised:
            await connections.request("POST", "/", b"", {})
        assert "localhost" not in str(raised.value) and "other" not in str(raised.value).replace("another", "")
        listening.close()

    run_on(loop, scenario())


def test_header_with_line_break_is_rejected() -> None:
    given: dict[str, Any] = {"connect_s": 1.0, "silence_s": None, "keep_s": 1.0}
    with pytest.raises(ValueError, match="line break"):
        ConnectionPool("http://h", headers={"a": "b\r\nc: d"}, **given)


@both_loops
def test_concurrent_requests(loop: str) -> None:
    async def scenario() -> None:
        async with connected(reply_with(CHUNKED, b"5\r\nhello\r\n0\r\n\r\n")) as (server, connections):

            async def post() -> bytes:
                response = await connections.request("POST", "/", b"y" * 300_000, {})
                try:
                    return await response.read()
                finally:
                    response.close()

            for _ in range(3):
                assert set(await asyncio.gather(*(post() for _ in range(20)))) == {b"hello"}
            assert server.connections == 20
            assert all(request.endswith(b"y" * 300_000) for request in server.requests)

    run_on(loop, scenario())
