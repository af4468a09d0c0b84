"""Grading with a Python function on the host. The function is part of the task and is trusted; the work that it grades is not.

    def grade(subject):                          # or async def
        text = (subject.folder / "answer.txt").read_text()
        return 1.0 if text.strip() == "42" else 0.0

The function receives a `Subject`: the work as files on the host, the agent's host tool calls and turns, and `exec`, which runs commands in
a fresh sandbox with a copy of the work. It returns a number or a `Grade`, which may also give rewards to turns. If it raises an exception,
it gives no reward.
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

from turngate.errors import SandboxError, TaskError, TurngateError
from turngate.sandboxes.base import ExecResult, Sandbox
from turngate.store.outcomes import NO_REWARD
from turngate.tasks.grading import sandbox as grading_sandbox
from turngate.tasks.grading.result import Control, GraderLog, GraderResult, Undecided
from turngate.tasks.grading.types import Grade, GradedTurn, GradingEnvironment, Work
from turngate.tasks.grading.work import collect_work, needs_git
from turngate.tasks.task import Function, Task


class Subject:
    """The work as a grading function sees it. All attributes are read-only."""

    def __init__(self, task: Task, work: Work, owner: _SubjectSandbox) -> None:
        self._task, self._work, self._sandbox_owner = task, work, owner

    @property
    def task(self) -> Task:
        return self._task

    @property
    def folder(self) -> Path:
        """A copy on the host of the agent's final working folder or, for the untouched task, of the initial one.

        None of its links point outside it.
        """
        return self._work.folder

    @property
    def answers(self) -> tuple[Mapping[str, object], ...]:
        """The agent's host tool calls, oldest first: {"call": 1, "tool": …, "arguments": …}."""
        return self._work.answers

    async def read_turns(self) -> tuple[GradedTurn, ...]:
        """Return the rollout's turns, oldest first. The untouched task has none, because no agent ran."""
        return await self._sandbox_owner.read_turns(self._work)

    def turns(self) -> tuple[GradedTurn, ...]:
        """Return the same turns as `read_turns`, for a grading function that is not async."""
        reading = self._sandbox_owner.read_turns(self._work)
        return asyncio.run_coroutine_threadsafe(reading, self._sandbox_owner.loop).result()

    async def exec(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
    ) -> ExecResult:
        """Run a command in a sandbox with a copy of the work, and kill processes that the command leaves running.

        All calls use the same sandbox.
        """
        return await self._sandbox_owner.exec(command, env, stdin, timeout_s)

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
    ) -> ExecResult:
        """Run a command in the same way as `exec`, for a grading function that is not async."""
        coroutine = self._sandbox_owner.exec(command, env, stdin, timeout_s)
        return asyncio.run_coroutine_threadsafe(coroutine, self._sandbox_owner.loop).result()


class _SubjectSandbox:
    """The sandbox of a subject, created on first use.

    Sandbox and gateway faults are recorded. They are reported even if the function catches the exception and returns a reward.
    """

    def __init__(
        self, task: Task, work: Work | None, environment: GradingEnvironment, life_s: float, log: GraderLog
    ) -> None:
        self._task, self._work, self._environment, self._life_s, self._log = task, work, environment, life_s, log
        self.loop = asyncio.get_running_loop()
        self.fault: TurngateError | None = None
        self._stack = AsyncExitStack()
        self._sandbox: Sandbox | None = None
        self._lock = asyncio.Lock()

    async def sandbox(self) -> Sandbox:
        if self._sandbox is None:
            sandbox = await self._stack.enter_async_context(
                grading_sandbox.open_sandbox(self._task, self._environment, life_s=self._life_s)
            )
            if self._work is not None:
                await grading_sandbox.upload_work(sandbox, self._work.folder)
            self._sandbox = sandbox
        return self._sandbox

    async def exec(
        self, command: Sequence[str], env: Mapping[str, str] | None, stdin: bytes, timeout_s: float
    ) -> ExecResult:
        async with self._lock:
            try:
                sandbox = await self.sandbox()
                done = await sandbox.exec(
                    command, env=env, stdin=stdin, timeout_s=timeout_s, keep=grading_sandbox.OUTPUT_LIMIT, leave=False
                )
            except SandboxError as error:
                self.fault = error
                raise
        self._log.add(f"{command[0]}: exit code {done.exit_code}", done.stdout + done.stderr)
        return done

    async def read_turns(self, work: Work) -> tuple[GradedTurn, ...]:
        if work.read_turns is None:
            return ()
        try:
            return (await work.read_turns()).turns
        except TurngateError as error:
            self.fault = error
            raise

    async def close(self) -> None:
        await self._stack.aclose()


