"""`turngate tasks list` and `turngate tasks check`: list tasks, check that they are valid, and prove that their graders work."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turngate.cli.options import CheckTasksOptions, ListTasksOptions
from turngate.cli.signals import cancel_on_signal
from turngate.common.terminal import LiveDisplay, sanitize, sanitize_line, say
from turngate.common.terminal import console as new_console
from turngate.errors import ConfigError, TaskError, TurngateError
from turngate.sandboxes import get_backend
from turngate.sandboxes.base import Backend
from turngate.tasks.grading.logs import require_parser
from turngate.tasks.grading.types import GradingEnvironment
from turngate.tasks.loaders.load import LoadedTask, scan_tasks
from turngate.tasks.proof import Proof, prove_task
from turngate.tasks.task import Function, Rubric, Script, Swe, Task

Verdict = Literal["proven", "valid", "wrong", "not proven", "infrastructure fault"]
_STYLE: dict[str, str] = {"proven": "green", "valid": "cyan"}
_GOOD = ("proven", "valid")


class TaskCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The result of checking one task, as `--json` prints it."""

    id: str
    source: str
    verdict: Verdict
    message: str = ""
    grader: str = ""
    solved: float | None = None  # reward of the reference solution
    untouched: float | None = None  # reward of the unchanged environment
    seconds: float = 0.0


def list_tasks(options: ListTasksOptions) -> bool:
    """Print the tasks, and return whether all of them could be read."""
    found = list(scan_tasks(options.where, only=options.only or (), limit=options.limit))
    if options.as_json:
        print(msgspec.json.encode([_check(loaded) for loaded in found]).decode())
        return all(loaded.error is None for loaded in found)
    table = Table(title=f"Tasks from {sanitize(options.where)}: {len(found)}", title_justify="left")
    for heading in ("id", "instruction", "image", "grader", "solution"):
        table.add_column(heading, overflow="fold")
    for loaded in found:
        if loaded.task is None:
            table.add_row(sanitize_line(loaded.id), Text(_describe_error(loaded), style="red"), "", "", "")
        else:
            table.add_row(
                sanitize_line(loaded.id),
                _summarize(loaded.task),
                _describe_image(loaded.task),
                _describe_grader(loaded.task),
                _describe_solution(loaded.task),
            )
    new_console().print(table)
    return all(loaded.error is None for loaded in found)


def check_tasks(options: CheckTasksOptions) -> bool:
    """Check the tasks, print the results, and return whether all tasks passed."""
    if options.concurrency < 1:
        raise ConfigError(f"concurrency must be at least 1, not {options.concurrency}", param="concurrency")
    console = new_console(stderr=options.as_json)
    sandboxes = get_backend(options.sandbox)
    found = list(scan_tasks(options.where, only=options.only or (), limit=options.limit))
    lines = asyncio.run(cancel_on_signal(_check_all(found, options, sandboxes, console), console))
    if lines is None:
        raise KeyboardInterrupt
    if options.as_json:
        print(msgspec.json.encode(lines).decode())
    else:
        _print_checks(lines, options, console)
    return all(line.verdict in _GOOD for line in lines)


async def _check_all(
    found: Sequence[LoadedTask], options: CheckTasksOptions, sandboxes: Backend, console: Console
) -> list[TaskCheck] | None:
    """Check each task. If requested, also run the graders of valid tasks in sandboxes. Return None if interrupted."""
    lines = [_check(loaded) for loaded in found]
    to_prove = (
        [
            n
            for n, loaded in enumerate(found)
            if loaded.task is not None and _provable(loaded.task) and lines[n].verdict == "valid"
        ]
        if options.prove
        else []
    )
    if not to_prove:
        return lines
    try:
        await sandboxes.check()
        await sandboxes.sweep()
        ground = GradingEnvironment(backend=sandboxes, image=options.image)
        slots = asyncio.Semaphore(options.concurrency)
        with ProofDisplay(console, len(to_prove)) as display:

            async def prove_one(n: int, task: Task) -> None:
                async with slots:
                    lines[n] = _add_proof(lines[n], await prove_task(task, ground))
                display.update(lines[n])

            async with asyncio.TaskGroup() as group:
                for n in to_prove:
                    task = found[n].task
                    assert task is not None
                    group.create_task(prove_one(n, task))
    except asyncio.CancelledError:
        return None
    return lines


def _provable(task: Task) -> bool:
    """Return whether the task has a grader to run.

    A task without a solution cannot be proven, but its grader is run to check that it works and that doing nothing does not score 1.
    """
    return task.grader is not None


def _check(loaded: LoadedTask) -> TaskCheck:
    if loaded.task is None:
        return TaskCheck(id=loaded.id, source=loaded.source, verdict="wrong", message=_describe_error(loaded))
    if error := _check_log_parser(loaded.task):
        return TaskCheck(
            id=loaded.id,
            source=loaded.source,
            verdict="wrong" if isinstance(error, TaskError) else "infrastructure fault",
            message=error.message,
            grader=_describe_grader(loaded.task),
        )
    lacks = [
        name for name, part in (("grader", loaded.task.grader), ("solution", loaded.task.solution)) if part is None
    ]
    return TaskCheck(
        id=loaded.id,
        source=loaded.source,
        verdict="valid",
        message=f"the task has no {' and no '.join(lacks)}, so it cannot be proven" if lacks else "",
        grader=_describe_grader(loaded.task),
    )


