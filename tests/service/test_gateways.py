"""The gateways that the service starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.kit import config
from turngate.client.gateway import GatewayClient
from turngate.errors import BadRequest
from turngate.service import gateways
from turngate.service.catalog import Endpoint, EndpointChoice

CATALOG = EndpointChoice(endpoint=Endpoint(key="scripted://m"), mode="exact")
CUSTOM = EndpointChoice(endpoint=Endpoint(key="openai://own", url="http://127.0.0.1:1"), mode="observe", is_custom=True)
OTHER = EndpointChoice(endpoint=Endpoint(key="scripted://other"), mode="exact")
OTHER_CUSTOM = EndpointChoice(
    endpoint=Endpoint(key="openai://own", url="http://127.0.0.1:1/v1"), mode="observe", is_custom=True
)


@pytest.mark.parametrize(
    ("running", "wanted", "param", "help"),
    [
        (CATALOG, OTHER, "model_key", "ask the operator to restart the service"),
        (CATALOG, CUSTOM, "endpoint_url", "ask the operator to restart the service"),
        (CUSTOM, CATALOG, "model_key", "try again when a rollout with its own endpoint_url has ended"),
        (CUSTOM, OTHER_CUSTOM, "endpoint_url", "try again when a rollout with its own endpoint_url has ended"),
    ],
)
async def test_error_about_too_many_gateways_says_what_helps(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    running: EndpointChoice,
    wanted: EndpointChoice,
    param: str,
    help: str,
) -> None:
    monkeypatch.setattr(gateways, "MAX_GATEWAYS", 1)

    async def ignore(name: str, client: GatewayClient) -> None:
        pass

    service = gateways.Gateways(config(tmp_path), {}, ignore)
    try:
        async with service.connect(running), service.connect(running):
            with pytest.raises(BadRequest, match=help) as raised:
                async with service.connect(wanted):
                    pass
            assert raised.value.param == param
    finally:
        await service.close()
