"""Host names and origins with access over HTTP. A server that has not started yet answers 503."""

from __future__ import annotations

import socket

import httpx2
import pytest
from mcp.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

from turngate.errors import ConfigError
from turngate.mcp.http import HttpSettings, McpAccess

KEY = "a key of the tests"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "127.0.0.1:8710"}, 503),
        ({"host": "[::1]:8710"}, 503),
        ({"host": "10.1.2.3:8710"}, 503),  # an IP address is allowed as host
        ({"host": "Rollouts.Example"}, 503),
        ({"host": socket.gethostname()}, 503),
        ({"host": "evil.example"}, 421),
        ({"host": "rollouts.example.evil.example"}, 421),
        ({"host": "127.0.0.1.evil.example"}, 421),
        ({"host": ""}, 421),
        ({"host": "["}, 421),
        ({"origin": "https://rollouts.example"}, 503),
        ({"origin": "http://[::1]:3000"}, 503),
        ({"origin": "http://10.1.2.3:8710"}, 403),  # but not as origin
        ({"origin": "https://rollouts.example.evil.example"}, 403),
        ({"origin": ""}, 403),
        ({"authorization": "bearer " + KEY}, 503),
        ({"authorization": "Bearer ké"}, 401),
    ],
)
async def test_host_and_origin_checks(headers: dict[str, str], status: int) -> None:
    settings = HttpSettings.parse("0.0.0.0:0", KEY, ["rollouts.example"])
    access = McpAccess(StreamableHTTPSessionManager(Server("nothing")), settings)
    raw = {"host": "localhost", "authorization": f"Bearer {KEY}", **headers}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=access)) as client:
        sent = [(name.encode(), value.encode()) for name, value in raw.items()]
        reply = await client.post("http://localhost/mcp", headers=sent, json={})
    assert reply.status_code == status, reply.text


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:8710", "127.0.0.1", 8710), (":0", "127.0.0.1", 0), ("8710", "127.0.0.1", 8710), ("[::1]:1", "::1", 1)],
)
def test_http_address_is_parsed(text: str, host: str, port: int) -> None:
    settings = HttpSettings.parse(text, KEY)
    assert (settings.host, settings.port) == (host, port)


@pytest.mark.parametrize("text", ["", "here", "here:", "127.0.0.1:x", "127.0.0.1:70000", "http://127.0.0.1:8710/mcp"])
def test_invalid_http_address_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"http must be HOST:PORT, .* not "):
        HttpSettings.parse(text, KEY)
