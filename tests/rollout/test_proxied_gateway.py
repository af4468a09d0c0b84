"""What a client of the admin API makes of answers that are no answers: those of a proxy, of a gateway that stops, of somebody else."""

from __future__ import annotations

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

pytestmark = pytest.mark.process


class Front:
    """A proxy. `instead`: statuses with which it answers by itself, before it asks the gateway again."""

    def __init__(self, gateway: str = "") -> None:
        self.instead: list[int] = []
        self.url = ""
        self._gateway = gateway

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.instead:
            return web.Response(status=self.instead.pop(0), text="<html>Bad gateway</html>", content_type="text/html")
        async with ClientSession(auto_decompress=False) as http:
            headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
            url = self._gateway + request.raw_path
            async with http.request(request.method, url, headers=headers, data=await request.read()) as told:
                kept = {name: told.headers[name] for name in ("x-turngate", "content-type") if name in told.headers}
                return web.Response(status=told.status, body=await told.read(), headers=kept)


@asynccontextmanager
async def open_front(gateway: str = "") -> AsyncIterator[Front]:
    front = Front(gateway)
    runner = web.ServerRunner(web.Server(front))
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        front.url = f"http://{host}:{port}"
        yield front
    finally:
        await runner.cleanup()


async def test_a_proxy_without_its_gateway_is_not_taken_for_a_wrong_address() -> None:
    async with open_front() as front, GatewayClient(front.url, "x") as client:
        for status in (502, 503, 504):
            front.instead = [status]
            unreachable = (
                f"returned status {status}, but the reply is not from a turngate gateway: .* the address is wrong"
            )
            with pytest.raises(GatewayUnreachable, match=unreachable):
                await client.check()
        for status in (200, 404, 500):
            front.instead = [status]
            with pytest.raises(ConfigError, match="is not a turngate gateway"):
                await client.check()


async def test_a_trainer_goes_on_when_the_gateway_is_back_behind_its_proxy() -> None:
    async with (
        training() as running,
        open_front(running.g.root) as front,
        GatewayClient(front.url, running.g.app.admin_key) as client,
    ):
        front.instead = [502]
        feed = await Feed.open(client, "train", FeedConfig(n=1))
        await running.rollout(1.0)
        front.instead = [502, 504, 503]
        delivery = await feed.next(scaled(20))
        assert delivery is not None and delivery.number == 1
        front.instead = [503]
        await feed.commit(1)
        assert feed.committed == 1
