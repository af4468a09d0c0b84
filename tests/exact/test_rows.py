"""Rows, roles and causes of typical conversations."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.exact.agent import TOOLS, Agent, World
from tests.exact.invariants import check_invariants
from tests.exact.test_property import follow, make_turn
from tests.renderer_fixtures import renderer_params
from turngate.engines.scripted import ScriptedTurn
from turngate.trace.roles import assign_roles
from turngate.trace.sample import build_samples

SYSTEM = {"role": "system", "content": "You are a coding agent."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.fixture
async def world(tmp_path: Any, renderers: Any):
    async with World.of(tmp_path, renderers("builtin")) as world:
        yield world


def say(world: World, text: str) -> ScriptedTurn:
    renderer = world.gateway.renderer
    return ScriptedTurn([*renderer.tokenizer.encode(text), renderer.stop_ids[0]])


async def talk(agent: Agent, *replies: str) -> None:
    for n, text in enumerate(replies):
        follow(agent, await agent.call(say(agent.world, text)), f"next {n}")


def causes(agent: Agent) -> list[str]:
    return [n.info.cause for n in agent.session.trace.turns() if n.info.cause]


def role_list(agent: Agent) -> list[str]:
    found = assign_roles(agent.session.trace)
    return [found[turn.id] for turn in agent.session.trace.turns()]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", renderer_params(["qwen3", "qwen2_5", "llama3_1", "deepseek_v3", "family:deepseek-v3", "builtin"])
)
async def test_forty_turns_with_thinking_and_tools_are_one_row(name: str, renderers: Any, tmp_path: Any) -> None:
    import random

    renderer, draw = renderers(name), random.Random(4)
    async with World.of(tmp_path, renderer) as world:
        agent = world.agent()
        agent.messages = [SYSTEM, user("Fix the bug.")]
        for n in range(40):
            kind = ("think+call", "calls", "think", "random")[n % 4]
            follow(
                agent, await agent.call(make_turn(renderer, kind, f"step {n}", draw), stream=bool(n % 2)), f"output {n}"
            )
        check_invariants(agent.session, [g.prompt for g in world.engine.received])
        (row,) = build_samples(agent.session.trace)
        assert [span.trained for span in row.spans] == [True] * 40
        assert row.trained_tokens == sum(len(turn.ids) for turn in agent.session.trace.turns())


@pytest.mark.parametrize("wrong", [3.0, 1e39, float("inf"), float("-inf")])
async def test_turn_with_invalid_logprob_is_kept_but_not_trained(
    wrong: float, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    agent = world.agent()
    agent.messages = [SYSTEM, user("hi")]
    turn = say(world, "One, two, three.")
    await agent.call(msgspec.structs.replace(turn, logprobs=[-0.5, wrong, *[1e-7] * (len(turn.ids) - 2)]))
    (kept,) = agent.session.trace.turns()
    assert kept.logprobs is not None and np.isnan(kept.logprobs).tolist() == [n == 1 for n in range(kept.size)]
    (row,) = build_samples(agent.session.trace, keep_empty=True)
    assert not row.mask.any() and [span.reason for span in row.spans] == ["missing log-probabilities"]
    # Engines report missing log-probabilities as very low ones, so these cause no warning.
    assert (f"the engine returned an invalid log-probability ({wrong!r})" in caplog.text) == (wrong > 0)


async def test_retry_trains_only_used_answer(world: World) -> None:
    agent = world.agent()
    agent.messages = [SYSTEM, user("hi")]
    await agent.call(say(world, "lost"))
    follow(agent, await agent.call(say(world, "used"), retried=True), "go on")
    await talk(agent, "end")
    assert causes(agent) == ["retry"]
    assert role_list(agent) == ["superseded", "main", "main"]
    (row,) = build_samples(agent.session.trace)
    assert [span.role for span in row.spans] == ["main", "main"]


async def test_resampled_question_is_two_rows(world: World) -> None:
    agent = world.agent()
    agent.messages = [SYSTEM, user("hi")]
    await agent.call(say(world, "one"))
    await agent.call(say(world, "two"))
    assert causes(agent) == ["resample"]
    assert len(build_samples(agent.session.trace)) == 2


async def test_compaction_starts_new_main_row(world: World) -> None:
    agent = world.agent()
    agent.messages = [SYSTEM, user("work")]
    await talk(agent, "a", "b", "c")
    agent.messages = [SYSTEM, user("work\n\nSummary: a, b, c are done.")]
    await talk(agent, "d")
    assert causes(agent) == ["compaction"]
    assert role_list(agent) == ["main"] * 4
    assert sorted(row.trained_tokens > 0 for row in build_samples(agent.session.trace)) == [True, True]


async def test_independent_tasks_are_new_main_rows(world: World) -> None:
    agent = world.agent()
    for task in ("Fix the sum.", "Write a test.", "Delete the file."):
        agent.messages = [SYSTEM, user(task)]
        await talk(agent, "a", "b")
    assert causes(agent) == ["new", "new"]
    assert role_list(agent) == ["main"] * 6
    assert [row.trained_tokens > 0 for row in build_samples(agent.session.trace)] == [True] * 3


async def test_changed_tools_and_system_prompt_fork(world: World) -> None:
    agent = world.agent()
    agent.messages = [SYSTEM, user("work")]
    await talk(agent, "a")
    agent.tools = TOOLS[:1]
    await talk(agent, "b")
    agent.messages[0] = {"role": "system", "content": "You are another agent."}
    await talk(agent, "c")
    assert causes(agent) == ["tools", "system"]
    assert role_list(agent) == ["main"] * 3


async def test_title_call_is_side_call_and_not_trained(world: World) -> None:
    agent = world.agent()
    agent.tools = None
    agent.messages = [{"role": "system", "content": "Write a title."}, user("Fix the bug in main.py")]
    await talk(agent, "Bug fix")
    agent.tools = TOOLS
    agent.messages = [SYSTEM, user("Fix the bug in main.py")]
    await talk(agent, "a", "b")
    assert role_list(agent) == ["side", "main", "main"]
    assert causes(agent) == []
    (row,) = build_samples(agent.session.trace)
    assert {span.role for span in row.spans} == {"main"}


@pytest.mark.parametrize("before", [1, 2])
async def test_title_calls_with_same_question_are_separate(world: World, before: int) -> None:
    agent = world.agent()

    async def title(n: int) -> None:
        agent.tools = None
        agent.messages = [{"role": "system", "content": f"Write a title, of kind {n}."}, user("Fix the bug in main.py")]
        await talk(agent, "Bug fix")

    for n in range(before):
        await title(n)
    agent.tools = TOOLS
    agent.messages = [SYSTEM, user("Fix the bug in main.py")]
    await talk(agent, "a", "b")
    await title(3)
    assert role_list(agent) == [*["side"] * before, "main", "main", "side"]
    assert causes(agent)[before - 1 :] == ["side"]


async def test_subagent_has_its_own_row(world: World) -> None:
    agent = world.agent()
    agent.messages = [SYSTEM, user("work")]
    await talk(agent, "a")
    main_messages = agent.messages
    agent.messages = [{"role": "system", "content": "You explore."}, user("Find the file.")]
    await talk(agent, "x", "y")
    agent.messages = main_messages
    await talk(agent, "b")
    assert causes(agent) == ["subagent"]
    assert role_list(agent) == ["main", "subagent", "subagent", "main"]
    assert len(build_samples(agent.session.trace)) == 2


async def test_edited_first_question_is_not_compaction(world: World) -> None:
    agent = world.agent()
    agent.messages = [SYSTEM, user("Fix the failing test.")]
    await talk(agent, "one", "two", "three")
    agent.messages[1] = user("Fix the BROKEN test.")
    await talk(agent, "four")
    assert causes(agent) == ["edited"]


async def test_edited_model_reply_forks_and_is_not_trained(world: World) -> None:
    agent = world.agent()
    agent.messages = [SYSTEM, user("work")]
    await talk(agent, "a", "b")
    agent.messages[4] = {"role": "assistant", "content": "something the model never said"}
    await talk(agent, "c")
    assert causes(agent) == ["edited"]
    rows = build_samples(agent.session.trace)
    trained = sum(row.trained_tokens for row in rows)
    assert trained == sum(len(t.ids) for t in agent.session.trace.turns())


@pytest.mark.promise(3)
async def test_branch_trains_shared_turns_once(world: World) -> None:
    agent = world.agent()
    agent.messages = [SYSTEM, user("work")]
    await talk(agent, "a", "b", "c")
    agent.messages = [*agent.messages[:3], user("another way")]
    await talk(agent, "d")
    assert causes(agent) == ["branch"]
    rows = build_samples(agent.session.trace)
    assert len(rows) == 2
    assert sum(row.trained_tokens for row in rows) == sum(len(t.ids) for t in agent.session.trace.turns())
    assert [s.reason for row in rows for s in row.spans if not s.trained] == ["trained in another row"]


@pytest.mark.needs("tokenizers")
async def test_dropped_thinking_forks(renderers: Any, tmp_path: Any) -> None:
    renderer = renderers("qwen3")
    async with World.of(tmp_path, renderer) as world:
        kept, dropped = world.agent(), world.agent(thinking="drop")
        for agent in (kept, dropped):
            agent.tools = None
            agent.messages = [user("hi")]
            for n in range(3):
                reply = await agent.call(say(world, f"<think>\nthought {n}\n</think>\n\nanswer {n}"))
                follow(agent, reply, f"and {n}?")
        assert causes(kept) == []
        assert causes(dropped) == ["template", "template"]
        texts = [renderer.tokenizer.decode(g.prompt.tolist()) for g in world.engine.received]
        assert "thought 1" in texts[2]
        assert "thought 0" not in texts[5]
        assert "thought 1" not in texts[5]


async def test_truncated_turn_is_closed_by_context(world: World) -> None:
    agent = world.agent()
    agent.messages = [SYSTEM, user("work")]
    reply = await agent.call(say(world, "this is cut off here"), max_tokens=3)
    assert reply.finish == "length"
    follow(agent, reply, "go on")
    await talk(agent, "done")
    (row,) = build_samples(agent.session.trace)
    first, second = row.spans
    assert first.end - first.start == 3
    between = world.gateway.renderer.tokenizer.decode(row.ids[first.end : second.start].tolist())
    assert between.startswith("<|im_end|>\n<|im_start|>user\ngo on")
    assert not row.mask[first.end : second.start].any()
