"""`turngate serve --workers N` as processes: start, stop, unusual clients, and workers that die."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import pytest

import turngate
from tests.cli.test_serve import slow_engine
from tests.crash.storm import children, storm
from tests.kit import gateway, memory_folder, until, user
from tests.speed import scaled
from turngate.common.sharding import slot_of
from turngate.render import BUILTIN_TOKENIZER

pytestmark = [pytest.mark.process, pytest.mark.full]

ROOT = Path(turngate.__file__).parents[1]
HI = [user("Hi")]
ENV = {**{k: v for k, v in os.environ.items() if not k.startswith("TURNGATE")}, "PYTHONPATH": str(ROOT)}


class ServeProcess:
    """A running front and its workers."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, data: Path) -> None:
        self.process, self.log, self.data = process, log, data
        self.url = ""

    @property
    def workers(self) -> list[int]:
        """Process ids by worker number; a restarting worker is missing."""
        return sorted(children(self.process.pid), key=lambda pid: _command(pid).rstrip("\0").rpartition("\0")[2])

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def admin(self) -> dict[str, str]:
        return {"authorization": "Bearer " + (self.data / "admin-key").read_text().strip()}

    def ask(self, method: str, path: str, **request: Any) -> Any:
        response = httpx.request(
            method, self.url + path, headers=self.admin, trust_env=False, timeout=scaled(60), **request
        )
        assert response.is_success, response.text
        return response.json()

    def open(self, owner: int | None = None, **config: Any) -> Any:
        while True:
            opened = self.ask("POST", "/admin/sessions", json=config)
            if owner is None or slot_of(opened["id"]) % 2 == owner:
                return opened

    def say(self, key: str, messages: Any = HI) -> str:
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=3, timeout=scaled(60)) as client:
            return client.chat.completions.create(model="m", messages=messages).choices[0].message.content or ""


Serving = TypeVar("Serving", bound=ServeProcess)


@contextmanager
def start_serve(
    data: Path, *arguments: str | Path, workers: int = 2, head_s: float | None = None
) -> Iterator[ServeProcess]:
    """Start `turngate serve` with workers. `head_s` overrides how long the front waits for request headers."""
    program = ["-m", "turngate"]
    if head_s is not None:
        start = "import runpy; runpy.run_module('turngate', run_name='__main__', alter_sys=True)"
        program = ["-c", f"from turngate.server.workers import front; front.HEAD_S = {head_s}; {start}"]
    command = [*program, "serve", "--port", "0", "--workers", str(workers), "--data", str(data), *map(str, arguments)]
    data.with_name(data.name + ".log").unlink(missing_ok=True)
    with start_process(ServeProcess, command, data) as running:
        yield running


@contextmanager
def start_process(kind: type[Serving], command: Sequence[str], data: Path, cwd: Path = ROOT) -> Iterator[Serving]:
    """Start a gateway with the arguments of Python, and stop it with its workers. Its log is next to the data folder."""
    data.parent.mkdir(parents=True, exist_ok=True)
    log = data.with_name(data.name + ".log")
    with log.open("a") as stderr:
        before = stderr.tell()
        process = subprocess.Popen([sys.executable, *command], stderr=stderr, stdout=stderr, cwd=cwd, env=ENV)
    running = kind(process, log, data)
    pids: list[int] = []
    try:
        end = time.monotonic() + scaled(30)
        while not (found := re.search(rb"listens on (http://\S+)", log.read_bytes()[before:])):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.02)
        running.url = found[1].decode()
        pids = running.workers
        yield running
    finally:
        if process.poll() is None:
            pids = running.workers
            process.terminate()
            try:
                process.wait(scaled(20))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        assert wait_until_gone(pids, 15), "a worker was left behind"


