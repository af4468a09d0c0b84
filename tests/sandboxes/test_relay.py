"""The relay, in Python and in Node: the gateway answers every call once, even if connections fail."""

from __future__ import annotations

import ast
import asyncio
import json
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.needs import require
from tests.sandboxes import kit
from tests.sandboxes.upstream import OK, Call, Script, Upstream, drop, in_sequence, reply_with, send_raw, upstream
from tests.speed import paced, scaled
from tools import parts
from turngate.sandboxes import relay, supervisor

pytestmark = pytest.mark.process

FOLDER = Path(relay.__file__).parent
CHUNKED = f"HTTP/1.1 200 OK\r\n{OK}content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def node() -> str:
    require("node")
    cached = parts.cache() / "node" / "bin" / "node"
    return str(cached) if cached.exists() else str(shutil.which("node"))


RUN: dict[str, Callable[[], list[str]]] = {
    "python": lambda: [sys.executable, "-I", str(FOLDER / "relay.py")],
    "node": lambda: [node(), str(FOLDER / "relay.mjs")],
}


class RunningRelay:
    """A relay as in a sandbox: a process, a port, and a file with its target."""

    def __init__(self, port: int, target: Path, command: list[str]) -> None:
        self.port, self.target, self.command = port, target, command
        self.url = f"http://127.0.0.1:{port}"

    def set_target(self, url: str) -> None:
        new = self.target.with_suffix(".new")
        new.write_text(url + "\n")
        new.rename(self.target)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=scaled(30), trust_env=False)


Start = Callable[..., Any]


@pytest.fixture(params=["python", pytest.param("node", marks=pytest.mark.needs("node"))])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    command = RUN[request.param]()

    @asynccontextmanager
    async def start(target: str, *options: str) -> AsyncIterator[RunningRelay]:
        (tmp_path / "target").write_text(target)
        port_file = tmp_path / "port"
        port_file.unlink(missing_ok=True)
        arguments = [
            *command,
            "--target",
            str(tmp_path / "target"),
            "--port",
            "0",
            "--port-file",
            str(port_file),
            *options,
        ]
        process = await asyncio.create_subprocess_exec(*arguments)
        try:
            async with asyncio.timeout(scaled(20)):
                while not port_file.exists():
                    await asyncio.sleep(0.02)
            yield RunningRelay(int(port_file.read_text()), tmp_path / "target", command)
        finally:
            process.terminate()
            await asyncio.wait_for(process.wait(), scaled(10))

    return start


# ── forwarding ──


async def test_call_is_forwarded_unchanged(start: Start) -> None:
    headers = f"{OK}set-cookie: a=1\r\nset-cookie: b=2\r\nX-Mixed: Case\r\n"
    async with upstream(reply_with("é" * 1000, headers=headers)) as gateway, start(gateway.url + "/prefix") as running:
        async with running.client() as client:
            sent = {"authorization": "Bearer secret", "X-Odd": "é".encode("latin-1")}
            reply = await client.post("/v1/chat/completions?beta=true&x=%20", content=b"\0body", headers=sent)
        assert (reply.status_code, reply.text) == (200, "é" * 1000)
        assert reply.headers.get_list("set-cookie") == ["a=1", "b=2"]
        [request] = gateway.requests
        assert request.request_line == "POST /prefix/v1/chat/completions?beta=true&x=%20 HTTP/1.1"
        assert (request.headers["authorization"], request.body) == ("Bearer secret", b"\0body")
        assert request.headers["host"] == gateway.url.removeprefix("http://")
        assert (request.headers["x-turngate-attempt"], len(request.headers["idempotency-key"])) == ("1", 32)


async def test_unix_socket_target(start: Start, tmp_path: Path) -> None:
    async with (
        upstream(path=tmp_path / "gateway.sock") as gateway,
        start(gateway.url) as running,
        running.client() as client,
    ):
        assert (await client.get("/v1/models")).text == "hello"
        assert gateway.requests[0].headers["host"] == "localhost"


async def test_idempotency_key_of_agent_is_kept(start: Start) -> None:
    async with upstream() as gateway, start(gateway.url) as running, running.client() as client:
        await client.post("/", content=b"x", headers={"Idempotency-Key": "mine", "X-Turngate-Attempt": "99"})
        assert gateway.requests[0].headers["idempotency-key"] == "mine"
        assert gateway.requests[0].headers["x-turngate-attempt"] == "1"
        assert gateway.requests[0].names.count("idempotency-key") == 1


