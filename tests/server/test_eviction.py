"""Idle sessions leave memory without any visible effect."""

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
from turngate.config import load_config
from turngate.errors import ConfigError, NotFound
from turngate.gateway.eviction import trim_memory
from turngate.trace.host_tools import MAX_WAIT_S
from turngate.trace.session import Session
from turngate.trace.tree import Context, Sampled

HI = [user("Hi")]


async def rest(g: Running) -> int:
    """Long after everything that is under way."""
    return await g.app.evictor.sweep(time.time() + 3600)


def live(g: Running, session_id: str) -> Session:
    session = g.app.sessions.find_live(session_id)
    assert session is not None
    return session


async def test_a_session_goes_on_from_its_rest_as_if_it_had_had_none() -> None:
    async with gateway([say("One."), say("Two."), say("Three.")]) as g:
        session, history = await g.open(), list(HI)
        for text in ("Next", "Last", "Bye"):
            heard = await g.ask(session.key, history)
            history += [heard.message(), user(text)]
            shown = await g.show(session.id)
            assert await rest(g) == 1 and live(g, session.id).is_evicted
            assert await g.show(session.id) == shown
            assert live(g, session.id).is_evicted, "a look does not bring it back"
        await g.seal(session.id)
        turns = await g.turns(session.id)
        (row,) = await g.samples(session.id)
        assert [turn["cause"] for turn in turns] == [None, None, None]
        assert row["ids"] == [*g.engine.received[-1].prompt.tolist(), *turns[-1]["ids"]]
        assert sum(row["mask"]) == sum(len(turn["ids"]) for turn in turns)


async def test_what_is_not_in_the_trace_stays() -> None:
    async with gateway([say("One."), say("Two.")]) as g:
        session = await g.open(limits={"turns": 1})
        await g.ask(session.key, HI)
        live(g, session.id).engine_silence.begin()
        await rest(g)
        farewell = await g.ask(session.key, HI)
        assert "reached its limit (turns)" in farewell.content
        shown = await g.show(session.id)
        assert (shown["turns"], shown["stop"]) == (1, "turns") and shown["unheard_s"] > 0


async def test_nobody_is_put_to_rest_in_the_middle_of_a_call() -> None:
    async with gateway(engine=Gated([say("Hello.")])) as g:
        session = await g.open()
        asked = g.start(g.ask(session.key, HI))
        await until(lambda: g.gated.waiting)
        assert await rest(g) == 0 and not live(g, session.id).is_evicted
        g.gated.gate.set()
        assert (await asked).content == "Hello."
        assert await rest(g) == 1 and await rest(g) == 0, "once is enough"


async def test_nobody_is_put_to_rest_while_a_tool_of_the_host_is_asked() -> None:
    async with gateway() as g:
        session = await g.open(
            tools=[{"name": "look", "description": "Look.", "schema": {"type": "object"}, "wait_s": MAX_WAIT_S}]
        )
        agent = g.http(key=session.key)
        asked = g.start(agent.post("/v1/tools/look", json={}))
        await until(lambda: live(g, session.id).pending_tool_calls)
        assert await rest(g) == 0
        asked.cancel()


async def test_two_calls_at_once_wake_one_trace() -> None:
    async with gateway([say("One."), say("Two."), say("Three.")]) as g:
        session = await g.open()
        heard = await g.ask(session.key, HI)
        await rest(g)
        history = [*HI, heard.message()]
        await asyncio.gather(*(g.ask(session.key, [*history, user(text)]) for text in ("A", "B")))
        trace = live(g, session.id).trace
        stored = await g.trace(session.id)
        assert sorted(node.id for node in trace.nodes) == sorted(node["id"] for node in stored["nodes"])
        assert len(trace.roots) == 1 and len(stored["nodes"]) == 6


async def test_calls_are_known_by_their_ids_after_a_rest() -> None:
    asks = say(calls(("read_file", {"path": "a"})))
    async with gateway([asks, say("Done.")]) as g:
        session = await g.open()
        heard = await g.ask(session.key, HI, tools=[tool(path={"type": "string"})])
        await rest(g)
        history = [*HI, heard.message(), result(heard.calls[0], "text")]
        await g.ask(session.key, history, tools=[tool(path={"type": "string"})])
        assert len(await g.samples(session.id)) == 1


