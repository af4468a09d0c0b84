"""Test eviction: idle sessions leave memory without any visible effect."""

from __future__ import annotations

import asyncio
import gc
import math
import time
import weakref
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from tests.kit import Gated, Running, calls, gateway, result, say, tool, until, user
from turngate.common import clock
from turngate.config import load_config
from turngate.errors import ConfigError, NotFound
from turngate.gateway.eviction import Evictor, trim_memory
from turngate.trace.tool_schema import MAX_WAIT_S
from turngate.trace.tree import Context, Sampled

HI = [user("Hi")]


async def evict_idle(g: Running) -> int:
    """Run an eviction sweep as if an hour had passed."""
    return await g.app.evictor.sweep(time.time() + 3600)


async def test_evicted_session_continues_in_one_row() -> None:
    async with gateway([say("One."), say("Two."), say("Three.")]) as g:
        session, history = await g.open(), list(HI)
        for text in ("Next", "Last", "Bye"):
            reply = await g.ask(session.key, history)
            history += [reply.message(), user(text)]
            shown = await g.show(session.id)
            assert await evict_idle(g) == 1 and g.live(session.id).is_evicted
            assert await g.show(session.id) == shown
            assert g.live(session.id).is_evicted, "showing a session does not load its trace"
        await g.seal(session.id)
        turns = await g.turns(session.id)
        (row,) = await g.samples(session.id)
        assert [turn["cause"] for turn in turns] == [None, None, None]
        assert row["ids"] == [*g.engine.received[-1].prompt.tolist(), *turns[-1]["ids"]]
        assert sum(row["mask"]) == sum(len(turn["ids"]) for turn in turns)


async def test_session_state_outside_trace_survives_eviction() -> None:
    async with gateway([say("One."), say("Two.")]) as g:
        session = await g.open(limits={"turns": 1})
        await g.ask(session.key, HI)
        g.live(session.id).engine_silence.begin()
        await evict_idle(g)
        farewell = await g.ask(session.key, HI)
        assert "reached its limit (turns)" in farewell.content
        shown = await g.show(session.id)
        assert (shown["turns"], shown["stop"]) == (1, "turns") and shown["unheard_s"] > 0


async def test_session_with_call_in_flight_is_not_evicted() -> None:
    async with gateway(engine=Gated([say("Hello.")])) as g:
        session = await g.open()
        call = g.start(g.ask(session.key, HI))
        await until(lambda: g.gated.waiting)
        assert await evict_idle(g) == 0 and not g.live(session.id).is_evicted
        g.gated.gate.set()
        assert (await call).content == "Hello."
        assert await evict_idle(g) == 1 and await evict_idle(g) == 0, "a session is evicted once"


async def test_session_with_pending_tool_call_is_not_evicted() -> None:
    async with gateway() as g:
        session = await g.open(
            tools=[{"name": "look", "description": "Look.", "schema": {"type": "object"}, "wait_s": MAX_WAIT_S}]
        )
        agent = g.http(key=session.key)
        call = g.start(agent.post("/v1/tools/look", json={}))
        await until(lambda: g.live(session.id).pending_tool_calls)
        assert await evict_idle(g) == 0
        call.cancel()


async def test_parallel_calls_load_evicted_trace_once() -> None:
    async with gateway([say("One."), say("Two."), say("Three.")]) as g:
        session = await g.open()
        reply = await g.ask(session.key, HI)
        await evict_idle(g)
        history = [*HI, reply.message()]
        await asyncio.gather(*(g.ask(session.key, [*history, user(text)]) for text in ("A", "B")))
        trace = g.live(session.id).trace
        stored = await g.trace(session.id)
        assert sorted(node.id for node in trace.nodes) == sorted(node["id"] for node in stored["nodes"])
        assert len(trace.roots) == 1 and len(stored["nodes"]) == 6


async def test_tool_call_ids_match_after_eviction() -> None:
    tool_call = say(calls(("read_file", {"path": "a"})))
    async with gateway([tool_call, say("Done.")]) as g:
        session = await g.open()
        reply = await g.ask(session.key, HI, tools=[tool(path={"type": "string"})])
        await evict_idle(g)
        history = [*HI, reply.message(), result(reply.calls[0], "text")]
        await g.ask(session.key, history, tools=[tool(path={"type": "string"})])
        assert len(await g.samples(session.id)) == 1


async def test_evicted_turn_can_be_marked_undelivered() -> None:
    async with gateway([say("One.")]) as g:
        session = await g.open()
        await g.ask(session.key, HI)
        (turn,) = await g.turns(session.id)
        await evict_idle(g)
        g.app.recorder.mark_undelivered(g.live(session.id), turn["id"])
        assert g.live(session.id).is_evicted, "marking does not load the trace"
        assert [turn["delivered"] for turn in await g.turns(session.id)] == [False]
        assert [node.delivered for node in g.live(session.id).trace.turns()] == [False]


