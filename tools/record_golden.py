#!/usr/bin/env python3
"""Record the requests of each real agent, and the replies that it gets, in `tests/golden/`.

    python tools/record_golden.py                    all agents
    python tools/record_golden.py pi codex           some agents
    python tools/record_golden.py --check            print how the requests have changed since the recordings, and write nothing
    python tools/record_golden.py --check ./pi.toml  the same for your own description of an agent: another version or other settings

Each agent does the task of `turngate agents check` in the local sandbox, with the scripted engine. In the `-subagent` recordings, it
delegates part of the task to a sub-agent. Requests and replies are recorded where they enter and leave the gateway. If a check of the
agent fails, nothing is recorded. Missing agents are installed.

Values that differ from run to run are replaced with placeholders, and equal values with the same placeholder, so that a second recording
equals the first (see `Steady`). Headers that the sandbox's relay adds or changes are left out. Prose is not kept, because an agent's
prompts and tool descriptions are the work of others: only its length and a digest are recorded (`Elided`). Recordings may still differ:

- opencode requests a title at the same time as its first call, so their order may vary. So far, the title has always come first.
- On a machine that stalls for seconds, a reply may contain a keep-alive (a ping or an empty chunk).
- On other systems, only those facts about the machine are replaced that have been seen in requests.

`tests/golden/recording.py` describes the format of the files.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.golden import recording
from tools.agent_names import AGENTS, MORE_AGENTS
from turngate.agents.install import ensure_installed
from turngate.agents.installation import Installation
from turngate.agents.spec import AgentSpec, CheckCall, CheckStep, find_agent
from turngate.errors import TurngateError
from turngate.rollout.agent_check import INSTRUCTION, CheckOptions, check_agent
from turngate.rollout.playbook import Scene, fill_steps, format_step
from turngate.sandboxes.local import LocalBackend
from turngate.server.asgi import App, Receive, Scope, Send

Json = Any
Scenes = Callable[[str], tuple[Scene, ...]]


class NotRecorded(Exception):
    """The agent did not behave as expected. The message says how."""


# ── the script ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _helped(delegate: CheckCall, look: CheckCall) -> Scenes:
    """Build a script in which the agent delegates part of the task to a sub-agent, which makes one call and reports."""
    main = (
        CheckStep(think="A helper can count.", say="I will have it counted.", calls=(delegate,)),
        CheckStep(say="Three lines. I leave the file alone."),
    )
    helper = (CheckStep(think="I count.", calls=(look,)), CheckStep(say="The file has 3 lines."))
    return lambda workdir: (Scene(INSTRUCTION[:40], main), Scene(_ERRAND, helper))


_ERRAND = "Count the lines of notes.txt"
VARIANTS: dict[str, tuple[str, Scenes]] = {
    "claude-code-subagent": (
        "claude-code",
        _helped(
            CheckCall(
                tool="Agent",
                arguments={"description": "Count lines", "prompt": _ERRAND, "subagent_type": "general-purpose"},
            ),
            CheckCall(tool="Bash", arguments={"command": "wc -l notes.txt", "description": "Count lines"}),
        ),
    ),
    "opencode-subagent": (
        "opencode",
        _helped(
            CheckCall(
                tool="task", arguments={"description": "Count lines", "prompt": _ERRAND, "subagent_type": "general"}
            ),
            CheckCall(tool="bash", arguments={"command": "wc -l notes.txt", "description": "Count lines"}),
        ),
    ),
}


# ── recorded calls ──────────────────────────────────────────────────────────────────────────────────────────────────


class Heard(msgspec.Struct):
    """One call as the gateway received it, and its reply."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes = b""
    status: int = 0
    reply_headers: list[tuple[str, str]] = []
    reply: bytes = b""


def listening(heard: list[Heard]) -> Callable[[App], App]:
    """Return a wrapper for the gateway's app that adds every call of an agent to `heard`."""

    def around(app: App) -> App:
        async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"].startswith(("/admin/", "/health")):
                await app(scope, receive, send)
                return
            query = scope["query_string"].decode("latin-1")
            call = Heard(scope["method"], scope["path"] + ("?" + query if query else ""), _texts(scope["headers"]))
            heard.append(call)

            async def receiving() -> Any:
                message = await receive()
                call.body += message.get("body", b"")
                return message

            async def sending(message: Any) -> None:
                if message["type"] == "http.response.start":
                    call.status, call.reply_headers = message["status"], _texts(message["headers"])
                call.reply += message.get("body", b"")
                await send(message)

            await app(scope, receiving, sending)

        return wrapped

    return around


