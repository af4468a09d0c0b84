"""Client for the engine pool of a gateway: add, drain and remove engines while it runs."""

from __future__ import annotations

import aiohttp

from turngate.client.gateway import GatewayClient
from turngate.client.protocol import EnginesView
from turngate.types import Json


class EnginePoolClient(GatewayClient):
    """A gateway client that also changes the engine pool."""

    async def add_engine(self, url: str, version: int | None = None) -> EnginesView:
        """Add an engine, which first loads the current weights. Set `version` if it already has the weights of this version."""
        limit = aiohttp.ClientTimeout(total=None, sock_connect=30)
        return await self._request(
            "POST", "/admin/engines", EnginesView, {"url": url, "version": version}, within=limit
        )

    async def drain_engine(self, url: str) -> EnginesView:
        """Give an engine no new calls. Its sessions move with their next call."""
        return await self._request("POST", "/admin/engines/drain", EnginesView, {"url": url})

    async def remove_engine(self, url: str, *, limit_s: float | None = None, force: bool = False) -> EnginesView:
        """Remove an engine when its calls have ended. With `force`, remove it immediately: its calls fail."""
        body: dict[str, Json] = {"url": url, "force": force}
        if limit_s is not None:
            body["limit_s"] = limit_s
        limit = aiohttp.ClientTimeout(total=None, sock_connect=30)
        return await self._request("POST", "/admin/engines/remove", EnginesView, body, within=limit)