async def run_grader(
    task: Task, grader: Function, work: Work | None, environment: GradingEnvironment, log: GraderLog, control: Control
) -> GraderResult:
    function = await asyncio.to_thread(_load_function, task, grader.name)
    async with _open_subject(task, work, environment, grader.timeout_s, log) as (subject, owner):
        try:
            async with asyncio.timeout(grader.timeout_s) as limit:
                value = await _call_function(function, subject)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the task's own code may raise anything, including a TimeoutError of its own
            reason = f"{grader.name} failed: {type(error).__name__}: {str(error)[:500]}"
            if isinstance(error, TimeoutError) and limit.expired():
                reason = f"{grader.name} took longer than its limit of {grader.timeout_s:g} s"
            raise _fault_or_undecided(owner, reason) from error
        if owner.fault is not None:
            raise owner.fault
        return GraderResult(grade=_to_grade(grader.name, value))


def _fault_or_undecided(owner: _SubjectSandbox, reason: str) -> Exception:
    return owner.fault if owner.fault is not None else Undecided(reason)


@asynccontextmanager
async def _open_subject(
    task: Task, work: Work | None, environment: GradingEnvironment, life_s: float, log: GraderLog
) -> AsyncIterator[tuple[Subject, _SubjectSandbox]]:
    owner = _SubjectSandbox(task, work, environment, life_s, log)
    async with grading_sandbox.scratch_folder() as folder:
        try:
            graded_work = work or await collect_work(await owner.sandbox(), folder / "work", git=needs_git(task))
            yield Subject(task, graded_work, owner), owner
        finally:
            await owner.close()


async def _call_function(function: Callable[[Subject], Any], subject: Subject) -> object:
    """Call an async function in the event loop, and any other function in its own thread.

    A thread cannot be killed, so it is abandoned if the function times out.
    """
    if inspect.iscoroutinefunction(function):
        return await function(subject)
    loop = asyncio.get_running_loop()
    result: asyncio.Future[object] = loop.create_future()

    def settle(value: object, error: Exception | None) -> None:
        if not result.done():
            result.set_result(value) if error is None else result.set_exception(error)

    def call() -> None:
        value: object = None
        failed: Exception | None = None
        try:
            value = function(subject)
        except StopIteration as error:  # a future cannot raise it
            failed = RuntimeError(f"StopIteration: {error}")
        except Exception as error:  # re-raised in the event loop
            failed = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, failed)

    threading.Thread(target=call, name="grading function", daemon=True).start()
    return await result


def find_function_file(task: Task, name: str) -> Path | None:
    """Return the file of a grading function that is specified as `file.py:function`. Return None for `module:function`."""
    location, _, _ = name.rpartition(":")
    if not location.endswith(".py"):
        return None
    return Path(location) if Path(location).is_absolute() or not task.source else Path(task.source) / location


def _load_function(task: Task, name: str) -> Callable[[Subject], Any]:
    location, _, attribute = name.rpartition(":")
    try:
        if (path := find_function_file(task, name)) is not None:
            spec = importlib.util.spec_from_file_location(f"turngate_grader_{path.stem}", path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(location)
        function = module
        for part in attribute.split("."):
            function = vars(function)[part]
    except Exception as error:  # the task's own code
        raise TaskError(
            f"task: {task.id}: the grader {name} cannot be loaded ({type(error).__name__}: {error}); "
            "correct its code, or specify an existing module:function or file.py:function",
            param="grader",
        ) from error
    if not callable(function):
        raise TaskError(
            f"task: {task.id}: the grader {name} is not a function; specify module:function or file.py:function",
            param="grader",
        )
    return function


def _to_grade(name: str, value: object) -> Grade:
    if isinstance(value, Grade):
        if value.kind in NO_REWARD and value.reward is not None:
            raise Undecided(
                f"{name} returned a grade of kind {value.kind!r} with a reward; its reward must be None, because the work was not graded"
            )
        if (value.kind == "graded" or value.reward is not None) and not _is_finite(value.reward):
            raise Undecided(f"{name} returned a grade without a finite reward")
        return value
    if isinstance(value, int | float) and _is_finite(value):
        return Grade(kind="graded", reward=float(value))
    raise Undecided(f"{name} returned {_describe_value(value)}, which is neither a finite number nor a Grade")


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:
        return False


def _describe_value(value: object) -> str:
    try:
        return repr(value)[:80]
    except Exception:  # the task's own code, or a number too long to format
        return f"a {type(value).__name__}"
