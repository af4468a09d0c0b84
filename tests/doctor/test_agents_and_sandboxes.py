"""The doctor looks at agents, and really starts a sandbox of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.doctor.kit import found, one
from tests.sandboxes.kit import MAKE, backends, need
from turngate.agents import install
from turngate.config import ServeConfig
from turngate.doctor import agents_and_sandboxes
from turngate.sandboxes.base import Backend, SandboxSpec

pytestmark = pytest.mark.process


@pytest.fixture
def rooted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sandboxes' folders are below this one, so that what is left of them can be seen."""
    monkeypatch.setattr(agents_and_sandboxes, "get_backend", lambda name: MAKE[name](tmp_path))
    return tmp_path


def _left(folder: Path) -> list[Path]:
    return [
        place
        for place in folder.rglob("*")
        if place.is_dir() and place.name.startswith(("local-", "bubblewrap-", "docker-"))
    ]


@pytest.mark.parametrize("name", backends())
async def test_a_sandbox_is_really_made_and_gone_again(name: str, rooted: Path) -> None:
    need(name)
    finding = await one(ServeConfig(), "sandboxes", sandboxes=(name,))
    assert finding.state == "ok", finding
    assert (
        "does not isolate files or the network" if name == "local" else "starts, and has no network access"
    ) in finding.message
    assert _left(rooted) == []


@pytest.mark.needs("bubblewrap")
@pytest.mark.full
async def test_a_network_that_nobody_asked_for_is_a_failure(rooted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("bubblewrap")

    class Leaky:
        """Bubblewrap that gives everybody the host's network."""

        def __init__(self, real: Backend) -> None:
            self._real = real

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        async def create(self, spec: SandboxSpec) -> Any:
            return await self._real.create(SandboxSpec(network="open", life_s=spec.life_s))

    monkeypatch.setattr(agents_and_sandboxes, "get_backend", lambda name: Leaky(MAKE[name](rooted)))
    finding = await one(ServeConfig(), "sandboxes", sandboxes=("bubblewrap",))
    assert finding.state == "failure" and "the sandbox has network access" in finding.message


async def test_what_is_missing_is_a_failure_only_where_it_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    named = await one(ServeConfig(), "sandboxes", sandboxes=("bubblewrap",))
    assert named.state == "failure" and "apt-get install bubblewrap" in named.fix
    states = {finding.message.partition(":")[0]: finding.state for finding in await found(ServeConfig(), "sandboxes")}
    assert (states["bubblewrap"], states["docker"]) == ("warning", "warning")
    unknown = await one(ServeConfig(), "sandboxes", sandboxes=("nothere",))
    assert (
        unknown.state == "failure" and "must be one of local" in unknown.message and "not 'nothere'" in unknown.message
    )


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TURNGATE_CACHE", str(tmp_path))
    return tmp_path


async def test_agents_that_are_not_installed_are_told_and_not_installed(empty_cache: Path) -> None:
    findings = await found(ServeConfig(), "agents")
    assert {finding.state for finding in findings} == {"not checked"}
    named = await one(ServeConfig(), "agents", agents=("mini-swe-agent",))
    assert named.state == "warning" and "turngate agents install mini-swe-agent" in named.fix
    assert not list(empty_cache.rglob("*"))
    nobody = await one(ServeConfig(), "agents", agents=("nobody",))
    assert nobody.state == "failure" and "unknown agent 'nobody'" in nobody.message


async def test_an_installation_of_another_version_or_with_holes_is_a_failure(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = agents_and_sandboxes.find_agent("mini-swe-agent").spec
    folder = empty_cache / "agents" / f"{spec.name}-{spec.install.version}"
    (folder / "mini_swe_agent-0.0.1.dist-info").mkdir(parents=True)
    (folder / install.MARKER).write_text(install._fingerprint(spec))
    finding = await one(ServeConfig(), "agents", agents=("mini-swe-agent",))
    assert finding.state == "failure" and f"0.0.1 is installed, but {spec.install.version} is pinned" in finding.message
    (folder / "mini_swe_agent-0.0.1.dist-info").rename(folder / f"mini_swe_agent-{spec.install.version}.dist-info")
    monkeypatch.setattr(agents_and_sandboxes.shutil, "which", lambda name: None)
    without = await one(ServeConfig(), "agents", agents=("mini-swe-agent",))
    assert without.state == "warning" and f"python{spec.install.python} is not installed" in without.message


async def test_npm_agents_need_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents_and_sandboxes.platform, "libc_ver", lambda: ("", ""))
    finding = await one(ServeConfig(), "agents", agents=("codex",))
    assert finding.state == "failure" and "needs glibc" in finding.message
