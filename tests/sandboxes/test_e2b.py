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


async def test_a_closed_network_is_e2bs_own_and_the_gateway_stays_open(remote: Remote) -> None:
    async with remote.sandbox(network="none") as sandbox:
        asked = remote.machine(sandbox).asked
        assert asked["allow_internet_access"] is False
        assert asked["autoPause"] is False
    async with remote.sandbox({"reachable": ["gateway.example.com"]}, network="none") as sandbox:
        asked = remote.machine(sandbox).asked
        assert asked["network"] == {"allowOut": ["gateway.example.com"], "denyOut": ["0.0.0.0/0"]}
    async with remote.sandbox(network="open") as sandbox:
        asked = remote.machine(sandbox).asked
        assert "network" not in asked and "allow_internet_access" not in asked


async def test_the_life_is_e2bs_timeout_up_to_the_lease(remote: Remote) -> None:
    async with remote.sandbox(life_s=100.5) as sandbox:
        assert remote.machine(sandbox).asked["timeout"] == 101
    async with remote.sandbox(life_s=86_400) as sandbox:
        assert remote.machine(sandbox).asked["timeout"] == 3600


async def test_a_busy_service_is_asked_again_and_makes_one_sandbox(remote: Remote) -> None:
    remote.standin.fail(Fault("POST /v2/sandboxes", status=503))
    async with remote.sandbox():
        assert len(remote.standin.machines) == 1


async def test_an_account_that_may_not_keep_it_longer(
    remote: Remote, standin: E2BStandIn, caplog: pytest.LogCaptureFixture
) -> None:
    async with remote.sandbox({"lease_s": paced(1)}) as sandbox:
        standin.longest_s = 1
        with caplog.at_level(logging.WARNING):
            await until(lambda: "so it will end" in caplog.text)
        assert KEY not in caplog.text
        await until(lambda: not remote.machine(sandbox).alive)


async def test_sweeping_reads_every_page(remote: Remote, standin: E2BStandIn) -> None:
    standin.page = 1
    made = [await remote.make().create(SandboxSpec()) for _ in range(3)]
    for sandbox in made:
        remote.machine(sandbox).labels["turngate-process"] = "4194305-1"
    assert await remote.make().sweep() == 3
    for sandbox in made:
        await sandbox.stop()


async def test_no_template_of_that_name_is_no_reason_to_try_again(remote: Remote) -> None:
    with pytest.raises(SandboxUnavailable):
        await remote.make().create(SandboxSpec(image="nothing"))


async def test_resources_that_cannot_be_had_are_told(remote: Remote, caplog: pytest.LogCaptureFixture) -> None:
    async with remote.sandbox(resources=Resources(cpus=2)):
        assert "not applied" in caplog.text


async def test_a_stream_that_hangs_without_breaking(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "POLL_S", 0.2)
    async with remote.sandbox() as sandbox:
        remote.standin.fail(Fault(remote.start, cut_s=3600))
        job = await sandbox.start(["sh", "-c", "sleep 0.5; exit 8"])
        assert await job.wait() == 8


async def test_a_template_whose_profile_talks_and_sets_variables(remote: Remote, standin: E2BStandIn) -> None:
    standin.profile = "echo welcome; export PATH=/usr/bin:/bin MINE=profile\n"
    async with remote.sandbox(env={"MINE": "spec"}) as sandbox:
        await sandbox.write("file", b"x")
        assert await sandbox.read("file") == b"x"
        assert (await sandbox.exec(["sh", "-c", "echo $MINE"])).stdout == b"spec\n"
