"""What the search for secrets is written with: secrets that are known again in any spelling, what was seen of a run, and who looked.

    planted = Planted()
    key = planted.new("the provider's key")
    evidence.add("an answer", body)
    assert planted.found(evidence) == []

Every secret is random and new for each run, so that whatever finds one has found a leak, and nothing else on the machine can have it.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import re
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, quote_plus

import msgspec
from pyarrow import parquet  # type: ignore[import-untyped]

from tests.cli.kit import ROOT
from tests.rollout.kit import PRELUDE
from tests.speed import scaled

Json = Any
TURNGATE = (sys.executable, "-m", "turngate")
PROCESSES = "the process list"
PROVIDER_KEY = "PLANTED_PROVIDER_KEY"  # the variable that holds it
_LARGEST = 64 * 2**20


class Found(msgspec.Struct, frozen=True):
    where: str
    secret: str  # its name
    form: str

    def __repr__(self) -> str:
        return f"{self.secret} as {self.form} in {self.where}"


class Planted:
    """The secrets of a run, by name, and the search for them."""

    def __init__(self) -> None:
        self._named: dict[str, str] = {}

    def new(self, name: str, spelled: str = "{}") -> str:
        """One more, of signs that every encoding but the plain one writes differently. `spelled`: what stands around it."""
        value = spelled.format(f"{secrets.token_hex(9)}+/{secrets.token_hex(9)}~=")
        return self.known(name, value)

    def known(self, name: str, value: str) -> str:
        """One that somebody else made."""
        assert len(value) >= 16, f"{name} is too short to be looked for"
        self._named[name] = value
        return value

    def __getitem__(self, name: str) -> str:
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def found(self, evidence: Evidence, *, but: tuple[str, ...] = ()) -> list[Found]:
        """Every secret that is in what was seen. `but`: names that may be there."""
        by_text = {
            form: (name, kind)
            for name, value in self._named.items()
            if name not in but
            for kind, form in forms(value).items()
        }
        either = re.compile(b"|".join(re.escape(form) for form in by_text))
        return sorted(
            {Found(where, *by_text[hit]) for where, data in evidence.items() for hit in either.findall(data)},
            key=repr,
        )


# What a secret of a session looks like, and an admin key that was made: nobody who looks for these need know them.
OURS = re.compile(rb"(?<![\w-])(?:tg-[0-9a-f]{4}|tga-)[\w-]{43}(?![\w-])")


def given_out(evidence: Evidence) -> list[str]:
    """Where one is. The process list is left out: it is that of the machine, on which others may run gateways of theirs."""
    return sorted({where for where, data in evidence.items() if where != PROCESSES and OURS.search(data)})


def forms(value: str) -> dict[str, bytes]:
    """How a secret may be spelled. Base64 of a text that it is part of depends on where in it it stands: three ways."""
    raw = value.encode()
    spelled = {
        "itself": raw,
        "itself, in JSON": json.dumps(value)[1:-1].replace("/", "\\/").encode(),
        "hex": raw.hex().encode(),
        "HEX": raw.hex().upper().encode(),
        "URL-quoted": quote(value, safe="").encode(),
        "quoted like a form": quote_plus(value).encode(),
        "its first half": raw[: len(raw) // 2],  # cut off somewhere
        "its second half": raw[len(raw) // 2 :],
    }
    for before in range(3):
        whole = base64.b64encode(b"\0" * before + raw)
        start = -(-before * 8 // 6)  # signs that what stands before has a part in
        end = (before + len(raw)) * 8 // 6
        inner = whole[start:end]
        spelled[f"base64 at {before}"] = inner
        spelled[f"URL-safe base64 at {before}"] = inner.translate(bytes.maketrans(b"+/", b"-_"))
    return {kind: form for kind, form in spelled.items() if len(form) >= 12}


class Evidence:
    """What was seen of a run: bytes, by where they were."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, bytes]] = []

    def add(self, where: str, data: bytes | str | Json) -> None:
        if isinstance(data, str):
            data = data.encode("utf-8", "surrogatepass")
        self._seen.append((where, data if isinstance(data, bytes) else json.dumps(data, ensure_ascii=False).encode()))

    def add_answer(self, reply: Any) -> None:
        """Of HTTP, with its headers."""
        head = "\n".join(f"{name}: {value}" for name, value in reply.headers.items())
        self.add(
            f"the answer to {reply.request.method} {reply.request.url.path}", f"{head}\n\n".encode() + reply.content
        )

    def add_folder(self, folder: Path, *, but: tuple[str, ...] = ()) -> None:
        """Every file below it, with its name. What is packed is unpacked. `but`: files that must hold a secret, below the folder;
        nobody else may read them."""
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            self.add(f"the name of {path}", name)
            if path.is_symlink() or not path.is_file():
                continue
            if name in but:
                assert stat.S_IMODE(path.stat().st_mode) == 0o600, f"{path} can be read by others"
                continue
            self.add(str(path), _read(path))

    def items(self) -> Iterator[tuple[str, bytes]]:
        yield from list(self._seen)

    def text(self, where: str) -> str:
        """Everything that was seen at places that begin like this."""
        return "\n".join(data.decode("utf-8", "replace") for place, data in self._seen if place.startswith(where))

    @property
    def places(self) -> list[str]:
        return [where for where, _ in self._seen]