async def test_unreadable_evicted_trace_refuses_calls(tmp_path: Path) -> None:
    async with gateway([say("One."), say("Two.")], data=tmp_path) as g:
        session = await g.open()
        reply = await g.ask(session.key, HI)
        await evict_idle(g)
        with g.app.store._writing() as db:
            db.execute("UPDATE nodes SET ids=zeroblob(8) WHERE kind='sampled'")
        with pytest.raises(openai.InternalServerError, match="damaged on disk"):
            await g.ask(session.key, [*HI, reply.message(), user("More")])
        assert len(g.engine.received) == 1 and g.live(session.id).is_evicted
        assert not g.live(session.id).busy
        error = g.live(session.id).last_error
        assert error is not None and error.boundary == "store", "the error is not blamed on the agent"
        shown = (await g.admin.get(f"/admin/sessions/{session.id}")).json()
        assert shown["last_error"]["boundary"] == "store" and (shown["turns"], shown["tokens"]) == (1, None)
        sealed = await g.admin.post(f"/admin/sessions/{session.id}/seal")
        assert sealed.is_success, "a session with a damaged trace can be sealed"
        assert sealed.json()["status"] == "sealed" and "damaged on disk" in sealed.json()["unreadable"]


async def send_slowly(g: Running, key: str, meanwhile: Callable[[], Awaitable[object]]) -> bytes:
    """Send a call, await `meanwhile` before the end of its body, and return the raw response."""
    body = msgspec.json.encode({"model": "m", "messages": HI})
    reader, writer = await asyncio.open_connection("127.0.0.1", int(g.root.rpartition(":")[2]))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n"
    writer.write(head.encode() + b"expect: 100-continue\r\n\r\n" + body[:9])
    await reader.readuntil(b"100 Continue\r\n\r\n")  # the gateway has authenticated the call and wants the body
    await meanwhile()
    writer.write(body[9:])
    answer = await reader.read(10_000)
    writer.close()
    return answer


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "opened again"])
async def test_call_to_session_deleted_while_body_is_sent(again: bool) -> None:
    async with gateway([say("One."), say("Two.")]) as g:
        session = await g.open(id="same")
        await g.ask(session.key, HI)
        old = g.live("same")

        async def end() -> None:
            assert (await g.admin.delete("/admin/sessions/same")).is_success
            assert await evict_idle(g) == 1
            if again:
                await g.ask((await g.open(id="same")).key, HI)

        answer = await send_slowly(g, session.key, end)
        assert b"409 Conflict" in answer and b"this session is cancelled (deleted)" in answer
        assert old.is_evicted, "its trace is not loaded"
        g.app.recorder.mark_undelivered(old, 2)
        with pytest.raises(NotFound):  # never the trace of a new session with the same id
            _ = old.trace
        if again:
            assert [turn["delivered"] for turn in await g.turns("same")] == [True]


async def test_evicted_session_can_be_sealed_cancelled_and_deleted() -> None:
    async with gateway([say("One."), say("Two."), say("Three.")]) as g:
        for end in (g.seal, g.cancel):
            session = await g.open()
            await g.ask(session.key, HI)
            await evict_idle(g)
            assert (await end(session.id))["turns"] == 1
            assert len(await g.turns(session.id)) == 1
        session = await g.open()
        await evict_idle(g)
        assert (await g.admin.delete(f"/admin/sessions/{session.id}")).is_success


async def test_ended_session_with_pending_tool_call_is_evicted_later() -> None:
    async with gateway([say("One.")]) as g:
        session = await g.open()
        await g.ask(session.key, HI)
        ended = g.live(session.id)
        await g.seal(session.id)
        ended.pending_tool_calls[1] = asyncio.get_running_loop().create_future()
        assert await evict_idle(g) == 0
        del ended.pending_tool_calls[1]
        assert await evict_idle(g) == 1 and ended.is_evicted


async def test_call_at_fence_or_being_written_prevents_eviction(tmp_path: Path) -> None:
    async with gateway([say("One."), say("Two.")], data=tmp_path, durability="disk") as g:
        session = await g.open()
        await g.pause()
        call = g.start(g.ask(session.key, HI))
        await until(lambda: g.live(session.id).in_flight)
        assert await evict_idle(g) == 0
        with g.locked_database():
            g.app.fence.resume(None)
            await until(lambda: len(g.engine.received) == 1)
            call.cancel()  # disconnect while the turn is being written
            await asyncio.sleep(0.1)
            assert await evict_idle(g) == 0
        await until(lambda: not g.live(session.id).busy)
        assert await evict_idle(g) == 1
        await g.ask(session.key, HI)
        first, again = await g.turns(session.id)
        assert (first["delivered"], again["cause"], again["parent"]) == (False, "retry", first["parent"])


