"""Agents and sandboxes: what is installed, and a sandbox of each kind that is really started."""

from __future__ import annotations

import asyncio
import json
import platform
import shutil
import subprocess
from pathlib import Path

from turngate.agents.install import NODE_AT_LEAST, Installation, ensure_installed, explain_missing, find_node
from turngate.agents.spec import AgentSpec, find_agent, load_catalog
from turngate.doctor.context import Subject
from turngate.doctor.finding import Seen, failure, ok, unchecked, warning
from turngate.errors import SandboxError, SandboxUnavailable, TurngateError
from turngate.sandboxes import get_backend
from turngate.sandboxes.base import Backend, Sandbox, SandboxSpec

HERE = ("local", "bubblewrap", "docker")
_LIFE_S = 300.0


async def agents(subject: Subject) -> list[Seen]:
    """Those that were named, or all that are known."""
    named = bool(subject.agents)
    specs = [find_agent(name).spec for name in subject.agents] or [found.spec for found in load_catalog().values()]
    return await asyncio.gather(*(asyncio.to_thread(_agent, spec, named) for spec in specs))


def _agent(spec: AgentSpec, named: bool) -> Seen:
    made = spec.install
    if not (made.npm or made.pip):
        mend = f"turngate agents check {spec.name}" if spec.check else "the sandbox's image has to hold what it starts"
        return unchecked(f"{spec.name}: has to be in the sandbox", mend)
    if made.npm and platform.libc_ver()[0] != "glibc":
        bad = failure if named else warning
        return bad(
            f"{spec.name}: needs glibc, and this machine has another C library", "use Debian, Ubuntu or the like"
        )
    why = explain_missing(spec)
    if why is None and made.npm and find_node() is None:
        why = f"{spec.name}: Node {NODE_AT_LEAST} is not there"
    if why is not None:
        # Nothing is installed by looking.
        mend = f"turngate agents install {spec.name} (its first run does it too, and needs the network)"
        return warning(why, mend) if named else unchecked(why, mend)
    installed = ensure_installed(spec, lambda line: None)
    there = _version(spec, Path(installed.folder))
    again = f"delete {installed.folder} and run: turngate agents install {spec.name}"
    if there != made.version:
        return failure(f"{spec.name}: {there or 'no version'} is installed, and {made.version} is pinned", again)
    if made.program and not (Path(installed.folder) / made.program).exists():
        return failure(f"{spec.name}: {made.program} is gone from its installation", again)
    return _runtime(spec, installed) or ok(f"{spec.name} {there}: installed, as pinned")


def _runtime(spec: AgentSpec, installed: Installation) -> Seen | None:
    """What is wrong with what runs it."""
    if installed.node:
        try:
            command = [installed.node, "--version"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)  # noqa: S603
            major = int(done.stdout.strip().lstrip("v").partition(".")[0] or 0)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            major = 0
        if major < NODE_AT_LEAST:
            return failure(
                f"{spec.name}: {installed.node} does not run as Node {NODE_AT_LEAST} or newer",
                "delete it; it is made anew",
            )
    if installed.python and shutil.which(installed.python) is None:
        return warning(
            f"{spec.name}: there is no {installed.python} on this machine",
            f"install it, or use a docker image that has {installed.python}",
        )
    return None


def _version(spec: AgentSpec, folder: Path) -> str:
    if spec.install.npm:
        try:
            return str(
                json.loads((folder / "node_modules" / spec.install.npm / "package.json").read_bytes())["version"]
            )
        except (OSError, ValueError, KeyError):
            return ""
    wanted = spec.install.pip.lower().replace("-", "_").replace(".", "_")
    for place in folder.glob("*.dist-info"):
        name, _, version = place.name.removesuffix(".dist-info").rpartition("-")
        if name.lower().replace("-", "_").replace(".", "_") == wanted:
            return version
    return ""


async def sandboxes(subject: Subject) -> list[Seen]:
    """Each is made, has `true` run in it, and is looked at for a way out."""
    names = subject.sandboxes or HERE
    return await asyncio.gather(*(_tried(name, subject.image, bool(subject.sandboxes)) for name in names))


async def _tried(name: str, image: str, named: bool) -> Seen:
    bad = failure if named else warning
    try:
        place = get_backend(name)
        await place.check()
        spec = SandboxSpec(image=image if name not in ("local", "bubblewrap") else "", network="none", life_s=_LIFE_S)
        sandbox = await place.create(spec)
    except SandboxUnavailable as error:
        return bad(f"{name}: {error.message}", _mend(name))
    except TurngateError as error:
        return bad(f"{name}: cannot be started: {error.message}", _mend(name))
    try:
        return await _looked_at(name, place, spec, sandbox)
    except SandboxError as error:
        return bad(f"{name}: {error.message}", _mend(name))
    finally:
        await sandbox.stop()


async def _looked_at(name: str, place: Backend, spec: SandboxSpec, sandbox: Sandbox) -> Seen:
    ran = await sandbox.exec(["true"], timeout_s=30)
    if ran.exit_code:
        return failure(f"{name}: `true` ended with exit code {ran.exit_code} in it", _mend(name))
    wishes = place.not_enforced(spec)
    if "network" in wishes:
        return ok(f"{name}: runs; it keeps no agent from your files or the network: for agents that you trust")
    seen = await sandbox.exec(["cat", "/proc/net/dev"], timeout_s=30)
    ways = [line.partition(":")[0].strip() for line in seen.stdout.decode("utf-8", "replace").splitlines()[2:]]
    if seen.exit_code or not ways:
        return warning(
            f"{name}: runs, but it cannot be told whether it has a network", "docs/sandboxes.md has what each closes"
        )
    if out := [way for way in ways if way != "lo"]:
        return failure(f"{name}: it has a network ({', '.join(out)}) though none was asked for", _mend(name))
    but = f"; only wishes: {', '.join(wishes)}" if wishes else ""
    return ok(f"{name}: runs, and has no network{but}")


def _mend(name: str) -> str:
    return {
        "bubblewrap": "apt-get install bubblewrap; in a container it needs user namespaces",
        "docker": "start Docker; give --image one that is there, or make the default: python tools/base_image.py docker",
        "e2b": "docs/remote-sandboxes.md has what it needs",
        "huggingface": "docs/remote-sandboxes.md has what it needs",
    }.get(name, "docs/sandboxes.md has what each needs")