def _texts(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in headers]


# ── comparable recordings ───────────────────────────────────────────────────────────────────────────────────────────

_RELAYS = ("host", "content-length", "connection", "transfer-encoding", "x-turngate-attempt")
_RELAYS_KEY = re.compile(r"[0-9a-f]{32}")  # an Idempotency-Key that the relay added, because the agent sent none
_KEY = re.compile(r"tg-[0-9A-Za-z_-]{43,}")
_ARCH = re.compile(r"\b(x64|x86_64|arm64|aarch64)\b")
_TIMES = ("created", "created_at", "completed_at")
_UNORDERED = ("client_metadata", "provider_specific_fields")  # codex and mini-swe-agent send these in a random order
_COUNTS = ("usage", "usageMetadata")  # token counts vary, because the prompt contains the sandbox's path


class Steady:
    """Makes recordings comparable, by replacing equal values with equal placeholders and by sorting.

    Replaced: secrets; UUIDs, call ids and other generated ids; the folders of the sandbox, the installation and Node; ports; today's
    date; the system's name, kernel, processor and time zone; the versions of the machine's Node and Python; process ids, durations and
    time stamps in the output of tools; times and token counts in replies. Sorted: the fields of objects with a random order
    (`_UNORDERED`), and the results of parallel calls, which claude-code sends in the order in which they ended.
    """

    def __init__(self, facts: Sequence[tuple[re.Pattern[str], str]], elided: Elided | None = None) -> None:
        self._elided = elided
        self._facts = [
            *facts,
            (_KEY, "REDACTED"),
            (re.compile(r"(127\.0\.0\.1|localhost):\d{2,5}\b"), r"\1:0"),
            (re.compile(r"(_unix_ms\"?: ?)\d+"), r"\g<1>0"),
            (re.compile(r"(PGID: |[Pp]id: |Chunk ID: )[0-9a-f]+"), r"\g<1>0"),
            (re.compile(r"(Wall time: |duration_ms: ?|subagent_tokens: ?)[\d.]+"), r"\g<1>0"),
            (re.compile(r"(<timezone>)[^<]*"), r"\g<1>Etc/UTC"),
            (re.compile(r"(codex_exec/\S+ )\([^)]*\)"), r"\1(<system>; <arch>)"),
        ]
        self._known: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def exchange(self, call: Heard) -> Json:
        body = self.json(_settled(recording.value(call.body)))
        request = {
            "method": call.method,
            "path": self.text(call.path),
            "headers": {n: self._header(v) for n, v in _agents(call.headers)},
            "body": body,
        }
        headers = {n: self._header(v) for n, v in call.reply_headers if n != "content-length"}
        said = self.json(recording.decode_payload(headers["content-type"], call.reply))
        return {"request": request, "reply": {"status": call.status, "headers": headers, **said}}

    def json(self, value: Json, name: str = "") -> Json:
        match value:
            case str():
                return self.text(value) if self._elided is None else self._elided.text(self.text(value))
            case dict():
                inside = name if name in _COUNTS else ""
                return {key: self.json(item, inside or key) for key, item in value.items()}
            case list():
                return [self.json(item, name) for item in value]
            case int() if not isinstance(value, bool) and name in (*_TIMES, *_COUNTS):
                return 0
            case _:
                return value

    def text(self, value: str) -> str:
        for pattern, stand_in in self._facts:
            value = pattern.sub(stand_in, value)
        value = recording.IDS.sub(self._numbered, value)
        return _OWN_IDS.sub(self._numbered, value)

    def _header(self, value: str) -> str:
        return _ARCH.sub("<arch>", self.text(value))

    def _numbered(self, found: re.Match[str]) -> str:
        """Return a placeholder that looks like the id. Its digits number the ids in the order of their first occurrence."""
        own = found[0]
        if own not in self._known:
            prefix = own[: own.index("_") + 1] if "_" in own else "a" if len(own) == 17 else ""
            kind = f"{prefix}{len(own)}"
            self._counts[kind] = count = self._counts.get(kind, 0) + 1
            digits = f"{count:0{len(own) - len(prefix)}d}"
            uuid = f"00000000-0000-4000-8000-{count:012d}"
            self._known[own] = uuid if "-" in own else prefix + digits
        return self._known[own]


