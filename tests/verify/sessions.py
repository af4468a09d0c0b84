"""Recorded sessions with every kind of turn and branch."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.exact.agent import TOOLS, Agent, World
from tests.exact.test_property import follow
from tests.exact.test_rows import SYSTEM, say, talk, user
from tests.kit import calls
from turngate.engines.scripted import ScriptedTurn
from turngate.trace.signals import Rule, Signals

SIGNALS = Signals(
    thread=("body:thread",),
    rules=(
        Rule(role="side", source="last", match="Summarise*", why="summary"),
        Rule(role="subagent", source="tool:complete", why="helper"),
    ),
)
HELPER = [*TOOLS, {"type": "function", "function": {"name": "complete", "description": "Ends.", "parameters": {}}}]


async def record_sessions(folder: Path, renderer: Any) -> tuple[str, str]:
    """Record two sessions and return their ids.

    The first has thinking, calls, a retry, a cut and an aborted turn, an edit, a branch, a sub-agent, a summary, other tools, another
    system prompt and compaction. The second is short and opens after the first has ended.
    """
    async with World.of(folder, renderer) as world:
        first = world.agent(signals=SIGNALS)
        await record_branches(first, world)
        await world.gateway.sessions.seal(first.session_id)
        await asyncio.sleep(0.12)  # so that the times of the sessions differ
        second = world.agent()
        second.messages = [SYSTEM, user("Say something.")]
        await talk(second, "something", "more")
        await world.gateway.sessions.seal(second.session_id)
        return first.session_id, second.session_id


async def record_branches(agent: Agent, world: World) -> None:
    agent.messages = [SYSTEM, user("Fix the bug.")]
    both = calls(("read", {"path": "a.py"}), ("read", {"path": "b.py"}))
    follow(agent, await agent.call(say(world, f"<think>\nWhere is it?\n</think>\n\nI look.\n{both}")), "text")
    await agent.call(say(world, "lost on the way"))
    follow(agent, await agent.call(say(world, calls(("write", {"path": "a.py", "n": 1}))), retried=True), "done")
    follow(agent, await agent.call(say(world, "a long answer that is cut off here"), max_tokens=4), "go on")
    main = list(agent.messages)
    cut = say(world, "a turn that dies in the middle of it")
    assert (await agent.call(ScriptedTurn(cut.ids, cut_after=5))).status != 200
    follow(agent, await agent.call(say(world, "Fixed."), retried=True), "and now?")
    await talk(agent, "Nothing.")
    await agent.call(say(world, "We fixed it."), messages=[*agent.messages, user("Summarise it.")])
    agent.messages = [*main[:3], *main[3:5], user("another way")]
    await talk(agent, "Yes.")
    agent.messages = [dict(m) for m in main]
    agent.messages[2] = {"role": "assistant", "content": "What the model never said."}
    del agent.messages[3:5]
    await talk(agent, "Strange.")
    agent.tools = HELPER
    agent.messages = [{"role": "system", "content": "You explore."}, user("Find the file.")]
    await talk(agent, "x", "y")
    agent.tools = TOOLS[:1]
    agent.messages = [SYSTEM, user("Fix the bug.")]
    await talk(agent, "With fewer tools.")
    agent.messages = [{"role": "system", "content": "You are another agent."}, user("Fix the bug.")]
    await talk(agent, "With other words.")
    agent.tools = TOOLS
    agent.messages = [SYSTEM, user("Fix the bug.\n\nSo far: all is done.")]
    await talk(agent, "Good.")
    await agent.call(say(world, "Biased."), response_format={"type": "json_object"})
