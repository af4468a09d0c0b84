"""What `turngate run` does around a rollout: find or start a gateway, show progress, tell the outcome, clean up on Ctrl-C."""

from __future__ import annotations

import asyncio
import math
import os
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
from rich.console import Console
from rich.text import Text

from turngate import tasks
from turngate.agents.install import Installation, ensure_installed
from turngate.agents.launch import ModelLimits, plan_launch
from turngate.agents.spec import AgentSpec, find_agent
from turngate.cli.terminal import Showing, sanitize, sanitize_line, say
from turngate.cli.terminal import console as new_console
from turngate.client.gateway import GatewayClient, Unreachable
from turngate.client.keys import ADMIN_KEY, read_admin_key, read_key, read_stored_admin_key
from turngate.config import ServeConfig, load_config
from turngate.engines.scripted import MADE_UP
from turngate.errors import ConfigError, DataFolderInUse, Unauthorized
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.outcome import Outcome, RolloutProgress
from turngate.rollout.rollout import Rollout
from turngate.rollout.spec import EndAction, EndPolicy, RolloutSpec
from turngate.sandboxes import get_backend
from turngate.sandboxes.base import Resources
from turngate.server.bind import find_running_gateway
from turngate.server.run import GatewayAddress, run_embedded
from turngate.types import Json

T = TypeVar("T")
INTERRUPTED = 130
EXIT_CODES: Mapping[str, int] = {
    "finished": 0,
    "failed": 1,
    "timed out": 1,
    "limit": 1,
    "error": 3,
    "cancelled": INTERRUPTED,
}
_OFTEN = 5.0  # seconds between plain lines about turns
_LAST_WORDS = 5  # lines of an agent that failed
STOPPING = "Stopping: the agent is ended and its sandbox removed; what was recorded stays …"


class Named(msgspec.Struct, frozen=True):
    """The gateway that was asked for; without a URL, the one that serves the data folder, or one of our own. And what only goes with
    the last of these."""

    url: str = ""
    flags: tuple[str, ...] = ()


class Reach(msgspec.Struct, frozen=True):
    """How remote sandboxes get to the gateway."""

    public_url: str = ""
    tunnel: str = ""


def run(order: RolloutSpec, config: ServeConfig, gateway: Named, reach: Reach, *, as_json: bool) -> int:
    """The exit code: 0 finished, 1 the agent did not make it, 3 not the agent's fault, 130 cancelled."""
    console = new_console(stderr=as_json)
    with stdout_kept(as_json):
        outcome = asyncio.run(stoppable(_run(order, config, gateway, reach, console), console))
    if outcome is None:
        say(console, "cancelled before the rollout began; nothing is left of it", "yellow")
        return INTERRUPTED
    if outcome.session:
        _write(order.folder / outcome.session / "outcome.json", outcome)
    if as_json:
        print(msgspec.json.encode(outcome).decode())
    else:
        tell(
            outcome,
            f"--gateway {gateway.url}" if gateway.url else f"--data {shlex.quote(config.data)}",
            order.folder,
            console,
        )
    return exit_code(outcome)


def exit_code(outcome: Outcome) -> int:
    """A grading that somebody else than the agent spoiled counts as an error, however well the agent ended."""
    spoiled = outcome.kind in ("invalid task", "infrastructure fault")
    return EXIT_CODES["error"] if spoiled else EXIT_CODES[outcome.status]


def stdout_kept(as_json: bool) -> AbstractContextManager[object]:
    """For the one document that is promised there: what a grader's own function prints goes elsewhere."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def _write(path: Path, outcome: Outcome) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(outcome)))
    except OSError as error:
        outcome.notes = (*outcome.notes, f"{path} could not be written: {error.strerror}")


async def _run(
    order: RolloutSpec, config: ServeConfig, gateway: Named, reach: Reach, console: Console
) -> Outcome | None:
    """None: it was cancelled before there was a rollout."""
    outcome = None
    try:
        await order.backend.check()
        await order.backend.sweep()
        async with (
            reached(config, gateway, console) as (client, own),
            GatewayConnector(client.url, reach.public_url, reach.tunnel) as connector,
        ):
            if not order.model:
                order = msgspec.structs.replace(order, model=next(iter(await client.models()), "turngate"))
            with Watching(console) as watch:
                rollout = Rollout(order, client, connector, watch.see)
                try:
                    outcome = await rollout.run()
                except asyncio.CancelledError:
                    heeded()
                    outcome = rollout.outcome
            if own and config.engine == "scripted" and outcome.turns:
                outcome.notes = (*outcome.notes, MADE_UP)
    except asyncio.CancelledError:
        heeded()
    return outcome


def heeded() -> None:
    """The cancellation has done what it was for: what follows is not cancelled."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


