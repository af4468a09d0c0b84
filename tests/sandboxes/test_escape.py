"""A hostile agent tries to reach the admin API, other sessions, the host's files, processes and secrets, and the network.

`escape.py` is that agent. It runs in a real rollout in each sandbox and reports the results of its attempts, which the tests check.
`local` does not isolate: for it, the tests document what is open.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.kit import say
from tests.rollout.kit import Harness, open_harness
from tests.sandboxes import kit, warm_kit
from tests.speed import scaled
from turngate.agents.installation import Installation
from turngate.agents.interpreters import Interpreter
from turngate.agents.spec import find_agent
from turngate.client.gateway import GatewayClient
from turngate.client.protocol import OpenedSession
from turngate.rollout.outcome import Outcome
from turngate.sandboxes import warm_start
from turngate.sandboxes.base import SandboxSpec
from turngate.tasks.task import Task

pytestmark = [pytest.mark.process, pytest.mark.full]

BACKENDS = kit.backends()
WARM = " warm"  # after the name of a backend: the agent is forked from a fork server
ATTEMPTS = [
    *BACKENDS,
    pytest.param(f"local{WARM}", marks=pytest.mark.repeat),
    *(pytest.param(f"{param.values[0]}{WARM}", marks=param.marks) for param in kit.backends("bubblewrap")),
]
PROGRAM = Path(__file__).with_name("escape.py")
REPOSITORY = Path(__file__).parents[2]
OWN, OTHER = "the-agents-own-session", "somebody-elses-session"
NAP = f"64{os.getpid():07d}"  # a unique number of seconds, which identifies the process that sleeps
OTHER_MESSAGE = "A secret conversation of somebody else."


class Attempt(msgspec.Struct, frozen=True):
    """The agent's results, and the state of the gateway and the host."""

    backend: str
    results: dict[str, Any]
    outcome: Outcome
    trace: Any  # of the agent's session
    other: Any  # the other session afterwards
    sessions: list[str]  # all sessions afterwards
    paused: bool
    admin_key: str
    connections: int  # to a port of the host
    argv: list[str]  # command lines on the host that contained a secret
    written: list[str]  # files on the host created from inside


@cache
def get_attempt(backend: str) -> Attempt:
    """Run the agent once for all tests of a backend."""
    kit.need(backend.removesuffix(WARM))
    return asyncio.run(run_attempt(backend.removesuffix(WARM), warm=backend.endswith(WARM)))


@pytest.fixture(params=ATTEMPTS)
def attempt(request: pytest.FixtureRequest) -> Attempt:
    return get_attempt(request.param)


@pytest.fixture(params=[param for param in ATTEMPTS if not str(param.values[0]).startswith("local")])
def isolated(request: pytest.FixtureRequest) -> Attempt:
    """An attempt in a sandbox with isolation."""
    return get_attempt(request.param)


@pytest.fixture(params=kit.backends(*kit.ISOLATED))
def isolated_backend(request: pytest.FixtureRequest) -> str:
    kit.need(request.param)
    return str(request.param)


class NamedSessionClient(GatewayClient):
    """Opens its session with an id that an agent can guess, and keeps the key to search for it."""

    key = ""

    async def open(self, config: Any, session: str | None = None, traceparent: str = "") -> OpenedSession:
        opened = await super().open(config, OWN)
        self.key = opened.key
        return opened


