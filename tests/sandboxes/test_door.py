"""The door passes model and tool calls and nothing else, however it is disguised."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.sandboxes.upstream import Call, send_raw, upstream
from tests.speed import scaled
from turngate.errors import SandboxUnavailable
from turngate.sandboxes import door

ALLOWED = [
    ("HEAD", "/"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/qwen3-8b"),
    ("GET", "/v1/models/Qwen/Qwen3-8B"),
    ("POST", "/v1beta/models/Qwen/Qwen3-8B:generateContent"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/resp_tg0"),
    ("DELETE", "/v1/responses/resp_tg0"),
    ("GET", "/v1/responses/resp_tg0/input_items?limit=2"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages?beta=true"),
    ("POST", "/v1/messages/count_tokens?beta=true"),
    ("POST", "/v1beta/models/gemini-2.5-pro:generateContent"),
    ("POST", "/v1beta/models/gemini-2.5-pro:streamGenerateContent?alt=sse"),
    ("POST", "/v1beta/models/gemini%2D2.5-pro%3AcountTokens"),
    ("GET", "/v1/tools"),
    ("POST", "/v1/tools/answer"),
]
REFUSED = [
    ("GET", "/"),
    ("GET", "/health"),
    ("GET", "/admin"),
    ("GET", "/admin/sessions"),
    ("POST", "/admin/sessions"),
    ("DELETE", "/v1/chat/completions"),
    ("GET", "/v1/chat/completions"),
    ("OPTIONS", "/v1/chat/completions"),
    ("POST", "/v1/chat/completions/"),
    ("POST", "/v1/chat/completions/../../admin"),
    ("POST", "/v1/chat/../chat/completions"),
    ("POST", "/./v1/chat/completions"),
    ("POST", "//v1/chat/completions"),
    ("POST", "/v1//chat/completions"),
    ("POST", "//evil.example/v1/chat/completions"),
    ("POST", "/v1/chat/completions%2f..%2f..%2fadmin"),
    ("POST", "/%2e%2e/admin"),
    ("GET", "/v1/models/%2e%2e/%2e%2e/admin"),
    ("GET", "/v1/models/.."),
    ("GET", "/v1/models/%2e%2e"),
    ("GET", "/v1/models/..%2f..%2fadmin"),
    ("GET", "/v1/models/%252e%252e%252fadmin"),
    ("GET", "/v1/models/a%00b"),
    ("GET", "/v1/models/a%0d%0ab"),
    ("GET", "/v1/models/a\\b"),
    ("GET", "/v1/models/"),
    ("POST", "/v1beta/models/../../admin:generateContent"),
    ("POST", "/v1beta/models/:generateContent"),
    ("POST", "/v1beta/models/m:deleteEverything"),
    ("POST", "/s/other/v1/chat/completions"),
    ("POST", "/v1/rollouts/r1/register"),
    ("GET", "/v1/rollouts/r1/trajectory"),
    ("POST", "/v1/rollouts/r1/chat/completions"),
    ("POST", "/V1/chat/completions"),
    ("POST", "/v1/tools"),
    ("POST", "/v1/tools/../sessions"),
    ("GET", "/v1/tools/answer"),
    ("POST", "/s/other/v1/tools/answer"),
    ("POST", "/rollout/other/v1/tools/answer"),
    ("GET", "/admin/sessions/s/tools"),
    ("POST", "/admin/sessions/s/tools/1/answer"),
    ("PUT", "/admin/sessions/s/outcome"),
    ("POST", "/admin/events"),
    ("POST", "/v1/chat/completions;x"),
]
AMBIGUOUS = {
    "absolute form": "POST http://evil.example/v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n",
    "authority form": "CONNECT evil.example:443 HTTP/1.1\r\nhost: x\r\n\r\n",
    "asterisk": "OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
    "two hosts": "POST /v1/messages HTTP/1.1\r\nhost: a\r\nhost: b\r\ncontent-length: 0\r\n\r\n",
    "length and chunks": "POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": "POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\ncontent-length: 40\r\n\r\n",
    "another coding": "POST /v1/messages HTTP/1.1\r\nhost: x\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a length with a sign": "POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: +5\r\n\r\nhello",
    "a folded header": "POST /v1/messages HTTP/1.1\r\nhost: x\r\na: b\r\n c: d\r\ncontent-length: 0\r\n\r\n",
    "a blank before the colon": "POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length : 5\r\n\r\nhello",
    "a bare line feed": "POST /v1/messages HTTP/1.1\r\nhost: x\nx-smuggled: 1\r\ncontent-length: 0\r\n\r\n",
    "a header inside a path": "POST /v1/messages\rx: y HTTP/1.1\r\nhost: x\r\n\r\n",
    "a blank in a path": "POST /v1/messages /admin HTTP/1.1\r\nhost: x\r\n\r\n",
    "another version": "POST /v1/messages HTTP/2.0\r\nhost: x\r\n\r\n",
    "not HTTP": "\x16\x03\x01\x02\x00\x01\r\n\r\n",
}


@pytest.mark.parametrize(("method", "path"), ALLOWED)
async def test_model_and_tool_calls_pass(method: str, path: str) -> None:
    async with upstream() as gateway, door.open_door(gateway.url) as opened_door:
        async with httpx.AsyncClient(timeout=scaled(5), trust_env=False) as client:
            reply = await client.request(method, opened_door.address + path, content=b"x" if method == "POST" else None)
        assert reply.status_code == 200
        assert gateway.requests[0].request_line == f"{method} {path} HTTP/1.1"
        assert (opened_door.calls, opened_door.refused) == (1, 0)


@pytest.mark.parametrize(("method", "path"), REFUSED)
async def test_other_paths_are_refused(method: str, path: str) -> None:
    async with upstream() as gateway, door.open_door(gateway.url) as opened_door:
        port = int(opened_door.address.rpartition(":")[2])
        reply = await send_raw(
            port, f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        )
        assert reply.startswith(b"HTTP/1.1 404 ")
        assert b"x-turngate: 1" in reply  # otherwise the relay would retry it
        assert not gateway.requests
        assert (opened_door.calls, opened_door.refused) == (0, 1)


@pytest.mark.parametrize("what", AMBIGUOUS)
async def test_ambiguous_requests_are_refused(what: str) -> None:
    smuggled = "GET /admin HTTP/1.1\r\nhost: x\r\n\r\n"
    async with upstream() as gateway, door.open_door(gateway.url) as opened_door:
        reply = await send_raw(
            int(opened_door.address.rpartition(":")[2]), (AMBIGUOUS[what] + smuggled).encode("latin-1")
        )
        assert reply.startswith(b"HTTP/1.1 400 ")
        assert reply.count(b"connection: close") == 1
        assert not gateway.requests


async def test_calls_after_refused_call_are_checked() -> None:
    async with upstream() as gateway, door.open_door(gateway.url) as opened_door:
        admin = "POST /admin HTTP/1.1\r\nhost: x\r\ncontent-length: 7\r\n\r\nGET / H"
        good = "POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok"
        reply = await send_raw(int(opened_door.address.rpartition(":")[2]), admin + admin + good)
        assert [reply.count(b"HTTP/1.1 404"), reply.count(b"HTTP/1.1 200")] == [2, 1]
        assert [request.request_line for request in gateway.requests] == ["POST /v1/messages HTTP/1.1"]


async def test_proxy_headers_are_removed() -> None:
    headers = {"x-forwarded-for": "127.0.0.1", "forwarded": "for=x", "x-turngate-session": "other", "x-api-key": "mine"}
    async with upstream() as gateway, door.open_door(gateway.url) as opened_door:
        async with httpx.AsyncClient(timeout=scaled(5), trust_env=False) as client:
            await client.post(f"{opened_door.address}/v1/messages", content=b"x", headers=headers)
        request_headers = gateway.requests[0].headers
        assert request_headers["x-api-key"] == "mine"
        assert not {"x-forwarded-for", "forwarded", "x-turngate-session"} & set(request_headers)
        assert request_headers["host"] == gateway.url.removeprefix("http://")


async def test_socket_is_private_and_removed_with_door(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    calls: list[tuple[str, str]] = []
    async with upstream() as gateway:
        async with door.open_door(
            gateway.url, folder=tmp_path, on_call=lambda *call: calls.append(call)
        ) as opened_door:
            assert opened_door.socket and stat.S_IMODE(opened_door.socket.stat().st_mode) == 0o600
            reply = await send_raw(
                0, "HEAD / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", path=opened_door.socket
            )
            assert reply.startswith(b"HTTP/1.1 200 ")
            assert calls == [("HEAD", "/")]
        assert not list(tmp_path.iterdir())


async def test_too_long_socket_path_error_names_tmpdir() -> None:
    """A long TMPDIR makes the path too long. The longest path that the system allows is accepted."""
    with tempfile.TemporaryDirectory(prefix="tg-") as short:
        room = door.MAX_SOCKET_PATH - len(f"{short}//gateway.sock")
        (fits := Path(short, "x" * room)).mkdir()
        async with door.open_door("http://127.0.0.1:9", folder=fits) as opened_door:
            assert opened_door.socket is not None and opened_door.socket.is_socket()
        (long := Path(short, "é" * (room // 2 + 1))).mkdir()  # the limit is in bytes
        with pytest.raises(
            SandboxUnavailable, match=r"TMPDIR: .* the limit for a unix socket path is 107; set TMPDIR to a folder"
        ):
            async with door.open_door("http://127.0.0.1:9", folder=long):
                pass


async def test_unreachable_gateway_is_502_without_turngate_header() -> None:
    async with (
        door.open_door("http://127.0.0.1:1") as opened_door,
        httpx.AsyncClient(timeout=scaled(5), trust_env=False) as client,
    ):
        reply = await client.post(f"{opened_door.address}/v1/messages", content=b"x")
        assert reply.status_code == 502
        assert "x-turngate" not in reply.headers


async def test_client_disconnect_reaches_gateway() -> None:
    disconnected = asyncio.Event()

    async def script(call: Call) -> None:
        if await call.wait_for_hang_up():
            disconnected.set()

    async with upstream(script) as gateway, door.open_door(gateway.url) as opened_door:
        _, writer = await asyncio.open_connection("127.0.0.1", int(opened_door.address.rpartition(":")[2]))
        writer.write(b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nok")
        while not gateway.requests:
            await asyncio.sleep(0.01)
        writer.close()
        await asyncio.wait_for(disconnected.wait(), scaled(2))


CALL = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
REFUSED_CALL = b"POST /admin HTTP/1.1\r\nhost: x\r\ncontent-length: 10000000\r\n\r\n{}"


def record_errors() -> list[dict[str, Any]]:
    """Return a list that receives what the event loop would otherwise log."""
    errors: list[dict[str, Any]] = []

    def record(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        errors.append(context)

    asyncio.get_running_loop().set_exception_handler(record)
    return errors


async def wait_for_hang_up(call: Call) -> None:
    await call.wait_for_hang_up()


@pytest.mark.parametrize("sent", [b"", CALL[:20], CALL, REFUSED_CALL], ids=["idle", "partial", "call", "refused"])
async def test_close_ends_connections_and_logs_nothing(sent: bytes) -> None:
    errors = record_errors()
    async with upstream(wait_for_hang_up) as gateway:
        async with door.open_door(gateway.url) as opened_door:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(opened_door.address.rpartition(":")[2]))
            writer.write(sent)
            while sent == CALL and not gateway.requests:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
        reply = await asyncio.wait_for(reader.read(), scaled(10))
        assert reply.startswith(b"HTTP/1.1 404 ") if sent == REFUSED_CALL else reply == b""
        writer.close()
    gc.collect()
    await asyncio.sleep(0)
    assert not errors


# If asyncio accepts a connection while its server closes, it drops the socket without closing it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_door_closes_at_any_moment_of_a_call() -> None:
    """No call delays closing the door, and none is served afterwards, even if its connection is accepted during `close`."""
    errors = record_errors()
    for steps in range(30):
        async with upstream(wait_for_hang_up) as gateway:
            outside = asyncio.all_tasks()
            async with asyncio.timeout(scaled(10)), door.open_door(gateway.url) as opened_door:
                client = socket.create_connection(("127.0.0.1", int(opened_door.address.rpartition(":")[2])))
                client.sendall(CALL)
                for _ in range(steps):
                    await asyncio.sleep(0)
            with client:
                await asyncio.sleep(0.02)
                left = [task for task in asyncio.all_tasks() - outside if "upstream.py" not in repr(task)]
                assert not left, f"after {steps} steps"
    gc.collect()
    assert not errors


async def test_unexpected_error_is_logged() -> None:
    errors = record_errors()

    def fail(method: str, path: str) -> None:
        raise ZeroDivisionError

    async with upstream() as gateway, door.open_door(gateway.url, on_call=fail) as opened_door:
        assert await send_raw(int(opened_door.address.rpartition(":")[2]), CALL) == b""
    gc.collect()
    assert [type(error["exception"]) for error in errors] == [ZeroDivisionError]


async def test_concurrent_doors_keep_umask(tmp_path: Path) -> None:
    """The umask belongs to the process: opening a door must not change the mode of folders that other rollouts create."""
    before = os.umask(0o022)
    try:

        async def open_one(n: int) -> None:
            folder = tmp_path / str(n)
            folder.mkdir(mode=0o700)
            async with door.open_door("http://127.0.0.1:9", folder=folder) as opened_door:
                assert opened_door.socket is not None and stat.S_IMODE(opened_door.socket.stat().st_mode) == 0o600
                (folder / "made").mkdir(mode=0o700)

        await asyncio.gather(*(open_one(n) for n in range(20)))
        assert [oct(path.stat().st_mode & 0o777) for path in tmp_path.glob("*/made")] == ["0o700"] * 20
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


@pytest.mark.parametrize("folder", [True, False], ids=["socket", "port"])
async def test_cancelled_open_leaves_no_stale_reader(folder: bool, tmp_path: Path) -> None:
    """After cancellation while opening, the event loop still watches the next user of the socket's descriptor."""

    async def hold_open() -> None:
        async with door.open_door("http://127.0.0.1:1", folder=tmp_path if folder else None):
            await asyncio.sleep(60)

    for steps in range(8):
        opening = asyncio.create_task(hold_open())
        for _ in range(steps):
            await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        reader = asyncio.StreamReader()
        read_end, write_end = os.pipe()
        pipe = os.fdopen(read_end, "rb", 0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda reader=reader: asyncio.StreamReaderProtocol(reader), pipe
        )
        os.write(write_end, b"heard")
        assert await asyncio.wait_for(reader.read(5), scaled(10)) == b"heard"
        os.close(write_end)
        transport.close()
        await asyncio.sleep(0)
