"""`turngate engines` and its subcommands: list the engines of a running gateway, and add, drain or remove one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from rich.table import Table

from turngate.client.engine_pool import EnginePoolClient
from turngate.client.keys import read_admin_key
from turngate.client.protocol import EnginesView, EngineView
from turngate.common.terminal import console as new_console
from turngate.common.terminal import say

Change = Callable[[EnginePoolClient], Awaitable[EnginesView]]


def change_engines(gateway: str, change: Change, as_json: bool) -> None:
    """List or change the engines of a gateway, and print the list that the gateway returns."""
    view = asyncio.run(_apply(gateway, change))
    if as_json:
        print(msgspec.json.encode(view).decode())
        return
    _print_engines(view)


async def _apply(gateway: str, change: Change) -> EnginesView:
    async with EnginePoolClient(gateway, read_admin_key()) as client:
        return await change(client)


def _print_engines(view: EnginesView) -> None:
    console = new_console()
    if not view.engines:
        say(
            console,
            "No vllm or sglang engines are listed. If the gateway was started with --engine vllm or sglang, add one with: "
            "turngate engines add URL. If TURNGATE_ADMIN_KEY is an API key, set it to the admin key: API keys cannot list engines.",
        )
        return
    table = Table(box=None, pad_edge=False)
    for name in ("engine", "state", "calls", "running", "waiting", "KV use", "sessions"):
        table.add_column(name, justify="left" if name in ("engine", "state") else "right")
    for engine in view.engines:
        use = "–" if engine.kv_use is None else f"{engine.kv_use:.0%}"
        counts = ["–" if count is None else str(count) for count in (engine.in_flight, engine.running, engine.waiting)]
        table.add_row(engine.url, _describe_state(engine), *counts, use, str(engine.sessions))
    console.print(table)
    if view.saturated:
        say(console, f"No engine has room for more calls. Calls waiting in the gateway: {view.waiting}.")


def _describe_state(engine: EngineView) -> str:
    if engine.state == "failed":
        return f"failed: {engine.detail}"
    if not engine.up:
        return f"down: {engine.detail}" if engine.detail else "down"
    return "crowded" if engine.crowded and engine.state == "active" else engine.state
