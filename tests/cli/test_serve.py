"""`turngate serve` as a person meets it: it starts, it stops, and what is wrong is said in one line with exit code 2."""

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
from tests.engines.standins import StandIn, event, serving, streams
from tests.kit import Json, gateway, say, until, user
from tests.speed import scaled
from turngate.cli import app
from turngate.render import BUILTIN_TOKENIZER

ROOT = Path(turngate.__file__).parents[1]


def refused(*arguments: str | Path, command: str = "serve") -> str:
    """The one line that `turngate` prints instead of starting."""
    outcome = CliRunner().invoke(app, [command, *map(str, arguments)])
    assert isinstance(outcome.exception, SystemExit | None), f"a traceback: {outcome.exception!r}"
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    [line] = outcome.stderr.splitlines()
    assert line.startswith("turngate: ")
    return line.removeprefix("turngate: ")


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# ── what is wrong is said ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_setting_with_a_typing_error_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    file = written(tmp_path / "turngate.toml", 'port = 8700\ndurabilty = "disk"\n')
    assert refused("--config", file) == "durabilty is not a known setting; did you mean durability?"


def test_a_setting_like_no_other_is_refused_with_all_the_names(tmp_path: Path) -> None:
    file = written(tmp_path / "turngate.toml", "zzz = 1\n")
    line = refused("--config", file)
    assert line.startswith("zzz is not a known setting") and "engine_url" in line


