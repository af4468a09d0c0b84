"""An agent that wants out: to the admin API, to other sessions, to the host's files, processes and secrets, to the network.

`escape.py` is that agent. It runs in a real rollout in each sandbox, tries everything it knows, and tells what came of it; the
tests judge that. For `local`, which is no wall, they say what is open there, so that nobody believes otherwise.
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
from tests.sandboxes import kit
from tests.speed import scaled
from turngate.client.gateway import GatewayClient
from turngate.client.protocol import DecodedTrace, OpenedSession, TraceTurn
from turngate.rollout.outcome import Outcome
from turngate.sandboxes.base import SandboxSpec
from turngate.tasks.task import Task

pytestmark = [pytest.mark.process, pytest.mark.full]

BACKENDS = kit.backends()
PROGRAM = Path(__file__).with_name("escape.py")
REPOSITORY = Path(__file__).parents[2]
OWN, OTHER = "the-agents-own-session", "somebody-elses-session"
NAP = f"64{os.getpid():07d}"  # seconds that nobody else on this machine sleeps: by them a process is known again
WORDS = "A secret conversation of somebody else."


class Attempt(msgspec.Struct, frozen=True):
    """What the agent told, and what was true meanwhile."""

    backend: str
    told: dict[str, Any]
    outcome: Outcome
    trace: DecodedTrace  # of its session
    other: Any  # of the other session, afterwards
    sessions: list[str]  # all there are, afterwards
    paused: bool
    admin_key: str
    knocks: int  # that were heard at a port of the host
    argv: list[str]  # command lines of the host in which a secret was seen
    written: list[str]  # files of the host that were made from inside


@cache
def _attempt(backend: str) -> Attempt:
    """Once for all tests."""
    kit.need(backend)
    return asyncio.run(_attempted(backend))


@pytest.fixture(params=BACKENDS)
def attempt(request: pytest.FixtureRequest) -> Attempt:
    return _attempt(request.param)


@pytest.fixture
def walled(closed: str) -> Attempt:
    """The same, where there are walls."""
    return _attempt(closed)


@pytest.fixture(params=kit.backends(*kit.ISOLATED))
def closed(request: pytest.FixtureRequest) -> str:
    kit.need(request.param)
    return str(request.param)


class Named(GatewayClient):
    """Opens its session under a name that an agent can guess, and remembers the secret, to look for it."""

    key = ""

    async def open(self, config: Any, session: str | None = None, traceparent: str = "") -> OpenedSession:
        opened = await super().open(config, OWN)
        self.key = opened.key
        return opened


async def _attempted(backend: str) -> Attempt:
    """One rollout of the agent that wants out, beside another session and another sandbox."""
    async with open_harness(lambda request, n: say("Nothing to see here.")) as harness, AsyncExitStack() as stack:
        gateway = harness.gateway
        other = await gateway.open(id=OTHER)
        await gateway.ask(other.key, WORDS)
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
        door = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0turngate-{outside.name}")
        abstract.listen()
        client = await stack.enter_async_context(Named(gateway.root, gateway.app.admin_key))
        assert neighbour.shared is not None
        guesses = _guesses(harness, other.key, bystander.pid, neighbour.shared[0].parent, outside, door, backend)
        argv: list[str] = []
        watching = asyncio.create_task(_watch_argv(client, gateway.app.admin_key, argv))
        files = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (files / "escape.py").write_bytes(PROGRAM.read_bytes())
        said = base64.b64encode(json.dumps(guesses).encode()).decode()
        task = Task(id="escape", instruction="Get out.", files=files)
        outcome = await harness.run(
            task=task, backend=backend, client=client, command=f"exec python3 escape.py {said}", timeout_s=scaled(240)
        )
        watching.cancel()
        assert outcome.status == "finished", (outcome, outcome.collected.stderr)
        door.settimeout(0)
        return Attempt(
            backend=backend,
            told=json.loads((harness.folder / outcome.session / "stdout").read_bytes()),
            outcome=outcome,
            trace=await gateway.trace(outcome.session),
            other={**await gateway.show(OTHER), "turns": await gateway.turns(OTHER)},
            sessions=[row["id"] for row in (await gateway._ask("GET", "/admin/sessions"))["sessions"]],
            paused=(await gateway._ask("GET", "/admin/fence"))["paused"],
            admin_key=gateway.app.admin_key,
            knocks=_knocks(door),
            argv=argv,
            written=[path.name for path in outside.iterdir()],
        )


def _guesses(
    harness: Harness, other_key: str, bystander: int, neighbour: Path, outside: Path, door: socket.socket, backend: str
) -> dict[str, Any]:
    data = harness.gateway.database.parent
    ours = f"/proc/{os.getpid()}"
    port = int(harness.gateway.root.rpartition(":")[2])
    secret = {
        "the admin key": harness.gateway.app.admin_key,
        "another session's key": other_key,
        "another session's words": WORDS,
        "the neighbour's variable": "the neighbour's variable",
        "the neighbour's file": "the neighbour's file",
        "the neighbour's process": "the neighbour's process",
        "the bystander's variable": "the bystander's variable",
    }
    return {
        "attempts": ["doors", "keyless", "tokens", "files", "secrets", "network"],
        **_patience(),
        "session": OWN,
        "other": OTHER,
        "other_digest": hashlib.sha256(other_key.encode()).hexdigest(),
        "port": port,
        "files": [
            *(str(data), f"{data}/admin-key", f"{data}/turngate.db", str(harness.folder), str(harness.root)),
            *(str(neighbour), f"{neighbour}/home/private", f"{neighbour}/shared/gateway.sock", str(outside)),
            *(str(REPOSITORY), str(Path(__file__)), str(Path.home()), f"{Path.home()}/.ssh", "/root", "/work"),
            *("/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock", "/var/lib/docker"),
            *(f"{ours}/environ", f"{ours}/cwd", f"{ours}/root/etc/passwd", f"{ours}/mem", f"{ours}/fd"),
            *(f"/proc/{bystander}/environ", f"/proc/{bystander}/cmdline", "/proc/1/root/etc/shadow", "/proc/1/environ"),
            *("/etc/shadow", "/dev/mem", "/dev/kmsg", "/proc/kcore", "/sys/kernel/debug", "/proc/sysrq-trigger"),
        ],
        "writes": [
            *(f"{outside}/from-inside", f"{data}/from-inside", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger"),
            *("/etc/ld.so.preload", "/etc/cron.d/evil", "/usr/bin/evil", "/run/turngate/evil"),
        ]
        if backend != "local"  # there it would
        else [f"{outside}/from-inside"],
        "secrets": {name: base64.b64encode(text.encode()[::-1]).decode() for name, text in secret.items()},
        # What a plain process of the same user can look at is no secret from it.
        "look_at_processes": backend != "local",
        "look_in": ["/tmp", "/run", "/etc", "/opt", "/var", "/home", "/dev/shm"] if backend != "local" else [],
        "abstract": f"turngate-{outside.name}",
        "addresses": [
            *(("127.0.0.1", port), ("127.0.0.1", door.getsockname()[1]), ("172.17.0.1", door.getsockname()[1])),
            *(("1.1.1.1", 53), ("1.1.1.1", 443), ("169.254.169.254", 80), ("::1", port), ("2606:4700:4700::1111", 443)),
            *((address, door.getsockname()[1]) for address in _addresses()),
        ],
    }


def _patience() -> dict[str, float]:
    return {"wait_s": scaled(10), "quiet_s": scaled(0.5)}


def _addresses() -> list[str]:
    """Of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return [probe.getsockname()[0]]
        except OSError:
            return []


