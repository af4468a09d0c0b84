"""The software bill of materials lists what Turngate and its agents run, and finds known vulnerabilities without a network."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tools import sbom


def test_document_lists_own_and_agent_packages() -> None:
    packages = [*sbom.list_own_packages(), *sbom.list_agent_packages()]
    document = sbom.build_document(packages)
    assert (document["bomFormat"], document["specVersion"], document["version"]) == ("CycloneDX", "1.5", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", document["serialNumber"])
    components = {component["purl"]: component for component in document["components"]}
    assert len(components) == len(document["components"]) > 300
    users = {entry["value"] for component in components.values() for entry in component["properties"]}
    assert {"turngate", "agent pi", "agent mini-swe-agent", "the Node of agents"} <= users
    names = {component["name"] for component in components.values()}
    assert {"msgspec", "starlette", "uvicorn", "@openai/codex", "mini-swe-agent"} <= names
    assert not names & {"pytest", "ruff", "turngate"}
    assert all(re.fullmatch(r"pkg:(pypi|npm)/[^@\s]+@[^@\s]+", purl) for purl in components)
    hashes = [entry for component in components.values() for entry in component.get("hashes", ())]
    assert hashes and all(len(entry["content"]) == 128 for entry in hashes if entry["alg"] == "SHA-512")
    assert sbom.build_document(reversed(packages)) == document


@pytest.mark.needs("cyclonedx")
@pytest.mark.full
def test_document_follows_official_schema() -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    validator = JsonStrictValidator(SchemaVersion.V1_5)
    document = sbom.build_document([*sbom.list_own_packages(), *sbom.list_agent_packages()])
    assert validator.validate_str(json.dumps(document)) is None
    component = {**document["components"][0], "purl": 5}
    assert validator.validate_str(json.dumps({**document, "components": [component]})) is not None  # the control


def advisory(name: str, ecosystem: str = "PyPI", **affected: Any) -> dict[str, Any]:
    package = {"ecosystem": ecosystem, "name": name}
    return {"id": f"TEST-{name}", "summary": "a hole", "affected": [{"package": package, **affected}]}


def events(**found: str) -> dict[str, Any]:
    return {"ranges": [{"type": "SEMVER", "events": [{name: version} for name, version in found.items()]}]}


@pytest.mark.parametrize(
    ("entry", "is_found"),
    [
        (advisory("Tiny.Lib", versions=["1.2.0"]), True),
        (advisory("tiny-lib", versions=["1.1.0", "1.3.0"]), False),
        (advisory("tiny-lib", **events(introduced="0", fixed="1.3.0")), True),
        (advisory("tiny-lib", **events(introduced="0", fixed="1.2.0")), False),
        (advisory("tiny-lib", **events(introduced="1.2.1")), False),
        (advisory("tiny-lib", **events(introduced="1.0.0", last_affected="1.2.0")), True),
        (advisory("tiny-lib", ecosystem="npm", versions=["1.2.0"]), False),
        ({**advisory("tiny-lib", versions=["1.2.0"]), "withdrawn": "2026-01-01"}, False),
    ],
)
def test_known_vulnerabilities_are_found(entry: dict[str, Any], is_found: bool, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("entry.json", json.dumps(entry))
    packages = [sbom.Package("PyPI", "tiny_lib", "1.2.0", (), "agent x")]
    found = sbom.find_vulnerabilities(packages, sbom.read_advisories(tmp_path))
    assert found == ([f"tiny_lib 1.2.0 (agent x): {entry['id']} a hole"] if is_found else [])
