"""Helpers for the tests of `turngate mcp`: real server processes, the official SDK's clients, and agents that are small programs.

    async with connect(server) as client:
        result = await call_tool(client, "run_rollout", **rollout_arguments('print(ask("Hi"))'))

The engine is scripted and the sandbox is local. The agent is the catalogue's `shell` with Python as its command: its program is the
instruction.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from tests.cli.kit import ROOT, CliProcess, start_cli
from tests.rollout.kit import PRELUDE
from tests.speed import scaled

Json = Any
KEY = "a key of the tests, long enough"
MODEL = "scripted://small"
CONFIG = """
data = "{folder}/data"
sandbox = "local"
agent = "shell"
agents = ["shell"]
running = 6

[agent_options.shell]
command = "exec python3 -"

[endpoints."{model}"]
script = "{folder}/script.json"
about = "for tests"

[endpoints."openai://hosted"]
model = "gpt"
key_env = "TURNGATE_TEST_HOSTED_KEY"
"""


class Server(msgspec.Struct, frozen=True):
    """A `turngate mcp` server: how to start it, or its URL."""

    folder: Path
    url: str = ""  # empty for stdio, with one process per client

    @property
    def config(self) -> Path:
        return self.folder / "turngate.toml"

    @property
    def env(self) -> dict[str, str]:
        """The environment; sandboxes go below the folder, to find leftovers."""
        return {"TMPDIR": str(self.folder / "tmp"), "PYTHONPATH": str(ROOT), "TURNGATE_MCP_KEY": KEY}

    def parameters(self, *program: str) -> StdioServerParameters:
        command = program or ("-m", "turngate")
        return StdioServerParameters(
            command=sys.executable, args=[*command, "mcp", "--config", str(self.config)], env=self.env
        )

    def leftovers(self) -> list[str]:
        """Leftover sandbox folders and processes."""
        found = [path.name for path in (self.folder / "tmp").glob("turngate-*/*")]
        for process in Path("/proc").iterdir():
            if process.name.isdigit() and int(process.name) != os.getpid():
                try:
                    if f"{self.folder}/tmp/".encode() in (process / "environ").read_bytes():
                        found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
                except OSError:
                    pass
        return found


def prepare(folder: Path) -> Server:
    """Write the settings and the model's script. The path must be short enough for unix sockets."""
    (folder / "tmp").mkdir(parents=True)
    (folder / "script.json").write_text(json.dumps(["Hello.", "And again."]))
    (folder / "turngate.toml").write_text(CONFIG.format(folder=folder, model=MODEL))
    return Server(folder)


@contextmanager
def serve_http(folder: Path) -> Iterator[Server]:
    """Run a server over HTTP."""
    server = prepare(folder)
    with start_cli("mcp", "--config", server.config, "--http", "127.0.0.1:0", **server.env) as running:
        yield Server(folder, wait_for_url(running))


def wait_for_url(running: CliProcess) -> str:
    """Wait until the server prints its URL."""
    running.wait_for_output("serves MCP on")
    running.wait_for_output("/mcp\n")
    return next(word for word in running.output.split() if word.startswith("http") and word.endswith("/mcp"))


@asynccontextmanager
async def connect(server: Server, mode: str = "auto", key: str = KEY, **options: Any) -> AsyncIterator[Client]:
    """Connect a client. `mode`: `auto` for the newest protocol, `legacy` for that of 2025."""
    if not server.url:
        async with Client(server.parameters(), mode=mode, **options) as client:
            yield client
        return
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=scaled(60), trust_env=False) as http,
        Client(streamable_http_client(server.url, http_client=http), mode=mode, **options) as client,
    ):
        yield client


async def call_tool(client: Client, tool: str, /, **arguments: Json) -> Json:
    """Call a tool and return its result, which the client validates against the output schema."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    [block] = result.content
    assert json.loads(block.text) == result.structured_content  # type: ignore[union-attr]
    return result.structured_content


async def call_rejected(client: Client, tool: str, /, **arguments: Json) -> str:
    """Call a tool that must fail, and return its error message."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error and result.structured_content is None
    [block] = result.content
    return block.text  # type: ignore[union-attr, no-any-return]


def rollout_arguments(program: str, **more: Json) -> dict[str, Json]:
    """Arguments for a rollout whose agent is a Python program."""
    return {"model_key": MODEL, "instruction": PRELUDE + program, "agent_timeout_s": scaled(60), **more}


def wait_program(file: Path) -> str:
    """A program that creates FILE.waits, waits for FILE, and then calls its model."""
    return f"""
open({str(file) + ".waits"!r}, "w").close()
while not os.path.exists({str(file)!r}):
    time.sleep(0.02)
open("answer.txt", "w").write(ask("Hi"))
"""


async def wait_for_file_async(file: Path, seconds: float = 30.0) -> None:
    """Wait for a file that an agent writes."""
    await asyncio.to_thread(wait_for_file, file, seconds)


def wait_for_file(file: Path, seconds: float = 30.0) -> None:
    limit = scaled(seconds)
    end = time.monotonic() + limit
    while not file.exists():
        assert time.monotonic() < end, f"{file} did not appear within {limit:.0f} s"
        time.sleep(0.01)
