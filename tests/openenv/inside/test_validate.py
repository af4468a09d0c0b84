"""`openenv validate` on the package, and on its server: what it finds good, and that it would find what is bad."""

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

from tests.openenv.kit import ROOT, Server, environment, serving
from tests.speed import scaled

pytestmark = pytest.mark.process

PACKAGE = ROOT / "envs" / "turngate"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy, to be spoilt."""
    return Path(shutil.copytree(PACKAGE, tmp_path / "turngate", ignore=shutil.ignore_patterns("__pycache__", "wheels")))


def validated(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    """The exit code of `openenv validate`, and its report."""
    done = CliRunner().invoke(app, ["validate", *map(str, arguments), "--json"])
    return done.exit_code, json.loads(done.stdout) if done.stdout.startswith("{") else {}


@pytest.mark.real
def test_the_package_is_valid() -> None:
    code, report = validated(PACKAGE)
    assert (
        code == 0 and report["verdict"] == "warn"
    )  # of the checks that this release does not have, or that need an image
    told = {result["check_id"]: result["status"] for result in report["results"]}
    assert told["static.manifest"] == "pass" and set(told.values()) == {"pass", "skip"}
    code, report = validated(PACKAGE, "--level", "static")
    assert code == 0 and report["verdict"] == "pass"


def test_as_it_is_typed() -> None:
    command = [str(Path(sys.executable).parent / "openenv"), "validate", str(PACKAGE)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=scaled(120))
    assert done.returncode == 0 and "PASS  static.manifest" in done.stdout and "Verdict: WARN" in done.stdout


def test_the_layout_is_openenv_s() -> None:
    """What its older check wants, and what `openenv build` and `push` go by. A lock file would need turngate on the package index."""
    assert validate_multi_mode_deployment(PACKAGE)[1] == ["Missing uv.lock - run 'uv lock' to generate it"]


@pytest.mark.parametrize(
    ("field", "complaint"), [("reward", "reward"), ("capabilities", "capabilities"), ("", "no `validation:` block")]
)
def test_a_package_without_something_essential_is_not(package: Path, field: str, complaint: str) -> None:
    manifest = yaml.safe_load((package / "openenv.yaml").read_text())
    del (manifest["validation"] if field else manifest)[field or "validation"]
    (package / "openenv.yaml").write_text(yaml.safe_dump(manifest))
    code, report = validated(package)
    assert code == 1 and report["verdict"] == "fail" and complaint in json.dumps(report["results"])


def test_a_folder_that_is_no_package(package: Path) -> None:
    (package / "openenv.yaml").unlink()
    assert validated(package)[0] == 2


def test_the_running_server_is_valid(url: str) -> None:
    code, report = validated("--url", url)
    assert code == 0 and report["passed"] and report["summary"]["failed_criteria"] == []
    assert report["mode"] == "simulation" and report["summary"]["total_count"] >= 6


def test_a_server_of_something_else_is_not() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        code, report = validated("--url", f"http://127.0.0.1:{other.server_port}")
        other.shutdown()
    assert code == 1 and {"health_endpoint", "schema_endpoint"} <= set(report["summary"]["failed_criteria"])


# ── what it checks of a server that it starts itself ────────────────────────────────────────────────────────────────


class HereAndNow:
    """OpenEnv's provider that builds no image: the server is started from the package's folder, as it is in the image."""

    name = "process"
    capabilities = frozenset({ProviderCapability.IMAGE_BUILD})
    supported_network_modes = frozenset({"public"})

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._root = folder

    def build(self, root: Path, execution: Any) -> str:
        self._root = root
        return "sha256:" + "0" * 64

    def start(self, spec: Any) -> Running:
        return Running(self._folder, self._root)


class Running:
    def __init__(self, folder: Path, root: Path) -> None:
        self._stack = ExitStack()
        self._server: Server = self._stack.enter_context(serving(folder, package=root))
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
def played(package: Path, tmp_path: Path) -> Iterator[Any]:
    """Has OpenEnv start the package's server, play its plan, and grade what came over the wire."""
    manifest = yaml.safe_load((package / "openenv.yaml").read_text())
    manifest["validation"]["execution"] = {"dockerfile": "Dockerfile", "probe_path": "validation/runtime.json"}
    (package / "openenv.yaml").write_text(yaml.safe_dump(manifest))
    settings = (package / "service.toml").read_text()
    (package / "service.toml").write_text(settings.replace("/tmp/turngate-env", str(tmp_path / "data")))

    def play() -> dict[str, str]:
        report = run_validation(package, max_level=Level.SEMANTIC, provider=HereAndNow(tmp_path))
        return {result.check_id: result.status.value for result in report.results}

    yield play


CONTRACTS = ("runtime.startup", "runtime.reward_well_formed", "runtime.observation_schema", "runtime.state_contract")


def test_the_package_s_own_plan_holds_openenv_s_contracts(played: Any) -> None:
    """The server of the folder as it is shipped: a rollout with its reward, what is told fits the schema, and steps are counted."""
    told = played()
    assert {check: told[check] for check in CONTRACTS} == dict.fromkeys(CONTRACTS, "pass")
    assert set(told.values()) == {"pass", "skip"}


def test_a_plan_without_a_reward_does_not(played: Any, package: Path) -> None:
    plan = json.loads((package / "validation" / "runtime.json").read_text())
    del plan["actions"][0]["arguments"]["test_script"]
    (package / "validation" / "runtime.json").write_text(json.dumps(plan))
    assert played()["runtime.reward_well_formed"] == "fail"
