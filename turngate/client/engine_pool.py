"""Client for the engine pool of a gateway: add, drain and remove engines while the gateway is running."""

from __future__ import annotations

import aiohttp

from turngate.client.gateway import GatewayClient
from turngate.client.protocol import EnginesView
from turngate.types import Json


class EnginePoolClient(GatewayClient):
    """A gateway client that can also change the engine pool."""

    async def add_engine(self, url: str, version: int | None = None) -> EnginesView:
        """Add an engine, or stop draining one. If the gateway can load the current weights, it does so before the engine receives calls.

        If the engine already has the current weights, set `version` to their policy version, so that they are not loaded again. If another
        program loaded them into the other engines, the gateway cannot load them, and `version` is required.
        """
        limit = aiohttp.ClientTimeout(total=None, sock_connect=30)
        return await self._request(
            "POST", "/admin/engines", EnginesView, {"url": url, "version": version}, within=limit
        )

    async def drain_engine(self, url: str) -> EnginesView:
        """Stop sending new calls to an engine. Its sessions move to another engine on their next call."""
        return await self._request("POST", "/admin/engines/drain", EnginesView, {"url": url})

    async def remove_engine(self, url: str, *, limit_s: float | None = None, force: bool = False) -> EnginesView:
        """Drain an engine, and remove it when its calls have ended.

        If the calls do not end within `limit_s` seconds, the request fails, and the engine keeps draining. With `force`, remove
        the engine immediately. Its calls in flight fail if they have produced tokens. Otherwise, they are retried on another engine.
        """
        body: dict[str, Json] = {"url": url, "force": force}
        if limit_s is not None:
            body["limit_s"] = limit_s
        limit = aiohttp.ClientTimeout(total=None, sock_connect=30)
        return await self._request("POST", "/admin/engines/remove", EnginesView, body, within=limit)
