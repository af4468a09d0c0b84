"""Disconnects, concurrent clients, HTTP access control, a clean stdout, and shutdown."""

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
from tests.mcp.kit import KEY, call_tool, connect, rollout_arguments, wait_program
from tests.speed import scaled
from turngate.mcp.http import MAX_BYTES

pytestmark = [pytest.mark.process, pytest.mark.full]

INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}


async def disconnect_during_rollout(server: kit.Server, mode: str, program: str, running: Path) -> str:
    """Call run_rollout, disconnect during it, and return the rollout id."""
    received_progress = asyncio.Event()
    messages: list[str] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        messages.append(message or "")
        received_progress.set()

    async def call() -> None:
        async with connect(server, mode) as client:
            await client.call_tool("run_rollout", rollout_arguments(program), progress_callback=progress)

    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await received_progress.wait()
            await kit.wait_for_file_async(running)
            scope.cancel()
    return messages[0].split()[1].rstrip(":")


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_rollout_survives_disconnect(http: kit.Server, folder: Path, mode: str) -> None:
    gate = folder / "gate"
    rollout = await disconnect_during_rollout(http, mode, wait_program(gate), folder / "gate.waits")
    async with connect(http) as client:
        assert (await call_tool(client, "get_state", rollout_id=rollout))["status"] == "running"
        gate.touch()
        assert (await call_tool(client, "finalize_rollout", rollout_id=rollout))["status"] == "finished"


async def test_cancelled_call_is_resumed_on_same_connection(stdio: kit.Server, folder: Path) -> None:
    gate = folder / "gate"
    async with connect(stdio) as client:
        call = asyncio.create_task(client.call_tool("run_rollout", rollout_arguments(wait_program(gate))))
        await kit.wait_for_file_async(folder / "gate.waits")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        [state] = (await call_tool(client, "list_rollouts"))["rollouts"]
        gate.touch()
        result = await call_tool(client, "finalize_rollout", rollout_id=state["rollout_id"])
        assert result["status"] == "finished" and result["workdir_files"]["answer.txt"] == "Hello."


async def test_concurrent_clients(http: kit.Server) -> None:
    async def run_client(number: int) -> str:
        async with connect(http, "legacy" if number % 2 else "auto") as client:
            program = f'open("mine.txt", "w").write(ask("I am {number}") + " {number}")'
            files = (await call_tool(client, "run_rollout", **rollout_arguments(program)))["workdir_files"]
            return str(files["mine.txt"])

    assert await asyncio.gather(*map(run_client, range(8))) == [f"Hello. {number}" for number in range(8)]


async def test_http_access_control(http: kit.Server) -> None:
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


def test_invalid_options_fail_before_serving(folder: Path) -> None:
    server = kit.prepare(folder)
    empty = folder / "empty.toml"
    empty.write_text('sandbox = "local"\n')
    assert cli.run_rejected("mcp", "--config", empty).startswith("no endpoints are configured")
    assert cli.run_rejected("mcp", "--config", server.config, "--http", "nowhere").startswith(
        "--http must be HOST:PORT, with a port from 0 to 65535, such as 127.0.0.1:8710, not 'nowhere'"
    )
    short = {"TURNGATE_MCP_KEY": "short"}
    assert "at least 16" in cli.run_rejected("mcp", "--config", server.config, "--http", ":0", env=short)


# A server with a library that prints to stdout.
_PRINTING_SERVER = """
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


class RawClient:
    """A hand-written client that reads every line of stdout."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process = process
        self.stdin = process.stdin
        self.stdout = process.stdout
        self.lines: list[str] = []

    def send(self, **message: object) -> None:
        self.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        self.stdin.flush()

    def receive(self) -> kit.Json:
        """Read the next reply."""
        while line := self.stdout.readline().decode():
            self.lines.append(line)
            if "id" in (message := json.loads(line)):
                return message
        raise AssertionError("stdout ended")

    def call(self, number: int, tool: str, **arguments: object) -> None:
        self.send(id=number, method="tools/call", params={"name": tool, "arguments": arguments})

    def wait_for_exit(self) -> int:
        self.lines += self.stdout.read().decode().splitlines()
        return self.process.wait(scaled(20))


