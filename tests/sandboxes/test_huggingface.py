"""Hugging Face: the real SDK against a local stand-in. Never run against the live service (`docs/remote-sandboxes.md`)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from tests.sandboxes.contract import Contract
from tests.sandboxes.standins.huggingface import TOKEN, HuggingFaceStandIn
from tests.sandboxes.standins.machine import Fault, serving
from tests.sandboxes.standins.suite import Remote, RemoteSuite, until
from turngate.errors import SandboxError
from turngate.sandboxes.base import Backend, SandboxSpec
from turngate.sandboxes.huggingface import HuggingFaceBackend

pytestmark = [pytest.mark.process, pytest.mark.full]


@pytest.fixture
async def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HuggingFaceStandIn]:
    standin = HuggingFaceStandIn(tmp_path / "machines")
    async with serving(standin):
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", standin.url)  # HF_ENDPOINT is read at import
        yield standin


@pytest.fixture
def remote(standin: HuggingFaceStandIn) -> Remote:
    return Remote(
        standin,
        HuggingFaceBackend,
        key="HF_TOKEN",
        secret=TOKEN,
        sdk="huggingface_hub",
        start="POST .*/v1/processes",
        follow="GET .*/v1/processes",
        read="/v1/files/read",
        remove="/cancel",
    )


class TestContract(Contract):
    @pytest.fixture
    def backend(self, remote: Remote) -> Backend:
        return remote.make()


class TestHuggingFace(RemoteSuite):
    async def vanish(self, remote: Remote, id: str) -> None:
        assert isinstance(remote.standin, HuggingFaceStandIn)
        await remote.standin.end(id, "ERROR")


async def test_job_has_neither_token_nor_environment(remote: Remote) -> None:
    async with remote.sandbox({"flavor": "cpu-upgrade"}, image="debian:12", env={"SECRET": "swordfish"}) as sandbox:
        body = remote.machine(sandbox).create_body
        assert (body["dockerImage"], body["flavor"]) == ("debian:12", "cpu-upgrade")
        assert TOKEN not in json.dumps(body)
        assert "swordfish" not in json.dumps(body)


async def test_cancelled_creation_is_undone(remote: Remote) -> None:
    remote.standin.fail(Fault("/health", wait_s=0.5))
    creating = asyncio.create_task(remote.make().create(SandboxSpec()))
    await until(lambda: len(remote.standin.machines) == 1)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    await until(lambda: not any(machine.alive for machine in remote.standin.machines.values()))


async def test_job_that_never_gets_ready_is_removed(remote: Remote) -> None:
    remote.standin.fail(Fault("/health", times=1000, status=503))
    with pytest.raises(SandboxError, match="ready"):
        await remote.make(start_s=0.5).create(SandboxSpec())
    assert not any(machine.alive for machine in remote.standin.machines.values())


async def test_open_network_is_logged_once(remote: Remote, caplog: pytest.LogCaptureFixture) -> None:
    backend = remote.make()
    for _ in range(2):
        await (await backend.create(SandboxSpec(network="none"))).stop()
    assert caplog.text.count("cannot block network access") == 1
