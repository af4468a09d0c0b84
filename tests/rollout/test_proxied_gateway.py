"""The admin API's client behind a proxy, which replies itself while the gateway is down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession, web

from tests.feed.kit import training
from tests.speed import scaled
from turngate.client.feed import Feed
from turngate.client.gateway import GatewayClient, GatewayUnreachable
from turngate.client.protocol import FeedConfig
from turngate.errors import ConfigError
from turngate.rollout.group_closer import GroupCloser
from turngate.rollout.ledger import FinishedRollout

pytestmark = pytest.mark.process


class Proxy:
    """A proxy. It replies itself with the statuses in `own_statuses` before it forwards requests again."""

    def __init__(self, gateway: str = "") -> None:
        self.own_statuses: list[int] = []
        self.url = ""
        self._gateway = gateway

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.own_statuses:
            return web.Response(
                status=self.own_statuses.pop(0), text="<html>Bad gateway</html>", content_type="text/html"
            )
        async with ClientSession(auto_decompress=False) as http:
            headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
            url = self._gateway + request.raw_path
            async with http.request(request.method, url, headers=headers, data=await request.read()) as response:
                response_headers = {
                    name: response.headers[name] for name in ("x-turngate", "content-type") if name in response.headers
                }
                return web.Response(status=response.status, body=await response.read(), headers=response_headers)


@asynccontextmanager
async def open_proxy(gateway: str = "") -> AsyncIterator[Proxy]:
    proxy = Proxy(gateway)
    runner = web.ServerRunner(web.Server(proxy))
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        proxy.url = f"http://{host}:{port}"
        yield proxy
    finally:
        await runner.cleanup()


async def test_proxy_error_is_unreachable_but_other_reply_is_config_error() -> None:
    async with open_proxy() as proxy, GatewayClient(proxy.url, "x") as client:
        for status in (502, 503, 504):
            proxy.own_statuses = [status]
            unreachable = (
                f"returned status {status}, but the reply is not from a turngate gateway: .* the address is wrong"
            )
            with pytest.raises(GatewayUnreachable, match=unreachable) as raised:
                await client.check()
            assert raised.value.retry_safe == (status == 503), "with the others, it may have sent the request"
        for status in (200, 404, 500):
            proxy.own_statuses = [status]
            with pytest.raises(
                ConfigError, match=f"returned status {status}, but the reply is not from a turngate gateway; check"
            ):
                await client.check()


async def test_reply_that_is_not_from_a_gateway_is_not_a_refusal_to_close_a_group() -> None:
    async with open_proxy() as proxy, GatewayClient(proxy.url, "x") as client:
        proxy.own_statuses = [200]
        problems: list[str] = []
        closer = GroupCloser(client, 1, problems.append)
        closer.add(FinishedRollout(rollout="b.t.0", task="t", index=0, kind="graded", session="s", at=0.0))
        running = asyncio.create_task(closer.run())
        assert await closer.flush(scaled(10))
        running.cancel()
    assert problems == [
        f"closing group b.t failed: gateway: {proxy.url} returned status 200, but the reply is not from a turngate gateway; "
        "check the address and any proxy in front of the gateway"
    ]


async def test_feed_retries_until_gateway_is_back_behind_proxy() -> None:
    async with (
        training() as running,
        open_proxy(running.g.root) as proxy,
        GatewayClient(proxy.url, running.g.app.admin_key) as client,
    ):
        proxy.own_statuses = [502]
        feed = await Feed.open(client, "train", FeedConfig(n=1))
        await running.rollout(1.0)
        proxy.own_statuses = [502, 504, 503]
        delivery = await feed.next(scaled(20))
        assert delivery is not None and delivery.number == 1
        proxy.own_statuses = [503]
        await feed.commit(1)
        assert feed.committed == 1
