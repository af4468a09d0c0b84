"""A hostile agent runs every probe of `probes.py` in each sandbox and gets nothing; a control shows that each probe can succeed.

All probes of a sandbox share one rollout. The remote sandboxes are stand-ins that do not isolate, so only the walls of the gateway are
tested there. `local` does not isolate either: for it, the tests check that what is open is documented.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import msgspec
import pytest

from tests.kit import say
from tests.redteam import intruder
from tests.redteam.probes import PROBES, Probe
from tests.rollout.kit import Harness, open_harness
from tests.sandboxes import kit
from tests.sandboxes.standins import e2b, huggingface
from tests.sandboxes.standins.machine import serving
from tests.speed import scaled
from tests.tasks.grading.kit import script_task, write_files
from turngate.client.gateway import GatewayClient
from turngate.rollout.connection import GatewayConnector
from turngate.sandboxes.base import Backend, SandboxSpec
from turngate.sandboxes.e2b import E2BBackend
from turngate.sandboxes.huggingface import HuggingFaceBackend
from turngate.store.outcomes import RecordedOutcome
from turngate.trace.tool_schema import HostTool

pytestmark = [pytest.mark.process, pytest.mark.promise(7)]

DOCS = Path(__file__).parents[2] / "docs"
CONTROL = "control"  # in `local`, with what the walls withhold
REMOTE = ("e2b", "huggingface")
SANDBOXES = {
    "local": [],
    "bubblewrap": [pytest.mark.needs("bubblewrap"), pytest.mark.real],
    "docker": [pytest.mark.needs("docker"), pytest.mark.full],
    "e2b": [pytest.mark.full],
    "huggingface": [pytest.mark.full],
}
WITHHELD = ("admin_key", "other_key", "shown_key", "page_cookie")  # what only the control is given
OTHER, GRADED = "somebody-elses-session", "a-graded-session"
SECRETS = {
    name: f"{name}-{os.urandom(8).hex()}"
    for name in ("words", "grade", "answer", "host", "spec", "variable", "argument", "file")
}
DEVICES = [
    "mem",
    "kmem",
    "port",
    "kmsg",
    "loop*",
    "sd*",
    "vd*",
    "xvd*",
    "nvme*",
    "dm-*",
    "fuse",
    "kvm",
    "net/tun",
    "vhost-*",
]
DEVICE_NODES = [("mem", "c", 1, 1), ("kmsg", "c", 1, 11), ("loop-control", "c", 10, 237), ("loop0", "b", 7, 0)]
TOOL = {"name": "answer", "description": "Hand in the answer.", "schema": {"type": "object"}}


def is_tested(probe: Probe, sandbox: str) -> bool:
    """Return whether a probe must get nothing in a sandbox."""
    return not (probe.open_in_local if sandbox == "local" else sandbox in REMOTE and not probe.isolates)


ATTACKS = [
    pytest.param(sandbox, probe.name, marks=marks, id=f"{sandbox}-{probe.name}")
    for sandbox, marks in SANDBOXES.items()
    for probe in PROBES
    if is_tested(probe, sandbox)
]


@pytest.mark.parametrize(("sandbox", "probe"), ATTACKS)
def test_probe_gets_nothing(sandbox: str, probe: str) -> None:
    assert run_intruder(sandbox)[probe] == ""


def without_wall(probes: Iterable[Probe]) -> list[Any]:
    """Return probes for `parametrize`, each with its marks."""
    marks = {True: [pytest.mark.needs("root")], False: []}
    return [pytest.param(probe, marks=marks[probe.needs_root], id=probe.name) for probe in probes]


@pytest.mark.parametrize("probe", without_wall(PROBES))
def test_probe_succeeds_without_wall(probe: Probe) -> None:
    assert run_intruder(CONTROL)[probe.name] != ""


@pytest.mark.parametrize("probe", without_wall(probe for probe in PROBES if probe.open_in_local))
def test_local_is_open_as_documented(probe: Probe) -> None:
    assert run_intruder("local")[probe.name] != ""
    assert f"- {probe.open_in_local}\n" in (DOCS / "sandboxes.md").read_text()


def test_every_probe_has_code_and_asset() -> None:
    assert all(callable(getattr(intruder, probe.name)) and probe.goal and probe.asset for probe in PROBES)
    assert all(probe.control or probe.open_in_local for probe in PROBES)


# ── one rollout per sandbox ──


@cache
def run_intruder(sandbox: str) -> dict[str, str]:
    """Run all probes in a sandbox, and return what each one got."""
    if sandbox in kit.ISOLATED:
        kit.need(sandbox)
    return asyncio.run(_run_intruder(sandbox))


async def _run_intruder(sandbox: str) -> dict[str, str]:
    async with open_harness(lambda request, n: say("Nothing to see here.")) as harness, AsyncExitStack() as stack:
        os.environ["REDTEAM_HOST_KEY"] = SECRETS["host"]
        stack.callback(os.environ.pop, "REDTEAM_HOST_KEY")
        backend = await stack.enter_async_context(open_backend(sandbox, harness))
        fetched: list[str] = []
        known = await prepare_host(harness, stack, fetched, backend if sandbox in kit.MAKE else None)
        control = {probe.name: {name: known[value] for name, value in probe.control.items()} for probe in PROBES}
        given = {name: value for name, value in known.items() if name not in WITHHELD}
        given |= {"probes": [probe.name for probe in PROBES], "control": control if sandbox == CONTROL else {}}
        results = await run_probes(harness, backend, given)
        by_tool = [line for line in fetched if "/by-tool" in line]
        others = [line for line in fetched if line not in by_tool]
        return {**results, "make_gateway_fetch": " ".join(others), "make_host_tool_fetch": " ".join(by_tool)}


async def run_probes(harness: Harness, backend: Backend, given: dict[str, Any]) -> dict[str, str]:
    """Run all probes in one rollout."""
    with tempfile.TemporaryDirectory() as folder:
        task = script_task(Path(folder), {"test.sh": f"echo {SECRETS['answer']}"})
        task = msgspec.structs.replace(task, tools=build_tools(f"http://{given['listener']}/by-tool"))
        known = json.dumps({**given, "hidden_tests": f"{folder}/tests"})
        write_files(Path(folder, "files"), {"intruder.py": Path(intruder.__file__).read_text(), "given.json": known})
        outcome = await harness.run(
            command="exec python3 intruder.py given.json",
            task=task,
            backend=backend,
            grade=False,
            env={"FROM_SPEC": SECRETS["spec"]},
            timeout_s=scaled(120),
        )
    assert outcome.status == "finished", (outcome, outcome.collected.stderr)
    found: dict[str, str] = json.loads((harness.folder / outcome.session / "stdout").read_bytes())
    return found


def build_tools(url: str) -> tuple[HostTool, ...]:
    """Tools of the attacked task. The schema of the second one refers to a URL, as that of a careless or hostile author may."""
    schemas = {"look_up": {}, "refer": {"$ref": url}}
    return tuple(
        HostTool(name, "Look it up.", {"type": "object", "properties": {"text": schema}})
        for name, schema in schemas.items()
    )


@asynccontextmanager
async def open_backend(sandbox: str, harness: Harness) -> AsyncIterator[Backend]:
    """Create the backend. Remote ones use a stand-in of their service, and reach the gateway at its public address."""
    if sandbox not in REMOTE:
        yield kit.MAKE["local" if sandbox == CONTROL else sandbox](harness.root)
        return
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        async with GatewayConnector(harness.gateway.root, public_url=harness.gateway.root) as harness.connector:
            if sandbox == "e2b":
                service = e2b.E2BStandIn(Path(folder))
                async with serving(service):
                    patch.setenv("E2B_API_KEY", e2b.KEY)
                    patch.setenv("E2B_API_URL", service.url)
                    patch.setenv("E2B_SANDBOX_URL", service.url)
                    yield E2BBackend()
            else:
                hub = huggingface.HuggingFaceStandIn(Path(folder))
                async with serving(hub):
                    patch.setenv("HF_TOKEN", huggingface.TOKEN)
                    patch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
                    yield HuggingFaceBackend()


# ── the host ──


async def prepare_host(
    harness: Harness, stack: AsyncExitStack, fetched: list[str], backend: Backend | None
) -> dict[str, Any]:
    """Prepare what the attacker is after: sessions, rewards, files, processes and servers. Return what it knows of them."""
    gateway = harness.gateway
    other = await gateway.open(id=OTHER, tools=[TOOL])
    words = {"model": "m", "input": SECRETS["words"]}
    response = (await gateway.http(other.key).post("/v1/responses", json=words)).json()["id"]
    await gateway.open(id=GRADED)
    await gateway.seal(GRADED)
    async with GatewayClient(gateway.root, gateway.app.admin_key) as client:
        await client.record(GRADED, RecordedOutcome(kind="graded", reward=0.7319, message=SECRETS["grade"]))
    shown = await gateway.open(show_logprobs=True)
    page = gateway.http()
    login = await page.post("/page/login", json={"key": gateway.app.admin_key}, headers={"x-turngate-page": "1"})
    port = int(gateway.root.rpartition(":")[2])
    listener = await stack.enter_async_context(listen(fetched))
    return {
        **prepare_machine(harness, stack),
        **await prepare_neighbor(stack, backend),
        **{"url": "", "key": "", "cookie": "", "argument": "", "fetches": "", "yes": "yes"},
        **{"gateway": gateway.root, "gateway_port": port, "admin_key": gateway.app.admin_key},
        **{"other": OTHER, "other_key": other.key, "other_response": response, "other_tool": TOOL["name"]},
        **{"other_words": SECRETS["words"], "graded": GRADED, "hidden_grade": SECRETS["grade"]},
        "shown_key": shown.key,
        "page_cookie": login.headers["set-cookie"].partition(";")[0],
        "store": str(gateway.database),
        "expected_answer": SECRETS["answer"],
        "host_variable": SECRETS["host"],
        "spec_variable": SECRETS["spec"],
        "program_name": "intruder.py",
        "listener": listener,
        "tools": [tool.name for tool in build_tools("")],
        "devices": [f"/dev/{pattern}" for pattern in DEVICES],
        "device_nodes": DEVICE_NODES,
        "public_paths": ["/", "/health", "/metrics", "/openapi.json", "/docs", "/page", "/page/", f"/s/{OTHER}"],
        "admin_paths": ["/admin/sessions"],
        "secrets": {"a session": OTHER, "a grade": SECRETS["grade"], "the admin key": gateway.app.admin_key},
        "addresses": [
            *("127.0.0.1", "localhost", "localhost.", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0"),
            *("::1", "::ffff:127.0.0.1", "::ffff:7f00:1", socket.gethostname(), "172.17.0.1"),
        ],
    }


def prepare_machine(harness: Harness, stack: AsyncExitStack) -> dict[str, Any]:
    """Put secrets into files, processes and sockets of the host."""
    outside = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="redteam-")))
    files = write_files(outside, {".ssh/id_ed25519": "private", ".cache/turngate/admin-key": "private"})
    for path in files.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    bystander = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(3600)", SECRETS["argument"]],
        env={"BYSTANDER_KEY": SECRETS["variable"]},
    )
    stack.callback(bystander.wait)
    stack.callback(bystander.kill)
    sockets = [str(outside / "daemon.sock"), f"\0{outside.name}"]
    for name in sockets:
        daemon = stack.enter_context(socket.socket(socket.AF_UNIX))
        daemon.bind(name)
        daemon.listen()
    data = harness.gateway.database.parent
    return {
        "host_files": [*(str(path) for path in files.rglob("*")), str(data / "admin-key"), "/etc/shadow"],
        "writes": [str(outside / "cron-job")],
        "sockets": [*sockets, "/run/docker.sock", "/var/run/docker.sock", "/run/dbus/system_bus_socket"],
        "bystander": bystander.pid,
        "bystander_variable": SECRETS["variable"],
        "bystander_argument": SECRETS["argument"],
        "gateway_pid": os.getpid(),
    }


async def prepare_neighbor(stack: AsyncExitStack, backend: Backend | None) -> dict[str, Any]:
    """Start another sandbox of the same kind, with a file."""
    if backend is None:
        backend = kit.MAKE["local"](Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tg-"))))
    neighbor = await backend.create(SandboxSpec())
    stack.push_async_callback(neighbor.stop)
    await neighbor.write("private", SECRETS["file"].encode())
    path = f"{neighbor.workdir}/private" if backend.name == "local" else f"{neighbor.shared[0].parent}/work/private"  # type: ignore[index]
    return {"neighbor_path": path, "neighbor_file": SECRETS["file"]}


@asynccontextmanager
async def listen(fetched: list[str]) -> AsyncIterator[str]:
    """Listen on all addresses of the host, and collect the requests. Yield the address."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fetched.append((await reader.readline()).decode("latin-1").strip())
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "0.0.0.0", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