def _knocks(door: socket.socket) -> int:
    count = 0
    while True:
        try:
            door.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


async def _watch_argv(client: Named, admin_key: str, found: list[str]) -> None:
    """Every user of a machine can read every command line."""
    while True:
        for place in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = place.read_bytes()
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
def test_no_way_leads_to_the_admin_api(attempt: Attempt) -> None:
    doors = attempt.told["doors"]
    assert len(doors) > 300
    for what, answer in doors.items():
        first = answer.partition("\r\n\r\n")[0]
        assert attempt.admin_key not in answer, what
        assert "opened" not in answer and '"sessions"' not in answer and "engines" not in answer, (what, answer)
        assert WORDS not in answer, what
        if "behind a request" in what or "in the path" in what:
            continue  # what comes first there is allowed
        if "/v1/models?/" in what or "/v1/models/x#" in what:
            continue  # a model's name, or a question about models
        assert _status(answer) in (0, 400, 401, 404, 405, 501), (what, first)


def test_the_path_after_a_good_one_is_judged_by_itself(attempt: Attempt) -> None:
    for way in ("relay", "door"):
        answer = attempt.told["doors"][f"{way} behind a request"]
        statuses = re.findall(r"HTTP/1\.1 (\d{3})", answer)
        assert statuses == ["200", "404"], answer


