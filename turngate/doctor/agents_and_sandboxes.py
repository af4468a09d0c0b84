"""Check that the agents are installed at their pinned versions, that Node is new enough, and that sandboxes actually start."""

from __future__ import annotations

import asyncio
import json
import platform
import subprocess
from pathlib import Path

from turngate.agents.install import NODE_AT_LEAST, ensure_installed, explain_missing, find_node
from turngate.agents.installation import Installation
from turngate.agents.spec import AgentSpec, find_agent, load_catalog
from turngate.doctor.context import DoctorContext
from turngate.doctor.finding import CheckOutcome, failure, not_checked, ok, warning
from turngate.errors import SandboxError, SandboxUnavailable, TurngateError
from turngate.sandboxes import get_backend
from turngate.sandboxes.base import Backend, Sandbox, SandboxSpec

LOCAL_BACKENDS = ("local", "bubblewrap", "docker")
_LIFE_S = 300.0


async def check_agents(context: DoctorContext) -> list[CheckOutcome]:
    """Check that the agents are installed at their pinned versions."""
    is_named = bool(context.agents)
    specs = [find_agent(name).spec for name in context.agents] or [found.spec for found in load_catalog().values()]
    return await asyncio.gather(*(asyncio.to_thread(_check_agent, spec, is_named) for spec in specs))


def _check_agent(spec: AgentSpec, is_named: bool) -> CheckOutcome:
    install = spec.install
    if not (install.npm or install.pip):
        fix = (
            f"run: turngate agents check {spec.name}"
            if spec.check
            else "install the program on this machine (for bubblewrap, in /usr), or use a sandbox with an image that contains it"
        )
        return not_checked(
            f"{spec.name}: Turngate does not install this program; the sandbox must already contain it", fix
        )
    if install.npm and platform.libc_ver()[0] != "glibc":
        problem = failure if is_named else warning
        return problem(
            f"{spec.name}: the agent needs glibc, but this machine has a different C library",
            "use Debian, Ubuntu or a similar system",
        )
    why = explain_missing(spec)
    if why is None and install.npm and find_node() is None:
        why = f"{spec.name}: no usable Node {NODE_AT_LEAST} or newer was found"
    if why is not None:
        # A check does not install anything.
        fix = (
            f"run: turngate agents install {spec.name} (the first rollout also installs it, which needs network access)"
        )
        return warning(why, fix) if is_named else not_checked(why, fix)
    installed = ensure_installed(spec, lambda line: None)
    version = _find_version(spec, Path(installed.folder))
    reinstall = f"delete {installed.folder} and run: turngate agents install {spec.name}"
    if version != install.version:
        return failure(
            f"{spec.name}: {version or 'an unknown version'} is installed, but {install.version} is pinned", reinstall
        )
    if install.program and not (Path(installed.folder) / install.program).exists():
        return failure(f"{spec.name}: {install.program} is missing from its installation", reinstall)
    return _check_runtime(spec, installed) or ok(f"{spec.name} {version}: the pinned version is installed")


def _check_runtime(spec: AgentSpec, installed: Installation) -> CheckOutcome | None:
    """Check the Node or Python that runs an agent. Return the problem, or None if there is none."""
    if installed.node:
        try:
            command = [installed.node, "--version"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)  # noqa: S603
            major = int(done.stdout.strip().lstrip("v").partition(".")[0] or 0)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            major = 0
        if major < NODE_AT_LEAST:
            return failure(
                f"{spec.name}: {installed.node} does not run or is older than Node {NODE_AT_LEAST}",
                "if this file is in Turngate's cache, delete the cache's node folder (the next rollout downloads Node again); "
                f"otherwise, install Node {NODE_AT_LEAST} or newer",
            )
    if installed.python and installed.host_python is None:
        return warning(
            f"{spec.name}: {installed.python} is not installed on this machine",
            f"install it, or use a Docker image that contains {installed.python}",
        )
    return None


def _find_version(spec: AgentSpec, folder: Path) -> str:
    if spec.install.npm:
        try:
            return str(
                json.loads((folder / "node_modules" / spec.install.npm / "package.json").read_bytes())["version"]
            )
        except (OSError, ValueError, KeyError):
            return ""
    package = spec.install.pip.lower().replace("-", "_").replace(".", "_")
    for path in folder.glob("*.dist-info"):
        name, _, version = path.name.removesuffix(".dist-info").rpartition("-")
        if name.lower().replace("-", "_").replace(".", "_") == package:
            return version
    return ""


async def check_sandboxes(context: DoctorContext) -> list[CheckOutcome]:
    """Check the chosen kinds of sandbox or, by default, the local ones.

    Start one sandbox of each kind, run `true` in it and, if it isolates the network, verify that it has no network access.
    """
    names = context.sandboxes or LOCAL_BACKENDS
    return await asyncio.gather(*(_check_sandbox(name, context.image, bool(context.sandboxes)) for name in names))


async def _check_sandbox(name: str, image: str, is_named: bool) -> CheckOutcome:
    problem = failure if is_named else warning
    try:
        backend = get_backend(name)
        await backend.check()
        spec = SandboxSpec(image=image if name not in ("local", "bubblewrap") else "", network="none", life_s=_LIFE_S)
        sandbox = await backend.create(spec)
    except SandboxUnavailable as error:
        return problem(f"{name}: {error.message}", _suggest_fix(name))
    except TurngateError as error:
        return problem(f"{name}: the sandbox could not be started: {error.message}", _suggest_fix(name))
    try:
        return await _inspect_sandbox(name, backend, spec, sandbox)
    except SandboxError as error:
        return problem(f"{name}: {error.message}", _suggest_fix(name))
    finally:
        await sandbox.stop()


async def _inspect_sandbox(name: str, backend: Backend, spec: SandboxSpec, sandbox: Sandbox) -> CheckOutcome:
    ran = await sandbox.exec(["true"], timeout_s=30)
    if ran.timed_out:
        return failure(f"{name}: `true` did not end in the sandbox within 30 s", _suggest_fix(name))
    if ran.exit_code:
        return failure(f"{name}: `true` failed in the sandbox with exit code {ran.exit_code}", _suggest_fix(name))
    not_enforced = backend.not_enforced(spec)
    if "network" in not_enforced:
        shared = "the network" if backend.relocates else "files or the network"
        return ok(f"{name}: starts, but does not isolate {shared}; use it only for agents that you trust")
    devices = await sandbox.exec(["cat", "/proc/net/dev"], timeout_s=30)
    interfaces = [line.partition(":")[0].strip() for line in devices.stdout.decode("utf-8", "replace").splitlines()[2:]]
    if devices.exit_code or not interfaces:
        return warning(
            f"{name}: starts, but its network access could not be determined",
            "see docs/sandboxes.md for what each sandbox isolates",
        )
    if external := [interface for interface in interfaces if interface != "lo"]:
        return failure(
            f"{name}: the sandbox has network access ({', '.join(external)}) but should have none", _suggest_fix(name)
        )
    limits = f"; not enforced: {', '.join(not_enforced)}" if not_enforced else ""
    return ok(f"{name}: starts, and has no network access{limits}")


def _suggest_fix(name: str) -> str:
    return {
        "bubblewrap": "run: apt-get install bubblewrap; in a container, bubblewrap also needs user namespaces",
        "docker": "start Docker, and set --image to an existing image or build the default one: python tools/base_image.py docker",
        "e2b": "see docs/remote-sandboxes.md for the requirements",
        "huggingface": "see docs/remote-sandboxes.md for the requirements",
    }.get(name, "see docs/sandboxes.md for the requirements")