async def equal_answers(evict: bool, *, new: bool) -> list[object]:
    """Sample the same answer twice, continue from it with a `new` or the same message, and return the resulting tree."""
    async with gateway([say("One."), say("Two."), say("One."), say("Three.")]) as g:
        session = await g.open()
        reply = await g.ask(session.key, HI)
        await g.ask(session.key, [*HI, reply.message(), user("Next")])
        assert (await g.ask(session.key, HI)).content == reply.content
        if evict:
            assert await evict_idle(g) == 1
        await g.ask(session.key, [*HI, reply.message(), user("Other" if new else "Next")])
        nodes = (await g.trace(session.id))["nodes"]
        return [(node["id"], node["parent"], node["cause"]) for node in nodes]


async def test_eviction_does_not_change_which_equal_answer_matches() -> None:
    for new, end in ((True, [(6, 5, None), (7, 6, None)]), (False, [(6, 3, "resample")])):
        tree = await equal_answers(False, new=new)
        assert tree == await equal_answers(True, new=new)
        assert tree[5:] == end


@pytest.mark.parametrize("evict", [False, True])
async def test_newest_equal_answer_is_extended(evict: bool) -> None:
    async with gateway([say("One."), say("Two."), say("One."), say("Three.")]) as g:
        session = await g.open()
        answer = (await g.ask(session.key, HI)).message()
        await g.ask(session.key, [*HI, answer])
        await g.ask(session.key, HI)  # the latest answer
        if evict:
            assert await evict_idle(g) == 1
        await g.ask(session.key, [*HI, answer, user("Next")])
        nodes = (await g.trace(session.id))["nodes"]
        assert [(n["id"], n["parent"], n["cause"]) for n in nodes[4:]] == [
            (5, 1, "resample"),
            (6, 5, None),
            (7, 6, None),
        ]


@pytest.mark.parametrize("evict", [False, True])
async def test_equal_answers_are_distinguished_by_reasoning(evict: bool) -> None:
    scripted = [say("One."), say("Two."), say("<think>\ny\n</think>\n\nOne."), say("Three."), say("Four.")]
    async with gateway(scripted) as g:
        session = await g.open()
        plain = (await g.ask(session.key, HI)).message()
        await g.ask(session.key, [*HI, plain, user("V")])
        thought = (await g.ask(session.key, HI)).message()
        await g.ask(session.key, [*HI, thought, user("V")])
        if evict:
            assert await evict_idle(g) == 1
        await g.ask(session.key, [*HI, plain, user("V"), user("W")])
        nodes = (await g.trace(session.id))["nodes"]
        assert [(n["id"], n["parent"]) for n in nodes[-2:]] == [(8, 2), (9, 8)]


async def test_views_are_consistent_with_concurrent_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway([say("One."), say("Two.")]) as g:
        session = await g.open(metadata={"group": "g"})
        reply = await g.ask(session.key, HI, tools=[tool()])
        await evict_idle(g)
        build, read = g.app.session_views.build, g.app.stale._reader.run

        async def build_then_continue(*call: Any) -> Any:
            view = await build(*call)
            await g.ask(session.key, [*HI, reply.message(), user("More")], tools=[tool()])
            return view

        monkeypatch.setattr(g.app.session_views, "build", build_then_continue)
        shown = await g.app.directory.show(session.id)
        assert (shown.turns, shown.roles) == (2, {"main": 2}), "turns and roles are consistent"
        await evict_idle(g)

        async def read_then_replace(*call: Any) -> Any:
            view = await read(*call)
            await g.app.sessions.delete(session.id)
            await g.open(id=session.id, metadata={"group": "g"})
            return view

        monkeypatch.setattr(g.app.stale._reader, "run", read_then_replace)
        await g.app.stale.cancel([("", 0)], 1)
        assert g.live(session.id).status == "open", "the new session is not stale"


async def test_sweep_evicts_in_batches_and_skips_used_sessions() -> None:
    async with gateway([say("One.")]) as g:
        sessions = [g.live((await g.open()).id) for _ in range(40)]
        sweep = asyncio.create_task(g.app.evictor.sweep(time.time() + 3600))
        steps = [0]
        while not sweep.done():
            await asyncio.sleep(0)
            steps.append(sum(session.is_evicted for session in sessions))
            sessions[-1].last_used = time.time() + 3600
        assert max(b - a for a, b in pairwise(steps)) <= 16
        assert await sweep == 39 and not sessions[-1].is_evicted


