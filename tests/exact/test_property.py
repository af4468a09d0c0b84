"""Random conversations through the real app with real tokenizers and templates: traces stay exact."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.exact.agent import TOOLS, Agent, Reply, World, reformat
from tests.exact.invariants import check_invariants
from tests.renderer_fixtures import renderer_params
from turngate.engines.scripted import ScriptedTurn

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=40)
REPLIES = st.sampled_from(
    [
        "text",
        "think",
        "call",
        "calls",
        "think+call",
        "malformed",
        "truncated",
        "random",
        "random, cut",
        "empty",
        "unclosed",
    ]
)
STEPS = st.one_of(
    st.tuples(st.just("go on"), REPLIES, TEXTS),
    st.tuples(st.just("go on, respelled"), REPLIES, TEXTS),
    st.tuples(st.just("go on, streamed"), REPLIES, TEXTS),
    st.tuples(st.just("retry"), REPLIES, TEXTS),
    st.tuples(st.just("edit"), REPLIES, TEXTS),
    st.tuples(st.just("compact"), REPLIES, TEXTS),
    st.tuples(st.just("tools"), REPLIES, TEXTS),
    st.tuples(st.just("two at once"), REPLIES, TEXTS),
    st.tuples(st.just("back"), REPLIES, TEXTS),
)


def make_turn(renderer: Any, kind: str, text: str, rng: random.Random) -> ScriptedTurn:
    """A scripted turn of one kind."""
    encode, stop = renderer.tokenizer.encode, renderer.stop_ids[0]
    call = '<tool_call>\n{"name": "read", "arguments": {"path": "a/é.py", "n": 1.0}}\n</tool_call>'
    if renderer.syntax is not None and renderer.syntax.name == "deepseek":
        begin, sep, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
        one = begin + "function" + sep + 'read\n```json\n{"path": "a/é.py", "n": 1.0}\n```' + end
        call = "<｜tool▁calls▁begin｜>" + one + "<｜tool▁calls▁end｜>"
    vocabulary = renderer.tokenizer.vocab_size
    if kind.startswith("random"):
        ids = [
            i for i in (rng.randrange(vocabulary) for _ in range(rng.randrange(1, 60))) if i not in renderer.stop_ids
        ]
        return ScriptedTurn(ids or [0, 1, 2], finish="length") if "cut" in kind else ScriptedTurn([*ids, stop])
    texts = {
        "text": text,
        "think": f"<think>\n{text}\n</think>\n\nSo: {text}",
        "call": f"{text}\n{call}",
        "calls": f"{call}\n{call}",
        "think+call": f"<think>\n{text}\n</think>\n\n{call}",
        "malformed": '<tool_call>\n{"name": "read", "arguments": {oops}\n</tool_call>',
        "truncated": f"<think>\n{text} and then",
        "empty": "",
        "unclosed": call.removesuffix("</tool_call>"),
    }
    ids = encode(texts[kind])
    ids = [i for i in ids if i not in renderer.stop_ids]
    return ScriptedTurn(ids, finish="length") if kind == "truncated" else ScriptedTurn([*ids, stop])


def follow(agent: Agent, reply: Reply, text: str) -> None:
    """Append a reply, and tool results or the next user message, to the agent's history."""
    agent.messages.append(reply.message)
    calls = reply.message.get("tool_calls") or []
    for call in calls:
        agent.messages.append(
            {"role": "tool", "tool_call_id": call["id"], "content": f"result of {call['function']['name']}: {text}"}
        )
    if not calls:
        agent.messages.append({"role": "user", "content": text})


async def play(renderer: Any, steps: list[tuple[str, str, str]], seed: int, evicts: bool) -> None:
    """Run steps and check the trace. `evicts`: the trace leaves memory before each step."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        async with World.of(folder, renderer) as world:
            agent = world.agent()
            agent.messages = [{"role": "system", "content": "You work."}, {"role": "user", "content": "Begin."}]
            first = await agent.call(make_turn(renderer, "text", "ok", rng))
            follow(agent, first, "next")
            for kind, reply_kind, text in steps:
                before = len(agent.session.trace.nodes)
                if evicts:
                    assert await world.gateway.evictor.sweep(time.time() + 1e6) == 1
                await step(agent, kind, make_turn(renderer, reply_kind, text, rng), text, rng, before)
            check_invariants(agent.session, [g.prompt for g in world.engine.received])
            live = agent.session
            stored = world.gateway.store.load(world.gateway.store.find(agent.session_id))
            assert [(n.id, n.ids.tobytes()) for n in stored.trace.nodes] == [
                (n.id, n.ids.tobytes()) for n in live.trace.nodes
            ]
            check_invariants(stored, [g.prompt for g in world.engine.received])


async def step(agent: Agent, kind: str, turn: ScriptedTurn, text: str, rng: random.Random, before: int) -> None:
    if kind == "two at once":
        other = ScriptedTurn([*turn.ids])
        replies = await asyncio.gather(agent.call(turn), agent.call(other, stream=True))
        assert [r.status for r in replies] == [200, 200]
        follow(agent, replies[rng.randrange(2)], text)
        return
    match kind:
        case "go on, respelled":
            reply = await agent.call(turn, messages=reformat(agent.messages, rng))
        case "go on, streamed":
            reply = await agent.call(turn, stream=True)
        case "retry":
            await agent.call(ScriptedTurn([*turn.ids]), stream=True)
            reply = await agent.call(turn, retried=True)
        case "edit":
            at = rng.randrange(1, len(agent.messages))
            agent.messages[at] = {**agent.messages[at], "content": f"edited {text}"}
            reply = await agent.call(turn)
        case "compact":
            agent.messages = [agent.messages[0], {"role": "user", "content": f"Summary so far: {text}"}]
            reply = await agent.call(turn)
        case "tools":
            agent.tools = rng.choice([TOOLS, TOOLS[:2], TOOLS[:1], None])
            reply = await agent.call(turn)
        case "back":
            turns = [i for i, m in enumerate(agent.messages) if m["role"] == "assistant"]
            agent.messages = [*agent.messages[: rng.choice(turns) + 1], {"role": "user", "content": text}]
            reply = await agent.call(turn)
        case _:
            reply = await agent.call(turn)
    assert reply.status == 200, reply.error
    if kind.startswith("go on"):
        # An unchanged history never forks, however it is formatted.
        new = agent.session.trace.nodes[before:]
        assert [n.info.cause for n in new] == [None, None], [n.info.cause for n in new]
        assert new[0].parent is not None
    follow(agent, reply, text)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name",
    renderer_params(
        ["qwen3", "qwen2_5", "llama3_1", "deepseek_v3", "smollm2", "family:qwen3", "family:deepseek-v3", "builtin"],
        full={"llama3_1"},
        repeat={"qwen2_5", "smollm2", "family:qwen3", "family:deepseek-v3"},  # like others of their family or template
    ),
)
def test_random_conversations_stay_exact(name: str, renderers: Any) -> None:
    renderer = renderers(name)

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.lists(STEPS, min_size=1, max_size=10), st.integers(0, 2**32), st.booleans())
    def run(steps: list[tuple[str, str, str]], seed: int, evicts: bool) -> None:
        asyncio.run(play(renderer, steps, seed, evicts))

    run()