@pytest.mark.parametrize(
    ("toml", "named"),
    [
        ('port = "eighty"', "port"),
        ("port = 70000", "port"),
        ("idle_s = 0", "idle_s"),
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
def test_a_value_that_does_not_fit_is_refused_by_its_name(toml: str, named: str, tmp_path: Path) -> None:
    line = refused("--config", written(tmp_path / "turngate.toml", toml), "--data", tmp_path / "data")
    assert line.startswith((f"{named}:", f"{named} ")), line
    assert not (tmp_path / "data").exists()  # nothing was made for a gateway that never was


def test_a_config_file_that_is_not_there(tmp_path: Path) -> None:
    assert "cannot be read" in refused("--config", tmp_path / "none.toml")
    assert "cannot be read" in refused("--config", tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert "not valid TOML" in refused("--config", tmp_path / "binary.toml")


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = written(tmp_path / "turngate.toml", 'engine = "vllm"\nport = 1\n')
    assert refused("--config", file, "--port", "70000").startswith("port must be between 0 and 65535, not 70000")


def test_a_tokenizer_that_is_not_one(tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert "does not exist" in refused("--tokenizer", tmp_path / "nowhere", "--data", data)
    (tmp_path / "empty").mkdir()
    assert "tokenizer.json" in refused("--tokenizer", tmp_path / "empty", "--data", data)
    (tmp_path / "broken").mkdir()
    written(tmp_path / "broken" / "tokenizer.json", "{")
    assert "not valid JSON" in refused("--tokenizer", tmp_path / "broken", "--data", data)


def test_a_tokenizer_without_a_chat_template(tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(BUILTIN_TOKENIZER, folder)
    (folder / "chat_template.jinja").unlink()
    assert "no chat template" in refused("--tokenizer", folder, "--data", tmp_path / "data")
    written(folder / "chat_template.jinja", "{% for x in %}")
    assert "chat template has a syntax error on line 1" in refused("--tokenizer", folder, "--data", tmp_path / "data")


def test_a_tokenizer_file_of_another_kind(tmp_path: Path) -> None:
    folder = tmp_path / "strange"
    folder.mkdir()
    written(folder / "tokenizer.json", '{"hello": 1}')
    assert str(folder) in refused("--tokenizer", folder, "--data", tmp_path / "data")


def test_a_tokenizer_path_that_leads_to_a_file(tmp_path: Path) -> None:
    file = written(tmp_path / "file.json", "{}")
    assert str(file) in refused("--tokenizer", file, "--data", tmp_path / "data")


def test_a_chat_template_that_refuses_everything(tmp_path: Path) -> None:
    folder = tmp_path / "no"
    shutil.copytree(BUILTIN_TOKENIZER, folder)
    written(folder / "chat_template.jinja", "{{ raise_exception('never') }}")
    assert "never" in refused("--tokenizer", folder, "--data", tmp_path / "data")


def test_a_family_that_nobody_knows(tmp_path: Path) -> None:
    assert "family" in refused("--family", "klingon", "--data", tmp_path / "data")


def test_a_script_that_is_not_a_list_of_replies(tmp_path: Path) -> None:
    for n, text in enumerate(('{"a": 1}', "[1]", "[", "[]")):
        file = written(tmp_path / f"script{n}.json", text)
        assert refused("--script", file, "--data", tmp_path / "data").startswith(f"script {file} ")
    assert refused("--script", tmp_path / "none", "--data", tmp_path / "data").startswith("script ")


def test_an_engine_key_that_is_not_set(tmp_path: Path) -> None:
    line = refused("--engine-key-env", "NOT_SET_ANYWHERE", "--data", tmp_path / "data")
    assert "NOT_SET_ANYWHERE is not set" in line


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = refused("--port", str(port), "--data", tmp_path / "data")
    assert line.startswith(f"cannot listen on 127.0.0.1:{port}") and "--port" in line


def test_an_address_that_is_not_ours(tmp_path: Path) -> None:
    assert "cannot listen on 203.0.113.1" in refused("--host", "203.0.113.1", "--data", tmp_path / "data")
    assert "cannot listen on" in refused("--host", "no such host", "--data", tmp_path / "data")


async def test_a_data_folder_that_another_gateway_uses(tmp_path: Path) -> None:
    async with gateway(data=tmp_path):
        line = await asyncio.to_thread(refused, "--data", tmp_path)
        assert (
            line == f"data: {tmp_path} is in use by another turngate process; stop it or choose another --data folder"
        )


@pytest.mark.parametrize("place", ["/dev/null/data", "/proc/turngate-data"])
def test_a_data_folder_that_cannot_be_made(place: str) -> None:
    assert refused("--data", place).startswith(f"data: {place} cannot be written")


def test_a_data_folder_that_is_a_file(tmp_path: Path) -> None:
    file = written(tmp_path / "file", "")
    assert refused("--data", file).startswith(f"data: {file} cannot be written")


def test_a_database_that_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "turngate.db").write_bytes(b"this is not a database" * 1000)
    line = refused("--data", tmp_path)
    assert line.startswith(f"data: {tmp_path / 'turngate.db'} cannot be used") and "backup" in line


async def test_a_database_with_a_hole_in_it(tmp_path: Path) -> None:
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
    assert (await asyncio.to_thread(refused, "--data", tmp_path)).startswith("data: ")


def test_a_database_from_a_newer_version(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "turngate.db")) as db:
        db.execute("PRAGMA user_version=99")
    assert "schema version 99" in refused("--data", tmp_path)
    assert "schema version 99" in refused("--data", tmp_path)  # and not "in use" by the first attempt


def test_a_key_file_that_others_can_read(tmp_path: Path) -> None:
    written(tmp_path / "admin-key", "x" * 40).chmod(0o644)
    assert "chmod 600" in refused("--data", tmp_path)


def test_a_key_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "admin-key").write_bytes(b"\xff" * 40)
    (tmp_path / "admin-key").chmod(0o600)
    assert "admin-key" in refused("--data", tmp_path)


def test_a_flag_that_does_not_exist_or_does_not_fit() -> None:
    for arguments in (["--prot", "1"], ["--port", "many"]):
        outcome = CliRunner().invoke(app, ["serve", *arguments])
        assert outcome.exit_code == 2 and arguments[0] in outcome.stderr


def test_the_version_and_the_help() -> None:
    outcome = CliRunner().invoke(app, ["--version"])
    assert (outcome.exit_code, outcome.stdout.strip()) == (0, turngate.__version__)
    outcome = CliRunner().invoke(app, ["--help"])
    assert outcome.exit_code == 0 and "serve" in outcome.stdout and "certify" in outcome.stdout


# ── the real thing ──────────────────────────────────────────────────────────────────────────────────────────────────


class Process:
    """A `turngate serve` of its own."""

    def __init__(self, process: subprocess.Popen[str], log: Path, data: Path) -> None:
        self.process = process
        self.log = log
        self.url = ""
        self.data = data

    @property
    def admin(self) -> dict[str, str]:
        return {"authorization": "Bearer " + (self.data / "admin-key").read_text().strip()}

    def stop(self, seconds: float) -> int:
        """SIGTERM, and the exit code, if it comes within that time."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(scaled(seconds))

    def open(self, **config: Json) -> Json:
        response = httpx.post(
            f"{self.url}/admin/sessions", json=config, headers=self.admin, trust_env=False, timeout=scaled(20)
        )
        assert response.status_code == 201, response.text
        return response.json()


@contextlib.contextmanager
def process(data: Path, *arguments: str | Path) -> Iterator[Process]:
    log = data.with_name(data.name + ".log")
    command = [sys.executable, "-m", "turngate", "serve", "--port", "0", "--data", data, *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TURNGATE")}
    with log.open("w") as stderr:
        child = subprocess.Popen([*map(str, command)], stderr=stderr, text=True, cwd=ROOT, env=environment)
    running = Process(child, log, data)
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
def test_it_starts_answers_and_stops_when_it_is_told(tmp_path: Path) -> None:
    script = written(tmp_path / "script.json", json.dumps(["Hello.", "And again."]))
    with process(tmp_path / "data", "--script", script, "--log-turns", "--model", "policy-1") as served:
        opened = served.open(metadata={"n": 1})
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key=opened["api_key"]) as client:
            first = client.chat.completions.create(model="policy-1", messages=[user("Hi")])
            assert first.choices[0].message.content == "Hello."
            stream = client.chat.completions.create(model="policy-1", messages=[user("Hi")], stream=True)
            assert "".join(c.choices[0].delta.content or "" for c in stream) == "And again."
        assert served.stop(5) in (0, -signal.SIGTERM)
    log = served.log.read_text()
    assert "certified" in log and opened["id"] in log and "Traceback" not in log
    # The secret is nowhere: not in what it printed, not in what it left on disk.
    key = served.admin["authorization"].removeprefix("Bearer ")
    left = b"".join(f.read_bytes() for f in served.data.iterdir() if f.name != "admin-key")
    for secret in (opened["api_key"], key):
        assert secret not in log and secret.encode() not in left
    with process(tmp_path / "data") as again:
        path = f"/admin/sessions/{opened['id']}/trace"
        trace = httpx.get(again.url + path, headers=again.admin, trust_env=False, timeout=scaled(20))
        assert [n["kind"] for n in trace.json()["nodes"]] == ["context", "sampled", "sampled"]


@contextlib.asynccontextmanager
async def slow_engine() -> AsyncIterator[StandIn]:
    """vLLM's side of a generation that begins and then takes for ever."""

    def token(i: int) -> bytes:
        logprobs = {"text_offset": [0], "token_logprobs": [-0.5], "tokens": ["x"], "top_logprobs": [{"x": -0.5}]}
        choice = {"index": 0, "text": "x", "logprobs": logprobs, "finish_reason": None, "token_ids": [i]}
        return event({"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]})

    documents = {"/health": {}, "/v1/models": {"data": [{"id": "m", "max_model_len": 4096}]}}
    server = StandIn(streams(*[token(i) for i in say("One two").ids[:3]], 3600.0), documents)
    async with serving(server):
        yield server


@pytest.mark.process
async def test_it_stops_within_seconds_in_the_middle_of_a_stream_and_keeps_what_was_sampled(tmp_path: Path) -> None:
    """An agent that is being answered and a person who follows the events do not keep it from stopping."""
    async with slow_engine() as engine, contextlib.AsyncExitStack() as stack:
        arguments = ("--engine", "vllm", "--engine-url", engine.url, "--model", "m", "--tokenizer", BUILTIN_TOKENIZER)
        starting = process(tmp_path / "data", *arguments)
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
        assert reading.exception() is not None  # the agent knows that it was cut off
        await asyncio.wait_for(engine.hung_up.wait(), scaled(5))  # the engine noticed
        assert "Traceback" not in served.log.read_text()
    async with gateway(data=tmp_path / "data") as g:
        [turn] = await g.turns(opened["id"])
        assert (turn["role"], turn["ids"]) == ("aborted", list(say("One two").ids[:3]))


@pytest.mark.process
def test_the_command_itself_says_what_is_wrong_and_exits_with_2(tmp_path: Path) -> None:
    file = written(tmp_path / "turngate.toml", "prot = 8700\n")
    command = [sys.executable, "-m", "turngate", "serve", "--config", str(file)]
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=scaled(20))
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr == "turngate: prot is not a known setting; did you mean port?\n"
