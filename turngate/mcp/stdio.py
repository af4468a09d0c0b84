"""MCP over stdin and stdout, for the client that started the process (`turngate mcp`).

The SDK reserves stdout for the protocol. While the server is running, anything else that this process or its children write to file
descriptor 1 is redirected to stderr.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import anyio
from mcp.server import Server
from mcp.server.stdio import stdio_server

from turngate.mcp.server import build_server
from turngate.service.rollouts import Rollouts


async def serve(rollouts: Rollouts) -> None:
    """Serve until the client closes stdin or the task is cancelled.

    Then abort all rollouts and remove their sandboxes. Calls that are waiting for a rollout are answered if the client is still reading.
    """
    try:
        await _serve(rollouts)
    except* BrokenPipeError:  # the client has exited, and its rollouts have been aborted
        pass


async def _serve(rollouts: Rollouts) -> None:
    server, lines = build_server(rollouts), _StdinLines()
    async with stdio_server(stdin=lines) as (reading, writing):
        async with rollouts:
            task = asyncio.create_task(_run(server, reading, writing))
            drained = asyncio.create_task(lines.drained.wait())
            await asyncio.wait({task, drained}, return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()
        lines.closing.set()
        await asyncio.gather(task, drained, return_exceptions=True)
        sys.stdout.flush()  # while it is still redirected: buffered output must not reach the client


async def _run(server: Server[Any], reading: Any, writing: Any) -> None:
    await server.run(reading, writing, server.create_initialization_options())


class _StdinLines(anyio.AsyncFile[str]):
    """The lines of stdin, read in a daemon thread because the SDK's own reader cannot be cancelled while it waits for input.

    Child processes get an empty stdin. `drained` is set after the last line. The SDK drops unanswered calls when its input ends, so
    the end of the input is withheld until `closing` is set.
    """

    def __init__(self) -> None:
        self.drained, self.closing = asyncio.Event(), asyncio.Event()
        stdin = os.dup(0)
        with open(os.devnull, "rb") as empty:
            os.dup2(empty.fileno(), 0)
        super().__init__(os.fdopen(stdin, encoding="utf-8", errors="replace", closefd=False))

    async def __aiter__(self) -> AsyncIterator[str]:
        loop, lines = asyncio.get_running_loop(), asyncio.Queue[str]()
        stdin = self.wrapped

        def read() -> None:
            for line in stdin:
                loop.call_soon_threadsafe(lines.put_nowait, line)
            loop.call_soon_threadsafe(lines.put_nowait, "")

        threading.Thread(target=read, name="stdin", daemon=True).start()
        while line := await lines.get():
            yield line
        self.drained.set()
        await self.closing.wait()
