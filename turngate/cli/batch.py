"""What `turngate batch` does around a batch: find or start a gateway, show how far it is, and tell at the end what came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from turngate import tasks
from turngate.cli.run import (
    INTERRUPTED,
    Chosen,
    Named,
    Reach,
    chosen_agent,
    end_policy,
    gateway_config,
    heeded,
    named,
    positive,
    reached,
    session_settings,
    stdout_kept,
    stoppable,
    writable,
)
from turngate.cli.terminal import Showing, sanitize_line, say
from turngate.cli.terminal import console as new_console
from turngate.common.aio import run_to_completion
from turngate.config import ServeConfig
from turngate.engines.scripted import MADE_UP
from turngate.errors import ConfigError
from turngate.rollout import plot
from turngate.rollout.batch import Batch, BatchResult
from turngate.rollout.concurrency import Bounds, SlotState
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.ledger import LEDGER_NAME, ROLLOUT_CLASSES
from turngate.rollout.plan import BatchPlan
from turngate.rollout.progress import BatchProgress
from turngate.rollout.summary import GroupStats as Odd
from turngate.rollout.summary import RolloutStats, Summary
from turngate.sandboxes import get_backend
from turngate.sandboxes.base import Backend, Resources
from turngate.tasks.task import Task

STOPPED = 3
STOPPING = (
    "Stopping: agents are ended and their sandboxes removed, what others have left is still graded (Ctrl-C again: it is not); "
    "the same command goes on with what is left …"
)
AT_ONCE = "Stopping without grading what is left; the same command goes on with it …"
_OFTEN = 10.0  # seconds between plain lines
_WIDE = 110  # columns, with which there is room for the phases
_MOST_TASKS = 40  # in the table
_MOST_ODD = 10  # groups that are named
_PLACES: Mapping[SlotState, str] = {
    "waiting": "waiting",
    "start": "starting",
    "ready": "warm",
    "run": "running",
    "done": "ending",
    "grade": "grading",
}
_STYLES = {"graded": "green", "agent failed": "yellow", "invalid task": "magenta", "infrastructure fault": "red"}


def ordered(given: Mapping[str, Any]) -> int:
    """Run what the flags of `turngate batch` ask for. The exit code."""
    config = gateway_config(given)
    wanted = tuple(tasks.read_tasks(given["tasks"], only=given["only"] or (), limit=given["limit"]))
    chosen = chosen_agent(given, max((task.instruction for task in wanted), key=len))
    made = get_backend(given["sandbox"])
    out = writable(given["out"]) if given["out"] else None
    # What is wrong with a number is told before a gateway is started.
    _plan(given, wanted, chosen, made, model="", folder=out or Path())
    console = new_console(stderr=given["as_json"])

    def planned(model: str) -> BatchPlan:
        plan = _plan(given, wanted, chosen, made, model=config.model or model, folder=out or Path())
        if out is None:
            folder = Path(config.data) / "batches" / plan.fingerprint()
            plan = msgspec.structs.replace(plan, folder=folder)
        if given["resume"] and not (plan.folder / LEDGER_NAME).is_file():
            raise ConfigError(f"resume: {plan.folder} holds no batch; leave out --resume to begin one", param="resume")
        return plan

    reach = Reach(given["public_url"], given["tunnel"])
    work = _run(planned, config, named(given), reach, console)
    with stdout_kept(given["as_json"]):
        result, interrupted = asyncio.run(stoppable(work, console, STOPPING, AT_ONCE))
    if result is None:
        say(console, "cancelled before the batch began", "yellow")
        return INTERRUPTED
    kept = _kept(result, console)
    if given["as_json"]:
        print(msgspec.json.encode(result.summary).decode())
    tell(result, console)
    for line in kept:
        say(console, line, "dim")
    if not result.complete:
        say(console, f"{_left(result)} left; the same command goes on with them", "yellow")
    return INTERRUPTED if interrupted else 0 if result.complete and not result.stopped else STOPPED


def _plan(
    given: Mapping[str, Any], wanted: tuple[Task, ...], chosen: Chosen, made: Backend, *, model: str, folder: Path
) -> BatchPlan:
    return BatchPlan(
        tasks=wanted,
        agent=chosen.spec,
        installed=chosen.installed,
        backend=made,
        model=model,
        folder=folder,
        name=given["name"],
        n=given["n"],
        rounds=given["rounds"],
        bounds=Bounds(
            running=given["concurrency"], starting=given["starting"], grading=given["grading"], warm=given["warm"]
        ),
        retries=given["retries"],
        stale_retries=given["stale_retries"],
        seed=given["seed"],
        timeout_s=positive(given, "timeout"),
        image=given["image"],
        network=given["network"],
        resources=Resources(cpus=positive(given, "cpus"), memory_mb=positive(given, "memory_mb")),
        session=session_settings(given),
        model_limits=chosen.told,
        options=chosen.options,
        policy=end_policy(given),
        grade=given["grade"],
        keep_work=given["keep_work"],
    )


async def _run(
    planned: Callable[[str], BatchPlan], config: ServeConfig, gateway: Named, reach: Reach, console: Console
) -> tuple[BatchResult | None, bool]:
    """What came of it, and whether somebody stopped it. None: there was no batch yet."""
    batch: Batch | None = None
    try:
        async with (
            reached(config, gateway, console) as (client, own),
            GatewayConnector(client.url, reach.public_url, reach.tunnel) as connector,
        ):
            model = config.model or next(iter(await client.models()), "turngate")
            plan = await asyncio.to_thread(planned, model)
            times = f" × {plan.rounds} rounds" if plan.rounds > 1 else ""
            say(console, f"{plan.total} rollouts ({len(plan.tasks)} tasks × {plan.n}{times}) in {plan.folder}", "dim")
            if own and config.engine == "scripted":
                say(console, f"note: {MADE_UP}", "dim")
            with Watching(console, plan.total) as watching:
                batch = Batch(plan, client, connector, watching.see)
                return await _to_its_end(batch)
    except asyncio.CancelledError:
        heeded()
    return (None if batch is None else batch.result), True


async def _to_its_end(batch: Batch) -> tuple[BatchResult, bool]:
    """And whether somebody stopped it. Being cancelled once ends the agents, twice everything."""
    running = asyncio.create_task(batch.run())
    try:
        try:
            return await asyncio.shield(running), False
        except asyncio.CancelledError:
            if running.done():
                raise
            heeded()
            await batch.wind_up()
            return await asyncio.shield(running), True
    except asyncio.CancelledError:
        running.cancel()
        await run_to_completion(_ended(running))
        raise


async def _ended(running: asyncio.Task[BatchResult]) -> None:
    await asyncio.wait([running])
    if not running.cancelled():
        running.exception()  # what stopped it is told already


def _left(result: BatchResult) -> str:
    left = result.summary.overall.wanted - result.summary.overall.finished
    return "1 rollout is" if left == 1 else f"{left} rollouts are"


def _kept(result: BatchResult, console: Console) -> list[str]:
    """The summary and the picture as files. That they cannot be written does not make the batch undone."""
    files: dict[str, bytes] = {
        "summary.json": msgspec.json.format(msgspec.json.encode(result.summary)),
        "plot.svg": plot.svg(result.summary, result.finished).encode("utf-8", "backslashreplace"),
    }
    kept = []
    for name, data in files.items():
        try:
            (result.folder / name).write_bytes(data)
            kept.append(f"  {name:13} {result.folder / name}")
        except OSError as error:
            say(console, f"{result.folder / name} could not be written: {error.strerror}", "yellow")
    return [*kept, f"  {LEDGER_NAME:13} {result.folder / LEDGER_NAME}"]


# ── while it runs ───────────────────────────────────────────────────────────────────────────────────────────────────


class Watching(Showing):
    """Live progress: a few lines that change on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, total: int) -> None:
        super().__init__(console)
        self._tally = BatchProgress(total=total)
        self._noted = 0
        self._told = time.monotonic()

    def see(self, tally: BatchProgress) -> None:
        self._tally = tally
        for note in tally.notes[self._noted :]:
            say(self._console, sanitize_line(note), "yellow")
        self._noted = len(tally.notes)
        if self._live is None and time.monotonic() - self._told > _OFTEN:
            self._told = time.monotonic()
            say(self._console, self._line())

    def _line(self) -> str:
        return "  ".join([self._how_far(), *self._so_far(), self._classes(), self._where()])

    def _picture(self) -> Group:
        tally = self._tally
        head = Table.grid(padding=(0, 2))
        head.add_row(ProgressBar(total=max(tally.total, 1), completed=tally.done, width=40), self._how_far())
        lines = [Text("  ".join(self._so_far())), Text(self._classes()), Text(self._where(), style="dim")]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(head, *lines)

    def _how_far(self) -> str:
        tally = self._tally
        left = tally.remaining_s
        eta = "" if left is None else f", {_clock(left)} left"
        return f"{_clock(time.monotonic() - tally.started)}  {tally.done}/{tally.total} rollouts{eta}"

    def _so_far(self) -> list[str]:
        tally = self._tally
        facts = [] if tally.pass_rate is None else [f"pass rate {tally.pass_rate:.1%}"]
        facts += [] if tally.mean_reward is None else [f"mean reward {tally.mean_reward:.3f}"]
        return [*facts, f"{tally.tokens_per_s:,.0f} tokens/s"]

    def _classes(self) -> str:
        return " · ".join(f"{self._tally.kinds[kind]} {kind}" for kind in ROLLOUT_CLASSES if self._tally.kinds[kind])

    def _where(self) -> str:
        tally = self._tally
        places = [f"{tally.states[place]} {name}" for place, name in _PLACES.items() if tally.states[place]]
        return ", ".join([*places, *([f"{tally.retrying} to be tried again"] if tally.retrying else [])])


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# ── at the end ──────────────────────────────────────────────────────────────────────────────────────────────────────