async def test_views_do_not_load_evicted_traces() -> None:
    async with gateway([say("One."), say("Two.")]) as g:
        idle, ended = await g.open(), await g.open()
        for session in (idle, ended):
            await g.ask(session.key, HI)
        await g.seal(ended.id)
        await evict_idle(g)
        gc.collect()
        gc.disable()
        before = {id(o) for o in gc.get_objects() if type(o) in (Context, Sampled)}  # of other tests
        try:
            for session in (idle, ended):
                await g.show(session.id)
                await g.trace(session.id)
                await g.samples(session.id)
            await g.seal(ended.id)
            nodes = [o for o in gc.get_objects() if type(o) in (Context, Sampled) and id(o) not in before]
        finally:
            gc.enable()
        assert not nodes


async def test_memory_is_trimmed_at_most_once_per_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[None] = []
    monkeypatch.setattr("turngate.gateway.eviction.trim_memory", lambda: trims.append(None))
    monkeypatch.setattr("turngate.gateway.eviction._TRIM_S", 3600.0)
    async with gateway([say("One.")] * 5, rest_s=0.02) as g:
        g.app.evictor._trimmed = -math.inf
        session = await g.open()
        for _ in range(5):
            await g.ask(session.key, HI)
            await until(lambda: g.live(session.id).is_evicted)
        assert len(trims) == 1


async def test_idle_session_is_evicted_and_counted() -> None:
    async with gateway([say("One."), say("Two.")], rest_s=0.2) as g:
        session = await g.open()
        reply = await g.ask(session.key, HI)
        await until(lambda: g.live(session.id).is_evicted)
        metrics = (await g.admin.get("/metrics")).text
        assert "turngate_sessions_resting 1" in metrics and "turngate_sessions_open 1" in metrics
        await g.ask(session.key, [*HI, reply.message(), user("More")])
        assert len(await g.samples(session.id)) == 1


async def test_eviction_frees_trace_without_garbage_collection() -> None:
    async with gateway([say("One."), say("Two.")]) as g:
        idle, ended = await g.open(), await g.open()
        await g.ask(idle.key, HI)
        await g.ask(ended.key, HI)
        traces = [weakref.ref(g.live(session.id).trace) for session in (idle, ended)]
        nodes = {id(node) for session in (idle, ended) for node in g.live(session.id).trace.nodes}
        gc.collect()
        gc.disable()
        try:
            await g.seal(ended.id)
            assert await evict_idle(g) == 2
            assert [trace() for trace in traces] == [None, None]
            assert not [o for o in gc.get_objects() if type(o) in (Context, Sampled) and id(o) in nodes]
        finally:
            gc.enable()
        assert len(await g.turns(ended.id)) == len(await g.turns(idle.id)) == 1


async def test_longest_unused_sessions_above_the_limit_are_evicted() -> None:
    async with gateway([say("One.")] * 6, rest_s=0) as g:
        sessions = [await g.open() for _ in range(4)]
        for session in sessions:
            await g.ask(session.key, HI)
        size = g.live(sessions[0].id).trace.estimate_bytes()
        evictor = Evictor(g.app.store, g.app.sessions, rest_s=0, max_loaded_mb=2.5 * size / 1e6)
        assert await evictor.sweep(clock.now()) == 2
        assert [g.live(s.id).is_evicted for s in sessions] == [True, True, False, False]
        await g.ask(sessions[0].key, HI)  # a second turn: this session is larger than the others now
        assert await evictor.sweep(clock.now()) == 1
        assert [g.live(s.id).is_evicted for s in sessions] == [False, True, True, False]
        assert evictor.interval_s == 1.0
        assert [len(await g.turns(s.id)) for s in sessions] == [2, 1, 1, 1]
    with pytest.raises(ConfigError, match=r"max_loaded_mb must be 0 \(no limit\) or greater, not -1"):
        load_config(None, {"max_loaded_mb": -1})


async def test_zero_rest_s_disables_eviction(tmp_path: Path) -> None:
    async with gateway([say("One.")], rest_s=0) as g:
        session = await g.open()
        await g.ask(session.key, HI)
        assert await evict_idle(g) == 0
    with pytest.raises(ConfigError, match=r"rest_s must be 0 \(no limit\) or greater, not -1\.0"):
        load_config(None, {"rest_s": -1})
    with pytest.raises(ConfigError, match="rest_s"):
        load_config(None, {"rest_s": float("nan")})


def test_trim_memory_can_be_repeated() -> None:
    trim_memory()
    trim_memory()
