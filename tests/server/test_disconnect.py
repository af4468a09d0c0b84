"""Test calls that end early: their samples are recorded and the session continues exactly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.kit import Gated, OpenSession, Running, gateway, say, tokenizer, until, user
from tests.speed import scaled
from turngate.engines.base import Chunk, Generate
from turngate.engines.scripted import Scripted, ScriptedTurn
from turngate.server import asgi

HI = [user("Hi")]
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


async def begin(g: Running, session: OpenSession, *, stream: bool, messages: Any = HI) -> asyncio.Task[Any]:
    """Start a call and wait until it blocks at the engine's gate."""
    waiting = g.gated.waiting

    async def call() -> Any:
        reply: Any = await g.client(session.key).chat.completions.create(model="m", messages=messages, stream=stream)
        return [chunk async for chunk in reply] if stream else reply

    task = g.start(call())
    await until(lambda: g.gated.waiting == waiting + 1 or task.done())
    return task


async def disconnect(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def test_disconnect_during_stream() -> None:
    engine = Gated([say("One two three four."), say("Five.")], tokens=3)
    async with gateway(engine=engine) as g:
        session = await g.open()
        stream = await g.client(session.key).chat.completions.create(model="m", messages=HI, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await until(lambda: engine.waiting)
        await stream.close()
        await until(lambda: engine.aborted == 1)
        await until(lambda: g.rows("SELECT count(*) FROM nodes WHERE kind='sampled'") == [(1,)])
        [turn] = await g.turns(session.id)
        assert (turn["role"], turn["finish"], len(turn["ids"])) == ("aborted", "abort", 3)
        assert len(turn["logprobs"]) == 3 and turn["fault"]
        assert await g.samples(session.id) == []
        assert (await g.show(session.id))["in_flight"] == 0
        # The next call does not fork: it samples the same prompt again.
        engine.gate.set()
        assert (await g.ask(session.key, HI)).content == "Five."
        nodes = (await g.trace(session.id))["nodes"]
        assert [n["kind"] for n in nodes] == ["context", "sampled", "sampled"]
        assert [n["cause"] for n in nodes if n["kind"] == "sampled"] == [None, "retry"]
        [row] = await g.samples(session.id)
        assert sum(row["mask"]) == len(say("Five.").ids)


async def test_disconnect_while_waiting_for_whole_reply() -> None:
    engine = Gated([say("One two three four."), say("Five.")])
    async with gateway(engine=engine) as g:
        session = await g.open()
        await disconnect(await begin(g, session, stream=False))
        await until(lambda: engine.aborted == 1)
        engine.gate.set()
        reply = await g.ask(session.key, HI)
        assert reply.content == "Five."
        assert [t["role"] for t in await g.turns(session.id)] == ["aborted", "main"]
        assert len(await g.samples(session.id)) == 1


async def test_next_turn_after_disconnect_extends_delivered_answer() -> None:
    engine = Gated([say("Lost."), say("One."), say("Two.")])
    async with gateway(engine=engine) as g:
        session = await g.open()
        await disconnect(await begin(g, session, stream=True))
        await until(lambda: engine.aborted == 1)
        engine.gate.set()
        reply = await g.ask(session.key, HI)
        await g.ask(session.key, [*HI, reply.message(), user("More")])
        assert [t["role"] for t in await g.turns(session.id)] == ["aborted", "main", "main"]
        [row] = await g.samples(session.id)
        assert [s["trained"] for s in row["spans"]] == [True, True]


async def test_agent_continues_from_partial_answer() -> None:
    """The agent adds the partial answer to its history; the model continues from those tokens."""
    engine = Gated([say("One two three four."), say("Five.")], tokens=2)
    async with gateway(engine=engine) as g:
        session = await g.open()
        stream = await g.client(session.key).chat.completions.create(model="m", messages=HI, stream=True)
        partial = ""
        async for chunk in stream:
            partial += chunk.choices[0].delta.content or ""
            if engine.waiting and partial == tokenizer().decode(say("One two three four.").ids[:2]):
                break
        await stream.close()
        await until(lambda: engine.aborted == 1)
        engine.gate.set()
        await g.ask(session.key, [*HI, {"role": "assistant", "content": partial}, user("Go on")])
        first, second = g.engine.received
        assert second.prompt.tolist()[: len(first.prompt) + 2] == [
            *first.prompt.tolist(),
            *say("One two three four.").ids[:2],
        ]


async def test_disconnect_does_not_affect_parallel_calls() -> None:
    engine = Gated([say("Answer.")] * 3)
    async with gateway(engine=engine) as g:
        session = await g.open()
        tasks = [await begin(g, session, stream=n == 1, messages=[user(f"Question {n}")]) for n in range(3)]
        await disconnect(tasks[1])
        await until(lambda: engine.aborted == 1)
        engine.gate.set()
        assert [t.choices[0].message.content for t in (await tasks[0], await tasks[2])] == ["Answer."] * 2
        assert sorted(t["role"] == "aborted" for t in await g.turns(session.id)) == [False, False, True]
        assert engine.in_flight == 0 and (await g.show(session.id))["in_flight"] == 0


async def test_sdk_retry_after_timeout_is_recorded_as_retry() -> None:
    """The openai client marks its own retries, and the trace records them as such."""
    engine = Gated([say("Too late."), say("In time.")])
    async with gateway(engine=engine) as g:
        session = await g.open()
        client = g.client(session.key, timeout=scaled(0.25), max_retries=1)
        task = g.start(client.chat.completions.create(model="m", messages=HI))
        await until(lambda: engine.aborted == 1)
        engine.gate.set()
        assert (await task).choices[0].message.content == "In time."
        first, second = await g.turns(session.id)
        assert (first["role"], second["role"], second["cause"]) == ("aborted", "main", "retry")


async def test_parallel_calls_get_cause_despite_later_disconnect() -> None:
    engine = Gated([say(text) for text in ("Hello.", "One.", "Two.", "Three.", "Four.")])
    async with gateway(engine=engine) as g:
        session = await g.open()
        engine.gate.set()
        history = [*HI, {"role": "assistant", "content": (await g.ask(session.key, HI)).content}]
        engine.gate.clear()
        continued, stopped = [*history, user("Go on")], [*history, user("Stop")]
        disconnected = await begin(g, session, stream=False, messages=continued)
        tasks = [await begin(g, session, stream=False, messages=messages) for messages in (continued, stopped)]
        await disconnect(disconnected)
        await until(lambda: g.rows("SELECT count(*) FROM nodes WHERE kind='sampled'") == [(2,)])
        engine.gate.set()
        await asyncio.gather(*tasks)
        turns = await g.turns(session.id)
        assert [turn["role"] for turn in turns] == ["main", "aborted", "main", "main"]
        assert [turn["cause"] for turn in turns[:2]] == [None, None]
        assert {turn["cause"] for turn in turns[2:]} == {"retry", "branch"}


async def test_completed_call_is_not_superseded_by_aborted_ones() -> None:
    """An agent sends three calls and takes the first answer."""
    engine = Gated([say("One."), say("Two."), say("Three.")])
    async with gateway(engine=engine) as g:
        session = await g.open()
        tasks = [await begin(g, session, stream=False) for _ in range(3)]
        engine.gate.set()
        await asyncio.wait(tasks[:1])
        engine.gate.clear()
        for task in tasks[1:]:
            await disconnect(task)
        await until(lambda: g.live(session.id).in_flight == 0)
        turns = await g.turns(session.id)
        assert len(turns) == 3 and turns[0]["role"] == "main"
        assert "retry" not in {turn["cause"] for turn in turns}


async def test_equal_parallel_calls_share_one_context() -> None:
    engine = Gated([say("Left."), say("Right."), say("On.")])
    async with gateway(engine=engine) as g:
        session = await g.open()
        tasks = [await begin(g, session, stream=False) for _ in range(2)]
        engine.gate.set()
        answers = {(await task).choices[0].message.content for task in tasks}
        assert answers == {"Left.", "Right."}
        kinds = [n["kind"] for n in (await g.trace(session.id))["nodes"]]
        assert kinds == ["context", "sampled", "sampled"]
        await g.ask(session.key, [*HI, {"role": "assistant", "content": "Left."}, user("Go on")])
        received = g.engine.received[2].prompt.tolist()
        prompt = g.engine.received[0].prompt.tolist()
        assert received[: len(prompt) + len(say("Left.").ids)] == [*prompt, *say("Left.").ids]


@STREAMED
async def test_disconnect_at_fence_leaves_no_turn(stream: bool) -> None:
    async with gateway([say("Hello.")], alive_s=0.02) as g:
        session = await g.open()
        await g.pause()
        task = g.start(g.ask(session.key, HI, "async stream" if stream else "async"))
        await until(lambda: g.live(session.id).in_flight == 1)
        await disconnect(task)
        await until(lambda: g.live(session.id).in_flight == 0)
        assert (await g.resume())["in_flight"] == 0
        assert await g.turns(session.id) == [] and not g.engine.received
        assert (await g.ask(session.key, HI)).content == "Hello."


# ── sessions ended by the host ──────────────────────────────────────────────────────────────────────────────────────


@STREAMED
@pytest.mark.parametrize("verb", ["cancel", "seal"])
async def test_ending_session_aborts_calls_with_conflict(verb: str, stream: bool) -> None:
    engine = Gated([say("One two three four.")], tokens=2 if stream else 0)
    async with gateway(engine=engine) as g:
        session = await g.open()
        task = await begin(g, session, stream=stream)
        shown = await (g.cancel if verb == "cancel" else g.seal)(session.id)
        assert shown["status"] == {"cancel": "cancelled", "seal": "sealed"}[verb]
        assert (shown["in_flight"], engine.aborted, engine.in_flight) == (0, 1, 0)
        with pytest.raises(openai.APIError) as caught:
            await task
        assert caught.value.code == "conflict" and shown["status"] in caught.value.message
        if not stream:  # a stream has sent its status already, so the error is an event
            assert isinstance(caught.value, openai.ConflictError)
            assert caught.value.response.headers["x-should-retry"] == "false"
        [turn] = await g.turns(session.id)
        assert (turn["role"], len(turn["ids"])) == ("aborted", engine.tokens)
        assert await g.samples(session.id) == []


async def test_ending_session_reaches_unstarted_stream() -> None:
    async with gateway(engine=Gated([say("Never.")])) as g:
        session = await g.open()
        task = await begin(g, session, stream=True)
        await g.cancel(session.id)
        with pytest.raises(openai.ConflictError):
            await task


async def test_ending_session_reaches_call_at_fence() -> None:
    async with gateway([say("Never.")]) as g:
        session = await g.open()
        await g.pause()
        task = g.start(g.ask(session.key, HI))
        await until(lambda: g.live(session.id).in_flight == 1)
        await asyncio.wait_for(g.cancel(session.id), scaled(5))
        with pytest.raises(openai.ConflictError):
            await task
        await g.resume()
        assert not g.engine.received


class CountingEngine(Scripted):
    """Count the chunks taken from the engine."""

    taken = 0

    @asynccontextmanager
    async def generate(self, request: Generate) -> AsyncIterator[AsyncIterator[Chunk]]:
        async with super().generate(request) as chunks:
            yield self._count(chunks)

    async def _count(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        async for chunk in chunks:
            self.taken += 1
            yield chunk


async def test_ending_session_of_slow_reader_sends_error_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream ends with an error event even if the gateway is blocked writing to the agent."""
    monkeypatch.setattr(asgi, "STALL_S", 3600.0)
    long = max(range(4096), key=lambda i: len(tokenizer().decode(i)))
    engine = CountingEngine([ScriptedTurn([long] * 60_000, chunk=100)])
    async with gateway(engine=engine) as g:
        session = await g.open()
        body = {"model": "m", "messages": HI, "stream": True, "max_tokens": 10**6}
        async with g.http(session.key).stream("POST", "/v1/chat/completions", json=body) as response:
            # Read nothing until the buffers are full and the gateway has to wait.
            await until(lambda: engine.taken)
            seen = -1
            while engine.taken != seen:
                seen = engine.taken
                await asyncio.sleep(scaled(0.05))
            assert engine.in_flight == 1
            await asyncio.wait_for(g.cancel(session.id), scaled(5))
            lines = [line async for line in response.aiter_lines() if line]
        assert '"error"' in lines[-1] and "cancelled" in lines[-1]
        assert [t["role"] for t in await g.turns(session.id)] == ["aborted"]


async def test_answer_with_unsent_end_is_marked_undelivered() -> None:
    """The answer is sampled and stored, but the agent disconnects before reading its end."""
    long = max(range(4096), key=lambda i: len(tokenizer().decode(i)))
    async with gateway([ScriptedTurn([long] * 50_000, chunk=0), say("Again.")]) as g:
        session = await g.open()
        body = {"model": "m", "messages": HI, "stream": True, "max_tokens": 10**6}
        async with g.http(session.key).stream("POST", "/v1/chat/completions", json=body):
            await until(lambda: g.rows("SELECT count(*) FROM nodes WHERE kind='sampled'") == [(1,)])
            assert g.live(session.id).in_flight == 1  # its last event waits for buffer space
        await until(lambda: g.live(session.id).in_flight == 0)
        [turn] = await g.turns(session.id)
        assert not turn["delivered"] and turn["role"] == "superseded"
        assert g.rows("SELECT delivered FROM nodes WHERE kind='sampled'") == [(0,)]
        assert (await g.ask(session.key, HI)).content == "Again."
        assert [(t["role"], t["cause"]) for t in await g.turns(session.id)][1] == ("main", "retry")


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "during a call"])
async def test_deleting_session_removes_all_its_data(busy: bool) -> None:
    engine = Gated([say("One two.")] * 3, tokens=1)
    async with gateway(engine=engine) as g:
        session, other = await g.open(metadata={"task": "very-secret-task"}), await g.open()
        engine.gate.set()
        await g.ask(session.key, "A question to forget")
        await g.ask(other.key, "Hi")
        engine.gate.clear()
        task = await begin(g, session, stream=True) if busy else None
        response = await g.admin.delete(f"/admin/sessions/{session.id}")
        assert response.json() == {"id": session.id, "deleted": True}
        if task is not None:
            with pytest.raises(openai.APIError):
                await task
        [(kept,)] = g.rows("SELECT id FROM sessions")
        assert kept == other.id
        for table in ("nodes", "preambles"):
            assert len(g.rows(f"SELECT DISTINCT session FROM {table}")) == 1
        for path in ("", "/trace", "/samples", "/events"):
            assert (await g.admin.get(f"/admin/sessions/{session.id}{path}")).status_code == 404
        assert (await g.admin.delete(f"/admin/sessions/{session.id}")).status_code == 404
        # The id is free again.
        again = await g.open(id=session.id)
        assert again.key != session.key and await g.turns(session.id) == []


# ── restarts and disconnects during writes ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("durability", ["process", "disk"])
async def test_restarted_gateway_restores_sessions(durability: str, tmp_path: Path) -> None:
    engine = Gated([say("One."), say("Two three."), say("Four.")], tokens=1)
    engine.gate.set()
    async with gateway(engine=engine, data=tmp_path, durability=durability) as g:
        session = await g.open()
        reply = await g.ask(session.key, HI)
        engine.gate.clear()
        more = [*HI, reply.message(), user("More")]
        await disconnect(await begin(g, session, stream=True, messages=more))
        await until(lambda: engine.aborted == 1)
        engine.gate.set()
        await until(lambda: g.live(session.id).in_flight == 0)
        before = await g.trace(session.id)
    async with gateway([say("Five.")], data=tmp_path, durability=durability) as g:
        assert await g.trace(session.id) == before
        assert (await g.ask(session.key, more)).content == "Five."
        assert [t["role"] for t in await g.turns(session.id)] == ["main", "aborted", "main"]
        assert len(await g.samples(session.id)) == 1


async def disconnect_during_write(g: Running) -> OpenSession:
    """Open a session and disconnect its agent while the turn is being written."""
    session = await g.open()
    with g.locked_database():
        task = g.start(g.ask(session.key, HI))
        await until(lambda: g.engine.received and not g.engine.in_flight)
        await disconnect(task)
        await asyncio.sleep(scaled(0.05))
    await until(lambda: g.rows("SELECT count(*) FROM nodes WHERE kind='sampled'") == [(1,)])
    await until(lambda: g.live(session.id).in_flight == 0)
    return session


async def test_disconnect_during_write_keeps_memory_and_disk_equal(tmp_path: Path) -> None:
    async with gateway([say("Hello there.")], data=tmp_path, durability="disk") as g:
        session = await disconnect_during_write(g)
        running = await g.trace(session.id)
    async with gateway(data=tmp_path, durability="disk") as g:
        assert (await g.trace(session.id))["nodes"] == running["nodes"] != []


async def test_stored_but_unsent_answer_is_marked_undelivered() -> None:
    """The agent repeats its call; the new answer is the main line and the first is not trained."""
    async with gateway([say("Lost."), say("Got.")], durability="disk") as g:
        session = await disconnect_during_write(g)
        [turn] = await g.turns(session.id)
        assert not turn["delivered"] or turn["role"] == "aborted"
        assert (await g.ask(session.key, HI)).content == "Got."
        roles = [t["role"] for t in await g.turns(session.id)]
        assert roles[0] in ("superseded", "aborted") and roles[1] == "main"
        assert len(await g.samples(session.id)) == 1


async def test_sealing_during_write_does_not_mark_turn_delivered(tmp_path: Path) -> None:
    async with gateway([say("Hello there.")], data=tmp_path, durability="disk") as g:
        session = await g.open()
        locked, loop = asyncio.Event(), asyncio.get_running_loop()

        def hold() -> None:
            with g.locked_database():
                loop.call_soon_threadsafe(locked.set)
                time.sleep(0.3)

        holding = g.start(asyncio.to_thread(hold))
        await locked.wait()
        task = g.start(g.ask(session.key, HI))
        await until(lambda: g.engine.received and not g.engine.in_flight)
        await g.seal(session.id)
        await holding
        try:
            reply = await task
        except openai.ConflictError:
            # The agent got an error.
            turns = await g.turns(session.id)
            assert all(t["role"] == "aborted" or not t["delivered"] for t in turns)
        else:
            assert reply.content == "Hello there."
            assert [t["role"] for t in await g.turns(session.id)] == ["main"]