@pytest.fixture
def raw_client(stdio: kit.Server) -> Iterator[RawClient]:
    (stdio.folder / "loud.py").write_text(_PRINTING_SERVER)
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
        client = RawClient(process)
        client.send(**INITIALIZE)
        client.receive()
        client.send(method="notifications/initialized")
        yield client
        process.kill()


@pytest.mark.parametrize("ending", ["SIGTERM", "stdin closes"])
def test_stopping_server_ends_sandboxes(raw_client: RawClient, stdio: kit.Server, ending: str) -> None:
    raw_client.call(2, "run_rollout", **rollout_arguments(wait_program(stdio.folder / "never")))
    kit.wait_for_file(stdio.folder / "never.waits")
    assert stdio.leftovers() != []
    if ending == "SIGTERM":
        raw_client.process.send_signal(signal.SIGTERM)
    else:
        # Meanwhile stdout carries only the protocol.
        loud = rollout_arguments('print("said by the agent"); print(ask("Hi"))', test_script="echo said by the grader")
        raw_client.call(3, "run_rollout", **loud)
        result = raw_client.receive()["result"]["structuredContent"]
        assert (result["status"], result["reward"]) == ("finished", 1.0)
        raw_client.stdin.close()
    reply = raw_client.receive()  # clients that still listen get a result
    result = reply["result"]["structuredContent"]
    assert (reply["id"], result["status"], result["reward"]) == (2, "cancelled", None) and result["wall_s"] > 0
    assert raw_client.wait_for_exit() == 0
    assert stdio.leftovers() == []
    assert all(json.loads(line)["jsonrpc"] == "2.0" for line in raw_client.lines)
    stderr = (stdio.folder / "stderr").read_text()
    assert all(messages in stderr for messages in ("printed by a library", "written by another", "said by a child"))


def test_killed_client_is_not_a_server_error(raw_client: RawClient, stdio: kit.Server) -> None:
    raw_client.call(2, "run_rollout", **rollout_arguments(wait_program(stdio.folder / "never")))
    kit.wait_for_file(stdio.folder / "never.waits")
    raw_client.stdout.close()
    raw_client.stdin.close()
    assert raw_client.process.wait(scaled(20)) == 0
    assert stdio.leftovers() == []
    assert "Traceback" not in (stdio.folder / "stderr").read_text()


async def test_server_without_configuration(folder: Path) -> None:
    flags = ("mcp", "--data", folder / "data", "--sandbox", "local", "--http", "127.0.0.1:0")
    with cli.start_cli(*flags, **kit.prepare(folder).env) as running:
        url = kit.wait_for_url(running)
        [line] = [line for line in running.plain.splitlines() if "scripted://demo" in line]
        assert "--config FILE" in line and "[endpoints." in line
        async with connect(kit.Server(folder, url)) as client:
            [endpoint] = (await kit.call_tool(client, "list_endpoints"))["endpoints"]
        assert endpoint["key"] == "scripted://demo"


async def test_http_server_with_generated_key(folder: Path) -> None:
    server = kit.prepare(folder)
    flags = ("mcp", "--config", server.config, "--http", "127.0.0.1:0")
    with cli.start_cli(*flags, TMPDIR=server.env["TMPDIR"]) as running:
        url = kit.wait_for_url(running)
        file = folder / "data" / "mcp-key"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        key = file.read_text().strip()
        async with connect(kit.Server(folder, url), key=key) as client:
            await client.list_tools()
            call = asyncio.create_task(
                call_tool(client, "run_rollout", **rollout_arguments(wait_program(folder / "never")))
            )
            await kit.wait_for_file_async(folder / "never.waits")
            running.send(signal.SIGTERM)
            assert (await call)["status"] == "cancelled"
        assert running.wait_for_exit() == 0
        assert key not in running.output
    assert server.leftovers() == []
    file.chmod(0o644)
    assert "chmod 600" in cli.run_rejected(*flags)