class Elided:
    """Removes text that others wrote. A line of prose becomes ⟨its length, a digest⟩. The text of our own script is kept."""

    _SHORT = 24  # characters; a line up to this length is a name or a heading

    def __init__(self, ours: Iterable[str]) -> None:
        self._ours = "\n\n".join(ours)

    def text(self, value: str) -> str:
        return "\n".join(self._line(line) for line in value.split("\n"))

    def _line(self, line: str) -> str:
        if len(line) <= self._SHORT or " " not in line.strip() or line.strip() in self._ours or self._is_ours(line):
            return line
        return f"⟨{len(line)} characters, {blake2b(line.encode(), digest_size=4).hexdigest()}⟩"

    def _is_ours(self, line: str) -> bool:
        """Return whether a line is a JSON object with arguments of our calls, which agents encode in their own way."""
        try:
            value = msgspec.json.decode(line)
        except msgspec.DecodeError:
            return False
        return isinstance(value, dict) and all(self.text(leaf) == leaf for leaf in _leaves(value))


def _leaves(value: Json) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for item in value.values():
                yield from _leaves(item)
        case list():
            for item in value:
                yield from _leaves(item)


def _script(agent: AgentSpec, scenes: Scenes | None, workdir: str) -> Iterator[str]:
    """Yield all texts that the agent gets from us: its task, and the model's answers."""
    yield INSTRUCTION
    yield _ERRAND
    steps = (
        fill_steps(agent.check, {"workdir": workdir})
        if scenes is None
        else [s for x in scenes(workdir) for s in x.steps]
    )
    for step in steps:
        yield from (step.say, step.think, format_step(step))
        for call in step.calls:
            yield from _leaves(call.arguments)


# opencode's ids consist of the time and random letters and digits. Claude Code's ids of sub-agents are short.
_OWN_IDS = re.compile(r"(?<![0-9A-Za-z])(?:(?:ses|msg|prt)_[0-9a-f]{12}[0-9A-Za-z]{14}|a[0-9a-f]{16})(?![0-9A-Za-z])")


def facts(installed: Installation, root: Path, days: Iterable[datetime]) -> Iterator[tuple[re.Pattern[str], str]]:
    """Yield patterns for the values that are specific to this machine or this day, with their placeholders."""

    def exactly(text: str, stand_in: str) -> tuple[re.Pattern[str], str]:
        return re.compile(rf"(?<![0-9A-Za-z.]){re.escape(text)}(?![0-9A-Za-z])"), stand_in

    yield re.compile(re.escape(str(root)) + r"/local-[0-9a-f]{12}"), "/sandbox"
    moved, _ = installed.relocate("/opt/turngate")
    yield exactly(installed.folder, moved.folder)
    if installed.node:
        yield exactly(str(Path(installed.node).parent), str(Path(moved.node).parent))
        yield exactly(_printed(installed.node, "--version"), "v<node>")
    if installed.python:
        yield exactly(
            _printed(installed.use_host_python().python, "-c", "import platform; print(platform.python_version())"),
            "<python>",
        )
    system = os.uname()
    yield exactly(f"{system.release} {system.version} {system.machine}", "<kernel> <arch>")
    yield exactly(system.release, "<kernel>")
    for day in days:
        for form in ("%Y-%m-%d", "%A, %B %-d, %Y", "%a %b %d %Y", "%-m/%-d/%Y", "%m/%d/%Y"):
            yield exactly(day.strftime(form), datetime(2000, 1, 1).strftime(form))


