"""Agents that edit their history: moved cache marks and added default arguments do not fork."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.exact.agent import Agent, World
from tests.exact.invariants import check_invariants
from tests.exact.test_rows import SYSTEM, say, user
from tests.kit import calls
from turngate.trace.message_equality import RequestMessages


@pytest.fixture
async def world(tmp_path: Any, renderers: Any):
    async with World.of(tmp_path, renderers("builtin")) as world:
        yield world


async def run_turn(agent: Agent, text: str, **changed: Any) -> dict[str, Any]:
    """Run one turn, and add it to the history with `changed` arguments and tool results."""
    reply = await agent.call(say(agent.world, text))
    message = reply.message
    for call in message.get("tool_calls", []):
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps({**changed, **arguments} if "path" not in changed else changed)
        agent.messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]
    return message


async def test_added_default_arguments_do_not_fork(world: World) -> None:
    agent = world.agent()
    agent.messages = [SYSTEM, user("Fix it.")]
    for n in range(4):
        await run_turn(agent, calls(("write", {"path": f"f{n}"})), replace_all=False, n=0)
    await agent.call(say(world, "Done."))
    assert len(agent.session.trace.roots) == 1
    assert all(n.info.cause is None for n in agent.session.trace.nodes)
    check_invariants(agent.session, [g.prompt for g in agent.world.engine.received])


async def test_rewritten_argument_keeps_model_version(world: World) -> None:
    agent = world.agent()
    agent.messages = [SYSTEM, user("Fix it.")]
    await run_turn(agent, calls(("write", {"path": "a"})), path="/work/a")
    await agent.call(say(world, "Done."))
    assert [t.info.cause for t in agent.session.trace.turns()] == [None, None]
    check_invariants(agent.session, [g.prompt for g in agent.world.engine.received])


async def test_cleared_arguments_fork(world: World) -> None:
    agent = world.agent()
    agent.messages = [SYSTEM, user("Fix it.")]
    await run_turn(agent, calls(("write", {"path": "a" * 5000})), path="(cleared)")
    await agent.call(say(world, "Done."))
    assert [t.info.cause for t in agent.session.trace.turns()] == [None, "edited"]
    check_invariants(agent.session, [g.prompt for g in agent.world.engine.received])


async def test_added_defaults_with_other_call_id_fork(world: World) -> None:
    agent = world.agent()
    agent.messages = [SYSTEM, user("Fix it.")]
    await run_turn(agent, calls(("write", {"path": "a"})), n=0)
    agent.messages[-2]["tool_calls"][0]["id"] = agent.messages[-1]["tool_call_id"] = "another"
    await agent.call(say(world, "Done."))
    assert [t.info.cause for t in agent.session.trace.turns()] == [None, "edited"]
    check_invariants(agent.session, [g.prompt for g in agent.world.engine.received])


async def test_moving_cache_mark_reads_only_last_messages(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = world.agent()
    agent.messages = [SYSTEM, user("Fix it.")]
    read: list[int] = []
    original = RequestMessages.messages
    monkeypatch.setattr(RequestMessages, "messages", lambda self, at: read.append(at) or original(self, at))
    for n in range(30):
        marked = [*agent.messages[:-1], {**agent.messages[-1], "cache": "here"}]
        reply = await agent.call(say(world, f"Step {n}."), messages=marked)
        agent.messages += [reply.message, user(f"next {n}")]
    last = 2 * 29 + 1
    # Of the sixty messages in the last request, only the newest were read, and the first for its system prompt.
    lookups = read[-20:]
    assert {at for at in lookups if at != 0} <= set(range(last - 4, last + 1))
    assert len(agent.session.trace.roots) == 1
    check_invariants(agent.session, [g.prompt for g in agent.world.engine.received])


async def test_results_are_ordered_like_calls(world: World) -> None:
    agent = world.agent()
    agent.messages = [SYSTEM, user("Fix it.")]
    reply = await agent.call(
        say(world, calls(("read", {"path": "a"}), ("read", {"path": "b"}), ("read", {"path": "c"})))
    )
    ids = [call["id"] for call in reply.message["tool_calls"]]
    results = {n: {"role": "tool", "tool_call_id": ids[n], "content": f"result {n}"} for n in range(3)}
    agent.messages += [reply.message, results[2], results[0], results[1]]
    await agent.call(say(world, "Done."))
    prompt = world.gateway.renderer.tokenizer.decode(world.engine.received[-1].prompt.tolist())
    assert prompt.index("result 0") < prompt.index("result 1") < prompt.index("result 2")
    assert len(agent.session.trace.roots) == 1
    check_invariants(agent.session, [g.prompt for g in agent.world.engine.received])
