"""What `turngate run` does around a rollout: find or start a gateway, show progress, tell the outcome, clean up on Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from turngate import tasks
from turngate.agents.install import ensure
from turngate.agents.launch import Limits
from turngate.agents.spec import find
from turngate.config import ServeConfig, load
from turngate.errors import ConfigError
from turngate.rollout.client import GatewayClient, admin_key_given
from turngate.rollout.one import Order, Outcome, Progress, Rollout
from turngate.rollout.wayout import WayOut
from turngate.sandboxes import backend
from turngate.sandboxes.base import Resources
from turngate.server.auth import admin_key
from turngate.server.run import embedded, serving
from turngate.types import Json

EXIT_CODES: Mapping[str, int] = {"finished": 0, "failed": 1, "timed out": 1, "limit": 1, "error": 3, "cancelled": 130}
_OFTEN = 5.0  # seconds between plain lines about turns


class Reach(msgspec.Struct, frozen=True):
    """How remote sandboxes get to the gateway."""

    public_url: str = ""
    tunnel: str = ""


def run(order: Order, config: ServeConfig, gateway: str, reach: Reach, *, as_json: bool) -> int:
    """The exit code: 0 finished, 1 the agent did not make it, 3 not the agent's fault, 130 cancelled."""
    console = Console(highlight=False, stderr=as_json)
    outcome = asyncio.run(_run(order, config, gateway, reach, console))
    if outcome.session:
        (order.folder / outcome.session).mkdir(parents=True, exist_ok=True)
        (order.folder / outcome.session / "outcome.json").write_bytes(msgspec.json.format(msgspec.json.encode(outcome)))
    if as_json:
        print(msgspec.json.encode(outcome).decode())
    else:
        tell(outcome, config, gateway, order.folder, console)
    return EXIT_CODES[outcome.status]


async def _run(order: Order, config: ServeConfig, gateway: str, reach: Reach, console: Console) -> Outcome:
    await order.backend.check()
    await order.backend.sweep()
    async with (
        _reached(config, gateway, console) as client,
        WayOut(client.url, reach.public_url, reach.tunnel) as wayout,
    ):
        with Watching(console) as watch:
            rollout = Rollout(order, client, wayout, watch.see)
            task = asyncio.create_task(rollout.run())
            with _interrupts(task, console):
                try:
                    return await task
                except asyncio.CancelledError:
                    return rollout.outcome


@asynccontextmanager
async def _reached(config: ServeConfig, gateway: str, console: Console) -> AsyncIterator[GatewayClient]:
    """A gateway that is named, or that serves the data folder already, or one of our own for as long as this runs."""
    found = None if gateway else serving(Path(config.data))
    if gateway:
        client = GatewayClient(gateway, admin_key_given())
    elif found is not None:
        console.print(f"A gateway serves {config.data} already; using it: {found.url}", style="dim")
        client = GatewayClient(found.url, admin_key(Path(config.data)))
    else:
        async with embedded(config) as address, GatewayClient(address.url, address.admin_key) as client:
            yield client
        return
    async with client:
        yield client


class _interrupts:
    """Ctrl-C ends the rollout, which cleans up; a second one says so; a third gives up."""

    def __init__(self, task: asyncio.Task[Outcome], console: Console) -> None:
        self._task = task
        self._console = console
        self._count = 0
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._interrupted)

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)

    def _interrupted(self) -> None:
        self._count += 1
        if self._count == 1:
            self._console.print("Stopping: the agent is ended and the sandbox removed …", style="yellow")
            self._task.cancel()
        elif self._count == 2:
            self._console.print("Still cleaning up; once more gives up and leaves the sandbox behind.", style="yellow")
        else:
            raise SystemExit(130)