@asynccontextmanager
async def reached(config: ServeConfig, gateway: Named, console: Console) -> AsyncIterator[tuple[GatewayClient, bool]]:
    """A gateway that is named, or that serves the data folder already, or one of our own for as long as this runs. And
    whether it is our own."""
    data = Path(config.data)
    if gateway.url:
        async with GatewayClient(gateway.url, read_admin_key()) as client:
            await client.check()  # a wrong key is told before anything is made
            yield client, False
        return
    if (found := find_running_gateway(data)) is not None:
        key = read_key(ADMIN_KEY) or read_stored_admin_key(data) or ""
        async with GatewayClient(found.url, key) as client:
            if await _answers(client, config.data):
                # A file may well be the one that it was started with.
                flags = [name for name in gateway.flags if name != "config"]
                _refuse_own(flags, f"{found.url}, which serves {config.data},")
                say(console, f"A gateway serves {config.data} already: {found.url} is used, with its own engine", "dim")
                yield client, False
                return
    async with _own(config) as address, GatewayClient(address.url, address.admin_key) as client:
        yield client, True


async def _answers(client: GatewayClient, data: str) -> bool:
    """Whether the gateway that serves a folder does so still. One that was killed may have left its address behind."""
    try:
        await client.check()
    except Unreachable:
        return False
    except Unauthorized:
        raise ConfigError(
            f"data: {client.url} serves {data}; set {ADMIN_KEY} to its admin key, or choose another --data folder",
            param="data",
        ) from None
    return True


@asynccontextmanager
async def _own(config: ServeConfig) -> AsyncIterator[GatewayAddress]:
    async with AsyncExitStack() as stack:
        try:
            address = await stack.enter_async_context(run_embedded(config))
        except DataFolderInUse:
            raise ConfigError(
                f"data: {config.data} is in use by another turngate; for several runs at once start "
                f"`turngate serve --data {shlex.quote(config.data)}` first, or choose another --data folder",
                param="data",
            ) from None
        yield address


async def stoppable(work: Coroutine[Any, Any, T], console: Console, *told: str) -> T:
    """Ctrl-C, or being told to end, cancels the work, which cleans up; a second time says so; a third gives up. Work that can be ended
    in more than one way is cancelled as often as there is something to tell."""
    steps = told or (STOPPING,)
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    count = 0

    def interrupted() -> None:
        nonlocal count
        count += 1
        if count <= len(steps):
            say(console, steps[count - 1], "yellow")
            task.cancel()
        elif count == len(steps) + 1:
            say(console, "Still cleaning up; once more gives up, and leaves what is left to the next run.", "yellow")
        else:
            console.show_cursor()
            os._exit(INTERRUPTED)  # a cleanup that hangs would also hang any softer way

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, interrupted)
    try:
        return await task
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


