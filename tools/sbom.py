"""Write a software bill of materials (CycloneDX 1.5, JSON) of Turngate and the bundled agents: `make sbom`.

It lists the packages that Turngate and its extras need, as installed here, and the locked packages of all agents with their hashes.

With `--advisories PATH`, it also looks up every package in a copy of the OSV database: a zip file such as
https://osv-vulnerabilities.storage.googleapis.com/PyPI/all.zip, or a folder of such files or of their JSON files. This needs no network.
If a package has a known vulnerability, the exit code is 1.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import sys
import uuid
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from turngate.agents.install import NODE_LOCK, find_lock, split_lock
from turngate.agents.spec import load_catalog

Json = Any
OWN = "turngate"
SKIPPED_EXTRAS = ("dev",)


class Package(NamedTuple):
    """One package: its ecosystem as OSV calls it, its name and version, its hashes, and the programs that need it."""

    ecosystem: str  # PyPI or npm
    name: str
    version: str
    hashes: tuple[tuple[str, str], ...]  # algorithm and hexadecimal digest
    used_by: str

    @property
    def purl(self) -> str:
        kind = self.ecosystem.lower()
        name = normalize(self.name) if kind == "pypi" else quote(self.name, safe="/")
        return f"pkg:{kind}/{name}@{quote(self.version)}"


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# ---- packages ----


def list_own_packages() -> Iterator[Package]:
    """Yield the installed packages that Turngate and its extras need."""
    metadata = distribution(OWN).metadata
    extras = [extra for extra in metadata.get_all("Provides-Extra", []) if extra not in SKIPPED_EXTRAS]
    waiting = [(OWN, ("", *extras))]
    seen = {OWN: set(waiting[0][1])}
    while waiting:
        name, wanted = waiting.pop()
        try:
            found = distribution(name)
        except PackageNotFoundError:  # of an extra that is not installed
            continue
        if name != OWN and wanted[0] == "":
            yield Package("PyPI", found.metadata["Name"], found.version, (), OWN)
        for line in found.requires or ():
            needed = Requirement(line)
            if needed.marker is not None and not any(needed.marker.evaluate({"extra": extra}) for extra in wanted):
                continue
            key = normalize(needed.name)
            new = [extra for extra in ("", *sorted(needed.extras)) if extra not in seen.setdefault(key, set())]
            if new:
                seen[key].update(new)
                waiting.append((key, tuple(new)))


def list_agent_packages() -> Iterator[Package]:
    """Yield the locked packages of all bundled agents."""
    yield from read_pip_lock(NODE_LOCK, "the Node of agents")
    for name, entry in sorted(load_catalog().items()):
        lock = find_lock(entry.spec)
        if lock is not None:
            yield from (read_npm_lock if lock.suffix == ".json" else read_pip_lock)(lock, f"agent {name}")


def read_pip_lock(lock: Path, used_by: str) -> Iterator[Package]:
    for requirement in split_lock(lock.read_text()):
        name, _, version = requirement.split()[0].partition("==")
        yield Package("PyPI", name, version, (), used_by)  # each of its files has another hash


def read_npm_lock(lock: Path, used_by: str) -> Iterator[Package]:
    for path, package in json.loads(lock.read_text())["packages"].items():
        if path and not package.get("link"):
            algorithm, _, digest = package["integrity"].partition("-")
            hashes = ((f"SHA-{algorithm[3:]}", base64.b64decode(digest).hex()),)
            name = package.get("name") or path.rpartition("node_modules/")[2]
            yield Package("npm", name, package["version"], hashes, used_by)


# ---- the document ----


def build_document(packages: Iterable[Package]) -> Json:
    """Build the CycloneDX document. The same packages give the same document."""
    components: dict[str, Json] = {}
    users: dict[str, set[str]] = {}
    for package in packages:
        components.setdefault(package.purl, describe(package))
        users.setdefault(package.purl, set()).add(package.used_by)
    for purl, component in components.items():
        component["properties"] = [{"name": "turngate:used-by", "value": user} for user in sorted(users[purl])]
    version = distribution(OWN).version
    own = {"type": "application", "bom-ref": OWN, "name": OWN, "version": version, "purl": f"pkg:pypi/{OWN}@{version}"}
    listed = [components[purl] for purl in sorted(components)]
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([own, listed], sort_keys=True))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{number}",
        "version": 1,
        "metadata": {"component": own},
        "components": listed,
        "dependencies": [{"ref": OWN, "dependsOn": sorted(components)}],
    }


def describe(package: Package) -> Json:
    hashes = {"hashes": [{"alg": name, "content": digest} for name, digest in package.hashes]} if package.hashes else {}
    name = {"name": package.name, "version": package.version, "purl": package.purl}
    return {"type": "library", "bom-ref": package.purl, **name, **hashes}


# ---- known vulnerabilities ----


def read_advisories(path: Path) -> Iterator[Json]:
    """Yield the entries of a copy of the OSV database."""
    if path.is_dir():
        for file in sorted([*path.rglob("*.json"), *path.rglob("*.zip")]):
            yield from read_advisories(file)
    elif path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                yield json.loads(archive.read(name))
    else:
        yield json.loads(path.read_bytes())


def find_vulnerabilities(packages: Iterable[Package], advisories: Iterable[Json]) -> list[str]:
    """Return one line for each known vulnerability of a package."""
    by_name: dict[tuple[str, str], set[Package]] = {}
    for package in packages:
        by_name.setdefault((package.ecosystem, normalize(package.name)), set()).add(package)
    found = set()
    for advisory in advisories:
        for affected in advisory.get("affected", ()) if "withdrawn" not in advisory else ():
            about = affected.get("package", {})
            for package in by_name.get((about.get("ecosystem", ""), normalize(about.get("name", ""))), ()):
                if is_affected(package.version, affected):
                    users = package.used_by
                    found.add(
                        f"{package.name} {package.version} ({users}): {advisory['id']} {advisory.get('summary', '')}"
                    )
    return sorted(found)


def is_affected(version: str, affected: Json) -> bool:
    if version in affected.get("versions", ()):
        return True
    return any(in_range(version, entry["events"]) for entry in affected.get("ranges", ()) if entry["type"] != "GIT")


def in_range(version: str, events: list[dict[str, str]]) -> bool:
    """Return whether a version is between an `introduced` event and the next `fixed` or `last_affected` one."""
    inside = False
    try:
        ours = Version(version)
        for event in events:
            if "introduced" in event:
                inside = inside or event["introduced"] == "0" or ours >= Version(event["introduced"])
            elif "fixed" in event:
                inside = inside and ours < Version(event["fixed"])
            elif "last_affected" in event:
                inside = inside and ours <= Version(event["last_affected"])
    except InvalidVersion:
        return True  # a person must decide
    return inside


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("dist/sbom.cdx.json"), help="the file to write")
    parser.add_argument("--advisories", type=Path, help="a copy of the OSV database")
    options = parser.parse_args()
    packages = [*list_own_packages(), *list_agent_packages()]
    document = build_document(packages)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{options.out}: {len(document['components'])} packages")
    if options.advisories is None:
        print("Known vulnerabilities were not looked up. Download OSV's database and run: make sbom OSV=FOLDER")
        return 0
    found = find_vulnerabilities(packages, read_advisories(options.advisories))
    print(*found, f"known vulnerabilities: {len(found)}", sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
