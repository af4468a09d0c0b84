"""`turngate run`: run one rollout, show its progress, and print its outcome."""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from turngate import tasks
from turngate.cli.gateway_choice import (
    GatewayChoice,
    RemoteAccess,
    choose_gateway,
    connect_gateway,
    load_gateway_config,
)
from turngate.cli.options import RunOptions
from turngate.cli.prepare import (
    add_command,
    build_end_policy,
    build_session_settings,
    parse_network,
    prepare_agent,
    require_positive,
    require_writable,
)
from turngate.cli.signals import INTERRUPTED, absorb_cancellation, cancel_on_signal
from turngate.common.terminal import CommandConsole, LiveDisplay, sanitize, sanitize_line, say
from turngate.common.terminal import console as new_console
from turngate.config import REFERENCE_SCRIPT, ServeConfig
from turngate.errors import ConfigError
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.outcome import Outcome, RolloutProgress
from turngate.rollout.reference import REPLAYED, play_reference
from turngate.rollout.rollout import Rollout
from turngate.rollout.spec import RolloutSpec
from turngate.sandboxes import get_backend
from turngate.sandboxes.base import Resources
from turngate.tasks.reference import solution_folders
from turngate.tasks.task import Task

EXIT_CODES: Mapping[str, int] = {
    "finished": 0,
    "failed": 1,
    "timed out": 1,
    "limit": 1,
    "error": 3,
    "cancelled": INTERRUPTED,
}
STOPPING = "Stopping: ending the agent and removing its sandbox; the recording is kept …"
_LINE_EVERY_S = 5.0  # interval between progress lines if the output is not a terminal
_STDERR_LINES = 5  # number of lines of a failed agent's output that are shown


def run_rollout(options: RunOptions) -> int:
    """Run the rollout described by the flags, and return the exit code."""
    network = parse_network(options.network)
    config = load_gateway_config(options)
    agent_options = add_command(options.agent, options.option, options.command)
    task = _load_task(options)
    agent = prepare_agent(
        options.agent,
        options=agent_options,
        context_tokens=options.context_tokens,
        instruction=task.instruction,
        sandbox=options.sandbox,
    )
    backend = get_backend(options.sandbox)
    spec = RolloutSpec(
        task=task,
        agent=agent.spec,
        installed=agent.installed,
        backend=backend,
        model=config.model,
        timeout_s=require_positive("timeout", options.timeout) or task.timeout_s or 1800.0,
        image=options.image,
        network=network,
        resources=Resources(
            cpus=require_positive("cpus", options.cpus),
            memory_mb=require_positive("memory_mb", options.memory_mb),
            disk_mb=require_positive("disk_mb", options.disk_mb),
        ),
        session=build_session_settings(options),
        grade=options.grade,
        policy=build_end_policy(options),
        model_limits=agent.limits,
        options=agent.options,
        folder=require_writable(options.out) if options.out else config.folder / "rollouts",
    )
    console = new_console(stderr=options.as_json)
    access = RemoteAccess(options.public_url, options.tunnel)
    return _run_and_print(spec, config, choose_gateway(options), access, console, as_json=options.as_json)


def _load_task(options: RunOptions) -> Task:
    """Load the task that the flags name.

    With neither --task nor --prompt, return an empty task if a command follows --, otherwise the bundled task.
    """
    if options.task is not None and options.prompt is not None:
        raise ConfigError("pass either --task PATH or --prompt TEXT, not both", param="task")
    if options.task is not None:
        return tasks.load_single_task(options.task)
    if options.prompt is not None:
        return tasks.task_from_prompt(options.prompt)
    if options.command:
        return Task(id="command", instruction="", source="the command after --")
    return tasks.load_task(tasks.BUNDLED_TASK)


def _run_and_print(
    spec: RolloutSpec,
    config: ServeConfig,
    gateway: GatewayChoice,
    access: RemoteAccess,
    console: CommandConsole,
    *,
    as_json: bool,
) -> int:
    with reserve_stdout(as_json):
        outcome = asyncio.run(cancel_on_signal(_run(spec, config, gateway, access, console), console, STOPPING))
    if outcome is None:
        say(console, "Cancelled before the rollout started.", "yellow")
        return INTERRUPTED
    if outcome.session:
        _write_outcome(spec.folder / outcome.session / "outcome.json", outcome)
    if as_json:
        print(msgspec.json.encode(outcome).decode())
    else:
        print_outcome(outcome, _show_flags(config, gateway), spec.folder, console, no_grade=_explain_no_grade(spec))
    return exit_code(outcome)


