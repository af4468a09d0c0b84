"""The files in `deploy/` match their schemas, the gateway's settings, and each other."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import msgspec
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.speed import scaled
from tools.part_pins import RAY_PINS
from turngate.config import load_config
from turngate.rollout.cluster.cell_actor import DATA_FOLDER
from turngate.rollout.cluster.placement import SLOTS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
KUBERNETES = [
    document
    for name in yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["resources"]
    for document in yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text())
]
UNIT = DEPLOY / "systemd" / "turngate.service"


def flags(command: list[str]) -> dict[str, str]:
    """Return the settings in a `turngate serve …` command."""
    assert command[:3] == ["serve", "--config", "/etc/turngate/serve.toml"]
    return {command[n].removeprefix("--").replace("-", "_"): command[n + 1] for n in range(3, len(command), 2)}


def manifest_of_kind(kind: str) -> Any:
    [manifest] = [document for document in KUBERNETES if document["kind"] == kind]
    return manifest


# ── settings and versions ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("folder", ["docker", "kubernetes", "systemd", "space"])
def test_serve_config_is_valid(folder: str) -> None:
    settings = load_config(DEPLOY / folder / "serve.toml", {})
    assert settings.host == ("127.0.0.1" if folder == "systemd" else "0.0.0.0")
    assert settings.port == (7860 if folder == "space" else 8700)
    assert settings.data == ("/var/lib/turngate" if folder == "systemd" else "/data")


def test_pinned_versions_satisfy_requirements() -> None:
    lines = (DEPLOY / "docker" / "requirements.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"==[\w.]+", str(pin.specifier)) for pin in pins)
    by_name = {
        canonicalize_name(p.name): p for p in pins if p.marker is None or p.marker.evaluate({"python_version": "3.11"})
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = ("families", "mcp", "otel")
    wanted = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    for line in wanted:
        requirement = Requirement(line)
        pin = by_name.get(canonicalize_name(requirement.name))
        assert pin is not None, f"deploy/docker/requirements.txt lacks {line}; its first lines say how to build it"
        assert requirement.specifier.contains(str(pin.specifier).removeprefix("==")), (line, str(pin))


# ── compose ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_compose_file_matches_schema() -> None:
    schema = files("check_jsonschema").joinpath("builtin_schemas", "vendor", "compose-spec.json").read_bytes()
    jsonschema.Draft7Validator(msgspec.json.decode(schema)).validate(COMPOSE)
    for service in COMPOSE["services"].values():
        assert {*service["networks"]} <= {*COMPOSE["networks"]}
        assert {volume.partition(":")[0] for volume in service["volumes"]} <= {*COMPOSE["volumes"]}
        assert {*service.get("secrets", ())} <= {*COMPOSE["secrets"]}


def test_compose_publishes_only_gateway_and_sets_logprobs_mode() -> None:
    gateway, vllm = COMPOSE["services"]["gateway"], COMPOSE["services"]["vllm"]
    assert "ports" not in vllm and [port.rpartition(":")[2] for port in gateway["ports"]] == ["8700"]
    assert gateway["ports"][0].startswith("${TURNGATE_BIND:-127.0.0.1}:")
    shared = {*gateway["networks"]} & {*vllm["networks"]}
    assert [COMPOSE["networks"][name] for name in shared] == [{"internal": True}]
    words = vllm["command"]
    assert words[words.index("--logprobs-mode") + 1] == "processed_logprobs"
    overrides: dict[str, Any] = {**flags(gateway["command"])}
    settings = load_config(DEPLOY / "docker" / "serve.toml", overrides)
    assert settings.engine_url == ["http://vllm:8000"] and settings.model == words[0]


# ── Kubernetes ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("version", ["1.30", "1.34"])
def test_manifests_match_kubernetes_schema(version: str) -> None:
    for document in KUBERNETES:
        kubernetes_validate.validate(document, version, strict=True)


def test_pod_is_locked_down_and_consistent() -> None:
    deployment = manifest_of_kind("Deployment")["spec"]
    pod = deployment["template"]["spec"]
    [gateway] = pod["containers"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    uid = re.search(r"^ARG UID=(\d+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert uid is not None and pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == int(uid[1])
    assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
    assert gateway["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    labels = deployment["template"]["metadata"]["labels"]
    assert manifest_of_kind("Service")["spec"]["selector"] == deployment["selector"]["matchLabels"] == labels
    assert manifest_of_kind("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
    assert {mount["name"] for mount in gateway["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    [key] = gateway["env"]
    mounts = {mount["name"]: mount["mountPath"] for mount in gateway["volumeMounts"]}
    assert key == {"name": "TURNGATE_ADMIN_KEY_FILE", "value": f"{mounts['secret']}/admin-key"}


def test_liveness_probe_ignores_engine() -> None:
    [gateway] = manifest_of_kind("Deployment")["spec"]["template"]["spec"]["containers"]
    paths = {name: gateway[name]["httpGet"]["path"] for name in gateway if name.endswith("Probe")}
    assert paths == {"startupProbe": "/", "livenessProbe": "/", "readinessProbe": "/health"}


RAY = [
    document
    for name in ("cluster.yaml", "batch.yaml")
    for document in yaml.safe_load_all((DEPLOY / "kuberay" / name).read_text())
]


def test_kuberay_pods_and_job_match_kubernetes_schema() -> None:
    cluster, *others = RAY
    for document in others:
        kubernetes_validate.validate(document, "1.34", strict=True)
    spec = cluster["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": group["template"]["spec"]}
        kubernetes_validate.validate(pod, "1.34", strict=True)


def test_kuberay_cluster_and_batch_agree() -> None:
    cluster, claim, job = RAY
    pins = {name: version for name, _, version in (pin.partition("==") for pin in RAY_PINS)}
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    assert cluster["spec"]["rayVersion"] == pins["ray"]
    assert f"rayproject/ray:{pins['ray']}-" in (DEPLOY / "kuberay" / "Dockerfile").read_text()
    [workers] = cluster["spec"]["workerGroupSpecs"]
    assert json.loads(json.loads(workers["rayStartParams"]["resources"])) == {SLOTS: 32}, "KubeRay passes it to a shell"
    [worker] = workers["template"]["spec"]["containers"]
    [batch] = job["spec"]["template"]["spec"]["containers"]
    command = batch["command"]
    assert command[command.index("--ray") + 1] == f"{cluster['metadata']['name']}-head-svc:6379"
    assert {"name": DATA_FOLDER, "value": "/cell"} in worker["env"]
    passwords = [
        variable for container in (worker, batch) for variable in container["env"] if variable["name"] == "PGPASSWORD"
    ]
    assert len(passwords) == 2 and passwords[0] == passwords[1] and "valueFrom" in passwords[0]
    [volume] = job["spec"]["template"]["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


@pytest.mark.process
@pytest.mark.parametrize("script", ["slurm/turngate.sbatch", "ssh/cluster.sh"])
def test_scripts_are_valid_bash_and_explain_themselves(script: str) -> None:
    done = subprocess.run(["bash", str(DEPLOY / script)], capture_output=True, text=True, timeout=scaled(10))
    assert done.returncode == 2 and "turngate" in done.stderr


# ── systemd ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.needs("systemd-analyze")
def test_systemd_unit_is_valid_and_secure(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze") or ""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/turngate/bin/turngate", sys.executable))
    done = subprocess.run([analyze, "verify", "--man=no", unit], capture_output=True, text=True, timeout=scaled(30))
    complaints = [
        line for line in done.stderr.splitlines() if UNIT.name in line
    ]  # other lines are about this machine's own units
    assert (done.returncode, complaints) == (0, []), done.stderr
    rated = [analyze, "security", "--offline=true", "--threshold=15", unit]
    assert subprocess.run(rated, capture_output=True, timeout=scaled(30)).returncode == 0


def test_unit_keeps_admin_key_out_of_environment() -> None:
    lines = UNIT.read_text().splitlines()
    assert "LoadCredential=admin-key:/etc/turngate/admin-key" in lines
    assert "Environment=TURNGATE_ADMIN_KEY_FILE=%d/admin-key" in lines
    assert not any("TURNGATE_ADMIN_KEY=" in line for line in lines)
