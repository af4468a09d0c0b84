"""Fork reports: why an agent left a line, at which token, and what it cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.exact.agent import TOOLS, Agent, World
from tests.exact.test_property import follow
from tests.exact.test_rows import SYSTEM, role_list, say, talk, user
from tests.kit import calls
from tests.render.test_template import CHATML, folder_with
from tests.verify.kit import verify_all
from turngate.engines.scripted import ScriptedTurn
from turngate.render import Renderer, load_renderer
from turngate.trace.sample import build_samples
from turngate.verify import ForkReport


async def forks(folder: Path, renderer: Renderer, run: Any, **config: Any) -> list[ForkReport]:
    """Record one session and return its forks."""
    async with World.of(folder, renderer) as world:
        agent = world.agent(**config)
        agent.messages = [SYSTEM, user("Fix the bug.")]
        await run(agent, world)
    [found] = verify_all(folder, renderer=renderer)
    return list(found.forks)


@pytest.mark.needs("tokenizers")
async def test_template_drops_thinking(renderers: Any, tmp_path: Path) -> None:
    async def run(agent: Agent, world: World) -> None:
        agent.tools = None
        await talk(agent, "<think>\nthought\n</think>\n\nanswer", "another")

    [fork] = await forks(tmp_path, renderers("qwen3"), run, thinking="drop")
    assert (fork.recorded, fork.cause, fork.detail) == ("template", "thinking dropped", "by the template from turn 2")
    assert fork.before.endswith("<|im_start|>assistant\n")
    assert (fork.was, fork.now[:6]) == ("<think>\nthought\n</think>\n\n", "answer")
    assert fork.sent > 0 and fork.shared == fork.token, "both rows are trained and share a prefix"


async def test_template_rewrites_json(renderers: Any, tmp_path: Path) -> None:
    async def run(agent: Agent, world: World) -> None:
        text = '<tool_call>\n{"name":"read","arguments":{"path":"a"}}\n</tool_call>'
        follow(agent, await agent.call(say(world, text)), "content")
        await talk(agent, "done")

    # As with a template that cannot be extended: the past is rendered again, with calls in the template's own JSON.
    [fork] = await forks(tmp_path, renderers("builtin"), run, thinking="drop")
    assert (fork.recorded, fork.cause, fork.detail) == (
        "template",
        "JSON spelling",
        "changed by the template in turn 2",
    )
    assert (fork.was, fork.now) == ('"read","arguments":', ' "read", "arguments":')


@pytest.mark.needs("tokenizers")
@pytest.mark.parametrize(
    ("sampled", "cause", "detail"),
    [
        ("<think>\nthought\n</think>\n\n\n\nanswer", "whitespace", "changed by the template in turn 2"),
        (
            "<think>\nthought\n</think>\n\nans|wer",
            "template",
            "writes turn 2 with ids that differ from the sampled ones",
        ),
    ],
)
async def test_kept_thinking_is_not_reported_as_cause(
    sampled: str, cause: str, detail: str, renderers: Any, tmp_path: Path
) -> None:
    renderer = renderers("qwen3")
    ids = [i for piece in sampled.split("|") for i in renderer.tokenizer.encode(piece)]

    async def run(agent: Agent, world: World) -> None:
        call = renderer.tokenizer.encode("\n" + calls(("read", {"path": "a"})))
        follow(agent, await agent.call(ScriptedTurn([*ids, *call, renderer.stop_ids[0]])), "content")
        await talk(agent, "done")

    [fork] = await forks(tmp_path, renderer, run, thinking="drop")
    assert (fork.recorded, fork.cause, fork.detail) == ("template", cause, detail)


async def test_template_rewrites_past_turns(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    renderer, certificate = load_renderer(
        folder_with(folder, CHATML.replace("{{ m.content }}", "{{ m.content }}{% if not loop.last %} {% endif %}"))
    )
    assert not certificate.passed

    async def run(agent: Agent, world: World) -> None:
        await talk(agent, "a", "b")

    [fork] = await forks(tmp_path / "data", renderer, run)
    assert (fork.recorded, fork.cause) == ("template", "template")


async def test_agent_edits_a_message(renderers: Any, tmp_path: Path) -> None:
    async def run(agent: Agent, world: World) -> None:
        await talk(agent, "The first  answer.", "b")
        agent.messages[2] = {"role": "assistant", "content": "The first answer."}
        await talk(agent, "c")
        agent.messages[2] = {"role": "assistant", "content": "Another answer."}
        await talk(agent, "d")

    found = await forks(tmp_path, renderers("builtin"), run)
    assert [(fork.recorded, fork.cause, fork.detail) for fork in found] == [
        ("edited", "whitespace", "message 3, assistant"),
        ("edited", "edited", "message 3, assistant"),
    ]
    assert "The first" in found[0].before + found[0].was


async def test_agent_clears_call_arguments(renderers: Any, tmp_path: Path) -> None:
    async def run(agent: Agent, world: World) -> None:
        follow(agent, await agent.call(say(world, calls(("write", {"path": "a" * 5000})))), "done")
        agent.messages[2]["tool_calls"][0]["function"]["arguments"] = json.dumps({"path": "(cleared)"})
        await talk(agent, "ok")

    [fork] = await forks(tmp_path, renderers("builtin"), run)
    assert (fork.cause, fork.detail) == ("edited", "message 3, assistant")
    assert "aaaa" in fork.was and "(cleared" in fork.now


@pytest.mark.parametrize(("was", "now"), [("true", '"True"'), ("[false]", '["False"]'), ("1e400", "1e500")])
async def test_changed_value_in_call_arguments_is_an_edit(was: str, now: str, renderers: Any, tmp_path: Path) -> None:
    async def run(agent: Agent, world: World) -> None:
        call = calls(("write", {"value": 0})).replace("0", was)
        follow(agent, await agent.call(say(world, call)), "done")
        agent.messages[2]["tool_calls"][0] |= {
            "id": "new",
            "function": {"name": "write", "arguments": f'{{"value": {now}}}'},
        }
        agent.messages[3]["tool_call_id"] = "new"
        await talk(agent, "ok")

    [fork] = await forks(tmp_path, renderers("builtin"), run)
    assert (fork.cause, fork.detail) == ("edited", "message 3, assistant")


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ("tools", "tools changed"),
        ("system", "system prompt changed"),
        ("sum", "compaction"),
        ("task", "new conversation"),
    ],
)
async def test_restarted_conversation(change: str, cause: str, renderers: Any, tmp_path: Path) -> None:
    async def run(agent: Agent, world: World) -> None:
        await talk(agent, "a", "b")
        match change:
            case "tools":
                agent.tools = TOOLS[:1]
            case "system":
                agent.messages[0] = {"role": "system", "content": "You are another agent."}
            case "sum":
                agent.messages = [SYSTEM, user(f"{agent.messages[1]['content']}\n\nSo far: nothing.")]
            case _:
                agent.messages = [SYSTEM, user("Do something else.")]
        await talk(agent, "c")

    [fork] = await forks(tmp_path, renderers("builtin"), run)
    assert fork.cause == cause
    assert fork.was != fork.now
    assert fork.left is not None and fork.sent > 0


async def test_retry_wastes_first_attempt(renderers: Any, tmp_path: Path) -> None:
    async def run(agent: Agent, world: World) -> None:
        await agent.call(say(world, "lost on the way"))
        follow(agent, await agent.call(say(world, "used"), retried=True), "go on")
        await talk(agent, "end")

    [fork] = await forks(tmp_path, renderers("builtin"), run)
    assert (fork.cause, fork.sent, fork.shared) == ("retry", 0, 0)
    assert fork.wasted == 5 and fork.was.startswith("lost")


async def test_branch_counts_shared_prefix(renderers: Any, tmp_path: Path) -> None:
    async def run(agent: Agent, world: World) -> None:
        await talk(agent, "a", "b")
        agent.messages = [*agent.messages[:3], user("another way")]
        await talk(agent, "c")

    [fork] = await forks(tmp_path, renderers("builtin"), run)
    assert fork.cause == "branch" and fork.shared == fork.token > 0
    assert fork.now == "another way<|im_end|>\n<|im_start|>assistant\n"[: len(fork.now)]


async def test_subagent_fork(renderers: Any, tmp_path: Path) -> None:
    async def run(agent: Agent, world: World) -> None:
        await talk(agent, "a")
        agent.messages = [{"role": "system", "content": "You explore."}, user("Find the file.")]
        await talk(agent, "x")

    [fork] = await forks(tmp_path, renderers("builtin"), run)
    assert (fork.recorded, fork.cause) == ("subagent", "sub-agent")


async def test_tasks_without_system_prompts(renderers: Any, tmp_path: Path) -> None:
    async def run(agent: Agent, world: World) -> None:
        agent.messages = [user("Fix the bug.")]
        await talk(agent, "fixed")
        agent.messages = [user("Write a test.")]
        await talk(agent, "written")

    [fork] = await forks(tmp_path, renderers("builtin"), run)
    assert fork.recorded == "new"


async def test_agents_without_tools_are_trained_and_exact(renderers: Any, tmp_path: Path) -> None:
    """A planner, an executor and commit messages, through the whole gateway: roles from the live trace and from the store agree."""
    plan = "First open the file add.py, then change the minus sign to a plus sign. " * 3
    commit = {"role": "system", "content": "You write commit messages."}

    async with World.of(tmp_path, renderers("builtin")) as world:
        agent = world.agent()
        agent.tools = None
        agent.messages = [{"role": "system", "content": "You plan."}, user("Fix the bug.")]
        await talk(agent, f"<think>\nHow do I begin?\n</think>\n\n{plan}")
        agent.messages = [{"role": "system", "content": "You execute."}, user(f"Do this: {plan}")]
        await talk(agent, "The sign is changed now.")
        for n in range(2):
            main = list(agent.messages)
            agent.messages = [commit, user(f"diff {n}")]
            await talk(agent, f"fix: part {n}")
            agent.messages = main
            await talk(agent, f"Part {n} is done.")
        assert role_list(agent) == ["subagent", "main", "side", "main", "side", "main"]
        rows = build_samples(agent.session.trace)
        assert [{span.role for span in row.spans} for row in rows] == [{"main"}, {"subagent"}]
    [found] = verify_all(tmp_path, renderer=renderers("builtin"))
    assert found.ok, found.wrong
    assert [fork.cause for fork in found.forks] == ["new conversation"] * 3


@pytest.mark.needs("tokenizers")
async def test_continued_line_reports_template_difference_without_fork(renderers: Any, tmp_path: Path) -> None:
    renderer = renderers("qwen3")
    async with World.of(tmp_path, renderer) as world:
        agent = world.agent()
        agent.tools = None
        agent.messages = [user("hi")]
        await talk(agent, "<think>\nthought\n</think>\n\nanswer", "next", "last")
    [found] = verify_all(tmp_path, renderer=renderer)
    assert not found.forks
    [difference] = found.differences
    assert difference.why == "thinking that the template drops was kept" and difference.node == 2
    assert "<think>" in difference.sent and "<think>" not in difference.template
