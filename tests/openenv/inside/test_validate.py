"""`openenv validate` on the package and on its server: it passes, and it would find problems."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from openenv.cli.__main__ import app
from openenv.cli._validation import validate_multi_mode_deployment
from openenv.validation import run_validation
from openenv.validation.providers import ExecResult
from openenv.validation.types import Level, ProviderCapability
from typer.testing import CliRunner

from tests.openenv.kit import ROOT, Server, environment, run_server
from tests.speed import scaled

pytestmark = pytest.mark.process

PACKAGE = ROOT / "envs" / "turngate"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package that a test can change."""
    return Path(shutil.copytree(PACKAGE, tmp_path / "turngate", ignore=shutil.ignore_patterns("__pycache__", "wheels")))


def run_validate(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    """Run `openenv validate` and return its exit code and report."""
    done = CliRunner().invoke(app, ["validate", *map(str, arguments), "--json"])
    return done.exit_code, json.loads(done.stdout) if done.stdout.startswith("{") else {}


@pytest.mark.real
def test_package_is_valid() -> None:
    code, report = run_validate(PACKAGE)
    assert code == 0 and report["verdict"] == "warn"  # some checks are missing in this release or need an image
    statuses = {result["check_id"]: result["status"] for result in report["results"]}
    assert statuses["static.manifest"] == "pass" and set(statuses.values()) == {"pass", "skip"}
    code, report = run_validate(PACKAGE, "--level", "static")
    assert code == 0 and report["verdict"] == "pass"


def test_validate_command_line() -> None:
    command = [str(Path(sys.executable).parent / "openenv"), "validate", str(PACKAGE)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=scaled(120))
    assert done.returncode == 0 and "PASS  static.manifest" in done.stdout and "Verdict: WARN" in done.stdout


def test_package_layout() -> None:
    """The layout that `openenv build` and `push` need. A lock file would need turngate on the package index."""
    assert validate_multi_mode_deployment(PACKAGE)[1] == ["Missing uv.lock - run 'uv lock' to generate it"]


@pytest.mark.parametrize(
    ("field", "expected"), [("reward", "reward"), ("capabilities", "capabilities"), ("", "no `validation:` block")]
)
def test_package_without_required_field_fails(package: Path, field: str, expected: str) -> None:
    manifest = yaml.safe_load((package / "openenv.yaml").read_text())
    del (manifest["validation"] if field else manifest)[field or "validation"]
    (package / "openenv.yaml").write_text(yaml.safe_dump(manifest))
    code, report = run_validate(package)
    assert code == 1 and report["verdict"] == "fail" and expected in json.dumps(report["results"])


def test_folder_without_manifest_fails(package: Path) -> None:
    (package / "openenv.yaml").unlink()
    assert run_validate(package)[0] == 2


def test_running_server_is_valid(url: str) -> None:
    code, report = run_validate("--url", url)
    assert code == 0 and report["passed"] and report["summary"]["failed_criteria"] == []
    assert report["mode"] == "simulation" and report["summary"]["total_count"] >= 6


def test_other_server_is_invalid() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        code, report = run_validate("--url", f"http://127.0.0.1:{other.server_port}")
        other.shutdown()
    assert code == 1 and {"health_endpoint", "schema_endpoint"} <= set(report["summary"]["failed_criteria"])


# ── checks of a server that openenv starts ────────────────────────────────────────────────────────────────


class ProcessProvider:
    """An OpenEnv provider that builds no image and starts the server from the package's folder."""

    name = "process"
    capabilities = frozenset({ProviderCapability.IMAGE_BUILD})
    supported_network_modes = frozenset({"public"})

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._root = folder

    def build(self, root: Path, execution: Any) -> str:
        self._root = root
        return "sha256:" + "0" * 64

    def start(self, spec: Any) -> RunningServer:
        return RunningServer(self._folder, self._root)


class RunningServer:
    def __init__(self, folder: Path, root: Path) -> None:
        self._stack = ExitStack()
        self._server: Server = self._stack.enter_context(run_server(folder, package=root))
        self.base_url = self._server.url

    def inspect(self) -> dict[str, Any]:
        return {}

    def logs(self, max_bytes: int = 65536) -> str:
        return self._server.log[-max_bytes:]

    def exec(self, argv: list[str], timeout_s: float) -> ExecResult:
        raise NotImplementedError

    def stop(self) -> None:
        self._stack.close()


@pytest.fixture
def run_plan(package: Path, tmp_path: Path) -> Iterator[Any]:
    """A function that has OpenEnv start the package's server, run its plan and grade the responses."""
    manifest = yaml.safe_load((package / "openenv.yaml").read_text())
    manifest["validation"]["execution"] = {"dockerfile": "Dockerfile", "probe_path": "validation/runtime.json"}
    (package / "openenv.yaml").write_text(yaml.safe_dump(manifest))
    settings = (package / "service.toml").read_text()
    (package / "service.toml").write_text(settings.replace("/tmp/turngate-env", str(tmp_path / "data")))

    def run() -> dict[str, str]:
        report = run_validation(package, max_level=Level.SEMANTIC, provider=ProcessProvider(tmp_path))
        return {result.check_id: result.status.value for result in report.results}

    yield run


CONTRACTS = ("runtime.startup", "runtime.reward_well_formed", "runtime.observation_schema", "runtime.state_contract")


def test_package_plan_meets_contracts(run_plan: Any) -> None:
    """The shipped package: a rollout with a reward, schema-conforming observations, and counted steps."""
    statuses = run_plan()
    assert {check: statuses[check] for check in CONTRACTS} == dict.fromkeys(CONTRACTS, "pass")
    assert set(statuses.values()) == {"pass", "skip"}


def test_plan_without_reward_fails(run_plan: Any, package: Path) -> None:
    plan = json.loads((package / "validation" / "runtime.json").read_text())
    del plan["actions"][0]["arguments"]["test_script"]
    (package / "validation" / "runtime.json").write_text(json.dumps(plan))
    assert run_plan()["runtime.reward_well_formed"] == "fail"
