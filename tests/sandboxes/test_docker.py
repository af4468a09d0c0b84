"""Features of docker only: images, Dockerfiles, limits, labels, and a command line that every user can read."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.docker_daemon import DockerDaemon, start_docker
from tests.sandboxes import kit
from tests.sandboxes.contract import sh
from tests.speed import scaled
from tools import base_image
from turngate.errors import SandboxError
from turngate.sandboxes import docker
from turngate.sandboxes.base import Resources, Sandbox, SandboxSpec
from turngate.sandboxes.docker import DEFAULT_IMAGE, DockerBackend

pytestmark = [pytest.mark.needs("docker"), pytest.mark.full]


@pytest.fixture
def backend(root: Path) -> DockerBackend:
    kit.need("docker")
    return DockerBackend(root)


@asynccontextmanager
async def create_sandbox(backend: DockerBackend, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
    sandbox = await backend.create(spec)
    try:
        yield sandbox
    finally:
        await sandbox.stop()


def inspect(sandbox: Sandbox) -> Any:
    return json.loads(subprocess.run(["docker", "inspect", sandbox.id], capture_output=True, check=True).stdout)[0]


def test_default_image_is_built_by_tools() -> None:
    assert base_image.IMAGE == DEFAULT_IMAGE


@pytest.mark.real
async def test_container_limits_and_labels(backend: DockerBackend) -> None:
    limits, life_s = Resources(cpus=0.5, memory_mb=64, pids=40), round(scaled(77))
    async with create_sandbox(
        backend, SandboxSpec(resources=limits, labels={"rollout": "r1"}, life_s=life_s)
    ) as sandbox:
        description = inspect(sandbox)
        host = description["HostConfig"]
        assert (host["NanoCpus"], host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (
            5e8,
            64 << 20,
            64 << 20,
            40,
        )
        assert (host["CapDrop"], host["SecurityOpt"], host["NetworkMode"]) == (["ALL"], ["no-new-privileges"], "none")
        assert (host["Privileged"], host["Init"], host["AutoRemove"]) == (False, True, True)
        labels = description["Config"]["Labels"]
        assert labels["rollout"] == "r1"
        assert {"turngate.sandbox", "turngate.owner", "turngate.created"} <= set(labels)
        assert description["Config"]["Cmd"] == [str(life_s)]
        greedy = await sandbox.start(["python3", "-c", "x = bytearray(500_000_000)"])
        assert await asyncio.wait_for(greedy.wait(), scaled(60)) == 137
        forks = await sandbox.exec(
            ["/bin/sh", "-c", "for i in $(seq 100); do sleep 5 & done; wait"], timeout_s=scaled(60)
        )
        assert b"annot fork" in forks.stderr


@pytest.fixture
def built_images() -> Iterator[set[str]]:
    """The names of images that a test builds, which are removed afterwards."""
    names: set[str] = set()
    yield names
    subprocess.run(["docker", "rmi", "--force", *sorted(names)], check=True, capture_output=True)


async def test_dockerfile_is_built_once(backend: DockerBackend, tmp_path: Path, built_images: set[str]) -> None:
    (tmp_path / "Dockerfile").write_text(
        f"FROM {DEFAULT_IMAGE}\nUSER root\nCOPY data /data/\nWORKDIR /testbed\nENV MODE=built\n"
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").write_text("one")
    spec = SandboxSpec(dockerfile=str(tmp_path))
    async with create_sandbox(backend, spec) as sandbox:
        assert sandbox.workdir == "/testbed"
        assert (
            await sh(sandbox, "id -u; pwd; cat /data/file; echo $MODE; touch ~/x y; ls -A")
            == "0\n/testbed\nonebuilt\ny\n"
        )
        image = inspect(sandbox)["Image"]
        built_images.add(inspect(sandbox)["Config"]["Image"])
    async with create_sandbox(backend, spec) as sandbox:
        assert inspect(sandbox)["Image"] == image
    (tmp_path / "data" / "file").write_text("two")
    async with create_sandbox(backend, spec) as sandbox:
        assert await sh(sandbox, "cat /data/file") == "two"
        built_images.add(inspect(sandbox)["Config"]["Image"])
    with pytest.raises(SandboxError, match="not a folder with a Dockerfile"):
        await backend.create(SandboxSpec(dockerfile=str(tmp_path / "data")))
    (tmp_path / "Dockerfile").write_text(f"FROM {DEFAULT_IMAGE}\nCOPY nothing /\n")
    with pytest.raises(SandboxError, match="nothing"):
        await backend.create(spec)


async def test_git_works_in_workdir(backend: DockerBackend) -> None:
    """Git refuses folders of other users."""
    async with create_sandbox(backend, SandboxSpec()) as sandbox:
        await sh(
            sandbox,
            "git init -q && git status && touch a && git add a && git -c user.name=a -c user.email=a commit -qm a",
        )


@pytest.mark.real
async def test_no_secret_in_command_line_or_container_config(backend: DockerBackend) -> None:
    spec = SandboxSpec(env={"KEY": "secret-of-the-spec"})
    async with create_sandbox(backend, spec) as sandbox:
        env = {"MULTI": "line one\nsecret-of-the-caller", "ONE": "secret-of-the-other"}
        job = await sandbox.start(["/bin/sh", "-c", "sleep 6301; : "], env=env)
        await kit.wait_until(lambda: kit.processes("sleep\x006301"))
        assert not kit.processes("secret-of-the")
        assert "secret-of-the" not in json.dumps(inspect(sandbox))
        await job.kill()


async def test_missing_image_is_error(backend: DockerBackend) -> None:
    with pytest.raises(SandboxError, match="pull"):
        await backend.create(SandboxSpec(image="localhost:1/no-such-image:latest"))


async def test_removed_container_is_noticed(backend: DockerBackend) -> None:
    async with create_sandbox(backend, SandboxSpec()) as sandbox:
        job = await sandbox.start(["sleep", "6302"])
        await kit.wait_until(lambda: kit.processes("sleep\x006302"))
        await asyncio.sleep(scaled(0.1))  # until docker has noticed it too
        subprocess.run(["docker", "rm", "-f", sandbox.id], capture_output=True, check=True)
        assert await asyncio.wait_for(job.wait(), scaled(30)) == 137
        with pytest.raises(SandboxError):
            await sandbox.exec(["true"])
        with pytest.raises(SandboxError):
            await (await sandbox.start(["true"])).wait()
        await job.kill()


@pytest.fixture
def own_daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[DockerDaemon]:
    """A daemon that a test may kill."""
    with start_docker() as daemon:
        monkeypatch.setenv("DOCKER_HOST", daemon.host)
        yield daemon


@pytest.mark.needs("root")
async def test_end_of_command_that_docker_does_not_report_is_error(
    root: Path, own_daemon: DockerDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker loses the end of a command that containerd reports before Docker is connected again. The agent would seem to run on."""
    monkeypatch.setattr(docker, "END_CHECK_S", 1.0)
    monkeypatch.setattr(docker, "END_GRACE_S", 1.0)

    def find(line: str) -> list[int]:
        return [pid for pid, found in own_daemon.processes().items() if found == line]

    async with create_sandbox(DockerBackend(root), SandboxSpec()) as sandbox:
        other = await sandbox.start(["sleep", "6303"])
        job = await sandbox.start(["sleep", "6304"])
        await kit.wait_until(lambda: find("sleep 6303") and find("sleep 6304"))
        waiting = [asyncio.ensure_future(one.wait()) for one in (job, other)]
        await asyncio.sleep(5)  # several checks
        assert not any(one.done() for one in waiting), "both are running"
        os.kill(own_daemon.pid, signal.SIGSTOP)
        await asyncio.to_thread(own_daemon.kill_containerd)
        os.kill(*find("sleep 6304"), signal.SIGKILL)
        own_daemon.start()  # only containerd
        await asyncio.sleep(scaled(1))  # the container's shim reports the end again every few seconds
        os.kill(own_daemon.pid, signal.SIGCONT)
        for one in waiting:
            with pytest.raises(SandboxError, match="containerd was probably restarted"):
                await asyncio.wait_for(one, scaled(30))