def wait_until_gone(pids: list[int], seconds: float) -> bool:
    end = time.monotonic() + scaled(seconds)
    while any(_is_running(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z" and "turngate.server.workers.worker" in _command(pid)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except OSError:
        return ""


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    limit = scaled(seconds)
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"condition did not hold within {limit:.0f} s"
        time.sleep(0.05)


@pytest.fixture
def data() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder / "data"


def write_script(path: Path, texts: list[str]) -> Path:
    path.write_text(json.dumps(texts))
    return path


# ── starting and stopping ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.real
def test_serve_and_stop_leave_nothing_behind(data: Path) -> None:
    script = write_script(data.with_name("script.json"), ["Hello.", "And again."])
    with start_serve(data, "--script", script, "--model", "m") as s:
        assert len(s.workers) == 2
        note = json.loads((data / "gateway.json").read_bytes())
        assert note == {"url": s.url, "pid": s.process.pid}
        sessions = [s.open() for _ in range(4)]
        assert sorted(slot_of(o["id"]) % 2 for o in sessions) == [0, 0, 1, 1]
        for opened in sessions:
            assert [s.say(opened["api_key"]), s.say(opened["api_key"])] == ["Hello.", "And again."]
        key = s.admin["authorization"].removeprefix("Bearer ")
        commands = "".join(_command(pid) for pid in (s.process.pid, *s.workers))
        assert key not in commands and (data / "sockets").stat().st_mode & 0o077 == 0
        pids = s.workers
        s.process.terminate()
        assert s.process.wait(scaled(15)) == 0
        assert wait_until_gone(pids, 0)
    assert not (data / "sockets").exists() and not (data / "gateway.json").exists()
    log = s.log.read_text()
    files = b"".join(f.read_bytes() for f in data.iterdir() if f.name != "admin-key")
    assert "2 workers" in log and log.count("certified") == 1 and "Traceback" not in log
    for secret in (key, *(opened["api_key"] for opened in sessions)):
        assert secret not in log and secret.encode() not in files


def test_ctrl_c_on_all_processes_stops_cleanly(data: Path) -> None:
    with start_serve(data) as s:
        pids = s.workers
        for pid in (*pids, s.process.pid):
            os.kill(pid, signal.SIGINT)
        assert s.process.wait(scaled(15)) == 0 and wait_until_gone(pids, 0)
    assert "Traceback" not in s.log.read_text() and "started again" not in s.log.read_text()


def test_workers_end_with_killed_front_and_folder_is_reusable(data: Path) -> None:
    with start_serve(data) as s:
        opened = s.open()
        pids = s.workers
        s.process.kill()
        s.process.wait()
        with start_serve(data, workers=3) as again:  # waits until the old workers are gone
            assert wait_until_gone(pids, 0)
            assert "scripted" in again.say(opened["api_key"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--tokenizer", "/nowhere"], "/nowhere"),
        (["--script", "/nowhere.json"], "script /nowhere.json"),
        (["--workers", "0"], "workers must be between 1 and 256, not 0"),
        (["--host", "203.0.113.1"], "cannot listen"),
    ],
)
def test_invalid_options_are_one_line_errors(data: Path, arguments: list[str], named: str) -> None:
    command = [
        sys.executable,
        "-m",
        "turngate",
        "serve",
        "--workers",
        "2",
        "--port",
        "0",
        "--data",
        str(data),
        *arguments,
    ]
    failed = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=scaled(30))
    assert failed.returncode == 2
    [line] = failed.stderr.splitlines()
    assert line.startswith("turngate: ") and named in line


async def test_folder_in_use_is_rejected(data: Path) -> None:
    command = [sys.executable, "-m", "turngate", "serve", "--workers", "2", "--port", "0", "--data", str(data)]
    async with gateway(data=data):
        failed = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, env=ENV, capture_output=True, text=True)
    assert failed.returncode == 2 and "in use by another turngate" in failed.stderr


def test_folder_path_too_long_for_socket(data: Path) -> None:
    deep = data / ("x" * 60) / ("y" * 60)
    with start_serve(deep) as s:
        sessions = [s.open() for _ in range(4)]
        http = httpx.Client(base_url=s.url, headers=s.admin, trust_env=False, timeout=scaled(30))
        with http:  # one connection for all requests
            for opened in sessions:
                assert http.get(f"/admin/sessions/{opened['id']}").status_code == 200


# ── unusual clients ───────────────────────────────────────────────────────────────────────────────────────