def _read(path: Path) -> bytes:
    data = path.read_bytes()[:_LARGEST]
    if data.startswith(b"\x1f\x8b"):
        return gzip.decompress(data)
    if data.startswith(b"PAR1"):
        return json.dumps(parquet.read_table(io.BytesIO(data)).to_pylist(), default=str).encode()
    return data


class Processes(threading.Thread):
    """Looks at the command lines of all processes of the machine, again and again, until it is told to stop."""

    def __init__(self, every_s: float = 0.015) -> None:
        super().__init__(name="processes", daemon=True)
        self._every_s = every_s
        self._over = threading.Event()
        self._seen: set[bytes] = set()
        self.looks = 0

    def run(self) -> None:
        while not self._over.wait(self._every_s):
            self._look()

    def _look(self) -> None:
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/cmdline", "rb", buffering=0) as file:
                        self._seen.add(file.read(_LARGEST))
                except OSError:  # it has ended
                    pass
        self.looks += 1

    def lines(self) -> list[bytes]:
        """Every one that was seen so far."""
        return sorted(self._seen)

    @contextmanager
    def watching(self) -> Iterator[Processes]:
        self.start()
        try:
            yield self
        finally:
            self._over.set()
            self.join()


class Asked(msgspec.Struct, frozen=True):
    path: str
    headers: dict[str, str]
    body: bytes


class Provider:
    """A stand-in for a hosted model that wants a key, and says too much when something goes wrong: errors repeat the request's
    headers, in the body and in its own. What it does is what it is asked for: a message with FAIL-500 in it, say."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[Asked] = []

    @property
    def keys(self) -> set[str]:
        """That it was sent, wherever a provider looks for one."""
        names = ("authorization", "x-api-key", "x-goog-api-key")
        return {value for asked in self.asked for name, value in asked.headers.items() if name in names}

    @contextmanager
    def running(self) -> Iterator[Self]:
        provider = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                provider.note(self, b"")
                self._send(200, json.dumps({"data": [{"id": "gpt-x", "object": "model"}]}).encode())

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                provider.note(self, body)
                if fails := re.search(rb"FAIL-(\d+)", body):
                    said = f"it went wrong; the request was {self.path} with {dict(self.headers)}"
                    self._send(int(fails[1]), json.dumps({"error": {"message": said, "type": "server_error"}}).encode())
                elif b'"stream":true' in body.replace(b" ", b""):
                    self._stream(b"FAIL-STREAM" in body)
                else:
                    self._send(200, json.dumps(_completion()).encode())

            def _stream(self, fails: bool) -> None:
                first = {"id": "c", "object": "chat.completion.chunk", "model": "gpt-x", "created": 1}
                events: list[Json] = [
                    {**first, "choices": [{"index": 0, "delta": {"role": "assistant", "content": "Fine."}}]}
                ]
                if fails:
                    events.append({"error": {"message": f"it broke; {dict(self.headers)}", "code": 500}})
                else:
                    events.append({**first, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
                lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]
                self._send(200, "".join(lines).encode(), "text/event-stream")

            def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                if status != 200:
                    self.send_header("x-request-id", self.headers.get("authorization", ""))
                    self.send_header("x-echo", str(dict(self.headers)).replace("\n", " "))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()

    def note(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        self.asked.append(Asked(request.path, {k.lower(): v for k, v in request.headers.items()}, body))


class Receiver(Provider):
    """Takes spans: whatever is sent to it is kept, unpacked."""

    def spans(self) -> bytes:
        bodies = (asked.body for asked in self.asked if asked.path == "/v1/traces")
        return b"\n".join(gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body for body in bodies)


def _completion() -> Json:
    message = {"role": "assistant", "content": "Fine."}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "gpt-x", "choices": [choice], "usage": usage}


# ── an agent that looks around ──────────────────────────────────────────────────────────────────────────────────────

# After `tests.rollout.kit.PRELUDE`. It prints and writes down all that it can read and reach. Its key it prints backwards too, so that
# whoever looks for it afterwards knows it. `WALLS` says whether it may look at all of the machine: in a sandbox that is no wall, it
# would find everything, as is written there.
AGENT = r"""
import pathlib, socket, subprocess
said = []
def note(what, data):
    said.append(f"== {what}\n{data}")
note("env", dict(os.environ))
places = ["/proc/self/environ", "/proc/self/cmdline", "/proc/1/environ"] if not WALLS else []
roots = [os.environ["HOME"], os.getcwd()]
if WALLS:
    places += [f"/proc/{p}/{f}" for p in os.listdir("/proc") if p.isdigit() for f in ("environ", "cmdline")]
    places += ["/proc/mounts", "/proc/self/mountinfo", "/proc/keys"]
    roots = [f"/{name}" for name in os.listdir("/") if name not in ("proc", "sys", "dev", "usr", "lib", "lib64", "bin", "sbin")]
