"""MCP over stdin and stdout: one client, which is whoever started us. Called by `turngate mcp`.

The SDK keeps stdout for the protocol: while it serves, whatever else writes to descriptor 1, in this process or in one that it
starts, goes to stderr.
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
    """Until the client closes our stdin, or this is cancelled. Either way whatever runs is aborted, and its sandboxes are gone. Where
    the client still listens, the calls that waited for it are answered first."""
    try:
        await _serve(rollouts)
    except* BrokenPipeError:  # the client is gone altogether, and so is whatever ran
        pass


async def _serve(rollouts: Rollouts) -> None:
    server, lines = build_server(rollouts), _StdinLines()
    async with stdio_server(stdin=lines) as (reading, writing):
        async with rollouts:
            task = asyncio.create_task(_run(server, reading, writing))
            drained = asyncio.create_task(lines.drained.wait())
            await asyncio.wait({task, drained}, return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()
        lines.over.set()
        await asyncio.gather(task, drained, return_exceptions=True)
        sys.stdout.flush()  # what was printed meanwhile, and lies in a buffer, is not for the client either


async def _run(server: Server[Any], reading: Any, writing: Any) -> None:
    await server.run(reading, writing, server.create_initialization_options())


class _StdinLines(anyio.AsyncFile[str]):
    """The lines of stdin, read in a thread that nobody waits for: the SDK's own cannot be cancelled while the client is silent. What we
    start has no stdin.

    `drained`: all were read. The SDK learns of their end when `over` is set, because it cuts the calls that are not answered by then."""

    def __init__(self) -> None:
        self.drained, self.over = asyncio.Event(), asyncio.Event()
        own = os.dup(0)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        super().__init__(os.fdopen(own, encoding="utf-8", errors="replace", closefd=False))

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
        await self.over.wait()
