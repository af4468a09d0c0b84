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

from turngate.errors import SandboxError, SandboxGone, TaskError, TurngateError
from turngate.tasks.grading import function, rubric, script, swe
from turngate.tasks.grading.result import Found, Log, Spoiled, Undecided
from turngate.tasks.grading.types import Grade, Ground, Work
from turngate.tasks.grading.work import spelled
from turngate.tasks.task import Function, Part, Rubric, Script, Swe, Task

logger = logging.getLogger(__name__)

One = Script | Function | Swe


async def grade(task: Task, work: Work | None, ground: Ground) -> Grade:
    """What the host decides about a work; None: about the task untouched. Raises nothing but `CancelledError`."""
    began = time.monotonic()
    log = Log()
    found = await _graded(task, work, ground, log)
    if ground.log is not None:
        try:
            await asyncio.to_thread(log.write, ground.log)
        except OSError as error:
            found = msgspec.structs.replace(
                found, notes=(*found.notes, f"the log could not be written: {error.strerror}")
            )
    return msgspec.structs.replace(
        found,
        message=spelled(found.message)[:4000],
        log=spelled(log.tail()),
        seconds=round(time.monotonic() - began, 3),
    )


async def _graded(task: Task, work: Work | None, ground: Ground, log: Log) -> Grade:
    if task.grader is None:
        return Grade(kind="invalid task", message=f"task {task.id} has no grader: nothing decides about its outcome")
    if work is not None and work.lost:
        return Grade(kind="agent failed", message=work.lost)
    if not isinstance(task.grader, Rubric):
        return await _one(task, task.grader, work, ground, log)

    async def part(one: Part) -> Grade:
        log.add(f"part {one.name}", b"")
        return await _one(task, one.grader, work, ground, log)

    try:
        return await rubric.graded(task.grader, part)
    except TaskError as error:
        return Grade(kind="invalid task", message=error.message)


async def _one(task: Task, grader: One, work: Work | None, ground: Ground, log: Log) -> Grade:
    """By one grader. Where it gave nothing, its control says whose fault that is."""
    control = partial(_controlled, task, grader, ground)
    try:
        return (await _tried(task, grader, work, ground, log)).grade
    except Undecided as why:
        if work is None:
            return Grade(kind="invalid task", message=f"the grader gives no reward for the untouched task: {why}")
        try:
            await control()
        except Undecided as neither:
            return Grade(kind="invalid task", message=f"{why}; and for the untouched task: {neither}")
        except Exception as error:  # every failure is a grade
            return _failed(error)
        broken = f"{why}. For the untouched task the same grader decides, so it is the work that broke it"
        return Grade(kind="graded", reward=0.0, resolved=False if isinstance(grader, Swe) else None, message=broken)
    except Exception as error:  # every failure is a grade
        return _failed(error)


async def _tried(task: Task, grader: One, work: Work | None, ground: Ground, log: Log) -> Found:
    if work is None:
        return await _attempt(task, grader, None, ground, log)
    try:
        return await _blamed(task, grader, work, ground, log)
    except (SandboxGone, Spoiled) as error:
        log.add(f"{_how(error)}; once more in another", b"")
    try:
        return await _blamed(task, grader, work, ground, log)
    except (SandboxGone, Spoiled) as error:
        raise Undecided(f"{_how(error)}, twice") from error


def _how(error: SandboxError) -> str:
    if isinstance(error, Spoiled):
        return f"what the work left in the grader's sandbox cannot be read ({error.message})"
    return f"the grader's sandbox was ended from within ({error.message})"


async def _blamed(task: Task, grader: One, work: Work, ground: Ground, log: Log) -> Found:
    """Whatever a work does to us that nobody thought of: the control says whether it happens without the work too."""
    try:
        return await _attempt(task, grader, work, ground, log)
    except (Undecided, TurngateError, OSError):
        raise
    except Exception as error:
        logger.error("grading failed in a way that nobody thought of", exc_info=error)
        raise Undecided(f"grading failed with {type(error).__name__}: {str(error)[:500]}") from error


async def _attempt(task: Task, grader: One, work: Work | None, ground: Ground, log: Log) -> Found:
    control = partial(_controlled, task, grader, ground)
    match grader:
        case Script():
            return await script.attempt(task, grader, work, ground, log, control)
        case Function():
            return await function.attempt(task, grader, work, ground, log, control)
        case Swe():
            return await swe.attempt(task, grader, work, ground, log, control)


def _failed(error: Exception) -> Grade:
    if isinstance(error, TaskError):
        return Grade(kind="invalid task", message=error.message)
    if not isinstance(error, SandboxError | OSError):
        logger.error("grading failed in a way that nobody thought of", exc_info=error)
    said = error.message if isinstance(error, TurngateError) else f"{type(error).__name__}: {error}"
    return Grade(kind="infrastructure fault", message=said)


# ---- the control ----

_known: dict[str, Found | Undecided] = {}
_running: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()


async def _controlled(task: Task, grader: One, ground: Ground) -> Found:
    """The same grader on the untouched task. Its decision is remembered; a fault of a sandbox is not."""
    files = await asyncio.to_thread(_files, task, grader)
    what = repr((task, grader, files, ground.backend.name, ground.image, ground.resources))
    key = hashlib.sha256(what.encode("utf-8", "backslashreplace")).hexdigest()
    lock = _running.setdefault(key, asyncio.Lock())
    async with lock:
        if key not in _known:
            try:
                _known[key] = await _attempt(task, grader, None, ground, Log())
            except Undecided as why:
                _known[key] = why
    known = _known[key]
    if isinstance(known, Undecided):
        raise Undecided(str(known))
    return known


def _files(task: Task, grader: One) -> list[tuple[str, int, int]]:
    """What a task's paths lead to, as cheaply as it can be told apart: somebody may mend a task while we run."""
    places = [task.files, task.dockerfile, grader.files if isinstance(grader, Script) else None]
    if isinstance(grader, Function) and (file := function.file(task, grader.name)) is not None:
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