class Watching:
    """Live progress: one line that changes on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(started=time.time())
        # Asked for again at each refresh, so that the clock goes on.
        live = Live(console=console, refresh_per_second=4, transient=True, get_renderable=self._line)
        self._live = live if console.is_terminal else None
        self._stage = ""
        self._told = 0.0

    def __enter__(self) -> Watching:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def see(self, progress: Progress) -> None:
        self._progress = progress
        if self._live is not None:
            return
        now = time.monotonic()
        if progress.stage != self._stage or (progress.turns and now - self._told > _OFTEN):
            self._stage, self._told = progress.stage, now
            self._console.print(self._line())

    def _line(self) -> Text:
        progress = self._progress
        spent = time.time() - progress.started
        line = Text.assemble((f"{int(spent) // 60}:{int(spent) % 60:02d}  ", "dim"), (f"{progress.stage:8}", "bold"))
        if progress.turns:
            line.append(f"  {progress.turns} turns · {progress.sampled_tokens:,} tokens")
        if progress.session:
            line.append(f"  session {progress.session[:12]}", "dim")
        return line


def tell(outcome: Outcome, config: ServeConfig, gateway: str, folder: Path, console: Console) -> None:
    """The outcome, where the trace is, and how to look at it."""
    code = "" if outcome.exit_code is None else f" (exit code {outcome.exit_code})"
    spent = sum(outcome.seconds.values())
    style = {"finished": "green", "error": "red"}.get(outcome.status, "yellow")
    console.print(
        Text.assemble(
            (outcome.status, f"bold {style}"), f"{code} after {spent:.0f} s: {outcome.agent} {outcome.version}"
        )
    )
    if outcome.fault is not None:
        console.print(
            f"  fault   {outcome.fault.boundary}, in stage {outcome.fault.stage}: {outcome.fault.message}", markup=False
        )
    if outcome.stop and outcome.status == "limit":
        console.print(f"  limit   {outcome.stop}")
    if outcome.session:
        roles = ", ".join(f"{count} {role}" for role, count in outcome.roles.items())
        rows = "1 row" if outcome.rows == 1 else f"{outcome.rows} rows"
        console.print(
            f"  trace   {outcome.turns} turns ({roles or 'none'}), {outcome.sampled_tokens:,} sampled tokens, {rows}"
        )
        where = f"--gateway {gateway}" if gateway else f"--data {config.data}"
        console.print(f"  look    turngate show {outcome.session} {where}")
        console.print(f"  files   {folder / outcome.session}")
    for difference in outcome.collected.differences:
        console.print(f"  differs {difference}", style="yellow", markup=False)
    for note in outcome.notes:
        console.print(f"  note    {note}", style="yellow", markup=False)


# ── from flags ──────────────────────────────────────────────────────────────────────────────────────────────────────

_GATEWAY = ("data", "engine", "engine_url", "engine_key_env", "model", "tokenizer", "script", "max_context")


def ordered(given: Mapping[str, Any]) -> int:
    """Run what the flags of `turngate run` ask for."""
    if bool(given["task"]) == bool(given["prompt"]):
        raise ConfigError("task: give either --task PATH or --prompt TEXT", param="task")
    if given["network"] not in ("none", "open"):
        raise ConfigError(f"network: {given['network']!r} is neither none nor open", param="network")
    # A gateway of our own listens where there is room; a port is for `turngate serve`.
    config = load(given["config"], {**{name: given[name] or None for name in _GATEWAY}, "host": "127.0.0.1", "port": 0})
    task = tasks.load(Path(given["task"])) if given["task"] else tasks.said(given["prompt"])
    found = find(given["agent"])
    if found.shadows is not None:
        print(f"agent {found.spec.name}: {found.file} takes the place of {found.shadows}", file=sys.stderr)
    told = Limits() if given["context_tokens"] is None else Limits(context_tokens=_positive(given, "context_tokens"))
    order = Order(
        task=task,
        agent=found.spec,
        installed=ensure(found.spec, lambda line: print(line, file=sys.stderr)),
        backend=backend(given["sandbox"]),
        model=config.model or "turngate",
        timeout_s=_positive(given, "timeout") or task.timeout_s or 1800.0,
        image=given["image"],
        network=given["network"],
        resources=Resources(cpus=_positive(given, "cpus"), memory_mb=_positive(given, "memory_mb")),
        session=_session(given),
        told=told,
        options=_options(given["option"] or ()),
        folder=given["out"] or Path(config.data) / "rollouts",
    )
    reach = Reach(given["public_url"], given["tunnel"])
    return run(order, config, given["gateway"], reach, as_json=given["as_json"])


def _session(given: Mapping[str, Any]) -> dict[str, Json]:
    limits = {"turns": _positive(given, "max_turns"), "sampled_tokens": _positive(given, "max_tokens")}
    limits = {name: value for name, value in limits.items() if value is not None}
    return {"limits": limits} if limits else {}


def _positive(given: Mapping[str, Any], name: str) -> Any:
    value = given[name]
    if value is not None and value <= 0:
        raise ConfigError(f"{name}: {value} must be more than 0", param=name)
    return value


def _options(pairs: Iterable[str]) -> dict[str, str]:
    options = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"set: {pair!r} is not NAME=VALUE", param="set")
        options[name] = value
    return options
