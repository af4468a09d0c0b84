"""Test streaming: text is sent as it is sampled, calls when complete, and the end only after the turn is stored."""

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


async def start_stream(g: Running, key: str, **request: Any) -> Any:
    return await g.client(key).chat.completions.create(**{"model": "m", "messages": HI, "stream": True, **request})


async def events(g: Running, key: str, **request: Any) -> AsyncIterator[str]:
    """Yield the raw event lines of a streamed reply."""
    body = {"model": "m", "messages": HI, "stream": True, **request}
    async with g.http(key).stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line:
                yield line


async def test_text_arrives_during_sampling() -> None:
    async with gateway(engine=Gated([say("One two three four five.")], tokens=3)) as g:
        session = await g.open()
        stream = await start_stream(g, session.key)
        text = ""
        first = tokenizer().decode(say("One two three four five.").ids[:3])
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if text == first:
                break
        assert g.engine.in_flight == 1  # the agent has read everything sampled so far
        g.gated.gate.set()
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        assert text == "One two three four five."


async def test_reasoning_arrives_during_sampling() -> None:
    turn = say("<think>\nLong thoughts about this.\n</think>\n\nYes.")
    async with gateway(engine=Gated([turn], tokens=6)) as g:
        session = await g.open()
        stream = await start_stream(g, session.key)
        async for chunk in stream:
            if getattr(chunk.choices[0].delta, "reasoning_content", None):
                break
        assert g.engine.in_flight == 1
        g.gated.gate.set()
        assert join_chunks([c async for c in stream]).content == "Yes."


async def test_tool_call_arrives_as_soon_as_complete() -> None:
    first, second = calls(("read_file", {"path": "a" * 50})), calls(("read_file", {"path": "b"}))
    gate = len(tokenizer().encode("Look:\n" + first))
    async with gateway(engine=Gated([say("Look:\n" + first + "\n" + second)], tokens=gate)) as g:
        session = await g.open()
        stream = await start_stream(g, session.key, tools=[tool()])
        seen: list[Json] = []
        async for chunk in stream:
            seen += chunk.choices[0].delta.tool_calls or []
            if seen:
                break
        assert g.engine.in_flight == 1  # the second call is not sampled yet
        [call] = seen
        assert call.index == 0 and call.id and call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("read_file", {"path": "a" * 50})
        g.gated.gate.set()
        more = [c for chunk in [c async for c in stream] for c in chunk.choices[0].delta.tool_calls or []]
        assert [(c.index, json.loads(c.function.arguments)) for c in more] == [(1, {"path": "b"})]


async def test_call_markup_is_never_sent_as_text() -> None:
    text = "Let me look.\n" + calls(("read_file", {"path": "a"})) + "\n" + calls(("read_file", {"path": "b"}))
    async with gateway([say(text)]) as g:
        session = await g.open()
        chunks = [c async for c in await start_stream(g, session.key, tools=[tool()])]
        assert join_chunks(chunks).content == "Let me look."
        assert not any("<" in (c.choices[0].delta.content or "") for c in chunks)


