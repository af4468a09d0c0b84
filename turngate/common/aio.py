"""Helpers for asyncio code."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


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