def _check_log_parser(task: Task) -> TurngateError | None:
    """Return the error if a log parser named by the task's grader does not exist or cannot be looked up, and None otherwise."""
    graders = [part.grader for part in task.grader.parts] if isinstance(task.grader, Rubric) else [task.grader]
    for name in [grader.parser for grader in graders if isinstance(grader, Swe)]:
        if error := _find_parser_error(name):
            return error
    return None


@cache  # importing swebench may take a minute, and many tasks have the same parser
def _find_parser_error(name: str) -> TurngateError | None:
    try:
        require_parser(name)
    except TurngateError as error:
        return error
    return None


def _add_proof(line: TaskCheck, proof: Proof) -> TaskCheck:
    return msgspec.structs.replace(
        line,
        verdict=proof.verdict,
        message=proof.message,
        solved=proof.solved.reward if proof.solved is not None else None,
        untouched=proof.untouched.reward if proof.untouched is not None else None,
        seconds=round(proof.seconds, 2),
    )


def _describe_error(loaded: LoadedTask) -> str:
    assert loaded.error is not None
    return sanitize_line(loaded.error.message.removeprefix("task: "))


def _summarize(task: Task) -> str:
    issue = task.instruction.partition("<issue>")[2]  # skip the preamble that all SWE tasks share
    text = issue if issue.strip() else task.instruction
    line = next(line for line in text.splitlines() if line.strip())
    return sanitize_line(line if len(line) <= 70 else f"{line[:69]}…")


def _describe_image(task: Task) -> str:
    return sanitize_line(task.image or ("its Dockerfile" if task.dockerfile is not None else "any sandbox"))


def _describe_solution(task: Task) -> str:
    if task.solution is None:
        return "–"
    return "patch" if task.solution.files is None else "solve.sh"


def _describe_grader(task: Task) -> str:
    match task.grader:
        case None:
            return "–"
        case Script(probe=probe):
            return "script, probe and judge" if probe else "script"
        case Function(name=name):
            return sanitize_line(f"function {name.rpartition('/')[2]}")
        case Swe(fail_to_pass=fail, pass_to_pass=keep):
            return f"tests: {len(fail)} to fix, {len(keep)} to keep"
        case Rubric(parts=parts):
            return sanitize_line(f"rubric: {', '.join(part.name for part in parts)}")


class ProofDisplay(LiveDisplay):
    """Shows the progress of the proofs: in a live line on a terminal, and in one line per task elsewhere."""

    def __init__(self, console: Console, total: int) -> None:
        super().__init__(console)
        self._total = total
        self._done = self._bad = 0

    def update(self, line: TaskCheck) -> None:
        self._done += 1
        self._bad += line.verdict not in _GOOD
        if self._live is None:
            say(
                self._console,
                f"{self._done}/{self._total}  {line.verdict}  {sanitize_line(line.id)}  {line.seconds:.1f} s",
            )

    def _render(self) -> Text:
        bad = (f"  {self._bad} failed", "red") if self._bad else ("", "")
        return Text.assemble((f"{self._done}/{self._total}", "bold"), " checked …", bad)


def _print_checks(lines: Sequence[TaskCheck], options: CheckTasksOptions, console: Console) -> None:
    where = f" in the {options.sandbox} sandbox" if options.prove else ""
    table = Table(title=f"Tasks from {sanitize(options.where)}{where}", title_justify="left")
    for heading in ("task", "verdict", "solution", "no change", "seconds", "grader"):
        table.add_column(heading, overflow="fold")
    for line in lines:
        table.add_row(
            sanitize_line(line.id),
            Text(line.verdict, style=_STYLE.get(line.verdict, "bold red")),
            _number(line.solved),
            _number(line.untouched),
            f"{line.seconds:.1f}" if line.seconds else "–",
            line.grader,
        )
    console.print(table)
    for line in lines:
        if line.message:
            style = "dim" if line.verdict in _GOOD else "red"
            say(console, Text.assemble((f"{sanitize_line(line.id)}: ", "bold"), (sanitize_line(line.message), style)))
    bad = sum(line.verdict not in _GOOD for line in lines)
    proven = sum(line.verdict == "proven" for line in lines)
    if bad:
        say(console, f"Tasks that failed: {bad} of {len(lines)}.", "bold red")
    else:
        rest = f", {len(lines) - proven} valid but not proven" if proven < len(lines) else ""
        say(console, f"Tasks that passed: {len(lines)} of {len(lines)} ({proven} proven{rest}).", "bold green")


def _number(reward: float | None) -> str:
    return "–" if reward is None else f"{reward:g}"
