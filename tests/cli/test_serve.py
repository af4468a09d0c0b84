"""`turngate serve`: start, stop, and one-line errors with exit code 2."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

import turngate
from tests.engines.standins import StandIn, answer_stream, event, serving
from tests.kit import Json, gateway, say, until, user
from tests.speed import scaled
from turngate.cli import app
from turngate.render import BUILTIN_TOKENIZER
from turngate.server.bind import publish_address

ROOT = Path(turngate.__file__).parents[1]


def run_rejected(*arguments: str | Path, command: str = "serve") -> str:
    """Run a command that must fail at once, and return its one-line error."""
    outcome = CliRunner().invoke(app, [command, *map(str, arguments)])
    assert isinstance(outcome.exception, SystemExit | None), f"a traceback: {outcome.exception!r}"
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    [line] = outcome.stderr.splitlines()
    assert line.startswith("turngate: ")
    return line.removeprefix("turngate: ")


def write_file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────


def test_misspelled_setting_suggests_name(tmp_path: Path) -> None:
    file = write_file(tmp_path / "turngate.toml", 'port = 8700\ndurabilty = "disk"\n')
    assert run_rejected("--config", file) == "durabilty is not a known setting; did you mean durability?"


def test_unknown_setting_lists_known_settings(tmp_path: Path) -> None:
    file = write_file(tmp_path / "turngate.toml", "zzz = 1\n")
    line = run_rejected("--config", file)
    assert line.startswith("zzz is not a known setting") and "engine_url" in line


@pytest.mark.parametrize(
    ("toml", "named"),
    [
        ('port = "eighty"', "port"),
        ("port = 70000", "port"),
        ("idle_s = 0", "idle_s"),
        ("idle_s = nan", "idle_s"),
        ("workers = 0", "workers"),
        ("workers = 1000", "workers"),
        ("alive_s = -1", "alive_s"),
        ('engine_url = ["ftp://x"]', "engine_url"),
        ('engine = "gpt"', "engine"),
        ('engine = "vllm"', "engine_url"),
        ('engine = "vllm"\nengine_url = ["http://127.0.0.1:1"]', "tokenizer"),
        ('engine = "vllm"\nengine_url = ["http://127.0.0.1:1"]\ntokenizer = "t"', "model"),
        ('durability = "much"', "durability"),
        ("open_loopback = 1", "open_loopback"),
        ("max_context = 0", "max_context"),
        ("[serve]\nport = 1", "serve"),
        ("port = ", "config"),
    ],
)
def test_invalid_value_is_named(toml: str, named: str, tmp_path: Path) -> None:
    line = run_rejected("--config", write_file(tmp_path / "turngate.toml", toml), "--data", tmp_path / "data")
    assert line.startswith((f"{named}:", f"{named} ")), line
    assert not (tmp_path / "data").exists()  # nothing was created


def test_unreadable_config_file(tmp_path: Path) -> None:
    assert "cannot be read" in run_rejected("--config", tmp_path / "none.toml")
    assert "cannot be read" in run_rejected("--config", tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert "not valid TOML" in run_rejected("--config", tmp_path / "binary.toml")


def test_flags_override_config_file(tmp_path: Path) -> None:
    file = write_file(tmp_path / "turngate.toml", 'engine = "vllm"\nport = 1\n')
    assert run_rejected("--config", file, "--port", "70000").startswith("--port must be between 0 and 65535, not 70000")


def test_invalid_tokenizer_folder(tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert "does not exist" in run_rejected("--tokenizer", tmp_path / "nowhere", "--data", data)
    (tmp_path / "empty").mkdir()
    assert "tokenizer.json" in run_rejected("--tokenizer", tmp_path / "empty", "--data", data)
    (tmp_path / "broken").mkdir()
    write_file(tmp_path / "broken" / "tokenizer.json", "{")
    assert "not valid JSON" in run_rejected("--tokenizer", tmp_path / "broken", "--data", data)


def test_missing_or_invalid_chat_template(tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(BUILTIN_TOKENIZER, folder)
    (folder / "chat_template.jinja").unlink()
    assert "no chat template" in run_rejected("--tokenizer", folder, "--data", tmp_path / "data")
    write_file(folder / "chat_template.jinja", "{% for x in %}")
    assert "chat template has a syntax error on line 1" in run_rejected(
        "--tokenizer", folder, "--data", tmp_path / "data"
    )


def test_tokenizer_json_of_other_format(tmp_path: Path) -> None:
    folder = tmp_path / "strange"
    folder.mkdir()
    write_file(folder / "tokenizer.json", '{"hello": 1}')
    assert str(folder) in run_rejected("--tokenizer", folder, "--data", tmp_path / "data")


def test_tokenizer_path_is_a_file(tmp_path: Path) -> None:
    file = write_file(tmp_path / "file.json", "{}")
    assert str(file) in run_rejected("--tokenizer", file, "--data", tmp_path / "data")


def test_chat_template_that_always_raises(tmp_path: Path) -> None:
    folder = tmp_path / "no"
    shutil.copytree(BUILTIN_TOKENIZER, folder)
    write_file(folder / "chat_template.jinja", "{{ raise_exception('never') }}")
    assert "never" in run_rejected("--tokenizer", folder, "--data", tmp_path / "data")


def test_unknown_family(tmp_path: Path) -> None:
    assert "family" in run_rejected("--family", "klingon", "--data", tmp_path / "data")


def test_invalid_script(tmp_path: Path) -> None:
    for n, text in enumerate(('{"a": 1}', "[1]", "[", "[]")):
        file = write_file(tmp_path / f"script{n}.json", text)
        assert run_rejected("--script", file, "--data", tmp_path / "data").startswith(f"script {file} ")
    assert run_rejected("--script", tmp_path / "none", "--data", tmp_path / "data").startswith("script ")


def test_unset_engine_key(tmp_path: Path) -> None:
    line = run_rejected("--engine-key-env", "NOT_SET_ANYWHERE", "--data", tmp_path / "data")
    assert "variable NOT_SET_ANYWHERE, which is not set" in line


@pytest.mark.parametrize("workers", ["1", "2"])
def test_port_in_use(workers: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = run_rejected("--port", str(port), "--workers", workers, "--data", tmp_path / "data")
    assert line.startswith(f"cannot listen on 127.0.0.1:{port}") and "--port" in line
    assert not (tmp_path / "data").exists()  # nothing was created


def test_unavailable_host(tmp_path: Path) -> None:
    assert "cannot listen on 203.0.113.1" in run_rejected("--host", "203.0.113.1", "--data", tmp_path / "data")
    assert "cannot listen on" in run_rejected("--host", "no such host", "--data", tmp_path / "data")


async def test_data_folder_in_use(tmp_path: Path) -> None:
    async with gateway(data=tmp_path):
        line = await asyncio.to_thread(run_rejected, "--data", tmp_path)
        assert (
            line == f"data: {tmp_path} is in use by another turngate process; stop it or choose another --data folder"
        )


async def test_data_folder_in_use_is_reported_before_port_in_use(tmp_path: Path) -> None:
    """A second `turngate serve` with the same settings."""
    async with gateway(data=tmp_path):
        with socket.create_server(("127.0.0.1", 0)) as listener, publish_address(tmp_path, listener):
            port = str(listener.getsockname()[1])
            line = await asyncio.to_thread(run_rejected, "--port", port, "--data", tmp_path)
    assert line.startswith(f"data: {tmp_path} is in use by another turngate process")


@pytest.mark.parametrize("folder", ["/dev/null/data", "/proc/turngate-data"])
def test_unwritable_data_folder(folder: str) -> None:
    assert run_rejected("--data", folder).startswith(f"data: {folder} cannot be written")


def test_data_folder_is_a_file(tmp_path: Path) -> None:
    file = write_file(tmp_path / "file", "")
    assert run_rejected("--data", file).startswith(f"data: {file} cannot be written")


def test_file_is_not_a_database(tmp_path: Path) -> None:
    (tmp_path / "turngate.db").write_bytes(b"this is not a database" * 1000)
    line = run_rejected("--data", tmp_path)
    assert line.startswith(f"data: {tmp_path / 'turngate.db'} cannot be used") and "backup" in line


async def test_corrupted_database(tmp_path: Path) -> None:
    async with gateway([say("Hello.")] * 3, data=tmp_path) as g:
        session = await g.open()
        for n in range(3):
            await g.ask(session.key, f"Question {n} " + "word " * 500)
    database = tmp_path / "turngate.db"
    with contextlib.closing(sqlite3.connect(database)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray(database.read_bytes())
    data[100:4096] = b"\xff" * (4096 - 100)
    database.write_bytes(data)
    assert (await asyncio.to_thread(run_rejected, "--data", tmp_path)).startswith("data: ")


def test_database_of_newer_version(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "turngate.db")) as db:
        db.execute("PRAGMA user_version=99")
    assert "schema version 99" in run_rejected("--data", tmp_path)
    assert "schema version 99" in run_rejected("--data", tmp_path)  # not "in use" after the first attempt


def test_key_file_readable_by_others(tmp_path: Path) -> None:
    write_file(tmp_path / "admin-key", "x" * 40).chmod(0o644)
    assert "chmod 600" in run_rejected("--data", tmp_path)


def test_undecodable_key_file(tmp_path: Path) -> None:
    (tmp_path / "admin-key").write_bytes(b"\xff" * 40)
    (tmp_path / "admin-key").chmod(0o600)
    assert "admin-key" in run_rejected("--data", tmp_path)


def test_unknown_or_invalid_flag() -> None:
    for arguments in (["--prot", "1"], ["--port", "many"]):
        outcome = CliRunner().invoke(app, ["serve", *arguments])
        assert outcome.exit_code == 2 and arguments[0] in outcome.stderr


def test_version_and_help() -> None:
    outcome = CliRunner().invoke(app, ["--version"])
    assert (outcome.exit_code, outcome.stdout.strip()) == (0, turngate.__version__)
    outcome = CliRunner().invoke(app, ["--help"])
    assert outcome.exit_code == 0 and "serve" in outcome.stdout and "certify" in outcome.stdout


# ── real processes ──────────────────────────────────────────────────────────────────────────────────────────────────


class ServeProcess:
    """A running `turngate serve` process."""

    def __init__(self, process: subprocess.Popen[str], log: Path, data: Path) -> None:
        self.process = process
        self.log = log
        self.url = ""
        self.data = data

    @property
    def admin(self) -> dict[str, str]:
        return {"authorization": "Bearer " + (self.data / "admin-key").read_text().strip()}

    def stop(self, seconds: float) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(scaled(seconds))

    def open(self, **config: Json) -> Json:
        response = httpx.post(
            f"{self.url}/admin/sessions", json=config, headers=self.admin, trust_env=False, timeout=scaled(20)
        )
        assert response.status_code == 201, response.text
        return response.json()


@contextlib.contextmanager
def start_serve(data: Path, *arguments: str | Path) -> Iterator[ServeProcess]:
    log = data.with_name(data.name + ".log")
    command = [sys.executable, "-m", "turngate", "serve", "--port", "0", "--data", data, *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TURNGATE")}
    with log.open("w") as stderr:
        child = subprocess.Popen([*map(str, command)], stderr=stderr, text=True, cwd=ROOT, env=environment)
    running = ServeProcess(child, log, data)
    try:
        end = time.monotonic() + scaled(20)
        while not (found := re.search(r"listens on (http://\S+)", log.read_text())):
            assert child.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.02)
        running.url = found[1]
        yield running
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()


@pytest.mark.process
def test_serve_answers_and_stops_on_sigterm(tmp_path: Path) -> None:
    script = write_file(tmp_path / "script.json", json.dumps(["Hello.", "And again."]))
    with start_serve(tmp_path / "data", "--script", script, "--log-turns", "--model", "policy-1") as served:
        opened = served.open(metadata={"n": 1})
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key=opened["api_key"]) as client:
            first = client.chat.completions.create(model="policy-1", messages=[user("Hi")])
            assert first.choices[0].message.content == "Hello."
            stream = client.chat.completions.create(model="policy-1", messages=[user("Hi")], stream=True)
            assert "".join(c.choices[0].delta.content or "" for c in stream) == "And again."
        assert served.stop(5) in (0, -signal.SIGTERM)
    log = served.log.read_text()
    assert "certified" in log and opened["id"] in log and "Traceback" not in log
    assert f"the admin key is in {served.data}/admin-key" in log
    # Neither the log nor the data folder contains a secret.
    key = served.admin["authorization"].removeprefix("Bearer ")
    files = b"".join(f.read_bytes() for f in served.data.iterdir() if f.name != "admin-key")
    for secret in (opened["api_key"], key):
        assert secret not in log and secret.encode() not in files
    with start_serve(tmp_path / "data") as again:
        path = f"/admin/sessions/{opened['id']}/trace"
        trace = httpx.get(again.url + path, headers=again.admin, trust_env=False, timeout=scaled(20))
        assert [n["kind"] for n in trace.json()["nodes"]] == ["context", "sampled", "sampled"]


@contextlib.asynccontextmanager
async def slow_engine() -> AsyncIterator[StandIn]:
    """A vLLM server whose generations begin and never end."""

    def token(i: int) -> bytes:
        logprobs = {"text_offset": [0], "token_logprobs": [-0.5], "tokens": ["x"], "top_logprobs": [{"x": -0.5}]}
        choice = {"index": 0, "text": "x", "logprobs": logprobs, "finish_reason": None, "token_ids": [i]}
        return event({"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]})

    documents = {"/health": {}, "/v1/models": {"data": [{"id": "m", "max_model_len": 4096}]}}
    server = StandIn(answer_stream(*[token(i) for i in say("One two").ids[:3]], 3600.0), documents)
    async with serving(server):
        yield server


@pytest.mark.process
async def test_sigterm_during_stream_keeps_sampled_tokens(tmp_path: Path) -> None:
    """Neither a running generation nor an open event stream delays the stop."""
    async with slow_engine() as engine, contextlib.AsyncExitStack() as stack:
        arguments = ("--engine", "vllm", "--engine-url", engine.url, "--model", "m", "--tokenizer", BUILTIN_TOKENIZER)
        starting = start_serve(tmp_path / "data", *arguments)
        served = await asyncio.to_thread(stack.enter_context, starting)
        opened = await asyncio.to_thread(served.open)
        http = httpx.AsyncClient(base_url=served.url, headers=served.admin, trust_env=False, timeout=scaled(20))
        await stack.enter_async_context(http)
        await stack.enter_async_context(http.stream("GET", "/admin/events"))
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=opened["api_key"])
        await stack.enter_async_context(client)
        stream: Any = await client.chat.completions.create(model="m", messages=[user("Hi")], stream=True)
        chunks: list[Any] = []

        async def read() -> None:
            async for chunk in stream:
                chunks.append(chunk)

        reading = asyncio.create_task(read())
        await until(lambda: any(c.choices[0].delta.content for c in chunks))
        code = await asyncio.to_thread(served.stop, 9)
        assert code in (0, -signal.SIGTERM)
        await asyncio.wait([reading])
        assert reading.exception() is not None  # the agent sees an error
        await asyncio.wait_for(engine.hung_up.wait(), scaled(5))  # the engine noticed
        assert "Traceback" not in served.log.read_text()
    async with gateway(data=tmp_path / "data") as g:
        [turn] = await g.turns(opened["id"])
        assert (turn["role"], turn["ids"]) == ("aborted", list(say("One two").ids[:3]))


@pytest.mark.process
def test_error_exits_with_code_2(tmp_path: Path) -> None:
    file = write_file(tmp_path / "turngate.toml", "prot = 8700\n")
    command = [sys.executable, "-m", "turngate", "serve", "--config", str(file)]
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=scaled(20))
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr == "turngate: prot is not a known setting; did you mean port?\n"
