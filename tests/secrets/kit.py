"""Helpers for the search for secrets: planted secrets, evidence of a run, and a watcher of the process list.

    planted = Planted()
    key = planted.new("the provider's key")
    evidence.add("an answer", body)
    assert planted.find(evidence) == []

Every secret is random and new for each run, so every match is a leak.
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
_MAX_BYTES = 64 * 2**20


class Leak(msgspec.Struct, frozen=True):
    where: str
    secret: str  # the name of the secret
    form: str

    def __repr__(self) -> str:
        return f"{self.secret} as {self.form} in {self.where}"


class Planted:
    """The secrets of a run by name, and the search for them."""

    def __init__(self) -> None:
        self._named: dict[str, str] = {}

    def new(self, name: str, template: str = "{}") -> str:
        """Create a secret from characters that every encoding changes. `template` is the text around it."""
        value = template.format(f"{secrets.token_hex(9)}+/{secrets.token_hex(9)}~=")
        return self.add(name, value)

    def add(self, name: str, value: str) -> str:
        """Add a secret that was created elsewhere."""
        assert len(value) >= 16, f"{name} is too short to search for"
        self._named[name] = value
        return value

    def __getitem__(self, name: str) -> str:
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def find(self, evidence: Evidence, *, allow: tuple[str, ...] = ()) -> list[Leak]:
        """Return every secret in the evidence, except the names in `allow`."""
        by_text = {
            form: (name, kind)
            for name, value in self._named.items()
            if name not in allow
            for kind, form in encode_all(value).items()
        }
        pattern = re.compile(b"|".join(re.escape(form) for form in by_text))
        return sorted(
            {Leak(where, *by_text[hit]) for where, data in evidence.items() for hit in pattern.findall(data)},
            key=repr,
        )


# The format of session secrets and of generated admin keys, to find those whose values are unknown.
ISSUED_SECRET = re.compile(rb"(?<![\w-])(?:tg-[0-9a-f]{4}|tga-|tgp-[0-9a-f]{8}-)[\w-]{43}(?![\w-])")


def find_issued_secrets(evidence: Evidence) -> list[str]:
    """Return the places with such a secret, without the process list: other gateways may run on this machine."""
    return sorted({where for where, data in evidence.items() if where != PROCESSES and ISSUED_SECRET.search(data)})


def encode_all(value: str) -> dict[str, bytes]:
    """Return the possible encodings of a secret. In base64 it depends on the offset of the secret, so there are three."""
    raw = value.encode()
    encodings = {
        "itself": raw,
        "itself, in JSON": json.dumps(value)[1:-1].replace("/", "\\/").encode(),
        "hex": raw.hex().encode(),
        "HEX": raw.hex().upper().encode(),
        "URL-quoted": quote(value, safe="").encode(),
        "quoted like a form": quote_plus(value).encode(),
        "its first half": raw[: len(raw) // 2],  # truncated
        "its second half": raw[len(raw) // 2 :],
    }
    for before in range(3):
        whole = base64.b64encode(b"\0" * before + raw)
        start = -(-before * 8 // 6)  # characters that also encode preceding bytes
        end = (before + len(raw)) * 8 // 6
        inner = whole[start:end]
        encodings[f"base64 at {before}"] = inner
        encodings[f"URL-safe base64 at {before}"] = inner.translate(bytes.maketrans(b"+/", b"-_"))
    return {kind: form for kind, form in encodings.items() if len(form) >= 12}


class Evidence:
    """Everything that was seen of a run: places and their bytes."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, bytes]] = []

    def add(self, where: str, data: bytes | str | Json) -> None:
        if isinstance(data, str):
            data = data.encode("utf-8", "surrogatepass")
        self._seen.append((where, data if isinstance(data, bytes) else json.dumps(data, ensure_ascii=False).encode()))

    def add_response(self, reply: Any) -> None:
        """Add an HTTP response with its headers."""
        head = "\n".join(f"{name}: {value}" for name, value in reply.headers.items())
        self.add(
            f"the answer to {reply.request.method} {reply.request.url.path}", f"{head}\n\n".encode() + reply.content
        )

    def add_folder(self, folder: Path, *, allow: tuple[str, ...] = ()) -> None:
        """Add every file below a folder, decompressed, and its name. Files in `allow` may hold a secret but must be private."""
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            self.add(f"the name of {path}", name)
            if path.is_symlink() or not path.is_file():
                continue
            if name in allow:
                assert stat.S_IMODE(path.stat().st_mode) == 0o600, f"{path} can be read by others"
                continue
            self.add(str(path), _read(path))

    def items(self) -> Iterator[tuple[str, bytes]]:
        yield from list(self._seen)

    def text(self, where: str) -> str:
        """Return the text of all places whose name starts with `where`."""
        return "\n".join(data.decode("utf-8", "replace") for place, data in self._seen if place.startswith(where))

    @property
    def places(self) -> list[str]:
        return [where for where, _ in self._seen]


def _read(path: Path) -> bytes:
    data = path.read_bytes()[:_MAX_BYTES]
    if data.startswith(b"\x1f\x8b"):
        return gzip.decompress(data)
    if data.startswith(b"PAR1"):
        return json.dumps(parquet.read_table(io.BytesIO(data)).to_pylist(), default=str).encode()
    return data


