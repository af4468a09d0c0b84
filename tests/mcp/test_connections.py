"""Clients that go, come back and come all at once; who is let in over HTTP; what is on stdout; and a clean end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx2
import pytest

from tests.cli import kit as cli
from tests.mcp import kit
from tests.mcp.kit import KEY, asked, at, called, until_there
from tests.speed import scaled
from turngate.mcp.http import MAX_BYTES

pytestmark = [pytest.mark.process, pytest.mark.full]

INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}


async def _cut_off(server: kit.Server, mode: str, program: str, running: Path) -> str:
    """A client that calls run_rollout and is gone in the middle of it. The id that it was told."""
    heard = asyncio.Event()
    words: list[str] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        words.append(message or "")
        heard.set()

    async def call() -> None:
        async with at(server, mode) as client:
            await client.call_tool("run_rollout", asked(program), progress_callback=progress)

    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await heard.wait()
            await kit.there(running)
            scope.cancel()
    return words[0].split()[1].rstrip(":")


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_rollout_outlives_its_caller(http: kit.Server, folder: Path, mode: str) -> None:
    gate = folder / "gate"
    rollout = await _cut_off(http, mode, until_there(gate), folder / "gate.waits")
    async with at(http) as client:
        assert (await called(client, "get_state", rollout_id=rollout))["status"] == "running"
        gate.touch()
        assert (await called(client, "finalize_rollout", rollout_id=rollout))["status"] == "finished"


async def test_a_call_that_was_cancelled_is_taken_up_on_the_same_connection(stdio: kit.Server, folder: Path) -> None:
    gate = folder / "gate"
    async with at(stdio) as client:
        call = asyncio.create_task(client.call_tool("run_rollout", asked(until_there(gate))))
        await kit.there(folder / "gate.waits")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        [state] = (await called(client, "list_rollouts"))["rollouts"]
        gate.touch()
        result = await called(client, "finalize_rollout", rollout_id=state["rollout_id"])
        assert result["status"] == "finished" and result["workdir_files"]["answer.txt"] == "Hello."


async def test_many_clients_at_once(http: kit.Server) -> None:
    async def one(number: int) -> str:
        async with at(http, "legacy" if number % 2 else "auto") as client:
            program = f'open("mine.txt", "w").write(ask("I am {number}") + " {number}")'
            files = (await called(client, "run_rollout", **asked(program)))["workdir_files"]
            return str(files["mine.txt"])

    assert await asyncio.gather(*map(one, range(8))) == [f"Hello. {number}" for number in range(8)]


async def test_who_is_let_in(http: kit.Server) -> None:
    good = {"authorization": f"Bearer {KEY}", "accept": "application/json, text/event-stream"}
    port = http.url.split(":")[2].split("/")[0]
    async with httpx2.AsyncClient(trust_env=False, timeout=scaled(5)) as client:

        async def status(**headers: str) -> int:
            sent = {name: value for name, value in {**good, **headers}.items() if value}
            return (await client.post(http.url, json=INITIALIZE, headers=sent)).status_code

        assert await status() == 200
        assert await status(authorization="") == 401
        assert await status(authorization=f"Bearer {KEY}x") == 401
        assert await status(authorization=f"Basic {KEY}") == 401
        assert await status(origin="https://evil.example") == 403
        assert await status(origin="null") == 403
        assert await status(origin="http://localhost:3000") == 200
        assert await status(host=f"evil.example:{port}") == 421
        assert await status(host=f"localhost:{port}") == 200
        refused = await client.post(http.url, json=INITIALIZE)
        assert refused.headers["www-authenticate"].startswith("Bearer") and KEY not in refused.text
        assert (await client.post(http.url, content=bytes(MAX_BYTES + 1), headers=good)).status_code == 413
        assert (await client.get(http.url.replace("/mcp", "/health"))).json() == {"status": "ok"}
        assert (await client.get(http.url.replace("/mcp", "/other"), headers=good)).status_code == 404


def test_what_is_wrong_is_told_before_anything_is_served(folder: Path) -> None:
    server = kit.prepared(folder)
    assert cli.run_rejected("mcp").startswith("no endpoints are configured")
    assert cli.run_rejected("mcp", "--config", server.config, "--http", "nowhere").startswith(
        "http must be HOST:PORT, such as 127.0.0.1:8710, not 'nowhere'"
    )
    short = {"TURNGATE_MCP_KEY": "short"}
    assert "at least 16" in cli.run_rejected("mcp", "--config", server.config, "--http", ":0", env=short)


# A grader or a library that prints, as it might.
_LOUD = """
import os, sys
from turngate.service import rollouts

