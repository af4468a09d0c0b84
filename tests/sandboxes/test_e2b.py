"""E2B: the real SDK against a local stand-in. Never run against the live service (`docs/remote-sandboxes.md`)."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.sandboxes.contract import Contract
from tests.sandboxes.standins.e2b import KEY, E2BStandIn
from tests.sandboxes.standins.machine import Fault, serving
from tests.sandboxes.standins.suite import Remote, RemoteSuite, until
from tests.speed import paced
from turngate.errors import SandboxUnavailable
from turngate.sandboxes import shell
from turngate.sandboxes.base import Backend, Resources, SandboxSpec
from turngate.sandboxes.e2b import E2BBackend

pytestmark = [pytest.mark.process, pytest.mark.full]


@pytest.fixture
async def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[E2BStandIn]:
    standin = E2BStandIn(tmp_path / "machines")
    async with serving(standin):
        monkeypatch.setenv("E2B_API_KEY", KEY)
        monkeypatch.setenv("E2B_API_URL", standin.url)
        monkeypatch.setenv("E2B_SANDBOX_URL", standin.url)
        yield standin


@pytest.fixture
def remote(standin: E2BStandIn) -> Remote:
    return Remote(
        standin,
        E2BBackend,
        key="E2B_API_KEY",
        secret=KEY,
        sdk="e2b",
        start="/process.Process/Start",
        follow="/process.Process/Connect",
        read="GET /files",
        remove="DELETE /sandboxes",
    )


class TestContract(Contract):
    @pytest.fixture
    def backend(self, remote: Remote) -> Backend:
        return remote.make()


class TestE2B(RemoteSuite):
    async def vanish(self, remote: Remote, id: str) -> None:
        await remote.standin.machines[id].destroy()


async def test_closed_network_is_requested_and_allows_gateway(remote: Remote) -> None:
    async with remote.sandbox(network="none") as sandbox:
        body = remote.machine(sandbox).create_body
        assert body["allow_internet_access"] is False
        assert body["autoPause"] is False
    async with remote.sandbox({"reachable": ["gateway.example.com"]}, network="none") as sandbox:
        body = remote.machine(sandbox).create_body
        assert body["network"] == {"allowOut": ["gateway.example.com"], "denyOut": ["0.0.0.0/0"]}
    async with remote.sandbox(network="open") as sandbox:
        body = remote.machine(sandbox).create_body
        assert "network" not in body and "allow_internet_access" not in body


async def test_timeout_is_life_capped_by_lease(remote: Remote) -> None:
    async with remote.sandbox(life_s=100.5) as sandbox:
        assert remote.machine(sandbox).create_body["timeout"] == 101
    async with remote.sandbox(life_s=86_400) as sandbox:
        assert remote.machine(sandbox).create_body["timeout"] == 3600


async def test_create_retry_makes_one_sandbox(remote: Remote) -> None:
    remote.standin.fail(Fault("POST /v2/sandboxes", status=503))
    async with remote.sandbox():
        assert len(remote.standin.machines) == 1


async def test_refused_lease_renewal_is_logged_and_sandbox_ends(
    remote: Remote, standin: E2BStandIn, caplog: pytest.LogCaptureFixture
) -> None:
    async with remote.sandbox({"lease_s": paced(1)}) as sandbox:
        standin.max_timeout_s = 1
        with caplog.at_level(logging.WARNING):
            await until(lambda: "so the sandbox will end" in caplog.text)
        assert KEY not in caplog.text
        await until(lambda: not remote.machine(sandbox).alive)


async def test_sweep_reads_every_page(remote: Remote, standin: E2BStandIn) -> None:
    standin.page = 1
    created = [await remote.make().create(SandboxSpec()) for _ in range(3)]
    for sandbox in created:
        remote.machine(sandbox).labels["turngate-process"] = "4194305-1"
    assert await remote.make().sweep() == 3
    for sandbox in created:
        await sandbox.stop()


async def test_unknown_template_is_unavailable(remote: Remote) -> None:
    with pytest.raises(SandboxUnavailable):
        await remote.make().create(SandboxSpec(image="nothing"))


async def test_unsupported_resources_are_logged(remote: Remote, caplog: pytest.LogCaptureFixture) -> None:
    async with remote.sandbox(resources=Resources(cpus=2)):
        assert "not applied" in caplog.text


async def test_job_ends_despite_hanging_stream(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "POLL_S", 0.2)
    async with remote.sandbox() as sandbox:
        remote.standin.fail(Fault(remote.start, cut_s=3600))
        job = await sandbox.start(["sh", "-c", "sleep 0.5; exit 8"])
        assert await job.wait() == 8


async def test_login_profile_output_and_variables_are_ignored(remote: Remote, standin: E2BStandIn) -> None:
    standin.profile = "echo welcome; export PATH=/usr/bin:/bin MINE=profile\n"
    async with remote.sandbox(env={"MINE": "spec"}) as sandbox:
        await sandbox.write("file", b"x")
        assert await sandbox.read("file") == b"x"
        assert (await sandbox.exec(["sh", "-c", "echo $MINE"])).stdout == b"spec\n"
