"""What `turngate tasks list` and `tasks check` do and print."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turngate.cli.run import stoppable
from turngate.cli.terminal import Showing, sanitize, sanitize_line, say
from turngate.cli.terminal import console as new_console
from turngate.errors import ConfigError, TurngateError
from turngate.sandboxes import get_backend
from turngate.sandboxes.base import Backend
from turngate.tasks.grading.logs import has_parser
from turngate.tasks.grading.types import GradingEnvironment
from turngate.tasks.loaders.load import LoadedTask, scan_tasks
from turngate.tasks.proof import Proof, prove_task
from turngate.tasks.task import Function, Rubric, Script, Swe, Task

Verdict = Literal["proven", "valid", "wrong", "not proven", "infrastructure fault"]
_STYLE: dict[str, str] = {"proven": "green", "valid": "cyan"}
_GOOD = ("proven", "valid")


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report, as `--json` prints it."""

    id: str
    source: str
    verdict: Verdict
    message: str = ""
    grader: str = ""
    solved: float | None = None  # the reward of the reference solution
    untouched: float | None = None  # the reward of no change
    seconds: float = 0.0


def listing(where: str, only: Sequence[str], limit: int | None, as_json: bool) -> bool:
    """Print the tasks of a place; True if each of them could be read."""
    found = list(scan_tasks(where, only=only, limit=limit))
    if as_json:
        print(msgspec.json.encode([_read(one) for one in found]).decode())
        return all(one.error is None for one in found)
    table = Table(title=f"Tasks of {sanitize(where)}: {len(found)}", title_justify="left")
    for heading in ("id", "asks", "where it runs", "grader", "solution"):
        table.add_column(heading, overflow="fold")
    for one in found:
        if one.task is None:
            table.add_row(sanitize_line(one.id), Text(_why(one), style="red"), "", "", "")
        else:
            table.add_row(
                sanitize_line(one.id), _first(one.task), _place(one.task), graded_by(one.task), _solved_by(one.task)
            )
    new_console().print(table)
    return all(one.error is None for one in found)


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """What `turngate tasks check` was asked for."""

    where: str
    sandbox: str = "local"
    image: str = ""
    only: tuple[str, ...] = ()
    limit: int | None = None
    proves: bool = True
    concurrency: int = 2
    as_json: bool = False


def check(asked: Check) -> bool:
    """Print a line for each task; True if every one is in order."""
    if asked.concurrency < 1:
        raise ConfigError(f"concurrency: {asked.concurrency} is not 1 or more", param="concurrency")
    console = new_console(stderr=asked.as_json)
    place = get_backend(asked.sandbox)
    found = list(scan_tasks(asked.where, only=asked.only, limit=asked.limit))
    lines = asyncio.run(stoppable(_all(found, asked, place, console), console))
    if lines is None:
        raise KeyboardInterrupt
    if asked.as_json:
        print(msgspec.json.encode(lines).decode())
    else:
        _tell(lines, asked, console)
    return all(line.verdict in _GOOD for line in lines)


async def _all(found: Sequence[LoadedTask], asked: Check, place: Backend, console: Console) -> list[Checked] | None:
    """None: it was stopped."""
    lines = [_read(one) for one in found]
    to_prove = (
        [n for n, one in enumerate(found) if one.task is not None and _provable(one.task)] if asked.proves else []
    )
    if not to_prove:
        return lines
    try:
        await place.check()
        await place.sweep()
        ground = GradingEnvironment(backend=place, image=asked.image)
        room = asyncio.Semaphore(asked.concurrency)
        with _Watching(console, len(to_prove)) as watching:

            async def one(n: int, task: Task) -> None:
                async with room:
                    lines[n] = _proven(lines[n], await prove_task(task, ground))
                watching.see(lines[n])

            async with asyncio.TaskGroup() as group:
                for n in to_prove:
                    task = found[n].task
                    assert task is not None
                    group.create_task(one(n, task))
    except asyncio.CancelledError:
        return None
    return lines


def _provable(task: Task) -> bool:
    """Without a solution it is half of a proof: that the grader works."""
    return task.grader is not None


