"""Tests with real agents for sub-agents, compaction, context overflow and aborted turns.

In every case the trace names the role of each turn, and each turn is trained once.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.agents_real import kit
from tests.agents_real.kit import Branch, Check, Prepare, branches, call, findings, model_step, shell, turns
from tests.speed import scaled
from turngate.agents.launch import ModelLimits
from turngate.agents.spec import CheckCall, find_agent
from turngate.rollout.agent_check import CheckOptions
from turngate.rollout.playbook import Scene

pytestmark = pytest.mark.full
TASK = "MAIN-TASK: find out how long notes.txt is."


# ── sub-agents ──────────────────────────────────────────────────────────────────────────────────────────────────────


def start_subagent(agent: str, task: str) -> CheckCall:
    """Make the agent's call that starts a sub-agent."""
    match agent:
        case "opencode":
            return call("task", description="Count", prompt=task, subagent_type="general")
        case "claude-code":
            return call("Agent", description="Count", prompt=task, subagent_type="general-purpose")
        case "qwen-code":
            return call("agent", description="Count", prompt=task, subagent_type="general-purpose")
        case "copilot-cli":
            settings = {"name": task[:6].lower(), "agent_type": "general-purpose", "mode": "sync"}
            return call("task", description="Count", prompt=task, **settings)
        case "kimi-code":
            return call("Agent", description="Count", prompt=task, subagent_type="coder")
        case _:
            return call("invoke_agent", agent_name="generalist", prompt=task)


def finish_subagent(agent: str, text: str) -> Any:
    """Make the sub-agent's final step."""
    return (
        model_step("", call("complete_task", result={"response": text})) if agent == "gemini-cli" else model_step(text)
    )


@pytest.mark.parametrize(
    "agent",
    kit.agents(
        *("claude-code", "opencode", "gemini-cli", "qwen-code", "kimi-code", "copilot-cli"),
        only=("claude-code", "gemini-cli"),
    ),
)
async def test_concurrent_subagents_are_separate_branches(run: Check, agent: str) -> None:
    def scenes(workdir: str) -> tuple[Scene, ...]:
        counts = (
            model_step(
                "Two helpers.",
                start_subagent(agent, "HELP-1: count the lines of notes.txt"),
                start_subagent(agent, "HELP-2: count the words of notes.txt"),
            ),
            model_step("Done."),
        )
        look = {unit: model_step("I count.", shell(agent, f"wc -{unit} notes.txt"), think="Hm.") for unit in "lw"}
        return (
            Scene("MAIN-TASK", counts),
            Scene("HELP-1", (look["l"], finish_subagent(agent, "Three lines.")), pace_s=0.1),
            Scene("HELP-2", (look["w"], finish_subagent(agent, "Three words.")), pace_s=0.1),
        )

    report = await run(agent, options=CheckOptions(scenes=scenes, instruction=TASK))
    assert report.passed, findings(report)
    own, *others = [branch for branch in branches(report) if "side" not in branch.roles]
    assert own.cause is None and set(own.roles) == {"main"}
    assert others == [Branch("subagent", ("subagent", "subagent"))] * 2
    assert kit.rows(report, "main") == 1 and kit.rows(report, "subagent") == 2
    assert kit.trained_once(report)
    one, other = (
        [turn for turn in turns(report, "subagent") if turn.id in {span.node for span in row.spans}]
        for row in report.samples
        if any(span.role == "subagent" for span in row.spans)
    )
    assert one[0].started < other[-1].ended and other[0].started < one[-1].ended, (
        "the sub-agents did not run concurrently"
    )


@pytest.mark.real
@pytest.mark.needs("agent:codex")
async def test_codex_subagent_is_separate_branch(run: Check) -> None:
    spawn = model_step("", call("multi_agent_v1__spawn_agent", message="HELP-1: count the lines"))
    wait = model_step("", call("multi_agent_v1__wait_agent", targets=["{helper}"], timeout_ms=int(1000 * scaled(20))))
    look = model_step("I count.", shell("codex", "wc -l notes.txt"), think="Hm.")
    scenes = (
        Scene("MAIN-TASK", (spawn, wait, model_step("Done.")), finds={"helper": r'"agent_id":\s*"([^"]+)"'}),
        Scene("HELP-1", (look, model_step("Three lines."))),
    )
    report = await run("codex", options=CheckOptions(scenes=lambda workdir: scenes, instruction=TASK))
    assert report.passed, findings(report)
    assert branches(report) == [Branch(None, ("main",) * 3), Branch("subagent", ("subagent",) * 2)]
    assert kit.rows(report, "main") == kit.rows(report, "subagent") == 1 and kit.trained_once(report)