async def run_attempt(backend: str, *, warm: bool = False) -> Attempt:
    """Run a rollout of the hostile agent next to another session and another sandbox."""
    async with open_harness(lambda request, n: say("Nothing to see here.")) as harness, AsyncExitStack() as stack:
        gateway = harness.gateway
        other = await gateway.open(id=OTHER)
        await gateway.ask(other.key, OTHER_MESSAGE)
        neighbour = await kit.MAKE[backend](harness.root).create(
            SandboxSpec(env={"NEIGHBOUR": "the neighbour's variable"})
        )
        stack.push_async_callback(neighbour.stop)
        await neighbour.write(f"{neighbour.home}/private", b"the neighbour's file")
        await neighbour.start(["sleep", NAP], env={"THEIRS": "the neighbour's process"})
        bystander = subprocess.Popen(["sleep", NAP], env={"BYSTANDER": "the bystander's variable"})
        stack.callback(bystander.wait)
        stack.callback(bystander.kill)
        outside = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turngate-outside-")))
        outside.chmod(0o777)
        listener = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0turngate-{outside.name}")
        abstract.listen()
        client = await stack.enter_async_context(NamedSessionClient(gateway.root, gateway.app.admin_key))
        assert neighbour.shared is not None
        guesses = build_guesses(
            harness, other.key, bystander.pid, neighbour.shared[0].parent, outside, listener, backend
        )
        argv: list[str] = []
        watching = asyncio.create_task(_watch_argv(client, gateway.app.admin_key, argv))
        files = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (files / "escape.py").write_bytes(PROGRAM.read_bytes())
        arguments = base64.b64encode(json.dumps(guesses).encode()).decode()
        task = Task(id="escape", instruction="Get out.", files=files)
        options: dict[str, Any] = {"task": task, "backend": backend, "client": client, "timeout_s": scaled(240)}
        warm_start.counts.clear()
        if warm:
            options |= prepare_warm_agent(arguments, stack)
        outcome = await harness.run(command=f"exec python3 escape.py {arguments}", **options)
        assert warm_start.counts["warm"] == int(warm), warm_start.counts
        watching.cancel()
        assert outcome.status == "finished", (outcome, outcome.collected.stderr)
        listener.settimeout(0)
        return Attempt(
            backend=backend,
            results=json.loads((harness.folder / outcome.session / "stdout").read_bytes()),
            outcome=outcome,
            trace=await gateway.trace(outcome.session),
            other={**await gateway.show(OTHER), "turns": await gateway.turns(OTHER)},
            sessions=[row["id"] for row in (await gateway._request("GET", "/admin/sessions"))["sessions"]],
            paused=(await gateway._request("GET", "/admin/fence"))["paused"],
            admin_key=gateway.app.admin_key,
            connections=_count_connections(listener),
            argv=argv,
            written=[path.name for path in outside.iterdir()],
        )


def prepare_warm_agent(arguments: str, stack: AsyncExitStack) -> dict[str, Any]:
    """Install the hostile agent like one from PyPI, and return the options of a rollout that forks it from a fork server."""
    folder = warm_kit.install(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "agent")
    shell = find_agent("shell").spec
    agent = msgspec.structs.replace(
        shell,
        command=("{python}", "{install}", "{workdir}/escape.py", arguments),
        stdin="",
        options={},
        preload=("library",),
    )
    python = Interpreter(os.path.realpath("/usr/bin/python3"), "/usr")  # so that nothing else of the host is mounted
    installed = Installation(folder=str(folder), python="python3", host_python=python)
    stack.callback(setattr, warm_start, "PLAIN_STARTS", warm_start.PLAIN_STARTS)
    stack.callback(warm_start.close_servers)
    warm_start.PLAIN_STARTS = 0
    return {"agent": agent, "installed": installed}


