"""The forwarder of direct mode: turns, errors, and verbatim forwarding."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from tests.kit import until
from tests.service.kit import KEY, run_service
from turngate.service.catalog import Endpoint
from turngate.service.direct_mode import DirectModeClient, Forwarder

pytestmark = pytest.mark.process

CHAT = "/v1/chat/completions"
RequestHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def run_endpoint(handler: RequestHandler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=1.0, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def run_forwarder(base: str) -> AsyncIterator[tuple[Forwarder, DirectModeClient, aiohttp.ClientSession]]:
    forwarder = Forwarder(base)
    async with forwarder.open() as url, aiohttp.ClientSession(url) as agent:
        yield forwarder, DirectModeClient(url, forwarder, lambda kind, data: None), agent


@pytest.mark.parametrize(
    ("status", "body", "kind", "boundary"),
    [
        (500, "boom", "engine_error", "engine"),
        (503, "no", "engine_unavailable", "engine"),
        (429, "slower", "rate_limit_exceeded", "engine"),
        (401, "who?", "engine_error", "engine"),
        (307, "", "engine_error", "engine"),
        (400, "bad tool", "invalid_request_error", "engine"),
        (400, "maximum context length is 10 tokens", "context_length_exceeded", "client"),
    ],
)
async def test_failed_call_is_an_error_not_a_turn(status: int, body: str, kind: str, boundary: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        error = {"error": {"message": body}} if status >= 400 else {}
        return web.json_response(error, status=status, headers={"location": "/x"} if status == 307 else {})

    async with run_endpoint(handler) as base, run_forwarder(base) as (_, client, agent):
        reply = await agent.post(CHAT, json={})
        shown = await client.show("s")
    assert reply.status == (502 if status == 307 else status)
    assert (
        shown.turns == 0
        and shown.last_error is not None
        and (shown.last_error.kind, shown.last_error.boundary) == (kind, boundary)
    )


async def test_only_model_replies_clear_last_error() -> None:
    statuses = [500, 200, 200, 404, 500]

    async def handler(request: web.Request) -> web.Response:
        return web.json_response({}, status=statuses.pop(0))

    async with run_endpoint(handler) as base, run_forwarder(base) as (_, client, agent):
        await agent.post(CHAT, json={})
        await agent.get("/v1/models")
        shown = await client.show("s")
        assert shown.turns == 0 and shown.last_error is not None
        await agent.post(CHAT, json={})
        for path in ("/v1/messages/count_tokens", "/v1/telemetry"):
            shown = await client.show("s")
            assert (shown.turns, shown.last_error) == (1, None)
            assert (await agent.post(path, json={})).status >= 400
        assert await client.show("s") == shown


async def test_websocket_is_refused_with_words() -> None:
    async def handler(request: web.Request) -> web.Response:
        raise AssertionError("the upgrade must not reach the endpoint")

    async with run_endpoint(handler) as base, run_forwarder(base) as (_, _, agent):
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await agent.ws_connect("/v1/responses")
        assert caught.value.status == 426
        reply = await agent.get("/v1/responses", headers={"connection": "upgrade", "upgrade": "websocket"})
        assert "over HTTP" in (await reply.json())["error"]["message"]


async def test_refused_connection_and_cut_reply() -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        assert request.transport is not None
        request.transport.abort()
        return response

    async with run_forwarder("http://127.0.0.1:1") as (forwarder, _, agent):
        assert (await agent.post(CHAT, json={})).status == 502
        assert forwarder.answered == 0 and forwarder.last_error is not None
        assert forwarder.last_error.message == "the connection to the endpoint failed: connection refused"
    async with run_endpoint(cut) as base, run_forwarder(base) as (forwarder, _, agent):
        with pytest.raises(aiohttp.ClientError):
            await (await agent.post(CHAT, json={})).read()
        assert forwarder.answered == 0 and forwarder.last_error is not None
        assert forwarder.last_error.kind == "engine_unavailable"


async def test_agent_disconnect_is_not_an_endpoint_error() -> None:
    received = asyncio.Event()

    async def silent(request: web.Request) -> web.StreamResponse:
        received.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with run_endpoint(silent) as base, run_forwarder(base) as (forwarder, client, agent):
        call = asyncio.create_task(agent.post(CHAT, json={}))
        await received.wait()
        call.cancel()
        await asyncio.wait([call])
        await until(lambda: not forwarder.engine_silence._calls)
        shown = await client.show("s")
    assert (shown.turns, shown.last_error) == (0, None) and shown.unheard_s > 0


@pytest.mark.parametrize(
    ("base", "path", "target"),
    [
        ("", "/v1/messages", "/v1/messages"),
        ("/v1", "/v1/messages", "/v1/messages"),
        ("/api", "/v1/messages", "/api/messages"),
        ("", "/v1beta/models/m:generateContent", "/v1beta/models/m:generateContent"),
        ("/v1beta", "/v1beta/models/m:generateContent", "/v1beta/models/m:generateContent"),
        ("/api", "/v1beta/models/m:generateContent", "/api/v1beta/models/m:generateContent"),
    ],
)
def test_path_of_the_endpoint_replaces_the_version(base: str, path: str, target: str) -> None:
    assert Forwarder(f"https://host{base}").target_url(path) == f"https://host{target}"


async def test_path_and_query_are_forwarded_verbatim() -> None:
    seen: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.raw_path)
        return web.json_response({})

    path = "/v1/models/a%2Fb"
    async with run_endpoint(handler) as base, Forwarder(base).open() as url:
        host, port = url.removeprefix("http://").split(":")
        # Of the keys in a query, only that of the session is removed.
        for query in ("?q=a%26b%3Dc+d%20e&x=%E4", "?alt=sse&key=none&key=other&nokey=none", "?key=none"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"GET {path}{query} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            await reader.read()
            writer.close()
    assert seen == [path + "?q=a%26b%3Dc+d%20e&x=%E4", path + "?alt=sse&key=other&nokey=none", path]


async def test_dead_endpoint_is_infrastructure_fault() -> None:
    """Whether or not the agent handles the error."""
    endpoints = {KEY: Endpoint(model="m"), "openai://dead": Endpoint(url="http://127.0.0.1:1/v1")}
    tolerant = 'try:\n    ask("x")\nexcept SystemExit:\n    pass'
    async with run_service(endpoints=endpoints) as service:
        options = {"model_key": "openai://dead", "mode": "direct", "test_script": "exit 1"}
        runs = (service.rollouts.run(service.request(program, **options)) for program in ('ask("x")', tolerant))
        for result in await asyncio.gather(*runs):
            assert (result.status, result.kind, result.reward) == ("error", "infrastructure fault", None)
            assert result.error is not None and result.error.boundary == "engine"
