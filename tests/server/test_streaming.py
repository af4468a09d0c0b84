"""Streaming is real: text flows as it is sampled, a call when it is whole, the end only when the turn is stored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.kit import Gated, Json, Running, calls, gateway, join_chunks, say, tokenizer, tool, until, user
from tests.speed import scaled

HI = [user("Hi")]


async def begin(g: Running, key: str, **request: Any) -> Any:
    return await g.client(key).chat.completions.create(**{"model": "m", "messages": HI, "stream": True, **request})


async def events(g: Running, key: str, **request: Any) -> AsyncIterator[str]:
    """The bare events of a streamed reply, one by one, to the last byte of the response."""
    body = {"model": "m", "messages": HI, "stream": True, **request}
    async with g.http(key).stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line:
                yield line


async def test_text_arrives_while_the_engine_still_samples() -> None:
    async with gateway(engine=Gated([say("One two three four five.")], tokens=3)) as g:
        session = await g.open()
        stream = await begin(g, session.key)
        got = ""
        first = tokenizer().decode(say("One two three four five.").ids[:3])
        async for chunk in stream:
            got += chunk.choices[0].delta.content or ""
            if got == first:
                break
        assert g.engine.in_flight == 1  # the engine is not done; the agent has read all it sampled so far
        g.gated.gate.set()
        async for chunk in stream:
            got += chunk.choices[0].delta.content or ""
        assert got == "One two three four five."


async def test_reasoning_arrives_while_the_engine_still_samples() -> None:
    turn = say("<think>\nLong thoughts about this.\n</think>\n\nYes.")
    async with gateway(engine=Gated([turn], tokens=6)) as g:
        session = await g.open()
        stream = await begin(g, session.key)
        async for chunk in stream:
            if getattr(chunk.choices[0].delta, "reasoning_content", None):
                break
        assert g.engine.in_flight == 1
        g.gated.gate.set()
        assert join_chunks([c async for c in stream]).content == "Yes."


async def test_a_tool_call_arrives_whole_and_as_soon_as_it_is() -> None:
    first, second = calls(("read_file", {"path": "a" * 50})), calls(("read_file", {"path": "b"}))
    gate = len(tokenizer().encode("Look:\n" + first))
    async with gateway(engine=Gated([say("Look:\n" + first + "\n" + second)], tokens=gate)) as g:
        session = await g.open()
        stream = await begin(g, session.key, tools=[tool()])
        seen: list[Json] = []
        async for chunk in stream:
            seen += chunk.choices[0].delta.tool_calls or []
            if seen:
                break
        assert g.engine.in_flight == 1  # the second call is still to be sampled
        [call] = seen
        assert call.index == 0 and call.id and call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("read_file", {"path": "a" * 50})
        g.gated.gate.set()
        more = [c for chunk in [c async for c in stream] for c in chunk.choices[0].delta.tool_calls or []]
        assert [(c.index, json.loads(c.function.arguments)) for c in more] == [(1, {"path": "b"})]


async def test_no_part_of_a_calls_markup_is_ever_shown_as_text() -> None:
    text = "Let me look.\n" + calls(("read_file", {"path": "a"})) + "\n" + calls(("read_file", {"path": "b"}))
    async with gateway([say(text)]) as g:
        session = await g.open()
        chunks = [c async for c in await begin(g, session.key, tools=[tool()])]
        assert join_chunks(chunks).content == "Let me look."
        assert not any("<" in (c.choices[0].delta.content or "") for c in chunks)


# ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_turn_is_in_the_database_when_the_last_event_arrives() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open()
        async for chunk in await begin(g, session.key):
            stored = g.rows("SELECT count(*) FROM nodes WHERE kind='sampled'")
            assert stored == [(1 if chunk.choices[0].finish_reason else 0,)] or chunk.choices[0].finish_reason is None
        assert g.rows("SELECT count(*) FROM nodes WHERE kind='sampled'") == [(1,)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_the_end_waits_for_the_database(stream: bool) -> None:
    """While the turn cannot be committed, all of its text may be out, but not its end: agents exit on that."""
    async with gateway([say("Hello there.")], durability="disk") as g:
        session = await g.open()
        chunks: list[Any] = []
        with g.locked_database():
            if stream:
                reading: asyncio.Task[Any] = g.start(_collect(await begin(g, session.key), chunks))
                await until(lambda: join_chunks(chunks).content == "Hello there.")
            else:
                reading = g.start(g.ask(session.key, "Hi"))
                await until(lambda: g.engine.received and not g.engine.in_flight)
            await asyncio.sleep(0.15)
            assert not reading.done()
            if stream:
                assert join_chunks(chunks).finish is None
            assert g.rows("SELECT count(*) FROM nodes") == [(0,)]
        await asyncio.wait_for(reading, scaled(5))
        assert g.rows("SELECT count(*) FROM nodes WHERE kind='sampled'") == [(1,)]


async def _collect(stream: Any, into: list[Any]) -> None:
    async for chunk in stream:
        into.append(chunk)


# ── signs of life ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_silent_engine_does_not_look_like_a_dead_connection() -> None:
    """Empty chunks, which every client takes; comments are not enough for some."""
    async with gateway(engine=Gated([say("At last.")]), alive_s=0.02) as g:
        session = await g.open()
        chunks: list[Any] = []
        reading = g.start(_collect(await begin(g, session.key), chunks))
        await until(lambda: len(chunks) >= 5)
        assert join_chunks(chunks) == ("", "", [], None, None)
        assert chunks[0].choices[0].delta.role == "assistant"
        g.gated.gate.set()
        await reading
        assert join_chunks(chunks).content == "At last." and join_chunks(chunks).finish == "stop"
        assert len({c.id for c in chunks}) == 1
        assert [c.choices[0].delta.role for c in chunks].count("assistant") == 1


async def test_the_clients_stream_helper_takes_signs_of_life() -> None:
    async with gateway(engine=Gated([say(calls(("read_file", {"path": "a"})))]), alive_s=0.01) as g:
        session = await g.open()
        asyncio.get_running_loop().call_later(0.1, g.gated.gate.set)
        async with g.client(session.key).chat.completions.stream(model="m", messages=HI, tools=[tool()]) as stream:
            final = await stream.get_final_completion()
        [call] = final.choices[0].message.tool_calls or []
        assert call.function.name == "read_file"


async def test_signs_of_life_between_words_with_usage_asked_for() -> None:
    async with gateway(engine=Gated([say("One two.")], tokens=1), alive_s=0.02) as g:
        session = await g.open()
        chunks: list[Any] = []
        reading = g.start(_collect(await begin(g, session.key, stream_options={"include_usage": True}), chunks))
        await until(lambda: len(chunks) >= 6)
        assert join_chunks(chunks).content == tokenizer().decode(say("One two.").ids[:1])
        g.gated.gate.set()
        await reading
        assert join_chunks(chunks).content == "One two." and join_chunks(chunks).usage is not None


async def test_a_steady_stream_needs_no_signs_of_life() -> None:
    async with gateway([say("One two three four.", pace_s=0.01)], alive_s=scaled(0.5)) as g:
        session = await g.open()
        chunks = [c async for c in await begin(g, session.key)]
        assert all(c.choices[0].delta.content for c in chunks[1:-1])


async def test_nothing_ever_follows_the_end() -> None:
    """Many streams whose ends fall on the beat of their signs of life."""

    def script(request: Any, index: int) -> Any:
        return say("A few words.", delay_s=0.002 * (int(request.session) % 7), pace_s=0.002)

    async with gateway(script, alive_s=0.004) as g:
        sessions = [await g.open(id=str(n)) for n in range(40)]

        async def one(key: str) -> list[str]:
            return [event async for event in events(g, key)]

        for lines in await asyncio.gather(*(one(s.key) for s in sessions)):
            assert lines[-1] == "data: [DONE]" and lines.count("data: [DONE]") == 1
            assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "stop"


async def test_a_failure_after_signs_of_life_is_an_error_event() -> None:
    """The status is out already, so the error comes as an event, which the client raises."""
    async with gateway([say("Never.", delay_s=0.1, cut_after=0)], alive_s=0.02) as g:
        session = await g.open()
        stream = await begin(g, session.key)
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "engine_unavailable"


async def test_an_error_event_is_the_last_thing_on_the_wire() -> None:
    async with gateway([say("One two three.", pace_s=0.01, cut_after=3)], alive_s=0.005) as g:
        session = await g.open()
        lines = [event async for event in events(g, session.key)]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "engine_unavailable"
        assert "data: [DONE]" not in lines


async def test_replies_that_are_not_streamed_are_collected_streams() -> None:
    """The engine is not bothered with streaming, and the text is the same to the letter."""
    text = "<think>\nHm.\n</think>\n\nGröße 👩‍👩‍👧 \n" + calls(("read_file", {"path": "a"})) + "\n"
    async with gateway([say(text)] * 2) as g:
        session = await g.open()
        streamed = await g.ask(session.key, "Hi", "async stream", tools=[tool()])
        collected = await g.ask(session.key, "Hi", "async", tools=[tool()])
        assert [r.stream for r in g.engine.received] == [True, False]
        assert streamed[:2] == collected[:2] and streamed.finish == collected.finish
        assert [c[1:] for c in streamed.calls] == [c[1:] for c in collected.calls]