async def test_a_reply_that_nobody_took_is_marked_though_the_session_rests() -> None:
    async with gateway([say("One.")]) as g:
        session = await g.open()
        await g.ask(session.key, HI)
        (turn,) = await g.turns(session.id)
        await rest(g)
        g.app.recorder.mark_undelivered(live(g, session.id), turn["id"])
        assert live(g, session.id).is_evicted, "that is no reason to wake it"
        assert [turn["delivered"] for turn in await g.turns(session.id)] == [False]
        assert [node.delivered for node in live(g, session.id).trace.turns()] == [False]


async def test_a_trace_that_cannot_be_read_back_is_refused_and_nothing_is_sampled(tmp_path: Path) -> None:
    async with gateway([say("One."), say("Two.")], data=tmp_path) as g:
        session = await g.open()
        heard = await g.ask(session.key, HI)
        await rest(g)
        with g.app.store._writing() as db:
            db.execute("UPDATE nodes SET ids=zeroblob(8) WHERE kind='sampled'")
        with pytest.raises(openai.InternalServerError, match="damaged on disk"):
            await g.ask(session.key, [*HI, heard.message(), user("More")])
        assert len(g.engine.received) == 1 and live(g, session.id).is_evicted
        assert not live(g, session.id).busy
        error = live(g, session.id).last_error
        assert error is not None and error.boundary == "store", "who runs the agent learns that it was not at fault"
        shown = (await g.admin.get(f"/admin/sessions/{session.id}")).json()
        assert shown["last_error"]["boundary"] == "store" and (shown["turns"], shown["tokens"]) == (1, None)
        sealed = await g.admin.post(f"/admin/sessions/{session.id}/seal")
        assert sealed.is_success, "it has ended, whatever became of its trace"
        assert sealed.json()["status"] == "sealed" and "damaged on disk" in sealed.json()["unreadable"]


async def slowly(g: Running, key: str, meanwhile: Callable[[], Awaitable[object]]) -> bytes:
    """The answer to a call whose body takes its time."""
    body = msgspec.json.encode({"model": "m", "messages": HI})
    reader, writer = await asyncio.open_connection("127.0.0.1", int(g.root.rpartition(":")[2]))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n"
    writer.write(head.encode() + b"expect: 100-continue\r\n\r\n" + body[:9])
    await reader.readuntil(b"100 Continue\r\n\r\n")  # the gateway knows whose call it is, and wants the body
    await meanwhile()
    writer.write(body[9:])
    answer = await reader.read(10_000)
    writer.close()
    return answer


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "opened again"])
async def test_a_call_of_a_session_that_ends_and_leaves_while_it_is_sent(again: bool) -> None:
    async with gateway([say("One."), say("Two.")]) as g:
        session = await g.open(id="same")
        await g.ask(session.key, HI)
        old = live(g, "same")

        async def end() -> None:
            assert (await g.admin.delete("/admin/sessions/same")).is_success
            assert await rest(g) == 1
            if again:
                await g.ask((await g.open(id="same")).key, HI)

        answer = await slowly(g, session.key, end)
        assert b"409 Conflict" in answer and b"this session is cancelled (deleted)" in answer
        assert old.is_evicted, "nobody needs its trace for that"
        g.app.recorder.mark_undelivered(old, 2)
        with pytest.raises(NotFound):  # never that of another session with its id
            _ = old.trace
        assert [turn["delivered"] for turn in await g.turns("same")] == [True] if again else True


async def test_a_session_at_rest_can_be_sealed_cancelled_and_deleted() -> None:
    async with gateway([say("One."), say("Two."), say("Three.")]) as g:
        for end in (g.seal, g.cancel):
            session = await g.open()
            await g.ask(session.key, HI)
            await rest(g)
            assert (await end(session.id))["turns"] == 1
            assert len(await g.turns(session.id)) == 1
        session = await g.open()
        await rest(g)
        assert (await g.admin.delete(f"/admin/sessions/{session.id}")).is_success


async def test_a_session_that_ends_while_a_tool_is_asked_leaves_memory_later() -> None:
    async with gateway([say("One.")]) as g:
        session = await g.open()
        await g.ask(session.key, HI)
        ended = live(g, session.id)
        await g.seal(session.id)
        ended.pending_tool_calls[1] = asyncio.get_running_loop().create_future()
        assert await rest(g) == 0
        del ended.pending_tool_calls[1]
        assert await rest(g) == 1 and ended.is_evicted