class Watching(Showing):
    """Live progress: one line that changes on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._progress = RolloutProgress(started=time.time())
        self._stage = ""
        self._told = 0.0

    def see(self, progress: RolloutProgress) -> None:
        self._progress = progress
        if self._live is not None:
            if progress.stage != self._stage:  # a short one is shown too
                self._stage = progress.stage
                self._live.refresh()
            return
        now = time.monotonic()
        if progress.stage != self._stage or (progress.turns and now - self._told > _OFTEN):
            self._stage, self._told = progress.stage, now
            say(self._console, self._picture())

    def _picture(self) -> Text:
        progress = self._progress
        spent = time.time() - progress.started
        facts = []
        if progress.turns:
            turns = "1 turn" if progress.turns == 1 else f"{progress.turns} turns"
            facts.append((f"  {turns} · {progress.sampled_tokens:,} tokens", ""))
        if progress.session:
            facts.append((f"  session {progress.session[:12]}", "dim"))
        stage = f"{progress.stage:8}" if facts else progress.stage
        line = Text.assemble((f"{int(spent) // 60}:{int(spent) % 60:02d}  ", "dim"), (stage, "bold"), *facts)
        line.no_wrap, line.overflow = True, "ellipsis"
        return line


def tell(outcome: Outcome, where: str, folder: Path, console: Console) -> None:
    """The outcome, where the trace is, and how to look at it."""
    code = "" if outcome.exit_code is None else f" (exit code {outcome.exit_code})"
    style = {"finished": "green", "error": "red"}.get(outcome.status, "yellow")
    name = f"{outcome.agent} {outcome.version}".strip()
    head = f"{code} after {sum(outcome.seconds.values()):.0f} s: {name} in the {outcome.sandbox} sandbox"
    say(console, Text.assemble((outcome.status, f"bold {style}"), head))
    if outcome.fault is not None:
        fault = outcome.fault
        _line(console, "fault", f"{fault.boundary}, in stage {fault.stage}: {sanitize(fault.message)}")
    if outcome.stop and outcome.status in ("limit", "cancelled"):
        _line(console, "limit" if outcome.status == "limit" else "why", sanitize_line(outcome.stop.replace("_", " ")))
    if outcome.status == "failed":
        said = outcome.collected.stderr.strip() or outcome.collected.stdout.strip()
        for last in said.splitlines()[-_LAST_WORDS:]:
            _line(console, "said", sanitize_line(last)[:300])
    if outcome.kind is not None:
        _grade(outcome, console)
    if outcome.session:
        roles = ", ".join(f"{count} {role}" for role, count in outcome.roles.items())
        turns = "1 turn" if outcome.turns == 1 else f"{outcome.turns} turns"
        rows = "1 row" if outcome.rows == 1 else f"{'?' if outcome.rows is None else outcome.rows} rows"
        kept = "" if outcome.status == "finished" else ", kept"
        counted = f"{turns} ({roles})" if roles else turns
        _line(console, "trace", f"{counted}, {outcome.sampled_tokens:,} sampled tokens, {rows}{kept}")
        _line(console, "look", f"turngate show {outcome.session} {where}")
        _line(console, "files", str(folder / outcome.session))
    if outcome.not_enforced:
        wishes = ", ".join(outcome.not_enforced)
        _line(console, "open", f"not closed off in the {outcome.sandbox} sandbox: {wishes}", "dim")
    for text in outcome.collected.missing:
        _line(console, "missing", sanitize_line(text), "yellow")
    for text in outcome.collected.differences:
        _line(console, "differs", sanitize_line(text), "yellow")
    for text in outcome.notes:
        _line(console, "note", sanitize_line(text), "yellow")


def _grade(outcome: Outcome, console: Console) -> None:
    """What the host decided. A reward that is not known is told as such."""
    grade = outcome.grade
    assert grade is not None
    known = "no reward" if grade.reward is None else f"reward {grade.reward:g}"
    resolved = {True: ", resolved", False: ", not resolved", None: ""}[grade.resolved]
    counts = Counter(grade.cases.values())
    cases = ", ".join(f"{count} {case}" for case, count in counts.most_common())
    style = "green" if grade.reward else "yellow"
    _line(console, "grade", f"{known}{resolved} ({grade.kind}{f'; tests: {cases}' if cases else ''})", style)
    for part in grade.parts:
        reward = "none" if part.reward is None else f"{part.reward:g}"
        _line(
            console,
            "",
            f"{sanitize_line(part.name)}: {reward} (weight {part.weight:g}) {sanitize_line(part.message)}".rstrip(),
        )
    if grade.message:
        _line(console, "why", sanitize_line(grade.message))
    for text in grade.notes:
        _line(console, "aside", sanitize_line(text), "yellow")


def _line(console: Console, name: str, text: str, style: str = "") -> None:
    say(console, f"  {name:8}{text}", style)


# ── from flags ──────────────────────────────────────────────────────────────────────────────────────────────────────

_OWN_GATEWAY = ("config", "engine", "engine_url", "engine_key_env", "tokenizer", "script", "max_context")
_GATEWAY = ("data", "engine", "engine_url", "engine_key_env", "model", "tokenizer", "script", "max_context")


def ordered(given: Mapping[str, Any]) -> int:
    """Run what the flags of `turngate run` ask for."""
    if bool(given["task"]) == bool(given["prompt"]):
        raise ConfigError("task: give either --task PATH or --prompt TEXT", param="task")
    config = gateway_config(given)
    task = tasks.load_task(Path(given["task"])) if given["task"] else tasks.task_from_prompt(given["prompt"])
    chosen = chosen_agent(given, task.instruction)
    order = RolloutSpec(
        task=task,
        agent=chosen.spec,
        installed=chosen.installed,
        backend=get_backend(given["sandbox"]),
        model=config.model,
        timeout_s=positive(given, "timeout") or task.timeout_s or 1800.0,
        image=given["image"],
        network=given["network"],
        resources=Resources(cpus=positive(given, "cpus"), memory_mb=positive(given, "memory_mb")),
        session=session_settings(given),
        grade=given["grade"],
        policy=end_policy(given),
        model_limits=chosen.told,
        options=chosen.options,
        folder=writable(given["out"]) if given["out"] else Path(config.data) / "rollouts",
    )
    reach = Reach(given["public_url"], given["tunnel"])
    return run(order, config, named(given), reach, as_json=given["as_json"])


class Chosen(msgspec.Struct, frozen=True):
    """An agent that is ready to be run."""

    spec: AgentSpec
    installed: Installation
    told: ModelLimits
    options: Mapping[str, str]


def gateway_config(given: Mapping[str, Any]) -> ServeConfig:
    """Of a gateway of our own. What does not go with the one that is named is refused."""
    if given["network"] not in ("none", "open"):
        raise ConfigError(f"network: {given['network']!r} is neither none nor open", param="network")
    if given["gateway"]:
        _refuse_own(named(given).flags, given["gateway"])
        GatewayClient(given["gateway"], read_admin_key())  # so that a wrong one is told before anything is made
    # A gateway of our own listens where there is room; a port is for `turngate serve`.
    return load_config(
        given["config"], {**{name: given[name] or None for name in _GATEWAY}, "host": "127.0.0.1", "port": 0}
    )


def named(given: Mapping[str, Any]) -> Named:
    return Named(given["gateway"], tuple(name for name in _OWN_GATEWAY if given[name]))


def _refuse_own(flags: Iterable[str], gateway: str) -> None:
    for name in flags:
        raise ConfigError(
            f"{name}: the gateway at {gateway} has its own; leave out --{name.replace('_', '-')}", param=name
        )


def chosen_agent(given: Mapping[str, Any], instruction: str) -> Chosen:
    """Found, installed, and tried with an instruction: what cannot be passed on to it is told before anything is made."""
    found = find_agent(given["agent"])
    if found.shadows is not None:
        print(f"agent {found.spec.name}: {found.file} takes the place of {found.shadows}", file=sys.stderr)
    told = (
        ModelLimits()
        if given["context_tokens"] is None
        else ModelLimits(context_tokens=positive(given, "context_tokens"))
    )
    installed = ensure_installed(found.spec, lambda line: print(line, file=sys.stderr))
    options = agent_options(given["option"] or ())
    dry = {"base_url": "", "api_key": "", "model": "", "home": "", "workdir": ""}
    plan_launch(found.spec, installed, prompt=instruction, limits=told, options=options, **dry)
    return Chosen(found.spec, installed, told, options)


def end_policy(given: Mapping[str, Any]) -> EndPolicy:
    """What becomes of agents that did not end well by themselves."""
    for flag in ("on_timeout", "on_failure", "on_limit"):
        if given[flag] not in get_args(EndAction):
            raise ConfigError(f"{flag}: {given[flag]!r} is none of {', '.join(get_args(EndAction))}", param=flag)
    if given["on_lost"] not in ("exclude", "zero"):
        raise ConfigError(f"on_lost: {given['on_lost']!r} is neither exclude nor zero", param="on_lost")
    return EndPolicy(
        timed_out=given["on_timeout"], failed=given["on_failure"], limit=given["on_limit"], lost=given["on_lost"]
    )


def writable(folder: Path) -> Path:
    """A folder that is there or can be made. That it cannot is told now, not when the agent is done."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"out: {folder} cannot be written; choose another --out folder", param="out")
    return folder


def session_settings(given: Mapping[str, Any]) -> dict[str, Json]:
    limits = {"turns": positive(given, "max_turns"), "sampled_tokens": positive(given, "max_tokens")}
    limits = {name: value for name, value in limits.items() if value is not None}
    return {"limits": limits} if limits else {}


def positive(given: Mapping[str, Any], name: str) -> Any:
    value = given[name]
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{name}: {value} must be more than 0", param=name)
    return value


def agent_options(pairs: Iterable[str]) -> dict[str, str]:
    options = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"set: {pair!r} is not NAME=VALUE", param="set")
        options[name] = value
    return options
