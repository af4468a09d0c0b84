"""Test what stays in memory: nothing of a call once it is answered, nothing of an ended session, and little of an evicted one."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

import openai
import pytest

from tests.kit import Running, count_cycles, gateway, say, user

HI = [user("Hi " + "there " * 500)]
SESSIONS = 20


@pytest.mark.parametrize("mode", ["async", "async stream"])
async def test_call_leaves_no_reference_cycle(mode: str) -> None:
    async with gateway([say("One.")] * 4) as g:
        session = await g.open()
        await g.ask(session.key, HI, mode)
        with count_cycles() as found:
            for _ in range(3):
                await g.ask(session.key, HI, mode)
        assert not found


@pytest.mark.parametrize("failing", [False, True], ids=["loaded", "damaged"])
async def test_loading_evicted_trace_leaves_no_reference_cycle(failing: bool) -> None:
    async with gateway([say("One.")] * 4) as g:
        session = await g.open()

        async def ask_evicted() -> None:
            await evict(g, session.id)
            with pytest.raises(openai.InternalServerError) if failing else nullcontext():
                await g.ask(session.key, HI)

        await g.ask(session.key, HI)
        if failing:
            with g.app.store._writing() as db:
                db.execute("UPDATE nodes SET ids=zeroblob(8) WHERE kind='sampled'")
        await ask_evicted()
        with count_cycles() as found:
            for _ in range(2):
                await ask_evicted()
        assert not found


async def end(g: Running, session_id: str) -> None:
    await g.seal(session_id)
    await g.app.evictor.sweep(time.time())


async def evict(g: Running, session_id: str) -> None:
    await g.app.evictor.sweep(time.time() + 3600)


@pytest.mark.parametrize(("leave", "blocks"), [(end, 15), (evict, 75)], ids=["ended", "evicted"])
async def test_memory_per_session_is_bounded(leave: Callable[[Running, str], Awaitable[None]], blocks: int) -> None:
    """`blocks`: how many blocks of memory may remain for each session. A small object takes one."""

    async def run_sessions(g: Running) -> int:
        for _ in range(SESSIONS):
            session = await g.open()
            await g.ask(session.key, HI)
            await leave(g, session.id)
        g.engine.received.clear()
        gc.collect()
        return sys.getallocatedblocks()

    async with gateway([say("One.")] * (2 * SESSIONS)) as g:
        before = await run_sessions(g)
        kept = (await run_sessions(g) - before) / SESSIONS
        assert kept < blocks