start = rollouts.Rollouts.start

def loud(self, asked):
    print("printed by a library")
    os.write(1, b"written by another\\n")
    os.system("echo said by a child; cat")
    return start(self, asked)

rollouts.Rollouts.start = loud
from turngate.cli import app
app()
"""


class Raw:
    """A client by hand, which sees every line of stdout."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process = process
        self.stdin = process.stdin
        self.stdout = process.stdout
        self.lines: list[str] = []

    def tell(self, **message: object) -> None:
        self.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        self.stdin.flush()

    def hear(self) -> kit.Json:
        """The next answer."""
        while line := self.stdout.readline().decode():
            self.lines.append(line)
            if "id" in (message := json.loads(line)):
                return message
        raise AssertionError("stdout ended")

    def call(self, number: int, tool: str, **arguments: object) -> None:
        self.tell(id=number, method="tools/call", params={"name": tool, "arguments": arguments})

    def wait_for_exit(self) -> int:
        self.lines += self.stdout.read().decode().splitlines()
        return self.process.wait(scaled(20))


@pytest.fixture
def raw(stdio: kit.Server) -> Iterator[Raw]:
    (stdio.folder / "loud.py").write_text(_LOUD)
    parameters = stdio.parameters(str(stdio.folder / "loud.py"))
    with (
        (stdio.folder / "stderr").open("wb") as stderr,
        subprocess.Popen(
            [parameters.command, *parameters.args],
            env={**os.environ, **stdio.env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        ) as process,
    ):
        client = Raw(process)
        client.tell(**INITIALIZE)
        client.hear()
        client.tell(method="notifications/initialized")
        yield client
        process.kill()


@pytest.mark.parametrize("how", ["SIGTERM", "stdin closes"])
def test_the_end_of_a_server_is_the_end_of_its_sandboxes(raw: Raw, stdio: kit.Server, how: str) -> None:
    raw.call(2, "run_rollout", **asked(until_there(stdio.folder / "never")))
    kit.wait_for(stdio.folder / "never.waits")
    assert stdio.alive() != []
    if how == "SIGTERM":
        raw.process.send_signal(signal.SIGTERM)
    else:
        # And all the while stdout carries nothing but the protocol.
        loud = asked('print("said by the agent"); print(ask("Hi"))', test_script="echo said by the grader")
        raw.call(3, "run_rollout", **loud)
        result = raw.hear()["result"]["structuredContent"]
        assert (result["status"], result["reward"]) == ("finished", 1.0)
        raw.stdin.close()
    told = raw.hear()  # who still listens is told
    result = told["result"]["structuredContent"]
    assert (told["id"], result["status"], result["reward"]) == (2, "cancelled", None) and result["wall_s"] > 0
    assert raw.wait_for_exit() == 0
    assert stdio.alive() == []
    assert all(json.loads(line)["jsonrpc"] == "2.0" for line in raw.lines)
    stderr = (stdio.folder / "stderr").read_text()
    assert all(words in stderr for words in ("printed by a library", "written by another", "said by a child"))


def test_a_client_that_was_killed_is_no_failure_of_the_server(raw: Raw, stdio: kit.Server) -> None:
    raw.call(2, "run_rollout", **asked(until_there(stdio.folder / "never")))
    kit.wait_for(stdio.folder / "never.waits")
    raw.stdout.close()
    raw.stdin.close()
    assert raw.process.wait(scaled(20)) == 0
    assert stdio.alive() == []
    assert "Traceback" not in (stdio.folder / "stderr").read_text()


async def test_over_http_too_and_with_a_key_that_was_made(folder: Path) -> None:
    server = kit.prepared(folder)
    flags = ("mcp", "--config", server.config, "--http", "127.0.0.1:0")
    with cli.start_cli(*flags, TMPDIR=server.env["TMPDIR"]) as running:
        url = kit.listening(running)
        file = folder / "data" / "mcp-key"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        key = file.read_text().strip()
        async with at(kit.Server(folder, url), key=key) as client:
            await client.list_tools()
            call = asyncio.create_task(called(client, "run_rollout", **asked(until_there(folder / "never"))))
            await kit.there(folder / "never.waits")
            running.send(signal.SIGTERM)
            assert (await call)["status"] == "cancelled"
        assert running.wait_for_exit() == 0
        assert key not in running.output
    assert server.alive() == []
    file.chmod(0o644)
    assert "chmod 600" in cli.run_rejected(*flags)