@pytest.mark.needs("agent:codex")
async def test_codex_subagent_with_inherited_history_forks(run: Check) -> None:
    look = call("exec", input="text((await tools.exec_command({cmd: 'wc -l notes.txt'})).output)")
    spawn = model_step("", call("collaboration__spawn_agent", task_name="count", message="Count the lines."))
    wait = model_step("", call("collaboration__wait_agent", timeout_ms=int(1000 * scaled(20))))
    scenes = (
        Scene(
            "You are now a newly spawned child agent",
            (model_step("I count.", look), model_step("Three lines.")),
            begins=1,
        ),
        Scene("MAIN-TASK", (spawn, wait, model_step("Done."))),
    )
    # Codex offers its newer multi-agent tools only to known model names.
    options = CheckOptions(scenes=lambda workdir: scenes, instruction=TASK, model="gpt-6.1-sol")
    report = await run("codex", options=options)
    assert report.passed, findings(report)
    assert branches(report) == [Branch(None, ("main",) * 3), Branch("subagent", ("subagent",) * 2)]
    [shared] = [row for row in report.samples if row.spans[-1].role == "subagent"]
    assert [span.role for span in shared.spans] == ["main", "subagent", "subagent"]
    assert [span.trained for span in shared.spans] == [False, True, True]
    assert kit.rows(report, "main") == 1 and kit.trained_once(report)


@pytest.mark.needs("agent:aider")
async def test_aider_architect_and_commit_message_have_their_roles(run: Check) -> None:
    """The architect plans, its editor makes the changes, and the side model writes the commit message."""
    edit = find_agent("aider").spec.check[0]
    scenes = (
        Scene("generates concise, one-line Git commit messages", (model_step("fix: spelling"),), tools=False),
        Scene("expert software developer who edits source code", (edit,), tools=False),
        Scene("MAIN-TASK", (model_step("PLAN: change colour to color in notes.txt."),), tools=False),
    )
    settings = {"format": "architect", "git": "--git", "commits": "--auto-commits"}
    report = await run("aider", options=CheckOptions(scenes=lambda workdir: scenes, instruction=TASK, options=settings))
    assert report.passed, findings(report)
    assert branches(report) == [Branch(None, ("main",)), Branch("subagent", ("subagent",)), Branch("side", ("side",))]
    assert kit.rows(report, "main") == kit.rows(report, "subagent") == 1 and kit.trained_once(report)


# ── compaction ──────────────────────────────────────────────────────────────────────────────────────────────────────

SUMMARY_PROMPTS = {
    "claude-code": "CRITICAL: Respond with TEXT ONLY",
    "opencode": "You are a context summarization agent",
    "codex": "CONTEXT CHECKPOINT COMPACTION",
    "qwen-code": "You are the component that summarizes a conversation",
    "kimi-code": "You are about to run out of context. Create a handoff summary",
}
SUMMARY = "SUMMARY-OF-ALL: much was printed. Next: look once more."


