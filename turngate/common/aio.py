"""Helpers for asyncio code."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_IDLE_S = 0.00005  # seconds of CPU time; a loop iteration that takes less had almost nothing else to run


async def give_way(seconds: float) -> None:
    """Let other tasks of the event loop run between two steps of a long job.

    Return when the loop has almost nothing else to run, or when other tasks have used `seconds` of CPU time. If `seconds` is the duration
    of the previous step, the job takes at most half of a busy loop's time.
    """
    before = time.thread_time()
    end = before + seconds
    while True:
        await asyncio.sleep(0)
        now = time.thread_time()
        if now - before < _IDLE_S or now >= end:
            return
        before = now


async def run_to_completion(work: Coroutine[Any, Any, T]) -> T:
    """Await work that must not be interrupted. A cancellation takes effect only after the work has finished."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        if not task.cancelled():
            task.exception()  # mark it as retrieved
        raise asyncio.CancelledError
    return task.result()


async def keep_cancellation(work: Awaitable[T]) -> T:
    """Await work that may swallow a cancellation. Afterwards, raise `CancelledError` if the task was cancelled in the meantime.

    Before Python 3.12, `asyncio.wait_for` can swallow a cancellation.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    result = await work
    if task.cancelling() > before:
        raise asyncio.CancelledError
    return result


async def wait_for_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Wait until all tasks have ended, and mark their exceptions as retrieved."""
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()