def build_guesses(
    harness: Harness,
    other_key: str,
    bystander: int,
    neighbour: Path,
    outside: Path,
    listener: socket.socket,
    backend: str,
) -> dict[str, Any]:
    data = harness.gateway.database.parent
    own_process = f"/proc/{os.getpid()}"
    port = int(harness.gateway.root.rpartition(":")[2])
    secrets = {
        "the admin key": harness.gateway.app.admin_key,
        "another session's key": other_key,
        "another session's words": OTHER_MESSAGE,
        "the neighbour's variable": "the neighbour's variable",
        "the neighbour's file": "the neighbour's file",
        "the neighbour's process": "the neighbour's process",
        "the bystander's variable": "the bystander's variable",
    }
    return {
        "attempts": ["doors", "keyless", "tokens", "files", "secrets", "network"],
        **_timeouts(),
        "session": OWN,
        "other": OTHER,
        "other_digest": hashlib.sha256(other_key.encode()).hexdigest(),
        "port": port,
        "files": [
            *(str(data), f"{data}/admin-key", f"{data}/turngate.db", str(harness.folder), str(harness.root)),
            *(str(neighbour), f"{neighbour}/home/private", f"{neighbour}/shared/gateway.sock", str(outside)),
            *(str(REPOSITORY), str(Path(__file__)), str(Path.home()), f"{Path.home()}/.ssh", "/root", "/work"),
            *("/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock", "/var/lib/docker"),
            *(
                f"{own_process}/environ",
                f"{own_process}/cwd",
                f"{own_process}/root/etc/passwd",
                f"{own_process}/mem",
                f"{own_process}/fd",
            ),
            *(f"/proc/{bystander}/environ", f"/proc/{bystander}/cmdline", "/proc/1/root/etc/shadow", "/proc/1/environ"),
            *("/etc/shadow", "/dev/mem", "/dev/kmsg", "/proc/kcore", "/sys/kernel/debug", "/proc/sysrq-trigger"),
        ],
        "writes": [
            *(f"{outside}/from-inside", f"{data}/from-inside", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger"),
            *("/etc/ld.so.preload", "/etc/cron.d/evil", "/usr/bin/evil", "/run/turngate/evil"),
        ]
        if backend != "local"  # local would write them
        else [f"{outside}/from-inside"],
        "secrets": {name: base64.b64encode(text.encode()[::-1]).decode() for name, text in secrets.items()},
        # In `local`, the agent can read everything of its user, so only its own variables and files are searched.
        "look_at_processes": backend != "local",
        "look_in": ["/tmp", "/run", "/etc", "/opt", "/var", "/home", "/dev/shm"] if backend != "local" else [],
        "abstract": f"turngate-{outside.name}",
        "addresses": [
            *(("127.0.0.1", port), ("127.0.0.1", listener.getsockname()[1]), ("172.17.0.1", listener.getsockname()[1])),
            *(("1.1.1.1", 53), ("1.1.1.1", 443), ("169.254.169.254", 80), ("::1", port), ("2606:4700:4700::1111", 443)),
            *((address, listener.getsockname()[1]) for address in _own_addresses()),
        ],
    }


def _timeouts() -> dict[str, float]:
    return {"wait_s": scaled(10), "quiet_s": scaled(0.5)}


def _own_addresses() -> list[str]:
    """Return the network addresses of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return [probe.getsockname()[0]]
        except OSError:
            return []


def _count_connections(listener: socket.socket) -> int:
    count = 0
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


async def _watch_argv(client: NamedSessionClient, admin_key: str, found: list[str]) -> None:
    """Collect command lines that contain a secret: every user can read them."""
    while True:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes()
            except OSError:
                continue
            if admin_key.encode() in line or (client.key and client.key.encode() in line):
                found.append(line.replace(b"\0", b" ").decode(errors="replace"))
        await asyncio.sleep(0.05)


def _status(answer: str) -> int:
    found = re.match(r"HTTP/1\.[01] (\d{3})", answer)
    return int(found[1]) if found else 0


# ── the admin API and other sessions ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.real
@pytest.mark.promise(7)
def test_admin_api_is_unreachable(attempt: Attempt) -> None:
    replies = attempt.results["doors"]
    assert len(replies) > 300
    for what, answer in replies.items():
        head = answer.partition("\r\n\r\n")[0]
        assert attempt.admin_key not in answer, what
        assert "opened" not in answer and '"sessions"' not in answer and "engines" not in answer, (what, answer)
        assert OTHER_MESSAGE not in answer, what
        if "behind a request" in what or "in the path" in what:
            continue  # the first request there is allowed
        if "/v1/models?/" in what or "/v1/models/x#" in what:
            continue  # a valid path of the models API
        assert _status(answer) in (0, 400, 401, 404, 405, 501), (what, head)


def test_pipelined_path_is_checked(attempt: Attempt) -> None:
    for route in ("relay", "door"):
        answer = attempt.results["doors"][f"{route} behind a request"]
        statuses = re.findall(r"HTTP/1\.1 (\d{3})", answer)
        assert statuses == ["200", "404"], answer


def test_gateway_state_is_unchanged(attempt: Attempt) -> None:
    assert sorted(attempt.sessions) == sorted([OWN, OTHER])
    assert attempt.other["status"] == "open"
    assert len(attempt.other["turns"]) == 1  # no call was made in its name
    assert not attempt.paused


def test_model_calls_need_right_key(attempt: Attempt) -> None:
    for what, answer in attempt.results["keyless"].items():
        refused = 400 if "/v1beta/" in what else 401  # as in Google's API
        assert _status(answer) == refused and "key" in answer, (what, answer)
        assert "Nothing to see" not in answer


def test_refusals_do_not_reveal_sessions(attempt: Attempt) -> None:
    results = {what: answer.partition("\r\n\r\n")[2] for what, answer in attempt.results["keyless"].items()}
    by_path: dict[str, set[str]] = {}
    for what, body in results.items():
        path, _, key = what.partition(" ")
        if key != "''":
            by_path.setdefault(path, set()).add(re.sub(r'"(request_id|id)":"[^"]*"', "", body))
    assert all(len(bodies) == 1 for bodies in by_path.values()), by_path


# ── token ids and log-probabilities ─────────────────────────────────────────────────────────────────────────────────


def test_no_dialect_reveals_token_ids_or_logprobs(attempt: Attempt) -> None:
    turns = [node for node in attempt.trace["nodes"] if node["kind"] == "sampled"]
    secret = {f"{p:.4f}"[:7] for turn in turns for p in turn["logprobs"]}
    ids = {",".join(map(str, turn["ids"][:3])) for turn in turns}
    answered = set()
    for what, answer in attempt.results["tokens"].items():
        if "Nothing" in answer:
            answered.add(what)
        else:
            assert _status(answer) in (400, 404) or what == "models", (what, answer)
        compact = answer.replace(" ", "")
        assert not any(value in compact for value in secret), what
        assert not any(run in compact for run in ids), what
        assert not re.search(r'"(prompt_|completion_|output_)?token_ids":[^n]', compact), (what, answer)
        assert not re.search(r'"logprobs":\{"content":\[\{', compact), (what, answer)
        assert attempt.admin_key not in answer
    kinds = {"chat", "responses", "messages", "gemini"}
    assert answered >= kinds | {f"{kind}, streamed" for kind in kinds}


# ── files, processes, secrets ───────────────────────────────────────────────────────────────────────────────────────


def test_host_files_and_processes_are_unreadable(isolated: Attempt) -> None:
    for path, what in isolated.results["files"].items():
        if path == "/proc/1/environ" and isolated.backend == "docker":
            continue  # process 1 is the container's own
        if not path.startswith("write "):
            assert what.startswith("no: ") or what in ("read 0", "listed "), (path, what)


def test_nothing_is_written_outside(isolated: Attempt) -> None:
    for path, what in isolated.results["files"].items():
        if path.startswith("write "):
            assert what.startswith("no: "), (path, what)
    assert isolated.written == []


def test_secrets_of_others_are_not_found(attempt: Attempt) -> None:
    """In the local sandbox, only its variables and own files are searched."""
    secrets = attempt.results["secrets"]
    assert secrets["looked at"] > 20
    assert secrets["found"] == []


def test_no_key_in_command_lines(attempt: Attempt) -> None:
    assert attempt.results["secrets"]["own key in"] == []
    assert attempt.argv == []


# ── the network ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.real
@pytest.mark.promise(7)
def test_network_is_closed(isolated: Attempt) -> None:
    network = dict(isolated.results["network"])
    assert network.pop("interfaces") == "lo"
    assert isolated.connections == 0
    for what, result in network.items():
        assert result.startswith("no: "), (what, result)


# ── allowed calls ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_all_model_calls_are_in_trace_of_agent(attempt: Attempt) -> None:
    """All model calls that succeeded were recorded."""
    assert attempt.outcome.turns == len([n for n in attempt.trace["nodes"] if n["kind"] == "sampled"])
    assert attempt.outcome.turns >= 6


# ── local does not isolate ──────────────────────────────────────────────────────────────────────────────────────────


def test_same_attempts_succeed_in_local() -> None:
    """Check that the attempts can succeed at all, so that their failure elsewhere shows isolation."""
    results, connections = get_attempt("local").results, get_attempt("local").connections
    read = [path for path, what in results["files"].items() if re.match(r"read [1-9]|listed .", what)]
    assert any(path.endswith("/admin-key") for path in read) and any(path.endswith("/home/private") for path in read)
    assert any(path.endswith("/environ") for path in read)
    assert [result for what, result in results["network"].items() if what.startswith("tcp 127.0.0.1")] == [
        "reached"
    ] * 2
    assert results["network"]["abstract socket"] == "reached"
    assert connections >= 1
    assert get_attempt("local").written == ["from-inside"]


async def test_local_sandbox_is_open() -> None:
    """As documented, `local` is for trusted agents and tests: an agent can do what its user can."""
    async with open_harness() as harness:
        data = harness.gateway.database.parent
        program = f"""
admin = open({str(data / "admin-key")!r}).read().strip()
gateway = {harness.gateway.root!r}
print(json.dumps({{
    "reads the admin key": admin.startswith("tga-"),
    "reaches the gateway itself": http("GET", "/health", url=gateway)[0],
    "its own key opens the admin API": http("GET", "/admin/sessions", url=gateway)[0],
    "the admin key does": http("GET", "/admin/sessions", key=admin, url=gateway)[0],
    "reads files of the host": os.path.exists({str(Path(__file__))!r}),
    "sees processes of the host": os.path.exists("/proc/{os.getpid()}/environ"),
    "knows variables of the host": "PYTEST_CURRENT_TEST" in os.environ,
    "has its own home": os.path.expanduser("~") != {str(Path.home())!r},
}}))
"""
        outcome = await harness.run(program)
        assert json.loads(outcome.collected.stdout) == {
            "reads the admin key": True,
            "reaches the gateway itself": 200,
            "its own key opens the admin API": 401,
            "the admin key does": 200,
            "reads files of the host": True,
            "sees processes of the host": True,
            "knows variables of the host": False,
            "has its own home": True,
        }
        assert "network" in outcome.not_enforced


# ── the relay ───────────────────────────────────────────────────────────────────────────────────────────────────────

KILL_RELAY = """
import glob, signal
def relays():
    found = []
    for name in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            if b"/relay.py" in open(name, "rb").read(): found.append(int(name.split("/")[2]))
        except OSError: pass
    return found
print(ask("Hi"), flush=True)
killed = relays()
for pid in killed: os.kill(pid, signal.SIGKILL)
while True:
    try:
        print(ask("Hi", "Hello.", "Again?"), len(killed)); break
    except (OSError, urllib.error.URLError):
        time.sleep(0.1)
"""


@pytest.mark.parametrize("backend", BACKENDS)
async def test_rollout_survives_killed_relay(backend: str) -> None:
    kit.need(backend)
    async with open_harness([say("Hello."), say("Still here.")]) as harness:
        program = (
            KILL_RELAY
            if backend != "local"
            else KILL_RELAY.replace('b"/relay.py" in', "_ours in").replace(
                "import glob, signal",
                'import glob, signal\n_ours = os.environ["HOME"].encode() + b"/.turngate/relay.py"',
            )
        )
        outcome = await harness.run(program, backend=backend)
        assert (outcome.status, outcome.collected.stdout) == ("finished", "Hello.\nStill here. 1\n")
        assert (outcome.turns, outcome.rows) == (2, 1)


async def test_replaced_relay_gains_no_privileges(isolated_backend: str) -> None:
    """The agent may replace the relay's program and target, but gains no privileges by that."""
    async with open_harness([say("Hello.")] * 3) as harness:
        program = """
import glob, signal
home = os.environ["HOME"] + "/.turngate/"
open(home + "relay.py", "w").write(
    "import os, time; open('/tmp/new', 'w').write(open('/proc/self/status').read()); os.rename('/tmp/new', '/tmp/mine'); time.sleep(3600)"
)
open(home + "target", "w").write("http://127.0.0.1:1/admin")
for name in glob.glob("/proc/[0-9]*/cmdline"):
    if b"/relay.py" in open(name, "rb").read(): os.kill(int(name.split("/")[2]), signal.SIGKILL)
while not os.path.exists("/tmp/mine"): time.sleep(0.1)
print([line.split()[1] for line in open("/tmp/mine") if line.startswith(("Uid", "CapEff"))])
"""
        outcome = await harness.run(program, backend=isolated_backend)
        assert outcome.status == "finished", outcome.collected.stderr
        # The user and capabilities of the agent itself.
        assert outcome.collected.stdout == "['1000', '0000000000000000']\n"


async def test_concurrent_agents_have_separate_doors(isolated_backend: str) -> None:
    """Each agent has its own door in its own folder, and its own key."""
    async with open_harness(lambda request, n: say("Hello.")) as harness:
        program = 'print(ask("Hi"), os.listdir("/run/turngate"), sorted(os.listdir("/run")))\ntime.sleep(1)'
        first, second = (
            harness.rollout(program, backend=isolated_backend, folder=harness.folder / str(n)) for n in range(2)
        )
        outcomes = await asyncio.gather(first.run(), second.run())
        for outcome in outcomes:
            assert outcome.status == "finished"
            assert outcome.collected.stdout.startswith("Hello. ['gateway.sock'] ")
            assert (outcome.turns, outcome.calls) == (1, 1)


# ── collected files ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_collected_files_cannot_reach_host(isolated_backend: str, tmp_path: Path) -> None:
    """Links, pipes, odd names and terminal commands are copied unchanged or skipped, and nothing is written elsewhere."""
    secret = tmp_path / "secret"
    secret.write_text("secret of the host")
    tmp_path.chmod(0o755)
    program = f"""
os.symlink({str(secret)!r}, "link"); os.symlink({str(tmp_path)!r}, "folder"); os.symlink("../../../../../../../tmp", "up")
os.symlink("/etc/passwd", "passwd"); os.mkfifo("pipe"); os.mkdir("inner"); os.symlink("inner", "fine")
open(b"\\xff\\x1b[2J\\n.txt", "w").write("<script>alert(1)</script>")
out = os.environ["HOME"] + "/.turngate/stderr"
os.unlink(out); os.symlink({str(secret)!r}, out)
print("\\x1b]0;owned\\x07 done")
"""
    async with open_harness() as harness:
        outcome = await harness.run(program, backend=isolated_backend)
        assert outcome.status == "finished", outcome
        collected = harness.folder / outcome.session
        assert sorted(os.fsencode(path.name) for path in (collected / "work").iterdir()) == sorted(
            [b"fine", b"inner", b"\xff\x1b[2J\n.txt"]
        )
        assert secret.read_text() == "secret of the host"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["secret"]
        for path in collected.rglob("*"):
            assert not path.is_file() or b"secret of the host" not in path.read_bytes()
        assert outcome.collected.stderr == ""


# ── the whole command ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_of_turngate_run_are_hidden_from_agent(backend: str, tmp_path: Path) -> None:
    """The process has the admin key and the engine's key in its environment, and its agent must not."""
    kit.need(backend)
    keys = {"TURNGATE_ADMIN_KEY": "admin-" + os.urandom(16).hex(), "MY_ENGINE_KEY": "engine-" + os.urandom(16).hex()}
    guesses = {
        "attempts": ["secrets"],
        **_timeouts(),
        "session": "x",
        "other": "y",
        "other_digest": "z",
        "port": 1,
        "secrets": {name: base64.b64encode(text.encode()[::-1]).decode() for name, text in keys.items()},
        "look_at_processes": backend != "local",
        "look_in": ["/tmp", "/run", "/etc", "/opt", "/var", "/home"] if backend != "local" else [],
    }
    arguments = base64.b64encode(json.dumps(guesses).encode()).decode()
    (tmp_path / "task" / "files").mkdir(parents=True)
    (tmp_path / "task" / "instruction.md").write_text("Get out.")
    (tmp_path / "task" / "files" / "escape.py").write_bytes(PROGRAM.read_bytes())
    command = [
        *(sys.executable, "-m", "turngate", "run", "--agent", "shell", "--sandbox", backend, "--json"),
        *("--task", str(tmp_path / "task"), "--data", str(tmp_path / "data"), "--engine-key-env", "MY_ENGINE_KEY"),
        *("--set", f"command=exec python3 escape.py {shlex.quote(arguments)}", "--timeout", str(scaled(60))),
    ]
    env, limit = {**os.environ, **keys}, scaled(120)
    done = subprocess.run(command, env=env, cwd=REPOSITORY, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout)
    results = json.loads((tmp_path / "data" / "rollouts" / outcome["session"] / "stdout").read_bytes())
    assert results["secrets"]["found"] == [] and results["secrets"]["looked at"] > 10
    for text in keys.values():
        assert text not in done.stdout + done.stderr
        assert not any(text.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.fixture(autouse=True)
def _nothing_left_running() -> Iterator[None]:
    yield
    assert kit.processes(NAP) == []
