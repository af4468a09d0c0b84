"""A Python function on the host decides. It is the task's own code, and trusted; what it looks at is not.

    def grade(subject):                          # or async def
        text = (subject.folder / "answer.txt").read_text()
        return 1.0 if text.strip() == "42" else 0.0

It sees a `Subject`: the work as files on the host, the agent's calls of host tools, and `exec`, which runs a command in a fresh sandbox
with the work laid down. It returns a number or a `Grade`. An exception is no reward.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from turngate.errors import SandboxError, TaskError
from turngate.sandboxes.base import ExecResult, Sandbox
from turngate.tasks.grading import sandbox as fresh
from turngate.tasks.grading.result import Control, GraderLog, GraderResult, Undecided
from turngate.tasks.grading.types import Grade, GradingEnvironment, Work
from turngate.tasks.grading.work import collect_work, needs_git
from turngate.tasks.task import Function, Task


class Subject:
    """What a grading function looks at. Nothing in it can be changed for another grader."""

    def __init__(self, task: Task, work: Work, place: _SubjectSandbox) -> None:
        self._task, self._work, self._place = task, work, place

    @property
    def task(self) -> Task:
        return self._task

    @property
    def folder(self) -> Path:
        """The agent's working folder as it left it; no link in it leads out. Of the untouched task, what the agent would have found."""
        return self._work.folder

    @property
    def answers(self) -> tuple[Mapping[str, object], ...]:
        """Calls of host tools: {"tool": …, "arguments": …}, in order."""
        return self._work.answers

    async def exec(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
    ) -> ExecResult:
        """In a fresh sandbox with the work laid down; the same one for all calls. Whatever a command leaves running is killed."""
        return await self._place.exec(command, env, stdin, timeout_s)

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
    ) -> ExecResult:
        """`exec`, for a function that is not async."""
        called = self._place.exec(command, env, stdin, timeout_s)
        return asyncio.run_coroutine_threadsafe(called, self._place.loop).result()


class _SubjectSandbox:
    """The sandbox of a subject, made when it is first asked for. A fault in it is remembered: no function can make a reward of that."""

    def __init__(
        self, task: Task, work: Work | None, ground: GradingEnvironment, life_s: float, log: GraderLog
    ) -> None:
        self._task, self._work, self._ground, self._life_s, self._log = task, work, ground, life_s, log
        self.loop = asyncio.get_running_loop()
        self.fault: SandboxError | None = None
        self._stack = AsyncExitStack()
        self._sandbox: Sandbox | None = None
        self._one = asyncio.Lock()

    async def sandbox(self) -> Sandbox:
        if self._sandbox is None:
            opened = await self._stack.enter_async_context(
                fresh.open_sandbox(self._task, self._ground, life_s=self._life_s)
            )
            if self._work is not None:
                await fresh.lay_work(opened, self._work.folder)
            self._sandbox = opened
        return self._sandbox

    async def exec(
        self, command: Sequence[str], env: Mapping[str, str] | None, stdin: bytes, timeout_s: float
    ) -> ExecResult:
        async with self._one:
            try:
                sandbox = await self.sandbox()
                done = await sandbox.exec(
                    command, env=env, stdin=stdin, timeout_s=timeout_s, keep=fresh.OUTPUT_LIMIT, leave=False
                )
            except SandboxError as error:
                self.fault = error
                raise
        self._log.add(f"{command[0]}: exit code {done.exit_code}", done.stdout + done.stderr)
        return done

    async def close(self) -> None:
        await self._stack.aclose()


async def run_grader(
    task: Task, grader: Function, work: Work | None, ground: GradingEnvironment, log: GraderLog, control: Control
) -> GraderResult:
    function = await asyncio.to_thread(_load_function, task, grader.name)
    async with _open_subject(task, work, ground, grader.timeout_s, log) as (subject, place):
        try:
            async with asyncio.timeout(grader.timeout_s):
                said = await _call_function(function, subject)
        except TimeoutError:
            raise _fault_or_undecided(place, f"{grader.name} ran out of its {grader.timeout_s:.0f} s") from None
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the task's own code: anything may come out of it
            raise _fault_or_undecided(
                place, f"{grader.name} failed: {type(error).__name__}: {str(error)[:500]}"
            ) from error
        if place.fault is not None:
            raise place.fault
        return GraderResult(grade=_to_grade(grader.name, said))


def _fault_or_undecided(place: _SubjectSandbox, otherwise: str) -> Exception:
    return place.fault if place.fault is not None else Undecided(otherwise)


@asynccontextmanager
async def _open_subject(
    task: Task, work: Work | None, ground: GradingEnvironment, life_s: float, log: GraderLog
) -> AsyncIterator[tuple[Subject, _SubjectSandbox]]:
    place = _SubjectSandbox(task, work, ground, life_s, log)
    async with fresh.scratch_folder() as folder:
        try:
            found = work or await collect_work(await place.sandbox(), folder / "work", git=needs_git(task))
            yield Subject(task, found, place), place
        finally:
            await place.close()


async def _call_function(function: Callable[[Subject], Any], subject: Subject) -> object:
    """An async one here, another in a thread of its own: where its time is up it is left alone there, since no thread can be ended."""
    if inspect.iscoroutinefunction(function):
        return await function(subject)
    loop = asyncio.get_running_loop()
    said: asyncio.Future[object] = loop.create_future()

    def tell(value: object, error: Exception | None) -> None:
        if not said.done():
            said.set_result(value) if error is None else said.set_exception(error)

    def call() -> None:
        value: object = None
        failed: Exception | None = None
        try:
            value = function(subject)
        except StopIteration as error:  # no future can carry it
            failed = RuntimeError(f"StopIteration: {error}")
        except Exception as error:  # handed on
            failed = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, value, failed)

    threading.Thread(target=call, name="grading function", daemon=True).start()
    return await said


def find_function_file(task: Task, name: str) -> Path | None:
    """Where the function is written, for one that is named by its file."""
    place, _, _ = name.rpartition(":")
    if not place.endswith(".py"):
        return None
    return Path(place) if Path(place).is_absolute() or not task.source else Path(task.source) / place


def _load_function(task: Task, name: str) -> Callable[[Subject], Any]:
    place, _, attribute = name.rpartition(":")
    try:
        if (at := find_function_file(task, name)) is not None:
            spec = importlib.util.spec_from_file_location(f"turngate_grader_{at.stem}", at)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        function = module
        for part in attribute.split("."):
            function = vars(function)[part]
    except Exception as error:  # the task's own code
        raise TaskError(
            f"task: {task.id}: grader: {name} cannot be loaded: {type(error).__name__}: {error}; "
            "give module:function or file.py:function",
            param="grader",
        ) from error
    if not callable(function):
        raise TaskError(f"task: {task.id}: grader: {name} is no function", param="grader")
    return function


def _to_grade(name: str, said: object) -> Grade:
    if isinstance(said, Grade):
        if said.kind == "graded" and not _is_finite(said.reward):
            raise Undecided(f"{name} returned a grade without a finite reward")
        return said
    if isinstance(said, int | float) and _is_finite(said):
        return Grade(kind="graded", reward=float(said))
    raise Undecided(f"{name} returned {_describe_value(said)}, which is neither a finite number nor a Grade")


def _is_finite(said: object) -> bool:
    try:
        return isinstance(said, int | float) and math.isfinite(said)
    except OverflowError:
        return False


def _describe_value(said: object) -> str:
    try:
        return repr(said)[:80]
    except Exception:  # the task's own code, or a number too long to be written
        return f"a {type(said).__name__}"
