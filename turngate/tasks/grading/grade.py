"""Grading of one agent's work on one task, in a fresh sandbox.

The reward of a rollout that Turngate runs comes from `grade`, except the zeros that an end policy assigns.

    the grader returns a reward                 → graded
    it crashes, hangs or returns no reward      → run the control: the same grader on the untouched task, once per task and process
        the control returns a reward            → the work broke the grader: graded 0.0, with the reason in the message
        the control returns no reward either    → invalid task
    a sandbox, a disk or the gateway fails      → infrastructure fault: no reward, and the rollout may be retried

The work's processes can stop the sandbox or make its output unreadable. If that happens, grading is retried once before the work is
considered at fault. If Turngate's own code fails unexpectedly while it grades the work, this counts as a crash of the grader.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from turngate.common.safe_text import make_encodable
from turngate.errors import SandboxError, SandboxGone, TaskError, TurngateError
from turngate.tasks.grading import function, rubric, script, swe
from turngate.tasks.grading.result import OUTPUT_FOLLOWS, GraderLog, GraderResult, OutputUnreadable, Undecided
from turngate.tasks.grading.turn_rewards import check_grade
from turngate.tasks.grading.types import Grade, GradingEnvironment, Work
from turngate.tasks.host_env import find_host_values
from turngate.tasks.task import Function, Part, Rubric, Script, Swe, Task

logger = logging.getLogger(__name__)

SingleGrader = Script | Function | Swe


async def grade(task: Task, work: Work | None, environment: GradingEnvironment) -> Grade:
    """Grade the agent's work, or the untouched task if `work` is None. Raise only `CancelledError`."""
    started = time.monotonic()
    log = GraderLog(find_host_values(task))
    result = await _grade_work(task, work, environment, log)
    if environment.log is not None:
        try:
            await asyncio.to_thread(log.write, environment.log)
        except OSError as error:
            note = f"the log could not be written to {environment.log}: {error.strerror}"
            result = msgspec.structs.replace(result, notes=(*result.notes, note))
        else:
            if result.kind == "invalid task" and log.has_output:
                note = f"the grader's complete output is in {environment.log}"
                result = msgspec.structs.replace(result, notes=(*result.notes, note))
    return msgspec.structs.replace(
        result,
        message=make_encodable(result.message)[:4000],
        log=make_encodable(log.tail()),
        seconds=round(time.monotonic() - started, 3),
    )


async def _grade_work(task: Task, work: Work | None, environment: GradingEnvironment, log: GraderLog) -> Grade:
    if task.grader is None:
        return Grade(
            kind="invalid task",
            message=f"task {task.id} has no grader; add tests/test.sh to its folder, or the field 'grader' to its row",
        )
    if work is not None and work.lost:
        return Grade(kind="agent failed", message=work.lost)
    if not isinstance(task.grader, Rubric):
        return await _grade_with(task, task.grader, work, environment, log)

    async def grade_part(part: Part) -> Grade:
        log.add(f"part {part.name}", b"")
        return await _grade_with(task, part.grader, work, environment, log)

    try:
        return await rubric.grade_rubric(task.grader, grade_part)
    except TaskError as error:
        return Grade(kind="invalid task", message=error.message)


async def _grade_with(
    task: Task, grader: SingleGrader, work: Work | None, environment: GradingEnvironment, log: GraderLog
) -> Grade:
    """Grade with one grader.

    If it gives no reward for the work, run it on the untouched task to find out whether the task or the work is at fault.
    """
    control = partial(_run_control, task, grader, environment)
    try:
        return (await _run_with_retry(task, grader, work, environment, log)).grade
    except Undecided as reason:
        output = f"{OUTPUT_FOLLOWS}{reason.output}" if reason.output else ""
        if work is None:
            message = f"the grader returns no reward for the untouched task: {reason}{output}"
            return Grade(kind="invalid task", message=message)
        try:
            await control()
        except Undecided as control_reason:
            is_same = str(control_reason) == str(reason)
            untouched = "fails in the same way" if is_same else f"also failed: {control_reason}"
            message = f"{reason}; on the untouched task, the grader {untouched}{output}"
            return Grade(kind="invalid task", message=message)
        except Exception as error:  # every failure becomes a grade
            return _grade_failure(task, error)
        broken = f"{reason}. The same grader succeeds on the untouched task, so the work broke the grader{output}"
        return Grade(kind="graded", reward=0.0, resolved=False if isinstance(grader, Swe) else None, message=broken)
    except Exception as error:  # every failure becomes a grade
        return _grade_failure(task, error)