def test_nothing_was_changed_behind_the_door(attempt: Attempt) -> None:
    assert sorted(attempt.sessions) == sorted([OWN, OTHER])
    assert attempt.other["status"] == "open"
    assert len(attempt.other["turns"]) == 1  # nobody called in its name
    assert not attempt.paused


def test_no_model_call_is_answered_without_the_right_key(attempt: Attempt) -> None:
    for what, answer in attempt.told["keyless"].items():
        refused = 400 if "/v1beta/" in what else 401  # as Google has it
        assert _status(answer) == refused and "key" in answer, (what, answer)
        assert "Nothing to see" not in answer


def test_the_refusals_do_not_tell_a_session_that_exists_from_one_that_does_not(attempt: Attempt) -> None:
    told = {what: answer.partition("\r\n\r\n")[2] for what, answer in attempt.told["keyless"].items()}
    by_path: dict[str, set[str]] = {}
    for what, body in told.items():
        path, _, key = what.partition(" ")
        if key != "''":
            by_path.setdefault(path, set()).add(re.sub(r'"(request_id|id)":"[^"]*"', "", body))
    assert all(len(bodies) == 1 for bodies in by_path.values()), by_path


# ── token ids and log-probabilities ─────────────────────────────────────────────────────────────────────────────────


def test_no_dialect_tells_token_ids_or_log_probabilities(attempt: Attempt) -> None:
    turns = [node for node in attempt.trace.nodes if isinstance(node, TraceTurn)]
    secret = {f"{p:.4f}"[:7] for turn in turns if turn.logprobs is not None for p in turn.logprobs.tolist()}
    ids = {",".join(map(str, turn.ids[:3])) for turn in turns}
    answered = set()
    for what, answer in attempt.told["tokens"].items():
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


def test_files_and_processes_of_the_host_cannot_be_read(walled: Attempt) -> None:
    for path, what in walled.told["files"].items():
        if path == "/proc/1/environ" and walled.backend == "docker":
            continue  # process 1 is the container's own
        if not path.startswith("write "):
            assert what.startswith("no: ") or what in ("read 0", "listed "), (path, what)


def test_nothing_can_be_written_outside(walled: Attempt) -> None:
    for path, what in walled.told["files"].items():
        if path.startswith("write "):
            assert what.startswith("no: "), (path, what)
    assert walled.written == []


def test_the_secrets_of_others_are_nowhere(attempt: Attempt) -> None:
    """In the local sandbox: not in its variables and its own files."""
    secrets = attempt.told["secrets"]
    assert secrets["looked at"] > 20
    assert secrets["found"] == []


def test_no_key_is_in_a_command_line(attempt: Attempt) -> None:
    assert attempt.told["secrets"]["own key in"] == []
    assert attempt.argv == []


# ── the network ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.real
@pytest.mark.promise(7)
def test_the_network_is_closed(walled: Attempt) -> None:
    network = dict(walled.told["network"])
    assert network.pop("interfaces") == "lo"
    assert walled.knocks == 0
    for what, came in network.items():
        assert came.startswith("no: "), (what, came)


# ── what was allowed ────────────────────────────────────────────────────────────────────────────────────────────────


def test_all_of_it_is_in_the_agents_own_trace_and_nothing_else(attempt: Attempt) -> None:
    """It had its model calls: whatever else it tried, those were recorded."""
    assert attempt.outcome.turns == len([n for n in attempt.trace.nodes if isinstance(n, TraceTurn)])
    assert attempt.outcome.turns >= 6


# ── local is no wall ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_same_attempts_succeed_where_there_is_no_wall() -> None:
    """So that nobody takes an attempt that never could succeed for a wall."""
    told, knocks = _attempt("local").told, _attempt("local").knocks
    read = [path for path, what in told["files"].items() if re.match(r"read [1-9]|listed .", what)]
    assert any(path.endswith("/admin-key") for path in read) and any(path.endswith("/home/private") for path in read)
    assert any(path.endswith("/environ") for path in read)
    assert [came for what, came in told["network"].items() if what.startswith("tcp 127.0.0.1")] == ["reached"] * 2
    assert told["network"]["abstract socket"] == "reached"
    assert knocks >= 1
    assert _attempt("local").written == ["from-inside"]


