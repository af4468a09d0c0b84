"""An endpoint that redirects the gateway to an internal address gets no request there, and no key. The control follows the redirect."""

from __future__ import annotations

from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from tests.engines.standins import StandIn, serving
from tests.kit import gateway
from tests.redteam.test_hostile_agent import listen

pytestmark = [pytest.mark.promise(7)]

ENDPOINTS = ("openai", "anthropic", "gemini")


@pytest.mark.parametrize("status", [302, 307, 308])
@pytest.mark.parametrize("kind", ENDPOINTS)
async def test_gateway_follows_no_redirect(kind: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVIDER_KEY", "the-providers-key")
    fetched: list[str] = []
    async with listen(fetched) as listener:
        location = f"http://{listener}/latest/meta-data"

        async def redirect(request: web.Request) -> web.Response:
            return web.Response(status=status, headers={"location": location})

        settings: dict[str, Any] = {"engine_key_env": "PROVIDER_KEY", "model": "m"}
        async with (
            serving(StandIn(redirect)) as provider,
            gateway(observe=kind, engine_url=[provider.url], **settings) as g,
        ):
            session = await g.open()
            with pytest.raises(openai.APIStatusError) as caught:
                await g.ask(session.key, "Hi")
            assert fetched == [] and listener not in str(caught.value)
            assert provider.paths
            async with aiohttp.ClientSession() as http, http.post(provider.url + "/v1/chat/completions", json={}):
                assert len(fetched) == 1
