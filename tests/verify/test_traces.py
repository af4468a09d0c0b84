"""Verify passes for what the gateway records, for every model, dialect and agent."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests import kit, sdk_agents
from tests.exact.agent import World
from tests.exact.test_property import follow, make_turn, play
from tests.exact.test_rows import SYSTEM, say, talk, user
from tests.golden import recording
from tests.golden.replay import play as replay
from tests.kit import calls
from tests.renderer_fixtures import renderer_params
from tests.verify.kit import verdict, verify_all
from turngate.engines.scripted import ScriptedTurn
from turngate.store.outcomes import RecordedOutcome
from turngate.types import Limits
from turngate.verify import Verdict

KINDS = ["go on", "go on, respelled", "go on, streamed", "retry", "edit", "compact", "tools", "two at once", "back"]
SAID = [
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
TEXTS = ["ok", "Größe 👍🏽\n", "  x\n\n", "<think>x</think>", "é\u0301 汉字", "\n", ' <b> {"a": 1}', "<tool_call>"]
MODELS = ["qwen3", "qwen2_5", "llama3_1", "deepseek_v3", "smollm2", "family:qwen3", "family:deepseek-v3", "builtin"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", renderer_params(MODELS))
def test_random_conversations(name: str, renderers: Any, verified: list[Verdict]) -> None:
    draw = random.Random(name)
    for seed in range(12):
        steps = [
            (draw.choice(KINDS), draw.choice(SAID), f"{draw.choice(TEXTS)} {n}") for n in range(draw.randrange(1, 9))
        ]
        asyncio.run(play(renderers(name), steps, seed, evicts=bool(seed % 2)))
    assert len(verified) == 12
    assert all({f.part for f in found.findings} >= {"structure", "rows", "render", "replay"} for found in verified)


@pytest.mark.parametrize("name", renderer_params(["qwen3", "deepseek_v3", "builtin"]))
async def test_long_rollout_is_one_row(name: str, renderers: Any, tmp_path: Path) -> None:
    renderer, draw = renderers(name), random.Random(4)
    async with World.of(tmp_path, renderer) as world:
        agent = world.agent()
        agent.messages = [SYSTEM, user("Fix the bug.")]
        for n in range(24):
            kind = ("think+call", "calls", "think", "random")[n % 4]
            follow(agent, await agent.call(make_turn(renderer, kind, f"step {n}", draw)), f"output {n}")
    [found] = verify_all(tmp_path, renderer=renderer)
    assert (found.counts.turns, found.counts.rows, found.forks) == (24, 1, ())
    assert found.counts.trained_tokens == found.counts.sampled_tokens


@pytest.mark.sample(4)
@pytest.mark.parametrize("dialect", sdk_agents.DIALECTS)
@pytest.mark.parametrize("stream", [True, False])
async def test_each_dialect(dialect: str, stream: bool, verified: list[Verdict]) -> None:
    both = calls(("list_files", {"path": "."}), ("read_file", {"path": "a.py"}))
    script = [
        kit.say(f"<think>\nI look.\n</think>\n\nLet me see.\n{both}"),
        kit.say("<think>\nWell.\n</think>\n\nIt is short."),
        kit.say("Größe 👍🏽", close=False),
        kit.say("Done."),
    ]
    async with kit.gateway(script) as g:
        session = await g.open()
        async with sdk_agents.agent(dialect, g.root, session.key, stream=stream) as agent:
            await agent.ask("What is there?")
            await agent.answer({"list_files": "a.py\n", "read_file": "print(1)"})
            await agent.ask("How large?")
            await agent.ask("Thanks.")
        await g.seal(session.id)
    [found] = verified
    assert (found.counts.turns, found.counts.rows) == (4, 1)
    assert not found.notes and [missing.part for missing in found.unchecked] == []


async def test_calls_without_an_object_of_earlier_versions_are_noted(
    verified: list[Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>'
    async with kit.gateway([kit.say(reply)]) as g:
        session = await g.open()
        with monkeypatch.context() as earlier:
            earlier.setattr("turngate.render.call_syntax.require_object", lambda text: None)
            async with sdk_agents.agent("chat", g.root, session.key, stream=False) as agent:
                await agent.ask("Call f.")
        await g.seal(session.id)
    [found] = verified
    assert found.ok and [note.check for note in found.notes] == ["calls"]


@pytest.mark.parametrize("name", recording.NAMES)
async def test_golden_recordings(name: str, verified: list[Verdict]) -> None:
    await replay(recording.read(name))
    [found] = verified
    assert found.counts.rows == (2 if name in ("claude-code-subagent", "opencode-subagent") else 1)
    assert {fork.cause for fork in found.forks} <= {"sub-agent", "side call"}


async def test_stop_strings_and_tool_choice(verified: list[Verdict]) -> None:
    two = calls(("read_file", {"path": "a"}), ("read_file", {"path": "b"}))
    script = [kit.say("one STOP two"), kit.say(f"First.\n{two}"), kit.say('{"path": "c"}'), kit.say('{"a": 1}')]
    async with kit.gateway(script) as g:
        session = await g.open()
        await g.ask(session.key, "count", stop=["STOP"], tools=[kit.tool()])
        await g.ask(session.key, "read", parallel_tool_calls=False, tools=[kit.tool()])
        forced: Any = {"type": "function", "function": {"name": "read_file"}}
        await g.ask(session.key, "read it", tool_choice=forced, tools=[kit.tool()])
        await g.ask(session.key, "as JSON", response_format={"type": "json_object"}, tools=[kit.tool()])
    [found] = verified
    assert found.counts.turns == 4 and not found.notes


async def test_limits_aborts_and_restarts(tmp_path: Path, renderers: Any) -> None:
    async with World.of(tmp_path, renderers("builtin")) as world:
        agent = world.agent(limits=Limits(sampled_tokens=12))
        agent.messages = [SYSTEM, user("work")]
        await talk(agent, "one two three")
        assert (await agent.call(ScriptedTurn(say(world, "gone").ids, cut_after=1))).status != 200
        session = agent.session_id
        key = agent.key
    async with World.of(tmp_path, renderers("builtin")) as world:
        again = type(agent)(world, session, key)
        again.messages = agent.messages
        await talk(again, "four five six seven eight nine ten eleven twelve")
    [found] = verify_all(tmp_path)
    assert found.counts.turns == 3


async def test_recorded_outcomes(verified: list[Verdict]) -> None:
    deep: Any = "x"
    for _ in range(150):
        deep = [deep]
    ended = [
        RecordedOutcome(
            kind="graded", reward=1.0, resolved=True, group="g", task="t", attempt=3, data={"é\u2028": deep}
        ),
        RecordedOutcome(kind="graded", reward=-1e300, data=2**63),
        RecordedOutcome(kind="graded"),
        RecordedOutcome(kind="agent failed", reward=0.0, message="it\x00 gave up"),
        RecordedOutcome(kind="invalid task", message="no grader"),
        RecordedOutcome(kind="infrastructure fault", data="x" * 260_000),
    ]
    async with kit.gateway([kit.say("Hello.")] * len(ended)) as g:
        for n, outcome in enumerate(ended):
            session = await g.open()
            await g.ask(session.key, "Hi")
            await (g.seal(session.id) if n else g.cancel(session.id))
            response = await g.admin.put(f"/admin/sessions/{session.id}/outcome", content=msgspec.json.encode(outcome))
            assert response.status_code == 200, response.text
    assert len(verified) == len(ended)
    checked = [f.where for found in verified for f in found.findings if f.check == "outcome"]
    assert checked and "0 checked" not in checked


async def test_observed_session_without_rendering(tmp_path: Path) -> None:
    from tests.exact.agent import asgi
    from tests.exact.test_attacks import FakeEndpoint
    from turngate.config import ServeConfig
    from turngate.engines.base import RelayChunk
    from turngate.server.app import Gateway
    from turngate.trace.session import SessionConfig
    from turngate.types import Delta

    chunks = [RelayChunk((Delta("content", "a"),), [10], [-0.1], [1, 2, 3], finish="stop")]
    config = ServeConfig(data=str(tmp_path), engine="openai", engine_url=["http://127.0.0.1:1"])
    gateway = Gateway(config, relay=FakeEndpoint(chunks))
    await gateway.start()
    _, key = gateway.sessions.open(SessionConfig(mode="observe", sampling={"temperature": 1.0}))
    body = b'{"messages": [{"role": "user", "content": "x"}]}'
    await asgi(gateway, "POST", "/v1/chat/completions", body, [(b"authorization", f"Bearer {key}".encode())])
    await gateway.stop()
    found = verdict(tmp_path, replay=False)
    assert found.ok and found.counts.trained_tokens == 1
    assert {missing.part for missing in found.unchecked} == {"render"}


async def test_session_can_continue_during_verification(tmp_path: Path, renderers: Any) -> None:
    async with World.of(tmp_path, renderers("builtin")) as world:
        agent = world.agent()
        agent.messages = [SYSTEM, user("work")]
        for n in range(5):
            pending = asyncio.create_task(asyncio.to_thread(verdict, tmp_path, agent.session_id)) if n else None
            await talk(agent, f"step {n}")
            if pending is not None:
                found = await pending
                assert found.ok and found.status == "open", found.wrong


def test_missing_tokenizer_skips_render_checks(tmp_path: Path, renderers: Any) -> None:
    import shutil
    import sqlite3

    from turngate.render import TemplateRenderer, Tokenizer

    own = tmp_path / "tokenizer"
    shutil.copytree(kit.tokenizer().folder, own)

    async def record() -> None:
        async with World.of(tmp_path / "data", TemplateRenderer(Tokenizer(own))) as world:
            agent = world.agent()
            agent.messages = [SYSTEM, user("work")]
            await talk(agent, "a")

    asyncio.run(record())
    assert not verdict(tmp_path / "data").unchecked
    shutil.rmtree(own)
    found = verdict(tmp_path / "data")
    assert found.ok and {missing.check for missing in found.unchecked} == {"context", "parse"}
    assert "does not exist on this machine" in found.unchecked[0].why
    with sqlite3.connect(tmp_path / "data" / "turngate.db") as db:
        db.execute("UPDATE settings SET value=? WHERE name LIKE 'tokenizer:%'", (str(kit.tokenizer().folder),))
    assert not verdict(tmp_path / "data").unchecked


async def test_reused_id_replaced_outcome_and_new_weights_match_events(tmp_path: Path) -> None:
    graded = {"kind": "graded", "reward": 0.1, "resolved": False, "task": "t", "group": "g", "data": {"own": 1}}
    async with kit.gateway([kit.say(word) for word in ("One.", "Two.", "Three.")], data=tmp_path) as g:
        for again in (False, True):
            session = await g.open(id="again", model="")
            hello = kit.user("Hi")
            first = await g.ask(session.key, [hello])
            if again:
                await g.pause()
                await g.resume(7)
                await g.ask(session.key, [hello, first.message(), kit.user("And?")])
            await (g.cancel if again else g.seal)("again")
            for reward in (0.1, 1):
                sent = {**graded, "reward": reward}
                assert (await g.admin.put("/admin/sessions/again/outcome?replace=1", json=sent)).is_success
            if not again:
                assert (await g.admin.delete("/admin/sessions/again")).is_success
    found = verdict(tmp_path, "again", renderer=kit.renderer(), replay=False)
    assert found.ok and found.status == "cancelled" and not found.unchecked, found
    assert "events" in {finding.check for finding in found.findings}