for root in roots:
    for folder, _, names in os.walk(root):
        if folder.startswith(("/etc/ssl", "/etc/alternatives", "/etc/pki")):
            continue
        note("folder", folder)
        places += [os.path.join(folder, name) for name in names]
for place in places:
    try:
        if os.path.isfile(place) or place.startswith("/proc"):
            note(place, open(place, "rb").read(300_000).decode("utf-8", "replace"))
    except OSError as error:
        note(place, error)
for path in ("/admin/sessions", "/admin/events?wait=0", "/metrics", "/page/", "/page/api/rollouts", "/v1/models", "/health", "/admin/gate"):
    note(path, http("GET", path))
for port in PORTS:
    try:
        socket.create_connection(("127.0.0.1", port), 2).close()
        note(f"port {port}", "is open")
    except OSError as error:
        note(f"port {port}", error)
whole = "\n".join(said).replace("\0", "\n")
pathlib.Path("seen.txt").write_text(whole.replace(KEY, "my key"), errors="replace")
pathlib.Path("own-key.txt").write_text("this is " + KEY)
print(whole)
print("BACKWARDS", KEY[::-1], flush=True)
print("the end, ", KEY, file=sys.stderr)
"""
ASKS = 'print(ask("Hi"))'


def looking(*, walls: bool, ports: tuple[int, ...] = (), then: str = "") -> str:
    """The program of an agent that looks around, and then asks its model or does something else."""
    return PRELUDE + f"WALLS, PORTS = {walls}, {ports}\n" + AGENT + (then or ASKS) + "\n"


# ── a run with planted secrets ──────────────────────────────────────────────────────────────────────────────────────


class House:
    """Everything of a run: its folder, what was planted, what was seen, and programs of ours that run in its environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.planted = Planted()
        self.evidence = Evidence()
        self._logs = 0
        (folder / "tmp").mkdir()
        (folder / "home").mkdir()
        new = self.planted.new
        self.env = {
            "HF_TOKEN": new("HF_TOKEN", "hf_{}"),
            "E2B_API_KEY": new("E2B_API_KEY", "e2b_{}"),
            "DATABASE": new("a variable of the host", "postgres://me:{}@db/x"),
            PROVIDER_KEY: new("the provider's key", "sk-{}"),
            # Nothing of the machine's own, and sandboxes below our folder, whose path is short: unix sockets lie there.
            "PATH": os.environ["PATH"],
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TERM": "dumb",
        }

    def ran(self, *words: str | Path, program: Sequence[str] = TURNGATE, input: str = "", **env: str) -> str:
        """A program of ours, to its end; what it printed is seen. Its exit code is its own business."""
        command = [*program, *map(str, words)]
        how = {"env": {**self.env, **env}, "cwd": self.folder, "timeout": scaled(120)}
        done = subprocess.run(command, input=input, capture_output=True, text=True, **how)
        self.evidence.add(f"stdout of {' '.join(map(str, words[:2]))}", done.stdout)
        self.evidence.add(f"stderr of {' '.join(map(str, words[:2]))}", done.stderr)
        return done.stdout + done.stderr

    @contextmanager
    def serving(self, *words: str | Path, program: Sequence[str] = TURNGATE, **env: str) -> Iterator[str]:
        """One that serves, until the block ends: its URL. What it printed is seen then."""
        self._logs += 1
        log = self.folder / f"log-{self._logs}"
        command = [*program, *map(str, words)]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, env={**self.env, **env}, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.folder
            )
        try:
            yield _place(process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(scaled(40))
            finally:
                process.kill()
            self.evidence.add(f"the log of {' '.join(map(str, words[:1]))} {self._logs}", log.read_bytes())

    def learn_keys(self, folder: Path) -> int:
        """Plant the secrets of the sessions whose agents printed theirs backwards; how many there were."""
        found = {
            hit[::-1].decode()
            for path in folder.rglob("stdout")
            for hit in re.findall(rb"BACKWARDS (\S+)", path.read_bytes())
        }
        for number, key in enumerate(sorted(found)):
            self.planted.known(f"session secret {folder.name} {number}", key)
        return len(found)

    def session_secrets(self) -> tuple[str, ...]:
        return tuple(name for name in self.planted if name.startswith("session secret"))


def _place(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where it listens, when it says so."""
    end = time.monotonic() + scaled(60)
    while process.poll() is None and time.monotonic() < end:
        if found := re.search(r"(http://127\.0\.0\.1:\d+)", log.read_text()):
            return found[1]
        time.sleep(0.02)
    raise AssertionError(f"it does not serve: {log.read_text()[-3000:]}")


@contextmanager
def house() -> Iterator[House]:
    folder = Path(tempfile.mkdtemp(prefix="tg-"))
    try:
        yield House(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