async def test_each_call_has_own_idempotency_key_on_kept_connection(start: Start) -> None:
    async with upstream() as gateway, start(gateway.url) as running, running.client() as client:
        for _ in range(3):
            assert (await client.post("/", content=b"x")).status_code == 200
        assert len({request.headers["idempotency-key"] for request in gateway.requests}) == 3
        assert len(client._transport._pool.connections) == 1  # type: ignore[attr-defined]


async def test_stream_is_forwarded_chunk_by_chunk(start: Start) -> None:
    resume = asyncio.Event()

    async def script(call: Call) -> None:
        await call.send(CHUNKED + "6\r\nfirst\n\r\n")
        await resume.wait()
        await call.send("7\r\nsecond\n\r\n0\r\n\r\n")

    async with upstream(script) as gateway, start(gateway.url) as running, running.client() as client:
        async with client.stream("POST", "/", content=b"x") as reply:
            pieces = reply.aiter_raw()
            assert await asyncio.wait_for(anext(pieces), scaled(5)) == b"first\n"
            resume.set()
            assert b"".join([piece async for piece in pieces]) == b"second\n"
        assert (await client.get("/")).status_code == 200  # the connection is still usable


async def test_head_no_content_and_gateway_errors(start: Start) -> None:
    async def script(call: Call) -> None:
        method = call.request.request_line.split()[0]
        if method == "HEAD":
            await call.send(f"HTTP/1.1 200 OK\r\n{OK}content-length: 500\r\n\r\n")
        elif method == "DELETE":
            await call.send(f"HTTP/1.1 204 No Content\r\n{OK}\r\n")
        else:
            await call.reply('{"error": 1}', call.request.request_line.split()[1].strip("/") + " Reason")

    async with upstream(script) as gateway, start(gateway.url) as running, running.client() as client:
        head = await client.head("/")
        assert (head.status_code, head.headers["content-length"], head.content) == (200, "500", b"")
        assert (await client.delete("/")).status_code == 204
        for status in (400, 401, 404, 409, 429, 500, 502, 503):
            reply = await client.get(f"/{status}")
            assert (reply.status_code, reply.text) == (status, '{"error": 1}')
        assert len(gateway.requests) == 10


async def test_expect_100_continue(start: Start) -> None:
    async with upstream() as gateway, start(gateway.url) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n"
        )
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), scaled(5))).startswith(b"HTTP/1.1 100 ")
        writer.write(b"body")
        assert (await asyncio.wait_for(reader.read(), scaled(5))).endswith(b"hello")
        writer.close()
        assert gateway.requests[0].body == b"body"
        assert "expect" not in gateway.requests[0].headers


async def test_chunked_and_pipelined_requests(start: Start) -> None:
    async def script(call: Call) -> None:
        await asyncio.sleep(0.2 if call.request.body == b"chunked" else 0)
        await call.reply(call.request.body.decode())

    first = "POST /1 HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3;ext=1\r\nchu\r\n4\r\nnked\r\n0\r\ntrailer: x\r\n\r\n"
    second = "POST /2 HTTP/1.1\r\nhost: x\r\ncontent-length: 6\r\nconnection: close\r\n\r\nsecond"
    async with upstream(script) as gateway, start(gateway.url) as running:
        reply = await send_raw(running.port, first + second)
        assert reply.index(b"chunked") < reply.index(b"second")
        assert reply.count(b"HTTP/1.1 200") == 2
        assert {request.body for request in gateway.requests} == {b"chunked", b"second"}
        assert all("transfer-encoding" not in request.headers for request in gateway.requests)


async def test_http_1_0_client_receives_stream(start: Start) -> None:
    async def script(call: Call) -> None:
        await call.send(CHUNKED + "5\r\nhello\r\n0\r\n\r\n")

    async with upstream(script) as gateway, start(gateway.url) as running:
        reply = await send_raw(running.port, "GET / HTTP/1.0\r\nhost: x\r\n\r\n")
        assert reply.endswith(b"\r\n\r\nhello")


async def test_reply_without_length_ends_with_connection(start: Start) -> None:
    async def script(call: Call) -> None:
        await call.send(f"HTTP/1.1 200 OK\r\n{OK}\r\nall of it")

    async with upstream(script) as gateway, start(gateway.url) as running, running.client() as client:
        assert (await client.get("/")).text == "all of it"