def long_work(agent: str, long: int) -> Any:
    """Scenes with `long` long outputs, a short one and an end; after a summary, the agent looks once more."""

    def scenes(workdir: str) -> tuple[Scene, ...]:
        printing = [model_step(f"Part {n}.", shell(agent, "seq 1 1900")) for n in range(long)]
        end = model_step("", call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"))
        summary = model_step(f"<summary><state_snapshot>{SUMMARY}</state_snapshot></summary>")
        return (
            Scene(SUMMARY_PROMPTS.get(agent, "no such words"), (summary,), tools=False),
            Scene("LOOKED-AGAIN", (model_step("Done."),)),
            Scene("SUMMARY-OF-ALL", (model_step("Once more.", shell(agent, "echo LOOKED''-AGAIN")),)),
            Scene(
                "MAIN-TASK",
                (
                    *printing,
                    model_step("A little.", shell(agent, "seq 1 100")),
                    end if "mini" in agent else model_step("Done."),
                ),
            ),
        )

    return scenes


# The configured context length of each agent, and the number of long outputs that nearly fill it.
WINDOWS = {
    "claude-code": (57000, 3),
    "opencode": (28500, 2),
    "codex": (45000, 3),
    "qwen-code": (70000, 3),
    "kimi-code": (62000, 3),
}


@pytest.mark.parametrize("agent", kit.agents(*WINDOWS, only=("claude-code", "codex")))
async def test_compaction_starts_new_branch(run: Check, agent: str) -> None:
    tokens, long = WINDOWS[agent]
    limits = ModelLimits(context_tokens=tokens, max_output_tokens=2000)
    report = await run(
        agent, options=CheckOptions(scenes=long_work(agent, long), instruction=TASK, model_limits=limits)
    )
    assert report.passed, findings(report)
    assert SUMMARY in turns(report, "summary")[-1].decode_message().content, "the summary has a different role"
    own, side, *after = [branch for branch in branches(report) if branch.cause or "main" in branch.roles]
    assert own.cause is None and set(own.roles) == {"main"}
    assert side == Branch("side", ("summary",))
    # Qwen Code re-inserts its fixed context one turn after a summary, which makes a second branch.
    each = [("main",), ("main",)] if agent == "qwen-code" else [("main", "main")]
    assert after == [Branch("compaction", roles) for roles in each]
    assert kit.trained_once(report)


# ── context shorter than configured ─────────────────────────────────────────────────────────────────────────────────────────────

# OpenCode continues after its summary, but its exit code reports the rejected call.
COMPACTS = {"claude-code": ("finished", 40000), "opencode": ("failed", 25000), "qwen-code": ("finished", 45000)}
ENDS = {  # regardless of the exit code
    "codex": ("limit", 25000),
    "gemini-cli": ("limit", 30000),
    "pi": ("limit", 10000),
    "mini-swe-agent": ("limit", 10000),
}


@pytest.mark.parametrize("agent", kit.agents(*COMPACTS, *ENDS, only=("claude-code", "codex", "pi")))
async def test_context_overflow_compacts_or_ends(run: Check, agent: str) -> None:
    status, most = {**COMPACTS, **ENDS}[agent]
    options = CheckOptions(scenes=long_work(agent, 4), instruction=TASK, max_context=most, timeout_s=60)
    report = await run(agent, options=options)
    assert report.outcome.status == status, findings(report)
    causes = [branch.cause for branch in branches(report)]
    if agent in COMPACTS:
        assert "compaction" in causes and "side" in causes, findings(report)
        assert turns(report, "main")[-1].decode_message().content == "Done."
    else:
        assert causes == [None]
        assert kit.rows(report, "main") == 1
    assert kit.trained_once(report)
    assert all(len(row.ids) < most for row in report.samples)


# ── turns ended midway ──────────────────────────────────────────────────────────────────────────────────────────────

SPEECH = "word " * 400


def slow_third_turn(agent: str) -> CheckOptions:
    """Two quick turns, then a slow one."""
    quick = [model_step("Look.", shell(agent, "cat notes.txt")), model_step("Print.", shell(agent, "echo SLOW''LY"))]
    scenes = (Scene("SLOWLY", (model_step(SPEECH),), pace_s=0.2), Scene("MAIN-TASK", tuple(quick)))
    return CheckOptions(scenes=lambda workdir: scenes, instruction=TASK)


def assert_third_turn_aborted(report: Any) -> None:
    """Check that two turns are complete and the third has the tokens sampled so far."""
    [turn] = turns(report, "aborted")
    assert turn.finish == "abort" and turn.fault and turn.logprobs is not None
    assert 0 < len(turn.ids) < len(SPEECH.split()) and len(turn.logprobs) == len(turn.ids)
    assert SPEECH.startswith(turn.decode_message().content.strip())
    main = [branch for branch in branches(report) if "main" in branch.roles]
    assert main == [Branch(None, ("main", "main", "aborted"))], findings(report)
    assert kit.rows(report, "main") == 1 and kit.trained_once(report)
    [exact] = [finding for finding in report.results if "every recorded token id" in finding.name]
    assert exact.ok


async def wait_for_third_turn(engine: Any, agent: str) -> None:
    calls = 4 if agent == "opencode" else 3
    await kit.until(lambda: len(engine.received) == calls and engine.in_flight)
    await asyncio.sleep(scaled(0.25))  # a few of several hundred tokens


@pytest.mark.parametrize(
    "agent", kit.agents("pi", "codex", "claude-code", "gemini-cli", "opencode", only=("pi", "codex"))
)
async def test_agent_killed_mid_turn(prepare: Prepare, agent: str, root: Path) -> None:
    async with prepare(agent, options=slow_third_turn(agent)) as ready:
        running = asyncio.create_task(ready.run())
        await wait_for_third_turn(ready.engine, agent)
        for pid, command in kit.processes_of(root).items():
            if "supervisor.py" not in command and "relay." not in command:
                os.kill(pid, signal.SIGKILL)
        report = await running
    assert report.outcome.status == "failed" and report.outcome.exit_code == 137, findings(report)
    assert ready.engine.aborted == 1, "the engine did not abort the call"
    assert not report.outcome.collected.differences, "the agent's own log differs from the trace"
    assert_third_turn_aborted(report)


@pytest.mark.needs("agent:claude-code")
async def test_session_cancelled_mid_turn(prepare: Prepare) -> None:
    async with prepare("claude-code", options=slow_third_turn("claude-code")) as ready:
        running = asyncio.create_task(ready.run())
        await wait_for_third_turn(ready.engine, "claude-code")
        await ready.gateway.cancel(ready.rollout.outcome.session)
        report = await asyncio.wait_for(running, scaled(20))
    assert report.outcome.status == "cancelled" and "cancelled" in report.outcome.stop, findings(report)
    assert_third_turn_aborted(report)


@pytest.mark.needs("agent:pi")
async def test_rollout_cancelled_mid_turn(prepare: Prepare) -> None:
    async with prepare("pi", options=slow_third_turn("pi")) as ready:
        running = asyncio.create_task(ready.run())
        await wait_for_third_turn(ready.engine, "pi")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        report = await ready.build_report()
    assert report.outcome.status == "cancelled", findings(report)
    assert_third_turn_aborted(report)