def _printed(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _agents(headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the headers that the agent itself sent."""
    return [
        (name, value)
        for name, value in headers
        if name not in _RELAYS and not (name == "idempotency-key" and _RELAYS_KEY.fullmatch(value))
    ]


def _settled(body: Json) -> Json:
    """Return the body with its unordered parts sorted."""
    if isinstance(body, dict):
        for asked, answered in pairwise(body.get("messages") or ()):
            _in_order_of_calls(asked.get("content"), answered.get("content"))
    return _sorted(body)


def _sorted(value: Json, name: str = "") -> Json:
    match value:
        case dict():
            fields = sorted(value.items()) if name in _UNORDERED else value.items()
            return {key: _sorted(item, key) for key, item in fields}
        case list():
            return [_sorted(item, name) for item in value]
        case _:
            return value


def _in_order_of_calls(asked: Json, answered: Json) -> None:
    """Sort the tool results of the messages dialect in the order of their calls. Cache marks keep their positions."""
    if not isinstance(asked, list) or not isinstance(answered, list):
        return
    calls = [part["id"] for part in asked if part["type"] == "tool_use"]
    places = [n for n, part in enumerate(answered) if part["type"] == "tool_result" and part["tool_use_id"] in calls]
    marks = [answered[n].pop("cache_control", None) for n in places]
    results = sorted((answered[n] for n in places), key=lambda part: calls.index(part["tool_use_id"]))
    for n, result, mark in zip(places, results, marks, strict=True):
        answered[n] = result if mark is None else {**result, "cache_control": mark}


# ── one recording ───────────────────────────────────────────────────────────────────────────────────────────────────


async def record(name: str, agent: AgentSpec, scenes: Scenes | None) -> Json:
    installed = ensure_installed(agent, lambda line: print(line, file=sys.stderr))
    heard: list[Heard] = []
    began = datetime.now(UTC)
    with tempfile.TemporaryDirectory(prefix="tg-") as folder:  # a short path, because unix sockets require one
        root = Path(folder) / "s"
        root.mkdir(mode=0o700)
        staging = CheckOptions(scenes=scenes, around=listening(heard))
        report = await check_agent(agent, installed, LocalBackend(root), Path(folder) / "run", staging)
    if not report.passed:
        raise NotRecorded("; ".join(f"failed: {f.name} ({f.detail})" for f in report.results if not f.ok))
    days = {now.astimezone(zone) for now in (began, datetime.now(UTC)) for zone in (UTC, None)}
    steady = Steady(list(facts(installed, root, days)), Elided(_script(agent, scenes, "/sandbox/work")))
    # A call without headers of the agent comes from the relay, which checks that it can reach the gateway.
    exchanges = [steady.exchange(call) for call in heard if _agents(call.headers)]
    made = {
        "name": name,
        "agent": agent.name,
        "version": agent.install.version,
        "dialect": agent.dialect,
        "exchanges": exchanges,
    }
    _without_secrets(recording.text(made), heard)
    return made


def _without_secrets(text: str, heard: list[Heard]) -> None:
    keys = {key for call in heard for _, value in call.headers for key in _KEY.findall(value)}
    assert keys, "no call of the agent has a key"
    if any(key in text or key[3:] in text for key in keys) or re.search(r"tg-[0-9A-Za-z_-]{20}", text):
        raise NotRecorded("the recording would contain a session's key")


def main() -> int:
    parser = argparse.ArgumentParser(description="Record the requests and replies of agents, for tests/golden/.")
    known = [*sorted((*AGENTS, *MORE_AGENTS)), *VARIANTS]
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(known)}, or an agent's TOML file (default: all)"
    )
    parser.add_argument("--check", action="store_true", help="compare with the recordings, and write nothing")
    parser.add_argument("--to", type=Path, default=recording.FOLDER, metavar="DIR", help="folder for the recordings")
    given = parser.parse_args()
    outcomes = [_one(name, given.to, given.check) for name in given.names or known]
    return 0 if all(outcomes) else 1


def _one(name: str, folder: Path, compare: bool) -> bool:
    began = time.monotonic()
    try:
        agent, scenes = VARIANTS.get(name, (name, None))
        spec = find_agent(agent).spec
        name = name if name in VARIANTS else spec.name
        text = recording.text(asyncio.run(record(name, spec, scenes)))
    except (NotRecorded, TurngateError) as error:
        print(f"{name}: not recorded: {error}", file=sys.stderr)
        return False
    file = folder / f"{name}.json"
    told = f"{f'{name} {spec.install.version}'.strip()}, {len(text) / 1000:.0f} kB, {time.monotonic() - began:.0f} s"
    if not compare:
        file.write_text(text, encoding="utf-8")
        print(f"{told}: written to {file}", flush=True)
        return True
    before = file.read_text(encoding="utf-8") if file.is_file() else ""
    if before == text:
        print(f"{told}: unchanged", flush=True)
        return True
    print(f"{told}: changed" if before else f"{told}: not recorded before", flush=True)
    print("\n".join(_changes(before, text)), flush=True)
    return False


def _changes(before: str, now: str) -> Iterator[str]:
    """Yield the differences as a unified diff, with the exchange of each hunk. Very long lines are cut."""
    lines = now.splitlines()
    for line in difflib.unified_diff(before.splitlines(), lines, "recorded", "now", lineterm=""):
        if place := re.match(r"@@ .*\+(\d+).* @@", line):
            line += " " + _place(lines[: int(place[1])])
        yield line if len(line) <= 300 else f"{line[:300]} … ({len(line) - 300} more)"


def _place(lines: list[str]) -> str:
    """Return the exchange in which these lines end, and whether they end in its request or in its reply."""
    sides = [line.strip(' ":{') for line in lines if line in ('   "request": {', '   "reply": {')]
    return f"exchange {sides.count('request') - 1}, {sides[-1]}" if sides else ""


if __name__ == "__main__":
    sys.exit(main())