def _show_flags(config: ServeConfig, gateway: GatewayChoice) -> str:
    """Return the flags that `turngate show` needs to find the session."""
    if gateway.url:
        return f" --gateway {shlex.quote(gateway.url)}"
    return "" if config.data == ServeConfig().data else f" --data {shlex.quote(config.data)}"


def _explain_no_grade(spec: RolloutSpec) -> str:
    """Return why a rollout is not graded, or an empty string if it is graded."""
    if spec.task.grader is None:
        return "the task has no tests, so there is no reward; pass --task with a folder that has tests/test.sh (docs/tasks.md)"
    return "" if spec.grade else "--no-grade was passed, so there is no reward"


def exit_code(outcome: Outcome) -> int:
    """Return the exit code for an outcome. An invalid task or an infrastructure fault is an error, however the agent ended."""
    faulty = outcome.kind in ("invalid task", "infrastructure fault")
    return EXIT_CODES["error"] if faulty else EXIT_CODES[outcome.status]


def reserve_stdout(as_json: bool) -> AbstractContextManager[object]:
    """If JSON is printed, redirect stdout to stderr, so that a grader function's output does not mix with the JSON."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def _write_outcome(path: Path, outcome: Outcome) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(outcome)))
    except OSError as error:
        outcome.notes = (*outcome.notes, f"{path} could not be written ({error.strerror})")


async def _run(
    spec: RolloutSpec, config: ServeConfig, gateway: GatewayChoice, access: RemoteAccess, console: Console
) -> Outcome | None:
    """Run the rollout. Return None if it was cancelled before it started."""
    outcome = None
    try:
        await spec.backend.check()
        await spec.backend.sweep()
        replay = play_reference(spec.task, spec.agent, spec.backend, config)
        if config.script == REFERENCE_SCRIPT:
            config = msgspec.structs.replace(config, script="")
        async with (
            connect_gateway(config, gateway, console, replay.build_engine) as (client, own),
            GatewayConnector(client.url, access.public_url, access.tunnel) as connector,
        ):
            is_scripted = (await client.engines()).scripted
            if not spec.model:
                spec = msgspec.structs.replace(spec, model=next(iter(await client.models()), "turngate"))
            if own and replay.commands:
                metadata = {**spec.session.get("metadata", {}), REPLAYED: "reference solution"}
                spec = msgspec.structs.replace(
                    spec, folders=solution_folders(spec.backend), session={**spec.session, "metadata": metadata}
                )
            if spec.task.source == str(tasks.BUNDLED_TASK):
                note = f"Running the bundled task {spec.task.id}. Pass --task PATH or --prompt TEXT to run your own."
                say(console, note, "dim")
            with RolloutDisplay(console) as display:
                rollout = Rollout(spec, client, connector, display.update, on_sandbox_ready=replay.set_workdir)
                try:
                    outcome = await rollout.run()
                except asyncio.CancelledError:
                    absorb_cancellation()
                    outcome = rollout.outcome
            if is_scripted and outcome.turns:
                note = replay.note if own else replay.note_for_running(client.url)
                outcome.notes = (*outcome.notes, note)
    except asyncio.CancelledError:
        absorb_cancellation()
    return outcome


class RolloutDisplay(LiveDisplay):
    """Shows the progress of one rollout.

    On a terminal, the progress is a live line. Elsewhere, a new line is printed at each stage and, once there are turns, every few seconds.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._progress = RolloutProgress(started=time.time())
        self._stage = ""
        self._printed = 0.0

    def update(self, progress: RolloutProgress) -> None:
        self._progress = progress
        if self._live is not None:
            # Refresh at once, because a short stage could end before the next refresh.
            if progress.stage != self._stage:
                self._stage = progress.stage
                self._live.refresh()
            return
        now = time.monotonic()
        if progress.stage != self._stage or (progress.turns and now - self._printed > _LINE_EVERY_S):
            self._stage, self._printed = progress.stage, now
            say(self._console, self._render())

    def _render(self) -> Text:
        progress = self._progress
        seconds = int(time.time() - progress.started)
        facts = []
        if progress.turns:
            turns, tokens = _count(progress.turns, "turn"), _count(progress.sampled_tokens, "token")
            facts.append((f"  {turns} · {tokens}", ""))
        if progress.session:
            facts.append((f"  session {progress.session[:12]}", "dim"))
        stage = f"{progress.stage:8}" if facts else progress.stage
        line = Text.assemble((f"{seconds // 60}:{seconds % 60:02d}  ", "dim"), (stage, "bold"), *facts)
        line.no_wrap, line.overflow = True, "ellipsis"
        return line


