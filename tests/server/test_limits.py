"""Test session limits: at a limit the gateway sends a normal final answer, because agents retry empty or failed ones."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.kit import CLIENT_MODES, Gated, Reply, gateway, renderer, say, tokenizer, until, user
from tests.speed import scaled
from tests.verify.kit import verify_all
from turngate.engines.scripted import Scripted
from turngate.gateway import prompt

HI = [user("Hi")]
every_way = pytest.mark.parametrize("way", CLIENT_MODES)


def is_final_answer(reply: Reply) -> bool:
    """Check for a normal, non-empty final message that names the limit."""
    return (
        reply.finish == "stop" and "limit" in reply.content and not reply.calls and reply.usage.completion_tokens == 0
    )


@every_way
async def test_turn_limit(way: str) -> None:
    async with gateway([say("One."), say("Two.")]) as g:
        session = await g.open(limits={"turns": 2})
        assert [(await g.ask(session.key, HI, way)).content for _ in range(2)] == ["One.", "Two."]
        for _ in range(2):  # repeated calls get the same answer
            assert is_final_answer(await g.ask(session.key, HI, way))
        assert len(g.engine.received) == 2 and len(await g.turns(session.id)) == 2
        shown = await g.show(session.id)
        assert (shown["status"], shown["stop"], shown["turns"]) == ("open", "turns", 2)
        assert (await g.seal(session.id))["stop"] == "turns"


@every_way
async def test_sampled_token_limit(way: str) -> None:
    """The turn that reaches the limit is cut there; the next call gets the final answer."""
    async with gateway([say("One two three four five.")] * 2) as g:
        size = len(say("One two three four five.").ids)
        session = await g.open(limits={"sampled_tokens": size + 3})
        assert (await g.ask(session.key, HI, way)).finish == "stop"
        cut = await g.ask(session.key, HI, way)
        assert cut.finish == "length" and cut.usage.completion_tokens == 3
        assert is_final_answer(await g.ask(session.key, HI, way))
        assert (await g.show(session.id))["sampled_tokens"] == size + 3


@every_way
async def test_context_token_limit(way: str) -> None:
    async with gateway([say("word " * 50)] * 2) as g:
        session = await g.open(limits={"context_tokens": 30})
        cut = await g.ask(session.key, HI, way)
        assert cut.finish == "length" and cut.usage.total_tokens == 30
        last = await g.ask(session.key, [*HI, cut.message(), user("More")], way)
        assert is_final_answer(last) and len(g.engine.received) == 1
        # A shorter conversation still fits.
        assert (await g.ask(session.key, "Hello", way)).finish == "length"


@every_way
async def test_time_limit(way: str) -> None:
    async with gateway([say("One.")]) as g:
        session = await g.open(limits={"seconds": 0.05})
        await asyncio.sleep(0.06)
        assert is_final_answer(await g.ask(session.key, HI, way)) and not g.engine.received


async def test_time_limit_during_answer_cuts_it() -> None:
    """The sampled tokens are kept, and the engine is aborted."""
    engine = Gated([say("One two three four.")], tokens=3)
    async with gateway(engine=engine) as g:
        seconds, started = scaled(0.2), time.monotonic()
        session = await g.open(limits={"seconds": seconds})
        async with asyncio.timeout(seconds + scaled(5)):
            reply = await g.ask(session.key, HI, "async stream")
        assert time.monotonic() - started > 0.9 * seconds
        assert reply.finish == "length" and reply.content == tokenizer().decode(say("One two three four.").ids[:3])
        assert engine.aborted == 1
        [turn] = await g.turns(session.id)
        assert (turn["role"], turn["finish"]) == ("main", "length") and len(await g.samples(session.id)) == 1


@pytest.mark.parametrize("way", ["async", "async stream"])
async def test_time_limit_before_first_token(way: str) -> None:
    """The answer is not empty, because agents retry empty answers."""
    async with gateway(engine=Gated([say("Too late.")])) as g:
        session = await g.open(limits={"seconds": 0.2})
        assert is_final_answer(await g.ask(session.key, HI, way))


@pytest.mark.parametrize("way", ["async", "async stream"])
async def test_time_limit_at_fence(way: str) -> None:
    """A pause does not stop the clock: the call returns when the time is over."""
    async with gateway([say("Too late.")]) as g:
        session = await g.open(limits={"seconds": 0.2})
        await g.pause()
        task = g.start(g.ask(session.key, HI, way))
        try:
            assert is_final_answer(await asyncio.wait_for(asyncio.shield(task), scaled(5)))
        finally:
            await g.resume()


async def test_at_limit_conflict_returns_conflict() -> None:
    async with gateway([say("One.")]) as g:
        session = await g.open(limits={"turns": 1}, at_limit="conflict")
        await g.ask(session.key, HI)
        with pytest.raises(openai.ConflictError) as caught:
            await g.ask(session.key, HI)
        assert "turns" in caught.value.message and caught.value.response.headers["x-should-retry"] == "false"


# ── under concurrency ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_calls_in_flight_count_as_turns() -> None:
    async with gateway(engine=Gated([say("Answer.")] * 3)) as g:
        session = await g.open(limits={"turns": 3})
        tasks = [g.start(g.ask(session.key, [user(f"Question {n}")])) for n in range(8)]
        await until(lambda: sum(t.done() for t in tasks) == 5)
        g.gated.gate.set()
        replies = await asyncio.gather(*tasks)
        assert sum(r.content == "Answer." for r in replies) == 3 and sum(map(is_final_answer, replies)) == 5
        assert len(g.engine.received) == (await g.show(session.id))["turns"] == 3


async def test_parallel_calls_do_not_exceed_sampled_token_limit() -> None:
    """Four parallel calls may not each sample the remaining tokens."""
    async with gateway(engine=Gated([say("One two three four five six seven.")] * 4)) as g:
        session = await g.open(limits={"sampled_tokens": 10})
        tasks = [g.start(g.ask(session.key, [user(f"Question {n}")])) for n in range(4)]
        await until(lambda: g.gated.waiting + sum(t.done() for t in tasks) == 4)
        g.gated.gate.set()
        await asyncio.gather(*tasks)
        assert (await g.show(session.id))["sampled_tokens"] <= 10


async def test_parallel_calls_share_remaining_tokens() -> None:
    """A call of a parallel sub-agent does not reserve the whole remaining budget."""
    async with gateway(engine=Gated([say("One two three.")] * 3)) as g:
        session = await g.open(limits={"sampled_tokens": 100})
        tasks = [g.start(g.ask(session.key, [user(f"Question {n}")])) for n in range(3)]
        await until(lambda: g.gated.waiting + sum(t.done() for t in tasks) == 3)
        g.gated.gate.set()
        assert [reply.content for reply in await asyncio.gather(*tasks)] == ["One two three."] * 3
        assert (await g.show(session.id))["sampled_tokens"] == 3 * len(say("One two three.").ids)


async def test_call_whose_tokens_ran_out_while_its_prompt_was_built_gets_final_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large prompts are rendered in a thread, while parallel calls sample."""
    render, may_render = prompt._render, threading.Event()

    def render_late(*arguments: Any) -> prompt.Prompt:
        may_render.wait(scaled(10))
        return render(*arguments)

    async with gateway(engine=Gated([say("One two three four five six seven.")] * 2, tokens=1)) as g:
        session = await g.open(limits={"sampled_tokens": 5})
        first = g.start(g.ask(session.key, HI, "async stream"))
        await until(lambda: g.gated.waiting)
        monkeypatch.setattr(prompt, "_render", render_late)
        second = g.start(g.ask(session.key, [user("word " * 20_000)]))
        await until(lambda: g.app.fence.in_flight == 2)
        g.gated.gate.set()
        assert (await first).finish == "length"
        may_render.set()
        assert is_final_answer(await second) and len(g.engine.received) == 1