# ── end of stream ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_turn_is_stored_before_last_event() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open()
        async for chunk in await start_stream(g, session.key):
            stored = g.rows("SELECT count(*) FROM nodes WHERE kind='sampled'")
            assert stored == [(1 if chunk.choices[0].finish_reason else 0,)] or chunk.choices[0].finish_reason is None
        assert g.rows("SELECT count(*) FROM nodes WHERE kind='sampled'") == [(1,)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_end_of_reply_waits_for_commit(stream: bool) -> None:
    """Until the turn is committed, its text may be sent but not its end, because agents exit on it."""
    async with gateway([say("Hello there.")], durability="disk") as g:
        session = await g.open()
        chunks: list[Any] = []
        with g.locked_database():
            if stream:
                reading: asyncio.Task[Any] = g.start(_collect(await start_stream(g, session.key), chunks))
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


# ── keep-alives ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_silent_engine_sends_keep_alives() -> None:
    """Keep-alives are empty chunks, because some clients ignore comments."""
    async with gateway(engine=Gated([say("At last.")]), alive_s=0.02) as g:
        session = await g.open()
        chunks: list[Any] = []
        reading = g.start(_collect(await start_stream(g, session.key), chunks))
        await until(lambda: len(chunks) >= 5)
        assert join_chunks(chunks) == ("", "", [], None, None)
        assert chunks[0].choices[0].delta.role == "assistant"
        g.gated.gate.set()
        await reading
        assert join_chunks(chunks).content == "At last." and join_chunks(chunks).finish == "stop"
        assert len({c.id for c in chunks}) == 1
        assert [c.choices[0].delta.role for c in chunks].count("assistant") == 1


async def test_sdk_stream_helper_accepts_keep_alives() -> None:
    async with gateway(engine=Gated([say(calls(("read_file", {"path": "a"})))]), alive_s=0.01) as g:
        session = await g.open()
        asyncio.get_running_loop().call_later(0.1, g.gated.gate.set)
        async with g.client(session.key).chat.completions.stream(model="m", messages=HI, tools=[tool()]) as stream:
            final = await stream.get_final_completion()
        [call] = final.choices[0].message.tool_calls or []
        assert call.function.name == "read_file"


async def test_keep_alives_between_tokens_with_usage() -> None:
    async with gateway(engine=Gated([say("One two.")], tokens=1), alive_s=0.02) as g:
        session = await g.open()
        chunks: list[Any] = []
        reading = g.start(_collect(await start_stream(g, session.key, stream_options={"include_usage": True}), chunks))
        await until(lambda: len(chunks) >= 6)
        assert join_chunks(chunks).content == tokenizer().decode(say("One two.").ids[:1])
        g.gated.gate.set()
        await reading
        assert join_chunks(chunks).content == "One two." and join_chunks(chunks).usage is not None


async def test_steady_stream_has_no_keep_alives() -> None:
    async with gateway([say("One two three four.", pace_s=0.01)], alive_s=scaled(0.5)) as g:
        session = await g.open()
        chunks = [c async for c in await start_stream(g, session.key)]
        assert all(c.choices[0].delta.content for c in chunks[1:-1])


async def test_nothing_follows_done_event() -> None:
    """Run many streams that end at the same time as a keep-alive."""

    def script(request: Any, index: int) -> Any:
        return say("A few words.", delay_s=0.002 * (int(request.session) % 7), pace_s=0.002)

    async with gateway(script, alive_s=0.004) as g:
        sessions = [await g.open(id=str(n)) for n in range(40)]

        async def read_lines(key: str) -> list[str]:
            return [event async for event in events(g, key)]

        for lines in await asyncio.gather(*(read_lines(s.key) for s in sessions)):
            assert lines[-1] == "data: [DONE]" and lines.count("data: [DONE]") == 1
            assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "stop"


async def test_failure_after_keep_alives_is_error_event() -> None:
    """The status is already sent, so the error is an event, which the client raises."""
    async with gateway([say("Never.", delay_s=0.1, cut_after=0)], alive_s=0.02) as g:
        session = await g.open()
        stream = await start_stream(g, session.key)
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "engine_unavailable"


async def test_error_event_is_last() -> None:
    async with gateway([say("One two three.", pace_s=0.01, cut_after=3)], alive_s=0.005) as g:
        session = await g.open()
        lines = [event async for event in events(g, session.key)]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "engine_unavailable"
        assert "data: [DONE]" not in lines


async def test_whole_reply_equals_streamed_reply() -> None:
    """The engine is called without streaming, and the text is identical."""
    text = "<think>\nHm.\n</think>\n\nGröße 👩‍👩‍👧 \n" + calls(("read_file", {"path": "a"})) + "\n"
    async with gateway([say(text)] * 2) as g:
        session = await g.open()
        streamed = await g.ask(session.key, "Hi", "async stream", tools=[tool()])
        collected = await g.ask(session.key, "Hi", "async", tools=[tool()])
        assert [r.stream for r in g.engine.received] == [True, False]
        assert streamed[:2] == collected[:2] and streamed.finish == collected.finish
        assert [c[1:] for c in streamed.calls] == [c[1:] for c in collected.calls]
