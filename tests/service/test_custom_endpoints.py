"""Gateway folders of custom endpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit import until
from tests.service.kit import Service, run_service

pytestmark = pytest.mark.process


@pytest.mark.full
async def test_folder_is_deleted_with_last_rollout() -> None:
    async with run_service(allowed_hosts=["127.0.0.1:1"], keep=2) as service:
        first = await run_rollout(service, "a")
        assert await run_rollout(service, "a") == first  # the same endpoint
        await run_rollout(service, "b")
        assert len(list(gateways_folder(service).glob("own-*"))) == 2
        [second] = await run_rollout(service, "b") - first
        await until(
            lambda: set(gateways_folder(service).glob("own-*")) == {second}, 60
        )  # deleted after the caller has its result


async def run_rollout(service: Service, name: str) -> set[Path]:
    """Run one rollout and return the folders that exist after it."""
    url = f"http://127.0.0.1:1/{name}"
    await service.rollouts.run(service.request("pass", model_key="openai://theirs", mode="observe", endpoint_url=url))
    return set(gateways_folder(service).glob("own-*"))


def gateways_folder(service: Service) -> Path:
    return service.data / "gateways"