async def test_call_whose_tokens_ran_out_at_fence_gets_final_answer() -> None:
    """The call was admitted while tokens were left and then waited at the fence."""
    async with gateway(engine=Gated([say("One two three four five six seven.")] * 2, tokens=1)) as g:
        session = await g.open(limits={"sampled_tokens": 5})
        first = g.start(g.ask(session.key, HI, "async stream"))
        await until(lambda: g.gated.waiting)
        await g.pause()
        second = g.start(g.ask(session.key, [user("Two")]))
        await until(lambda: g.live(session.id).in_flight == 2)
        g.gated.gate.set()
        assert (await first).finish == "length"
        await g.resume()
        assert is_final_answer(await second)


async def test_failed_and_aborted_calls_do_not_count_as_turns() -> None:
    engine = Gated([say("", busy=True), say("Lost."), say("One.")])
    async with gateway(engine=engine) as g:
        session = await g.open(limits={"turns": 1})
        engine.gate.set()
        with pytest.raises(openai.RateLimitError):
            await g.ask(session.key, HI)
        engine.gate.clear()
        task = g.start(g.ask(session.key, HI))
        await until(lambda: engine.waiting)
        task.cancel()
        await until(lambda: engine.aborted == 1)
        engine.gate.set()
        assert (await g.ask(session.key, HI)).content == "One."
        assert is_final_answer(await g.ask(session.key, HI))


async def test_limits_apply_per_session() -> None:
    async with gateway([say("One.")] * 2) as g:
        tight, free = await g.open(limits={"turns": 1}), await g.open()
        for session in (tight, free):
            await g.ask(session.key, HI)
        assert is_final_answer(await g.ask(tight.key, HI))
        assert (await g.ask(free.key, HI)).content == "One."


async def test_model_and_session_context_limits_both_apply() -> None:
    async with gateway(engine=Scripted([say("word " * 50)] * 2, max_context=40)) as g:
        narrow, wide = await g.open(limits={"context_tokens": 30}), await g.open(limits={"context_tokens": 1000})
        assert (await g.ask(narrow.key, HI)).usage.total_tokens == 30
        assert (await g.ask(wide.key, HI)).usage.total_tokens == 40


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
async def test_clock_that_is_set_ends_no_session(
    jump_s: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither the time limit nor the recorded times follow a jump of the machine's clock."""
    real = time.time
    async with gateway([say("One."), say("Two.")], data=tmp_path) as g:
        session = await g.open(limits={"seconds": 600})
        first = await g.ask(session.key, HI)
        monkeypatch.setattr(time, "time", lambda: real() + jump_s)
        assert (await g.ask(session.key, [*HI, first.message(), user("Go on")])).content == "Two."
        await g.seal(session.id)
        monkeypatch.undo()
    verify_all(tmp_path, renderer=renderer())
