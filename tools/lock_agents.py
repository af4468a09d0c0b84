"""Lock the packages of the bundled agents, with hashes: `python tools/lock_agents.py [AGENT …]`, after `turngate agents install`.

For an agent from npm, the lock is the `package-lock.json` of its installation. For one from PyPI, it lists the installed versions with the
SHA-256 of each file for Linux on x86-64 or ARM64, from the package index.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

from turngate.agents.install import NODE_LOCK, NODE_PACKAGE, cache_folder, install_folder, lock_file, lock_header
from turngate.agents.spec import AgentSpec, load_catalog

INDEX = "https://pypi.org/simple"
LINK = re.compile(r'href="[^"#]*/([^"/#]+)#sha256=([0-9a-f]{64})"')
PLATFORM = re.compile(r"-(any|manylinux[^-]*(x86_64|aarch64)|linux_(x86_64|aarch64))\.whl$")


def main() -> None:
    agents = load_catalog()
    for name in sys.argv[1:] or agents:
        spec = agents[name].spec
        if spec.install.npm:
            lock_file(spec).write_text(lock_npm(install_folder(spec)))
        elif spec.install.pip:
            lock_file(spec).write_text(lock_pip(spec))
    NODE_LOCK.write_text("".join(lock_package(*NODE_PACKAGE.split("=="), "3.11")))
    print(f"wrote {NODE_LOCK.parent} from {cache_folder()}")


def lock_npm(folder: Path) -> str:
    """Return the lock of an installation, without the URLs of the registry that this machine uses.

    `npm ci` refuses a lock that lacks a package of another platform, so optional dependencies that the registry does not have are removed.
    """
    lock = json.loads((folder / "package-lock.json").read_text())
    locked = {path.rpartition("node_modules/")[2] for path in lock["packages"]}
    for path, package in lock["packages"].items():
        package.pop("resolved", None)
        optional = package.pop("optionalDependencies", {})
        if kept := {name: version for name, version in optional.items() if name in locked}:
            package["optionalDependencies"] = kept
        if path and not package.get("link") and "integrity" not in package:
            raise SystemExit(f"{folder.name}: {path} has no hash")
    return json.dumps(lock, indent=1, sort_keys=True) + "\n"


def lock_pip(spec: AgentSpec) -> str:
    found = {(one.metadata["Name"], one.version) for one in distributions(path=[str(install_folder(spec))])}
    if not found:
        raise SystemExit(f"{spec.name} is not installed; run turngate agents install {spec.name}")
    return lock_header(spec.install.python) + "".join(
        line
        for name, version in sorted(found, key=lambda pair: pair[0].lower())
        for line in lock_package(name, version, spec.install.python)
    )


def lock_package(name: str, version: str, python: str) -> Iterator[str]:
    """Yield the lines of one package: its version, and the hashes of its files."""
    hashes = sorted(digest for file, digest in read_index(name) if is_needed(file, name, version, python))
    if not hashes:
        raise SystemExit(f"the index has no file of {name} {version} for Python {python}")
    yield " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in hashes)]) + "\n"


def read_index(name: str) -> list[tuple[str, str]]:
    with urllib.request.urlopen(f"{INDEX}/{normalize(name)}/", timeout=60) as page:
        return LINK.findall(page.read().decode())


def is_needed(file: str, name: str, version: str, python: str) -> bool:
    """Return whether a file is the source archive of a version, or a wheel for one of the supported platforms."""
    package, _, rest = file.partition(f"-{version}")
    if normalize(package) != normalize(name) or not rest:
        return False
    if rest in (".tar.gz", ".zip"):
        return True
    own = f"cp{python.replace('.', '')}"
    fits = re.match(rf"(-\d[^-]*)?-([^-]*py3[^-]*|{own}|cp3\d+)-(none|abi3|{own})-", rest)
    return bool(fits and PLATFORM.search(rest) and (fits[3] != "none" or "py3" in fits[2]))


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
