"""Helpers for asyncio code."""

from __future__ import annotations

import asyncio

import pytest

from turngate.common.aio import keep_cancellation


async def swallow_cancellation(started: asyncio.Event) -> str:
    """Return a result although it is cancelled, as `asyncio.wait_for` does before Python 3.12 if both happen at once."""
    started.set()
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        return "done"
    return "not cancelled"


async def test_swallowed_cancellation_is_raised() -> None:
    started = asyncio.Event()
    task = asyncio.create_task(keep_cancellation(swallow_cancellation(started)))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_work_after_an_earlier_cancellation_returns_its_result() -> None:
    async def work() -> str:
        return "cleaned up"

    async def clean_up_when_cancelled(started: asyncio.Event) -> str:
        try:
            started.set()
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return await keep_cancellation(work())
        return "not cancelled"

    started = asyncio.Event()
    task = asyncio.create_task(clean_up_when_cancelled(started))
    await started.wait()
    task.cancel()
    assert await task == "cleaned up"
