"""`grade` is the one way to a reward, whoever started the rollout: one agent's work, one task, a fresh place.

    a grader decides                              → graded
    it does not (dies, hangs, says nothing)       → the control: the same grader on the untouched task, once per task and process
        the control gives a grade                 → the work broke the grader: graded, 0.0, and the message says how
        the control does not either               → invalid task
    a sandbox, a disk or Turngate itself fails    → infrastructure fault, to be tried again; never a reward

A sandbox that ends by itself under a work (its processes can do that), or out of which nothing can be read any more, is tried once more
before the work is blamed for it.
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
from turngate.tasks.grading.result import GraderLog, GraderResult, OutputUnreadable, Undecided
from turngate.tasks.grading.types import Grade, GradingEnvironment, Work
from turngate.tasks.task import Function, Part, Rubric, Script, Swe, Task

logger = logging.getLogger(__name__)

SingleGrader = Script | Function | Swe


async def grade(task: Task, work: Work | None, ground: GradingEnvironment) -> Grade:
    """What the host decides about a work; None: about the task untouched. Raises nothing but `CancelledError`."""
    began = time.monotonic()
    log = GraderLog()
    found = await _grade_work(task, work, ground, log)
    if ground.log is not None:
        try:
            await asyncio.to_thread(log.write, ground.log)
        except OSError as error:
            found = msgspec.structs.replace(
                found, notes=(*found.notes, f"the log could not be written: {error.strerror}")
            )
    return msgspec.structs.replace(
        found,
        message=make_encodable(found.message)[:4000],
        log=make_encodable(log.tail()),
        seconds=round(time.monotonic() - began, 3),
    )


async def _grade_work(task: Task, work: Work | None, ground: GradingEnvironment, log: GraderLog) -> Grade:
    if task.grader is None:
        return Grade(kind="invalid task", message=f"task {task.id} has no grader: nothing decides about its outcome")
    if work is not None and work.lost:
        return Grade(kind="agent failed", message=work.lost)
    if not isinstance(task.grader, Rubric):
        return await _grade_with(task, task.grader, work, ground, log)

    async def part(one: Part) -> Grade:
        log.add(f"part {one.name}", b"")
        return await _grade_with(task, one.grader, work, ground, log)

    try:
        return await rubric.grade_rubric(task.grader, part)
    except TaskError as error:
        return Grade(kind="invalid task", message=error.message)


async def _grade_with(
    task: Task, grader: SingleGrader, work: Work | None, ground: GradingEnvironment, log: GraderLog
) -> Grade:
    """By one grader. Where it gave nothing, its control says whose fault that is."""
    control = partial(_run_control, task, grader, ground)
    try:
        return (await _run_with_retry(task, grader, work, ground, log)).grade
    except Undecided as why:
        if work is None:
            return Grade(kind="invalid task", message=f"the grader gives no reward for the untouched task: {why}")
        try:
            await control()
        except Undecided as neither:
            return Grade(kind="invalid task", message=f"{why}; and for the untouched task: {neither}")
        except Exception as error:  # every failure is a grade
            return _grade_failure(error)
        broken = f"{why}. For the untouched task the same grader decides, so it is the work that broke it"
        return Grade(kind="graded", reward=0.0, resolved=False if isinstance(grader, Swe) else None, message=broken)
    except Exception as error:  # every failure is a grade
        return _grade_failure(error)


async def _run_with_retry(
    task: Task, grader: SingleGrader, work: Work | None, ground: GradingEnvironment, log: GraderLog
) -> GraderResult:
    if work is None:
        return await _run_grader(task, grader, None, ground, log)
    try:
        return await _run_on_work(task, grader, work, ground, log)
    except (SandboxGone, OutputUnreadable) as error:
        log.add(f"{_describe_loss(error)}; once more in another", b"")
    try:
        return await _run_on_work(task, grader, work, ground, log)
    except (SandboxGone, OutputUnreadable) as error:
        raise Undecided(f"{_describe_loss(error)}, twice") from error


def _describe_loss(error: SandboxError) -> str:
    if isinstance(error, OutputUnreadable):
        return f"what the work left in the grader's sandbox cannot be read ({error.message})"
    return f"the grader's sandbox was ended from within ({error.message})"


async def _run_on_work(
    task: Task, grader: SingleGrader, work: Work, ground: GradingEnvironment, log: GraderLog
) -> GraderResult:
    """Whatever a work does to us that nobody thought of: the control says whether it happens without the work too."""
    try:
        return await _run_grader(task, grader, work, ground, log)
    except (Undecided, TurngateError, OSError):
        raise
    except Exception as error:
        logger.error("grading failed in a way that nobody thought of", exc_info=error)
        raise Undecided(f"grading failed with {type(error).__name__}: {str(error)[:500]}") from error


async def _run_grader(
    task: Task, grader: SingleGrader, work: Work | None, ground: GradingEnvironment, log: GraderLog
) -> GraderResult:
    control = partial(_run_control, task, grader, ground)
    match grader:
        case Script():
            return await script.run_grader(task, grader, work, ground, log, control)
        case Function():
            return await function.run_grader(task, grader, work, ground, log, control)
        case Swe():
            return await swe.run_grader(task, grader, work, ground, log, control)


def _grade_failure(error: Exception) -> Grade:
    if isinstance(error, TaskError):
        return Grade(kind="invalid task", message=error.message)
    if not isinstance(error, SandboxError | OSError):
        logger.error("grading failed in a way that nobody thought of", exc_info=error)
    said = error.message if isinstance(error, TurngateError) else f"{type(error).__name__}: {error}"
    return Grade(kind="infrastructure fault", message=said)


# ---- the control ----

_control_results: dict[str, GraderResult | Undecided] = {}
_control_locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()


async def _run_control(task: Task, grader: SingleGrader, ground: GradingEnvironment) -> GraderResult:
    """The same grader on the untouched task. Its decision is remembered; a fault of a sandbox is not."""
    files = await asyncio.to_thread(_fingerprint_files, task, grader)
    what = repr((task, grader, files, ground.backend.name, ground.image, ground.resources))
    key = hashlib.sha256(what.encode("utf-8", "backslashreplace")).hexdigest()
    lock = _control_locks.setdefault(key, asyncio.Lock())
    async with lock:
        if key not in _control_results:
            try:
                _control_results[key] = await _run_grader(task, grader, None, ground, GraderLog())
            except Undecided as why:
                _control_results[key] = why
    known = _control_results[key]
    if isinstance(known, Undecided):
        raise Undecided(str(known))
    return known


def _fingerprint_files(task: Task, grader: SingleGrader) -> list[tuple[str, int, int]]:
    """What a task's paths lead to, as cheaply as it can be told apart: somebody may mend a task while we run."""
    places = [task.files, task.dockerfile, grader.files if isinstance(grader, Script) else None]
    if isinstance(grader, Function) and (file := function.find_function_file(task, grader.name)) is not None:
        places.append(file)
    found = []
    for place in places:
        if place is None:
            continue
        below = [Path(folder) / name for folder, folders, files in os.walk(place) for name in (*folders, *files)]
        for path in (place, *sorted(below)):
            with suppress(OSError):
                seen = path.lstat()
                found.append((str(path), seen.st_size, seen.st_mtime_ns))
    return found