def _read(found: LoadedTask) -> Checked:
    if found.task is None:
        return Checked(id=found.id, source=found.source, verdict="wrong", message=_why(found))
    if complaint := _unread(found.task):
        return Checked(
            id=found.id, source=found.source, verdict="wrong", message=complaint, grader=graded_by(found.task)
        )
    lacks = [name for name, part in (("grader", found.task.grader), ("solution", found.task.solution)) if part is None]
    return Checked(
        id=found.id,
        source=found.source,
        verdict="valid",
        message=f"no {' and no '.join(lacks)}, so there is nothing to prove" if lacks else "",
        grader=graded_by(found.task),
    )


def _unread(task: Task) -> str:
    """Why nobody could read what the task's tests print; empty if there is a parser, or no need of one."""
    graders = [part.grader for part in task.grader.parts] if isinstance(task.grader, Rubric) else [task.grader]
    for name in [grader.parser for grader in graders if isinstance(grader, Swe)]:
        try:
            if not has_parser(name):
                return f"log_parser: there is no parser {name}"
        except TurngateError as error:
            return error.message
    return ""


def _proven(line: Checked, proof: Proof) -> Checked:
    return msgspec.structs.replace(
        line,
        verdict=proof.verdict,
        message=proof.message,
        solved=proof.solved.reward if proof.solved is not None else None,
        untouched=proof.untouched.reward if proof.untouched is not None else None,
        seconds=round(proof.seconds, 2),
    )


def _why(found: LoadedTask) -> str:
    assert found.error is not None
    return sanitize_line(found.error.message.removeprefix("task: "))


def _first(task: Task) -> str:
    asked = task.instruction.partition("<issue>")[2] or task.instruction  # what all SWE tasks begin with says nothing
    line = next(line for line in asked.splitlines() if line.strip())
    return sanitize_line(line if len(line) <= 70 else f"{line[:69]}…")


def _place(task: Task) -> str:
    return sanitize_line(task.image or ("its Dockerfile" if task.dockerfile is not None else "any sandbox"))


def _solved_by(task: Task) -> str:
    if task.solution is None:
        return "–"
    return "patch" if task.solution.files is None else "solve.sh"


def graded_by(task: Task) -> str:
    match task.grader:
        case None:
            return "–"
        case Script(probe=probe):
            return "script, probe and judge" if probe else "script"
        case Function(name=name):
            return sanitize_line(f"function {name.rpartition('/')[2]}")
        case Swe(fail_to_pass=fail, pass_to_pass=keep):
            return f"tests: {len(fail)} to mend, {len(keep)} to keep"
        case Rubric(parts=parts):
            return sanitize_line(f"rubric: {', '.join(part.name for part in parts)}")


class _Watching(Showing):
    """How far the proofs are: one line that changes on a terminal, a plain line each elsewhere."""

    def __init__(self, console: Console, whole: int) -> None:
        super().__init__(console)
        self._whole = whole
        self._done = self._bad = 0

    def see(self, line: Checked) -> None:
        self._done += 1
        self._bad += line.verdict not in _GOOD
        if self._live is None:
            say(
                self._console,
                f"{self._done}/{self._whole}  {line.verdict}  {sanitize_line(line.id)}  {line.seconds:.1f} s",
            )

    def _picture(self) -> Text:
        bad = (f"  {self._bad} not in order", "red") if self._bad else ("", "")
        return Text.assemble((f"{self._done}/{self._whole}", "bold"), " proven or not …", bad)


def _tell(lines: Sequence[Checked], asked: Check, console: Console) -> None:
    where = f" in the {asked.sandbox} sandbox" if asked.proves else ""
    table = Table(title=f"Tasks of {sanitize(asked.where)}{where}", title_justify="left")
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
        say(console, f"{bad} of {len(lines)} not in order.", "bold red")
    else:
        rest = f", {len(lines) - proven} valid and not proven" if proven < len(lines) else ""
        say(console, f"All {len(lines)} in order: {proven} proven{rest}.", "bold green")


def _number(reward: float | None) -> str:
    return "–" if reward is None else f"{reward:g}"
