"""What an agent's program says of its calls, and what becomes of it: one test per way of saying it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tests.exact.agent import World
from tests.exact.invariants import check
from tests.exact.test_rows import SYSTEM, role_list, say, user
from turngate.trace.sample import samples
from turngate.trace.signals import Signals, alias, read
from turngate.types import Told


@pytest.fixture
async def world(tmp_path: Any, renderers: Any):
    async with World.of(tmp_path, renderers("builtin")) as world:
        yield world


def test_sources_are_headers_and_paths_into_the_body() -> None:
    signals = Signals(
        thread=("header:X-Thread", "body:metadata.user_id.session_id", "body:prompt_cache_key"),
        parent=("body:meta.parent",),
        kind=("header:x-kind",),
        side=("title*", "summary"),
        subagent=("review",),
        models={"*-small": "side"},
    )
    inside = json.dumps({"session_id": "s1"})  # a JSON string, which some programs send
    body = json.dumps({"metadata": {"user_id": inside}, "prompt_cache_key": "k", "meta": {"parent": 7}}).encode()
    assert read(signals, {"x-thread": "t"}, body, "m") == Told("t", "7", "")
    assert read(signals, {}, body, "m").thread == "s1"
    assert read(signals, {}, b'{"prompt_cache_key": "k"}', "m").thread == "k"
    assert read(signals, {"x-kind": "title-1"}, b"{}", "m").role == "side"
    assert read(signals, {"x-kind": "review"}, b"{}", "m").role == "subagent"
    assert read(signals, {"x-kind": "chat"}, b"{}", "m-small").role == "side"
    assert read(signals, {"x-kind": "chat"}, b"{}", "m").role == ""
    assert alias(signals, "m-small") and not alias(signals, "m")


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"metadata": 3}', b'{"metadata": {"user_id": "{"}}', b"\xff"])
def test_what_cannot_be_read_is_no_signal(body: bytes) -> None:
    assert read(Signals(thread=("body:metadata.user_id.session_id",)), {}, body, "m") == Told()


def test_a_source_of_another_kind_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="thread"):
        msgspec.convert({"thread": ["cookie:x"]}, Signals)


async def test_calls_to_the_small_model_are_side_calls_and_not_trained(world: World) -> None:
    agent = world.agent(model="m", signals=Signals(models={"m-small": "side"}))
    agent.messages = [SYSTEM, user("Fix the bug.")]
    # With tools, and first: by structure alone it would be the main line.
    await agent.call(say(world, "A title"), messages=[user("Give it a title")], model="m-small")
    await agent.call(say(world, "Done."))
    assert role_list(agent) == ["side", "main"]
    [row] = samples(agent.session.trace)
    assert [span.role for span in row.spans] == ["main"]
    refused = await agent.call(say(world, "x"), model="m-large")
    assert refused.status == 404
    world.queue.clear()
    check(agent.session, [g.prompt for g in agent.world.engine.received])


async def test_a_conversation_with_a_parent_is_a_sub_agents(world: World) -> None:
    signals = Signals(thread=("body:thread",), parent=("body:parent",))
    agent = world.agent(signals=signals)
    # The same beginning as the parent's: by structure it would be a branch of it, or compaction.
    agent.messages = [SYSTEM, user("Fix the bug.")]
    await agent.call(say(world, "I ask a helper."), thread="a")
    await agent.call(say(world, "Found it."), thread="b", parent="a", messages=[SYSTEM, user("Look for it.")])
    assert role_list(agent) == ["main", "subagent"]


async def test_a_new_beginning_of_the_same_conversation_is_not_a_sub_agents(world: World) -> None:
    agent = world.agent(signals=Signals(thread=("body:thread",)))
    agent.messages = [SYSTEM, user("Fix the bug.")]
    await agent.call(say(world, "Working."), thread="a")
    compacted = [{"role": "system", "content": "You go on."}, user("So far: …")]
    await agent.call(say(world, "Going on."), thread="a", messages=compacted)
    await agent.call(say(world, "Helping."), thread="b", messages=[*compacted, user("Help.")])
    assert role_list(agent) == ["main", "main", "subagent"]
    assert [n.info.cause for n in agent.session.trace.roots] == [None, "compaction", "subagent"]
    reloaded = world.gateway.store.load(world.gateway.store.find(agent.session_id))
    assert [n.info.told.thread for n in reloaded.trace.roots] == ["a", "a", "b"]
