"""Signals that agents send with their calls, and the roles that follow from them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.exact.agent import World
from tests.exact.invariants import check_invariants
from tests.exact.test_rows import SYSTEM, role_list, say, user
from tests.kit import tool
from turngate.dialects.chat import ChatHistory
from turngate.dialects.chat_tools import ChatTools
from turngate.trace.sample import build_samples
from turngate.trace.signals import Rule, Signals, find_faults, is_model_alias, read_signals
from turngate.types import Call, CallSignals

TITLES = (
    Rule(role="side", source="system", match="You write titles*", why="title"),
    Rule(role="side", source="last", match="Sum it up*", why="compaction"),
)


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


@pytest.fixture
async def world(tmp_path: Any, renderers: Any):
    async with World.of(tmp_path, renderers("builtin")) as world:
        yield world


def call(body: bytes = b"{}", model: str = "m", tools: Any = None, texts: tuple[str, ...] = ("Hi",)) -> Call:
    history = ChatHistory(
        [json.dumps({"role": "system" if n == 0 else "user", "content": t}).encode() for n, t in enumerate(texts)]
    )
    return Call(model=model, history=history, body=body, tools=ChatTools(json.dumps(tools).encode()) if tools else None)


def test_sources_are_headers_and_paths_into_the_body() -> None:
    signals = Signals(
        thread=("header:X-Thread", "header:x-meta.thread", "body:metadata.user_id.session_id", "body:prompt_cache_key"),
        parent=("body:meta.parent",),
    )
    inside = json.dumps({"session_id": "s1"})  # nested JSON, as some programs send it
    body = json.dumps({"metadata": {"user_id": inside}, "prompt_cache_key": "k", "meta": {"parent": 7}}).encode()
    assert read_signals(signals, {"x-thread": "t"}, call(body)) == CallSignals("t", "7")
    assert read_signals(signals, {"x-meta": '{"thread": "u"}'}, call(body)).thread == "u"
    assert read_signals(signals, {"x-meta": "u"}, call(body)).thread == "s1"
    assert read_signals(signals, {}, call(b'{"prompt_cache_key": "k"}')).thread == "k"


def test_rules_set_role_and_override_model_name() -> None:
    signals = Signals(
        rules=(
            Rule(role="side", source="header:x-kind", match="title*", why="title"),
            Rule(role="subagent", source="tool:complete_task"),
            Rule(role="side", source="last", match="Summarise*"),
            Rule(role="side", source="system", match="You write titles*"),
        ),
        models={"*-small": "side"},
    )
    assert read_signals(signals, {"x-kind": "title-1"}, call()) == CallSignals(
        role="side", why="title", source="header:x-kind"
    )
    assert read_signals(signals, {}, call(tools=[tool("complete_task")], model="m-small")).role == "subagent"
    assert read_signals(signals, {}, call(tools=[tool("read"), tool("complete_task_x")])).role == ""
    assert read_signals(signals, {}, call(texts=("You are.", "Summarise it."))).role == "side"
    assert read_signals(signals, {}, call(texts=("You write titles.", "Hi"))).role == "side"
    assert read_signals(signals, {}, call(model="m-small")) == CallSignals(
        role="side", why="model m-small", source="model"
    )
    assert read_signals(signals, {}, call()) == CallSignals()
    assert is_model_alias(signals, "m-small") and not is_model_alias(signals, "m")


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"metadata": 3}', b'{"metadata": {"user_id": "{"}}', b"\xff"])
def test_unreadable_body_has_no_signals(body: bytes) -> None:
    assert read_signals(Signals(thread=("body:metadata.user_id.session_id",)), {}, call(body)) == CallSignals()


def test_unknown_source_is_rejected() -> None:
    [(field, wrong)] = find_faults(Signals(thread=("header:x", "cookie:x"), rules=(Rule(role="side", source="last"),)))
    assert field == "signals.thread[1]" and "unknown source 'cookie:x'" in wrong


async def test_side_model_calls_are_not_trained(world: World) -> None:
    agent = world.agent(model="m", signals=Signals(models={"m-small": "side"}))
    agent.messages = [SYSTEM, user("Fix the bug.")]
    # It comes first and has tools, so without the signal it would be the main line.
    await agent.call(say(world, "A title"), messages=[user("Give it a title")], model="m-small")
    await agent.call(say(world, "Done."))
    assert role_list(agent) == ["side", "main"]
    [row] = build_samples(agent.session.trace)
    assert [span.role for span in row.spans] == ["main"]
    check_invariants(agent.session, [g.prompt for g in agent.world.engine.received])
    rejected = await agent.call(say(world, "x"), model="m-large")
    assert rejected.status == 404
    world.queue.clear()


async def test_thread_with_parent_is_subagent(world: World) -> None:
    signals = Signals(thread=("body:thread",), parent=("body:parent",))
    agent = world.agent(signals=signals)
    # It begins like its parent, so without the signal it would be a branch or compaction.
    agent.messages = [SYSTEM, user("Fix the bug.")]
    await agent.call(say(world, "I ask a helper."), thread="a")
    await agent.call(say(world, "Found it."), thread="b", parent="a", messages=[SYSTEM, user("Look for it.")])
    assert role_list(agent) == ["main", "subagent"]


async def test_restart_in_same_thread_is_not_subagent(world: World) -> None:
    agent = world.agent(signals=Signals(thread=("body:thread",)))
    agent.messages = [SYSTEM, user("Fix the bug.")]
    await agent.call(say(world, "Working."), thread="a")
    compacted = [{"role": "system", "content": "You go on."}, user("So far: …")]
    await agent.call(say(world, "Going on."), thread="a", messages=compacted)
    await agent.call(say(world, "Helping."), thread="b", messages=[*compacted, user("Help.")])
    assert role_list(agent) == ["main", "main", "subagent"]
    assert [n.info.cause for n in agent.session.trace.roots] == [None, "compaction", "subagent"]
    reloaded = world.gateway.store.load(world.gateway.store.find(agent.session_id))
    assert [n.info.signals.thread for n in reloaded.trace.roots] == ["a", "a", "b"]


async def test_main_line_after_title_is_not_a_fork(world: World) -> None:
    agent = world.agent(signals=Signals(thread=("body:thread",), rules=TITLES))
    agent.messages = [SYSTEM, user("Fix the bug.")]
    await agent.call(say(world, "A title"), thread="a", tools=None, messages=[system("You write titles."), user("Hi")])
    await agent.call(say(world, "Done."), thread="a")
    assert role_list(agent) == ["side", "main"]
    assert [root.info.cause for root in agent.session.trace.roots] == [None, None]


async def test_side_branches_do_not_fork_main_line(world: World) -> None:
    signals = Signals(thread=("body:thread",), parent=("body:parent",), rules=TITLES)
    agent = world.agent(signals=signals)
    agent.messages = [SYSTEM, user("Fix the bug.")]
    reply = await agent.call(say(world, "I ask a helper."), thread="a")
    here = [*agent.messages, reply.message]
    await agent.call(say(world, "In short: …"), thread="a", messages=[*here, user("Sum it up.")])
    await agent.call(say(world, "I help."), thread="b", parent="a", messages=[*here, user("You are a helper.")])
    await agent.call(say(world, "Done."), thread="a", messages=[*here, user("The helper is at it.")])
    assert role_list(agent) == ["main", "side", "subagent", "main"]
    assert [turn.info.cause for turn in agent.session.trace.turns()] == [None, "side", "subagent", None]
    [main] = [row for row in build_samples(agent.session.trace) if row.spans[-1].role == "main"]
    assert [span.trained for span in main.spans] == [True, True]
    check_invariants(agent.session, [g.prompt for g in agent.world.engine.received])