async def test_concurrent_calls(start: Start) -> None:
    barrier = asyncio.Barrier(50)

    async def script(call: Call) -> None:
        await barrier.wait()
        await call.reply(call.request.body.decode())

    async with upstream(script) as gateway, start(gateway.url) as running, running.client() as client:
        replies = await asyncio.gather(*(client.post("/", content=b"%d" % n) for n in range(50)))
        assert [reply.text for reply in replies] == [str(n) for n in range(50)]


async def test_large_and_too_large_bodies(start: Start) -> None:
    limit = ("--body-limit", "9000000")
    async with (
        upstream(reply_with("x" * 20_000_000)) as gateway,
        start(gateway.url, *limit) as running,
        running.client() as client,
    ):
        reply = await client.post("/", content=b"y" * 9_000_000)
        assert (len(reply.content), len(gateway.requests[0].body)) == (20_000_000, 9_000_000)
        with suppress(httpx.WriteError, httpx.ReadError):  # the relay may disconnect while the client still sends
            refused = await client.post("/", content=b"y" * 9_000_001)
            assert (refused.status_code, refused.json()["error"]["type"]) == (413, "invalid_request_error")
        assert len(gateway.requests) == 1


# ── retries ──

BROKEN: dict[str, Script] = {
    "no reply at all": drop,
    "half a head": lambda call: call.send("HTTP/1.1 200 OK\r\ncontent-le"),
    "nonsense": lambda call: call.send("SSH-2.0-OpenSSH\r\n\r\n"),
    "404 of a dead tunnel": reply_with("no such tunnel", "404 Not Found", ""),
    "500": reply_with("x", "500 Internal Server Error", ""),
    "502": reply_with("x", "502 Bad Gateway", ""),
    "503": reply_with("x", "503 Service Unavailable", ""),
    "530 of a dead tunnel": reply_with("x", "530 Origin Error", ""),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("broken", BROKEN)
async def test_replies_not_from_gateway_are_retried(start: Start, broken: str) -> None:
    script = in_sequence(BROKEN[broken], BROKEN[broken], reply_with("at last"))
    async with upstream(script) as gateway, start(gateway.url) as running, running.client() as client:
        reply = await client.post("/v1/x", content=b"body")
        assert (reply.status_code, reply.text) == (200, "at last")
        assert [request.headers["x-turngate-attempt"] for request in gateway.requests] == ["1", "2", "3"]
        assert len({request.headers["idempotency-key"] for request in gateway.requests}) == 1
        assert [request.body for request in gateway.requests] == [b"body"] * 3


@pytest.mark.sample(2)
@pytest.mark.parametrize("status", ["400 Bad Request", "401 Unauthorized", "403 Forbidden", "429 Too Many Requests"])
async def test_client_errors_are_not_retried(start: Start, status: str) -> None:
    async with (
        upstream(reply_with("x", status, "")) as gateway,
        start(gateway.url) as running,
        running.client() as client,
    ):
        assert (await client.get("/")).status_code == int(status[:3])
        assert len(gateway.requests) == 1


async def test_call_waits_for_gateway_to_start(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    gateway = Upstream(reply_with("late"))
    async with start(f"http://127.0.0.1:{port}") as running, running.client() as client:
        call = asyncio.create_task(client.get("/"))
        await asyncio.sleep(0.7)
        assert not call.done()
        await gateway.listen(port=port)
        assert (await call).text == "late"
        await gateway.close()


async def test_new_target_is_used_at_once(start: Start) -> None:
    lost = reply_with("x", "404 Not Found", "")
    async with (
        upstream(lost) as dead,
        upstream(reply_with("new")) as new,
        start("") as running,
        running.client() as client,
    ):
        call = asyncio.create_task(client.get("/"))
        await asyncio.sleep(0.3)
        running.set_target(dead.url)
        await kit.wait_until(lambda: dead.requests)
        running.set_target(new.url)
        assert (await call).text == "new"


async def test_call_at_silent_target_moves_to_new_target(start: Start) -> None:
    async def silent(call: Call) -> None:
        await asyncio.sleep(3600)

    async with (
        upstream(silent) as dead,
        upstream(reply_with("new")) as new,
        start(dead.url) as running,
        running.client() as client,
    ):
        call = asyncio.create_task(client.post("/", content=b"x"))
        await kit.wait_until(lambda: dead.requests)
        running.set_target(new.url)
        assert (await asyncio.wait_for(call, scaled(10))).text == "new"
        assert dead.requests[0].headers["idempotency-key"] == new.requests[0].headers["idempotency-key"]


async def test_relay_gives_up_with_503(start: Start) -> None:
    # Long enough for three attempts, and shorter than the client waits.
    limit = ("--give-up-s", str(paced(0.5)))
    async with upstream(drop) as gateway, start(gateway.url, *limit) as running, running.client() as client:
        reply = await client.post("/", content=b"x")
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "gateway_unreachable")
        assert len(gateway.requests) >= 3


# ── cut connections ──

CUTS = {
    "chunked": CHUNKED + "6\r\nfirst\n\r\n",
    "inside a chunk": CHUNKED + "6\r\nfir",
    "before the last line": CHUNKED + "6\r\nfirst\n\r\n0\r\n",
    "by length": f"HTTP/1.1 200 OK\r\n{OK}content-length: 100\r\n\r\nfirst",
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("cut", CUTS)
async def test_cut_reply_is_cut_for_agent(start: Start, cut: str) -> None:
    async def script(call: Call) -> None:
        await call.send(CUTS[cut])
        await asyncio.sleep(0.1)

    async with upstream(script) as gateway, start(gateway.url) as running, running.client() as client:
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            await client.post("/", content=b"x")
        assert len(gateway.requests) == 1


@pytest.mark.parametrize("before", ["the reply", "its end"])
async def test_agent_disconnect_ends_upstream_call(start: Start, before: str) -> None:
    disconnected = asyncio.Event()

    async def script(call: Call) -> None:
        if before == "its end":
            await call.send(CHUNKED + "6\r\nfirst\n\r\n")
        if await call.wait_for_hang_up():
            disconnected.set()

    async with upstream(script) as gateway, start(gateway.url) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nbody")
        if before == "its end":
            await asyncio.wait_for(reader.readuntil(b"first"), scaled(5))
        else:
            await kit.wait_until(lambda: gateway.requests)
        writer.close()
        await asyncio.wait_for(disconnected.wait(), scaled(5))
        await asyncio.sleep(0.5)
        assert len(gateway.requests) == 1


async def test_agent_disconnect_stops_retries(start: Start) -> None:
    async def script(call: Call) -> None:
        if call.request.request_line.startswith("GET /other "):
            await call.reply()

    async with upstream(script) as gateway, start(gateway.url) as running, running.client() as client:

        def attempts() -> int:
            return sum(request.request_line.startswith("GET / ") for request in gateway.requests)

        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await kit.wait_until(lambda: attempts() >= 2)
        writer.close()
        for _ in range(2):  # by the second reply the relay has noticed the disconnect
            await client.get("/other")
        count = attempts()
        await asyncio.sleep(1.5)
        assert attempts() == count


# ── whole program ──


async def test_openai_client_streams_through_relay(start: Start) -> None:
    async def script(call: Call) -> None:
        await call.send(CHUNKED)
        for word in ("Hel", "lo"):
            chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
            event = {**chunk, "choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]}
            data = f"data: {json.dumps(event)}\n\n"
            await call.send(f"{len(data):x}\r\n{data}\r\n")
        await call.send("e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    async with (
        upstream(in_sequence(drop, script)) as gateway,
        start(gateway.url) as running,
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="k", max_retries=0) as client,
    ):
        question: Any = [{"role": "user", "content": "Hi"}]
        stream = await client.chat.completions.create(model="m", messages=question, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hello"


async def test_reached_file_reports_gateway(start: Start, tmp_path: Path) -> None:
    async def read_reached_file(gateway: str) -> str:
        file = tmp_path / "reached"
        file.unlink(missing_ok=True)
        async with start(gateway, "--give-up-s", "1", "--reached-file", str(file)):
            async with asyncio.timeout(scaled(20)):
                while not file.exists():
                    await asyncio.sleep(0.02)
            return file.read_text()

    async with upstream(reply_with("", "404 Not Found")) as gateway:
        assert await read_reached_file(gateway.url) == "reached"
    assert "is not from the gateway" in await read_reached_file("http://127.0.0.1:1")


def test_sandbox_programs_need_only_python_3_8_stdlib() -> None:
    for module in (relay, supervisor):
        tree = ast.parse(Path(module.__file__).read_text(), feature_version=(3, 8))
        imported = {
            name.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
        }
        imported |= {
            node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
        }
        assert imported <= sys.stdlib_module_names