async def test_held_at_the_fence_and_being_written_are_in_the_middle_of_a_call(tmp_path: Path) -> None:
    async with gateway([say("One."), say("Two.")], data=tmp_path, durability="disk") as g:
        session = await g.open()
        await g.pause()
        asked = g.start(g.ask(session.key, HI))
        await until(lambda: live(g, session.id).in_flight)
        assert await rest(g) == 0
        with g.locked_database():
            g.app.fence.resume(None)
            await until(lambda: len(g.engine.received) == 1)
            asked.cancel()  # it hangs up while its turn is on its way to the disk
            await asyncio.sleep(0.1)
            assert await rest(g) == 0
        await until(lambda: not live(g, session.id).busy)
        assert await rest(g) == 1
        await g.ask(session.key, HI)
        first, again = await g.turns(session.id)
        assert (first["delivered"], again["cause"], again["parent"]) == (False, "retry", first["parent"])


async def equal_answers(rests: bool, *, new: bool) -> list[object]:
    """Two answers of the same words, of which an agent goes on from the first, then gets the second, and asks `new` things or the same
    again. The tree that this makes."""
    async with gateway([say("One."), say("Two."), say("One."), say("Three.")]) as g:
        session = await g.open()
        one = await g.ask(session.key, HI)
        await g.ask(session.key, [*HI, one.message(), user("Next")])
        assert (await g.ask(session.key, HI)).content == one.content
        if rests:
            assert await rest(g) == 1
        await g.ask(session.key, [*HI, one.message(), user("Other" if new else "Next")])
        nodes = (await g.trace(session.id))["nodes"]
        return [(node["id"], node["parent"], node["cause"]) for node in nodes]


async def test_equal_answers_are_told_apart_the_same_way_after_a_rest() -> None:
    for new, end in ((True, [(6, 5, None), (7, 6, None)]), (False, [(6, 3, "resample")])):
        tree = await equal_answers(False, new=new)
        assert tree == await equal_answers(True, new=new)
        assert tree[5:] == end


@pytest.mark.parametrize("rests", [False, True])
async def test_an_answer_that_was_asked_to_go_on_is_not_taken_for_one_like_it(rests: bool) -> None:
    async with gateway([say("One."), say("Two."), say("One."), say("Three.")]) as g:
        session = await g.open()
        one = (await g.ask(session.key, HI)).message()
        await g.ask(session.key, [*HI, one])
        await g.ask(session.key, HI)  # the one that it got last
        if rests:
            assert await rest(g) == 1
        await g.ask(session.key, [*HI, one, user("Next")])
        nodes = (await g.trace(session.id))["nodes"]
        assert [(n["id"], n["parent"], n["cause"]) for n in nodes[4:]] == [
            (5, 1, "resample"),
            (6, 5, None),
            (7, 6, None),
        ]


@pytest.mark.parametrize("rests", [False, True])
async def test_equal_answers_with_equal_followers_are_told_apart_by_what_was_thought(rests: bool) -> None:
    scripted = [say("One."), say("Two."), say("<think>\ny\n</think>\n\nOne."), say("Three."), say("Four.")]
    async with gateway(scripted) as g:
        session = await g.open()
        plain = (await g.ask(session.key, HI)).message()
        await g.ask(session.key, [*HI, plain, user("V")])
        thought = (await g.ask(session.key, HI)).message()
        await g.ask(session.key, [*HI, thought, user("V")])
        if rests:
            assert await rest(g) == 1
        await g.ask(session.key, [*HI, plain, user("V"), user("W")])
        nodes = (await g.trace(session.id))["nodes"]
        assert [(n["id"], n["parent"]) for n in nodes[-2:]] == [(8, 2), (9, 8)]


async def test_what_a_look_meets_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway([say("One."), say("Two.")]) as g:
        session = await g.open(metadata={"group": "g"})
        heard = await g.ask(session.key, HI, tools=[tool()])
        await rest(g)
        look, read = g.app.session_views.build, g.app.stale._reader.run

        async def goes_on(*asked: Any) -> Any:
            seen = await look(*asked)
            await g.ask(session.key, [*HI, heard.message(), user("More")], tools=[tool()])
            return seen

        monkeypatch.setattr(g.app.session_views, "build", goes_on)
        shown = await g.app.directory.show(session.id)
        assert (shown.turns, shown.roles) == (2, {"main": 2}), "of one moment"
        await rest(g)

        async def another(*asked: Any) -> Any:
            seen = await read(*asked)
            await g.app.sessions.delete(session.id)
            await g.open(id=session.id, metadata={"group": "g"})
            return seen

        monkeypatch.setattr(g.app.stale._reader, "run", another)
        await g.app.stale.cancel([("", 0)], 1)
        assert live(g, session.id).status == "open", "that is another one, and not stale"


