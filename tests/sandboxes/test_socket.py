"""WebSockets pass through the relay, in Python and in Node, and through the door."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import websockets

from tests.kit import Gated, gateway, say, until
from tests.sandboxes.test_relay import Start, start
from tests.sandboxes.upstream import Call, in_sequence, reply_with, send_raw, upstream
from tests.speed import scaled
from turngate.sandboxes.door import open_door

__all__ = ["start"]  # a fixture
UPGRADE = "connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-key: a2V5\r\nsec-websocket-version: 13\r\n"
ACCEPT = "HTTP/1.1 101 Switching Protocols\r\nx-turngate: 1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"


async def ask(url: str, key: str, texts: list[str]) -> list[str]:
    """Hold a conversation over one connection and return the answers."""
    answers: list[str] = []
    fields = {"Authorization": f"Bearer {key}"}
    async with websockets.connect(url, additional_headers=fields, proxy=None, open_timeout=scaled(20)) as connection:
        previous = None
        for text in texts:
            request = {"type": "response.create", "model": "m", "input": text, "store": False}
            await connection.send(json.dumps({**request, "previous_response_id": previous}))
            while (frame := json.loads(await connection.recv()))["type"] != "response.completed":
                assert frame["type"] != "error", frame
            previous = frame["response"]["id"]
            answers.append(frame["response"]["output"][-1]["content"][0]["text"])
    return answers


@pytest.mark.process
async def test_conversation_through_relay_and_door(start: Start, tmp_path: Path) -> None:
    long = "word " * 60_000  # larger than every buffer on the way
    async with gateway([say("One."), say("Two.")]) as g:
        session = await g.open()
        async with open_door(g.root) as door, start(door.address) as running:
            url = running.url.replace("http", "ws") + "/v1/responses"
            assert await ask(url, session.key, ["Hi", long]) == ["One.", "Two."]
            assert door.calls == 1
        [row] = await g.samples(session.id)
        assert len(row["spans"]) == 2


@pytest.mark.process
async def test_hang_up_reaches_gateway_through_relay_and_door(start: Start) -> None:
    engine = Gated([say("Never finished.")], tokens=2)
    async with gateway(engine=engine) as g:
        session = await g.open()
        async with open_door(g.root) as door, start(door.address) as running:
            url = running.url.replace("http", "ws") + "/v1/responses"
            fields = {"Authorization": f"Bearer {session.key}"}
            async with websockets.connect(url, additional_headers=fields, proxy=None) as connection:
                await connection.send(json.dumps({"type": "response.create", "model": "m", "input": "Hi"}))
                await until(lambda: engine.waiting, seconds=20)
                connection.transport.abort()
            live = g.app.sessions.find_live(session.id)
            assert live is not None
            await until(lambda: not live.busy, seconds=20)
        assert [turn["finish"] for turn in await g.turns(session.id)] == ["abort"]


@pytest.mark.process
async def test_refused_upgrade_passes_relay_with_its_words(start: Start) -> None:
    async with gateway() as g:
        session = await g.open()
        async with open_door(g.root) as door, start(door.address) as running:
            for key, path, status in ((session.key, "/v1/models", 426), ("wrong", "/v1/responses", 401)):
                with pytest.raises(websockets.InvalidStatus) as caught:
                    await ask(running.url.replace("http", "ws") + path, key, ["Hi"])
                assert caught.value.response.status_code == status
                assert b'"message"' in (caught.value.response.body or b"")
            async with running.client() as client:
                assert (await client.get("/v1/models", headers={"authorization": f"Bearer {session.key}"})).is_success


@pytest.mark.process
async def test_relay_retries_upgrade_until_gateway_answers(start: Start) -> None:
    async def accept(call: Call) -> None:
        await call.send(ACCEPT)
        await call.send(b"echo:" + await call.reader.readexactly(5))

    script = in_sequence(reply_with("", status="502 Bad Gateway", headers=""), accept)
    async with upstream(script) as gateway_stand_in, start(gateway_stand_in.url) as running:
        head = f"GET /v1/responses HTTP/1.1\r\nhost: x\r\n{UPGRADE}\r\n"
        reply = await send_raw(running.port, head + "hello")
        assert reply.lower().startswith(b"http/1.1 101") and reply.endswith(b"\r\n\r\necho:hello")
        first, second = gateway_stand_in.requests
        assert (first.headers["upgrade"], second.headers["x-turngate-attempt"]) == ("websocket", "2")


async def test_door_admits_sockets_only_where_listed() -> None:
    async with upstream() as gateway_stand_in, open_door(gateway_stand_in.url) as door:
        port = int(door.address.rpartition(":")[2])
        for path in ("/admin", "/s/other/v1/responses", "/v1/realtime"):
            reply = await send_raw(port, f"GET {path} HTTP/1.1\r\nhost: x\r\n{UPGRADE}connection: close\r\n\r\n")
            assert reply.startswith(b"HTTP/1.1 404 ")
        assert not gateway_stand_in.requests


async def test_bytes_after_refused_upgrade_are_next_request() -> None:
    """The door tunnels bytes only after the gateway has accepted the WebSocket."""
    async with upstream(reply_with("no", status="426 Upgrade Required")) as gateway_stand_in:
        async with open_door(gateway_stand_in.url) as door:
            port = int(door.address.rpartition(":")[2])
            smuggled = "GET /admin HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            reply = await send_raw(port, f"GET /v1/responses HTTP/1.1\r\nhost: x\r\n{UPGRADE}\r\n{smuggled}")
        assert reply.startswith(b"HTTP/1.1 426 ") and reply.count(b"HTTP/1.1 404 ") == 1
        assert [request.request_line for request in gateway_stand_in.requests] == ["GET /v1/responses HTTP/1.1"]