def tell(result: BatchResult, console: Console) -> None:
    """The table, the groups to look at, the pictures."""
    summary = result.summary
    console.print(_table(summary, wide=console.width >= _WIDE))
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in summary.overall.phases.items())
    if summary.rounds:
        console.print(_rounds(summary))
    say(
        console, f"  mean seconds: {phases or 'none'}; {summary.overall.attempts} attempts in {_clock(summary.seconds)}"
    )
    for kind, said in summary.messages.items():
        for message, count in said:
            say(console, f"  {count} × {kind}: {sanitize_line(message)}", _STYLES.get(kind, ""))
    _odd(console, "without signal (every reward is the same)", summary.no_signal, lambda g: f"{g.reward:g}")
    _odd(console, "shrunken (fewer rewards than rollouts)", summary.shrunken, lambda g: f"{g.graded} of {g.wanted}")
    console.print()
    for panel in plot.panels(summary, result.finished):
        head, *bars = plot.lines(panel)
        say(console, head, "bold")
        for line in bars:
            say(console, line)
    if result.stopped:
        say(console, f"stopped early: {sanitize_line(result.stopped)}", "red")


def _table(summary: Summary, *, wide: bool) -> Table:
    ks = sorted({1, summary.n})
    table = Table(title=f"Batch {summary.batch}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("task", overflow="fold", min_width=10)
    phases = ("start s", "run s", "grade s") if wide else ()
    for heading in ("graded", "reward", *(f"pass@{k}" for k in ks), "turns", "tokens", *phases):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("without a reward", overflow="fold")
    for task in summary.tasks[:_MOST_TASKS]:
        table.add_row(sanitize_line(task.task), *_cells(task, ks, wide=wide))
    if (more := len(summary.tasks) - _MOST_TASKS) > 0:
        table.add_row(Text(f"… and {more} more, in summary.json", style="dim"))
    table.add_section()
    table.add_row(Text("all", style="bold"), *_cells(summary.overall, ks, wide=wide))
    return table


def _rounds(summary: Summary) -> Table:
    """How it went on from round to round."""
    ks = sorted({1, summary.n})
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for heading in ("round", "graded", "reward", *(f"pass@{k}" for k in ks), "turns", "tokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("without a reward", overflow="fold")
    for numbers in summary.rounds:
        table.add_row(str(numbers.round), *_cells(numbers, ks, wide=False))
    return table


def _cells(numbers: RolloutStats, ks: Sequence[int], *, wide: bool) -> list[str | Text]:
    estimates = {p.k: p.estimate for p in numbers.pass_at}
    phases = (numbers.phases.get("start"), numbers.phases.get("run"), numbers.phases.get("grade"))
    others = [
        Text(f"{count} {kind}", style=_STYLES.get(kind, ""))
        for kind, count in numbers.kinds.items()
        if kind != "graded"
    ]
    missing = numbers.wanted - numbers.finished
    return [
        f"{numbers.graded}/{numbers.wanted}",
        _number(numbers.mean_reward, ".3f"),
        *(_number(estimates.get(k), ".1%") for k in ks),
        _number(numbers.mean_turns, ".1f"),
        _number(numbers.mean_tokens, ",.0f"),
        *(_number(seconds, ".1f") for seconds in (phases if wide else ())),
        Text(", ").join([*others, *([Text(f"{missing} to be done", style="dim")] if missing else [])]),
    ]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _odd(console: Console, what: str, groups: Sequence[Odd], shown: Callable[[Odd], str]) -> None:
    if not groups:
        return
    named: Iterable[str] = (
        f"{sanitize_line(group.task)}{f'@{group.round}' if group.round else ''} ({shown(group)})"
        for group in groups[:_MOST_ODD]
    )
    more = f" and {len(groups) - _MOST_ODD} more" if len(groups) > _MOST_ODD else ""
    say(console, f"  groups {what}: {', '.join(named)}{more}", "yellow")
