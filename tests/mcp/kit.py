"""What the tests of `turngate mcp` are written with: real processes of it, the official SDK's clients, and agents that are small programs.

    async with at(server) as client:
        result = await called(client, "run_rollout", **asked('print(ask("Hi"))'))

The engine is scripted, the sandbox is the local one, and the agent is the catalogue's `shell` with a Python for a command: its program
is the instruction.
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
    """A `turngate mcp`: how to start it, or where it is."""

    folder: Path
    url: str = ""  # empty: over stdin and stdout, with a process for each client

    @property
    def config(self) -> Path:
        return self.folder / "turngate.toml"

    @property
    def env(self) -> dict[str, str]:
        """Sandboxes are made below the folder, so that what is left of them can be seen."""
        return {"TMPDIR": str(self.folder / "tmp"), "PYTHONPATH": str(ROOT), "TURNGATE_MCP_KEY": KEY}

    def parameters(self, *program: str) -> StdioServerParameters:
        command = program or ("-m", "turngate")
        return StdioServerParameters(
            command=sys.executable, args=[*command, "mcp", "--config", str(self.config)], env=self.env
        )

    def alive(self) -> list[str]:
        """What is left of its sandboxes: folders, and processes that were started in them."""
        found = [path.name for path in (self.folder / "tmp").glob("turngate-*/*")]
        for place in Path("/proc").iterdir():
            if place.name.isdigit() and int(place.name) != os.getpid():
                try:
                    if f"{self.folder}/tmp/".encode() in (place / "environ").read_bytes():
                        found.append((place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
                except OSError:
                    pass
        return found


def prepared(folder: Path) -> Server:
    """The settings for one, and what its model says. The folder's path is short: unix sockets lie below it."""
    (folder / "tmp").mkdir(parents=True)
    (folder / "script.json").write_text(json.dumps(["Hello.", "And again."]))
    (folder / "turngate.toml").write_text(CONFIG.format(folder=folder, model=MODEL))
    return Server(folder)


@contextmanager
def over_http(folder: Path) -> Iterator[Server]:
    """One that listens, until the block ends."""
    server = prepared(folder)
    with start_cli("mcp", "--config", server.config, "--http", "127.0.0.1:0", **server.env) as running:
        yield Server(folder, listening(running))


def listening(running: CliProcess) -> str:
    """The URL that it says that it serves."""
    running.wait_for_output("serves MCP on")
    running.wait_for_output("/mcp\n")
    return next(word for word in running.output.split() if word.startswith("http") and word.endswith("/mcp"))


@asynccontextmanager
async def at(server: Server, mode: str = "auto", key: str = KEY, **options: Any) -> AsyncIterator[Client]:
    """A client of it. `mode`: `auto` is the newest protocol, `legacy` that of 2025."""
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


async def called(client: Client, tool: str, /, **arguments: Json) -> Json:
    """What a tool answers. The client itself holds it against the tool's output schema."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    [block] = result.content
    assert json.loads(block.text) == result.structured_content  # type: ignore[union-attr]
    return result.structured_content


async def refused(client: Client, tool: str, /, **arguments: Json) -> str:
    """The words of a tool's error."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error and result.structured_content is None
    [block] = result.content
    return block.text  # type: ignore[union-attr, no-any-return]


def asked(program: str, **more: Json) -> dict[str, Json]:
    """Arguments for a rollout whose agent is a Python program."""
    return {"model_key": MODEL, "instruction": PRELUDE + program, "agent_timeout_s": scaled(60), **more}


def until_there(file: Path) -> str:
    """A program that says that it runs, waits for a file, and then asks its model."""
    return f"""
open({str(file) + ".waits"!r}, "w").close()
while not os.path.exists({str(file)!r}):
    time.sleep(0.02)
open("answer.txt", "w").write(ask("Hi"))
"""


async def there(file: Path, seconds: float = 30.0) -> None:
    """Waits for a file that an agent writes."""
    await asyncio.to_thread(wait_for, file, seconds)


def wait_for(file: Path, seconds: float = 30.0) -> None:
    limit = scaled(seconds)
    end = time.monotonic() + limit
    while not file.exists():
        assert time.monotonic() < end, f"there is still no {file} after {limit:.0f} s"
        time.sleep(0.01)
