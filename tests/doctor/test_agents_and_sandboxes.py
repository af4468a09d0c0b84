"""The doctor's checks of agents, and of sandboxes, which it really starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.doctor.kit import run_check, run_checks
from tests.sandboxes.kit import MAKE, backends, need
from turngate.agents import install
from turngate.config import ServeConfig
from turngate.doctor import agents_and_sandboxes
from turngate.sandboxes.base import Backend, SandboxSpec

pytestmark = pytest.mark.process


@pytest.fixture
def sandbox_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The parent folder of all sandboxes, so that leftovers are visible."""
    monkeypatch.setattr(agents_and_sandboxes, "get_backend", lambda name: MAKE[name](tmp_path))
    return tmp_path


def _leftover_folders(folder: Path) -> list[Path]:
    return [
        path
        for path in folder.rglob("*")
        if path.is_dir() and path.name.startswith(("local-", "bubblewrap-", "docker-"))
    ]


@pytest.mark.parametrize("name", backends())
async def test_sandbox_starts_and_is_removed(name: str, sandbox_root: Path) -> None:
    need(name)
    finding = await run_check(ServeConfig(), "sandboxes", sandboxes=(name,))
    assert finding.state == "ok", finding
    assert (
        "does not isolate files or the network" if name == "local" else "starts, and has no network access"
    ) in finding.message
    assert _leftover_folders(sandbox_root) == []


async def test_sandbox_with_its_own_files_is_only_said_to_share_the_network(
    sandbox_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = MAKE["local"](sandbox_root)
    monkeypatch.setattr(agents_and_sandboxes, "get_backend", lambda name: backend)
    monkeypatch.setattr(type(backend), "relocates", True)
    finding = await run_check(ServeConfig(), "sandboxes", sandboxes=("huggingface",))
    assert finding.state == "ok" and "huggingface: starts, but does not isolate the network;" in finding.message


@pytest.mark.needs("bubblewrap")
@pytest.mark.full
async def test_sandbox_with_network_is_failure(sandbox_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("bubblewrap")

    class Leaky:
        """Bubblewrap with access to the host's network."""

        def __init__(self, real: Backend) -> None:
            self._real = real

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        async def create(self, spec: SandboxSpec) -> Any:
            return await self._real.create(SandboxSpec(network="open", life_s=spec.life_s))

    monkeypatch.setattr(agents_and_sandboxes, "get_backend", lambda name: Leaky(MAKE[name](sandbox_root)))
    finding = await run_check(ServeConfig(), "sandboxes", sandboxes=("bubblewrap",))
    assert finding.state == "failure" and "the sandbox has network access" in finding.message


async def test_missing_sandbox_is_failure_only_if_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    named = await run_check(ServeConfig(), "sandboxes", sandboxes=("bubblewrap",))
    assert named.state == "failure" and "apt-get install bubblewrap" in named.fix
    states = {
        finding.message.partition(":")[0]: finding.state for finding in await run_checks(ServeConfig(), "sandboxes")
    }
    assert (states["bubblewrap"], states["docker"]) == ("warning", "warning")
    unknown = await run_check(ServeConfig(), "sandboxes", sandboxes=("nothere",))
    assert (
        unknown.state == "failure" and "must be one of local" in unknown.message and "not 'nothere'" in unknown.message
    )


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TURNGATE_CACHE", str(tmp_path))
    return tmp_path


async def test_missing_agents_are_reported_but_not_installed(empty_cache: Path) -> None:
    findings = await run_checks(ServeConfig(), "agents")
    assert {finding.state for finding in findings} == {"not checked"}
    named = await run_check(ServeConfig(), "agents", agents=("mini-swe-agent",))
    assert named.state == "warning" and "turngate agents install mini-swe-agent" in named.fix
    assert not list(empty_cache.rglob("*"))
    unknown = await run_check(ServeConfig(), "agents", agents=("nobody",))
    assert unknown.state == "failure" and "unknown agent 'nobody'" in unknown.message


async def test_wrong_agent_version_fails_and_missing_python_warns(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = agents_and_sandboxes.find_agent("mini-swe-agent").spec
    folder = install.install_folder(spec)
    (folder / "mini_swe_agent-0.0.1.dist-info").mkdir(parents=True)
    (folder / install.MARKER).write_text(install._fingerprint(spec))
    finding = await run_check(ServeConfig(), "agents", agents=("mini-swe-agent",))
    assert finding.state == "failure" and f"0.0.1 is installed, but {spec.install.version} is pinned" in finding.message
    (folder / "mini_swe_agent-0.0.1.dist-info").rename(folder / f"mini_swe_agent-{spec.install.version}.dist-info")
    monkeypatch.setattr(install, "find_python", lambda version: None)
    no_python = await run_check(ServeConfig(), "agents", agents=("mini-swe-agent",))
    assert no_python.state == "warning" and f"python{spec.install.python} is not installed" in no_python.message


async def test_npm_agents_need_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents_and_sandboxes.platform, "libc_ver", lambda: ("", ""))
    finding = await run_check(ServeConfig(), "agents", agents=("codex",))
    assert finding.state == "failure" and "needs glibc" in finding.message