async def test_many_rest_a_few_at_a_time_and_one_that_is_called_meanwhile_does_not() -> None:
    async with gateway([say("One.")]) as g:
        sessions = [live(g, (await g.open()).id) for _ in range(40)]
        sweep = asyncio.create_task(g.app.evictor.sweep(time.time() + 3600))
        steps = [0]
        while not sweep.done():
            await asyncio.sleep(0)
            steps.append(sum(session.is_evicted for session in sessions))
            sessions[-1].last_used = time.time() + 3600
        assert max(b - a for a, b in pairwise(steps)) <= 16
        assert await sweep == 39 and not sessions[-1].is_evicted


async def test_looks_leave_nothing_in_memory() -> None:
    async with gateway([say("One."), say("Two.")]) as g:
        resting, ended = await g.open(), await g.open()
        for session in (resting, ended):
            await g.ask(session.key, HI)
        await g.seal(ended.id)
        await rest(g)
        gc.collect()
        gc.disable()
        try:
            for session in (resting, ended):
                await g.show(session.id)
                await g.trace(session.id)
                await g.samples(session.id)
            await g.seal(ended.id)
            known = [o for o in gc.get_objects() if type(o) in (Context, Sampled)]
        finally:
            gc.enable()
        assert not known


async def test_memory_is_not_given_back_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[None] = []
    monkeypatch.setattr("turngate.gateway.eviction.trim_memory", lambda: times.append(None))
    monkeypatch.setattr("turngate.gateway.eviction._TRIM_S", 3600.0)
    async with gateway([say("One.")] * 5, rest_s=0.02) as g:
        g.app.evictor._trimmed = -math.inf
        session = await g.open()
        for _ in range(5):
            await g.ask(session.key, HI)
            await until(lambda: live(g, session.id).is_evicted)
        assert len(times) == 1


async def test_it_happens_by_itself_and_is_counted() -> None:
    async with gateway([say("One."), say("Two.")], rest_s=0.2) as g:
        session = await g.open()
        heard = await g.ask(session.key, HI)
        await until(lambda: live(g, session.id).is_evicted)
        metrics = (await g.admin.get("/metrics")).text
        assert "turngate_sessions_resting 1" in metrics and "turngate_sessions_open 1" in metrics
        await g.ask(session.key, [*HI, heard.message(), user("More")])
        assert len(await g.samples(session.id)) == 1


async def test_nothing_of_it_is_left_in_memory_and_no_collector_is_needed() -> None:
    async with gateway([say("One."), say("Two.")]) as g:
        resting, ended = await g.open(), await g.open()
        await g.ask(resting.key, HI)
        await g.ask(ended.key, HI)
        held = [weakref.ref(live(g, session.id).trace) for session in (resting, ended)]
        nodes = {id(node) for session in (resting, ended) for node in live(g, session.id).trace.nodes}
        gc.collect()
        gc.disable()
        try:
            await g.seal(ended.id)
            assert await rest(g) == 2
            assert [trace() for trace in held] == [None, None]
            assert not [o for o in gc.get_objects() if type(o) in (Context, Sampled) and id(o) in nodes]
        finally:
            gc.enable()
        assert len(await g.turns(ended.id)) == len(await g.turns(resting.id)) == 1


async def test_zero_means_never(tmp_path: Path) -> None:
    async with gateway([say("One.")], rest_s=0) as g:
        session = await g.open()
        await g.ask(session.key, HI)
        assert await rest(g) == 0
    with pytest.raises(ConfigError, match=r"rest_s must be 0 \(never evict\) or greater, not -1\.0"):
        load_config(None, {"rest_s": -1})
    with pytest.raises(ConfigError, match="rest_s"):
        load_config(None, {"rest_s": float("nan")})


def test_free_memory_can_be_given_back_any_number_of_times() -> None:
    trim_memory()
    trim_memory()
