"""`turngate batch`: run a batch, show its progress, and print its summary."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from turngate import tasks
from turngate.cli.cluster import choose_cluster, open_batch_executor, start_shared_gateway
from turngate.cli.gateway_choice import (
    GatewayChoice,
    RemoteAccess,
    choose_gateway,
    connect_gateway,
    load_gateway_config,
)
from turngate.cli.options import BatchOptions
from turngate.cli.prepare import (
    PreparedAgent,
    build_end_policy,
    build_session_settings,
    parse_network,
    prepare_agent,
    require_positive,
    require_writable,
)
from turngate.cli.run import reserve_stdout
from turngate.cli.signals import INTERRUPTED, absorb_cancellation, cancel_on_signal
from turngate.common.aio import run_to_completion
from turngate.common.terminal import LiveDisplay, sanitize_line, say
from turngate.common.terminal import console as new_console
from turngate.config import REFERENCE_SCRIPT, ServeConfig
from turngate.engines.scripted import SYNTHETIC_NOTE
from turngate.errors import ConfigError
from turngate.rollout import plot
from turngate.rollout.batch import Batch, BatchResult
from turngate.rollout.batch_replay import BATCH_REPLAY_NOTE, BatchReplay, mark_replay, play_references
from turngate.rollout.cluster.open_cluster import ClusterChoice
from turngate.rollout.concurrency import Bounds, SlotState
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.ledger import LEDGER_NAME
from turngate.rollout.outcome import ROLLOUT_CLASSES
from turngate.rollout.plan import BatchPlan
from turngate.rollout.progress import BatchProgress
from turngate.rollout.summary import GroupStats, RolloutStats, Summary
from turngate.sandboxes import get_backend
from turngate.sandboxes.base import Backend, Resources
from turngate.tasks.task import Task

STOPPED_EARLY = 3  # exit code
STOPPING = (
    "Stopping: ending agents and removing their sandboxes. The work of finished agents is still graded; press Ctrl-C again to skip grading."
    " Run the same command to resume the batch …"
)
STOPPING_NOW = "Stopping without grading. Run the same command to resume the batch …"
_LINE_EVERY_S = 10.0  # interval between progress lines if the output is not a terminal
_WIDE = 110  # minimum terminal width at which the table has a column for each phase
_MAX_TASKS = 40  # maximum number of tasks in the table
_MAX_GROUPS = 10  # maximum number of groups named in a line
_STATES: Mapping[SlotState, str] = {
    "waiting": "waiting",
    "start": "starting",
    "ready": "warm",
    "run": "running",
    "done": "ending",
    "grade": "grading",
}
_STYLES = {"graded": "green", "agent failed": "yellow", "invalid task": "magenta", "infrastructure fault": "red"}


def run_batch(options: BatchOptions) -> int:
    """Run the batch described by the flags, and return the exit code."""
    parse_network(options.network)
    config = load_gateway_config(options)
    selected = tuple(tasks.read_tasks(options.tasks, only=options.only or (), limit=options.limit))
    agent = prepare_agent(
        options.agent,
        options=options.option,
        context_tokens=options.context_tokens,
        instruction=max((task.instruction for task in selected), key=len),
        sandbox=options.sandbox,
    )
    sandboxes = get_backend(options.sandbox)
    out = require_writable(options.out) if options.out else None
    # Build a plan now, so that invalid numbers are reported before a gateway is started.
    checked = _build_plan(options, selected, agent, sandboxes, model="", folder=out or Path())
    console = new_console(stderr=options.as_json)

    cluster = choose_cluster(options, config)
    replay = play_references(checked, config) if config.script == REFERENCE_SCRIPT and cluster is None else None

    def build_plan(model: str, is_replay: bool) -> BatchPlan:
        plan = _build_plan(options, selected, agent, sandboxes, model=config.model or model, folder=out or Path())
        if is_replay:
            plan = mark_replay(plan)
        if out is None:
            folder = config.folder / "batches" / plan.fingerprint()
            plan = msgspec.structs.replace(plan, folder=folder)
        if options.resume and not (plan.folder / LEDGER_NAME).is_file():
            raise ConfigError(
                f"--resume: {plan.folder} contains no batch; to resume a batch, pass the same flags as when you started it; to start a "
                "new one, remove --resume",
                param="resume",
            )
        return plan

    access = RemoteAccess(options.public_url, options.tunnel)
    work = _run(build_plan, config, choose_gateway(options), access, console, cluster, replay)
    with reserve_stdout(options.as_json):
        result, interrupted = asyncio.run(cancel_on_signal(work, console, STOPPING, STOPPING_NOW))
    if result is None:
        say(console, "Cancelled before the batch started.", "yellow")
        return INTERRUPTED
    written = _write_files(result, console)
    if options.as_json:
        print(msgspec.json.encode(result.summary).decode())
    print_result(result, console)
    for line in written:
        say(console, line, "dim")
    if not result.complete:
        say(console, f"{_describe_remaining(result)} left; run the same command to resume the batch", "yellow")
    return INTERRUPTED if interrupted else 0 if result.complete and not result.stopped else STOPPED_EARLY


def _build_plan(
    options: BatchOptions,
    selected: tuple[Task, ...],
    agent: PreparedAgent,
    sandboxes: Backend,
    *,
    model: str,
    folder: Path,
) -> BatchPlan:
    return BatchPlan(
        tasks=selected,
        agent=agent.spec,
        installed=agent.installed,
        backend=sandboxes,
        model=model,
        folder=folder,
        name=options.name,
        n=options.n,
        rounds=options.rounds,
        bounds=Bounds(
            running=options.concurrency, starting=options.starting, grading=options.grading, warm=options.warm
        ),
        retries=options.retries,
        stale_retries=options.stale_retries,
        seed=options.seed,
        timeout_s=require_positive("timeout", options.timeout),
        image=options.image,
        network=parse_network(options.network),
        resources=Resources(
            cpus=require_positive("cpus", options.cpus),
            memory_mb=require_positive("memory_mb", options.memory_mb),
            disk_mb=require_positive("disk_mb", options.disk_mb),
        ),
        session=build_session_settings(options),
        model_limits=agent.limits,
        options=agent.options,
        policy=build_end_policy(options),
        grade=options.grade,
        keep_work=options.keep_work,
        reuse_grades=options.reuse_grades,
    )


async def _run(
    build_plan: Callable[[str, bool], BatchPlan],
    config: ServeConfig,
    gateway: GatewayChoice,
    access: RemoteAccess,
    console: Console,
    cluster: ClusterChoice | None,
    replay: BatchReplay | None,
) -> tuple[BatchResult | None, bool]:
    """Run the batch. Return its result (None if it was cancelled before it started) and whether it was interrupted."""
    batch: Batch | None = None
    if replay is not None:
        config = msgspec.structs.replace(config, script="")
        connecting = connect_gateway(config, gateway, console, replay.build_engine)
    else:
        connecting = connect_gateway(config, gateway, console) if cluster is None else start_shared_gateway(config)
    try:
        async with (
            connecting as (client, own),
            GatewayConnector(client.url, access.public_url, access.tunnel) as connector,
        ):
            model = config.model or next(iter(await client.models()), "turngate")
            replay = replay if own else None
            plan = await asyncio.to_thread(build_plan, model, replay is not None)
            times = f" × {plan.rounds} rounds" if plan.rounds > 1 else ""
            counted = "1 task" if len(plan.tasks) == 1 else f"{len(plan.tasks)} tasks"
            rollouts = "1 rollout" if plan.total == 1 else f"{plan.total} rollouts"
            say(console, f"{rollouts} ({counted} × {plan.n}{times}) in {plan.folder}", "dim")
            if own and config.engine == "scripted":
                say(console, f"note: {SYNTHETIC_NOTE if replay is None else BATCH_REPLAY_NOTE}", "dim")
            with BatchDisplay(console, plan.total) as display:
                async with open_batch_executor(cluster, plan, client, console) as executor:
                    if replay is not None:
                        executor = replay.build_executor(plan, client, connector)
                    batch = Batch(plan, client, connector, display.update, executor=executor)
                    return await _run_interruptible(batch)
    except asyncio.CancelledError:
        absorb_cancellation()
    return (None if batch is None else batch.result), True


async def _run_interruptible(batch: Batch) -> tuple[BatchResult, bool]:
    """Run a batch until it is complete or interrupted. Return its result and whether it was interrupted.

    The first cancellation stops the agents and waits until the grading has finished. The second cancellation stops everything.
    """
    running = asyncio.create_task(batch.run())
    try:
        try:
            return await asyncio.shield(running), False
        except asyncio.CancelledError:
            if running.done():
                raise
            absorb_cancellation()
            await batch.wind_up()
            return await asyncio.shield(running), True
    except asyncio.CancelledError:
        running.cancel()
        await run_to_completion(_wait_for_end(running))
        raise


async def _wait_for_end(running: asyncio.Task[BatchResult]) -> None:
    await asyncio.wait([running])
    if not running.cancelled():
        running.exception()  # mark the error as retrieved, because it has already been reported


def _describe_remaining(result: BatchResult) -> str:
    remaining = result.summary.overall.wanted - result.summary.overall.finished
    return "1 rollout is" if remaining == 1 else f"{remaining} rollouts are"


def _write_files(result: BatchResult, console: Console) -> list[str]:
    """Write the summary and the plot, and return lines that name these files and the ledger.

    If a file cannot be written, print a warning and leave its line out.
    """
    files: dict[str, bytes] = {
        "summary.json": msgspec.json.format(msgspec.json.encode(result.summary)),
        "plot.svg": plot.render_svg(result.summary, result.finished).encode("utf-8", "backslashreplace"),
    }
    lines = []
    for name, data in files.items():
        try:
            (result.folder / name).write_bytes(data)
            lines.append(f"  {name:13} {result.folder / name}")
        except OSError as error:
            say(console, f"{result.folder / name} could not be written ({error.strerror})", "yellow")
    return [*lines, f"  {LEDGER_NAME:13} {result.folder / LEDGER_NAME}"]


# ── while it runs ───────────────────────────────────────────────────────────────────────────────────────────────────


class BatchDisplay(LiveDisplay):
    """Shows the progress of a batch: on a terminal as a few live lines, and otherwise as a new line every few seconds."""

    def __init__(self, console: Console, total: int) -> None:
        super().__init__(console)
        self._tally = BatchProgress(total=total)
        self._notes_printed = 0
        self._printed = time.monotonic()

    def update(self, tally: BatchProgress) -> None:
        self._tally = tally
        for note in tally.notes[self._notes_printed :]:
            say(self._console, sanitize_line(note), "yellow")
        self._notes_printed = len(tally.notes)
        if self._live is None and time.monotonic() - self._printed > _LINE_EVERY_S:
            self._printed = time.monotonic()
            say(self._console, self._line())

    def _line(self) -> str:
        return "  ".join([self._progress(), *self._rates(), self._outcomes(), self._stages()])

    def _render(self) -> Group:
        tally = self._tally
        head = Table.grid(padding=(0, 2))
        head.add_row(ProgressBar(total=max(tally.total, 1), completed=tally.done, width=40), self._progress())
        lines = [Text("  ".join(self._rates())), Text(self._outcomes()), Text(self._stages(), style="dim")]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(head, *lines)

    def _progress(self) -> str:
        tally = self._tally
        left = tally.remaining_s
        eta = "" if left is None else f", {_clock(left)} left"
        return f"{_clock(time.monotonic() - tally.started)}  {tally.done}/{tally.total} rollouts{eta}"

    def _rates(self) -> list[str]:
        tally = self._tally
        facts = [] if tally.pass_rate is None else [f"pass rate {tally.pass_rate:.1%}"]
        facts += [] if tally.mean_reward is None else [f"mean reward {tally.mean_reward:.3f}"]
        return [*facts, f"{tally.tokens_per_s:,.0f} tokens/s"]

    def _outcomes(self) -> str:
        return " · ".join(f"{self._tally.kinds[kind]} {kind}" for kind in ROLLOUT_CLASSES if self._tally.kinds[kind])

    def _stages(self) -> str:
        tally = self._tally
        counts = [f"{tally.states[state]} {label}" for state, label in _STATES.items() if tally.states[state]]
        return ", ".join([*counts, *([f"{tally.retrying} to retry"] if tally.retrying else [])])


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# ── at the end ──────────────────────────────────────────────────────────────────────────────────────────────────────


def print_result(result: BatchResult, console: Console) -> None:
    """Print the tables of tasks and rounds, the errors and warnings, the groups without signal, the incomplete groups, and the plots."""
    summary = result.summary
    console.print(_task_table(summary, wide=console.width >= _WIDE))
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in summary.overall.phases.items())
    if summary.rounds:
        console.print(_round_table(summary))
    say(
        console,
        f"  mean seconds per phase: {phases or 'none'}; attempts: {summary.overall.attempts}; total time: {_clock(summary.seconds)}",
    )
    for kind, messages in summary.messages.items():
        for message, count in messages:
            say(console, f"  {count} × {kind}: {sanitize_line(message)}", _STYLES.get(kind, ""))
    for warning, count in summary.warnings:
        say(console, f"  {count} × {sanitize_line(warning)}", "yellow")
    _print_groups(
        console,
        "groups without signal (the rollouts to train on have equal rewards)",
        summary.no_signal,
        lambda g: f"{g.reward:g}",
    )
    _print_groups(
        console,
        "incomplete groups (fewer rewards than rollouts)",
        summary.shrunken,
        lambda g: f"{g.graded} of {g.wanted}",
    )
    console.print()
    for panel in plot.build_panels(summary, result.finished):
        head, *bars = plot.render_lines(panel)
        say(console, head, "bold")
        for line in bars:
            say(console, line)
    if result.stopped:
        say(console, f"stopped early: {sanitize_line(result.stopped)}", "red")


def _task_table(summary: Summary, *, wide: bool) -> Table:
    ks = sorted({1, summary.n})
    table = Table(title=f"Batch {summary.batch}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("task", overflow="fold", min_width=10)
    phases = ("start s", "run s", "grade s") if wide else ()
    for heading in ("graded", "reward", *(f"pass@{k}" for k in ks), "turns", "tokens", *phases):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("not graded", overflow="fold")
    for task in summary.tasks[:_MAX_TASKS]:
        table.add_row(sanitize_line(task.task), *_cells(task, ks, wide=wide))
    if (more := len(summary.tasks) - _MAX_TASKS) > 0:
        table.add_row(Text(f"… and {more} more, in summary.json", style="dim"))
    table.add_section()
    table.add_row(Text("all", style="bold"), *_cells(summary.overall, ks, wide=wide))
    return table


def _round_table(summary: Summary) -> Table:
    ks = sorted({1, summary.n})
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for heading in ("round", "graded", "reward", *(f"pass@{k}" for k in ks), "turns", "tokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("not graded", overflow="fold")
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
        Text(", ").join([*others, *([Text(f"{missing} to do", style="dim")] if missing else [])]),
    ]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _print_groups(
    console: Console, what: str, groups: Sequence[GroupStats], describe: Callable[[GroupStats], str]
) -> None:
    if not groups:
        return
    names: Iterable[str] = (
        f"{sanitize_line(group.task)}{f'@{group.round}' if group.round else ''} ({describe(group)})"
        for group in groups[:_MAX_GROUPS]
    )
    more = f" and {len(groups) - _MAX_GROUPS} more" if len(groups) > _MAX_GROUPS else ""
    say(console, f"  {what}: {', '.join(names)}{more}", "yellow")