async def _run_with_retry(
    task: Task, grader: SingleGrader, work: Work | None, environment: GradingEnvironment, log: GraderLog
) -> GraderResult:
    if work is None:
        return await _run_grader(task, grader, None, environment, log)
    try:
        return await _run_on_work(task, grader, work, environment, log)
    except (SandboxGone, OutputUnreadable) as error:
        log.add(f"{_describe_loss(error)}; trying once more in a new sandbox", b"")
    try:
        return await _run_on_work(task, grader, work, environment, log)
    except (SandboxGone, OutputUnreadable) as error:
        raise Undecided(f"{_describe_loss(error)}, twice") from error


def _describe_loss(error: SandboxError) -> str:
    if isinstance(error, OutputUnreadable):
        return f"the output that the work left in the grader's sandbox could not be read ({error.message})"
    return f"the grader's sandbox was lost ({error.message})"


async def _run_on_work(
    task: Task, grader: SingleGrader, work: Work, environment: GradingEnvironment, log: GraderLog
) -> GraderResult:
    """Run a grader on the work.

    Convert an unexpected error to `Undecided`, so that a run on the untouched task shows whether the work caused the error.
    """
    try:
        return await _run_grader(task, grader, work, environment, log)
    except (Undecided, TurngateError, OSError):
        raise
    except Exception as error:
        logger.error("task %s: unexpected error while grading", task.id, exc_info=error)
        raise Undecided(f"grading failed with {type(error).__name__}: {str(error)[:500]}") from error


async def _run_grader(
    task: Task, grader: SingleGrader, work: Work | None, environment: GradingEnvironment, log: GraderLog
) -> GraderResult:
    control = partial(_run_control, task, grader, environment)
    match grader:
        case Script():
            return await script.run_grader(task, grader, work, environment, log, control)
        case Function():
            result = await function.run_grader(task, grader, work, environment, log, control)
            return msgspec.structs.replace(result, grade=await check_grade(result.grade, work))
        case Swe():
            return await swe.run_grader(task, grader, work, environment, log, control)


def _grade_failure(task: Task, error: Exception) -> Grade:
    if isinstance(error, TaskError):
        return Grade(kind="invalid task", message=error.message)
    if not isinstance(error, SandboxError | OSError):
        logger.error("task %s: unexpected error while grading", task.id, exc_info=error)
    message = error.message if isinstance(error, TurngateError) else f"{type(error).__name__}: {error}"
    return Grade(kind="infrastructure fault", message=message)


# ---- the control ----

_control_results: dict[str, GraderResult | Undecided] = {}
_control_locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()


async def _run_control(task: Task, grader: SingleGrader, environment: GradingEnvironment) -> GraderResult:
    """Run a grader on the untouched task, to compare with its run on the work. Cache the result or `Undecided`, but no other error."""
    files = await asyncio.to_thread(_fingerprint_files, task, grader)
    identity = repr((task, grader, files, environment.backend.name, environment.image, environment.resources))
    key = hashlib.sha256(identity.encode("utf-8", "backslashreplace")).hexdigest()
    lock = _control_locks.setdefault(key, asyncio.Lock())
    async with lock:
        if key not in _control_results:
            try:
                _control_results[key] = await _run_grader(task, grader, None, environment, GraderLog())
            except Undecided as reason:
                _control_results[key] = reason
    result = _control_results[key]
    if isinstance(result, Undecided):
        raise Undecided(str(result))
    return result


def _fingerprint_files(task: Task, grader: SingleGrader) -> list[tuple[str, int, int]]:
    """Return the path, size and modification time of the files that set up the task or grade it, so that an edit reruns the control.

    Modules that a grading function imports are not included.
    """
    paths = [task.files, task.dockerfile, grader.files if isinstance(grader, Script) else None]
    if isinstance(grader, Function) and (file := function.find_function_file(task, grader.name)) is not None:
        paths.append(file)
    fingerprints = []
    for root in paths:
        if root is None:
            continue
        below = [Path(folder) / name for folder, folders, files in os.walk(root) for name in (*folders, *files)]
        for path in (root, *sorted(below)):
            with suppress(OSError):
                status = path.lstat()
                fingerprints.append((str(path), status.st_size, status.st_mtime_ns))
    return fingerprints