class Processes(threading.Thread):
    """A thread that reads the command lines of the processes on the machine that began after it, until it is stopped."""

    def __init__(self, every_s: float = 0.015) -> None:
        super().__init__(name="processes", daemon=True)
        self._every_s = every_s
        self._over = threading.Event()
        self._seen: set[bytes] = set()
        self._older: set[str] = set()  # ids of processes that were there before
        self.looks = 0

    def run(self) -> None:
        while not self._over.wait(self._every_s):
            self._look()

    def _look(self) -> None:
        names = {name for name in os.listdir("/proc") if name.isdigit()}
        self._older &= names  # the id of a process that has ended can be given again
        for name in names - self._older:
            try:
                with open(f"/proc/{name}/cmdline", "rb", buffering=0) as file:
                    self._seen.add(file.read(_MAX_BYTES))
            except OSError:  # the process has ended
                pass
        self.looks += 1

    def lines(self) -> list[bytes]:
        """Return all command lines seen so far."""
        return sorted(self._seen)

    @contextmanager
    def watch(self) -> Iterator[Processes]:
        self._older = {name for name in os.listdir("/proc") if name.isdigit()}
        self.start()
        try:
            yield self
        finally:
            self._over.set()
            self.join()


class RecordedRequest(msgspec.Struct, frozen=True):
    path: str
    headers: dict[str, str]
    body: bytes


class Provider:
    """A stand-in for a hosted model that needs a key. Its errors repeat the request's headers in the body and in response headers.

    A message that contains FAIL-500, say, makes it fail.
    """

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[RecordedRequest] = []

    @property
    def keys(self) -> set[str]:
        """All keys that it received, in any header that a provider reads."""
        names = ("authorization", "x-api-key", "x-goog-api-key")
        return {value for request in self.requests for name, value in request.headers.items() if name in names}

    @contextmanager
    def serve(self) -> Iterator[Self]:
        provider = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                provider.record(self, b"")
                self._send(200, json.dumps({"data": [{"id": "gpt-x", "object": "model"}]}).encode())

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                provider.record(self, body)
                if failure := re.search(rb"FAIL-(\d+)", body):
                    message = f"it went wrong; the request was {self.path} with {dict(self.headers)}"
                    self._send(
                        int(failure[1]), json.dumps({"error": {"message": message, "type": "server_error"}}).encode()
                    )
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

    def record(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        self.requests.append(RecordedRequest(request.path, {k.lower(): v for k, v in request.headers.items()}, body))


class Receiver(Provider):
    """A collector of spans."""

    def spans(self) -> bytes:
        bodies = (request.body for request in self.requests if request.path == "/v1/traces")
        return b"\n".join(gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body for body in bodies)


def _completion() -> Json:
    message = {"role": "assistant", "content": "Fine."}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "gpt-x", "choices": [choice], "usage": usage}


# ── an agent that searches its surroundings ─────────────────────────────────────────────────────────────────────────

# Runs after `tests.rollout.kit.PRELUDE`. It prints and writes down everything that it can read and reach. It also prints its key backwards,
# so that the search can learn it. `WALLS` says whether to search the whole machine: a sandbox without isolation would expose everything.
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
CALL_MODEL = 'print(ask("Hi"))'


def search_program(*, isolated: bool, ports: tuple[int, ...] = (), then: str = "") -> str:
    """Return the program of an agent that searches its surroundings, then calls its model or runs `then`."""
    return PRELUDE + f"WALLS, PORTS = {isolated}, {ports}\n" + AGENT + (then or CALL_MODEL) + "\n"


# ── a run with planted secrets ──────────────────────────────────────────────────────────────────────────────────────


class Workspace:
    """A run: its folder, planted secrets and evidence, and methods to run programs in its environment."""

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
            # None of the machine's own variables. Sandboxes are below our folder, whose path is short enough for unix sockets.
            "PATH": os.environ["PATH"],
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TERM": "dumb",
        }

    def run(self, *words: str | Path, program: Sequence[str] = TURNGATE, input: str = "", **env: str) -> str:
        """Run a program to its end, with any exit code, and add its output to the evidence."""
        command = [*program, *map(str, words)]
        options = {"env": {**self.env, **env}, "cwd": self.folder, "timeout": scaled(120)}
        process = subprocess.run(command, input=input, capture_output=True, text=True, **options)
        self.evidence.add(f"stdout of {' '.join(map(str, words[:2]))}", process.stdout)
        self.evidence.add(f"stderr of {' '.join(map(str, words[:2]))}", process.stderr)
        return process.stdout + process.stderr

    @contextmanager
    def serve(self, *words: str | Path, program: Sequence[str] = TURNGATE, **env: str) -> Iterator[str]:
        """Run a server until the block ends, yield its URL, and then add its output to the evidence."""
        self._logs += 1
        log = self.folder / f"log-{self._logs}"
        command = [*program, *map(str, words)]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, env={**self.env, **env}, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.folder
            )
        try:
            yield _wait_for_url(process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(scaled(40))
            finally:
                process.kill()
            self.evidence.add(f"the log of {' '.join(map(str, words[:1]))} {self._logs}", log.read_bytes())

    def learn_keys(self, folder: Path) -> int:
        """Plant the session secrets that agents printed backwards, and return their number."""
        found = {
            hit[::-1].decode()
            for path in folder.rglob("stdout")
            for hit in re.findall(rb"BACKWARDS (\S+)", path.read_bytes())
        }
        for number, key in enumerate(sorted(found)):
            self.planted.add(f"session secret {folder.name} {number}", key)
        return len(found)

    def session_secrets(self) -> tuple[str, ...]:
        return tuple(name for name in self.planted if name.startswith("session secret"))


def _wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait for the URL in a server's log."""
    end = time.monotonic() + scaled(60)
    while process.poll() is None and time.monotonic() < end:
        if found := re.search(r"(http://127\.0\.0\.1:\d+)", log.read_text()):
            return found[1]
        time.sleep(0.02)
    raise AssertionError(f"the server did not start: {log.read_text()[-3000:]}")


@contextmanager
def open_workspace() -> Iterator[Workspace]:
    folder = Path(tempfile.mkdtemp(prefix="tg-"))
    try:
        yield Workspace(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
