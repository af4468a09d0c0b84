"""Regression tests: each of these once caused a wrong row, a stall or a leak."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.exact.agent import World, asgi
from tests.exact.invariants import check_invariants
from tests.exact.test_rows import SYSTEM, causes, role_list, say, talk, user
from tests.render.test_template import CHATML, folder_with
from tests.speed import scaled
from turngate.engines.base import Chunk, RelayChunk
from turngate.engines.scripted import ScriptedTurn
from turngate.errors import StoreError
from turngate.gateway.prompt import build_observed_prompt
from turngate.render import LastTurn, load_renderer
from turngate.render.call_syntax import DEEPSEEK, HERMES
from turngate.render.parse import Parser
from turngate.trace.roles import assign_roles
from turngate.trace.sample import build_samples
from turngate.types import Delta, Limits, Message, Tool


@pytest.fixture
async def world(tmp_path: Path, renderers: Any):
    async with World.of(tmp_path, renderers("builtin")) as world:
        yield world


async def until(condition: Any) -> None:
    async with asyncio.timeout(scaled(5)):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("durability", ["process", "disk"])
async def test_concurrent_cancel_and_delete_do_not_leak_into_next_session(
    durability: str, tmp_path: Path, renderers: Any
) -> None:
    async with World.of(tmp_path, renderers("builtin"), durability=durability) as world:
        first = world.agent()
        first.messages = [SYSTEM, user("SECRET of the first session")]
        turn = say(world, "one two three four five")
        call = asyncio.create_task(first.call(ScriptedTurn(turn.ids, delay_s=3600)))
        await until(lambda: world.engine.in_flight)
        sessions = world.gateway.sessions
        await asyncio.gather(sessions.cancel(first.session_id), sessions.delete(first.session_id))
        await call
        second = world.agent()
        second.messages = [SYSTEM, user("work")]
        await talk(second, "a")
        stored = world.gateway.store.load(world.gateway.store.find(second.session_id))
        assert len(stored.trace.nodes) == 2
        assert b"SECRET" not in b"".join(world.gateway.store.messages(stored.key).values())


async def test_failed_seal_keeps_session_open(world: World) -> None:
    agent = world.agent()
    agent.messages = [SYSTEM, user("work")]
    await talk(agent, "a")
    original = world.gateway.store.close_session

    def fail(*_: Any) -> None:
        raise StoreError("disk full")

    world.gateway.store.close_session = fail  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(StoreError):
            await world.gateway.sessions.seal(agent.session_id)
    world.gateway.store.close_session = original  # type: ignore[method-assign]
    await talk(agent, "b")
    assert (await world.gateway.sessions.seal(agent.session_id)).status == "sealed"


async def test_unexpected_commit_error_reaches_every_caller(tmp_path: Path, renderers: Any) -> None:
    async with World.of(tmp_path, renderers("builtin"), durability="disk") as world:
        agent = world.agent()
        agent.messages = [SYSTEM, user("work")]

        def fail_commit(turns: Any) -> None:
            raise OverflowError("int too large")

        original, world.gateway.store.commit = world.gateway.store.commit, fail_commit  # type: ignore[method-assign]
        replies = await asyncio.wait_for(asyncio.gather(*(agent.call(say(world, "x")) for _ in range(3))), scaled(5))
        assert {r.status for r in replies} == {503}
        world.gateway.store.commit = original  # type: ignore[method-assign]
        assert agent.session.live_tokens == 0
        assert agent.session.trace.nodes == []
        assert (await agent.call(say(world, "y"))).status == 200


async def test_observed_prompt_keeps_endpoint_ids(world: World) -> None:
    agent = world.agent()
    agent.messages = [SYSTEM, user("hi")]
    await talk(agent, "a")
    from turngate.dialects import Chat, WireRequest
    from turngate.gateway.prompt import PromptBuilder

    body = b'{"messages": [{"role": "system", "content": "You are a coding agent."}, {"role": "user", "content": "hi "}], "tools": []}'
    agent.tools = None
    location, preamble = PromptBuilder().locate(agent.session, Chat().decode(WireRequest(body)))
    prompt = build_observed_prompt(location, np.array([1, 2, 99, 3], np.int32), preamble)
    assert prompt.ids.tolist() == [1, 2, 99, 3]
    assert prompt.added.tolist() == [1, 2, 99, 3]
    assert prompt.context is None


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        (HERMES, "<tool_call><function=a>" + "<parameter=x>\n1" * 20_000 + "</function></tool_call>"),
        (HERMES, "<tool_call>" + "<function=a>" * 20_000 + "</tool_call>"),
        (DEEPSEEK, "<｜tool▁call▁begin｜>" + " " * 100_000 + "<｜tool▁call▁end｜>"),
        (HERMES, "<" * 100_000),
        (HERMES, "[" * 100_000),
    ],
)
def test_repetitive_output_does_not_stall_parser(syntax: Any, text: str) -> None:
    tools = (Tool("a", {"function": {"name": "a", "parameters": {"properties": None}}}),)
    began = time.process_time()
    parser = Parser(syntax, tools=tools)
    events = parser.feed(text)
    rest, parsed = parser.finish()
    assert "".join(e.text for e in [*events, *rest] if isinstance(e, Delta)) == parsed.message.content
    assert time.process_time() - began < scaled(0.5)  # took half a minute before the fix


def test_whitespace_stream_is_parsed_in_linear_time() -> None:
    began = time.process_time()
    parser = Parser(HERMES, tools=(Tool("a", {"function": {"name": "a"}}),))
    for _ in range(40_000):
        parser.feed(" " * 20)
    _, parsed = parser.finish()
    assert len(parsed.message.content) == 800_000
    assert time.process_time() - began < scaled(1.5)


@pytest.mark.promise(8)
async def test_many_tool_results_are_read_in_linear_time(world: World) -> None:
    agent = world.agent()
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "read", "arguments": "{}"}} for n in range(3000)]
    agent.messages = [SYSTEM, user("x"), {"role": "assistant", "content": None, "tool_calls": calls}]
    agent.messages += [{"role": "tool", "tool_call_id": f"c{n}", "content": "x"} for n in range(3000)]
    began = time.process_time()
    assert (await agent.call(say(world, "ok"))).status == 200
    assert time.process_time() - began < scaled(1)


async def test_call_id_selects_between_equal_answers(world: World) -> None:
    agent = world.agent()
    agent.messages = [SYSTEM, user("work")]
    call = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
    first = await agent.call(say(world, f"<think>\nfirst\n</think>\n\n{call}"))
    await agent.call(say(world, f"<think>\nsecond\n</think>\n\n{call}"))
    kept = {k: v for k, v in first.message.items() if not k.startswith("reasoning")}
    agent.messages += [kept, {"role": "tool", "tool_call_id": kept["tool_calls"][0]["id"], "content": "x"}]
    await agent.call(say(world, "done"))
    turns = list(agent.session.trace.turns())
    assert turns[2].parent.parent is turns[0]
    assert role_list(agent) == ["main", "superseded", "main"]


async def test_indentation_of_a_tool_result_matters(world: World) -> None:
    agent = world.agent()
    agent.messages = [SYSTEM, user("        return x")]
    await agent.call(say(world, "a"))
    agent.messages = [SYSTEM, user("return x")]
    await agent.call(say(world, "b"))
    texts = [world.gateway.renderer.tokenizer.decode(g.prompt.tolist()) for g in world.engine.received]
    assert "        return x" in texts[0]
    assert "        return x" not in texts[1]


async def test_continued_turn_is_matched_after_reformatting(world: World) -> None:
    agent = world.agent()
    agent.messages = [SYSTEM, user("work")]
    first = await agent.call(say(world, "half of"), max_tokens=2)
    agent.messages.append(first.message)
    second = await agent.call(say(world, "it"))
    agent.messages += [second.message, user("next")]
    agent.messages = [dict(sorted(m.items())) for m in agent.messages]
    await agent.call(say(world, "done"))
    assert causes(agent) == []
    check_invariants(agent.session, [g.prompt for g in world.engine.received])


async def test_equal_concurrent_first_calls_share_one_root(tmp_path: Path, renderers: Any) -> None:
    async with World.of(tmp_path, renderers("builtin"), durability="disk") as world:
        agent = world.agent()
        agent.messages = [SYSTEM, user("work")]
        replies = await asyncio.gather(*(agent.call(say(world, f"answer {n}")) for n in range(4)))
        assert len(agent.session.trace.roots) == 1
        agent.messages += [replies[3].message, user("more")]
        await agent.call(say(world, "end"))
        assert role_list(agent)[-1] == "main"
        check_invariants(agent.session, [g.prompt for g in world.engine.received])


async def test_longest_line_is_main_without_tools(world: World) -> None:
    agent = world.agent()
    agent.tools = None
    title, work = [{"role": "system", "content": "Write a title."}, user("x")], [SYSTEM, user("x")]
    slow = say(world, "a")
    calls = (
        agent.call(say(world, "Title"), messages=title),
        agent.call(ScriptedTurn(slow.ids, delay_s=0.05), messages=work),
    )
    _, reply = await asyncio.gather(*calls)
    agent.messages = [*work, reply.message, user("go on")]
    await talk(agent, "b", "c")
    assert role_list(agent) == ["side", "main", "main", "main"] or role_list(agent)[1:] == ["main"] * 3


async def test_failed_write_refunds_tokens(world: World) -> None:
    agent = world.agent(limits=Limits(sampled_tokens=20))
    agent.messages = [SYSTEM, user("work")]
    original = world.gateway.store.commit

    def fail(turns: Any) -> None:
        raise StoreError("disk full")

    world.gateway.store.commit = fail  # type: ignore[method-assign]
    assert (await agent.call(say(world, "one two three"))).status == 503
    world.gateway.store.commit = original  # type: ignore[method-assign]
    assert agent.session.tokens_left == 20


@pytest.mark.parametrize(
    "change",
    [
        ("{{ m.content }}", "{{ m.content[:500] }}"),
        ("{{ m.content }}", "{{ m.content | replace('<|im_end|>', '') }}"),
        (
            "<|im_start|>assistant\n{% endif %}",
            "<|im_start|>assistant\n{% if '/no_think' in messages[0].content %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
        ),
    ],
    ids=["shortens", "cleans", "looks at the system prompt"],
)
def test_bridge_matches_template(change: tuple[str, str], tmp_path: Path) -> None:
    template = CHATML.replace(*change)
    assert template != CHATML
    renderer, _ = load_renderer(folder_with(tmp_path, template))
    system, long = "Be brief. /no_think", "word " * 400 + "<|im_end|> tail"
    history = [Message("system", system), Message("user", "x"), Message("assistant", "y"), Message("user", long)]
    whole = renderer.render(history, (), {})
    for _ in range(2):  # uncached and cached
        last = LastTurn(np.array([0], np.int32), np.array([renderer.stop_ids[0]], np.int32), history[2], system=system)
        bridge = renderer.bridge(last, history[3:], (), {})
        assert bridge is not None
        assert whole[-len(bridge) :] == bridge
        assert renderer.tokenizer.decode(whole[: -len(bridge)]).endswith("y<|im_end|>")


@pytest.mark.promise(8)
def test_thousand_new_messages_are_rendered_once(tmp_path: Path) -> None:
    renderer, _ = load_renderer(folder_with(tmp_path, CHATML))
    history = [Message("user", "x"), Message("assistant", "y"), *(Message("user", f"w{n}") for n in range(1000))]
    rendered = 0
    original = renderer.text  # type: ignore[attr-defined]

    def count(messages: Any, *args: Any, **kwargs: Any) -> str:
        nonlocal rendered
        rendered += len(messages)
        return str(original(messages, *args, **kwargs))

    renderer.text = count  # type: ignore[attr-defined]
    last = LastTurn(np.array([0], np.int32), np.array([renderer.stop_ids[0]], np.int32), history[1])
    bridge = renderer.bridge(last, history[2:], (), {})
    assert len(history) <= rendered < 1.1 * len(history), "whole once, and a few messages to check the transition"
    assert bridge is not None
    assert renderer.render(history, (), {})[-len(bridge) :] == bridge


class FakeEndpoint:
    """An endpoint that streams the given chunks."""

    name = "endpoint"

    def __init__(self, chunks: list[RelayChunk]) -> None:
        self._chunks = chunks

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def health(self) -> list[Any]:
        return []

    def relay(self, request: Any) -> Any:
        from contextlib import asynccontextmanager

        @asynccontextmanager
        async def relayed() -> Any:
            async def chunks() -> Any:
                for chunk in self._chunks:
                    yield chunk

            yield chunks()

        return relayed()


async def test_observed_turn_with_missing_ids_is_no_row(tmp_path: Path) -> None:
    from turngate.config import ServeConfig
    from turngate.server.app import Gateway
    from turngate.trace.session import SessionConfig

    chunks = [
        RelayChunk((Delta("content", "a"),), [10], [-0.1], [1, 2, 3]),
        RelayChunk((Delta("content", "b"),)),
        RelayChunk((Delta("content", "c"),), [12], [-0.1], finish="stop"),
    ]
    config = ServeConfig(data=str(tmp_path), engine="openai", engine_url=["http://127.0.0.1:1"])
    gateway = Gateway(config, relay=FakeEndpoint(chunks))
    await gateway.start()
    try:
        session, key = gateway.sessions.open(SessionConfig(mode="observe", sampling={"temperature": 1.0}))
        body = b'{"messages": [{"role": "user", "content": "x"}]}'
        status, _ = await asgi(
            gateway, "POST", "/v1/chat/completions", body, [(b"authorization", f"Bearer {key}".encode())]
        )
        assert status == 200
        (turn,) = session.trace.turns()
        assert turn.info.capture == "logprobs"
        assert build_samples(session.trace) == []
        assert assign_roles(session.trace)[turn.id] == "main"
    finally:
        await gateway.stop()


async def test_engine_that_ends_early_is_one_aborted_turn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = world.agent()
    agent.messages = [SYSTEM, user("hi")]

    @asynccontextmanager
    async def generate(request: object) -> AsyncIterator[AsyncIterator[Chunk]]:
        async def chunks() -> AsyncIterator[Chunk]:
            yield Chunk([5, 6], [-0.1, -0.2])

        yield chunks()

    monkeypatch.setattr(world.engine, "generate", generate)
    reply = await agent.call(ScriptedTurn([1]))
    assert reply.status == 503 and reply.error is not None
    assert "ended its reply before the generation finished" in reply.error["message"]
    (turn,) = agent.session.trace.turns()
    assert (turn.ids.tolist(), turn.info.finish, agent.session.live_tokens) == ([5, 6], "abort", 0)
    assert "before the generation finished" in turn.info.fault and build_samples(agent.session.trace) == []
