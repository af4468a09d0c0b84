"""Tests for the warnings while a gateway does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

import pytest

from turngate.client import outage
from turngate.client.feed import Feed
from turngate.client.gateway import GatewayClient
from turngate.client.outage import OutageReport
from turngate.client.protocol import FeedConfig
from turngate.client.retry import retry_while_unreachable
from turngate.client.transport import GatewayReplyLost, GatewayUnreachable

NOWHERE = "http://127.0.0.1:9"


async def test_retry_is_safe_only_if_the_request_was_not_sent() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with GatewayClient(f"http://127.0.0.1:{port}", "x") as client:
            with pytest.raises(GatewayReplyLost) as raised:
                await client.cancel("s")
        assert not raised.value.retry_safe
    async with GatewayClient(NOWHERE, "x") as client:
        with pytest.raises(GatewayUnreachable) as refused:
            await client.cancel("s")
    assert refused.value.retry_safe


def test_warnings_at_growing_intervals(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    report = OutageReport(NOWHERE, lambda: now)

    def warn_until(end: int) -> list[int]:
        nonlocal now
        warned = []
        for second in range(int(now), end):
            now = second
            caplog.clear()
            report.add_failure()
            warned += [int(now)] * len(caplog.records)
        return warned

    assert warn_until(3000) == [10, 20, 40, 80, 160, 320, 640, 1240, 1840, 2440]
    caplog.clear()
    report.add_answer()
    report.add_answer()
    assert caplog.messages == [f"gateway {NOWHERE} is answering again"]
    now = 3000
    assert warn_until(3021) == [3010, 3020]
    assert caplog.messages == [
        f"gateway {NOWHERE} has not answered for 20 s; still retrying; if it has stopped, restart it with `turngate serve --data …`"
    ]


def test_short_outage_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    report = OutageReport(NOWHERE, lambda: now)
    for now in range(100):
        report.add_failure()
        if now % 9 == 0:
            report.add_answer()
    assert caplog.messages == []


async def follow_events(client: GatewayClient) -> None:
    async for _ in client.events("batch"):
        pass


async def read_feed(client: GatewayClient) -> None:
    assert await Feed(client, "f", FeedConfig(n=1), "mark", "reader", 0, 0, 1).next(60) is None


async def wait_for_gateway(client: GatewayClient) -> None:
    await retry_while_unreachable(client.check)


@pytest.mark.parametrize("wait", [follow_events, read_feed, wait_for_gateway])
async def test_every_client_that_waits_warns(
    wait: Callable[[GatewayClient], Awaitable[None]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch follows its events for as long as it runs, so it warns even while its agents are waiting."""
    monkeypatch.setattr(outage, "_FIRST_S", 0.01)
    caplog.set_level(logging.WARNING, "turngate")
    async with GatewayClient(NOWHERE, "k" * 20) as client:
        waiting = asyncio.ensure_future(wait(client))
        async with asyncio.timeout(20):
            while not any("has not answered for" in message for message in caplog.messages):
                await asyncio.sleep(0.02)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting


@pytest.mark.parametrize("status", [b"302 Found", b"429 Too Many Requests", b"500 Internal Server Error"])
async def test_events_treat_errors_that_may_pass_as_an_outage(
    status: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    monkeypatch.setattr(outage, "_FIRST_S", 0.01)
    async with await asyncio.start_server(fail, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with GatewayClient(f"http://127.0.0.1:{port}", "k" * 20) as client:
            following = asyncio.ensure_future(follow_events(client))
            async with asyncio.timeout(20):
                while "has not answered for" not in caplog.text:
                    await asyncio.sleep(0.02)
            assert not following.done()
            following.cancel()
            await asyncio.wait([following])
