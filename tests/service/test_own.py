"""Endpoints of callers' own: what is left of them on the server's disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit import until
from tests.service.kit import Service, served

pytestmark = pytest.mark.process


async def test_their_folders_go_with_the_last_rollout_that_is_remembered() -> None:
    async with served(allowed_hosts=["127.0.0.1:1"], keep=2) as service:
        first = await placed(service, "a")
        assert await placed(service, "a") == first  # the same endpoint
        await placed(service, "b")
        assert len(list(folder(service).glob("own-*"))) == 2
        [second] = await placed(service, "b") - first
        await until(lambda: set(folder(service).glob("own-*")) == {second}, 60)  # when its caller has its result


async def placed(service: Service, name: str) -> set[Path]:
    """One rollout, and the folders that there are after it."""
    url = f"http://127.0.0.1:1/{name}"
    await service.rollouts.run(service.asked("pass", model_key="openai://theirs", mode="observe", endpoint_url=url))
    return set(folder(service).glob("own-*"))


def folder(service: Service) -> Path:
    return service.data / "gateways"