def _head(path: str, key: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\r\n".encode()


@contextmanager
def connections(s: ServeProcess) -> Iterator[Callable[[], socket.socket]]:
    with ExitStack() as stack:

        def connect() -> socket.socket:
            wire = stack.enter_context(socket.create_connection(("127.0.0.1", s.port)))
            wire.settimeout(scaled(15))
            return wire

        yield connect


def test_slow_or_malformed_clients_do_not_block_others(data: Path) -> None:
    """With an unlimited header timeout, a blocked client would hang the test."""
    with start_serve(data, head_s=1e6) as s, connections(s) as connect:
        key = s.open()["api_key"]
        for _ in range(40):
            connect()
        connect().sendall(b"GET /health HTT")
        assert "scripted" in s.say(key)
        garbage = connect()
        garbage.sendall(os.urandom(20_000) + b"\r\n\r\n")
        assert garbage.recv(100).startswith(b"HTTP/1.1 400")
        huge = connect()
        huge.sendall(b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        assert re.match(rb"HTTP/1.1 4\d\d", huge.recv(100))
        for wire in (connect(), connect()):  # disconnect after a partial request
            wire.sendall(b"GE")
            wire.close()
        half = connect()  # half-closed after the request; uvicorn treats it as a disconnect
        half.sendall(_head("/health"))
        half.shutdown(socket.SHUT_WR)
        half.recv(100)
        in_pieces = connect()
        for byte in _head("/health"):
            in_pieces.sendall(bytes([byte]))
        assert in_pieces.recv(100).startswith(b"HTTP/1.1 200")
        two = connect()  # two pipelined requests
        two.sendall(_head("/health") * 2)
        wait_until(lambda: two.recv(4096, socket.MSG_PEEK).count(b"HTTP/1.1 200") == 2)
        body = b'{"model": "m", "messages": [{"role": "user", "content": "' + b"x" * 100_000 + b'"}]}'
        large = connect()
        large.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b"
            % (key.encode(), len(body), body)
        )
        assert large.recv(100).startswith(b"HTTP/1.1 200")
    assert "Traceback" not in s.log.read_text()


def test_client_with_slow_headers_is_served(data: Path) -> None:
    with start_serve(data, head_s=0.2) as s, connections(s) as connect:
        silent, slow = connect(), connect()
        slow.sendall(b"GET /health HTT")
        time.sleep(scaled(0.25))  # by now they are handed over to a worker
        slow.sendall(b"P/1.1\r\nhost: x\r\n\r\n")
        assert slow.recv(100).startswith(b"HTTP/1.1 200")
        silent.sendall(_head("/health"))
        assert silent.recv(100).startswith(b"HTTP/1.1 200")
    assert "Traceback" not in s.log.read_text()


# ── workers that die ────────────────────────────────────────────────────────────────────────────────────────────────


def test_connection_waits_for_restarting_worker(data: Path) -> None:
    with start_serve(data) as s:
        sessions = [s.open(owner=n) for n in (0, 1)]
        for owner, opened in enumerate(sessions):
            before = s.workers
            os.kill(before[owner], signal.SIGKILL)
            wait_until(lambda owner=owner: s.log.read_text().count("; restarting") == owner + 1)  # the front noticed
            options: Any = {"max_retries": 0, "timeout": scaled(30)}
            with openai.OpenAI(base_url=f"{s.url}/v1", api_key=opened["api_key"], **options) as client:
                reply = client.chat.completions.create(model="m", messages=HI)  # type: ignore[arg-type]
            assert reply.choices[0].message.content
            wait_until(lambda before=before: len(s.workers) == 2 and s.workers != before)
            # Also through the other worker, which forwards it.
            with httpx.Client(base_url=s.url, headers=s.admin, trust_env=False, timeout=scaled(30)) as http:
                for other in sessions:
                    assert http.get(f"/admin/sessions/{other['id']}").status_code == 200
        assert s.log.read_text().count("; restarting") == 2


def test_restarted_worker_keeps_pause_and_version(data: Path) -> None:
    with start_serve(data) as s:
        sessions = [s.open(owner=n) for n in (0, 1)]
        s.ask("POST", "/admin/fence/resume", json={"version": 5})
        assert s.ask("POST", "/admin/fence/pause", json={"mode": "drain"})["paused"] is True
        for owner in (1, 0):
            before = s.workers
            os.kill(before[owner], signal.SIGKILL)
            wait_until(lambda before=before: len(s.workers) == 2 and s.workers != before)
            assert s.ask("GET", "/admin/fence") == {"version": 5, "paused": True, "in_flight": 0}
        for opened in sessions:
            with (
                pytest.raises(openai.APITimeoutError),
                openai.OpenAI(base_url=f"{s.url}/v1", api_key=opened["api_key"], max_retries=0, timeout=1) as client,
            ):
                client.chat.completions.create(model="m", messages=HI)  # type: ignore[arg-type]
        assert s.ask("POST", "/admin/fence/resume", json={"version": 6})["version"] == 6
        for opened in sessions:
            s.say(opened["api_key"])
            nodes = s.ask("GET", f"/admin/sessions/{opened['id']}/trace")["nodes"]
            assert {n["version_start"] for n in nodes if n["kind"] == "sampled" and n["ids"]} == {6}
        s.ask("POST", "/admin/fence/pause")
        s.process.terminate()
        s.process.wait(scaled(15))
    with start_serve(data) as again:  # still paused after a full restart
        assert again.ask("GET", "/admin/fence") == {"version": 6, "paused": True, "in_flight": 0}
        assert "POST /admin/fence/resume" in again.log.read_text()
        assert again.ask("POST", "/admin/fence/resume")["paused"] is False


async def test_event_stream_has_no_gaps_or_duplicates_after_restarts(data: Path) -> None:
    seen: list[Any] = []
    opened_ids: list[str] = []

    async def follow(s: ServeProcess) -> None:
        """Follow events and reconnect with the id of the last one."""
        while True:
            headers = {**s.admin, "last-event-id": str(seen[-1]["seq"]) if seen else ""}
            with suppress(httpx.HTTPError):
                async with (
                    httpx.AsyncClient(base_url=s.url, headers=headers, trust_env=False, timeout=None) as http,
                    http.stream("GET", "/admin/events") as response,
                ):
                    async for line in response.aiter_lines():
                        if line.startswith("data: "):
                            seen.append(json.loads(line[6:]))
            await asyncio.sleep(0.05)

    async def run_and_follow(s: ServeProcess, kills: bool) -> None:
        following = asyncio.create_task(follow(s))
        if kills:
            opened_ids.extend([(await asyncio.to_thread(s.open))["id"] for _ in range(4)])
            os.kill(s.workers[1], signal.SIGKILL)  # this may end the event stream
        opened = [await asyncio.to_thread(s.open) for _ in range(4)]
        opened_ids.extend(o["id"] for o in opened)
        for session in opened:
            await asyncio.to_thread(s.say, session["api_key"])
        await until(lambda: [e["kind"] for e in seen].count("turn") == (4 if kills else 8), 20)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    for workers, kills in ((2, True), (1, False)):  # the stream continues with another number of workers
        with ExitStack() as stack:
            s = await asyncio.to_thread(stack.enter_context, start_serve(data, workers=workers))
            await run_and_follow(s, kills)
            await asyncio.to_thread(stack.close)
    assert [e["seq"] for e in seen] == sorted({e["seq"] for e in seen})
    assert [e["session"] for e in seen if e["kind"] == "opened"] == opened_ids
    assert [e["kind"] for e in seen].count("turn") == 8


def engine_options(engine: Any) -> tuple[str | Path, ...]:
    where = ("--engine", "vllm", "--engine-url", engine.url)
    return (*where, "--model", "m", "--tokenizer", BUILTIN_TOKENIZER)


async def test_client_disconnect_aborts_engine_call(data: Path) -> None:
    async with slow_engine() as engine:
        with ExitStack() as stack:
            s = await asyncio.to_thread(stack.enter_context, start_serve(data, *engine_options(engine)))
            opened = await asyncio.to_thread(s.open)
            async with openai.AsyncOpenAI(base_url=f"{s.url}/v1", api_key=opened["api_key"]) as client:
                stream: Any = await client.chat.completions.create(model="m", messages=HI, stream=True)  # type: ignore[arg-type]
                async for chunk in stream:
                    if chunk.choices[0].delta.content:
                        break
                await stream.close()
            await asyncio.wait_for(engine.hung_up.wait(), scaled(5))
            await asyncio.to_thread(stack.close)


async def test_forwarded_reply_breaks_if_owner_dies_and_session_continues(data: Path) -> None:
    async with slow_engine() as engine:
        with ExitStack() as stack:
            s = await asyncio.to_thread(stack.enter_context, start_serve(data, *engine_options(engine)))
            near, far = [await asyncio.to_thread(s.open, owner) for owner in (0, 1)]
            single_connection = httpx.Limits(max_connections=1)
            async with httpx.AsyncClient(
                base_url=s.url, limits=single_connection, trust_env=False, timeout=scaled(40)
            ) as http:
                # The connection belongs to worker 0 by its first request.
                assert (await http.get(f"/admin/sessions/{near['id']}", headers=s.admin)).status_code == 200
                body = {"model": "m", "messages": HI, "stream": True}
                key = {"authorization": f"Bearer {far['api_key']}"}
                owner = s.workers[1]
                with pytest.raises(httpx.RemoteProtocolError):
                    async with http.stream("POST", "/v1/chat/completions", json=body, headers=key) as reply:
                        assert reply.status_code == 200
                        async for _ in reply.aiter_bytes():
                            with suppress(ProcessLookupError):  # already killed
                                os.kill(owner, signal.SIGKILL)
                async with asyncio.timeout(scaled(40)):
                    while True:
                        with suppress(
                            httpx.RemoteProtocolError
                        ):  # the front may still pass the connection to the dead owner
                            shown = await http.get(f"/admin/sessions/{far['id']}", headers=s.admin)
                            break
                assert shown.status_code == 200 and shown.json()["turns"] == 0
            log = s.log.read_text()
            assert "in the middle of a reply" in log and "Traceback" not in log
            await asyncio.to_thread(stack.close)


@pytest.mark.real
@pytest.mark.soak
@pytest.mark.parametrize(("durability", "kills"), [("process", 60), ("disk", 30)])
async def test_no_received_answer_is_lost(durability: str, kills: int, storm_scale: float) -> None:
    print(await storm(round(kills * storm_scale), durability=durability, seed=kills, workers=2))
