"""Features of docker only: images, Dockerfiles, limits, labels, and a command line that every user can read."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.sandboxes import kit
from tests.sandboxes.contract import sh
from tests.speed import scaled
from tools import base_image
from turngate.errors import SandboxError
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
    with pytest.raises(SandboxError, match="no Dockerfile"):
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