def print_outcome(outcome: Outcome, show_flags: str, folder: Path, console: Console, *, no_grade: str = "") -> None:
    """Print the outcome, the commands that show the trace, and the folder with the agent's files.

    `show_flags` are the flags for `turngate show`. `no_grade` explains why the rollout was not graded.
    """
    code = "" if outcome.exit_code is None else f" (exit code {outcome.exit_code})"
    style = {"finished": "green", "error": "red"}.get(outcome.status, "yellow")
    name = f"{outcome.agent} {outcome.version}".strip()
    head = f"{code} after {sum(outcome.seconds.values()):.0f} s: {name} in the {outcome.sandbox} sandbox"
    say(console, Text.assemble((outcome.status, f"bold {style}"), head))
    if outcome.fault is not None:
        fault = outcome.fault
        _print_line(console, "fault", f"{fault.boundary}, in stage {fault.stage}: {sanitize(fault.message)}")
    if outcome.stop and outcome.status in ("limit", "cancelled"):
        _print_line(
            console, "limit" if outcome.status == "limit" else "reason", sanitize_line(outcome.stop.replace("_", " "))
        )
    if outcome.status == "failed":
        printed = outcome.collected.stderr.strip() or outcome.collected.stdout.strip()
        for line in printed.splitlines()[-_STDERR_LINES:]:
            _print_line(console, "output", sanitize_line(line)[:300])
    if outcome.kind is not None:
        _print_grade(outcome, console)
    elif no_grade and outcome.status != "cancelled":
        _print_line(console, "grade", f"none: {no_grade}", "yellow")
    if outcome.session:
        roles = ", ".join(f"{count} {role}" for role, count in outcome.roles.items())
        turns = _count(outcome.turns, "turn") + (f" ({roles})" if roles else "")
        tokens = _count(outcome.sampled_tokens, "sampled token")
        rows = "? rows" if outcome.rows is None else _count(outcome.rows, "row")
        suffix = "" if outcome.status == "finished" else ", kept"
        _print_line(console, "trace", f"{turns}, {tokens}, {rows}{suffix}")
        _print_line(console, "inspect", f"turngate show {outcome.session}{show_flags}")
        # The tokenizer of a remote gateway may not be on this machine.
        if outcome.sampled_tokens and "--gateway" not in show_flags:
            _print_line(console, "", f"turngate show {outcome.session}{show_flags} --tokens")
        _print_line(console, "files", str(folder / outcome.session))
    for text in outcome.warnings:
        _print_line(console, "warning", sanitize_line(text), "yellow")
    if outcome.not_enforced:
        not_isolated = ", ".join(outcome.not_enforced)
        _print_line(console, "sandbox", f"{outcome.sandbox} does not enforce: {not_isolated}", "dim")
    for text in outcome.collected.missing:
        _print_line(console, "missing", sanitize_line(text), "yellow")
    for text in outcome.collected.differences:
        _print_line(console, "differs", sanitize_line(text), "yellow")
    for text in outcome.notes:
        _print_line(console, "note", sanitize_line(text), "yellow")


def _print_grade(outcome: Outcome, console: Console) -> None:
    """Print the grade. An unknown reward is printed as "no reward", not as 0."""
    grade = outcome.grade
    assert grade is not None
    reward = "no reward" if grade.reward is None else f"reward {grade.reward:g}"
    resolved = {True: ", resolved", False: ", not resolved", None: ""}[grade.resolved]
    counts = Counter(grade.cases.values())
    cases = ", ".join(f"{count} {case}" for case, count in counts.most_common())
    style = "green" if grade.reward else "yellow"
    _print_line(console, "grade", f"{reward}{resolved} ({grade.kind}{f'; tests: {cases}' if cases else ''})", style)
    for part in grade.parts:
        part_reward = "none" if part.reward is None else f"{part.reward:g}"
        head = f"{sanitize_line(part.name)}: {part_reward} (weight {part.weight:g})"
        _print_lines(console, "", f"{head} {part.message}".rstrip())
    if grade.message and not grade.parts:  # the message of a rubric repeats the messages of its parts
        _print_lines(console, "reason", grade.message)
    for text in grade.notes:
        _print_line(console, "note", sanitize_line(text), "yellow")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _print_lines(console: Console, name: str, text: str) -> None:
    """Sanitize text and print its lines, with `name` in front of the first line."""
    for n, line in enumerate(text.split("\n")):
        _print_line(console, "" if n else name, sanitize_line(line))


def _print_line(console: Console, name: str, text: str, style: str = "") -> None:
    say(console, f"  {name:8}{text}", style)