async def test_what_the_local_sandbox_does_not_close() -> None:
    """So the documentation says: for trusted agents and tests. An agent there is its user, and can do what that user can."""
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
async def test_killing_the_relay_does_not_end_the_rollout(backend: str) -> None:
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


async def test_a_relay_of_the_agents_own_reaches_no_further(closed: str) -> None:
    """It may put another program in the relay's place, and name another target: both are inside, where it could do that anyway."""
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
        outcome = await harness.run(program, backend=closed)
        assert outcome.status == "finished", outcome.collected.stderr
        assert outcome.collected.stdout == "['1000', '0000000000000000']\n"  # as whom the agent runs, too


async def test_two_agents_at_once_cannot_use_each_others_door(closed: str) -> None:
    """Each has a door of its own in a folder of its own, and a key of its own."""
    async with open_harness(lambda request, n: say("Hello.")) as harness:
        program = 'print(ask("Hi"), os.listdir("/run/turngate"), sorted(os.listdir("/run")))\ntime.sleep(1)'
        first, second = (harness.rollout(program, backend=closed, folder=harness.folder / str(n)) for n in range(2))
        outcomes = await asyncio.gather(first.run(), second.run())
        for outcome in outcomes:
            assert outcome.status == "finished"
            assert outcome.collected.stdout.startswith("Hello. ['gateway.sock'] ")
            assert (outcome.turns, outcome.calls) == (1, 1)


# ── what it leaves behind ───────────────────────────────────────────────────────────────────────────────────────────


async def test_what_is_left_behind_leads_nowhere_on_the_host(closed: str, tmp_path: Path) -> None:
    """Links, pipes, odd names, a terminal's commands: they are copied as they are, or left out, and nothing is written elsewhere."""
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
        outcome = await harness.run(program, backend=closed)
        assert outcome.status == "finished", outcome
        kept = harness.folder / outcome.session
        assert sorted(os.fsencode(path.name) for path in (kept / "work").iterdir()) == sorted(
            [b"fine", b"inner", b"\xff\x1b[2J\n.txt"]
        )
        assert secret.read_text() == "secret of the host"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["secret"]
        for path in kept.rglob("*"):
            assert not path.is_file() or b"secret of the host" not in path.read_bytes()
        assert outcome.collected.stderr == ""


# ── the whole command ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_keys_of_turngate_run_are_not_to_be_had_from_inside(backend: str, tmp_path: Path) -> None:
    """The process has the admin key and the engine's in its environment; the agent that it runs must not."""
    kit.need(backend)
    keys = {"TURNGATE_ADMIN_KEY": "admin-" + os.urandom(16).hex(), "MY_ENGINE_KEY": "engine-" + os.urandom(16).hex()}
    guesses = {
        "attempts": ["secrets"],
        **_patience(),
        "session": "x",
        "other": "y",
        "other_digest": "z",
        "port": 1,
        "secrets": {name: base64.b64encode(text.encode()[::-1]).decode() for name, text in keys.items()},
        "look_at_processes": backend != "local",
        "look_in": ["/tmp", "/run", "/etc", "/opt", "/var", "/home"] if backend != "local" else [],
    }
    said = base64.b64encode(json.dumps(guesses).encode()).decode()
    (tmp_path / "task" / "files").mkdir(parents=True)
    (tmp_path / "task" / "instruction.md").write_text("Get out.")
    (tmp_path / "task" / "files" / "escape.py").write_bytes(PROGRAM.read_bytes())
    command = [
        *(sys.executable, "-m", "turngate", "run", "--agent", "shell", "--sandbox", backend, "--json"),
        *("--task", str(tmp_path / "task"), "--data", str(tmp_path / "data"), "--engine-key-env", "MY_ENGINE_KEY"),
        *("--set", f"command=exec python3 escape.py {shlex.quote(said)}", "--timeout", str(scaled(60))),
    ]
    env, limit = {**os.environ, **keys}, scaled(120)
    done = subprocess.run(command, env=env, cwd=REPOSITORY, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout)
    told = json.loads((tmp_path / "data" / "rollouts" / outcome["session"] / "stdout").read_bytes())
    assert told["secrets"]["found"] == [] and told["secrets"]["looked at"] > 10
    for text in keys.values():
        assert text not in done.stdout + done.stderr
        assert not any(text.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.fixture(autouse=True)
def _nothing_left_running() -> Iterator[None]:
    yield
    assert kit.processes(NAP) == []
